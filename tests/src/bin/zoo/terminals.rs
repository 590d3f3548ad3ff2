//! Pseudo-terminals.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Result, ensure};
use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::termios::{LocalFlags, OutputFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, getsid, setsid, tcgetpgrp, ttyname};

use crate::kin::Kin;
use crate::raw;
use crate::species::Check;

const COLUMNS: u16 = 132;
const ROWS: u16 = 43;

fn open() -> Result<OpenptyResult> {
    let size = Winsize { ws_col: COLUMNS, ws_row: ROWS, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(Some(&size), None)?;
    let mut mode: Termios = tcgetattr(&pty.slave)?;
    mode.local_flags.remove(LocalFlags::ECHO);
    // CRIU carries output that nobody has read yet by writing it once more, so it must not be processed twice.
    mode.output_flags.remove(OutputFlags::OPOST);
    mode.control_chars[SpecialCharacterIndices::VINTR as usize] = 7;
    tcsetattr(&pty.slave, SetArg::TCSANOW, &mode)?;
    Ok(pty)
}

fn verify(slave: impl AsFd) -> Result<()> {
    let size = raw::window_size(slave.as_fd())?;
    ensure!(size == (COLUMNS, ROWS), "the window is {size:?}");
    let mode = tcgetattr(&slave)?;
    ensure!(!mode.local_flags.contains(LocalFlags::ECHO), "the terminal echoes");
    ensure!(mode.local_flags.contains(LocalFlags::ICANON), "the terminal is no longer line by line");
    let key = mode.control_chars[SpecialCharacterIndices::VINTR as usize];
    ensure!(key == 7, "the interrupt key is {key}");
    Ok(())
}

fn read_line(from: &mut File) -> Result<String> {
    let mut line = String::new();
    while !line.ends_with('\n') {
        let mut buffer = [0; 64];
        let length = from.read(&mut buffer)?;
        ensure!(length > 0, "the terminal ended after {line:?}");
        line += &String::from_utf8_lossy(&buffer[..length]);
    }
    Ok(line)
}

/// Types a line that is read at once, and leaves an answer that is read the next time.
fn talk(master: &mut File, slave: &mut File, n: u64) -> Result<()> {
    let typed = format!("line {n}\n");
    master.write_all(typed.as_bytes())?;
    let read = read_line(slave)?;
    ensure!(read == typed, "{typed:?} was typed and {read:?} read");
    if n > 1 {
        let read = read_line(master)?;
        ensure!(read == format!("answer {}\n", n - 1), "answer {} is {read:?}", n - 1);
    }
    slave.write_all(format!("answer {n}\n").as_bytes())?;
    Ok(())
}

/// A pair with a mode and a size of its own.
pub fn pty(_: &Path) -> Result<Check> {
    let pty = open()?;
    let name = ttyname(&pty.slave)?;
    let (mut master, mut slave) = (File::from(pty.master), File::from(pty.slave));
    let mut n = 0;
    Ok(Box::new(move || {
        verify(&slave)?;
        ensure!(ttyname(&slave)? == name, "the terminal changed its name");
        n += 1;
        talk(&mut master, &mut slave, n)
    }))
}

/// A session whose leader has a controlling terminal; this process has the other end.
pub fn controlling(_: &Path) -> Result<Check> {
    let pty = open()?;
    let name = ttyname(&pty.slave)?;
    let mut kin = Kin::fork(|| {
        setsid()?;
        // The first terminal that a session leader opens becomes the session's.
        let terminal = File::options().read(true).write(true).open(&name)?;
        Ok(Box::new(move |_| {
            verify(&terminal)?;
            ensure!(getsid(None)?.as_raw() == std::process::id().cast_signed(), "no longer the session's leader");
            // Only of the session's own terminal the kernel tells this to who has the slave.
            ensure!(tcgetpgrp(&terminal)? == getpgrp(), "no longer in the foreground");
            Ok(String::new())
        }))
    })?;
    let (mut master, mut slave) = (File::from(pty.master), File::from(pty.slave));
    let mut n = 0;
    Ok(Box::new(move || {
        n += 1;
        kin.ask("look")?;
        talk(&mut master, &mut slave, n)
    }))
}

/// Output that waits to be read, with `\n` made `\r\n` on its way as terminals usually do.
pub fn processed_output(_: &Path) -> Result<Check> {
    let pty = open()?;
    let mut mode = tcgetattr(&pty.slave)?;
    mode.output_flags.insert(OutputFlags::OPOST | OutputFlags::ONLCR);
    tcsetattr(&pty.slave, SetArg::TCSANOW, &mode)?;
    let (mut master, mut slave) = (File::from(pty.master), File::from(pty.slave));
    slave.write_all(b"output\n")?;
    Ok(Box::new(move || {
        let read = read_line(&mut master)?;
        ensure!(read == "output\r\n", "the output that waited is {read:?}");
        slave.write_all(b"output\n")?;
        Ok(())
    }))
}
