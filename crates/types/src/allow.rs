use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Blocker;

/// One kind of state that a move cannot carry and that a user may allow it to lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowable {
    /// Stable name, in kebab case: the argument of `--allow`.
    pub name: &'static str,
    /// What the container loses, in one line.
    pub meaning: &'static str,
}

/// All kinds that `--allow` takes. A kind's place in this list is not stored anywhere; its name is.
pub const ALLOWABLE: &[Allowable] = &[
    Allowable {
        name: "closed-connections",
        meaning: "connections that programs have closed lose what they have not sent yet, and their peers see a reset",
    },
    Allowable {
        name: "closed-terminals",
        meaning: "terminals whose other side was closed lose what waits in them to be read",
    },
    Allowable {
        name: "core-files",
        meaning: "processes that have ended with a core file, and that their parents have not waited for, ended without",
    },
    Allowable { name: "datagram-senders", meaning: "unread datagrams of Unix sockets lose the name of their sender" },
    Allowable {
        name: "deadline-scheduling",
        meaning: "threads with SCHED_DEADLINE lose their runtime, deadline and period",
    },
    Allowable {
        name: "deny-write-execute",
        meaning: "processes lose PR_SET_MDWE: they may make memory executable again",
    },
    Allowable { name: "directory-signals", meaning: "directories with F_NOTIFY send no more signals" },
    Allowable { name: "eventfd-semaphore", meaning: "eventfds made with EFD_SEMAPHORE count as ordinary ones" },
    Allowable {
        name: "exit-signal",
        meaning: "processes made by clone() with another signal than SIGCHLD end with SIGCHLD",
    },
    Allowable {
        name: "executable-segments",
        meaning: "System V segments that were attached with SHM_EXEC can be written to, and not executed any more",
    },
    Allowable { name: "flow-labels", meaning: "IPv6 sockets lose the flow labels that they have leased" },
    Allowable { name: "inotify-events", meaning: "inotify events that wait unread are lost" },
    Allowable { name: "io-flusher", meaning: "processes lose PR_SET_IO_FLUSHER" },
    Allowable {
        name: "keyrings",
        meaning: "keys in the kernel's keyrings of the session, the process or the thread are lost",
    },
    Allowable { name: "landlock", meaning: "processes lose their restrictions by Landlock" },
    Allowable {
        name: "lock-future-memory",
        meaning: "memory that is mapped after the move is not locked (mlockall(MCL_FUTURE))",
    },
    Allowable { name: "lock-on-fault", meaning: "memory locked with MLOCK_ONFAULT is locked as a whole" },
    Allowable { name: "memory-error-policy", meaning: "processes lose PR_MCE_KILL" },
    Allowable {
        name: "memory-merging",
        meaning: "processes lose PR_SET_MEMORY_MERGE: equal pages of what they map from then on are not merged",
    },
    Allowable {
        name: "mount-options",
        meaning: "mounts that were made inside the container lose the options nosymfollow and idmapped",
    },
    Allowable {
        name: "node-host-name",
        meaning: "a container in the UTS namespace of its node gets another host name",
    },
    Allowable {
        name: "node-ipc",
        meaning: "a container in the IPC namespace of its node loses the SysV objects there",
    },
    Allowable {
        name: "numa-policy",
        meaning: "processes lose the policy for the nodes of their memory (set_mempolicy, mbind, numactl)",
    },
    Allowable {
        name: "peer-credentials",
        meaning: "SO_PEERCRED of Unix connections made by a process that has ended names another process",
    },
    Allowable {
        name: "personality",
        meaning: "processes lose their personality (setarch): addresses may be drawn at random again, say",
    },
    Allowable {
        name: "protection-keys",
        meaning: "memory has no protection keys any more (pkey_alloc): all threads may use it, and calls that name a key fail",
    },
    Allowable {
        name: "raw-connections",
        meaning: "raw sockets that were connected without a port are not connected any more",
    },
    Allowable {
        name: "reuseport-programs",
        meaning: "groups of sockets lose the program that shares out what comes (SO_ATTACH_REUSEPORT_EBPF, _CBPF)",
    },
    Allowable {
        name: "scheduling-attributes",
        meaning: "threads lose their time slice and utilisation limits (sched_setattr)",
    },
    Allowable { name: "sealed-memory", meaning: "memory sealed by mseal() may be changed and unmapped again" },
    Allowable {
        name: "semaphore-undo",
        meaning: "operations on System V semaphores are not undone when their process ends (SEM_UNDO)",
    },
    Allowable {
        name: "socket-errors",
        meaning: "sockets lose errors that no program has taken, and their error queues",
    },
    Allowable {
        name: "socket-files",
        meaning: "Unix sockets whose file was renamed, or has other names, keep the name alone that they were bound to, or none",
    },
    Allowable {
        name: "speculation-control",
        meaning: "threads lose what they have asked for with PR_SET_SPECULATION_CTRL: their processor may speculate again",
    },
    Allowable { name: "stopped-terminals", meaning: "output of terminals that was stopped (TCOOFF, or ^S) goes on" },
    Allowable {
        name: "unfinished-datagrams",
        meaning: "UDP sockets lose what was sent with MSG_MORE and not completed",
    },
    Allowable { name: "unread-packets", meaning: "packet, raw and UDP-Lite sockets lose what waits unread in them" },
    Allowable { name: "urgent-data", meaning: "sockets lose urgent bytes (MSG_OOB) that no program has read" },
];

