//! What every way to track writes must do, whatever the tasks do between and within rounds: at the end the destination has what
//! is there, byte by byte, and nothing that is not there any more. Each case runs with each way that this kernel has; the ways
//! that it has not are named on lines that begin with `skipped`.
//!
//! `make test-trackers` runs the same program under a kernel that has soft-dirty bits.

mod measure;
mod mirror;
mod raw;
mod subject;

use std::io::IoSlice;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use tranship_memory::tracker::{Method, Tracker};

use mirror::{Mirror, found};
use raw::PAGE;
use subject::Subject;

type Case = fn(Method);

const CASES: [(&str, Case); 25] = [
    ("just_what_was_written_is_found", just_what_was_written_is_found),
    ("what_is_left_is_told_and_found_all_the_same", what_is_left_is_told_and_found_all_the_same),
    ("a_sample_tells_how_much_is_written", a_sample_tells_how_much_is_written),
    ("zeros_of_what_is_left_are_told", zeros_of_what_is_left_are_told),
    ("old_content_that_comes_back_is_not_taken_for_what_was_sent", old_content_that_comes_back),
    ("what_is_written_again_before_its_turn_is_sent_later", written_again_before_its_turn),
    ("what_is_written_again_and_moved_before_its_turn_is_sent_later", written_again_and_moved),
    ("threads_write_all_the_time", threads_write_all_the_time),
    ("a_process_forks_between_rounds", a_process_forks_between_rounds),
    ("two_processes_have_one_memory", two_processes_have_one_memory),
    ("a_process_is_met_after_its_child", a_process_is_met_after_its_child),
    ("a_process_executes_a_program_between_rounds", a_process_executes_a_program),
    ("mappings_come_and_go_at_the_same_place", mappings_come_and_go_at_the_same_place),
    ("mappings_move_and_grow", mappings_move_and_grow),
    ("mappings_change_all_the_time_and_no_change_fails", mappings_change_all_the_time),
    ("a_mapping_that_was_not_watched_joins_one_that_was", a_mapping_joins_another),
    ("a_part_of_a_mapping_comes_back", a_part_of_a_mapping_comes_back),
    ("content_is_thrown_away", content_is_thrown_away),
    ("pages_that_their_own_task_may_not_read", pages_that_their_own_task_may_not_read),
    ("others_write", others_write),
    ("huge_pages_are_written_and_torn", huge_pages_are_written_and_torn),
    ("a_confined_task", a_confined_task),
    ("a_task_ends", a_task_ends),
    ("a_task_that_does_not_stand_still", a_task_that_does_not_stand_still),
    ("whatever_comes_by_chance", whatever_comes_by_chance),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [subject::ARGUMENT] => {
            subject::main().expect("the subject can do what it is told");
            return ExitCode::SUCCESS;
        }
        [measure::ARGUMENT, ref mib @ ..] => {
            measure::main(mib.first().map_or(1024, |mib| mib.parse().expect("a number of MiB")));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let mut trials = Vec::new();
    for method in Method::ALL {
        match method.available() {
            Ok(()) => trials.extend(CASES.map(|(name, case)| {
                Trial::test(format!("{method}::{name}"), move || {
                    case(method);
                    Ok(())
                })
            })),
            Err(why) => println!("skipped: the cases for {method}, {why}"),
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Of a large container not every page is watched.
fn a_sample_tells_how_much_is_written(_: Method) {
    const PAGES: usize = 8192;
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(PAGES, 1));
    let mut sample = Tracker::of_sample(8);
    assert!(sample.round(&pids).unwrap().complete);
    let pages = |sample: &Tracker| sample.left(&pids) as usize / PAGE;
    let few = pages(&sample);
    assert!(few < PAGES / 16, "{few}");
    for value in [2, 3] {
        subject.writes(start, PAGES / 2, value);
        let written = pages(&sample);
        assert!(written.abs_diff(PAGES / 2) < PAGES / 8, "{written} for {}", PAGES / 2);
    }
    // What there was not before is written, all of it.
    let before = pages(&sample);
    subject.fills(PAGES, 1);
    let new = pages(&sample) - before;
    assert!(new.abs_diff(PAGES) < PAGES / 8, "{new}");
}

/// Pages that were written and hold nothing do not travel.
fn zeros_of_what_is_left_are_told(method: Method) {
    const PAGES: usize = 16384;
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(PAGES, 1));
    let mut mirror = Mirror::new(method);
    let pages = |tracker: &Tracker| tracker.zeros(&pids) as usize / PAGE;
    let own = pages(&Tracker::new(method));
    assert!(own < PAGES / 16, "{own}");
    mirror.round(&pids);
    // Half of it is zeros, a quarter is written with something else.
    subject.writes(start, PAGES / 2, 0);
    subject.writes(start + PAGES / 2 * PAGE, PAGES / 4, 2);
    let zeros = mirror.zeros(&pids) as usize / PAGE;
    assert!(zeros.abs_diff(PAGES / 2) < PAGES / 16, "{zeros} of {PAGES}");
    // Whoever has not watched finds as many in all of its memory.
    let all = pages(&Tracker::new(method));
    assert!(all.abs_diff(PAGES / 2) < PAGES / 16, "{all} of {PAGES}");
}

fn just_what_was_written_is_found(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    let mut mirror = Mirror::new(method);
    assert_eq!(found(&mirror.round(&pids), start, 64).len(), 64, "at first everything counts as written");
    mirror.round(&pids);
    for (value, (first, pages)) in [(3, 1), (17, 2), (3, 1)].into_iter().enumerate() {
        subject.writes(start + first * PAGE, pages, value + 2);
        let expected: Vec<usize> = (first..first + pages).collect();
        assert_eq!(found(&mirror.round(&pids), start, 64), expected);
    }
    assert!(found(&mirror.round(&pids), start, 64).is_empty());
    mirror.finish(&pids);
}

fn what_is_left_is_told_and_found_all_the_same(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    subject.writes(start + 5 * PAGE, 32, 2);
    for _ in 0..2 {
        let left = mirror.left(&pids);
        assert!((32 * PAGE as u64..4 << 20).contains(&left), "{left}");
    }
    assert_eq!(found(&mirror.round(&pids), start, 64), (5..37).collect::<Vec<_>>());
    mirror.finish(&pids);
}

/// Between a look and the moment when a page is read it is written, and then it is given the content back that it had.
fn old_content_that_comes_back(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(8, 1));
    let mut mirror = Mirror::new(method);
    let first = mirror.look(&pids);
    subject.writes(start, 4, 2);
    mirror.send(&first);
    subject.writes(start, 4, 1);
    assert_eq!(found(&mirror.round(&pids), start, 4), [0, 1, 2, 3]);
    mirror.finish(&pids);
}

/// Long runs of pages are then not sent in vain, where it costs little to know of them; short ones may be.
fn written_again_before_its_turn(method: Method) {
    /// Pages are sent in chunks of so many that lie together, in each of which few that were written again are sent all the same.
    const CHUNK: usize = 256;
    let mut subject = Subject::start();
    let (pids, area) = ([subject.pid()], subject.fills(CHUNK + 64, 1));
    let start = area.next_multiple_of(CHUNK * PAGE);
    let mut mirror = Mirror::new(method);
    for value in [2, 3] {
        let round = mirror.look(&pids);
        subject.writes(start + 8 * PAGE, 40, value);
        mirror.send(&round);
        let in_vain = mirror.brought(start + 8 * PAGE, 40);
        assert_eq!(in_vain, if method == Method::Hash { 40 } else { 0 });
    }
    assert_eq!(mirror.brought(start, 64), if method == Method::Hash { 64 } else { 24 });
    mirror.round(&pids);
    assert_eq!(mirror.brought(start, 64), 64);
    subject.writes(start + 8 * PAGE, 2, 4);
    mirror.finish(&pids);
}

/// What the kernel has marked as written it may forget with the mapping.
fn written_again_and_moved(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    let room = subject.fills(64, 7);
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    subject.writes(start, 64, 2);
    let round = mirror.look(&pids);
    subject.writes(start, 64, 3);
    mirror.send(&round);
    subject.does(&format!("remap {start} 64 64 {room}"));
    subject.does(&format!("remap {room} 64 64 {start}"));
    mirror.finish(&pids);
}

fn pids_of(subject: &Subject) -> [u32; 1] {
    [subject.pid()]
}

fn threads_write_all_the_time(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    subject.does(&format!("threads {start} 4"));
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    for value in 0..20 {
        mirror.round(&pids);
        subject.writes(start + 32 * PAGE, 8, value);
    }
    mirror.finish(&pids);
}

fn a_process_forks_between_rounds(method: Method) {
    let mut subject = Subject::start();
    let start = subject.fills(64, 1);
    let mut mirror = Mirror::new(method);
    mirror.round(&[subject.pid()]);
    let first = subject.does(&format!("fork {start} 2")) as u32;
    subject.writes(start + 8 * PAGE, 1, 3);
    mirror.round(&[subject.pid(), first]);
    let second = subject.does(&format!("fork {} 4", start + 16 * PAGE)) as u32;
    subject.writes(start + 8 * PAGE, 2, 5);
    mirror.round(&[subject.pid(), first, second]);
    // One at which nobody looks before it is stopped.
    let third = subject.does(&format!("fork {} 6", start + 24 * PAGE)) as u32;
    mirror.finish(&[subject.pid(), first, second, third]);
}

/// As one has that was vforked. What it looks like from there is not taken from the other.
fn two_processes_have_one_memory(method: Method) {
    for sibling in [false, true] {
        let mut subject = Subject::start();
        let (start, away) = (subject.fills(64, 1), subject.fills(64, 7));
        let mut mirror = Mirror::new(method);
        mirror.round(&[subject.pid()]);
        let other = subject.does(&format!("share {}", u8::from(sibling))) as u32;
        // The new one comes first, as a pid that was given again does.
        let both = [other, subject.pid()];
        for value in [2, 3] {
            // Nobody watches what has come back; and new memory has come where other memory was.
            subject.does(&format!("remap {start} 64 64 {away}"));
            subject.does(&format!("remap {away} 64 64 {start}"));
            subject.does(&format!("map {away} 64"));
            subject.writes(start, 64, value);
            subject.writes(away, 64, value + 10);
            let round = mirror.round(&both);
            assert_eq!(round.spaces.iter().map(|space| space.pid).collect::<Vec<_>>(), [subject.pid()]);
            assert!(mirror.left(&both) < 4 << 20);
        }
        match sibling {
            // It is this process's child.
            true => {
                let other = Pid::from_raw(other as i32);
                kill(other, Signal::SIGKILL).unwrap();
                waitpid(other, None).unwrap();
            }
            false => drop(subject.does(&format!("reap {other}"))),
        }
        subject.writes(start + 8 * PAGE, 2, 5);
        mirror.finish(&[subject.pid()]);
    }
}

/// Nor is what has it left out with it.
fn a_process_is_met_after_its_child(method: Method) {
    let mut subject = Subject::start();
    let start = subject.fills(64, 1);
    let child = subject.does("share 0") as u32;
    let mut mirror = Mirror::new(method);
    let both = [child, subject.pid()];
    assert!(mirror.left(&both) >= 64 * PAGE as u64);
    assert_eq!(found(&mirror.round(&both), start, 64).len(), 64);
    subject.writes(start, 64, 2);
    subject.does(&format!("reap {child}"));
    mirror.finish(&[subject.pid()]);
}

fn a_process_executes_a_program(method: Method) {
    let mut subject = Subject::start();
    let pids = pids_of(&subject);
    let mut mirror = Mirror::new(method);
    for value in 0..4 {
        let start = subject.fills(64, value);
        mirror.round(&pids);
        mirror.round(&pids);
        subject.writes(start, 2, 100);
        subject.does("execute");
        subject.fills(32, value + 50);
        if value % 2 == 0 {
            mirror.round(&pids);
        }
    }
    mirror.finish(&pids);
}

fn mappings_come_and_go_at_the_same_place(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(256, 1));
    let at = |page: usize| start + page * PAGE;
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    // Other content, the same content, no content, nothing; the first page stays, so that it may be joined to it.
    for (first, value) in [(1, Some(2)), (40, Some(1)), (80, None)] {
        subject.does(&format!("unmap {} 32", at(first)));
        subject.does(&format!("map {} 32", at(first)));
        if let Some(value) = value {
            subject.writes(at(first), 16, value);
        }
    }
    subject.does(&format!("unmap {} 32", at(120)));
    mirror.round(&pids);
    subject.does(&format!("map {} 32", at(120)));
    subject.writes(at(120), 8, 3);
    subject.does(&format!("unmap {} 32", at(160)));
    mirror.finish(&pids);
}

