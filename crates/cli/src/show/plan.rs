use std::fmt::Write;

use tranship_api::{GroupPlan, LocalNetwork, MemberPlan, Plan};
use tranship_types::{ImageToSend, NodeName, Prediction, TreeKind};

use super::table::{Column, table};
use crate::screen::Paint;
use crate::units::{bytes, duration, rate};

/// `tranship plan`, and `tranship move --dry-run`.
pub fn plan(p: &Plan, paint: Paint) -> String {
    let Plan { container, from, to, mode, .. } = p;
    let verdict = match p.blockers.len() {
        0 => paint.good("can be moved"),
        _ => paint.bad("cannot be moved"),
    };
    let mut text = format!("{container} {verdict} from {from} to {to} ({mode}); nothing was touched\n");
    text += &super::blockers(&p.blockers);
    text.push('\n');
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<15}{value}");
    };
    line("tasks", p.tasks.to_string());
    line("memory", bytes(p.memory_bytes));
    if p.tmpfs_bytes > 0 {
        line("tmpfs", bytes(p.tmpfs_bytes));
    }
    for tree in p.trees.iter().filter(|tree| tree.bytes > 0 || tree.kind != TreeKind::WritableLayer) {
        line("files", format!("{} in {tree}", bytes(tree.bytes)));
    }
    if p.log_bytes > 0 {
        line("log", bytes(p.log_bytes));
    }
    if let Some(image) = &p.image {
        let ImageToSend { name, layers, known_layers, .. } = image;
        let size = bytes(image.bytes);
        line("image", format!("up to {size}: {name} is not on {to}; {known_layers} of its {layers} layers are there"));
    }
    if let Some(ms) = p.estimated_blackout_ms {
        line("blackout", format!("about {}", duration(ms)));
    }
    if let Some(ms) = p.estimated_total_ms {
        line("total", format!("about {}", duration(ms)));
    }
    if let Some(seen) = &p.prediction {
        prediction(seen, to, &mut line);
    }
    for allowed in &p.allowed {
        line("allowed", super::allowed(allowed));
    }
    for note in &p.notes {
        line("note", note.clone());
    }
    text + &local_networks(p)
}

/// From whom the move would part the container, each network with what to type instead, and which connections depend on
/// the node.
fn local_networks(p: &Plan) -> String {
    let warning = |network: &LocalNetwork| match network.kept {
        true => format!("\n{}\n", network.kept(&p.container, (&p.from, &p.to))),
        false => format!(
            "\nwarning: {}\n    {}\n    or add --keep-path: a VXLAN between the nodes, not encrypted, until they are on one node\n",
            network.cause(&p.container, &p.to),
            network.remedy(&p.to)
        ),
    };
    let mut text: String = p.local_networks.iter().map(warning).collect();
    let (container, from) = (&p.container, &p.from);
    let said = match p.translated_connections {
        0 => return text,
        1 => format!("a connection of {container} has an address that {from} translates, and ends"),
        more => format!("{more} connections of {container} have addresses that {from} translates, and end"),
    };
    let _ = writeln!(
        text,
        "\nwarning: {said} with the move\n    published ports and masquerading stay with their node: connect to the container's own address, or connect again"
    );
    text
}

