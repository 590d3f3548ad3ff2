//! Tracepoints of the kernel, read through perf_event_open(2): nothing has to be mounted, and nothing stays when the reader dies.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::perf::{self, Attributes, checked};

const TYPE_TRACEPOINT: u32 = 2;
pub(crate) const SAMPLE_RAW: u64 = 1 << 10;
const IOC_SET_FILTER: libc::c_ulong = 0x4008_2406;

/// The kind of a tracepoint's records; what follows their header is the size of the raw bytes (4 bytes), and these.
pub(crate) const RECORD_SAMPLE: u32 = 9;

/// The kernel's description of its tracepoints.
pub(crate) fn tracing() -> io::Result<OwnedFd> {
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

/// A tracepoint, and where in its records some fields are: offset and size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event<const N: usize> {
    pub id: u16,
    fields: [(usize, usize); N],
}

impl<const N: usize> Event<N> {
    pub fn find(tracing: &OwnedFd, name: &str, fields: [&str; N]) -> io::Result<Self> {
        let path = format!("events/{name}/format");
        let mut text = String::new();
        let file = openat(tracing, path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        std::fs::File::from(file).read_to_string(&mut text)?;
        Self::parse(&text, fields).ok_or_else(|| io::Error::other(format!("the tracepoint {name} has another form")))
    }

    pub(crate) fn parse(text: &str, fields: [&str; N]) -> Option<Self> {
        let id = text.lines().find_map(|line| line.strip_prefix("ID: ")?.trim().parse().ok())?;
        let mut found = [(0, 0); N];
        for (place, name) in found.iter_mut().zip(fields) {
            let line =
                text.lines().find(|line| line.split(';').next().is_some_and(|d| d.ends_with(&format!(" {name}"))))?;
            let number = |key: &str| line.split(';').find_map(|part| part.trim().strip_prefix(key)?.parse().ok());
            *place = (number("offset:")?, number("size:")?);
        }
        Some(Self { id, fields: found })
    }

    /// The fields of a record, if it is one of this event.
    pub fn fields(&self, raw: &[u8]) -> Option<[u64; N]> {
        if raw.get(..2)? != self.id.to_ne_bytes() {
            return None;
        }
        let mut values = [0; N];
        for (value, (offset, size)) in values.iter_mut().zip(self.fields) {
            *value = match raw.get(offset..offset.checked_add(size)?)? {
                bytes if size == 8 => u64::from_ne_bytes(bytes.try_into().ok()?),
                bytes if size == 4 => u32::from_ne_bytes(bytes.try_into().ok()?).into(),
                _ => return None,
            };
        }
        Some(values)
    }
}

/// Opens the tracepoint `id` on a processor.
pub(crate) fn open(id: u16, cpu: i32) -> io::Result<OwnedFd> {
    perf::open(&Attributes::new(TYPE_TRACEPOINT, id.into(), SAMPLE_RAW, 0), cpu)
}

/// Has just those occurrences told for which an expression over the fields is true.
pub(crate) fn filter(event: &OwnedFd, text: &str) -> io::Result<()> {
    let text = std::ffi::CString::new(text)?;
    // SAFETY: the request takes a string that ends with a zero, and copies it.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), IOC_SET_FILTER, text.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_a_tracepoint_is_read() {
        let text = "name: x\nID: 1009\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
                    \tfield:char name[32];\toffset:8;\tsize:32;\tsigned:0;\n\tfield:ino_t ino;\toffset:40;\tsize:8;\tsigned:0;\n";
        let event = Event::parse(text, ["ino"]).unwrap();
        assert_eq!((event.id, event.fields), (1009, [(40, 8)]));
        assert!(Event::parse(text, ["index"]).is_none());
        let mut raw = [0; 48];
        raw[..2].copy_from_slice(&1009u16.to_ne_bytes());
        raw[40] = 7;
        assert_eq!(event.fields(&raw), Some([7]));
        assert_eq!(event.fields(&raw[..44]), None);
        let absurd = text.replace("offset:40", "offset:18446744073709551615");
        assert_eq!(Event::parse(&absurd, ["ino"]).unwrap().fields(&raw), None);
    }
}
