//! A program into which a system call is injected is the same afterwards, and nothing has happened to it meanwhile.

mod calls;
mod subject;

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use calls::CALLS;
use libtest_mimic::{Arguments, Trial};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use subject::{ARGUMENT, READY, has_userfaultfd};
use tranship_sys::standstill;
use tranship_sys::writes::WriteWatch;

const DEADLINE: Duration = Duration::from_secs(60);

const CASES: [(&str, fn()); 15] = [
    ("signals_stay_as_they_are", signals_stay_as_they_are),
    ("system_calls_that_wait_go_on_waiting", system_calls_that_wait_go_on_waiting),
    ("a_sleep_ends_when_it_should", a_sleep_ends_when_it_should),
    ("signals_come_in_their_order_with_what_was_sent", signals_come_in_their_order),
    ("registers_are_what_they_were", registers_are_what_they_were),
    ("restartable_sequences_are_aborted", restartable_sequences_are_aborted),
    ("a_program_that_traces_itself_steps_on", a_program_that_traces_itself_steps_on),
    ("children_inherit_nothing", children_inherit_nothing),
    ("a_program_that_executes_itself_again_and_again_goes_on", a_program_that_executes_itself),
    ("a_wait_for_a_vforked_child_has_a_deadline", a_wait_for_a_vforked_child_has_a_deadline),
    ("a_program_without_free_descriptors_is_left_alone", a_program_without_free_descriptors),
    ("a_file_named_like_the_vdso_is_not_taken_for_it", a_file_named_like_the_vdso),
    ("stopped_continued_and_killed_meanwhile", stopped_continued_and_killed_meanwhile),
    ("who_injects_may_be_killed", who_injects_may_be_killed),
    ("its_helper_may_be_killed", its_helper_may_be_killed),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, rest @ ..] = &arguments[..]
        && first == ARGUMENT
    {
        subject::main(&rest.iter().map(String::as_str).collect::<Vec<_>>());
        return ExitCode::SUCCESS;
    }
    let trials = CASES.map(|(name, case)| {
        Trial::test(name, move || {
            case();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}

struct Subject {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Subject {
    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(ARGUMENT).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        if arguments[0] != "injects" {
            assert_eq!(lines.next().unwrap().unwrap(), READY);
        }
        Self { child, lines }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line that it says.
    fn line(&mut self) -> String {
        self.lines.next().expect("the subject has ended").unwrap()
    }

    fn inject(&self) {
        WriteWatch::inject(self.pid()).unwrap();
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.pid())).unwrap()
    }

    /// What it has to do with signals.
    fn signals(&self) -> Vec<String> {
        let of_signals =
            |line: &&str| (line.starts_with("Sig") && !line.starts_with("SigQ")) || line.starts_with("ShdPnd");
        self.read("status").lines().filter(of_signals).map(ToOwned::to_owned).collect()
    }

    /// Waits until it waits in a system call.
    fn await_wait(&self) {
        let deadline = Instant::now() + DEADLINE;
        while !self.read("stat").contains(") S ") {
            assert!(Instant::now() < deadline, "it does not wait");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).unwrap();
    }

    fn assert_runs(&mut self) {
        assert!(self.child.try_wait().unwrap().is_none(), "the subject has ended");
        assert!(!has_userfaultfd(&self.pid().to_string()), "it has a userfaultfd");
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn stand_still(subject: &Subject) {
    standstill::during(&[subject.pid()], DEADLINE, |stopped| stopped.unwrap());
}

fn signals_stay_as_they_are() {
    let mut subject = Subject::start(&["dispositions"]);
    subject.await_wait();
    let before = subject.signals();
    assert!(before.iter().any(|line| line == "SigPnd:\t0000000000000010"), "{before:?}");
    for _ in 0..100 {
        subject.inject();
        stand_still(&subject);
    }
    assert_eq!(subject.signals(), before);
    subject.assert_runs();
}

fn system_calls_that_wait_go_on_waiting() {
    for name in CALLS {
        let mut subject = Subject::start(&["call", name]);
        subject.await_wait();
        let before = subject.signals();
        for _ in 0..10 {
            subject.inject();
            subject.await_wait();
            stand_still(&subject);
            subject.await_wait();
        }
        assert_eq!(subject.signals(), before, "{name}");
        subject.assert_runs();
        // A handler of which the kernel would have told it is told of.
        if name.starts_with("epoll") || ["pause", "sigsuspend", "ppoll", "recv_timeout", "semop"].contains(&name) {
            subject.kill(Signal::SIGUSR1);
            assert_eq!(subject.line(), format!("{name} has returned -1, errno {}", libc::EINTR));
        }
    }
}

fn a_sleep_ends_when_it_should() {
    let mut subject = Subject::start(&["sleep", "900"]);
    for _ in 0..10 {
        subject.inject();
        stand_still(&subject);
        std::thread::sleep(Duration::from_millis(20));
    }
    let line = subject.line();
    let (returned, took) = line.split_once(' ').unwrap();
    let took: u64 = took.parse().unwrap();
    assert!(returned == "0" && (900..900 + 10_000).contains(&took), "{line}");
}

fn signals_come_in_their_order() {
    const COUNT: usize = 20_000;
    let mut subject = Subject::start(&["queue", &COUNT.to_string()]);
    let pid = subject.pid();
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            for number in 0..COUNT {
                let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(number) };
                // SAFETY: the call takes numbers. It fails while the queue is full.
                while unsafe { libc::sigqueue(pid as i32, libc::SIGRTMIN(), value) } != 0 {
                    std::thread::yield_now();
                }
            }
        });
        while !sender.is_finished() {
            subject.inject();
            stand_still(&subject);
        }
    });
    assert_eq!(subject.line(), "all");
}

