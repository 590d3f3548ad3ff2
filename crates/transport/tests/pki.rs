//! The CA and the certificates that it makes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tranship_transport::pki::{PkiError, init};
use tranship_transport::{Identity, TransportError};
use tranship_types::NodeName;

fn nodes(names: &[&str]) -> Vec<NodeName> {
    names.iter().map(|n| n.parse().unwrap()).collect()
}

fn load(dir: &Path, node: &str) -> Result<Identity, TransportError> {
    let dir = dir.join(node);
    Identity::load(&dir.join("ca.crt"), &dir.join("node.crt"), &dir.join("node.key"))
}

#[test]
fn each_node_gets_a_directory_that_makes_an_identity() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("new");
    let report = init(&dir, &nodes(&["a", "rack3-host7.example"]), false).unwrap();
    assert!(report.ca_created);
    assert_eq!(report.nodes[1], ("rack3-host7.example".parse().unwrap(), dir.join("rack3-host7.example")));
    for name in ["a", "rack3-host7.example"] {
        assert_eq!(load(&dir, name).unwrap().node().as_str(), name);
    }
    for (file, mode) in [("ca.key", 0o600), ("a/node.key", 0o600), ("ca.crt", 0o644), ("a", 0o700)] {
        assert_eq!(fs::metadata(dir.join(file)).unwrap().permissions().mode() & 0o777, mode, "{file}");
    }
}

#[test]
fn nodes_can_be_added_later_under_the_same_ca() {
    let dir = tempfile::tempdir().unwrap();
    init(dir.path(), &nodes(&["a"]), false).unwrap();
    let ca = fs::read(dir.path().join("ca.crt")).unwrap();
    let report = init(dir.path(), &nodes(&["b"]), false).unwrap();
    assert!(!report.ca_created);
    assert_eq!(fs::read(dir.path().join("ca.crt")).unwrap(), ca);
    assert_eq!(fs::read(dir.path().join("b/ca.crt")).unwrap(), ca);
    load(dir.path(), "a").unwrap();
    load(dir.path(), "b").unwrap();
}

#[test]
fn certificates_are_replaced_only_when_asked_to_and_otherwise_nothing_is_made() {
    let dir = tempfile::tempdir().unwrap();
    init(dir.path(), &nodes(&["a"]), false).unwrap();
    let old = fs::read(dir.path().join("a/node.crt")).unwrap();
    let error = init(dir.path(), &nodes(&["b", "a"]), false).unwrap_err();
    assert!(matches!(&error, PkiError::Exists { node, .. } if node.as_str() == "a"), "{error}");
    assert!(!dir.path().join("b").exists());
    assert_eq!(fs::read(dir.path().join("a/node.crt")).unwrap(), old);
    init(dir.path(), &nodes(&["a"]), true).unwrap();
    assert_ne!(fs::read(dir.path().join("a/node.crt")).unwrap(), old);
    load(dir.path(), "a").unwrap();
}

#[test]
fn names_that_cannot_be_host_names_are_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["10.0.0.1", "7", "a..b", "a-"] {
        let error = init(&dir.path().join("x"), &nodes(&[name]), false).unwrap_err();
        assert!(matches!(error, PkiError::Name { .. }), "{name}: {error}");
    }
    assert!(!dir.path().join("x").exists());
}

#[test]
fn half_a_ca_or_a_mixed_one_is_not_used() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    init(dir.path(), &nodes(&["a"]), false).unwrap();
    init(other.path(), &nodes(&["a"]), false).unwrap();
    let key = dir.path().join("ca.key");
    fs::copy(other.path().join("ca.key"), &key).unwrap();
    let error = init(dir.path(), &nodes(&["b"]), false).unwrap_err();
    assert!(matches!(&error, PkiError::Ca { why, .. } if why == "ca.key does not belong to ca.crt"), "{error}");
    fs::write(&key, "garbage").unwrap();
    assert!(matches!(init(dir.path(), &nodes(&["b"]), false), Err(PkiError::Ca { .. })));
    fs::remove_file(&key).unwrap();
    assert!(matches!(init(dir.path(), &nodes(&["b"]), false), Err(PkiError::Ca { .. })));
    assert!(!dir.path().join("b").exists());
}
