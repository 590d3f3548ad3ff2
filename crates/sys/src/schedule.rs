//! Threads that others wait for come first.

/// `struct sched_attr` of linux/sched/types.h, in its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const _: () = assert!(size_of::<Attributes>() == 48);

const SCHED_OTHER: u32 = 0;
const SCHED_RR: u32 = 2;
const RESET_ON_FORK: u64 = 1;
/// The shortest slice that the kernel lets an ordinary thread ask for, in ns: since Linux 6.12 one with a shorter slice does not
/// wait for the end of another one's.
const SLICE: u64 = 100_000;

fn set(thread: u32, attributes: &Attributes) -> bool {
    // SAFETY: the structure is as large as its size field says, and the call reads it only.
    unsafe { libc::syscall(libc::SYS_sched_setattr, thread, std::ptr::from_ref(attributes), 0) == 0 }
}

/// How the scheduler treats a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Before every ordinary thread: for what is short, and waited for by a container.
    Realtime,
    /// An ordinary one with a larger share and short slices: for what takes longer.
    Favoured,
    /// Like all others.
    Ordinary,
}

/// Gives the calling thread a standing, or the next one that the system lets it have (where its cgroup has no realtime budget, or
/// it no right to any). Returns which it has; threads and processes that it starts are ordinary ones.
pub fn stand(wanted: Standing) -> Standing {
    stand_for(0, wanted)
}

/// The same for another thread, or a process that has one only.
pub fn stand_for(thread: u32, wanted: Standing) -> Standing {
    let size = size_of::<Attributes>() as u32;
    let own = |policy| Attributes { size, policy, flags: RESET_ON_FORK, ..Attributes::default() };
    let all = [
        (Standing::Realtime, Attributes { priority: 1, ..own(SCHED_RR) }),
        (Standing::Favoured, Attributes { nice: -20, runtime: SLICE, ..own(SCHED_OTHER) }),
        (Standing::Ordinary, own(SCHED_OTHER)),
    ];
    let from = all.iter().skip_while(|(standing, _)| *standing != wanted);
    from.into_iter()
        .find(|(_, attributes)| set(thread, attributes))
        .map_or(Standing::Ordinary, |(standing, _)| *standing)
}

/// Does work that may give the calling thread another standing, which then has the one again that it had.
pub fn keeping<T>(work: impl FnOnce() -> T) -> T {
    let mut had = Attributes::default();
    let size = size_of::<Attributes>();
    // SAFETY: the kernel writes as many bytes at most as it is told the structure has, all of which may have any value.
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut had, size, 0) == 0 };
    let result = work();
    if known {
        had.size = size as u32;
        set(0, &had);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_favoured_and_the_next_one_is_ordinary() {
        std::thread::spawn(|| {
            let standing = stand(Standing::Realtime);
            let nice = || -> i32 {
                let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
                stat.rsplit_once(") ").unwrap().1.split(' ').nth(15).unwrap().parse().unwrap()
            };
            // The column is the priority: negative for realtime, 20 + nice for the others.
            match standing {
                Standing::Realtime => assert!(nice() < 0),
                Standing::Favoured => assert_eq!(nice(), 0),
                Standing::Ordinary => println!("skipped: no right to a better priority"),
            }
            std::thread::spawn(move || assert_eq!(nice(), 20)).join().unwrap();
            stand(Standing::Ordinary);
            assert_eq!(nice(), 20);
            keeping(|| stand(Standing::Realtime));
            assert_eq!(nice(), 20);
        })
        .join()
        .unwrap();
    }
}
