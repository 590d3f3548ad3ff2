//! The kernel keyrings of threads (keyrings(7)): those of the session, the process and the thread. Only the kernel knows which thread has
//! which; a BPF iterator over tasks (Documentation/bpf/bpf_iterators.rst) tells it without touching them.

use std::io;

use crate::bpf::{Assembler, If, Instruction, R6, R7, R8, R9};
use crate::btf::Btf;
use crate::task_iterator::TaskIterator;

/// Pointers in one node of an associative array (include/linux/assoc_array_priv.h, `ASSOC_ARRAY_FAN_OUT`).
const SLOTS: usize = 16;
/// Of a pointer within an associative array: it leads to another part of the array.
const META: u64 = 1;
/// Of a pointer to a part: that is no node (a shortcut). Of a pointer to a key: it is a keyring (security/keys/keyring.c).
const SUBTYPE: u64 = 2;
/// Kind, serial number, how many keys, where they are; those in the first node, and how many keys each has that is a keyring.
const KIND: usize = 0;
const SERIAL: usize = 1;
const LEAVES: usize = 2;
const ROOT: usize = 3;
const KEYS: usize = 4;
const NESTED: usize = KEYS + SLOTS;
const WORDS: usize = NESTED + SLOTS;
/// The record's place on the stack, and that of a pointer on the way to it.
const RECORD: i16 = -8 * WORDS as i16;
const POINTER: i16 = RECORD - 8;

/// Which of a thread's keyrings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyringKind {
    /// Of its session.
    Session,
    /// Of its process.
    Process,
    /// Its own.
    Thread,
}

const KINDS: [(KeyringKind, &str, &str); 3] = [
    (KeyringKind::Session, "session_keyring", "session"),
    (KeyringKind::Process, "process_keyring", "process"),
    (KeyringKind::Thread, "thread_keyring", "thread"),
];

/// A keyring of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keyring {
    /// Which of its keyrings.
    pub kind: KeyringKind,
    /// The keyring's serial number: two threads that share it have the same one.
    pub serial: i32,
    /// Whether there is a key in it, or in a keyring in it.
    pub has_keys: bool,
}

/// Where the fields are.
struct Places {
    seq: i16,
    cred: usize,
    rings: [usize; 3],
    serial: usize,
    keys: usize,
    leaves: usize,
    slots: usize,
}

/// Reads the keyrings of tasks.
#[derive(Debug)]
pub struct KeyringReader(TaskIterator<WORDS>);

fn program(places: &Places) -> Vec<Instruction> {
    let mut a = Assembler::default();
    let word = |n: usize| RECORD + 8 * n as i16;
    a.copy(R7, 1);
    // The context is {meta, task}; at the end of the iteration there is no task.
    a.argument(R6, R7, 1);
    a.go_if(R6, If::Equal, 0, "end");
    for (number, (_, _, label)) in KINDS.iter().enumerate() {
        a.place(label);
        let next = KINDS.get(number + 1).map_or("end", |(_, _, label)| label);
        a.read(POINTER, 8, (R6, places.cred), next);
        a.load(R8, POINTER);
        a.read(POINTER, 8, (R8, places.rings[number]), next);
        a.load(R8, POINTER);
        a.go_if(R8, If::Equal, 0, next);
        a.store_number(word(KIND), number as i32);
        a.read(word(SERIAL), 4, (R8, places.serial), next);
        a.read(word(LEAVES), 8, (R8, places.keys + places.leaves), next);
        a.read(word(ROOT), 8, (R8, places.keys), next);
        a.load(R9, word(ROOT));
        for slot in 0..SLOTS {
            a.read_or_zero(word(KEYS + slot), 8, (R9, places.slots + 8 * slot - META as usize));
            a.load(R8, word(KEYS + slot));
            a.read_or_zero(word(NESTED + slot), 8, (R8, places.keys + places.leaves - SUBTYPE as usize));
        }
        a.write(R7, places.seq, (RECORD, (8 * WORDS) as i32));
    }
    a.place("end");
    a.end();
    a.finish()
}

/// Whether a keyring's record tells of a key. Keyrings without any do not count.
fn has_keys(record: &[u64]) -> bool {
    let (leaves, root, keys) = (record[LEAVES], record[ROOT], &record[KEYS..NESTED]);
    let in_slot = |(slot, nested): (&u64, &u64)| *slot != 0 && (slot & (META | SUBTYPE) != SUBTYPE || *nested > 0);
    // More than fit into one node are more than a few empty keyrings.
    leaves > 0 && (root & (META | SUBTYPE) != META || keys.iter().zip(&record[NESTED..]).any(in_slot))
}