fn mappings_move_and_grow(method: Method) {
    let mut subject = Subject::start();
    let pids = pids_of(&subject);
    let (one, other) = (subject.fills(64, 1), subject.fills(64, 2));
    let (place, room) = (subject.does("map 0 512"), subject.fills(64, 7));
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    // To where content was sent from before, and to where none was.
    let moved = subject.does(&format!("remap {one} 64 64 {room}"));
    let grown = subject.does(&format!("remap {other} 64 256 {place}"));
    assert_eq!((moved, grown), (room, place));
    mirror.round(&pids);
    subject.writes(moved + 3 * PAGE, 1, 3);
    subject.writes(grown + 100 * PAGE, 8, 4);
    let shrunk = subject.does(&format!("remap {grown} 256 102 0"));
    mirror.round(&pids);
    // There and back again.
    subject.writes(shrunk, 2, 5);
    let away = subject.does("map 0 102");
    subject.does(&format!("remap {shrunk} 102 102 {away}"));
    subject.does(&format!("remap {away} 102 102 {shrunk}"));
    mirror.finish(&pids);
}

/// A watch that covered only a part of a mapping would split it, and mremap(2) refuses ranges that two mappings cover.
fn mappings_change_all_the_time(method: Method) {
    let mut subject = Subject::start();
    let pids = pids_of(&subject);
    for _ in 0..3 {
        let start = subject.fills(256, 1);
        subject.does(&format!("resize {start} 256"));
    }
    let mut before = 0;
    // Each begins with mappings that are not watched.
    for _ in 0..40 {
        let mut mirror = Mirror::new(method);
        (0..2).for_each(|_| drop(mirror.round(&pids)));
        let deadline = Instant::now() + Duration::from_secs(30);
        while subject.does("resized") < before + 1000 {
            assert_eq!(subject.does("refused"), 0, "calls of mremap that failed");
            assert!(Instant::now() < deadline, "nothing is resized");
            std::thread::yield_now();
        }
        before = subject.does("resized");
    }
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    mirror.finish(&pids);
}

