//! BPF programs, put together here instruction by instruction (Documentation/bpf/standardization/instruction-set.rst), and their maps.

mod ring;

use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub(crate) use ring::{RingBuffer, RingReader};

const MAP_CREATE: libc::c_int = 0;
const MAP_LOOKUP: libc::c_int = 1;
const MAP_UPDATE: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
const OBJECT_INFO: libc::c_int = 15;
const RAW_TRACEPOINT_OPEN: libc::c_int = 17;
const LINK_CREATE: libc::c_int = 28;
const ITER_CREATE: libc::c_int = 33;

const TYPE_RAW_TRACEPOINT: u32 = 17;
const TYPE_TRACING: u32 = 26;
const ATTACH_ITER: u32 = 28;
const MAP_HASH: u32 = 1;
const MAP_ARRAY: u32 = 2;
const MAP_PERF_EVENTS: u32 = 4;
/// Says in an instruction that its number is a map's descriptor.
const PSEUDO_MAP: u8 = 1;
/// What the kernel asks of a program that calls its helpers; those here may be had under either.
const LICENSE: &CStr = c"Dual MIT/GPL";

/// `struct bpf_insn` of linux/bpf.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Instruction {
    pub code: u8,
    /// The source's number in the upper half, the target's in the lower one.
    pub registers: u8,
    pub offset: i16,
    pub immediate: i32,
}

const _: () = assert!(size_of::<Instruction>() == 8);

/// An instruction with all that one can have.
pub(crate) const fn op(code: u8, target: u8, source: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: source << 4 | target, offset, immediate }
}

/// `union bpf_attr` for BPF_PROG_LOAD, as far as it is needed here.
#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log: [u32; 4],
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
    btf_infos: [u32; 9],
    attach_btf_id: u32,
    attach_prog_fd: u32,
    padding: u32,
}

const _: () = assert!(size_of::<ProgLoad>() == 120);
const _: () = assert!(std::mem::offset_of!(ProgLoad, attach_btf_id) == 108);

/// The same for BPF_LINK_CREATE.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
    iter_info: u64,
    iter_info_len: u32,
    padding: u32,
}

/// The same for BPF_MAP_CREATE.
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

