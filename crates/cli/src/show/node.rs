use tranship_api::{NodeInfo, PeerInfo, PeerState, Problem, ToolInfo};

use super::table::{Column, table};
use crate::screen::Paint;

/// Whether the node can take part in moves: with a criu and at least one engine.
pub fn usable(n: &NodeInfo) -> bool {
    n.criu.usable() && n.engines.iter().any(ToolInfo::usable)
}

/// `tranship node`.
pub fn node(n: &NodeInfo, paint: Paint) -> String {
    let verdict = if usable(n) { paint.good("ready") } else { paint.bad("not ready") };
    let mut text = format!("node {} is {verdict}; transhipd {} listens on {}\n", n.name, n.version, n.listen);
    let down: Vec<&str> = n.peers.iter().filter(|p| p.state == PeerState::Down).map(|p| p.name.as_str()).collect();
    if !down.is_empty() {
        let what = if down.len() == n.peers.len() { "no peer can be reached" } else { "not every peer can be reached" };
        text += &format!("{} {what}: {}\n", paint.bad("but"), down.join(", "));
    }
    text.push('\n');
    let columns = [
        Column::Text("PART"),
        Column::Text("NAME"),
        Column::Text("STATE"),
        Column::Text("VERSION"),
        Column::Text("WHERE"),
    ];
    let nothing = || "-".to_owned();
    let tool = |part: &str, t: &ToolInfo| {
        let state = if t.usable() { "ok" } else { "unusable" };
        let version = t.version.clone().unwrap_or_else(nothing);
        vec![part.to_owned(), t.name.clone(), state.to_owned(), version, t.path.clone().unwrap_or_else(nothing)]
    };
    let peer = |p: &PeerInfo| {
        let state = match p.state {
            PeerState::Up => "up",
            PeerState::Down => "down",
            PeerState::Unknown => "not asked",
        };
        vec!["peer".to_owned(), p.name.to_string(), state.to_owned(), nothing(), p.address.clone()]
    };
    let mut rows = vec![tool("criu", &n.criu)];
    rows.extend(n.engines.iter().map(|e| tool("engine", e)));
    rows.extend(n.peers.iter().map(peer));
    text += &table("  ", &columns, rows);
    let problem = |name: &str, p: &Option<Problem>| {
        p.as_ref().map(|p| format!("{} {name}: {}; {}\n", paint.bad("problem:"), p.cause, p.remedy)).unwrap_or_default()
    };
    let problems: String = std::iter::once(problem(&n.criu.name, &n.criu.problem))
        .chain(n.engines.iter().map(|e| problem(&e.name, &e.problem)))
        .chain(n.peers.iter().map(|p| problem(p.name.as_str(), &p.problem)))
        .collect();
    if !problems.is_empty() {
        text.push('\n');
        text += &problems;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_and_what_to_do_about_it() {
        let tool = |name: &str, problem| ToolInfo {
            name: name.into(),
            path: Some(format!("/usr/sbin/{name}")),
            version: Some("4.1.1".into()),
            problem,
        };
        let no = |cause: &str, remedy: &str| Some(Problem { cause: cause.into(), remedy: remedy.into() });
        let mut n = NodeInfo {
            name: "a".parse().unwrap(),
            version: "0.1.0".into(),
            listen: "10.77.0.1:7077".into(),
            criu: tool("criu", no("`criu check` fails on kernel 6.18", "install criu 4.1.1 or later")),
            engines: vec![tool("runc", None)],
            peers: vec![PeerInfo {
                name: "b".parse().unwrap(),
                address: "10.77.0.2:7077".into(),
                state: PeerState::Down,
                problem: no("connection refused", "start the agent on b"),
            }],
        };
        assert_eq!(
            node(&n, Paint(false)),
            "\
node a is not ready; transhipd 0.1.0 listens on 10.77.0.1:7077
but no peer can be reached: b

  PART    NAME  STATE     VERSION  WHERE
  criu    criu  unusable  4.1.1    /usr/sbin/criu
  engine  runc  ok        4.1.1    /usr/sbin/runc
  peer    b     down      -        10.77.0.2:7077

problem: criu: `criu check` fails on kernel 6.18; install criu 4.1.1 or later
problem: b: connection refused; start the agent on b
"
        );
        n.criu.problem = None;
        assert!(usable(&n) && node(&n, Paint(false)).starts_with("node a is ready;"));
    }
}