/// `mremap` of a mapping into the gap beside another one makes one of both.
fn a_mapping_joins_another(method: Method) {
    let mut subject = Subject::start();
    let pids = pids_of(&subject);
    let start = subject.fills(192, 1);
    subject.does(&format!("unmap {} 64", start + 64 * PAGE));
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    mirror.round(&pids);
    // More than fits into the gap.
    let new = subject.fills(128, 2);
    subject.does(&format!("remap {new} 64 64 {}", start + 64 * PAGE));
    subject.writes(start + 60 * PAGE, 8, 3);
    mirror.round(&pids);
    subject.writes(start + 62 * PAGE, 4, 4);
    subject.writes(start + 126 * PAGE, 4, 5);
    mirror.finish(&pids);
}

/// When a part of a mapping comes back to its place the kernel makes one of all three, and ends the watch over them. Marks stay, and pages become writable
/// under them.
fn a_part_of_a_mapping_comes_back(method: Method) {
    let mut subject = Subject::start();
    let pids = pids_of(&subject);
    let (start, away) = (subject.fills(192, 1), subject.fills(64, 7));
    let middle = start + 64 * PAGE;
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    subject.does(&format!("remap {middle} 64 64 {away}"));
    mirror.round(&pids);
    subject.does(&format!("remap {away} 64 64 {middle}"));
    subject.writes(start + 60 * PAGE, 8, 3);
    mirror.round(&pids);
    subject.writes(start + 62 * PAGE, 4, 4);
    subject.writes(start + 126 * PAGE, 4, 5);
    mirror.finish(&pids);
}

