//! The command line after its check: what to do.

use std::ffi::OsString;
use std::path::PathBuf;

use clap_complete::Shell;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use tranship_api::{GroupRequest, Keep, Label, MoveRequest, PlanRequest, RecoverRequest};
use tranship_types::{
    Compress, GroupId, GroupOrder, Logs, Mode, MoveOptions, NodeName, OnTimeout, check_container_name,
};

use crate::args::{self, Arguments, Call, CompressName, LogsName, ModeName, OnTimeoutName, OutputName};
use crate::evacuate::Evacuation;
use crate::{group, units};

/// A sensible command line.
#[derive(Debug)]
pub struct Invocation {
    /// The agent's socket.
    pub socket: PathBuf,
    /// The node whose agent answers; this node's where absent.
    pub node: Option<NodeName>,
    /// Whether JSON has the version of its schema around it.
    pub versioned: bool,
    /// What to do.
    pub command: Command,
}

/// What to do. `of` is the id of a migration or the name of a container; in `Watch` it may be the id of a group, too, and where it is absent
/// all that is under way is shown.
#[derive(Debug, PartialEq)]
pub enum Command {
    Move { request: MoveRequest, retry: u32, json: bool },
    MoveGroup { request: GroupRequest, json: bool },
    PlanGroup { request: GroupRequest, json: bool },
    Group { id: GroupId, json: bool },
    FollowGroup { id: GroupId, json: bool },
    Evacuate { evacuation: Evacuation, json: bool },
    Plan { request: PlanRequest, json: bool },
    Recover { request: RecoverRequest, json: bool },
    Cancel { name: String, json: bool },
    Containers { json: bool },
    UnderWay { json: bool },
    Status { of: String, json: bool },
    Timing { of: String },
    Trace { of: String },
    Follow { of: String, json: bool },
    Watch { of: Option<String> },
    History { filter: Filter, json: bool },
    Node { json: bool },
    Doctor { fix: bool, json: bool },
    HeldAddresses { json: bool },
    Release { container: String, even_if_alive: bool, json: bool },
    Agent { arguments: Vec<OsString> },
    Init { dir: PathBuf, nodes: Vec<NodeName>, renew: bool, revoke: bool },
    Completions(Shell),
    Man { dir: Option<PathBuf> },
}

/// Which of the moves that have ended are shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// No more than this, the newest.
    pub last: Option<u32>,
    /// Those of this container.
    pub container: Option<String>,
    /// Those that began at or after this time, in ms since the Unix epoch.
    pub since_unix_ms: Option<u64>,
}

impl TryFrom<Arguments> for Invocation {
    /// Why it makes no sense, in one sentence.
    type Error = String;

