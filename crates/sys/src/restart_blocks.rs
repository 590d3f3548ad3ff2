//! Restart blocks: what the kernel notes of a system call that waits for a limited time, when a stop interrupts it, so that it can go on with
//! what is left of the time (`restart_syscall(2)`, include/linux/restart_block.h).
//!
//! CRIU does not carry them: the call fails with EINTR in the restored task. And a task that was interrupted twice is in
//! `restart_syscall`: which call that was, its registers do not tell any more. A BPF iterator over tasks reads the block. CRIU stops the
//! tasks, so it is the library that is preloaded into CRIU which runs the iterator; the agent loads the program, whose number and
//! surroundings are [described](description) to the library.

#[cfg(target_arch = "x86_64")]
use std::io;
use std::path::Path;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use crate::bpf::{Assembler, If, Instruction, R6, R7, R8};
#[cfg(target_arch = "x86_64")]
use crate::btf::Btf;
#[cfg(target_arch = "x86_64")]
use crate::own_process::{self, Task};
use crate::task_iterator::TaskIterator;

/// The environment variable with the [`description`], for the preloaded library.
pub const PROGRAM_VARIABLE: &str = "TRANSHIP_RESTART_BLOCKS";
/// The environment variable that names the [record](recorded): written in a dump, read in a restore.
pub const RECORD_VARIABLE: &str = "TRANSHIP_WAITS";
/// The name of the record among CRIU's images.
pub const RECORD: &str = "waits.txt";

/// The kernel's functions that go on with a wait, in the order in which they are described.
#[cfg(target_arch = "x86_64")]
const FUNCTIONS: [&str; 3] = ["hrtimer_nanosleep_restart", "do_restart_poll", "futex_wait_restart"];

/// Words of a row: the registers as in `struct user_regs_struct`, the function, and the fields of the block.
#[cfg(target_arch = "x86_64")]
const REGISTERS: usize = 21;
#[cfg(target_arch = "x86_64")]
const FIELDS: usize = 6;
#[cfg(target_arch = "x86_64")]
const WORDS: usize = REGISTERS + 1 + FIELDS;

/// A system call that CRIU had interrupted, and that ends at a point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Wait {
    /// The thread.
    pub thread: u32,
    /// Its number within the container.
    pub inner: u32,
    /// Of the system call.
    pub number: i64,
    /// Which clock the time is of.
    pub clock: i32,
    /// When it ends, in ns.
    pub end_ns: u64,
    /// How much of the time was left when it was interrupted, in ns.
    pub left_ns: u64,
}

impl Wait {
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let mut word = || words.next();
        Some(Self {
            thread: word()?.parse().ok()?,
            inner: word()?.parse().ok()?,
            number: word()?.parse().ok()?,
            clock: word()?.parse().ok()?,
            end_ns: word()?.parse().ok()?,
            left_ns: word()?.parse().ok()?,
        })
    }
}

/// What the library has recorded in a dump; nothing where there is no record.
pub fn recorded(record: &Path) -> Vec<Wait> {
    std::fs::read_to_string(record).unwrap_or_default().lines().filter_map(Wait::parse).collect()
}

/// Where fields lie: offsets in `struct task_struct`, with the sizes of the fields.
#[cfg(target_arch = "x86_64")]
struct Places {
    seq: i16,
    function: usize,
    /// Clock and end of a sleep, end of a wait for a futex, whether a poll has an end, and its seconds and ns.
    fields: [(usize, i32); FIELDS],
}