impl KeyringReader {
    /// Hands the kernel the program. Needs CAP_BPF and CAP_PERFMON, and a kernel since 6.1 that describes its types.
    ///
    /// # Errors
    /// The system's; `Unsupported` where the kernel does not describe what is needed.
    pub fn load() -> io::Result<Self> {
        let btf = Btf::of_kernel()?;
        let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
        let [cred] = btf.offsets("task_struct", ["cred"])?;
        let [serial, keys] = btf.offsets("key", ["serial", "keys"])?;
        let [leaves] = btf.offsets("assoc_array", ["nr_leaves_on_tree"])?;
        let [slots] = btf.offsets("assoc_array_node", ["slots"])?;
        let rings = btf.offsets("cred", KINDS.map(|(_, field, _)| field))?;
        let seq = i16::try_from(seq).map_err(|_| io::ErrorKind::Unsupported)?;
        let code = program(&Places { seq, cred, rings, serial, keys, leaves, slots });
        TaskIterator::load(&btf, "bpf_iter_task", &code).map(Self)
    }

    /// The keyrings of all threads of a process; none of one that has ended.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&self, pid: u32) -> io::Result<Vec<Keyring>> {
        let keyring = |row: [u64; WORDS]| Keyring {
            kind: KINDS[row[KIND] as usize % KINDS.len()].0,
            serial: row[SERIAL] as i32,
            has_keys: has_keys(&row),
        };
        Ok(self.0.rows(pid)?.into_iter().map(keyring).collect())
    }
}

/// Gives this thread, and what it starts, a new session keyring of its own, as runc gives one to each container.
///
/// # Errors
/// The system's: the kernel may have no keyrings, or the user too many.
pub fn join_new_session() -> io::Result<()> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    // A name would join the keyring that has it already.
    let name = std::ptr::null::<libc::c_char>();
    // SAFETY: without a name no memory is read.
    let serial = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, name) };
    if serial < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    const PROCESS: i32 = -2;
    const SESSION: i32 = -3;

    /// add_key(2); -1 for an error.
    fn add(kind: &CStr, name: &CStr, payload: &[u8], keyring: i32) -> i64 {
        // SAFETY: names that end with a zero, and a payload of the length that is stated.
        unsafe {
            libc::syscall(libc::SYS_add_key, kind.as_ptr(), name.as_ptr(), payload.as_ptr(), payload.len(), keyring)
        }
    }

    /// The serial number of this thread's keyring of that kind; -1 where it has none.
    fn number_of(keyring: i32) -> i64 {
        const GET_KEYRING_ID: libc::c_long = 0;
        // SAFETY: numbers only.
        unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, keyring, 0) }
    }

    #[test]
    fn keys_are_told_from_empty_keyrings() {
        let reader = match KeyringReader::load() {
            Ok(reader) => reader,
            Err(error) => {
                println!("skipped: keyrings cannot be read by BPF here: {error}");
                return;
            }
        };
        // In a thread of its own: a session belongs to it alone.
        std::thread::spawn(move || {
            if let Err(error) = join_new_session() {
                println!("skipped: there are no keyrings here: {error}");
                return;
            }
            let of = |kind: KeyringKind| {
                // By its number: other threads have others, and threads have other numbers in other pid namespaces.
                let number = match kind {
                    KeyringKind::Session => SESSION,
                    _ => PROCESS,
                };
                let serial = number_of(number);
                let all = reader.read(std::process::id()).unwrap();
                all.into_iter().find(|ring| (i64::from(ring.serial), ring.kind) == (serial, kind))
            };
            assert!(!of(KeyringKind::Session).unwrap().has_keys);
            assert_eq!(of(KeyringKind::Process), None);
            let nested = add(c"keyring", c"nested", b"", SESSION);
            assert!(nested > 0 && !of(KeyringKind::Session).unwrap().has_keys, "an empty keyring is no key");
            assert!(add(c"user", c"one", b"x", nested as i32) > 0);
            assert!(of(KeyringKind::Session).unwrap().has_keys);
            assert!(add(c"user", c"two", b"x", PROCESS) > 0);
            assert!(of(KeyringKind::Process).unwrap().has_keys);
            join_new_session().unwrap();
            for name in [c"a", c"b", c"c"] {
                assert!(add(c"user", name, b"x", SESSION) > 0);
                assert!(of(KeyringKind::Session).unwrap().has_keys);
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn parts_of_an_array_are_told_apart() {
        let record = |leaves: u64, root: u64, slot: u64, nested: u64| {
            let mut words = vec![0; WORDS];
            (words[LEAVES], words[ROOT], words[KEYS], words[NESTED]) = (leaves, root, slot, nested);
            has_keys(&words)
        };
        assert!(!record(0, 0, 0, 0) && !record(1, 0x1001, 0x2002, 0));
        assert!(record(1, 0x1001, 0x2002, 3) && record(1, 0x1001, 0x2000, 0));
        assert!(record(40, 0x1003, 0, 0) && record(40, 0x1001, 0x3001, 0));
    }
}
