//! The BPF programs of the log, written with what this kernel's structures look like.

use std::io;

use crate::bpf::{Assembler, Counter, If, Instruction, Notes, Outputs, R6, R7, R8, R9};
use crate::btf::Btf;

/// linux/magic.h.
const TMPFS_MAGIC: i32 = 0x0102_1994;
/// In `thread_info.status`: the call is one of a 32-bit program (arch/x86/include/asm/thread_info.h).
const TS_COMPAT: i32 = 2;
/// In a call's number: it is one of an x32 program.
const X32: i32 = 0x4000_0000;

/// Where in the kernel's structures there is what the programs look at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields {
    registers: Registers,
    task_status: usize,
    task_files: usize,
    task_namespaces: usize,
    namespaces_mount: usize,
    mount_number: usize,
    files_count: usize,
    files_table: usize,
    table_size: usize,
    table_files: usize,
    file_inode: usize,
    file_flags: usize,
    file_position: usize,
    file_references: usize,
    /// What the file's references say when there is one.
    one_reference: i32,
    inode_filesystem: usize,
    inode_number: usize,
    filesystem_device: usize,
    filesystem_magic: usize,
}

/// Of `struct pt_regs`: the call's number and arguments.
#[derive(Debug, Clone, Copy)]
struct Registers {
    number: usize,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
}

impl Fields {
    pub fn find(btf: &Btf) -> io::Result<Self> {
        let find = |structure: &str, names: &[&str]| {
            let fields = btf.fields(structure);
            names.iter().map(|name| fields.get(*name).copied().ok_or_else(lacking)).collect::<io::Result<Vec<usize>>>()
        };
        let lists = [
            find("pt_regs", &["orig_ax", "di", "si", "dx", "r10"])?,
            find("task_struct", &["thread_info", "files", "nsproxy"])?,
            [find("thread_info", &["status"])?, find("nsproxy", &["mnt_ns"])?].concat(),
            [find("mnt_namespace", &["ns"])?, find("ns_common", &["inum"])?].concat(),
            find("files_struct", &["count", "fdt"])?,
            find("fdtable", &["max_fds", "fd"])?,
            find("file", &["f_inode", "f_flags", "f_pos"])?,
            find("inode", &["i_sb", "i_ino"])?,
            find("super_block", &["s_dev", "s_magic"])?,
        ];
        let [registers, task, parts, namespace, files, table, file, inode, filesystem] = &lists;
        // Since Linux 6.13 the count begins at 0.
        let counts = [("f_ref", 0), ("f_count", 1)];
        let counted = |(name, one)| Some((*btf.fields("file").get(name)?, one));
        let (file_references, one_reference) = counts.into_iter().find_map(counted).ok_or_else(lacking)?;
        let [number, first, second, third, fourth] = registers[..] else { return Err(lacking()) };
        Ok(Self {
            registers: Registers { number, first, second, third, fourth },
            task_status: task[0] + parts[0],
            task_files: task[1],
            task_namespaces: task[2],
            namespaces_mount: parts[1],
            mount_number: namespace[0] + namespace[1],
            files_count: files[0],
            files_table: files[1],
            table_size: table[0],
            table_files: table[1],
            file_inode: file[0],
            file_flags: file[1],
            file_position: file[2],
            file_references,
            one_reference,
            inode_filesystem: inode[0],
            inode_number: inode[1],
            filesystem_device: filesystem[0],
            filesystem_magic: filesystem[1],
        })
    }
}

fn lacking() -> io::Error {
    io::ErrorKind::Unsupported.into()
}