#[cfg(target_arch = "x86_64")]
impl Places {
    fn of(btf: &Btf) -> io::Result<Self> {
        let [seq] = btf.offsets("bpf_iter_meta", ["seq"])?;
        let at = |path: &[&str]| btf.offset_within("task_struct", &[&["restart_block"], path].concat());
        let of_poll = |name| at(&["poll", name]).or_else(|_| at(&["poll", "end_time", name]));
        Ok(Self {
            seq: i16::try_from(seq).map_err(|_| io::ErrorKind::Unsupported)?,
            function: at(&["fn"])?,
            fields: [
                (at(&["nanosleep", "clockid"])?, 4),
                (at(&["nanosleep", "expires"])?, 8),
                (at(&["futex", "time"])?, 8),
                (at(&["poll", "has_timeout"])?, 4),
                (of_poll("tv_sec")?, 8),
                (of_poll("tv_nsec")?, 8),
            ],
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn program(at: &Places) -> Vec<Instruction> {
    const ROW: i16 = -8 * WORDS as i16;
    let word = |number: usize| ROW + 8 * number as i16;
    let mut a = Assembler::default();
    a.copy(R7, 1);
    // The context is {meta, task}; at the end of the iteration there is no task.
    a.argument(R6, R7, 1);
    a.go_if(R6, If::Equal, 0, "end");
    a.task_registers(R8, R6);
    a.read(word(0), 8 * REGISTERS as i32, (R8, 0), "end");
    a.read(word(REGISTERS), 8, (R6, at.function), "end");
    for (number, (offset, size)) in at.fields.iter().enumerate() {
        a.read(word(REGISTERS + 1 + number), *size, (R6, *offset), "end");
    }
    a.write(R7, at.seq, (ROW, 8 * WORDS as i32));
    a.place("end");
    a.end();
    a.finish()
}

/// The text of `/proc/kallsyms`. The kernel shows addresses to whoever opens it with CAP_SYSLOG, which a confined agent lacks.
fn symbols() -> io::Result<String> {
    let opened = match crate::launch::launcher() {
        Some(_) => std::fs::File::from(own_process::run(Task::OpenSymbols)?),
        None => std::fs::File::open("/proc/kallsyms")?,
    };
    io::read_to_string(opened)
}

/// The addresses of [`FUNCTIONS`], from the text of `/proc/kallsyms`.
#[cfg(target_arch = "x86_64")]
fn addresses(symbols: &str) -> Option<[u64; FUNCTIONS.len()]> {
    let mut found = [0; FUNCTIONS.len()];
    for line in symbols.lines() {
        let mut columns = line.split_ascii_whitespace();
        let (Some(address), Some(_), Some(name)) = (columns.next(), columns.next(), columns.next()) else { continue };
        // Compilers append to names after a dot.
        let name = name.split_once('.').map_or(name, |(name, _)| name);
        if let Some(place) = FUNCTIONS.iter().position(|function| *function == name) {
            found[place] = u64::from_str_radix(address, 16).ok()?;
        }
    }
    found.iter().all(|address| *address != 0).then_some(found)
}

/// Reads the restart blocks of tasks.
#[derive(Debug)]
#[cfg(target_arch = "x86_64")]
struct Reader {
    program: TaskIterator<WORDS>,
    functions: [u64; FUNCTIONS.len()],
}

#[cfg(target_arch = "x86_64")]
impl Reader {
    /// Needs CAP_BPF, CAP_PERFMON and CAP_SYSLOG, and a kernel since 6.1 that describes its types.
    fn load() -> io::Result<Self> {
        let btf = Btf::of_kernel()?;
        let functions = addresses(&symbols()?).ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { program: TaskIterator::load(&btf, "bpf_iter_task", &program(&Places::of(&btf)?))?, functions })
    }
}

/// What the preloaded library needs to read restart blocks: the program's number, and the addresses of the functions. The program is loaded
/// once, and stays for as long as this process.
///
/// # Errors
/// They cannot be read on this node: waits with a timeout that a dump interrupts fail with EINTR.
#[cfg(target_arch = "x86_64")]
pub fn description() -> Result<String, String> {
    static READER: OnceLock<Result<Reader, String>> = OnceLock::new();
    let reader = READER.get_or_init(|| Reader::load().map_err(|error| error.to_string())).as_ref()?;
    let id = reader.program.id().map_err(|error| error.to_string())?;
    let functions = reader.functions.map(|address| format!("{address:x}"));
    Ok(format!("{id} {}", functions.join(" ")))
}

/// The same: only on x86-64 it is known how a system call is begun again.
#[cfg(not(target_arch = "x86_64"))]
pub fn description() -> Result<String, String> {
    Err("the registers of this architecture are not known".to_owned())
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::standstill;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn the_block_of_a_sleep_tells_when_it_ends() {
        let reader = match Reader::load() {
            Ok(reader) => reader,
            Err(error) => return println!("skipped: restart blocks cannot be read here: {error}"),
        };
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let patience = Duration::from_secs(10);
        let deadline = Instant::now() + patience;
        let row = loop {
            let row = standstill::during(&[child.id()], patience, |stopped| {
                stopped.unwrap();
                reader.program.rows(child.id()).unwrap()[0]
            });
            if row[REGISTERS] == reader.functions[0] {
                break row;
            }
            assert!(Instant::now() < deadline, "it does not sleep");
        };
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(row[10] as i64, -516, "ERESTART_RESTARTBLOCK");
        let clock = nix::time::ClockId::from_raw(row[REGISTERS + 1] as i32);
        let now = nix::time::clock_gettime(clock).unwrap().tv_sec() as u64;
        let end = row[REGISTERS + 2] / 1_000_000_000;
        assert!((580..=601).contains(&(end - now)), "{end} {now}");
    }

    #[test]
    fn names_are_found_whatever_a_compiler_appends() {
        let symbols = "ffffffff81000000 T _stext\nffffffff81441dc0 t futex_wait_restart.llvm.77\n\
                       ffffffff816dcab0 t do_restart_poll\nffffffff822026d0 t hrtimer_nanosleep_restart\n";
        assert_eq!(addresses(symbols), Some([0xffff_ffff_8220_26d0, 0xffff_ffff_816d_cab0, 0xffff_ffff_8144_1dc0]));
        assert_eq!(addresses(&symbols.replace("ffffffff816dcab0", "0000000000000000")), None);
        assert_eq!(addresses(""), None);
    }

    #[test]
    fn a_record_is_read() {
        let record = std::env::temp_dir().join(format!("waits-{}", std::process::id()));
        std::fs::write(&record, "812 7 35 1 99 5\nnone\n").unwrap();
        let wait = Wait { thread: 812, inner: 7, number: 35, clock: 1, end_ns: 99, left_ns: 5 };
        assert_eq!(recorded(&record), [wait]);
        std::fs::remove_file(&record).unwrap();
        assert_eq!(recorded(&record), []);
    }
}
