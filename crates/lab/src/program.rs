//! Running other programs: where they are found, and what is said when they fail.

use std::env;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{LabError, Result};

/// The directory that Tranship's programs are in: `TRANSHIP_BIN_DIR`, or where this program is (for a test, the
/// directory that its package's programs are built into).
pub fn program_directory() -> Result<PathBuf> {
    if let Some(directory) = env::var_os("TRANSHIP_BIN_DIR") {
        return Ok(directory.into());
    }
    let own = env::current_exe().map_err(LabError::file("find", "this program"))?;
    let directory = own.parent().unwrap_or(Path::new("/"));
    let built = directory.file_name().is_some_and(|name| name == "deps" || name == "examples");
    Ok(if built { directory.parent().unwrap_or(directory) } else { directory }.to_owned())
}

/// The directories that programs and tests need besides what is installed: the working copies that this program was
/// built in and runs in, each with all that is below its outermost `Cargo.lock`; and where this program is, if that is
/// in neither.
pub fn working_copies() -> Result<Vec<PathBuf>> {
    let programs = program_directory()?;
    let programs = programs.canonicalize().map_err(LabError::file("find", &programs))?;
    let here = env::current_dir().map_err(LabError::file("find", "the working directory"))?;
    let copy =
        |place: &Path| place.ancestors().filter(|top| top.join("Cargo.lock").is_file()).last().map(Path::to_owned);
    let mut found: Vec<PathBuf> = copy(&here).into_iter().chain([copy(&programs).unwrap_or(programs)]).collect();
    found.sort();
    // What lies within another one comes with it.
    found.dedup_by(|inner, outer| inner.starts_with(outer));
    Ok(found)
}

/// Where one of Tranship's programs is: in `program_directory`, else on PATH.
pub fn find_program(name: &str) -> Result<PathBuf> {
    let first = program_directory()?;
    on_path(name, Some(&first)).ok_or_else(|| {
        LabError::Refused(format!(
            "{name} is neither in {} nor on PATH; build it with `cargo build --release`",
            first.display()
        ))
    })
}

/// Where a program is, in `first` or else on PATH.
pub(crate) fn on_path(name: &str, first: Option<&Path>) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = first.map(Path::to_owned).into_iter().chain(env::split_paths(&path));
    directories.map(|d| d.join(name)).find(|p| p.is_file())
}

/// Refuses to go on without a program that a Debian package brings.
pub(crate) fn require(name: &str) -> Result<()> {
    match on_path(name, Some(Path::new("/usr/sbin"))) {
        Some(_) => Ok(()),
        None => Err(LabError::Refused(format!("{name} is not installed; run `make setup`"))),
    }
}

/// Runs a command to its end, feeding it `input`, and takes a failure for an error. `what` says what it does.
pub(crate) fn run(what: impl Into<String>, command: &mut Command, input: &str) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(LabError::start(&program))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that fails before it has read its input is judged by its status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(LabError::start(&program))?;
    checked(what, output)
}

/// Runs a command to its end without input, and kills it if that does not come in time.
pub(crate) fn output_within(limit: Duration, command: &mut Command) -> Result<Output> {
    fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What came before an error counts.
            let _ = pipe.read_to_end(&mut bytes);
            bytes
        })
    }
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(LabError::start(&program))?;
    let (stdout, stderr) = (child.stdout.take().map(collect), child.stderr.take().map(collect));
    let mut pause = Duration::from_micros(200);
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(LabError::start(&program))? {
            break status;
        }
        if Instant::now() >= deadline {
            // It may end just now.
            let _ = child.kill();
            let _ = child.wait();
            let arguments: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
            return Err(LabError::Deadline {
                what: format!("{program} {} did not end", arguments.join(" ")),
                seconds: limit.as_secs(),
                detail: String::new(),
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(4));
    };
    let whole = |pipe: Option<JoinHandle<Vec<u8>>>| pipe.and_then(|pipe| pipe.join().ok()).unwrap_or_default();
    Ok(Output { status, stdout: whole(stdout), stderr: whole(stderr) })
}

/// Takes the output of a command that ended well, or makes an error of it.
pub(crate) fn checked(what: impl Into<String>, output: Output) -> Result<Output> {
    if output.status.success() {
        return Ok(output);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = if errors.trim().is_empty() { String::from_utf8_lossy(&output.stdout) } else { errors };
    Err(LabError::Program { what: what.into(), status: output.status.to_string(), output: said.trim().to_owned() })
}
