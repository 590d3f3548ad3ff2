//! Numbered traffic: streams and datagrams of which every byte tells its place, so that whoever receives them notices what is
//! lost, doubled or out of order.
//!
//! `bench-traffic` is the server, in the container that is moved. A connection begins with the client's [`Service`] and is
//! served so; a datagram is sent back to where it came from. The clients are here: [`Stream`] and [`Datagrams`].

mod course;
mod datagrams;
mod numbers;
mod stream;

use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

pub use course::{Course, now};
pub use datagrams::{Datagrams, Tally};
pub use numbers::{Mismatch, Numbers};
pub use stream::{Stream, Way, give_out};

/// The port of `bench-traffic`, TCP and UDP.
pub const TRAFFIC_PORT: u16 = 7070;

/// What the server does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Sends everything back, the end too.
    Echo,
    /// The same, but reads nothing before that time has passed.
    Later(Duration),
    /// Takes numbers in; at the end says how many bytes they were (u64), or resets the connection if one was wrong.
    Intake,
    /// Sends numbers until the client ends its direction, then ends the other one: at most so many bytes a second, or as much as goes.
    Output(Option<u32>),
    /// Ends its own direction at once, takes numbers in.
    Mute,
    /// Says how many right bytes the connections of [`Mute`](Self::Mute) have brought up to their end (u64).
    Total,
    /// Connects to there and passes on everything in both directions, the ends too.
    Relay(SocketAddrV4),
    /// Accepts no further connection before that time has passed.
    Pause(Duration),
}

impl Service {
    const LENGTH: usize = 7;

    /// The bytes that a connection begins with.
    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let ms = |d: Duration| u32::try_from(d.as_millis()).unwrap_or(u32::MAX).to_be_bytes();
        let (kind, argument, port) = match self {
            Self::Echo => (b'e', [0; 4], 0),
            Self::Later(delay) => (b'l', ms(delay), 0),
            Self::Intake => (b'i', [0; 4], 0),
            Self::Output(rate) => (b'o', rate.unwrap_or(0).to_be_bytes(), 0),
            Self::Mute => (b'm', [0; 4], 0),
            Self::Total => (b't', [0; 4], 0),
            Self::Relay(to) => (b'r', to.ip().octets(), to.port()),
            Self::Pause(delay) => (b'p', ms(delay), 0),
        };
        let ([a, b, c, d], [e, f]) = (argument, port.to_be_bytes());
        [kind, a, b, c, d, e, f]
    }

    /// Reads what a connection begins with.
    ///
    /// # Errors
    /// The connection's, or that it is no service.
    pub fn read(mut from: impl Read) -> io::Result<Self> {
        let mut bytes = [0; Self::LENGTH];
        from.read_exact(&mut bytes)?;
        let [kind, a, b, c, d, e, f] = bytes;
        let number = u32::from_be_bytes([a, b, c, d]);
        let delay = Duration::from_millis(number.into());
        Ok(match kind {
            b'e' => Self::Echo,
            b'l' => Self::Later(delay),
            b'i' => Self::Intake,
            b'o' => Self::Output((number > 0).then_some(number)),
            b'm' => Self::Mute,
            b't' => Self::Total,
            b'r' => Self::Relay(SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([e, f]))),
            b'p' => Self::Pause(delay),
            _ => return Err(io::Error::new(ErrorKind::InvalidData, "no service of that kind")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_read_as_it_was_written() {
        let delay = Duration::from_millis(70_000);
        for service in [
            Service::Echo,
            Service::Later(delay),
            Service::Intake,
            Service::Output(None),
            Service::Output(Some(1_000_000)),
            Service::Mute,
            Service::Total,
            Service::Relay(SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 11), 7070)),
            Service::Pause(delay),
        ] {
            assert_eq!(Service::read(&service.to_bytes()[..]).unwrap(), service);
        }
        assert!(Service::read(&[0; 7][..]).is_err());
    }
}
