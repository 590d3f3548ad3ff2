//! `tranship`: the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    tranship_cli::main()
}
