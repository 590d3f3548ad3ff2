//! The command line as clap parses it. `command` checks its values and what they mean together.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use clap_complete::engine::ArgValueCompleter;
use tranship_types::{ALLOWABLE, Allowances, Bandwidth, EngineName, StdioTarget};

use crate::{candidates, units};

const EXIT_STATUS: &str = "\
Exit status:
    0  done; for `move`: the container runs on the destination; for `move-group`: all do; for `recover` and `cancel`: on the source
    1  failed; for `move`: the container is on the source as it was found there; for `move-group`: at least one does
    2  the command line makes no sense
    3  `move` is blocked, or `recover` or `cancel` refused: nothing was touched
    4  the agent cannot be reached
    5  the container was moved, and ended on the destination before its last pages had come
  130  Ctrl-C; a move that has begun goes on

Environment:
    TRANSHIP_NODE    the node whose agent answers, where --node is not given
    TRANSHIP_SOCKET  the agent's socket, where --socket is not given
    NO_COLOR         no colours";

const MOVE_EXAMPLES: &str = "\
Examples:
    tranship move redis --to b
    tranship move redis --to b --dry-run          what stands in the way; nothing is touched
    tranship move app --to b --keep-path          those that stay on its bridge network go on reaching it
    tranship move redis --from a --to b           from any node that may control node a
    tranship move job --to b --safe --timeout 30min
    tranship move web --to b --bandwidth 500mbit --blackout-budget 50ms";

const GROUP_EXAMPLES: &str = "\
Examples:
    tranship move-group shop.yaml --to b
    tranship move-group --compose-project shop --to b --map shop-cache-1=c
    tranship move-group --label tier=shop --to b --atomic
    tranship move-group --containers app db --to b --atomic";

const EVACUATE_EXAMPLES: &str = "\
Each running container moves to one of the nodes, the largest first, to the node that has got the least memory so far. What cannot be
moved is listed and skipped; repeat the command to try the rest again. Ctrl-C begins no more moves; those under way go on.

Examples:
    tranship evacuate --to b                      all containers of this node
    tranship evacuate a --to b c --max-parallel 4
    tranship evacuate --to b c --dry-run          which container would go where";

const PLAN_EXAMPLES: &str = "\
Examples:
    tranship plan redis --to b
    tranship plan redis --to b --mode precopy --safe --sample 10s";

const STATUS_EXAMPLES: &str = "\
Examples:
    tranship status                               moves that are under way
    tranship status --watch                       the same, again each second
    tranship status redis                         the latest move of a container
    tranship status m-4k7tq0zd --timing";

const HISTORY_EXAMPLES: &str = "\
Examples:
    tranship history -n 10
    tranship history --container redis --since 2d
    tranship history --since '2026-03-01 14:00' --json";

/// Moves running containers between nodes, with their memory, files and TCP connections.
#[derive(Debug, Parser)]
#[command(name = "tranship", version, after_help = EXIT_STATUS, max_term_width = 100)]
pub struct Arguments {
    /// The agent's socket
    #[arg(long, global = true, value_name = "PATH", env = "TRANSHIP_SOCKET", default_value = tranship_api::DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// The node whose agent answers, as this node's configuration names it; it must let this node control it [default: this node]
    #[arg(long, global = true, value_name = "NODE", env = "TRANSHIP_NODE", add = ArgValueCompleter::new(candidates::nodes))]
    pub node: Option<String>,
    /// Print text, or JSON with the version of its schema; errors have one shape
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value = "text")]
    pub output: OutputName,
    #[command(subcommand)]
    pub call: Call,
}