    fn try_from(arguments: Arguments) -> Result<Self, String> {
        let versioned = arguments.output == OutputName::Json;
        let json = |asked: bool| asked || versioned;
        let mut of_node = arguments.node;
        let command = match arguments.call {
            Call::Move(mut m) => {
                of_node = m.from.take().or(of_node);
                let (json, retry) = (json(m.json), m.retry.unwrap_or_default());
                Command::Move { request: request(m)?, retry, json }
            }
            Call::MoveGroup(mut g) => {
                of_node = g.from.take().or(of_node);
                let (json, dry_run) = (json(g.json), g.dry_run);
                let request = move_group(g)?;
                if dry_run { Command::PlanGroup { request, json } } else { Command::MoveGroup { request, json } }
            }
            Call::Evacuate(mut e) => {
                of_node = e.from.take().or(of_node);
                let json = json(e.json);
                Command::Evacuate { evacuation: evacuation(&e)?, json }
            }
            Call::Plan(mut p) => {
                of_node = p.from.take().or(of_node);
                let json = json(p.json);
                Command::Plan { request: plan(p)?, json }
            }
            Call::Recover(r) => {
                let keep = match (r.keep_here, r.keep_there) {
                    (true, _) => Some(Keep::Here),
                    (_, true) => Some(Keep::There),
                    _ => None,
                };
                let request = RecoverRequest { migration: container(r.name)?, host_is_down: r.host_is_down, keep };
                Command::Recover { request, json: json(r.json) }
            }
            Call::Cancel(a) => Command::Cancel { name: container(a.name)?, json: json(a.json) },
            Call::Ls(a) => Command::Containers { json: json(a.json) },
            Call::Status(args::Status { id, watch: true, .. }) => Command::Watch { of: id.map(container).transpose()? },
            Call::Status(args::Status { id: None, json: asked, .. }) => Command::UnderWay { json: json(asked) },
            Call::Status(args::Status { id: Some(id), follow, timing, trace, json: asked, .. })
                if id.starts_with(GroupId::PREFIX) =>
            {
                let (id, json): (GroupId, bool) = (id.parse().map_err(|e| format!("{e}"))?, json(asked));
                match (follow, timing || trace) {
                    (_, true) => {
                        return Err(format!("{id} is a group; --timing and --trace are of the moves that it lists"));
                    }
                    (true, _) => Command::FollowGroup { id, json },
                    (false, _) => Command::Group { id, json },
                }
            }
            Call::Status(args::Status { id: Some(of), follow, timing, trace, json: asked, .. }) => {
                let (of, json) = (container(of)?, json(asked));
                match (follow, timing, trace) {
                    (true, ..) => Command::Follow { of, json },
                    (_, true, _) => Command::Timing { of },
                    (.., true) => Command::Trace { of },
                    _ => Command::Status { of, json },
                }
            }
            Call::History(a) => Command::History { filter: filter(&a)?, json: json(a.json) },
            Call::Node(a) => Command::Node { json: json(a.json) },
            Call::Doctor(a) => Command::Doctor { fix: a.fix, json: json(a.json) },
            Call::Release(args::Release { name: None, json: asked, .. }) => {
                Command::HeldAddresses { json: json(asked) }
            }
            Call::Release(args::Release { name: Some(name), even_if_alive, json: asked }) => {
                Command::Release { container: container(name)?, even_if_alive, json: json(asked) }
            }
            Call::Agent(a) => Command::Agent { arguments: a.arguments },
            Call::Init(a) => Command::Init { dir: a.dir, nodes: nodes(&a.nodes)?, renew: a.renew, revoke: a.revoke },
            Call::Completions { shell } => Command::Completions(shell),
            Call::Man { dir } => Command::Man { dir },
        };
        if versioned && matches!(command, Command::Watch { .. } | Command::Timing { .. } | Command::Trace { .. }) {
            return Err("--watch, --timing and --trace print text; leave out --output json".to_owned());
        }
        let node = of_node.as_deref().map(node).transpose()?;
        Ok(Self { socket: arguments.socket, node, versioned, command })
    }
}

fn request(m: args::Move) -> Result<MoveRequest, String> {
    Ok(MoveRequest { container: container(m.name)?, to: node(&m.to)?, dry_run: m.dry_run, options: options(&m.how)? })
}

fn move_group(g: args::MoveGroup) -> Result<GroupRequest, String> {
    let pair = |text: &str, what: &str| match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is no {what}")),
    };
    let mut request = GroupRequest {
        to: g.to.as_deref().map(node).transpose()?,
        order: match (g.sequential, g.all_at_once, g.atomic) {
            (true, ..) => GroupOrder::Sequential,
            (_, true, _) => GroupOrder::AllAtOnce,
            (.., true) => GroupOrder::Atomic,
            _ => GroupOrder::Pipelined,
        },
        options: options(&g.how)?,
        ..GroupRequest::default()
    };
    for text in &g.map {
        let (name, to) = pair(text, "NAME=NODE; write --map db=b")?;
        if request.map.insert(container(name)?, node(&to)?).is_some() {
            return Err(format!("--map names the container of {text} twice; leave one of them out"));
        }
    }
    request.label = match (&g.label, g.compose_project) {
        (Some(text), _) => {
            let (key, value) = pair(text, "KEY=VALUE; write --label tier=shop")?;
            Some(Label { key, value })
        }
        (None, Some(value)) => Some(Label { key: Label::COMPOSE_PROJECT.to_owned(), value }),
        (None, None) => None,
    };
    if let Some(path) = &g.file {
        group::add_file(&mut request, path)?;
    }
    for name in g.containers {
        request.containers.entry(container(name)?).or_default();
    }
    Ok(request)
}

