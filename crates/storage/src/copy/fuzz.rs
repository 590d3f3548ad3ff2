//! Parsers of this part for the fuzz targets.

use super::op::Name;
use super::suspects::Mapping;
use super::watch::Events;

/// A name as it travels: what is accepted survives another round.
pub fn name(data: &[u8]) {
    let name = Name(data.to_vec());
    assert_eq!(Name::decode(&name.encode()).as_ref(), Some(&name));
    if let Ok(text) = std::str::from_utf8(data)
        && let Some(name) = Name::decode(text)
    {
        assert_eq!(Name::decode(&name.encode()).as_ref(), Some(&name));
    }
}

/// Events of fanotify, and `/proc/PID/maps`.
pub fn watched(data: &[u8]) {
    let mut events = Events::default();
    events.note(data);
    assert!(events.closed.len() <= data.len() / 24);
    for line in data.split(|byte| *byte == b'\n') {
        assert!(Mapping::parse(line).is_none_or(|mapping| line.ends_with(mapping.path)));
    }
}