#[derive(Debug, Subcommand)]
pub enum Call {
    /// Move a running container to another node
    #[command(after_help = MOVE_EXAMPLES, after_long_help = format!("{MOVE_EXAMPLES}\n\n{EXIT_STATUS}"))]
    Move(Move),
    /// Move several containers to another node, in the order of what they depend on
    #[command(after_help = GROUP_EXAMPLES, after_long_help = format!("{GROUP_EXAMPLES}\n\n{EXIT_STATUS}"))]
    MoveGroup(MoveGroup),
    /// Move all running containers of a node to other nodes
    #[command(after_help = EVACUATE_EXAMPLES)]
    Evacuate(Evacuate),
    /// Predict how a move would go, from a few seconds of measurement; nothing is stopped or moved
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(Plan),
    /// List this node's containers
    Ls(Json),
    /// Show the moves that are under way, or everything about one move
    #[command(after_help = STATUS_EXAMPLES)]
    Status(Status),
    /// List the moves that have ended
    #[command(after_help = HISTORY_EXAMPLES)]
    History(History),
    /// Show this node's health: criu, engines, peers (exit status 1 where it cannot take part in moves)
    Node(Json),
    /// Find what moves have left on this node that no move owns any more (exit status 1 where something is left)
    Doctor(Doctor),
    /// List the addresses that this node holds for containers that have left it, or give back those of one
    Release(Release),
    /// Cancel a move, or a group's moves, before the commit point: the container goes on on this node
    Cancel(Cancel),
    /// Run a container here again whose move has committed, and whose destination is lost for good
    Recover(Recover),
    /// Run this node's agent in the foreground (what systemd does with transhipd.service)
    #[command(disable_help_flag = true)]
    Agent(Agent),
    /// Make a certificate authority, and a key and certificate for each node
    Init(Init),
    /// Print a shell's completion script; it completes names of containers and nodes, and ids, too
    #[command(after_help = "Examples:\n    tranship completions bash > /etc/bash_completion.d/tranship")]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write one for each command
    Man {
        /// Write tranship.1, tranship-move.1 … to this directory
        #[arg(long, value_name = "PATH")]
        dir: Option<PathBuf>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputName {
    /// For people
    Text,
    /// One line: {"schema_version": 1, "data": …}, with "error": {"message", "remedy", "blockers"} where it failed
    Json,
}

#[derive(Debug, Args)]
pub struct Json {
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Move {
    /// The container, as `tranship ls` names it
    #[arg(add = ArgValueCompleter::new(candidates::containers))]
    pub name: String,
    /// The node to move it to
    #[arg(long, value_name = "NODE", add = ArgValueCompleter::new(candidates::nodes))]
    pub to: String,
    /// The node that it runs on [default: this node]
    #[arg(long, value_name = "NODE", conflicts_with = "node", add = ArgValueCompleter::new(candidates::nodes))]
    pub from: Option<String>,
    #[command(flatten)]
    pub how: How,
    /// Try again so often where what stands in the way passes by itself: a health check, a
    /// connection that ends
    #[arg(long, value_name = "N", value_parser = units::count, allow_hyphen_values = true, conflicts_with = "dry_run")]
    pub retry: Option<u32>,
    /// Only say what would be done and what stands in the way; touch nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print exactly one line of JSON on stdout: the final report, the plan of a dry run, or the error
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[group(id = "members", required = true, multiple = true, args = ["file", "containers", "label", "compose_project"])]
pub struct MoveGroup {
    /// A group file (YAML): the containers, and what they depend on
    pub file: Option<PathBuf>,
    /// These containers, in no order of their own
    #[arg(long, value_name = "NAME", num_args = 1.., add = ArgValueCompleter::new(candidates::containers))]
    pub containers: Vec<String>,
    /// All running containers with this label, e.g. tier=shop
    #[arg(long, value_name = "KEY=VALUE", conflicts_with = "compose_project")]
    pub label: Option<String>,
    /// All running containers of this Compose project, with the dependencies that it has
    #[arg(long, value_name = "PROJECT")]
    pub compose_project: Option<String>,
    /// The node to move them to, unless --map or the file names another one
    #[arg(long, value_name = "NODE", add = ArgValueCompleter::new(candidates::nodes))]
    pub to: Option<String>,
    /// The node that they run on [default: this node]
    #[arg(long, value_name = "NODE", conflicts_with = "node", add = ArgValueCompleter::new(candidates::nodes))]
    pub from: Option<String>,
    /// The nodes to move some of them to instead
    #[arg(long, value_name = "NAME=NODE", num_args = 1..)]
    pub map: Vec<String>,
    /// Move each when the one before has been moved, rather than in a pipeline
    #[arg(long, conflicts_with = "all_at_once")]
    pub sequential: bool,
    /// Move all at the same time, in no order
    #[arg(long)]
    pub all_at_once: bool,
    /// Move all or none: all are frozen until a copy of each is ready
    #[arg(long, conflicts_with_all = ["all_at_once", "sequential"])]
    pub atomic: bool,
    /// Only look, and foretell how each move would go; move nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub how: How,
    /// Print exactly one line of JSON on stdout: the final report of the group, or the error
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Evacuate {
    /// The node to empty [default: this node]
    #[arg(value_name = "NODE", conflicts_with = "node", add = ArgValueCompleter::new(candidates::nodes))]
    pub from: Option<String>,
    /// The nodes to move its containers to
    #[arg(long, value_name = "NODE", required = true, num_args = 1.., add = ArgValueCompleter::new(candidates::nodes))]
    pub to: Vec<String>,
    /// No more moves than this at the same time
    #[arg(long, value_name = "N", value_parser = units::count, allow_hyphen_values = true, default_value = "2")]
    pub max_parallel: u32,
    /// Only look which container would go where, and what stands in the way; move nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub how: How,
    /// Print exactly one line of JSON on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Plan {
    /// The container, as `tranship ls` names it
    #[arg(add = ArgValueCompleter::new(candidates::containers))]
    pub name: String,
    /// The node to move it to
    #[arg(long, value_name = "NODE", add = ArgValueCompleter::new(candidates::nodes))]
    pub to: String,
    /// The node that it runs on [default: this node]
    #[arg(long, value_name = "NODE", conflicts_with = "node", add = ArgValueCompleter::new(candidates::nodes))]
    pub from: Option<String>,
    #[command(flatten)]
    pub how: How,
    /// How long to measure what the container writes, e.g. 3s
    #[arg(long, value_name = "TIME", value_parser = units::milliseconds, allow_hyphen_values = true, default_value = "3s")]
    pub sample: u32,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of a move, and of its plan.
#[derive(Debug, Args)]
pub struct How {
    /// How memory moves relative to the freeze
    #[arg(long, value_enum, default_value = "auto")]
    pub mode: ModeName,
    /// The engine that runs the container, where several have one of its name
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<EngineName>,
    /// The engine that is to have it there, if that is another one: docker for a container of podman, or the other way round
    #[arg(long, value_name = "ENGINE")]
    pub to_engine: Option<EngineName>,
    /// With rounds: freeze when the remaining pages take no longer than this, e.g. 100ms [default: 10ms]
    #[arg(long, value_name = "TIME", value_parser = units::milliseconds, allow_hyphen_values = true)]
    pub blackout_budget: Option<u32>,
    /// Never let the container run there before its last page is there; slow it down if it writes too fast for that
    #[arg(long)]
    pub safe: bool,
    /// With rounds: no more rounds than this [default: 12]
    #[arg(long, value_name = "N", value_parser = units::count, allow_hyphen_values = true)]
    pub max_rounds: Option<u32>,
    /// With --safe: give the move up, rather than slow the container down
    #[arg(long)]
    pub no_throttle: bool,
    /// Bandwidth of the move while the container runs, e.g. 500mbit or 100MB/s [default: unlimited]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    pub bandwidth: Option<Bandwidth>,
    /// Whether and how pages are compressed on their way
    #[arg(long, value_enum, default_value = "auto")]
    pub compress: CompressName,
    /// Carry the node's own directories that the container may write to (bind mounts), too
    #[arg(long)]
    pub with_binds: bool,
    /// Compare all carried files on both nodes in the freeze, which lengthens it
    #[arg(long)]
    pub verify_files: bool,
    /// What becomes of what the container has logged so far (Docker, Podman): keep (it moves along) or none (it is removed)
    #[arg(long, value_enum, value_name = "WHAT", default_value = "keep")]
    pub logs: LogsName,
    /// Keep the path to the containers that stay on a bridge network of the node: a VXLAN between the two nodes, not
    /// encrypted, until all are on one node [default: as the node is configured]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub keep_path: Option<bool>,
    /// The longest freeze, e.g. 500ms or 30s; a move that takes longer is undone [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = units::milliseconds, allow_hyphen_values = true)]
    pub freeze_timeout: Option<u32>,
    /// The longest time until the move's commit point, e.g. 90s or 30min [default: unlimited]
    #[arg(long, value_name = "TIME", value_parser = units::milliseconds, allow_hyphen_values = true)]
    pub timeout: Option<u32>,
    /// What happens when --timeout has passed
    #[arg(long, value_enum, value_name = "WHAT", default_value = "undo")]
    pub on_timeout: OnTimeoutName,
    /// Let the move lose state of this kind, which otherwise stands in its way; may be given several times
    #[arg(long, value_name = "KIND", long_help = allow_help())]
    pub allow: Vec<Allowances>,
    /// Where stdout and stderr of a bare runc container go there, if they are a file, pipe, socket or terminal of the node: keep (the
    /// same path, or a relay to the reader here), journal, null or file:PATH
    #[arg(long, value_name = "TARGET", default_value = "keep")]
    pub stdio: StdioTarget,
}

/// The help of `--allow`, with all kinds.
fn allow_help() -> String {
    let kinds: String = ALLOWABLE.iter().map(|kind| format!("\n- {}: {}", kind.name, kind.meaning)).collect();
    format!(
        "Let the move lose state of this kind, which otherwise stands in its way; may be given several times\n\nKinds:{kinds}"
    )
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum ModeName {
    /// By measurement: rounds, and post-copy where they do not help
    Auto,
    /// Stop-and-copy: freeze, then move everything
    Cold,
    /// Move memory in rounds while the container runs, then freeze for the rest
    Precopy,
    /// Freeze at once; memory follows while the container runs on the destination
    Postcopy,
    /// Rounds while they help; what is left follows while the container runs on the destination
    Hybrid,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogsName {
    Keep,
    None,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OnTimeoutName {
    /// The move is undone
    Undo,
    /// The container is frozen at once, and the pages that are left follow while it runs on the destination
    Postcopy,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum CompressName {
    /// Where the link is the bottleneck
    Auto,
    /// Never
    Off,
    /// Always, fast
    Lz4,
    /// Always, tight
    Zstd,
}

#[derive(Debug, Args)]
pub struct Status {
    /// A container (its latest move), or the id of a move or group
    #[arg(value_name = "NAME|ID", add = ArgValueCompleter::new(candidates::ids_and_containers))]
    pub id: Option<String>,
    /// Show it again each second, until Ctrl-C
    #[arg(long, short, conflicts_with_all = ["follow", "timing", "trace", "json"])]
    pub watch: bool,
    /// Follow the move until it has ended; the exit status is then that of `move`
    #[arg(long, short, requires = "id")]
    pub follow: bool,
    /// Show each part of the time that it took, on both nodes
    #[arg(long, requires = "id", conflicts_with_all = ["follow", "json", "trace"])]
    pub timing: bool,
    /// Print that as a trace that Perfetto and chrome://tracing show
    #[arg(long, requires = "id", conflicts_with_all = ["follow", "json"])]
    pub trace: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct History {
    /// Show the last N only
    #[arg(long, short = 'n', value_name = "N", value_parser = units::count, allow_hyphen_values = true)]
    pub last: Option<u32>,
    /// Show the moves of this container only
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(candidates::containers))]
    pub container: Option<String>,
    /// Show moves that began at or after this time only, e.g. 90min, 2d, 2026-03-01 or '2026-03-01 14:00'
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Cancel {
    /// The container, or the id of the move or group
    #[arg(add = ArgValueCompleter::new(candidates::ids_and_containers))]
    pub name: String,
    /// Print exactly one line of JSON on stdout: the final report, or the error
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Recover {
    /// The container, or the move's id
    #[arg(add = ArgValueCompleter::new(candidates::ids_and_containers))]
    pub name: String,
    /// The destination is lost for good; what the container did there, and told its clients, is lost with it
    #[arg(long, required_unless_present_any = ["keep_here", "keep_there"])]
    pub destination_lost: bool,
    /// The journal is damaged, and the copy on this node goes on
    #[arg(long, conflicts_with_all = ["destination_lost", "keep_there"])]
    pub keep_here: bool,
    /// The journal is damaged, and the copy on the other node goes on
    #[arg(long, conflicts_with = "destination_lost")]
    pub keep_there: bool,
    /// The other node's host is known to be down, or was restarted since: nothing of the container runs there
    #[arg(long)]
    pub host_is_down: bool,
    /// Print exactly one line of JSON on stdout: the final report, or the error
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Remove it
    #[arg(long)]
    pub fix: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Release {
    /// The container that has left, and whose node is gone for good
    pub name: Option<String>,
    /// Also where the container's node answers that it has the addresses
    #[arg(long, requires = "name")]
    pub even_if_alive: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Agent {
    /// Passed on to transhipd, e.g. --config /etc/tranship/agent.toml
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    pub arguments: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Init {
    /// Where to put them
    #[arg(long, value_name = "PATH", default_value = "/etc/tranship/pki")]
    pub dir: PathBuf,
    /// The nodes' names
    #[arg(long = "node", value_name = "NAME", required = true, num_args = 1..)]
    pub nodes: Vec<String>,
    /// Replace the keys and certificates that these nodes have
    #[arg(long)]
    pub renew: bool,
    /// Add the certificates that these nodes have to the revocation list ca.crl, and make no new ones
    #[arg(long, conflicts_with = "renew")]
    pub revoke: bool,
}
