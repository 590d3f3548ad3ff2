//! Groups of containers that are connected to each other move in order, and whatever becomes of one, the report says so.

mod atomic;
mod chain;
mod faults;
mod pipeline;

use std::process::ExitCode;

use tranship_e2e::{scenarios, whole_matrices};

fn main() -> ExitCode {
    if !whole_matrices() {
        println!("skipped: half of the faults of groups; `make test-all` plays all");
    }
    scenarios(&[
        (
            "connected_containers_move_in_order_and_stay_connected",
            pipeline::connected_containers_move_in_order_and_stay_connected,
        ),
        (
            "one_that_fails_stops_what_depends_on_it_and_nothing_else",
            pipeline::one_that_fails_stops_what_depends_on_it_and_nothing_else,
        ),
        (
            "wrong_groups_are_refused_before_anything_is_touched",
            pipeline::wrong_groups_are_refused_before_anything_is_touched,
        ),
        (
            "whatever_happens_to_a_pipeline_each_container_is_where_the_report_says",
            faults::whatever_happens_to_a_pipeline_each_container_is_where_the_report_says,
        ),
        ("all_move_together_and_stay_connected", atomic::all_move_together_and_stay_connected),
        ("all_wait_for_freeze_slots", atomic::all_wait_for_freeze_slots),
        ("one_that_cannot_move_keeps_all_where_they_are", atomic::one_that_cannot_move_keeps_all_where_they_are),
        ("all_move_or_none_whoever_dies", faults::all_move_or_none_whoever_dies),
        (
            "all_move_or_none_where_the_groups_journal_is_damaged",
            faults::all_move_or_none_where_the_groups_journal_is_damaged,
        ),
    ])
}
