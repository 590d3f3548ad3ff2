//! A process that resizes, copies and moves its mappings of an object between two looks, so that both list the same mapping.

use super::*;

/// Has an anonymous object mapped as a whole by a child, and 8 pages of it itself.
const RESIZER: &str = "
import ctypes, os, signal, sys
c = ctypes.CDLL(None, use_errno=True)
for call in (c.mmap, c.mremap): call.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
c.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
P = 4096; n = 2048; near, far, copy = 0x300000000000, 0x310000000000, 0x320000000000
assert c.mmap(near, n * P, 3, 0x100021, -1, 0) == near
for i in range(0, n, 2): ctypes.memset(near + i * P, 1 + i % 200, 1)
holder = os.fork()
if holder == 0:
    c.prctl(1, 9)
    while True: signal.pause()
assert c.mremap(near, n * P, 8 * P, 0, None) == near
version = 0
def write(at): global version; version += 1; ctypes.memset(at, version % 256, 16)
print('ready', flush=True)
for line in sys.stdin:
    deed, page = line.split(); page = int(page)
    if deed == 'swell':
        assert c.mremap(near, 8 * P, n * P, 0, None) == near
        write(near + page * P)
        assert c.mremap(near, n * P, 8 * P, 0, None) == near
    elif deed == 'copy':
        assert c.mremap(near, 0, n * P, 3, copy) == copy
        write(copy + page * P)
        assert c.munmap(copy, n * P) == 0
    elif deed == 'away':
        assert c.mremap(near, 8 * P, n * P, 3, far) == far
        write(far + page * P)
        assert c.mremap(far, n * P, 8 * P, 3, near) == near
    elif deed == 'write': write(near + page % 8 * P)
    print('done', flush=True)
";

impl Keeper {
    fn that_resizes() -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", RESIZER]);
        Self::of(command)
    }
}

#[test]
fn what_is_written_through_a_mapping_that_is_gone_at_the_next_look_is_found() {
    for deed in ["swell", "copy", "away"] {
        let mut keeper = Keeper::that_resizes();
        keeper.settle();
        keeper.does(deed, 900);
        keeper.round(Look::Last);
        keeper.assert_same();
    }
}

#[test]
fn what_is_written_through_a_mapping_that_came_after_the_list_and_went_before_the_next_is_found() {
    for deed in ["swell", "copy", "away"] {
        let mut keeper = Keeper::that_resizes();
        keeper.settle();
        let described = keeper.source.find(&[keeper.child.id()], Where::Everywhere).unwrap();
        keeper.destination.describe(&described);
        keeper.does(deed, 700);
        keeper.source.look(Look::Round).unwrap();
        keeper.source.send(&mut keeper.streams, &Counters::default()).unwrap();
        let _: u64 = keeper.streams.iter_mut().map(|stream| keeper.destination.take(stream)).sum();
        keeper.does(deed, 900);
        keeper.round(Look::Last);
        keeper.assert_same();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn however_it_is_mapped_meanwhile_it_is_the_same_in_the_end(
        deeds in proptest::collection::vec((0usize..6, 0u64..2048), 1..60)
    ) {
        let mut keeper = Keeper::that_resizes();
        keeper.settle();
        for (deed, page) in deeds {
            match ["swell", "copy", "away", "write"].get(deed) {
                Some(deed) => keeper.does(deed, page),
                None => drop(keeper.round(Look::Round)),
            }
        }
        keeper.round(Look::Last);
        keeper.assert_same();
    }
}

#[test]
fn what_a_process_unmaps_of_one_object_says_nothing_of_another() {
    let mut keeper = Keeper::that_resizes();
    keeper.settle();
    keeper.does("write", 3);
    assert_eq!(keeper.round(Look::Last), (PAGE_SIZE, PAGE_SIZE), "it unmaps nothing of it");
}
