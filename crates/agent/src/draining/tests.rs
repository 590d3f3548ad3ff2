use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};

use super::*;

#[test]
fn what_cannot_be_asked_is_never_taken_for_drained() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(pager::CONTROL_SOCKET);
    let seen = || look(directory.path(), Duration::ZERO);
    assert!(matches!(seen(), Pages::Unknown { gone: true, .. }), "no pager: {:?}", seen());
    symlink(&path, &path).unwrap();
    assert!(matches!(seen(), Pages::Unknown { gone: false, .. }), "another error: {:?}", seen());
    std::fs::remove_file(&path).unwrap();

    // A pager that is stopped: its queue takes a few callers, and answers none.
    let silent = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(silent.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&silent, Backlog::new(0).unwrap()).unwrap();
    let _waits = PagerHandle::connect(directory.path()).unwrap();
    let begun = Instant::now();
    let Pages::Unknown { why, gone: false } = seen() else { panic!("{:?}", seen()) };
    assert!(why.contains("does not answer"), "{why}");
    assert!(begun.elapsed() < 3 * ANSWER, "{:?}", begun.elapsed());
    drop(silent);
    assert!(matches!(seen(), Pages::Unknown { gone: true, .. }), "it was killed: {:?}", seen());

    let status = Status { drained: true, faults: 7, ..Status::default() };
    std::fs::write(directory.path().join(pager::DRAINED_FILE), serde_json::to_vec(&status).unwrap()).unwrap();
    assert!(matches!(seen(), Pages::Drained(Some(status)) if status.faults == 7), "{:?}", seen());
}

#[test]
fn the_source_is_answered_while_a_drain_is_watched() {
    let drain = Drain::default();
    assert!(drain.answer(Duration::ZERO).is_none());
    assert_eq!(drain.goes_on(), None);
    let waiting = Waiting { kind: WaitKind::Pager, what: "the pager".into(), since_unix_ms: 1, remedy: String::new() };
    drain.set(|state| (state.watched, state.waiting) = (true, Some(waiting.clone())));
    let Some(Response::Draining { waiting_for, .. }) = drain.answer(Duration::ZERO) else { panic!("no answer") };
    assert_eq!(waiting_for, Some(waiting));
    drain.set(|state| (state.failure, state.lost) = (Some(Failure::new("gone")), true));
    assert!(matches!(drain.answer(Duration::ZERO), Some(Response::Failed { message, .. }) if message == "gone"));
    assert_eq!(drain.goes_on(), Some(true));
}
