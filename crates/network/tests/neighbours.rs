//! Containers on the same parent interface as a macvlan that moves: they must reach the live copy at every moment,
//! although the kernel would rather deliver to a macvlan of the same MAC that is nearer.

mod lab;

use lab::{Kind, Lab, V4, echo};
use tranship_network::{Announcer, Gate, create, stand_aside};

fn neighbour(lab: &Lab, node: &str, name: &str, address: &str) {
    let (node, name) = (lab.name(node), lab.name(name));
    lab.ip(&format!("netns add {name}"));
    lab.ip(&format!("-n {node} link add link eth0 name web0 netns {name} type macvlan mode bridge"));
    lab.ip(&format!("-n {name} addr add {address}/24 dev web0"));
    lab.ip(&format!("-n {name} link set web0 up"));
}

#[test]
fn neighbours_on_both_nodes_always_reach_the_live_copy() {
    if !lab::privileged() {
        return;
    }
    let lab = Lab::new(Kind::Macvlan);
    let identity = lab.identity();
    let gate = |short| Gate::prepare(&lab.path(short), &["web0".into()]).unwrap();
    lab.inside("a", || create(&lab.path("d1"), &identity)).unwrap();
    gate("d1").open().unwrap();
    Announcer::prepare(&lab.path("d1"), &identity).unwrap().announce().unwrap();
    lab.echo_server("d1", 7000);
    neighbour(&lab, "a", "d3", "10.9.0.3");
    neighbour(&lab, "b", "d4", "10.9.0.4");
    let all_reach = |port| {
        for from in ["c", "d3", "d4"] {
            let mut stream = lab.connect_from(from, V4, port).unwrap_or_else(|e| panic!("from {from}: {e}"));
            echo(&mut stream, b"hello").unwrap_or_else(|e| panic!("from {from}: {e}"));
        }
    };
    all_reach(7000);

    lab.inside("b", || create(&lab.path("d2"), &identity)).unwrap();
    lab.echo_server("d2", 7001);
    all_reach(7000);

    gate("d1").close().unwrap();
    gate("d2").open().unwrap();
    Announcer::prepare(&lab.path("d2"), &identity).unwrap().announce().unwrap();
    stand_aside(&lab.path("d1")).unwrap();
    all_reach(7001);
}
