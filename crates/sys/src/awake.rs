//! Processors that stay awake.
//!
//! An idle processor sleeps, and takes its time to wake up: up to some hundred microseconds on metal, and in a virtual machine a way through
//! the host. What happens in a blackout is thousands of short turns of different tasks, each woken by the one before. While somebody
//! holds `/dev/cpu_dma_latency` at 0 µs (the kernel's PM QoS interface), idle processors poll instead.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};

const DEVICE: &str = "/dev/cpu_dma_latency";

/// Keeps this host's processors awake until it is dropped, or the process ends.
#[derive(Debug)]
pub struct Awake {
    _held: File,
}

impl Awake {
    /// Has all processors poll from now on, which costs what they could do otherwise with the power, and nothing else: for
    /// what takes some ten milliseconds.
    ///
    /// # Errors
    /// The kernel cannot be asked for that (it has no idle states to choose from), or not by this process.
    pub fn keep() -> io::Result<Self> {
        let mut held = OpenOptions::new().write(true).open(DEVICE)?;
        held.write_all(&0_i32.to_ne_bytes())?;
        Ok(Self { _held: held })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// What all who hold it have asked for together, in µs.
    fn asked_for() -> io::Result<i32> {
        let mut value = [0; 4];
        File::open(DEVICE)?.read_exact(&mut value)?;
        Ok(i32::from_ne_bytes(value))
    }

    #[test]
    fn processors_are_kept_awake() {
        match Awake::keep() {
            Ok(_awake) => assert_eq!(asked_for().unwrap(), 0),
            Err(error) => println!("skipped: {DEVICE}: {error}"),
        }
    }
}