fn registers_are_what_they_were() {
    let mut subject = Subject::start(&["registers"]);
    for _ in 0..300 {
        subject.inject();
    }
    subject.assert_runs();
}

fn restartable_sequences_are_aborted() {
    let mut subject = Subject::start(&["sequence"]);
    let aborts = |subject: &mut Subject| -> u64 {
        writeln!(subject.child.stdin.as_mut().unwrap()).unwrap();
        subject.line().parse().unwrap()
    };
    let before = aborts(&mut subject);
    for _ in 0..300 {
        subject.inject();
    }
    // The thread that answers here is chosen as well, while it does that.
    assert!(aborts(&mut subject) >= before + 200);
    subject.assert_runs();
}

fn a_program_that_traces_itself_steps_on() {
    let mut subject = Subject::start(&["steps"]);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(1500) {
        subject.inject();
    }
    assert_eq!(subject.line(), "stepped");
}

fn children_inherit_nothing() {
    let subject = Subject::start(&["forks"]);
    for _ in 0..100 {
        subject.inject();
    }
    // Each child looks some time after it was forked, and what it said would come before this one's end.
    std::thread::sleep(Duration::from_millis(100));
    let mut subject = subject;
    subject.child.kill().unwrap();
    assert!(subject.lines.next().is_none());
}

/// Its vdso is elsewhere each time.
fn a_program_that_executes_itself() {
    let mut subject = Subject::start(&["executes"]);
    let mut injected = 0;
    for _ in 0..1000 {
        // One that has its memory taken away just then cannot open anything.
        injected += u32::from(WriteWatch::inject(subject.pid()).is_ok());
        assert!(subject.child.try_wait().unwrap().is_none(), "the subject has ended: {:?}", subject.child.wait());
    }
    assert!(injected > 100, "{injected}");
    subject.assert_runs();
}

fn a_wait_for_a_vforked_child_has_a_deadline() {
    // It is chosen who does not wait.
    let several = Subject::start(&["vfork", "3"]);
    let begin = Instant::now();
    several.inject();
    assert!(begin.elapsed() < Duration::from_secs(2));
    let one = Subject::start(&["vfork", "1"]);
    let deadline = Instant::now() + DEADLINE;
    while !one.read("stat").contains(") D ") {
        assert!(Instant::now() < deadline, "it does not wait");
    }
    let begin = Instant::now();
    let error = WriteWatch::inject(one.pid()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    assert!(begin.elapsed() < Duration::from_secs(10));
    // The children go with them.
    for subject in [several, one] {
        let children: Vec<i32> = std::fs::read_dir(format!("/proc/{}/task", subject.pid()))
            .unwrap()
            .flat_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("children")))
            .flat_map(|text| text.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
            .collect();
        assert!(!children.is_empty());
        drop(subject);
        for child in children {
            kill(Pid::from_raw(child), Signal::SIGKILL).unwrap();
        }
    }
}

fn a_program_without_free_descriptors() {
    let mut subject = Subject::start(&["full"]);
    let error = WriteWatch::inject(subject.pid()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Unsupported, "{error}");
    subject.assert_runs();
}