fn content_is_thrown_away(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(128, 1));
    let discard = |first: usize| format!("discard {} 16", start + first * PAGE);
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    for first in [0, 16, 32] {
        subject.does(&discard(first));
    }
    subject.writes(start + 16 * PAGE, 16, 1);
    subject.writes(start + 32 * PAGE, 4, 2);
    mirror.round(&pids);
    subject.does(&discard(32));
    subject.does(&discard(64));
    subject.writes(start, 1, 3);
    mirror.finish(&pids);
}

fn pages_that_their_own_task_may_not_read(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    let mut mirror = Mirror::new(method);
    subject.does(&format!("hide {start} 16"));
    mirror.round(&pids);
    subject.writes(start + 32 * PAGE, 16, 2);
    subject.does(&format!("hide {} 16", start + 32 * PAGE));
    mirror.round(&pids);
    mirror.finish(&pids);
}

/// process_vm_writev and ptrace, from outside.
fn others_write(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    let (pid, mut mirror) = (Pid::from_raw(subject.pid() as i32), Mirror::new(method));
    mirror.round(&pids);
    mirror.round(&pids);
    let remote = RemoteIoVec { base: start + 9 * PAGE + 5, len: 3 };
    assert_eq!(process_vm_writev(pid, &[IoSlice::new(b"abc")], &[remote]), Ok(3));
    ptrace::attach(pid).unwrap();
    waitpid(pid, None).unwrap();
    ptrace::write(pid, (start + 20 * PAGE) as ptrace::AddressType, 77).unwrap();
    ptrace::detach(pid, None).unwrap();
    assert_eq!(found(&mirror.round(&pids), start, 64), [9, 20]);
    assert_eq!(process_vm_writev(pid, &[IoSlice::new(b"xyz")], &[remote]), Ok(3));
    mirror.finish(&pids);
}