/// The same for BPF_MAP_LOOKUP_ELEM and BPF_MAP_UPDATE_ELEM.
#[repr(C)]
struct MapElement {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The same for BPF_RAW_TRACEPOINT_OPEN.
#[repr(C)]
struct RawTracepoint {
    name: u64,
    prog_fd: u32,
    padding: u32,
}

/// The same for BPF_OBJ_GET_INFO_BY_FD.
#[repr(C)]
struct ObjectInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// Where in `struct bpf_prog_info` it says how often a program was not run because it was running (Linux 5.12), and how long that is.
const MISSES: usize = 208;
const PROG_INFO: usize = 216;

/// `union bpf_iter_link_info`, for tasks.
#[repr(C)]
struct OneTask {
    tid: u32,
    pid: u32,
    pid_fd: u32,
    padding: u32,
}

/// What the call returns.
///
/// # Safety
/// What the attribute points to lives as long as the call, and is as large as the command wants; what it writes to is nobody else's.
unsafe fn call<T>(command: libc::c_int, attribute: &T) -> io::Result<libc::c_int> {
    let (pointer, size) = (std::ptr::from_ref(attribute).cast::<c_void>(), size_of::<T>());
    // SAFETY: the attribute is of the size that is stated; the rest by contract of this function.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, pointer, size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as libc::c_int) }
}

/// The descriptor that the call makes.
///
/// # Safety
/// That of [`call`], and the command is one that makes a descriptor.
unsafe fn made<T>(command: libc::c_int, attribute: &T) -> io::Result<OwnedFd> {
    // SAFETY: by contract of this function; the descriptor was just made, for us alone.
    unsafe { call(command, attribute).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

/// A program that an iterator over tasks' mappings, or the like, shall run: `function` is the iterator's number.
pub(crate) fn load_iterator(code: &[Instruction], function: u32) -> io::Result<OwnedFd> {
    let attribute = ProgLoad {
        prog_type: TYPE_TRACING,
        insn_cnt: code.len() as u32,
        insns: code.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        expected_attach_type: ATTACH_ITER,
        attach_btf_id: function,
        ..ProgLoad::default()
    };
    // SAFETY: the attribute points to a slice and to a string, which outlive the call.
    unsafe { made(PROG_LOAD, &attribute) }
}

/// An iterator over what belongs to one process; to be read.
pub(crate) fn iterate(program: &OwnedFd, pid: u32) -> io::Result<OwnedFd> {
    let task = OneTask { tid: 0, pid, pid_fd: 0, padding: 0 };
    let attribute = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        target_fd: 0,
        attach_type: ATTACH_ITER,
        flags: 0,
        iter_info: &raw const task as u64,
        iter_info_len: size_of::<OneTask>() as u32,
        padding: 0,
    };
    // SAFETY: the attribute points to `task`, of the size that it states.
    let link = unsafe { made(LINK_CREATE, &attribute)? };
    // SAFETY: the attribute consists of numbers.
    unsafe { made(ITER_CREATE, &[link.as_raw_fd() as u32, 0]) }
}

/// A program that tracepoints shall run.
pub(crate) fn load_for_tracepoints(code: &[Instruction]) -> io::Result<OwnedFd> {
    let attribute = ProgLoad {
        prog_type: TYPE_RAW_TRACEPOINT,
        insn_cnt: code.len() as u32,
        insns: code.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        ..ProgLoad::default()
    };
    // SAFETY: the attribute points to a slice and to a string, which outlive the call.
    unsafe { made(PROG_LOAD, &attribute) }
}

/// Has the tracepoint run the program for as long as what it returns is open.
pub(crate) fn attach(program: &OwnedFd, tracepoint: &CStr) -> io::Result<OwnedFd> {
    let name = tracepoint.as_ptr() as u64;
    let attribute = RawTracepoint { name, prog_fd: program.as_raw_fd() as u32, padding: 0 };
    // SAFETY: the attribute points to a string with an end, which outlives the call.
    unsafe { made(RAW_TRACEPOINT_OPEN, &attribute) }
}

/// The number by which another process finds the program (BPF_PROG_GET_FD_BY_ID).
pub(crate) fn id(program: &OwnedFd) -> io::Result<u32> {
    let info = info(program)?;
    // After the type.
    Ok(u32::from_ne_bytes(info[4..8].try_into().expect("4 bytes")))
}

/// How often a program was not run because it was running there already.
pub(crate) fn misses(program: &OwnedFd) -> io::Result<u64> {
    Ok(u64::from_ne_bytes(info(program)?[MISSES..].try_into().expect("8 bytes")))
}

fn info(program: &OwnedFd) -> io::Result<[u8; PROG_INFO]> {
    let mut info = [0u8; PROG_INFO];
    let arguments =
        ObjectInfo { bpf_fd: program.as_raw_fd() as u32, info_len: PROG_INFO as u32, info: info.as_mut_ptr() as u64 };
    // SAFETY: the attribute points to `info`, of the size that it states.
    unsafe { call(OBJECT_INFO, &arguments)? };
    Ok(info)
}

/// A number that programs add to.
#[derive(Debug)]
pub(crate) struct Counter(OwnedFd);

impl Counter {
    pub fn new() -> io::Result<Self> {
        let array = MapCreate { map_type: MAP_ARRAY, key_size: 4, value_size: 8, max_entries: 1, map_flags: 0 };
        // SAFETY: the attribute consists of numbers.
        unsafe { made(MAP_CREATE, &array).map(Self) }
    }

    pub fn read(&self) -> io::Result<u64> {
        let (key, mut value) = (0u32, 0u64);
        let (key, value_at) = (&raw const key as u64, &raw mut value as u64);
        let element = MapElement { map_fd: self.0.as_raw_fd() as u32, padding: 0, key, value: value_at, flags: 0 };
        // SAFETY: the attribute points to a key and a value of the sizes that the map was made with.
        unsafe { call(MAP_LOOKUP, &element)? };
        Ok(value)
    }
}

/// What programs note of tasks and the like, which they know by addresses: so many numbers for each.
#[derive(Debug)]
pub(crate) struct Notes {
    map: OwnedFd,
    numbers: i16,
}

impl Notes {
    pub fn new(max_entries: u32, numbers: i16) -> io::Result<Self> {
        let value_size = numbers as u32 * 8;
        let hash = MapCreate { map_type: MAP_HASH, key_size: 8, value_size, max_entries, map_flags: 0 };
        // SAFETY: the attribute consists of numbers.
        Ok(Self { map: unsafe { made(MAP_CREATE, &hash)? }, numbers })
    }
}

/// Where programs send records to: an event of perf for each processor.
#[derive(Debug)]
pub(crate) struct Outputs(OwnedFd);

impl Outputs {
    pub fn new<'a>(events: impl Iterator<Item = (i32, BorrowedFd<'a>)>) -> io::Result<Self> {
        let events: Vec<(u32, u32)> = events.map(|(cpu, event)| (cpu as u32, event.as_raw_fd() as u32)).collect();
        let max_entries = events.iter().map(|(cpu, _)| cpu + 1).max().unwrap_or(1);
        let array = MapCreate { map_type: MAP_PERF_EVENTS, key_size: 4, value_size: 4, max_entries, map_flags: 0 };
        // SAFETY: the attribute consists of numbers.
        let outputs = unsafe { made(MAP_CREATE, &array)? };
        for (cpu, event) in &events {
            let (key, value) = (&raw const *cpu as u64, &raw const *event as u64);
            let element = MapElement { map_fd: outputs.as_raw_fd() as u32, padding: 0, key, value, flags: 0 };
            // SAFETY: the attribute points to a key and a value of the sizes that the map was made with.
            unsafe { call(MAP_UPDATE, &element)? };
        }
        Ok(Self(outputs))
    }
}

