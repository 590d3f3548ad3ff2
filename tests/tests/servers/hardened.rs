//! An image that names a user, with the engine's own seccomp profile.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Dialect, connection_alive, wait_until};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis, redis_command};

use crate::Site;

/// What a process of the container finds: the seccomp profile lets it run nothing without random addresses, and it is what it was started as.
const LOOK: &str = "(setarch --addr-no-randomize true 2>/dev/null && echo open || echo closed; id -u; id -g; \
                     grep -E '^(Seccomp|NoNewPrivs|CapEff|CapBnd):' /proc/self/status) > /tmp/new && mv /tmp/new /tmp/state";

/// User, capabilities and the filter of system calls are what they were, for what was moved and for what is started there.
pub fn is_as_before(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let engine = &site.engine;
    (engine.prepare)(lab)?;
    let ip = Ipv4Addr::new(10, 77, 0, number);
    let image = engine.make_image(lab, "a", 1)?;
    let script = format!("(while :; do {LOOK}; sleep 0.2; done) & exec \"$@\"");
    let command = [["sh", "-c", &script, "sh"].map(str::to_owned).to_vec(), redis_command()].concat();
    let seccomp: &[&str] = match engine.dialect {
        Dialect::Docker => &[],
        Dialect::Ctr => &["--seccomp"],
    };
    (engine.run)(lab, "a", engine.name, ip, image, seccomp, &command)?;
    Redis::connect(lab, ip, Duration::from_secs(10))?;
    let mut counter = CounterClient::start(lab, (ip, REDIS_PORT).into(), "counter", Duration::from_micros(500))?;
    let state = |node: &str| {
        engine.execute(lab, node, "rm -f /tmp/state")?;
        wait_until("the container to look around", Duration::from_secs(10), || {
            let found = engine.execute(lab, node, "cat /tmp/state 2>/dev/null || true")?;
            Ok((!found.is_empty()).then_some(found))
        })
    };
    let started =
        |node: &str| engine.execute(lab, node, "grep -E '^(Uid|Gid|Seccomp|CapEff|CapBnd):' /proc/self/status");
    let before = (state("a")?, started("a")?);
    ensure!(before.0.starts_with("closed\n1000\n1000\n"), "before the move it finds {}", before.0);
    ensure!(before.0.contains("Seccomp:\t2\n"), "before the move no profile is there: {}", before.0);
    for (from, to) in [("a", "b"), ("b", "a")] {
        engine.moves(lab, &mut counter, from, to)?;
        let after = (state(to)?, started(to)?);
        ensure!(after == before, "on {to} it finds {after:?}, before it found {before:?}");
    }
    connection_alive(&mut counter).context("at the end")?;
    drop(counter);
    engine.remove(lab, "a")?;
    engine.remove_image(lab, image)
}