fn huge_pages_are_written_and_torn(method: Method) {
    let mut subject = Subject::start();
    let pids = pids_of(&subject);
    let start = subject.does("huge 2048");
    let at = |page: usize| start + page * PAGE;
    subject.writes(start, 2048, 1);
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    mirror.round(&pids);
    subject.writes(at(700), 3, 2);
    let written = found(&mirror.round(&pids), start, 2048);
    // The kernel may tell of the whole huge page.
    assert!([700, 701, 702].iter().all(|page| written.contains(page)) && written.len() <= 512, "{written:?}");
    subject.does(&format!("discard {} 100", at(100)));
    subject.writes(at(150), 4, 3);
    subject.does(&format!("unmap {} 600", at(1200)));
    mirror.round(&pids);
    subject.writes(at(10), 1, 4);
    mirror.finish(&pids);
}

fn a_confined_task(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    subject.does("confine");
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    mirror.round(&pids);
    subject.writes(start + 4 * PAGE, 2, 2);
    assert_eq!(found(&mirror.round(&pids), start, 64), [4, 5]);
    subject.writes(start + 40 * PAGE, 2, 3);
    mirror.finish(&pids);
}

fn a_task_ends(method: Method) {
    let mut subject = Subject::start();
    let start = subject.fills(64, 1);
    let child = subject.does(&format!("fork {start} 2")) as u32;
    let mut mirror = Mirror::new(method);
    mirror.round(&[subject.pid(), child]);
    let second = mirror.look(&[subject.pid(), child]);
    subject.does(&format!("reap {child}"));
    mirror.send(&second);
    subject.writes(start + PAGE, 1, 3);
    // It is named still, as one that ends while the list is made.
    mirror.round(&[subject.pid(), child]);
    mirror.finish(&pids_of(&subject));
}

/// A parent that waits for its child in the kernel cannot be stopped until that ends.
fn a_task_that_does_not_stand_still(method: Method) {
    let mut subject = Subject::start();
    let (pids, start) = ([subject.pid()], subject.fills(64, 1));
    let mut mirror = Mirror::new(method);
    mirror.round(&pids);
    subject.writes(start + 7 * PAGE, 1, 2);
    subject.begins("fork-briefly 600");
    let round = mirror.round(&pids);
    assert_eq!(found(&round, start, 64), [7]);
    let child = subject.answer();
    subject.does(&format!("reap {child}"));
    subject.writes(start + 9 * PAGE, 1, 3);
    mirror.round(&pids);
    mirror.finish(&pids);
}

/// `TRANSHIP_SEED=7` repeats a run.
fn whatever_comes_by_chance(method: Method) {
    const AREAS: usize = 6;
    const PAGES: usize = 40;
    let seed = std::env::var("TRANSHIP_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| std::process::id().into());
    println!("{method}: TRANSHIP_SEED={seed}");
    let mut state = seed;
    let mut draw = |below: usize| {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below as u64) as usize
    };
    let mut subject = Subject::start();
    let pids = pids_of(&subject);
    let mut areas: Vec<usize> = (0..AREAS).map(|area| subject.fills(PAGES, area)).collect();
    let mut mirror = Mirror::new(method);
    for _ in 0..400 {
        let (area, first) = (draw(AREAS), draw(PAGES));
        let pages = 1 + draw(PAGES - first);
        let (start, at) = (areas[area], areas[area] + first * PAGE);
        match draw(10) {
            0 => drop(mirror.round(&pids)),
            1 => drop(subject.does(&format!("discard {at} {pages}"))),
            2 => {
                subject.does(&format!("unmap {at} {pages}"));
                subject.does(&format!("map {at} {pages}"));
            }
            3 => {
                let place = subject.does(&format!("map 0 {PAGES}"));
                // The kernel moves what is one mapping only, and the pieces of this one may not have been joined again.
                for page in 0..PAGES {
                    let (from, to) = (start + page * PAGE, place + page * PAGE);
                    subject.does(&format!("remap {from} 1 1 {to}"));
                }
                areas[area] = place;
            }
            4 => {
                let round = mirror.look(&pids);
                subject.writes(at, pages, draw(3));
                mirror.send(&round);
            }
            _ => subject.writes(at, pages, draw(3)),
        }
    }
    mirror.finish(&pids);
}