/// The registers that no helper changes, but for the one with the end of the stack.
pub(crate) const R6: u8 = 6;
pub(crate) const R7: u8 = 7;
pub(crate) const R8: u8 = 8;
pub(crate) const R9: u8 = 9;
const R10: u8 = 10;

/// Adds register 1 to what register 0 points to.
const ATOMIC_ADD: Instruction = op(0xdb, 0, 1, 0, 0);

/// How an element of a map is updated.
const ANY: i32 = 0;
const NO_EXIST: i32 = 1;

const GET_CURRENT_TASK: i32 = 35;
const LOOKUP: i32 = 1;
const UPDATE: i32 = 2;
const PERF_OUTPUT: i32 = 25;
const PROBE_READ_USER: i32 = 112;
pub(crate) const SEQ_WRITE: i32 = 127;
const RING_OUTPUT: i32 = 130;
const PROBE_READ_KERNEL: i32 = 113;
const TASK_REGISTERS: i32 = 175;

/// On which condition a program goes on elsewhere; numbers are compared with all their 64 bits.
#[derive(Debug, Clone, Copy)]
pub(crate) enum If {
    Equal = 0x15,
    NotEqual = 0x55,
    /// Unsigned.
    AtLeast = 0x35,
    /// A bit of the number is set.
    Bits = 0x45,
    /// With a sign.
    ZeroOrLess = 0xd5,
    /// With a sign.
    Less = 0xc5,
}