/// `tranship move-group --dry-run`.
pub fn group_plan(p: &GroupPlan, paint: Paint) -> String {
    let blocked: Vec<_> = p.members.iter().filter(|member| !member.blockers.is_empty()).collect();
    let verdict = match blocked.len() {
        0 => paint.good("can be moved"),
        _ => paint.bad("cannot be moved"),
    };
    let (all, from) = (p.members.len(), &p.from);
    let mut text = format!("group of {all} {verdict} from {from} ({}); nothing was touched\n\n", p.order);
    let row = |member: &MemberPlan| {
        let (plan, to) = (member.plan.as_ref(), &member.to);
        let about = |ms: Option<f64>| ms.map_or("-".to_owned(), duration);
        let seen = plan.and_then(|plan| plan.prediction.as_ref());
        vec![
            member.container.clone(),
            member.level.to_string(),
            format!("{from} → {to}"),
            plan.map_or("-".to_owned(), |plan| bytes(plan.memory_bytes)),
            plan.map_or("-".to_owned(), |plan| plan.mode.to_string()),
            about(plan.and_then(|plan| plan.estimated_blackout_ms)),
            about(plan.and_then(|plan| plan.estimated_total_ms)),
            seen.map_or("-".to_owned(), |seen| bytes(seen.bytes)),
            member.blockers.len().to_string(),
        ]
    };
    let columns = [
        Column::Text("CONTAINER"),
        Column::Number("LEVEL"),
        Column::Text("FROM → TO"),
        Column::Number("MEMORY"),
        Column::Text("MODE"),
        Column::Number("BLACKOUT"),
        Column::Number("TOTAL"),
        Column::Number("TO SEND"),
        Column::Number("BLOCKERS"),
    ];
    text += &table("", &columns, p.members.iter().map(row));
    for member in blocked {
        text += &format!("\n{}:\n{}", member.container, super::blockers(&member.blockers));
    }
    text.extend(p.members.iter().filter_map(|member| member.plan.as_ref()).map(local_networks));
    let notes =
        p.members.iter().flat_map(|m| m.plan.iter().flat_map(|plan| &plan.notes).map(|note| (&m.container, note)));
    let notes: Vec<String> = notes.map(|(container, note)| format!("  {container}: {note}\n")).collect();
    if !notes.is_empty() {
        text += &format!("\nnotes:\n{}", notes.concat());
    }
    text
}

fn prediction(seen: &Prediction, to: &NodeName, line: &mut impl FnMut(&str, String)) {
    for (number, round) in seen.rounds.iter().enumerate() {
        line(&format!("round {}", number + 1), format!("{} in {}", bytes(round.bytes), duration(round.ms)));
    }
    line("in the freeze", format!("{} of memory", bytes(seen.freeze_bytes)));
    if seen.later_bytes > 0 {
        line("afterwards", format!("{} of memory", bytes(seen.later_bytes)));
    }
    line("to send", format!("{} in all", bytes(seen.bytes)));
    line("needs", format!("{} of memory on {to}", bytes(seen.destination_bytes)));
    let (written, sampled) = (bytes(seen.working_set_bytes), duration(seen.sampled_ms));
    line("writes", format!("{}, to {written} in the longest look ({sampled} in all)", rate(seen.dirty_rate)));
    line("link", format!("{}, round trip {}", rate(seen.link_rate), duration(seen.round_trip_ms)));
}

#[cfg(test)]
mod tests {
    use tranship_api::NetworkNeighbour;
    use tranship_types::{Blocker, BlockerKind, CarriedTree, EngineName, Mode, RoundReport};

    use super::*;

