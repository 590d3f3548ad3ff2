//! Numbered traffic through moves: of streams not a byte is lost, doubled or out of order, no connection ends, and datagrams
//! are delivered.

mod bound;
mod capture;
mod cni;
mod firewall;
mod groups;
mod held;
mod kinds;
mod pause;
mod places;
mod unread;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{exactly_one_runs, move_container, nothing_left, scenarios, wait_until};
use tranship_lab::{CLIENT, Lab, RunOptions, find_program};
use tranship_types::Report;
use tranship_workloads::traffic::{Service, TRAFFIC_PORT};

const NAME: &str = "traffic";
const IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 31);
const PATIENCE: Duration = Duration::from_secs(20);

fn address(ip: Ipv4Addr) -> SocketAddr {
    (ip, TRAFFIC_PORT).into()
}

/// Runs a server of traffic in a container.
fn run(lab: &Lab, node: &str, name: &str, ip: Ipv4Addr, bridge: bool) -> Result<()> {
    run_in_groups(lab, node, (name, ip), bridge, &[])
}

/// The same; it hears datagrams to these groups, too.
fn run_in_groups(lab: &Lab, node: &str, (name, ip): (&str, Ipv4Addr), bridge: bool, groups: &[&str]) -> Result<()> {
    let mut options = RunOptions::new(ip, [&["/opt/bench-traffic"], groups].concat());
    options.binds.push((find_program("bench-traffic")?, "/opt/bench-traffic".into()));
    options.bridge = bridge;
    lab.run(node, name, &options)?;
    wait_until("the server to answer", PATIENCE, || Ok(connect(lab, ip).ok()))?;
    Ok(())
}

/// A connection from the client node.
fn connect(lab: &Lab, ip: Ipv4Addr) -> Result<TcpStream> {
    let stream = lab.connect(CLIENT, address(ip), Duration::from_secs(2))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Asks for a service on a new connection.
fn ask(lab: &Lab, ip: Ipv4Addr, service: Service) -> Result<TcpStream> {
    let stream = connect(lab, ip)?;
    (&stream).write_all(&service.to_bytes())?;
    Ok(stream)
}

/// Moves a container and checks that it is there and nothing else is left of it, no gate either.
fn moves(lab: &Lab, name: &str, from: &str, to: &str) -> Result<Report> {
    let report = move_container(lab, from, name, to).with_context(|| format!("{name} from {from} to {to}"))?;
    ensure!(exactly_one_runs(lab, name)? == to, "{name} is not on {to}");
    if !lab.exec(from, &["test", "-e", &format!("/run/netns/{name}")])?.status.success() {
        nothing_left(lab, from, name)?;
    }
    wait_until("the gate to be gone", PATIENCE, || {
        let tables = lab.check(to, &["ip", "netns", "exec", name, "nft", "list", "tables"])?;
        Ok((!tables.contains("tranship")).then_some(()))
    })?;
    Ok(report)
}

/// Sends a word to an echo and has it back.
fn echoes(mut stream: &TcpStream, word: u64) -> Result<()> {
    stream.write_all(&word.to_le_bytes())?;
    let mut back = [0; 8];
    stream.read_exact(&mut back)?;
    ensure!(u64::from_le_bytes(back) == word, "{word} came back as {back:?}");
    Ok(())
}

fn main() -> ExitCode {
    scenarios(&[
        ("streams_in_all_directions_lose_and_double_nothing", kinds::streams_of_all_directions),
        ("requests_need_no_retransmission", kinds::requests),
        ("a_capture_shows_neither_resets_nor_retransmissions", capture::of_a_move),
        ("connections_that_are_closed_on_one_side_stay_so", kinds::half_closed),
        ("what_was_sent_before_a_close_arrives", kinds::closed_connections),
        ("unread_and_unsent_data_arrive", kinds::unread_and_unsent_data),
        ("connections_that_wait_to_be_accepted_are_served", kinds::backlog),
        ("whoever_connects_in_the_blackout_is_let_in", kinds::new_connections),
        ("connections_that_are_being_made_are_made_before_the_freeze", kinds::handshakes),
        ("no_datagram_is_lost_doubled_or_out_of_order", kinds::datagrams),
        ("nor_one_that_the_program_has_not_read", unread::by_a_program_that_sleeps),
        ("nor_any_of_thousands_that_it_has_not_read", unread::of_thousands),
        ("datagrams_beyond_the_bound_of_what_is_held_are_counted", bound::is_told),
        ("two_thousand_connections_move_at_once", kinds::many_connections),
        ("peers_go_on_at_once_after_a_pause_of_seconds", pause::peers_go_on_at_once),
        ("a_peer_on_either_node_keeps_its_connection", places::peers_on_both_nodes),
        ("connected_containers_move_in_turn_and_at_once", places::both_ends),
        ("a_client_behind_a_router_keeps_its_connection", places::behind_a_router),
        ("several_interfaces_address_families_and_policy_rules_move", places::several_interfaces),
        ("rules_inside_a_container_and_the_connections_that_they_know_move", firewall::rules_and_what_they_know),
        ("no_datagram_to_a_group_is_lost_doubled_or_out_of_order", groups::through_a_switch_that_listens),
        ("nor_where_the_switch_sends_them_everywhere", groups::through_any_other_switch),
        ("a_group_that_something_else_has_joined_is_named_ahead", places::multicast),
        ("an_interface_that_the_plugin_macvlan_has_made_moves", cni::made_by_macvlan),
        // Last: where a bridge has been, the node's link carries no macvlan any more.
        ("a_bridged_container_keeps_its_connections", places::bridged),
        ("a_plan_names_those_on_a_bridge_of_the_node", places::on_a_bridge_of_the_node),
        (
            "a_bridged_container_keeps_them_where_nodes_let_through_only_what_they_know",
            firewall::what_nodes_know_that_filter_what_they_forward,
        ),
        ("an_interface_that_the_plugin_bridge_has_made_moves", cni::made_by_bridge),
        ("what_cni_keeps_of_a_container_moves_with_it", cni::attached),
        ("an_address_stays_reserved_until_the_container_comes_back", held::until_it_comes_back),
        ("an_address_stays_reserved_unless_it_is_released", held::unless_it_is_released),
        ("nor_does_it_matter_which_iptables_there_is", cni::attached_with_legacy_iptables),
    ])
}
