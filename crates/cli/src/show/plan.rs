use std::fmt::Write;

use tranship_api::Plan;

use crate::screen::Paint;
use crate::units::{bytes, duration};

/// `tranship move --dry-run`.
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
        let _ = writeln!(text, "  {name:<10}{value}");
    };
    line("tasks", p.tasks.to_string());
    line("memory", bytes(p.memory_bytes));
    if p.tmpfs_bytes > 0 {
        line("tmpfs", bytes(p.tmpfs_bytes));
    }
    if let Some(ms) = p.estimated_blackout_ms {
        line("blackout", format!("about {}", duration(ms)));
    }
    if let Some(ms) = p.estimated_total_ms {
        line("total", format!("about {}", duration(ms)));
    }
    for note in &p.notes {
        line("note", note.clone());
    }
    text
}

#[cfg(test)]
mod tests {
    use tranship_types::{Blocker, BlockerKind, Mode};

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
            estimated_blackout_ms: Some(250.0),
            estimated_total_ms: Some(2000.0),
            blockers: vec![],
            notes: vec!["the root filesystem is the same on both nodes".into()],
        };
        assert_eq!(
            plan(&p, Paint(false)),
            "\
redis can be moved from a to b (cold); nothing was touched

  tasks     5
  memory    164.8 MiB
  blackout  about 250.0 ms
  total     about 2.00 s
  note      the root filesystem is the same on both nodes
"
        );
        let blocker = Blocker::new(BlockerKind::Descriptor, "fd 7 is an io_uring", "turn io_uring off in redis");
        p.blockers = vec![blocker.at(812, Some(7))];
        assert!(plan(&p, Paint(false)).starts_with(
            "redis cannot be moved from a to b (cold); nothing was touched\n  \
             pid 812 fd 7: fd 7 is an io_uring; turn io_uring off in redis\n"
        ));
    }
}
