//! BaseX, which keeps XML documents, from an image such as the official one: a Java virtual machine with its data in a volume.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tranship_lab::{CLIENT, Lab};

use crate::Site;
use crate::image::Image;

const BASEX: Image = Image {
    name: "docker.io/library/basex:lab",
    packages: &["/usr/bin/java"],
    alone: &["basex"],
    owner: ("basex", 1984),
    user: "basex",
    port: 1984,
    volumes: &["/srv/basex/data", "/srv/basex/repo"],
    stop_signal: "SIGTERM",
    own: "",
    start: "cd /srv/basex; set -- /usr/lib/jvm/java-*-openjdk-*/bin/java; \
            exec $1 -cp /usr/share/java/basex.jar -Dorg.basex.DBPATH=/srv/basex/data -Dorg.basex.REPOPATH=/srv/basex/repo \
                 org.basex.BaseXServer",
};

/// A connection to BaseX, logged in (docs.basex.org, "Server Protocol").
struct Session {
    stream: BufReader<TcpStream>,
}

impl Session {
    fn start(lab: &Lab, ip: Ipv4Addr) -> Result<Self> {
        let stream = lab.connect(CLIENT, SocketAddr::from((ip, BASEX.port)), Duration::from_secs(2))?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        stream.set_nodelay(true)?;
        let mut session = Self { stream: BufReader::new(stream) };
        let challenge = session.text()?;
        let (realm, nonce) = challenge.split_once(':').with_context(|| format!("the challenge is {challenge:?}"))?;
        let secret = md5(&format!("{}{nonce}", md5(&format!("admin:{realm}:admin"))?))?;
        session.say(&["admin", &secret])?;
        ensure!(session.succeeds()?, "the login fails");
        Ok(session)
    }

    fn say(&mut self, texts: &[&str]) -> Result<()> {
        let bytes: Vec<u8> = texts.iter().flat_map(|text| [text.as_bytes(), b"\0"].concat()).collect();
        Ok(self.stream.get_mut().write_all(&bytes)?)
    }

    fn text(&mut self) -> Result<String> {
        let mut bytes = Vec::new();
        self.stream.read_until(0, &mut bytes)?;
        ensure!(bytes.pop() == Some(0), "the connection has ended");
        Ok(String::from_utf8(bytes)?)
    }

    fn succeeds(&mut self) -> Result<bool> {
        let mut byte = [0];
        self.stream.read_exact(&mut byte)?;
        Ok(byte == [0])
    }

    /// The result of a command.
    fn ask(&mut self, command: &str) -> Result<String> {
        self.say(&[command])?;
        let (result, told) = (self.text()?, self.text()?);
        ensure!(self.succeeds()?, "{command} fails: {told}");
        Ok(result)
    }
}

fn md5(text: &str) -> Result<String> {
    let mut program = Command::new("md5sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    program.stdin.take().context("no stdin")?.write_all(text.as_bytes())?;
    let output = program.wait_with_output()?;
    Ok(String::from_utf8(output.stdout)?.split_whitespace().next().context("md5sum says nothing")?.to_owned())
}

/// Documents are written and read on two connections that stay; after each move all that was written is there, and so it is when it was started anew.
pub fn are_kept(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let ip = Ipv4Addr::new(10, 77, 0, number);
    BASEX.make(lab, &site.engine)?;
    site.start_image(lab, number, &BASEX, &[])?;
    site.answers(lab, "a", || Ok(Session::start(lab, ip).ok().map(drop)))?;
    site.is_managed(lab, "a", "a line before the moves")?;
    let mut writing = Session::start(lab, ip)?;
    writing.ask("CREATE DB shelf")?;
    // What it has open is the session's own.
    let mut reading = Session::start(lab, ip)?;
    reading.ask("OPEN shelf")?;

    let enough = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&enough);
    let written = std::thread::spawn(move || -> Result<u64> {
        let mut n = 0;
        while !until.load(Ordering::Relaxed) {
            n += 1;
            writing.ask(&format!("ADD TO {n}.xml <book><n>{n}</n><title>{}</title></book>", "x".repeat(200)))?;
            let seen = writing.ask(&format!("XQUERY db:open('shelf', '{n}.xml')/book/n/text()"))?;
            ensure!(seen == n.to_string(), "document {n} has {seen:?}");
        }
        Ok(n)
    });
    let sound = "XQUERY count(//book) = max(//n) and sum(//n) = count(//book) * (count(//book) + 1) div 2";
    let moved = [("a", "b"), ("b", "a")].iter().try_for_each(|(from, to)| {
        site.moves(lab, from, to)?;
        let seen = reading.ask(sound)?;
        ensure!(seen == "true", "on {to} documents are missing: {seen}");
        Ok(())
    });
    let at_work = !written.is_finished();
    enough.store(true, Ordering::Relaxed);
    let written = written.join().map_err(|_| anyhow!("the writing thread panicked"));
    moved?;
    let written = written??;
    ensure!(at_work, "the writing ended before the last move");
    let count =
        "XQUERY string-join((count(db:open('shelf')), count(db:open('shelf')//title), max(db:open('shelf')//n)), ' ')";
    let expected = format!("{written} {written} {written}");
    let seen = reading.ask(count)?;
    ensure!(seen == expected, "there are {seen} documents instead of {written}");
    drop(reading);
    site.is_managed(lab, "a", "a line after the moves")?;

    site.stops_and_starts(lab, "a")?;
    site.answers(lab, "a", || Ok(Session::start(lab, ip).ok().map(drop))).context("after stop and start")?;
    let seen = Session::start(lab, ip)?.ask(count)?;
    ensure!(seen == expected, "after stop and start there are {seen} documents instead of {written}");
    eprintln!("{written} documents, all there");
    site.end(lab, "a")?;
    site.engine.remove_image(lab, BASEX.name)
}
