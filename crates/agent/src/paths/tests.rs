use std::sync::mpsc;
use std::time::Duration;

use super::listing::Listing;
use super::*;

fn node(directory: &tempfile::TempDir) -> Arc<Node> {
    Node::for_test(directory.path(), "", Vec::new())
}

fn is_kept(node: &Node) -> bool {
    PathRecord::read(node, 1).unwrap().is_some_and(|record| !record.is_unused())
}

/// A resident of Docker, which is not on node a.
fn resident(name: &str) -> Resident {
    let end = PathEnd { container: name.to_owned(), names: Vec::new(), addresses: vec!["10.79.0.5".parse().unwrap()] };
    Resident { engine: EngineName::Docker, id: format!("id of {name}"), end, elsewhere: 0 }
}

#[test]
fn a_release_that_is_refused_leaves_the_path() {
    let directory = tempfile::tempdir().unwrap();
    let node = node(&directory);
    PathRecord::for_test("b", &["app"]).write(&node).unwrap();
    let error = |kind| Err(ServiceError::new(kind, "why", ""));
    let refused = release(&node, "app", error(ErrorKind::Blocked));
    assert!(refused.is_err_and(|error| error.kind == ErrorKind::Blocked) && is_kept(&node));
    assert!(release(&node, "db", error(ErrorKind::NotFound)).is_err() && is_kept(&node));
    // There were no addresses.
    assert!(release(&node, "app", error(ErrorKind::NotFound)).is_ok_and(|released| released.is_empty()));
    assert!(!is_kept(&node) && list(&node).unwrap().is_empty());
}

#[test]
fn a_move_without_a_path_does_not_wait_for_those_that_change_paths() {
    let directory = tempfile::tempdir().unwrap();
    let node = node(&directory);
    PathRecord::for_test("b", &["app"]).write(&node).unwrap();
    let changing = changing();
    let (done, is_done) = mpsc::channel();
    let its = Arc::clone(&node);
    let moves = std::thread::spawn(move || {
        let migration: MigrationId = "m-2".parse().unwrap();
        undo(&its, &migration).unwrap();
        left(&its, &migration, (EngineName::Docker, "web"), None).unwrap();
        arrived(&its, &migration, (&"b".parse().unwrap(), EngineName::Docker), ("web", Vec::new()));
        answer(&its, &"b".parse().unwrap(), 1).unwrap();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(20)).expect("it waits for the lock");
    moves.join().unwrap();
    drop(changing);
    assert!(is_kept(&node));
}

#[test]
fn a_container_of_another_engine_or_from_another_node_is_another_one() {
    let directory = tempfile::tempdir().unwrap();
    let node = node(&directory);
    let own: NodeName = "a".parse().unwrap();
    let migration: MigrationId = "m-2".parse().unwrap();
    let mut record = PathRecord::for_test("b", &["app"]);
    record.members[0].home = "b".parse().unwrap();
    record.residents = vec![resident("app")];
    let leaves = |engine| {
        let mut after = record.clone();
        leave(&mut after, (&own, false), &migration, (engine, "app"));
        after.is_unused()
    };
    assert!(leaves(EngineName::Docker) && !leaves(EngineName::Podman));
    // One that has left a, while another one of its name is there, and leaves.
    record.members[0].home = own.clone();
    let mut after = record.clone();
    leave(&mut after, (&own, false), &migration, (EngineName::Docker, "app"));
    assert!(!after.is_unused() && after.residents.is_empty());

    record.write(&node).unwrap();
    let address: IpAddr = "10.79.0.6".parse().unwrap();
    let comes = |peer: &str, address: IpAddr| {
        arrived(&node, &migration, (&peer.parse().unwrap(), EngineName::Docker), ("app", vec![address]));
        !is_kept(&node)
    };
    assert!(!comes("c", address) && !comes("b", "10.79.0.9".parse().unwrap()));
    assert!(comes("b", address));
}

#[test]
fn the_last_one_that_leaves_a_bridge_needs_no_path() {
    let own: NodeName = "a".parse().unwrap();
    let mut record = PathRecord::for_test("b", &["app"]);
    record.residents = vec![resident("db")];
    let after = |without_ports| {
        let mut after = record.clone();
        leave(&mut after, (&own, without_ports), &"m-2".parse().unwrap(), (EngineName::Docker, "db"));
        after
    };
    assert!(!after(false).is_unused() && after(true).is_unused());
}

#[test]
fn the_record_of_an_ended_path_stays_until_names_are_out_of_its_containers() {
    let directory = tempfile::tempdir().unwrap();
    let node = node(&directory);
    let mut record = PathRecord::for_test("b", &[]);
    record.residents = vec![resident("db")];
    record.write(&node).unwrap();
    // Docker, which has the container, does not answer.
    watch::turn(&node, &mut Listing::default());
    assert!(PathRecord::read(&node, 1).unwrap().is_some());
    record.residents.clear();
    record.write(&node).unwrap();
    watch::turn(&node, &mut Listing::default());
    assert_eq!(PathRecord::read(&node, 1).unwrap(), None);
}

#[test]
fn a_record_that_cannot_be_read_does_not_end_the_care_of_others() {
    let directory = tempfile::tempdir().unwrap();
    let node = node(&directory);
    PathRecord::for_test("b", &[]).write(&node).unwrap();
    let mut kept = PathRecord::for_test("b", &["app"]);
    kept.id = 3;
    kept.write(&node).unwrap();
    std::fs::write(record::directory(&node).join("000002.json"), "{").unwrap();
    watch::turn(&node, &mut Listing::default());
    assert_eq!(PathRecord::ids(&node).unwrap(), [2, 3], "the one that nobody needs is still there");
    let notices = notices(&node);
    assert!(notices.iter().any(|one| one.name == "tship-000003"), "{notices:?}");
    assert!(notices.iter().any(|one| one.note.contains("000002.json cannot be read")), "{notices:?}");
}

#[test]
fn a_peer_s_question_is_answered_from_the_record() {
    let directory = tempfile::tempdir().unwrap();
    let node = node(&directory);
    let ask = |peer: &str| match answer(&node, &peer.parse().unwrap(), 1).unwrap() {
        Response::Path { kept, occupied, ends } => {
            (kept, occupied, ends.into_iter().map(|end| (end.container, end.addresses.len())).collect::<Vec<_>>())
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(ask("b"), (false, false, Vec::new()));
    let mut record = PathRecord::for_test("b", &[]);
    record.residents = vec![resident("db")];
    let mut coming = PathRecord::for_test("b", &["app"]).members.remove(0);
    coming.home = "b".parse().unwrap();
    record.pending = vec![coming];
    record.write(&node).unwrap();
    assert_eq!(ask("b"), (true, true, vec![("db".to_owned(), 1), ("app".to_owned(), 0)]));
    assert_eq!(ask("c"), (false, false, Vec::new()), "it is no path of node c");
}
