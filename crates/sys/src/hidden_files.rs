//! States of open files that the kernel shows nowhere else, read by a BPF iterator over the files of a process
//! (Documentation/bpf/bpf_iterators.rst).

use std::io;

use crate::bpf::{Assembler, If, Instruction, R6, R7, R8, R9};
use crate::btf::Btf;
use crate::task_iterator::TaskIterator;

/// Words of a row: the descriptor, and what is not 0 where a file is in a state.
const DESCRIPTOR: usize = 0;
const STOPPED: usize = 1;
const PROGRAM: usize = 2;
const MD5_KEYS: usize = 3;
const AO_KEYS: usize = 4;
const FLOW_LABELS: usize = 5;
const WORDS: usize = 6;

/// What an open file has, as far as it is of that kind: of others these words mean nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HiddenFile {
    /// Its number in the process's table.
    pub descriptor: i32,
    /// Output to the terminal is stopped (`TCOOFF`, or ^S).
    pub is_stopped: bool,
    /// A program shares out what comes among the sockets of its group (`SO_ATTACH_REUSEPORT_EBPF`, `SO_ATTACH_REUSEPORT_CBPF`).
    pub has_reuseport_program: bool,
    /// The socket of TCP has keys to sign segments with (`TCP_MD5SIG`, `TCP_AO_ADD_KEY`).
    pub has_keys: bool,
    /// The IPv6 socket has leased flow labels (`IPV6_FLOWLABEL_MGR`).
    pub has_flow_labels: bool,
}

/// Reads the states of files.
#[derive(Debug)]
pub struct HiddenFiles(TaskIterator<WORDS>);

/// Where fields lie; `None` where this kernel does not have one.
struct Offsets {
    seq: i16,
    /// Of a file.
    private: usize,
    /// Of a terminal's part of the file, and of the terminal.
    terminal: usize,
    stopped: Option<usize>,
    /// Of a socket: its inner part, and fields of that.
    inner: usize,
    group: usize,
    program: usize,
    /// Each with that of the list of keys within.
    md5: Option<(usize, usize)>,
    ao: Option<(usize, usize)>,
    /// Of the part for IPv6, and of the labels there. Where the labels are in the inner part itself, only the latter.
    labels: Option<(Option<usize>, usize)>,
}

impl Offsets {
    fn of(btf: &Btf) -> io::Result<Self> {
        let one = |structure, field| btf.offsets(structure, [field]).map(|[offset]| offset);
        let two = |structure, field, inner, within| Some((one(structure, field).ok()?, one(inner, within).ok()?));
        Ok(Self {
            seq: i16::try_from(one("bpf_iter_meta", "seq")?).map_err(|_| io::ErrorKind::Unsupported)?,
            private: one("file", "private_data")?,
            terminal: one("tty_file_private", "tty")?,
            stopped: btf.offset_within("tty_struct", &["flow", "stopped"]).ok(),
            inner: one("socket", "sk")?,
            group: one("sock", "sk_reuseport_cb")?,
            program: one("sock_reuseport", "prog")?,
            md5: two("tcp_sock", "md5sig_info", "tcp_md5sig_info", "head"),
            ao: two("tcp_sock", "ao_info", "tcp_ao_info", "head"),
            labels: match one("inet_sock", "ipv6_fl_list") {
                Ok(labels) => Some((None, labels)),
                Err(_) => {
                    two("inet_sock", "pinet6", "ipv6_pinfo", "ipv6_fl_list").map(|(part, labels)| (Some(part), labels))
                }
            },
        })
    }
}

/// Writes a row for each file that the iterator comes to. A file is read both as a terminal and as a socket: who reads the rows knows what it is.
fn program(at: &Offsets) -> Vec<Instruction> {
    const ROW: i16 = -8 * WORDS as i16;
    const POINTER: i16 = ROW - 8;
    let word = |number: usize| ROW + 8 * number as i16;
    let mut a = Assembler::default();
    a.copy(R9, 1);
    // The context is {meta, task, fd, file}; at the end of the iteration there is no file.
    a.argument(R6, R9, 3);
    a.go_if(R6, If::Equal, 0, "end");
    for number in STOPPED..WORDS {
        a.store_number(word(number), 0);
    }
    a.argument(1, R9, 2);
    a.store(word(DESCRIPTOR), 1);
    a.read(POINTER, 8, (R6, at.private), "write");
    a.load(R7, POINTER);
    if let Some(stopped) = at.stopped {
        a.read_or_zero(POINTER, 8, (R7, at.terminal));
        a.load(R8, POINTER);
        a.read_or_zero(word(STOPPED), 1, (R8, stopped));
    }
    a.read(POINTER, 8, (R7, at.inner), "write");
    a.load(R8, POINTER);
    let through = |at: (usize, usize)| (Some(at.0), at.1);
    let inner = [
        (PROGRAM, Some((Some(at.group), at.program))),
        (MD5_KEYS, at.md5.map(through)),
        (AO_KEYS, at.ao.map(through)),
        (FLOW_LABELS, at.labels),
    ];
    for (number, (pointer, field)) in inner.into_iter().filter_map(|(number, at)| Some((number, at?))) {
        a.copy(R7, R8);
        if let Some(pointer) = pointer {
            a.read_or_zero(POINTER, 8, (R8, pointer));
            a.load(R7, POINTER);
        }
        a.read_or_zero(word(number), 8, (R7, field));
    }
    a.place("write");
    a.write(R9, at.seq, (ROW, 8 * WORDS as i32));
    a.place("end");
    a.end();
    a.finish()
}

