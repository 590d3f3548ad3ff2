//! Redis from an image such as the official one, which names a user, with the engine's own seccomp profile.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tranship_e2e::{Dialect, connection_alive, wait_until};
use tranship_lab::{CounterClient, Lab, REDIS_PORT, Redis};

use crate::Site;
use crate::image::Image;

const REDIS: Image = Image {
    name: "docker.io/library/redis:lab",
    // util-linux has setarch.
    packages: &["redis-server", "util-linux"],
    alone: &[],
    owner: ("redis", 999),
    user: "redis",
    port: REDIS_PORT,
    volumes: &["/data"],
    stop_signal: "SIGTERM",
    // What a process of the container finds: the seccomp profile lets it run nothing without random addresses, and it is what it was started as.
    own: "mkdir -p usr/local/bin; cat > usr/local/bin/look <<'END'
#!/bin/sh
(setarch --addr-no-randomize true 2>/dev/null && echo open || echo closed; id -u; id -g;
    grep -E '^(Seccomp|NoNewPrivs|CapEff|CapBnd):' /proc/self/status) > /tmp/new && mv /tmp/new /tmp/state
END
chmod 755 usr/local/bin/look",
    start: "(while :; do look; sleep 0.2; done) & exec redis-server --bind 0.0.0.0 --protected-mode no --dir /data",
};

/// User, capabilities and the filter of system calls are what they were, for what was moved and for what is started there.
pub fn is_as_before(lab: &Lab, site: &Site, number: u8) -> Result<()> {
    let engine = &site.engine;
    let ip = Ipv4Addr::new(10, 77, 0, number);
    REDIS.make(lab, engine)?;
    let seccomp: &[&str] = match engine.dialect {
        Dialect::Docker => &[],
        Dialect::Ctr => &["--seccomp"],
    };
    site.start_image(lab, number, &REDIS, seccomp)?;
    site.answers(lab, "a", || Ok(Redis::connect(lab, ip, Duration::from_secs(1)).ok().map(drop)))?;
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
    ensure!(before.0.starts_with("closed\n999\n999\n"), "before the move it finds {}", before.0);
    ensure!(before.0.contains("Seccomp:\t2\n"), "before the move no profile is there: {}", before.0);
    for (from, to) in [("a", "b"), ("b", "a")] {
        counter.mark()?;
        site.moves(lab, from, to)?;
        let gap = connection_alive(&mut counter)?.since_mark.longest.ms;
        ensure!(gap < 1500.0, "the client waited for {gap:.0} ms");
        let after = (state(to)?, started(to)?);
        ensure!(after == before, "on {to} it finds {after:?}, before it found {before:?}");
    }
    connection_alive(&mut counter).context("at the end")?;
    drop(counter);
    site.is_managed(lab, "a", "a line after the moves")?;
    site.end(lab, "a")?;
    engine.remove_image(lab, REDIS.name)
}
