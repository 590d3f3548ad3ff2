//! Programs that are started through a launcher: the same as without one.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tranship_sys::launch::server::{self, Rules};
use tranship_sys::launch::{self, Program, Stream};

const PATIENCE: Duration = Duration::from_secs(20);

/// A launcher in a thread of this process, through which all programs are started from now on.
fn launcher(directory: &std::path::Path) -> PathBuf {
    let socket = directory.join("launcher.sock");
    let listener = server::bind(&socket).unwrap();
    let again = server::bind(&socket).unwrap_err();
    assert_eq!(again.kind(), std::io::ErrorKind::AddrInUse, "{again}");
    let program = |_: u32, request: &launch::Request| match request.program.to_str() {
        Some("sh" | "sleep") => Ok(()),
        _ => Err("it is not among them".to_owned()),
    };
    std::thread::spawn(move || server::serve(&listener, Rules { unit: None, program: Box::new(program) }));
    launch::through(socket.clone());
    socket
}

#[test]
fn programs_are_started_as_without_a_launcher() {
    let directory = tempfile::tempdir().unwrap();
    let socket = launcher(directory.path());
    launch::ping(&socket).unwrap();

    let mut program = Program::new("sh");
    program.args(["-c", "read line; echo \"$line $WORD $PWD $(umask)\"; echo error >&2; exit 3"]);
    program.env("WORD", "word").current_dir("/").with_usual_umask().detach();
    let mut started = program.stdin(Stream::Piped).stdout(Stream::Piped).stderr(Stream::Piped).spawn().unwrap();
    assert!(started.try_wait().unwrap().is_none());
    started.stdin.take().unwrap().write_all(b"line\n").unwrap();
    assert_eq!(started.wait().unwrap().code(), Some(3));
    assert_eq!(started.try_wait().unwrap().and_then(|status| status.code()), Some(3), "it is remembered");
    let mut texts = [String::new(), String::new()];
    started.stdout.take().unwrap().read_to_string(&mut texts[0]).unwrap();
    started.stderr.take().unwrap().read_to_string(&mut texts[1]).unwrap();
    assert_eq!(texts, ["line word / 0022\n", "error\n"]);

    let mut sleeping = Program::new("sleep").arg("1000").spawn().unwrap();
    assert!(sleeping.wait_for(Duration::from_millis(20)).unwrap().is_none());
    sleeping.kill().unwrap();
    let status = sleeping.wait_for(PATIENCE).unwrap().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));

    // Arguments longer than what a socket takes in one message.
    let long = "x".repeat(100_000);
    let words = Program::new("sh").args(["-c", "echo ${#1} ${#2} ${#3}", "sh", &long, &long, &long]).output(PATIENCE);
    assert_eq!(words.unwrap().unwrap().stdout, b"100000 100000 100000\n");

    let refused = Program::new("cat").spawn().unwrap_err();
    assert!(refused.to_string().contains("it is not among them"), "{refused}");
    let missing = Program::new("sh").current_dir("/nowhere").spawn().unwrap_err();
    assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
}

#[test]
fn a_launcher_that_is_gone_is_named_soon() {
    let begun = Instant::now();
    let error = launch::ping(std::path::Path::new("/nowhere/launcher.sock")).unwrap_err().to_string();
    assert!(error.contains("/nowhere/launcher.sock") && error.contains(launch::LAUNCHER_GONE), "{error}");
    assert!(begun.elapsed() < PATIENCE);
}