/// Slots of the programs' stacks.
const SCRATCH: i16 = -8;
const TASK: i16 = -16;
const DESCRIPTOR: i16 = -24;
const FILES: i16 = -32;
const FILE: i16 = -40;
const WAY: i16 = -48;
/// The record that is sent: device, inode, start (-1: a change of all of it begins) and end.
const DEVICE: i16 = -80;
const INODE: i16 = -72;
const START: i16 = -64;
const END: i16 = -56;
const RECORD: i32 = 32;
/// What is noted of a task: how certain it is what its call changes. Where its table of descriptors is a common one, also by which number
/// something is noted of the descriptor, what that was, and the open file.
const NOTED: i16 = -112;
const NOTED_KEY: i16 = -104;
const NOTED_COUNT: i16 = -96;
const NOTED_FILE: i16 = -88;
/// The address of the table of descriptors.
const TABLE: i16 = -120;
/// What is noted of the descriptor now.
const COUNT: i16 = -128;

/// How a call says where it wrote: not at all, by the file's position, or in its fourth argument.
const WAY_NONE: i32 = 0;
const WAY_POSITION: i32 = 1;
const WAY_ARGUMENT: i32 = 2;

/// What is noted of a task: nothing is certain; its table of descriptors is its own; so is the open file that it writes to; others have the
/// table, too; it is replacing files in such a table.
const UNCERTAIN: i32 = 0;
const OWN_TABLE: i32 = 1;
const OWN_FILE: i32 = 2;
const COMMON_TABLE: i32 = 3;
const REPLACES: i32 = 4;

/// What is noted of a descriptor in a common table: in the upper half how many calls are under way that take a file away from it, in the lower
/// one how many have begun.
const BEGUN: i64 = 1 << 32 | 1;
const ENDED: i64 = -(1 << 32);
/// Where in the key of such a note the descriptor is; the rest is the table's address, whose upper bits are all the same.
const KEY_DESCRIPTOR: i32 = 48;
/// Stands for all descriptors of a table: for calls that make one, whose number is not known before.
const ANY_DESCRIPTOR: i32 = -1;

/// Writes the programs. Their registers: R6 the context, R7 what the call returned, R8 its registers.
pub(super) struct Writer<'a> {
    pub fields: Fields,
    pub namespace: u32,
    pub outputs: &'a Outputs,
    pub untold: &'a Counter,
    /// What is noted of tasks, and of descriptors in tables that are common to several.
    pub tasks: &'a Notes,
    pub descriptors: &'a Notes,
}