impl HiddenFiles {
    /// Hands the kernel the program. Needs CAP_BPF and CAP_PERFMON, and a kernel since 6.1 that describes its types.
    ///
    /// # Errors
    /// The kernel has no such iterator, or the agent may not load one.
    pub fn load() -> io::Result<Self> {
        let btf = Btf::of_kernel()?;
        TaskIterator::load(&btf, "bpf_iter_task_file", &program(&Offsets::of(&btf)?)).map(Self)
    }

    /// All open files of a process; none of one that has ended.
    ///
    /// # Errors
    /// The iterator cannot be made.
    pub fn read(&self, pid: u32) -> io::Result<Vec<HiddenFile>> {
        let file = |row: [u64; WORDS]| HiddenFile {
            // The upper half of the word is not set.
            descriptor: (row[DESCRIPTOR] as u32).cast_signed(),
            is_stopped: row[STOPPED] & 1 != 0,
            has_reuseport_program: row[PROGRAM] != 0,
            has_keys: row[MD5_KEYS] != 0 || row[AO_KEYS] != 0,
            has_flow_labels: row[FLOW_LABELS] != 0,
        };
        Ok(self.0.rows(pid)?.into_iter().map(file).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::socket;

    #[test]
    fn states_of_files_are_seen() {
        let reader = match HiddenFiles::load() {
            Ok(reader) => reader,
            Err(error) => {
                println!("skipped: files cannot be read by BPF here: {error}");
                return;
            }
        };
        let read = |number: i32| {
            let all = reader.read(std::process::id()).unwrap();
            *all.iter().find(|file| file.descriptor == number).unwrap()
        };
        let pair = nix::pty::openpty(None, None).unwrap();
        let slave = pair.slave.as_raw_fd();
        assert!(!read(slave).is_stopped);
        nix::sys::termios::tcflow(&pair.slave, nix::sys::termios::FlowArg::TCOOFF).unwrap();
        assert!(read(slave).is_stopped);
        nix::sys::termios::tcflow(&pair.slave, nix::sys::termios::FlowArg::TCOON).unwrap();
        assert!(!read(slave).is_stopped);

        // One that is bound must have been given SO_REUSEPORT before.
        let udp = socket::new(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        assert!(!read(udp.as_raw_fd()).has_reuseport_program);
        const SO_REUSEPORT: i32 = 15;
        const SO_ATTACH_REUSEPORT_CBPF: i32 = 51;
        socket::set_option(udp.as_fd(), libc::SOL_SOCKET, SO_REUSEPORT, &1i32.to_ne_bytes()).unwrap();
        // `struct sock_fprog`: one instruction, which returns 0.
        let code = [6u8, 0, 0, 0, 0, 0, 0, 0];
        let mut filter = [0u8; 16];
        filter[0] = 1;
        filter[8..].copy_from_slice(&(code.as_ptr() as u64).to_ne_bytes());
        socket::set_option(udp.as_fd(), libc::SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &filter).unwrap();
        assert!(read(udp.as_raw_fd()).has_reuseport_program);

        let Ok(udp) = std::net::UdpSocket::bind("[::1]:0") else { return };
        assert!(!read(udp.as_raw_fd()).has_flow_labels);
        // `struct in6_flowlabel_req`: a label for ::1, which is made, and may be shared with anybody.
        let mut request = [0; 32];
        request[15] = 1;
        request[16..20].copy_from_slice(&0x4321u32.to_be_bytes());
        (request[21], request[22]) = (255, 1);
        const IPV6_FLOWLABEL_MGR: i32 = 32;
        socket::set_option(udp.as_fd(), libc::IPPROTO_IPV6, IPV6_FLOWLABEL_MGR, &request).unwrap();
        assert!(read(udp.as_raw_fd()).has_flow_labels);
    }
}