/// The kinds that a user allows a move to lose. As JSON, a list of names.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Allowances(u128);

const _: () = assert!(ALLOWABLE.len() <= 128, "a kind is a bit of Allowances");

/// A name that is no kind of [`ALLOWABLE`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is nothing that can be allowed; use one of: {known}")]
pub struct UnknownAllowable {
    /// What was given.
    pub name: String,
    /// The names that exist, with commas between them.
    pub known: String,
}

impl Allowances {
    /// Allows nothing.
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Allows one more kind.
    ///
    /// # Errors
    /// No kind has that name.
    pub fn add(&mut self, name: &str) -> Result<(), UnknownAllowable> {
        let Some(place) = ALLOWABLE.iter().position(|kind| kind.name == name) else {
            let known: Vec<_> = ALLOWABLE.iter().map(|kind| kind.name).collect();
            return Err(UnknownAllowable { name: name.chars().take(40).collect(), known: known.join(", ") });
        };
        self.0 |= 1 << place;
        Ok(())
    }

    /// Whether the kind of this name is allowed.
    pub fn permits(&self, name: &str) -> bool {
        self.kinds().any(|kind| kind.name == name)
    }

    /// The kinds that are allowed.
    pub fn kinds(&self) -> impl Iterator<Item = &'static Allowable> {
        ALLOWABLE.iter().enumerate().filter(|(place, _)| self.0 >> place & 1 == 1).map(|(_, kind)| kind)
    }

    /// Parts blockers into those that still stand in the way and those that the user allows.
    pub fn part(&self, blockers: Vec<Blocker>) -> (Vec<Blocker>, Vec<Blocker>) {
        blockers.into_iter().partition(|b| !b.allow.as_deref().is_some_and(|name| self.permits(name)))
    }
}

impl FromStr for Allowances {
    type Err = UnknownAllowable;

    /// One name.
    fn from_str(name: &str) -> Result<Self, UnknownAllowable> {
        let mut one = Self::default();
        one.add(name).map(|()| one)
    }
}

impl FromIterator<Allowances> for Allowances {
    fn from_iter<T: IntoIterator<Item = Allowances>>(several: T) -> Self {
        Self(several.into_iter().fold(0, |all, one| all | one.0))
    }
}

impl fmt::Debug for Allowances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.kinds().map(|kind| kind.name)).finish()
    }
}

impl Serialize for Allowances {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.kinds().map(|kind| kind.name))
    }
}

impl<'de> Deserialize<'de> for Allowances {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let names = Vec::<String>::deserialize(deserializer)?;
        names.iter().map(|name| name.parse().map_err(D::Error::custom)).collect()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for Allowances {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        Vec::<String>::schema()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for Allowances {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockerKind, MoveOptions};

    #[test]
    fn names_are_in_kebab_case_and_unique() {
        for (place, kind) in ALLOWABLE.iter().enumerate() {
            assert!(
                kind.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'),
                "{}",
                kind.name
            );
            assert!(ALLOWABLE[..place].iter().all(|other| other.name != kind.name), "{}", kind.name);
            assert!(!kind.meaning.is_empty() && !kind.meaning.ends_with('.'), "{}", kind.name);
        }
    }

    #[test]
    fn an_allowed_blocker_no_longer_blocks() {
        let kind = ALLOWABLE[0].name;
        let plain = Blocker::new(BlockerKind::Process, "a", "b");
        let allowable = plain.clone().allowable(kind);
        assert_eq!(allowable.remedy, format!("b, or give --allow {kind}"));
        let both = vec![plain.clone(), allowable.clone()];
        assert_eq!(Allowances::default().part(both.clone()), (both.clone(), vec![]));
        let given: Allowances = kind.parse().unwrap();
        assert_eq!(given.part(both), (vec![plain], vec![allowable]));
    }

    #[test]
    fn unknown_kinds_are_refused_with_those_that_exist() {
        let error = "everything".parse::<Allowances>().unwrap_err().to_string();
        assert!(ALLOWABLE.iter().all(|kind| error.contains(kind.name)), "{error}");
        let error = serde_json::from_str::<MoveOptions>(r#"{"allow":["everything"]}"#).unwrap_err().to_string();
        assert!(error.contains("everything") && error.contains(ALLOWABLE[0].name), "{error}");
    }

    #[test]
    fn allowances_are_a_list_of_names() {
        let options = MoveOptions { allow: ALLOWABLE[1].name.parse().unwrap(), ..MoveOptions::default() };
        let text = serde_json::to_string(&options).unwrap();
        assert!(text.contains(&format!("\"allow\":[\"{}\"]", ALLOWABLE[1].name)), "{text}");
        assert_eq!(serde_json::from_str::<MoveOptions>(&text).unwrap(), options);
        assert!(!serde_json::to_string(&MoveOptions::default()).unwrap().contains("allow"));
    }
}