fn a_file_named_like_the_vdso() {
    let directory = std::path::PathBuf::from(format!("/dev/shm/tranship-injection-{}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let path = directory.join("[vdso]");
    let mut subject = Subject::start(&["vdso-file", path.to_str().unwrap()]);
    subject.inject();
    subject.assert_runs();
    std::fs::remove_dir_all(&directory).unwrap();
}

fn stopped_continued_and_killed_meanwhile() {
    for round in 0..20 {
        let mut subject = Subject::start(&["registers"]);
        let (pid, again) = (subject.pid(), std::sync::atomic::AtomicBool::new(true));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while again.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = WriteWatch::inject(pid);
                }
            });
            for _ in 0..20 {
                subject.kill(Signal::SIGSTOP);
                std::thread::sleep(Duration::from_micros(137 * round));
                subject.kill(Signal::SIGCONT);
                std::thread::sleep(Duration::from_micros(73 * round));
            }
            assert!(subject.child.try_wait().unwrap().is_none());
            subject.kill(Signal::SIGKILL);
            again.store(false, std::sync::atomic::Ordering::Relaxed);
        });
        let status = subject.child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    }
}

fn who_injects_may_be_killed() {
    let mut subject = Subject::start(&["registers"]);
    let mut queue = Subject::start(&["dispositions"]);
    let before = queue.signals();
    for round in 0..60u64 {
        for target in [&subject, &queue] {
            let injector = Subject::start(&["injects", &target.pid().to_string()]);
            // It has begun.
            std::thread::sleep(Duration::from_micros(5000 + round * 97 % 3000));
            drop(injector);
        }
    }
    // What its helpers are about is over soon.
    let deadline = Instant::now() + DEADLINE;
    for target in [&mut subject, &mut queue] {
        while !target.read("status").contains("TracerPid:\t0\n") {
            assert!(Instant::now() < deadline, "it is still traced");
            std::thread::sleep(Duration::from_millis(1));
        }
        target.assert_runs();
    }
    assert_eq!(queue.signals(), before);
}

/// The helper process by which another one injects, if there is one now.
fn helper_of(injector: u32) -> Option<Pid> {
    let text = |pid: &str, file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let children = text(&injector.to_string(), &format!("task/{injector}/children"));
    let is_helper = |pid: &&str| text(pid, "comm").trim() == "tranship-inject";
    children.split_whitespace().find(is_helper).map(|pid| Pid::from_raw(pid.parse().unwrap()))
}

/// Whether a process that nobody but a stopped tracer keeps from running has registers of its own: otherwise it is in the vdso.
fn has_own_registers(subject: &Subject) -> bool {
    if subject.read("status").contains("TracerPid:\t0\n") {
        return true;
    }
    let (maps, call) = (subject.read("maps"), subject.read("syscall"));
    let vdso = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap().split(' ').next().unwrap();
    let (start, end) = vdso.split_once('-').unwrap();
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
    let place = call.split_whitespace().last().filter(|place| place.starts_with("0x")).map(number);
    place.is_some_and(|place| !(number(start)..number(end)).contains(&place)) && subject.read("stat").contains(") t ")
}

/// At any moment at which the program has its own registers; also if it has a userfaultfd open then.
fn its_helper_may_be_killed() {
    let mut subject = Subject::start(&["registers"]);
    let mut queue = Subject::start(&["dispositions"]);
    let before = queue.signals();
    let deadline = Instant::now() + 4 * DEADLINE;
    let (mut killed, mut open) = (0, 0);
    for round in 0u64.. {
        if killed >= 40 && open >= 5 {
            break;
        }
        assert!(Instant::now() < deadline, "{killed} were killed, {open} of them with a userfaultfd open");
        let target = if round % 2 == 0 { &subject } else { &queue };
        let mut injector = Subject::start(&["injects", &target.pid().to_string(), "once"]);
        let helper = loop {
            match helper_of(injector.pid()) {
                None if injector.child.try_wait().unwrap().is_none() => {}
                found => break found,
            }
        };
        std::thread::sleep(Duration::from_micros(round * 37 % 2000));
        if let Some(helper) = helper.filter(|helper| kill(*helper, Signal::SIGSTOP).is_ok()) {
            // What it has resumed has come to its next stop by then.
            std::thread::sleep(Duration::from_millis(2));
            if has_own_registers(target) {
                open += usize::from(has_userfaultfd(&target.pid().to_string()));
                killed += usize::from(kill(helper, Signal::SIGKILL).is_ok());
            } else {
                let _ = kill(helper, Signal::SIGCONT);
            }
        }
        // It has been done again by another helper.
        assert!(injector.child.wait().unwrap().success(), "{killed} killed, {open} with a userfaultfd open");
        [&mut subject, &mut queue].into_iter().for_each(Subject::assert_runs);
    }
    assert_eq!(queue.signals(), before);
}