impl Writer<'_> {
    /// Goes to `other` if the current task, which is in its slot, is not in the namespace.
    fn only_own(&self, code: &mut Assembler, other: &'static str) {
        code.load(R9, TASK);
        code.read(SCRATCH, 8, (R9, self.fields.task_namespaces), other);
        code.load(R9, SCRATCH);
        code.go_if(R9, If::Equal, 0, other);
        code.read(SCRATCH, 8, (R9, self.fields.namespaces_mount), other);
        code.load(R9, SCRATCH);
        code.go_if(R9, If::Equal, 0, other);
        code.read(SCRATCH, 4, (R9, self.fields.mount_number), other);
        code.load(R9, SCRATCH);
        // As the comparison takes its number.
        code.extend_sign(R9);
        code.go_if(R9, If::NotEqual, self.namespace.cast_signed(), other);
    }

    /// Looks at the inode that R9 is, and goes out if it is not in a tmpfs. Fills the record: all of it.
    fn inode(&self, code: &mut Assembler) {
        let fields = &self.fields;
        code.read(INODE, 8, (R9, fields.inode_number), "lost");
        code.read(SCRATCH, 8, (R9, fields.inode_filesystem), "lost");
        code.load(R9, SCRATCH);
        code.read(SCRATCH, 8, (R9, fields.filesystem_magic), "lost");
        code.read(DEVICE, 4, (R9, fields.filesystem_device), "lost");
        code.load(R9, SCRATCH);
        code.go_if(R9, If::NotEqual, TMPFS_MAGIC, "out");
        code.store_number(START, 0);
        code.store_number(END, -1);
    }

    /// The ends of a program: the record is sent; or it is counted that something is not told, by a task of the namespace or by any.
    fn ends(&self, mut code: Assembler, (sends, is_own): (bool, bool)) -> Vec<Instruction> {
        if sends {
            code.place("send");
            code.send(self.outputs, R6, (DEVICE, RECORD), "lost");
            code.go("out");
        }
        if is_own {
            code.place("untold");
            self.only_own(&mut code, "out");
        }
        code.place("lost");
        code.count(self.untold, SCRATCH, "out");
        code.place("out");
        code.end();
        code.finish()
    }

    /// At the end of each call.
    pub fn calls(&self) -> Vec<Instruction> {
        let fields = &self.fields;
        let mut code = Assembler::default();
        code.copy(R6, 1);
        code.argument(R8, R6, 0);
        code.argument(R7, R6, 1);
        self.task(&mut code);
        code.read(SCRATCH, 4, (R9, fields.task_status), "lost");
        code.load(R9, SCRATCH);
        code.go_if(R9, If::Bits, TS_COMPAT, "untold");
        code.read(SCRATCH, 8, (R8, fields.registers.number), "lost");
        code.load(R9, SCRATCH);
        // What a signal's handler returned from is no call.
        code.go_if(R9, If::Equal, -1, "out");
        code.go_if(R9, If::AtLeast, X32, "untold");
        for (calls, place) in ways() {
            for call in *calls {
                code.go_if(R9, If::Equal, *call as i32, place);
            }
        }
        for (call, _) in replacing() {
            code.go_if(R9, If::Equal, *call as i32, "replaced");
        }
        code.go_if(R9, If::Equal, libc::SYS_close_range as i32, "range is closed");
        code.go("out");

        code.place("write");
        code.go_if(R7, If::ZeroOrLess, 0, "out");
        code.store_number(WAY, WAY_POSITION);
        code.go("first");
        code.place("write at");
        code.go_if(R7, If::ZeroOrLess, 0, "out");
        code.store_number(WAY, WAY_ARGUMENT);
        code.go("first");
        code.place("first is changed");
        code.store_number(WAY, WAY_NONE);
        code.place("first");
        code.read(SCRATCH, 8, (R8, fields.registers.first), "lost");
        code.go("descriptor");
        code.place("third is changed");
        code.store_number(WAY, WAY_NONE);
        code.read(SCRATCH, 8, (R8, fields.registers.third), "lost");
        code.go("descriptor");
        for (place, flags) in [("open", fields.registers.second), ("open at", fields.registers.third)] {
            code.place(place);
            code.read(SCRATCH, 8, (R8, flags), "lost");
            code.load(R9, SCRATCH);
            code.go_if(R9, If::Bits, libc::O_TRUNC, "result is changed");
            code.go("out");
        }
        code.place("open how");
        code.read(SCRATCH, 8, (R8, fields.registers.third), "lost");
        code.load(R9, SCRATCH);
        // The flags are first in what is pointed to.
        code.read_user(SCRATCH, 8, (R9, 0), "result is changed");
        code.load(R9, SCRATCH);
        code.go_if(R9, If::Bits, libc::O_TRUNC, "result is changed");
        code.go("out");
        code.place("result is changed");
        code.go_if(R7, If::Less, 0, "out");
        code.store_number(WAY, WAY_NONE);
        code.store(SCRATCH, R7);

        code.place("descriptor");
        descriptor(&mut code);
        self.certainty(&mut code);
        self.file(&mut code, "no file");
        self.unchanged(&mut code, "same file");
        code.place("same file");
        code.load(R9, FILE);
        code.read(SCRATCH, 8, (R9, fields.file_inode), "lost");
        code.load(R9, SCRATCH);
        self.inode(&mut code);
        self.position(&mut code);
        code.go("send");

        code.place("no file");
        code.store_number(FILE, 0);
        self.unchanged(&mut code, "out");
        code.go("out");

        code.place("replaced");
        self.noted(&mut code, "out");
        code.load(R9, NOTED);
        code.go_if(R9, If::NotEqual, REPLACES, "out");
        for (key, next) in [(NOTED_KEY, "any of them"), (NOTED_FILE, "all replaced")] {
            code.load(R9, key);
            code.go_if(R9, If::Equal, 0, next);
            code.add_noted(self.descriptors, key, ENDED, "lost");
            code.place(next);
        }
        code.store_number(NOTED, UNCERTAIN);
        code.note(self.tasks, TASK, NOTED, "lost");
        code.go("out");

        code.place("range is closed");
        self.table(&mut code, "lost");
        code.read(SCRATCH, 4, (R9, fields.files_count), "lost");
        code.load(R9, SCRATCH);
        code.go_if(R9, If::Equal, 1, "out");
        self.ends(code, (true, true))
    }

    /// At the beginning of each call.
    pub fn begins(&self) -> Vec<Instruction> {
        let fields = &self.fields;
        let mut code = Assembler::default();
        code.copy(R6, 1);
        code.argument(R8, R6, 0);
        code.argument(R9, R6, 1);
        for (calls, place) in ways() {
            let place = match *place {
                "write" => "by position",
                "write at" | "first is changed" => "by first",
                "third is changed" => "by third",
                "untold" => continue,
                _ => "by result",
            };
            for call in *calls {
                code.go_if(R9, If::Equal, *call as i32, place);
            }
        }
        for (call, place) in replacing() {
            code.go_if(R9, If::Equal, *call as i32, place);
        }
        code.go("out");

        code.place("by position");
        code.store_number(WAY, WAY_POSITION);
        code.go("first");
        code.place("by first");
        code.store_number(WAY, WAY_NONE);
        code.place("first");
        code.read(SCRATCH, 8, (R8, fields.registers.first), "lost");
        code.go("descriptor");
        code.place("by result");
        code.store_number(WAY, WAY_NONE);
        code.store_number(SCRATCH, ANY_DESCRIPTOR);
        code.go("descriptor");
        code.place("by third");
        code.store_number(WAY, WAY_NONE);
        code.read(SCRATCH, 8, (R8, fields.registers.third), "lost");
        code.place("descriptor");
        descriptor(&mut code);
        self.task(&mut code);
        clear_noted(&mut code);
        self.table(&mut code, "note");
        code.read(SCRATCH, 4, (R9, fields.files_count), "note");
        code.load(R9, SCRATCH);
        code.go_if(R9, If::NotEqual, 1, "common table");
        code.store_number(NOTED, OWN_TABLE);
        code.load(R9, WAY);
        code.go_if(R9, If::Equal, WAY_NONE, "note");
        self.file(&mut code, "note");
        code.read(SCRATCH, 8, (R9, fields.file_references), "note");
        code.load(R9, SCRATCH);
        code.go_if(R9, If::NotEqual, fields.one_reference, "note");
        code.store_number(NOTED, OWN_FILE);
        code.go("note");

        code.place("common table");
        self.only_own(&mut code, "note");
        self.key(&mut code, NOTED_KEY);
        code.noted(self.descriptors, NOTED_KEY, NOTED_COUNT, "not noted yet");
        code.go("count");
        code.place("not noted yet");
        code.note_first(self.descriptors, NOTED_KEY, NOTED_COUNT);
        code.noted(self.descriptors, NOTED_KEY, NOTED_COUNT, "note");
        code.place("count");
        code.load(R9, NOTED_COUNT);
        code.upper(R9);
        code.go_if(R9, If::NotEqual, 0, "note");
        code.store_number(NOTED, COMMON_TABLE);
        self.file(&mut code, "note");
        code.store(NOTED_FILE, R9);
        code.go("note");

        for (place, argument) in
            [("replaces first", fields.registers.first), ("replaces second", fields.registers.second)]
        {
            code.place(place);
            code.read(SCRATCH, 8, (R8, argument), "lost");
            code.go("replaces");
        }
        code.place("replaces");
        descriptor(&mut code);
        self.task(&mut code);
        clear_noted(&mut code);
        self.table(&mut code, "out");
        for (key, next) in [(NOTED_KEY, "its own"), (NOTED_FILE, "all replace")] {
            self.key(&mut code, COUNT);
            code.add_noted(self.descriptors, COUNT, BEGUN, next);
            code.load(R9, COUNT);
            code.store(key, R9);
            code.store_number(NOTED, REPLACES);
            code.place(next);
            code.store_number(DESCRIPTOR, ANY_DESCRIPTOR);
        }
        code.load(R9, NOTED);
        code.go_if(R9, If::NotEqual, REPLACES, "out");
        code.place("note");
        code.note(self.tasks, TASK, NOTED, "lost");
        code.go("out");
        self.ends(code, (false, false))
    }

    /// Puts the number by which something is noted of a descriptor into a slot.
    fn key(&self, code: &mut Assembler, slot: i16) {
        code.load(R9, DESCRIPTOR);
        code.shift_left(R9, KEY_DESCRIPTOR);
        code.load(1, TABLE);
        code.exclusive_or(R9, 1);
        code.store(slot, R9);
    }

    /// Puts the current task into its slot.
    fn task(&self, code: &mut Assembler) {
        code.current_task(R9);
        code.store(TASK, R9);
    }

    /// Puts the task's table of descriptors into its slots and R9.
    fn table(&self, code: &mut Assembler, otherwise: &'static str) {
        code.load(R9, TASK);
        code.read(FILES, 8, (R9, self.fields.task_files), otherwise);
        code.load(R9, FILES);
        code.store(TABLE, R9);
    }

    /// Fetches what was noted of the task.
    fn noted(&self, code: &mut Assembler, otherwise: &'static str) {
        clear_noted(code);
        code.noted(self.tasks, TASK, NOTED, otherwise);
    }

    /// Goes on with what was noted at the call's beginning.
    fn certainty(&self, code: &mut Assembler) {
        self.noted(code, "uncertain");
        code.load(R9, NOTED);
        code.go_if(R9, If::NotEqual, UNCERTAIN, "certain");
        code.place("uncertain");
        code.store_number(WAY, WAY_NONE);
        self.only_own(code, "certain");
        code.count(self.untold, SCRATCH, "certain");
        code.place("certain");
        self.table(code, "lost");
    }

    /// Where others have the task's table, too: nobody has begun to take a file away from the descriptor since the call began, and the file,
    /// which is in its slot, is the same as then. Else it is not told.
    fn unchanged(&self, code: &mut Assembler, otherwise: &'static str) {
        code.load(R9, NOTED);
        code.go_if(R9, If::NotEqual, COMMON_TABLE, otherwise);
        code.noted(self.descriptors, NOTED_KEY, COUNT, "untold");
        code.load(R9, COUNT);
        code.load(1, NOTED_COUNT);
        code.go_if_not_equal(R9, 1, "untold");
        code.load(1, NOTED_FILE);
        code.go_if(1, If::Equal, 0, otherwise);
        code.load(R9, FILE);
        code.go_if_not_equal(R9, 1, "untold");
    }

    /// Finds the file of the descriptor in the table of its slot, for R9 and its own slot, or goes elsewhere if there is none.
    fn file(&self, code: &mut Assembler, otherwise: &'static str) {
        let fields = &self.fields;
        code.load(R9, FILES);
        code.read(FILES, 8, (R9, fields.files_table), otherwise);
        code.load(R9, FILES);
        code.read(SCRATCH, 4, (R9, fields.table_size), otherwise);
        code.load(R9, SCRATCH);
        code.load(1, DESCRIPTOR);
        code.go_if_at_least(1, R9, otherwise);
        code.load(R9, FILES);
        code.read(SCRATCH, 8, (R9, fields.table_files), otherwise);
        code.load(R9, SCRATCH);
        code.load(1, DESCRIPTOR);
        code.shift_left(1, 3);
        code.add(R9, 1);
        code.read(FILE, 8, (R9, 0), otherwise);
        code.load(R9, FILE);
        code.go_if(R9, If::Equal, 0, otherwise);
    }

    /// Notes where the call wrote, if that is certain.
    fn position(&self, code: &mut Assembler) {
        let fields = &self.fields;
        code.load(R9, WAY);
        code.go_if(R9, If::Equal, WAY_NONE, "send");
        code.go_if(R9, If::Equal, WAY_ARGUMENT, "by argument");
        code.load(R9, NOTED);
        code.go_if(R9, If::NotEqual, OWN_FILE, "send");
        code.load(R9, FILE);
        code.read(SCRATCH, 8, (R9, fields.file_position), "lost");
        code.load(R9, SCRATCH);
        code.store(END, R9);
        code.subtract(R9, R7);
        code.store(START, R9);
        code.go("send");
        code.place("by argument");
        code.load(R9, FILE);
        code.read(SCRATCH, 4, (R9, fields.file_flags), "lost");
        code.load(R9, SCRATCH);
        // Then it is written at the end, whatever the argument says.
        code.go_if(R9, If::Bits, libc::O_APPEND, "send");
        code.read(SCRATCH, 8, (R8, fields.registers.fourth), "lost");
        code.load(R9, SCRATCH);
        code.store(START, R9);
        code.add(R9, R7);
        code.store(END, R9);
    }

    /// Where something happens that changes files unseen.
    pub fn untold(&self) -> Vec<Instruction> {
        let mut code = Assembler::default();
        self.task(&mut code);
        self.ends(code, (false, true))
    }

    /// Where a file's times are changed: by tasks of other namespaces that is told. What they change follows.
    pub fn times(&self) -> Vec<Instruction> {
        let mut code = Assembler::default();
        code.copy(R6, 1);
        code.argument(R9, R6, 0);
        self.inode(&mut code);
        self.task(&mut code);
        code.store_number(START, -1);
        self.only_own(&mut code, "send");
        code.go("out");
        self.ends(code, (true, false))
    }
}

