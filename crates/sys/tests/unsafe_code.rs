//! Unsafe code is where its contracts are listed: `docs/decisions/unsafe.md`.

use std::fs;
use std::path::{Path, PathBuf};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// The Rust sources below a directory.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Whether a line of code has the keyword.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "unsafe(", "unsafe trait"]
        .iter()
        .any(|word| code.contains(word))
}

#[test]
fn every_place_of_unsafe_code_is_on_the_list() {
    let root = Path::new(HERE).join("../..");
    let page = fs::read_to_string(root.join("docs/decisions/unsafe.md")).unwrap();
    let (_, places) = page.split_once("## Where it is").unwrap();
    let (places, _) = places.split_once("\n## ").unwrap();
    let listed: Vec<&str> = places.split('`').skip(1).step_by(2).filter(|word| word.contains('/')).collect();
    assert!(listed.len() >= 8, "{listed:?}");
    let mut files = Vec::new();
    ["crates", "tests", "bench", "fuzz/src"].iter().for_each(|part| sources(&root.join(part), &mut files));
    let mut with_unsafe = 0;
    for file in files {
        let name = file.strip_prefix(&root).unwrap().to_str().unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let Some((number, line)) = text.lines().enumerate().find(|(_, line)| is_unsafe(line)) else { continue };
        with_unsafe += 1;
        let known = listed.iter().any(|place| Path::new(name).starts_with(place));
        assert!(known || name == "crates/sys/tests/unsafe_code.rs", "{name}:{}: {line}", number + 1);
    }
    assert!(with_unsafe > 50, "unsafe code is found");
}

#[test]
fn no_crate_goes_without_the_lints() {
    let root = Path::new(HERE).join("../..");
    let workspace = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    for lint in ["undocumented_unsafe_blocks = \"deny\"", "unsafe_op_in_unsafe_fn = \"deny\""] {
        assert!(workspace.contains(lint), "{lint}");
    }
    let (_, members) = workspace.split_once("members = [").unwrap();
    let (members, _) = members.split_once(']').unwrap();
    for member in members.split('"').skip(1).step_by(2) {
        let manifest = fs::read_to_string(root.join(member).join("Cargo.toml")).unwrap();
        assert!(manifest.contains("[lints]\nworkspace = true"), "{member}");
    }
}