fn evacuation(e: &args::Evacuate) -> Result<Evacuation, String> {
    let to = nodes(&e.to)?;
    Ok(Evacuation { to, max_parallel: e.max_parallel, dry_run: e.dry_run, options: options(&e.how)? })
}

fn filter(h: &args::History) -> Result<Filter, String> {
    let since = |text: &String| {
        let time = units::point_of_time(text, Timestamp::now(), &TimeZone::system());
        time.map_err(|how| format!("--since {text:?} is no time: {how}"))
    };
    let container = h.container.clone().map(container).transpose()?;
    Ok(Filter { last: h.last, container, since_unix_ms: h.since.as_ref().map(since).transpose()? })
}

fn plan(p: args::Plan) -> Result<PlanRequest, String> {
    let (range, sample_ms) = (PlanRequest::SAMPLE_MS, p.sample);
    if !range.contains(&sample_ms) {
        return Err(format!("--sample of {sample_ms}ms is out of range; use {}ms to {}ms", range.start(), range.end()));
    }
    Ok(PlanRequest { container: container(p.name)?, to: node(&p.to)?, sample_ms, options: options(&p.how)? })
}

fn container(name: String) -> Result<String, String> {
    match check_container_name(&name) {
        Ok(()) => Ok(name),
        Err(wrong) => Err(format!("{wrong}; see `tranship ls`")),
    }
}

fn options(how: &args::How) -> Result<MoveOptions, String> {
    let options = MoveOptions {
        mode: match how.mode {
            ModeName::Auto => Mode::Auto,
            ModeName::Cold => Mode::Cold,
            ModeName::Precopy => Mode::Precopy,
            ModeName::Postcopy => Mode::Postcopy,
            ModeName::Hybrid => Mode::Hybrid,
        },
        engine: how.engine,
        to_engine: how.to_engine,
        blackout_budget_ms: how.blackout_budget,
        safe: how.safe,
        max_rounds: how.max_rounds,
        no_throttle: how.no_throttle,
        bandwidth: how.bandwidth,
        compress: match how.compress {
            CompressName::Auto => Compress::Auto,
            CompressName::Off => Compress::Off,
            CompressName::Lz4 => Compress::Lz4,
            CompressName::Zstd => Compress::Zstd,
        },
        with_binds: how.with_binds,
        verify_files: how.verify_files,
        freeze_timeout_ms: how.freeze_timeout,
        timeout_ms: how.timeout,
        on_timeout: match how.on_timeout {
            OnTimeoutName::Undo => OnTimeout::Undo,
            OnTimeoutName::Postcopy => OnTimeout::Postcopy,
        },
        allow: how.allow.iter().copied().collect(),
        stdio: how.stdio.clone(),
        keep_path: how.keep_path,
        logs: match how.logs {
            LogsName::Keep => Logs::Keep,
            LogsName::None => Logs::None,
        },
    };
    options.check().map_err(|e| in_words_of_the_command_line(&e.to_string()))?;
    Ok(options)
}

/// The same sentence with the options' names as they are typed.
fn in_words_of_the_command_line(sentence: &str) -> String {
    sentence
        .replace("blackout_budget_ms", "--blackout-budget")
        .replace("max_rounds", "--max-rounds")
        .replace("freeze_timeout_ms", "--freeze-timeout")
        .replace("on_timeout", "--on-timeout")
        .replace("without timeout_ms", "without --timeout")
        .replace("timeout_ms", "--timeout")
        .replace("or use mode auto", "or use --mode auto")
        .replace("no_throttle", "--no-throttle")
        .replace("bandwidth of", "--bandwidth of")
        .replace("safe and mode ", "--safe and --mode ")
        .replace("without safe", "without --safe")
        .replace("add safe", "add --safe")
        .replace("use mode precopy", "use --mode precopy")
}