/// Takes the number that has been read for the call's descriptor, which is one of 32 bits.
fn descriptor(code: &mut Assembler) {
    code.load(R9, SCRATCH);
    code.shorten(R9);
    code.store(DESCRIPTOR, R9);
}

fn clear_noted(code: &mut Assembler) {
    [NOTED, NOTED_KEY, NOTED_COUNT, NOTED_FILE].into_iter().for_each(|slot| code.store_number(slot, 0));
}

/// The calls that take a file away from a descriptor, by where in the program it goes on for them.
fn replacing() -> &'static [(libc::c_long, &'static str)] {
    #[cfg(target_arch = "x86_64")]
    return &[
        (libc::SYS_close, "replaces first"),
        (libc::SYS_dup2, "replaces second"),
        (libc::SYS_dup3, "replaces second"),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    return &[];
}

/// The calls that change files, by where in a program it goes on for them.
fn ways() -> &'static [(&'static [libc::c_long], &'static str)] {
    #[cfg(target_arch = "x86_64")]
    return &[
        (&[libc::SYS_write, libc::SYS_writev], "write"),
        (&[libc::SYS_pwrite64, libc::SYS_pwritev], "write at"),
        (&[libc::SYS_ftruncate, libc::SYS_fallocate, libc::SYS_sendfile, libc::SYS_pwritev2], "first is changed"),
        (&[libc::SYS_splice, libc::SYS_copy_file_range], "third is changed"),
        (&[libc::SYS_open], "open"),
        (&[libc::SYS_openat, libc::SYS_open_by_handle_at], "open at"),
        (&[libc::SYS_openat2], "open how"),
        (&[libc::SYS_creat], "result is changed"),
        (&[libc::SYS_truncate, libc::SYS_io_submit, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter], "untold"),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    return &[];
}