    #[test]
    fn a_plan_says_what_would_happen_or_what_stands_in_the_way() {
        let mut p = Plan {
            container: "redis".into(),
            from: "a".parse().unwrap(),
            to: "b".parse().unwrap(),
            mode: Mode::Cold,
            memory_bytes: 172_851_200,
            tasks: 5,
            tmpfs_bytes: 0,
            log_bytes: 0,
            trees: vec![],
            image: None,
            estimated_blackout_ms: Some(250.0),
            estimated_total_ms: Some(2000.0),
            prediction: None,
            blockers: vec![],
            allowed: vec![],
            local_networks: vec![],
            translated_connections: 0,
            notes: vec!["the root filesystem is the same on both nodes".into()],
        };
        assert_eq!(
            plan(&p, Paint(false)),
            "\
redis can be moved from a to b (cold); nothing was touched

  tasks          5
  memory         164.8 MiB
  blackout       about 250.0 ms
  total          about 2.00 s
  note           the root filesystem is the same on both nodes
"
        );
        p.prediction = Some(Box::new(Prediction {
            mode: Mode::Precopy,
            converges: true,
            throttle_percent: 0,
            rounds: [(172_851_200, 200.0), (4096, 0.3)]
                .map(|(bytes, ms)| RoundReport { bytes, ms, dirty_rate: 0.0 })
                .to_vec(),
            freeze_bytes: 4096,
            later_bytes: 8192,
            bytes: 172_863_488,
            blackout_ms: 90.0,
            total_ms: 700.0,
            destination_bytes: 174_000_000,
            memory_bytes: 172_851_200,
            dirty_rate: 1e6,
            working_set_bytes: 1_280_000,
            link_rate: 9e8,
            round_trip_ms: 0.2,
            sampled_ms: 3000.0,
        }));
        assert!(
            plan(&p, Paint(false)).contains(
                "
  round 1        164.8 MiB in 200.0 ms
  round 2        4.0 KiB in 0.3 ms
  in the freeze  4.0 KiB of memory
  afterwards     8.0 KiB of memory
  to send        164.9 MiB in all
  needs          165.9 MiB of memory on b
  writes         976.6 KiB/s, to 1.2 MiB in the longest look (3.00 s in all)
  link           858.3 MiB/s, round trip 0.2 ms
"
            ),
            "{}",
            plan(&p, Paint(false))
        );
        p.trees = vec![CarriedTree {
            kind: TreeKind::Volume,
            inside: "/data".into(),
            path: "/var/lib/docker/volumes/data/_data".into(),
            bytes: 12 << 20,
        }];
        p.image = Some(ImageToSend { name: "redis:7".into(), bytes: 40 << 20, layers: 3, known_layers: 1 });
        let text = plan(&p, Paint(false));
        let files = "  files          12.0 MiB in volume /var/lib/docker/volumes/data/_data\n";
        let image = "  image          up to 40.0 MiB: redis:7 is not on b; 1 of its 3 layers are there\n";
        assert!(text.contains(&[files, image].concat()), "{text}");
        p.allowed =
            vec![Blocker::new(BlockerKind::Descriptor, "fd 8 is odd", "close it").allowable("eventfd-semaphore")];
        let text = plan(&p, Paint(false));
        assert!(text.contains("\n  allowed        fd 8 is odd (eventfd-semaphore)\n"), "{text}");
        p.allowed.clear();
        let neighbour = NetworkNeighbour {
            container: "db".into(),
            engine: EngineName::Docker,
            addresses: vec![],
            connections: 1,
            names: vec!["db".into()],
        };
        let (neighbours, together) = (vec![neighbour], vec!["redis".into(), "db".into()]);
        p.local_networks =
            vec![LocalNetwork { name: "shop".into(), bridge: "br-1".into(), neighbours, together, kept: false }];
        let text = plan(&p, Paint(false));
        let warning = "\nwarning: network shop (bridge br-1) ends at this node: on b, redis would lose the connection with db and the name \
                       that it resolves here (db)\n    tranship move-group --containers redis db --to b --atomic\n    or add --keep-path: \
                       a VXLAN between the nodes, not encrypted, until they are on one node\n";
        assert!(text.ends_with(warning), "{text}");
        p.local_networks[0].kept = true;
        let text = plan(&p, Paint(false));
        assert!(
            text.contains("\nnetwork shop (bridge br-1): on b, redis goes on reaching db on a")
                && !text.contains("warning"),
            "{text}"
        );
        p.local_networks.clear();
        p.translated_connections = 2;
        let warning = "\nwarning: 2 connections of redis have addresses that a translates, and end with the move\n    published ports";
        assert!(plan(&p, Paint(false)).contains(warning), "{}", plan(&p, Paint(false)));
        p.translated_connections = 0;
        let blocker = Blocker::new(BlockerKind::Descriptor, "fd 7 is an io_uring", "turn io_uring off in redis");
        let member = |container: &str, level, blockers: Vec<Blocker>, plan| {
            let (container, to) = (container.to_owned(), "b".parse().unwrap());
            MemberPlan { container, to, after: vec![], level, blockers, plan }
        };
        let members = vec![
            member("redis", 0, vec![], Some(Plan { notes: vec!["it is quiet".into()], ..p.clone() })),
            member("web", 1, vec![blocker.clone()], None),
        ];
        let group = GroupPlan { from: "a".parse().unwrap(), order: tranship_types::GroupOrder::Pipelined, members };
        assert_eq!(
            group_plan(&group, Paint(false)),
            "\
group of 2 cannot be moved from a (pipelined); nothing was touched

CONTAINER  LEVEL  FROM → TO     MEMORY  MODE  BLACKOUT   TOTAL    TO SEND  BLOCKERS
redis          0  a → b      164.8 MiB  cold  250.0 ms  2.00 s  164.9 MiB         0
web            1  a → b              -  -            -       -          -         1

web:
  fd 7 is an io_uring; turn io_uring off in redis

notes:
  redis: it is quiet
"
        );
        p.blockers = vec![blocker.at(812, Some(7))];
        assert!(plan(&p, Paint(false)).starts_with(
            "redis cannot be moved from a to b (cold); nothing was touched\n  \
             pid 812 fd 7: fd 7 is an io_uring; turn io_uring off in redis\n"
        ));
    }
}