/// A program that grows. Places in it have names.
#[derive(Default)]
pub(crate) struct Assembler {
    code: Vec<Instruction>,
    places: Vec<(&'static str, usize)>,
    jumps: Vec<(usize, &'static str)>,
}

impl Assembler {
    /// The next instruction is there.
    pub fn place(&mut self, name: &'static str) {
        self.places.push((name, self.code.len()));
    }

    pub fn go(&mut self, to: &'static str) {
        self.jumps.push((self.code.len(), to));
        self.code.push(op(0x05, 0, 0, 0, 0));
    }

    pub fn go_if(&mut self, register: u8, condition: If, number: i32, to: &'static str) {
        self.jumps.push((self.code.len(), to));
        self.code.push(op(condition as u8, register, 0, 0, number));
    }

    /// `left` and `right` as unsigned numbers.
    pub fn go_if_at_least(&mut self, left: u8, right: u8, to: &'static str) {
        self.jumps.push((self.code.len(), to));
        self.code.push(op(0x3d, left, right, 0, 0));
    }

    pub fn go_if_not_equal(&mut self, left: u8, right: u8, to: &'static str) {
        self.jumps.push((self.code.len(), to));
        self.code.push(op(0x5d, left, right, 0, 0));
    }

    pub fn copy(&mut self, target: u8, source: u8) {
        self.code.push(op(0xbf, target, source, 0, 0));
    }

    /// The lower 32 bits of it.
    pub fn shorten(&mut self, register: u8) {
        self.code.push(op(0xbc, register, register, 0, 0));
    }

    pub fn add(&mut self, target: u8, source: u8) {
        self.code.push(op(0x0f, target, source, 0, 0));
    }

    pub fn add_number(&mut self, target: u8, number: i32) {
        self.code.push(op(0x07, target, 0, 0, number));
    }

    pub fn subtract(&mut self, target: u8, source: u8) {
        self.code.push(op(0x1f, target, source, 0, 0));
    }

    pub fn exclusive_or(&mut self, target: u8, source: u8) {
        self.code.push(op(0xaf, target, source, 0, 0));
    }

    pub fn shift_left(&mut self, register: u8, bits: i32) {
        self.code.push(op(0x67, register, 0, 0, bits));
    }

    /// The upper 32 bits of it.
    pub fn upper(&mut self, register: u8) {
        self.code.push(op(0x77, register, 0, 0, 32));
    }

    /// Takes its lower 32 bits for a number with a sign.
    pub fn extend_sign(&mut self, register: u8) {
        self.shift_left(register, 32);
        self.code.push(op(0xc7, register, 0, 0, 32));
    }

    /// Argument `number` of the tracepoint, of which `context` tells.
    pub fn argument(&mut self, target: u8, context: u8, number: i16) {
        self.code.push(op(0x79, target, context, number * 8, 0));
    }

    /// From the stack.
    pub fn load(&mut self, target: u8, slot: i16) {
        self.code.push(op(0x79, target, R10, slot, 0));
    }

    /// To the stack.
    pub fn store(&mut self, slot: i16, source: u8) {
        self.code.push(op(0x7b, R10, source, slot, 0));
    }

    pub fn store_number(&mut self, slot: i16, number: i32) {
        self.code.push(op(0x7a, R10, 0, slot, number));
    }

    fn number(&mut self, target: u8, number: i32) {
        self.code.push(op(0xb7, target, 0, 0, number));
    }

    fn stack_address(&mut self, target: u8, slot: i16) {
        self.copy(target, R10);
        self.code.push(op(0x07, target, 0, 0, slot.into()));
    }

    fn map(&mut self, target: u8, map: &OwnedFd) {
        self.code.extend([op(0x18, target, PSEUDO_MAP, 0, map.as_raw_fd()), op(0, 0, 0, 0, 0)]);
    }

    fn helper(&mut self, number: i32) {
        self.code.push(op(0x85, 0, 0, 0, number));
    }

    pub fn current_task(&mut self, target: u8) {
        self.helper(GET_CURRENT_TASK);
        self.copy(target, 0);
    }

    /// Where the registers of a task are with which it has entered the kernel. `task` comes from the iterator, and is not null.
    pub fn task_registers(&mut self, target: u8, task: u8) {
        self.copy(1, task);
        self.helper(TASK_REGISTERS);
        self.copy(target, 0);
    }

    /// Reads `size` bytes of the kernel's memory, 8 at most, at `base` and `offset`, into 8 of the stack, and goes elsewhere if that
    /// cannot be.
    pub fn read(&mut self, slot: i16, size: i32, from: (u8, usize), otherwise: &'static str) {
        self.read_by(PROBE_READ_KERNEL, slot, size, from, otherwise);
    }

    /// The same for any number of bytes, with zeros in place of what cannot be read.
    pub fn read_or_zero(&mut self, slot: i16, size: i32, from: (u8, usize)) {
        self.call_read(PROBE_READ_KERNEL, slot, size, from);
    }

    /// The same with memory of the current task.
    pub fn read_user(&mut self, slot: i16, size: i32, from: (u8, usize), otherwise: &'static str) {
        self.read_by(PROBE_READ_USER, slot, size, from, otherwise);
    }

    fn read_by(&mut self, helper: i32, slot: i16, size: i32, from: (u8, usize), otherwise: &'static str) {
        self.call_read(helper, slot, size, from);
        self.go_if(0, If::NotEqual, 0, otherwise);
    }

    fn call_read(&mut self, helper: i32, slot: i16, size: i32, (base, offset): (u8, usize)) {
        self.store_number(slot, 0);
        self.copy(3, base);
        self.code.push(op(0x07, 3, 0, 0, offset as i32));
        self.stack_address(1, slot);
        self.number(2, size);
        self.helper(helper);
    }

    /// Writes bytes of the stack to who reads the iterator, of which `context` tells.
    pub fn write(&mut self, context: u8, seq: i16, (slot, size): (i16, i32)) {
        self.argument(1, context, 0);
        self.code.push(op(0x79, 1, 1, seq, 0));
        self.stack_address(2, slot);
        self.number(3, size);
        self.helper(SEQ_WRITE);
    }

    /// Adds one, and goes on there.
    pub fn count(&mut self, counter: &Counter, slot: i16, to: &'static str) {
        self.store_number(slot, 0);
        self.map(1, &counter.0);
        self.stack_address(2, slot);
        self.helper(LOOKUP);
        self.go_if(0, If::Equal, 0, to);
        self.number(1, 1);
        self.code.push(ATOMIC_ADD);
        self.go(to);
    }

    /// Notes the numbers from one slot on for what is in another one, and goes elsewhere if that cannot be.
    pub fn note(&mut self, notes: &Notes, key: i16, numbers: i16, otherwise: &'static str) {
        self.update(notes, key, numbers, ANY);
        self.go_if(0, If::NotEqual, 0, otherwise);
    }

    /// The same only if nothing is noted yet; whether that was so or could be done remains open.
    pub fn note_first(&mut self, notes: &Notes, key: i16, numbers: i16) {
        self.update(notes, key, numbers, NO_EXIST);
    }

    fn update(&mut self, notes: &Notes, key: i16, numbers: i16, flags: i32) {
        self.map(1, &notes.map);
        self.stack_address(2, key);
        self.stack_address(3, numbers);
        self.number(4, flags);
        self.helper(UPDATE);
    }

    /// Fetches what is noted into slots from one on, or goes elsewhere if nothing is.
    pub fn noted(&mut self, notes: &Notes, key: i16, numbers: i16, otherwise: &'static str) {
        self.find(notes, key, otherwise);
        for number in 0..notes.numbers {
            self.code.push(op(0x79, 1, 0, number * 8, 0));
            self.store(numbers + number * 8, 1);
        }
    }

    /// Adds to the first number that is noted, or goes elsewhere if nothing is.
    pub fn add_noted(&mut self, notes: &Notes, key: i16, number: i64, otherwise: &'static str) {
        self.find(notes, key, otherwise);
        self.code.extend([op(0x18, 1, 0, 0, number as i32), op(0, 0, 0, 0, (number >> 32) as i32)]);
        self.code.push(ATOMIC_ADD);
    }

    fn find(&mut self, notes: &Notes, key: i16, otherwise: &'static str) {
        self.map(1, &notes.map);
        self.stack_address(2, key);
        self.helper(LOOKUP);
        self.go_if(0, If::Equal, 0, otherwise);
    }

    /// Sends bytes of the stack, and goes elsewhere if that cannot be.
    pub fn send(&mut self, outputs: &Outputs, context: u8, (slot, size): (i16, i32), otherwise: &'static str) {
        self.copy(1, context);
        self.map(2, &outputs.0);
        // The processor that this one is.
        self.code.push(op(0xb4, 3, 0, 0, -1));
        self.stack_address(4, slot);
        self.number(5, size);
        self.helper(PERF_OUTPUT);
        self.go_if(0, If::NotEqual, 0, otherwise);
    }

    /// Sends bytes of the stack. Where there is no room nothing is sent.
    pub fn send_to_ring(&mut self, ring: &RingBuffer, (slot, size): (i16, i32)) {
        self.map(1, &ring.map);
        self.stack_address(2, slot);
        self.number(3, size);
        self.number(4, 0);
        self.helper(RING_OUTPUT);
    }

    pub fn end(&mut self) {
        self.number(0, 0);
        self.code.push(op(0x95, 0, 0, 0, 0));
    }

    /// All of it, with the ways in it found.
    pub fn finish(mut self) -> Vec<Instruction> {
        for (at, to) in self.jumps {
            let place = self.places.iter().find(|(name, _)| *name == to).expect("a place that has been named").1;
            self.code[at].offset = i16::try_from(place as i64 - at as i64 - 1).expect("a short program");
        }
        self.code
    }
}
