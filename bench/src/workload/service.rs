use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tranship_lab::resp::{Connection, Reply};
use tranship_lab::{CLIENT, Lab, REDIS_PORT, RunOptions, find_program};

use super::{ADDRESS, LIMIT};

/// A connection from the client node to one of our own programs in the container.
pub struct Service(Connection<TcpStream>);

impl Service {
    /// Runs the program in a container of this name, and connects once it answers.
    pub fn run(lab: &Lab, node: &str, name: &str, program: &str, arguments: &[String]) -> Result<Self> {
        Self::run_at(ADDRESS, lab, node, name, program, arguments)
    }

    /// The same at another address.
    pub fn run_at(
        address: Ipv4Addr,
        lab: &Lab,
        node: &str,
        name: &str,
        program: &str,
        arguments: &[String],
    ) -> Result<Self> {
        let inside = format!("/opt/{program}");
        let mut options = RunOptions::new(address, std::iter::once(inside.clone()).chain(arguments.to_vec()));
        options.binds.push((find_program(program)?, PathBuf::from(inside)));
        lab.run(node, name, &options)?;
        Self::connect_to(lab, address)
    }

    /// Another connection.
    pub fn connect(lab: &Lab) -> Result<Self> {
        Self::connect_to(lab, ADDRESS)
    }

    fn connect_to(lab: &Lab, address: Ipv4Addr) -> Result<Self> {
        let deadline = Instant::now() + LIMIT;
        loop {
            match lab.connect(CLIENT, (address, REDIS_PORT).into(), Duration::from_secs(2)) {
                Ok(stream) => {
                    let mut service = Self(Connection::new(stream));
                    service.call(&["PING"])?;
                    return Ok(service);
                }
                Err(e) if Instant::now() >= deadline => return Err(e).context("the workload does not answer"),
                // It makes its memory before it listens.
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Asks for a number.
    pub fn number(&mut self, command: &str) -> Result<u64> {
        match self.call(&[command])? {
            Reply::Integer(n) => u64::try_from(n).with_context(|| format!("{command} is {n}")),
            other => bail!("the workload's answer to {command} is {other:?}"),
        }
    }

    /// Asks for a text.
    pub fn text(&mut self, command: &[&str]) -> Result<String> {
        match self.call(command)? {
            Reply::Bulk(Some(text)) => Ok(String::from_utf8_lossy(&text).into_owned()),
            other => bail!("the workload's answer to {command:?} is {other:?}"),
        }
    }

    fn call(&mut self, command: &[&str]) -> Result<Reply> {
        match self.0.call(command).with_context(|| format!("asking the workload {command:?}"))? {
            Reply::Error(why) => bail!("the workload says to {command:?}: {why}"),
            reply => Ok(reply),
        }
    }
}