fn node(name: &str) -> Result<NodeName, String> {
    name.parse().map_err(|e| format!("{e}"))
}

fn nodes(names: &[String]) -> Result<Vec<NodeName>, String> {
    let mut nodes: Vec<NodeName> = Vec::new();
    for name in names {
        let name = node(name)?;
        if nodes.contains(&name) {
            return Err(format!("node {name} is named twice; name each node once"));
        }
        nodes.push(name);
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    fn parse(line: &str) -> Result<Command, String> {
        let arguments = Arguments::try_parse_from(line.split(' ')).map_err(|e| e.to_string())?;
        Invocation::try_from(arguments).map(|i| i.command)
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_move_is_understood() {
        let expected = MoveRequest { dry_run: true, ..MoveRequest::new("redis", "b".parse().unwrap()) };
        let command = parse("tranship move redis --to b --mode auto --dry-run").unwrap();
        assert_eq!(command, Command::Move { request: expected, retry: 0, json: false });
    }

    #[test]
    fn a_move_is_tried_again_as_often_as_is_asked() {
        let command = parse("tranship move redis --to b --retry 3").unwrap();
        assert!(matches!(command, Command::Move { retry: 3, .. }), "{command:?}");
        assert!(parse("tranship move redis --to b --retry 3 --dry-run").is_err());
    }

    #[test]
    fn the_options_of_a_move_are_understood() {
        let line = "tranship move redis --to b --mode auto --blackout-budget 0.1s --safe --max-rounds 7 --no-throttle \
                    --bandwidth 500mbit --compress zstd --engine docker --to-engine podman --with-binds --verify-files \
                    --freeze-timeout 3s --timeout 5min --allow eventfd-semaphore --allow deadline-scheduling \
                    --stdio file:/var/log/redis --logs none --keep-path";
        let Command::Move { request, .. } = parse(line).unwrap() else { panic!("not a move") };
        let expected = MoveOptions {
            mode: Mode::Auto,
            engine: Some(tranship_types::EngineName::Docker),
            to_engine: Some(tranship_types::EngineName::Podman),
            blackout_budget_ms: Some(100),
            safe: true,
            max_rounds: Some(7),
            no_throttle: true,
            bandwidth: Some(tranship_types::Bandwidth(500_000_000)),
            compress: Compress::Zstd,
            with_binds: true,
            verify_files: true,
            freeze_timeout_ms: Some(3000),
            timeout_ms: Some(300_000),
            on_timeout: OnTimeout::Undo,
            allow: ["deadline-scheduling", "eventfd-semaphore"].map(|kind| kind.parse().unwrap()).into_iter().collect(),
            stdio: tranship_types::StdioTarget::File("/var/log/redis".into()),
            logs: Logs::None,
            keep_path: Some(true),
        };
        assert_eq!(request.options, expected);
        let Command::Move { request, .. } = parse("tranship move --keep-path=false redis --to b").unwrap() else {
            panic!()
        };
        assert_eq!((request.options.keep_path, request.container.as_str()), (Some(false), "redis"));
        let Command::Move { request, .. } =
            parse("tranship move redis --to b --timeout 90s --on-timeout postcopy").unwrap()
        else {
            panic!("not a move")
        };
        assert_eq!((request.options.timeout_ms, request.options.on_timeout), (Some(90_000), OnTimeout::Postcopy));
        let error = parse("tranship move redis --to b --on-timeout postcopy").unwrap_err();
        assert!(error.contains("--on-timeout has no meaning without --timeout"), "{error}");
        let error = parse("tranship move redis --to b --mode cold --timeout 9s --on-timeout postcopy").unwrap_err();
        assert!(error.contains("--on-timeout postcopy needs a mode with rounds"), "{error}");
        let error = parse("tranship move redis --to b --freeze-timeout 1ms").unwrap_err();
        assert!(error.contains("--freeze-timeout of 1 is out of range"), "{error}");
    }

    #[test]
    fn any_agent_can_be_asked() {
        for (line, node) in [
            ("tranship move redis --from a --to b", Some("a")),
            ("tranship plan redis --from a --to b", Some("a")),
            ("tranship evacuate a --to b", Some("a")),
            ("tranship evacuate --to b", None),
            ("tranship --node a status", Some("a")),
            ("tranship ls --node a", Some("a")),
        ] {
            let invocation = Invocation::try_from(Arguments::try_parse_from(line.split(' ')).unwrap()).unwrap();
            assert_eq!(invocation.node.as_ref().map(NodeName::as_str), node, "{line}");
        }
    }

    #[test]
    fn a_status_is_of_an_id_or_a_container() {
        assert_eq!(parse("tranship status redis").unwrap(), Command::Status { of: "redis".into(), json: false });
        assert_eq!(parse("tranship status m-1 --timing").unwrap(), Command::Timing { of: "m-1".into() });
        assert_eq!(parse("tranship status --watch").unwrap(), Command::Watch { of: None });
        assert_eq!(parse("tranship status -w g-1").unwrap(), Command::Watch { of: Some("g-1".into()) });
        let filter = Filter { last: Some(3), container: Some("redis".into()), since_unix_ms: None };
        let line = "tranship history -n 3 --container redis --output json";
        assert_eq!(parse(line).unwrap(), Command::History { filter, json: true });
    }

    #[test]
    fn a_cancel_names_a_container_or_an_id() {
        let command = parse("tranship cancel g-4k7tq0zd --json").unwrap();
        assert_eq!(command, Command::Cancel { name: "g-4k7tq0zd".into(), json: true });
        assert!(parse("tranship cancel a/b").is_err());
    }

    #[test]
    fn the_help_and_the_manual_list_what_can_be_allowed() {
        let mut command = Arguments::command();
        let help = command.find_subcommand_mut("move").unwrap().render_long_help().to_string();
        let manual = include_str!("../../../docs/cli.md");
        for kind in tranship_types::ALLOWABLE {
            assert!(help.contains(&format!("- {}: ", kind.name)), "{help}");
            let row = format!("| `{}` | {} |", kind.name, kind.meaning);
            assert!(manual.contains(&row), "docs/cli.md lacks the row {row}");
        }
    }

    #[test]
    fn a_group_is_understood() {
        let line = "tranship move-group --compose-project shop --to b --map db=c web=d --sequential --mode cold";
        let Command::MoveGroup { request, .. } = parse(line).unwrap() else { panic!("no group") };
        assert_eq!(request.label.unwrap().key, "com.docker.compose.project");
        assert_eq!(request.map.values().map(NodeName::as_str).collect::<Vec<_>>(), ["c", "d"]);
        assert_eq!((request.order, request.options.mode), (GroupOrder::Sequential, Mode::Cold));
        let label = Label { key: "tier".into(), value: "a=b".into() };
        let Command::MoveGroup { request, .. } = parse("tranship move-group --label tier=a=b").unwrap() else {
            panic!("no group")
        };
        assert_eq!((request.label, request.order), (Some(label), GroupOrder::Pipelined));
        let Command::PlanGroup { request, json: true } =
            parse("tranship move-group --label a=b --dry-run --json").unwrap()
        else {
            panic!("no plan")
        };
        assert_eq!(request.order, GroupOrder::Pipelined);
        let Command::MoveGroup { request, .. } =
            parse("tranship move-group --containers app db --to b --atomic").unwrap()
        else {
            panic!("no group")
        };
        assert_eq!(request.containers.keys().collect::<Vec<_>>(), ["app", "db"]);
        let Command::MoveGroup { request, .. } = parse("tranship move-group --label a=b --atomic").unwrap() else {
            panic!("no group")
        };
        assert_eq!(request.order, GroupOrder::Atomic);
        let command = parse("tranship status g-4k7tq0zd").unwrap();
        assert_eq!(command, Command::Group { id: "g-4k7tq0zd".parse().unwrap(), json: false });
    }

    #[test]
    fn a_recovery_needs_the_word_and_takes_the_other() {
        for (more, host_is_down) in [("", false), (" --host-is-down", true)] {
            let command = parse(&format!("tranship recover redis --destination-lost{more}")).unwrap();
            let request = RecoverRequest { migration: "redis".into(), host_is_down, keep: None };
            assert_eq!(command, Command::Recover { request, json: false });
        }
        for (word, keep) in [("--keep-here", Keep::Here), ("--keep-there", Keep::There)] {
            let request = RecoverRequest { migration: "m-1".into(), host_is_down: true, keep: Some(keep) };
            let command = parse(&format!("tranship recover m-1 --host-is-down {word}")).unwrap();
            assert_eq!(command, Command::Recover { request, json: false });
        }
        assert!(parse("tranship recover m-1 --keep-here --keep-there").is_err());
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_words() {
        for (line, word) in [
            ("tranship move redis", "--to"),
            ("tranship move redis --to ../b", "node name \"../b\" is not usable"),
            ("tranship move a/b --to b", "container name"),
            ("tranship move redis --to b --mode warm", "warm"),
            ("tranship move redis --to b --mode hybrid --safe", "--safe and --mode hybrid contradict"),
            ("tranship move redis --to b --mode precopy --no-throttle", "without --safe"),
            (
                "tranship move redis --to b --mode postcopy --max-rounds 3",
                "--max-rounds has no meaning in mode postcopy",
            ),
            ("tranship move redis --to b --mode precopy --blackout-budget 2h", "7200000"),
            ("tranship move redis --to b --mode precopy --blackout-budget 61s", "--blackout-budget of 61000"),
            ("tranship move redis --to b --bandwidth fast", "500mbit"),
            ("tranship move redis --to b --allow everything", "use one of: "),
            ("tranship move redis --to b --compress gzip", "gzip"),
            ("tranship move-group --to b", "required"),
            ("tranship move-group --label tier --to b", "KEY=VALUE"),
            ("tranship move-group --label a=b --map db --to b", "NAME=NODE"),
            ("tranship move-group --label a=b --map db=b db=c", "twice"),
            ("tranship move-group --label a=b --atomic --sequential", "--sequential"),
            ("tranship move-group /no/such/file.yaml --to b", "/no/such/file.yaml does not exist; check its name"),
            ("tranship move-group --label a=b --sequential --all-at-once", "--all-at-once"),
            ("tranship status g-1 --timing", "g-1 is a group"),
            ("tranship plan redis --to b --sample 2h", "7200000"),
            ("tranship plan redis --to b --sample -2s", "a duration cannot be negative"),
            ("tranship move redis --to b --freeze-timeout 0", "the shortest duration is 1ms"),
            ("tranship move redis --to b --max-rounds 0", "the least is 1"),
            ("tranship move redis --to b --bandwidth -5mbit", "500mbit"),
            ("tranship history -n 0", "the least is 1"),
            ("tranship history --since yesterday", "--since \"yesterday\" is no time: write it like 90min"),
            ("tranship evacuate --to b --max-parallel -1", "the least is 1"),
            ("tranship evacuate a", "--to"),
            ("tranship evacuate a --to b b", "twice"),
            ("tranship move redis --from a --to b --node c", "--node"),
            ("tranship status --watch --follow m-1", "--follow"),
            ("tranship ls --output yaml", "yaml"),
            ("tranship status m-1 --timing --output json", "--timing and --trace print text"),
            ("tranship plan redis --to b --sample 5ms", "100ms to 60000ms"),
            ("tranship plan redis --to b --mode hybrid --safe", "contradict"),
            ("tranship recover redis", "--destination-lost"),
            ("tranship recover a/b --destination-lost", "container name"),
            ("tranship status ../etc", "container name"),
            ("tranship status --follow", "<NAME|ID>"),
            ("tranship init --node a b a", "twice"),
            ("tranship init", "--node"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn the_agent_gets_its_arguments_untouched() {
        let command = parse("tranship agent --config x.toml --help").unwrap();
        assert_eq!(command, Command::Agent { arguments: ["--config", "x.toml", "--help"].map(Into::into).into() });
    }
}
