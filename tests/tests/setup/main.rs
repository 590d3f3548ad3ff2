//! The commands of docs/setup.md, on two hosts that are made of namespaces (`hosts.sh`).

use std::path::{Path, PathBuf};
use std::process::Command;

use tranship_lab::{find_program, program_directory};

/// Why the test cannot run here.
fn hindrance() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("namespaces need root".to_owned());
    }
    let missing = ["suites", "transhipd", "tranship", "jq", "redis-server", "runc", "ip"];
    let missing = missing.into_iter().find(|program| find_program(program).is_err())?;
    Some(format!("{missing} is not there; run `make setup build`"))
}

#[test]
fn the_commands_of_the_setup_page_move_a_container() {
    if let Some(why) = hindrance() {
        assert!(std::env::var_os("CI").is_none(), "{why}");
        println!("skipped: {why}");
        return;
    }
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script: PathBuf = tests.join("tests/setup/hosts.sh");
    let mut command = Command::new(find_program("suites").unwrap());
    command.args(["isolate", "--limit", "300", "setup", "--", "bash"]).arg(script);
    command.arg(tests.join("..").canonicalize().unwrap()).arg(program_directory().unwrap());
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}: {}{}", output.status, said[0], said[1]);
    assert!(said[0].contains("the container moved under a connected client"), "{said:?}");
}
