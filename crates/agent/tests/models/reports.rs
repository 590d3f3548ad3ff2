//! Reports that change while others follow them.

use std::path::Path;
use std::sync::Arc;

use tranship_types::{Mode, Outcome, Report};

use crate::registry::Registry;
use crate::{explore, together};

type Thread = Box<dyn FnOnce() + Send>;

/// Each change is in the last report; whoever follows it sees the end, and by then the history has it.
pub fn no_change_of_a_report_is_lost() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_owned();
    explore(true, move || {
        let id: tranship_types::MigrationId = "m-1".parse().expect("an id");
        let is_kept = |path: &Path| std::fs::read_to_string(path).is_ok_and(|text| text.contains("\"moved\""));
        let [a, b] = ["a", "b"].map(|node| node.parse().expect("a name"));
        let registry = Registry::new(path.clone());
        let live = registry.begin(Report::new(id.clone(), "kv".to_owned(), a, b, Mode::Auto, 0));
        let change = |live: &crate::registry::LiveReport| {
            let live = live.clone();
            Box::new(move || live.change(|r| r.progress.wire_bytes += 1)) as Thread
        };
        let end = {
            let live = live.clone();
            Box::new(move || live.end(|r| r.outcome = Outcome::Moved)) as Thread
        };
        let save = {
            let live = live.clone();
            Box::new(move || live.save().expect("it is written")) as Thread
        };
        let follow = {
            let (registry, id, path) = (Arc::clone(&registry), id.clone(), path.join("m-1.json"));
            Box::new(move || {
                let report = registry.watch(&id).expect("it is known");
                while report.borrow().outcome == Outcome::Running {
                    shuttle::thread::yield_now();
                }
                assert!(is_kept(&path), "the history does not have the end");
            }) as Thread
        };
        together(vec![change(&live), change(&live), save, end, follow]);
        let report = live.read();
        assert_eq!((report.outcome, report.progress.wire_bytes), (Outcome::Moved, 2), "a change is lost");
        assert!(is_kept(&path.join("m-1.json")), "what was written before is in the place of the end");
        std::fs::remove_file(path.join("m-1.json")).expect("the history");
    });
}
