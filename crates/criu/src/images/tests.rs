use std::path::PathBuf;

use prost::Message;
use serde_json::{Value, json};

use super::messages::{
    Core, Creds, Device, Extent, Filter, Ghost, Ids, Inventory, Mount, Plugins, Seccomp, UserNamespace,
};
use super::*;

const REMOUNT_READ_ONLY: u32 = 1;
const BIND: u32 = 4096;

/// Real images of a container of a runtime or engine, as a dump has left them, with what it may have. The
/// configuration is changed first.
fn sample(name: &str, change: impl FnOnce(&mut Value)) -> (Images, Allowed) {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/images/testdata").join(name);
    let images = Images::read(&directory, &["allowed.json"]).unwrap();
    let mut known: Value = serde_json::from_slice(&std::fs::read(directory.join("allowed.json")).unwrap()).unwrap();
    change(&mut known["config"]);
    let mut allowed = Allowed::of(&known["config"]);
    allowed.in_network = true;
    // Not those of the machine that tests run on.
    allowed.guarded = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"].map(ToOwned::to_owned).into();
    let points = known["tmpfs"].as_array().unwrap().iter().map(|point| point.as_str().unwrap().to_owned());
    allowed.external = points.enumerate().map(|(at, point)| (format!("tranship-tmpfs-{at}"), point)).collect();
    (images, allowed)
}

/// Changes the entries of an image, and encodes them again.
fn edit<M: Message + Default>(
    images: &mut Images,
    kind: &'static str,
    number: Option<u64>,
    change: impl FnOnce(&mut Vec<M>),
) {
    let mut all: Vec<M> = images.all_if_there(kind, number).unwrap();
    change(&mut all);
    let name = number.map_or_else(|| format!("{kind}.img"), |number| format!("{kind}-{number}.img"));
    let kind = Kind::of(&name).unwrap().0;
    let mut bytes = kind.head();
    for entry in all {
        bytes.extend_from_slice(&u32::try_from(entry.encoded_len()).unwrap().to_le_bytes());
        entry.encode(&mut bytes).unwrap();
    }
    images.add(&name, bytes);
}

fn refused(images: &Images, allowed: &Allowed, words: &str) {
    let found = check(images, allowed).expect_err(words);
    assert!(found.iter().any(|one| one.what.contains(words)), "{words:?} not in {found:#?}");
}

/// Has a change refused with these words, and nothing refused that was not changed.
fn forged(name: &str, words: &str, change: impl FnOnce(&mut Images)) {
    let (mut images, allowed) = sample(name, |_| {});
    assert_eq!(check(&images, &allowed), Ok(()), "{name}");
    change(&mut images);
    refused(&images, &allowed, words);
}

fn first_creds(images: &mut Images, change: impl Fn(&mut Creds)) {
    edit(images, "core", Some(1), |all: &mut Vec<Core>| {
        change(all[0].thread.as_mut().unwrap().creds.as_mut().unwrap());
    });
}

fn mounts(images: &mut Images, change: impl FnOnce(&mut Vec<Mount>)) {
    let number = images.only::<Ids>("ids", Some(1)).unwrap().mnt.unwrap().into();
    edit(images, "mountpoints", Some(number), change);
}

fn at<'a>(all: &'a mut [Mount], point: &str) -> &'a mut Mount {
    all.iter_mut().find(|mount| mount.point == point.as_bytes()).unwrap()
}

#[test]
fn images_of_all_runtimes_pass() {
    for name in ["runc", "crun", "docker", "pod"] {
        let (images, allowed) = sample(name, |_| {});
        assert_eq!(check(&images, &allowed), Ok(()), "{name}");
    }
}

#[test]
fn capabilities_are_those_of_the_configuration() {
    type Set = fn(&mut Creds) -> &mut Vec<u32>;
    let sets: [Set; 5] =
        [|c| &mut c.permitted, |c| &mut c.effective, |c| &mut c.inheritable, |c| &mut c.bounding, |c| &mut c.ambient];
    for set in sets {
        forged("runc", "give process 1 (sh) CAP_SYS_ADMIN, which", |images| {
            first_creds(images, |creds| {
                set(creds).resize(2, 0);
                set(creds)[0] |= 1 << 21;
            });
        });
        forged("docker", "CAP_BPF", |images| {
            first_creds(images, |creds| {
                set(creds).resize(2, 0);
                set(creds)[1] |= 1 << (39 - 32);
            });
        });
        forged("crun", "that no kernel has", |images| first_creds(images, |creds| set(creds).resize(3, 0)));
    }
    // A thread that is not the first one.
    forged("runc", "CAP_NET_ADMIN", |images| {
        let mut core: Core = images.only("core", Some(1)).unwrap();
        core.thread.as_mut().unwrap().creds.as_mut().unwrap().effective[0] |= 1 << 12;
        edit(images, "core", Some(70), |all: &mut Vec<Core>| all.push(core));
        edit(images, "pstree", None, |all: &mut Vec<messages::Process>| all[0].threads.push(70));
    });
    forged("runc", "do not tell the credentials", |images| {
        edit(images, "core", Some(1), |all: &mut Vec<Core>| all[0].thread.as_mut().unwrap().creds = None);
    });
}

#[test]
fn protections_of_the_configuration_are_those_of_processes() {
    let (images, allowed) = sample("runc", |config| config["process"]["noNewPrivileges"] = true.into());
    refused(&images, &allowed, "allow process 1 (sh) new privileges");
    let (images, allowed) =
        sample("runc", |config| config["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ERRNO"}));
    refused(&images, &allowed, "take from process 1 (sh) the filter");
    forged("docker", "the filter of system calls", |images| {
        edit(images, "core", Some(1), |all: &mut Vec<Core>| all[0].thread.as_mut().unwrap().seccomp_mode = None);
    });
    forged("docker", "the filter of system calls", |images| {
        edit(images, "seccomp", None, |all: &mut Vec<Seccomp>| all[0].filters.clear());
    });
    // Filters in a ring end.
    forged("docker", "the filter of system calls", |images| {
        let ring = Filter { previous: Some(0), ..Filter::default() };
        edit(images, "seccomp", None, |all: &mut Vec<Seccomp>| all[0].filters = vec![ring; 9]);
    });
    for (key, own, other) in
        [("apparmorProfile", "docker-default", "unconfined"), ("selinuxLabel", "u:r:container_t:s0", "u:r:init_t:s0")]
    {
        let (mut images, allowed) = sample("runc", |config| config["process"][key] = own.into());
        refused(&images, &allowed, "security profile");
        let label = |images: &mut Images, label: &str| {
            for id in images.numbers("core").collect::<Vec<_>>() {
                edit(images, "core", Some(id), |all: &mut Vec<Core>| {
                    all[0].thread.as_mut().unwrap().creds.as_mut().unwrap().lsm_profile = Some(label.into());
                });
            }
        };
        label(&mut images, own);
        assert_eq!(check(&images, &allowed), Ok(()));
        label(&mut images, other);
        refused(&images, &allowed, "security profile");
    }
    let of = |name: &str| Profile::AppArmor(name.to_owned());
    assert!(of("docker-default").has("containers-default-0.50.1//child"));
    assert!(of("docker-default").has("docker-default//child") && of("a//b").has("a//b"));
    assert!(!of("docker-default").has("own") && !of("own").has("docker-default") && !of("own").has("own-too"));
}

#[test]
fn namespaces_are_the_container_s_own() {
    type Kind = fn(&mut Ids) -> &mut Option<u32>;
    let kinds: [(&str, Kind); 4] =
        [("pid", |i| &mut i.pid), ("ipc", |i| &mut i.ipc), ("uts", |i| &mut i.uts), ("mount", |i| &mut i.mnt)];
    for (kind, of) in kinds {
        for name in ["runc", "docker", "pod"] {
            forged(name, &format!("in the node's {kind} namespace"), |images| {
                let mut outside: Ids = images.only::<Inventory>("inventory", None).unwrap().root_ids.unwrap();
                let outside = *of(&mut outside);
                edit(images, "ids", Some(1), |all: &mut Vec<Ids>| *of(&mut all[0]) = outside);
            });
        }
    }
    forged("runc", "a network namespace made besides", |images| {
        edit(images, "ids", Some(1), |all: &mut Vec<Ids>| all[0].net = Some(99));
    });
    forged("runc", "into a user namespace", |images| {
        edit(images, "ids", Some(1), |all: &mut Vec<Ids>| all[0].user = Some(99));
        let uids = vec![Extent { first: 0, outside: 0, count: u32::MAX }];
        edit(images, "userns", Some(99), |all: &mut Vec<UserNamespace>| {
            all.push(UserNamespace { uids, gids: Vec::new() });
        });
    });
    let (images, mut allowed) = sample("runc", |_| {});
    allowed.in_network = false;
    refused(&images, &allowed, "in the node's network namespace");
}

/// The namespace of a container without interfaces has no name, and is made by CRIU.
#[test]
fn a_network_namespace_without_a_name_has_a_loopback_interface() {
    let (mut images, mut allowed) = sample("runc", |_| {});
    allowed.in_network = false;
    edit(&mut images, "ids", Some(1), |all: &mut Vec<Ids>| all[0].net = Some(99));
    for id in [6, 7] {
        edit(&mut images, "ids", Some(id), |all: &mut Vec<Ids>| all[0].net = Some(99));
    }
    ["netns-99.img", "route-99.img", "nftables-99.img"].iter().for_each(|name| images.add(name, Vec::new()));
    let device = |images: &mut Images, kind: u32| {
        edit(images, "netdev", Some(99), |all: &mut Vec<Device>| *all = vec![Device { kind }]);
    };
    device(&mut images, 1);
    assert_eq!(check(&images, &allowed), Ok(()));
    device(&mut images, 7);
    refused(&images, &allowed, "a network interface of kind 7");
    device(&mut images, 1);
    images.add("nftables-99.img", b"add table inet x".to_vec());
    refused(&images, &allowed, "lacks CAP_NET_ADMIN");
    allowed.capabilities |= 1 << 12;
    assert_eq!(check(&images, &allowed), Ok(()));
}

/// A second mount namespace, as `unshare --mount` makes it, with the mounts of the first one but for external ones,
/// whose keys CRIU notes in the first one alone.
fn with_second_namespace(change: impl FnOnce(&mut Vec<Mount>)) -> (Images, Allowed) {
    let (mut images, mut allowed) = sample("docker", |_| {});
    allowed.capabilities |= 1 << 21; // CAP_SYS_ADMIN
    let own: Ids = images.only("ids", Some(1)).unwrap();
    let first: Vec<Mount> = images.all("mountpoints", own.mnt.map(u64::from)).unwrap();
    assert!(first.iter().any(|mount| mount.key.is_some()), "no mount is external");
    let nested =
        first.into_iter().map(|mount| Mount { id: mount.id + 1000, parent: mount.parent + 1000, key: None, ..mount });
    edit(&mut images, "mountpoints", Some(99), |all: &mut Vec<Mount>| {
        all.extend(nested);
        change(all);
    });
    (images, allowed)
}

#[test]
fn a_second_mount_namespace_shows_what_the_first_one_has() {
    let (images, allowed) = with_second_namespace(|_| {});
    assert_eq!(check(&images, &allowed), Ok(()));
    let (images, allowed) = with_second_namespace(|all| {
        let root = at(all, "/");
        (root.device, root.fstype) = (0x00ff_fff0, 0);
    });
    refused(&images, &allowed, "have a mount at / of a filesystem that a container cannot mount");
    let (images, allowed) = with_second_namespace(|all| all.retain(|mount| mount.point != b"/"));
    refused(&images, &allowed, "have no root, or several");
}

#[test]
fn a_process_is_in_no_other_namespaces_than_the_first_one() {
    let with_child = |change: fn(&mut Ids)| {
        let (mut images, allowed) = sample("runc", |_| {});
        let core: Core = images.only("core", Some(1)).unwrap();
        let mut ids: Ids = images.only("ids", Some(1)).unwrap();
        change(&mut ids);
        edit(&mut images, "core", Some(70), |all: &mut Vec<Core>| all.push(core));
        edit(&mut images, "ids", Some(70), |all: &mut Vec<Ids>| all.push(ids));
        edit(&mut images, "pstree", None, |all: &mut Vec<messages::Process>| {
            all.push(messages::Process { pid: 70, ppid: 1, threads: vec![70] });
        });
        (images, allowed)
    };
    let (images, allowed) = with_child(|_| {});
    assert_eq!(check(&images, &allowed), Ok(()));
    for (change, words) in [
        ((|ids| ids.pid = Some(1)) as fn(&mut Ids), "another pid namespace"),
        (|ids| ids.ipc = Some(90), "another ipc namespace"),
        (|ids| ids.user = Some(90), "another user namespace"),
        (|ids| ids.mnt = Some(6), "lacks CAP_SYS_ADMIN"),
        (|ids| ids.net = Some(90), "lacks CAP_SYS_ADMIN"),
    ] {
        let (images, allowed) = with_child(change);
        refused(&images, &allowed, words);
    }
    let (images, mut allowed) = with_child(|ids| ids.mnt = Some(6));
    allowed.capabilities |= 1 << 21;
    refused(&images, &allowed, "of which they have no mounts");
}

#[test]
fn mounts_are_those_of_the_configuration() {
    for name in ["runc", "docker"] {
        let one = |words: &str, change: fn(&mut Vec<Mount>)| forged(name, words, |images| mounts(images, change));
        // The node's disk, in the ways in which an image could have it mounted.
        one("a filesystem that a container cannot mount", |all| {
            let disk =
                Mount { fstype: 0, device: 9 << 20, source: b"/dev/vda".to_vec(), ..at(all, "/dev/mqueue").clone() };
            all.push(Mount { id: 9999, point: b"/disk".to_vec(), ..disk });
        });
        one("with flags that no mount has", |all| {
            let tmp = at(all, "/tmp");
            (tmp.key, tmp.source, tmp.sb_flags) = (None, b"/etc".to_vec(), Some(BIND));
        });
        one("with flags that no mount has", |all| at(all, "/dev/mqueue").flags |= BIND);
        one("that a plugin", |all| at(all, "/dev/mqueue").plugin = Some(true));
        one("that a plugin", |all| at(all, "/usr").external = Some(true));
        one("that a plugin", |all| {
            let mount = at(all, "/dev/mqueue");
            (mount.fstype, mount.fsname) = (16, Some(b"ext4".to_vec()));
        });
        one("for which CRIU would make a file", |all| at(all, "/usr").deleted = Some(true));
        one("leads upwards", |all| at(all, "/proc/sys").root = b"/../../etc".to_vec());
        one("leads upwards", |all| at(all, "/tmp").point = b"/../tmp".to_vec());
        one("without ro", |all| at(all, "/usr").flags &= !REMOUNT_READ_ONLY);
        one("without ro", |all| at(all, "/sys").flags &= !REMOUNT_READ_ONLY);
        one("mount the external /usr at /srv, which", |all| {
            let usr = at(all, "/usr");
            (usr.flags, usr.point) = (usr.flags & !REMOUNT_READ_ONLY, b"/srv".to_vec());
        });
        // At a path that is masked, where no option is expected.
        one("mount the external /usr at /proc/keys", |all| {
            let keys = at(all, "/proc/keys");
            (keys.flags, keys.key) = (keys.flags & !REMOUNT_READ_ONLY, Some(b"/usr".to_vec()));
        });
        // A tmpfs that CRIU would take for a part of another mount, as they have one device.
        one("mount tmpfs at /tmp, which", |all| {
            let (device, root) = (at(all, "/usr").device, at(all, "/usr").root.clone());
            let tmp = at(all, "/tmp");
            (tmp.key, tmp.device) = (None, device);
            at(all, "/usr").root = b"/".to_vec();
            assert!(!root.is_empty());
        });
        one("mount /link of tmpfs at /tmp, which", |all| {
            let tmp = at(all, "/tmp");
            (tmp.key, tmp.root) = (None, b"/link".to_vec());
        });
        one("mount debugfs at /sys/kernel/debug", |all| {
            let debug = Mount { id: 9999, fstype: 11, device: 99, ..at(all, "/dev/mqueue").clone() };
            all.push(Mount { point: b"/sys/kernel/debug".to_vec(), ..debug });
        });
        one("have no root, or several", |all| {
            let second = Mount { id: 9999, flags: 0, ..at(all, "/").clone() };
            all.push(second);
        });
        // What the runtime protects.
        one("leave /proc/sys writable", |all| all.retain(|mount| mount.point != b"/proc/sys"));
        one("mount /sys of proc at /proc/sys, which", |all| at(all, "/proc/sys").flags &= !REMOUNT_READ_ONLY);
        one("mount /1/root of proc at /proc/sys, which", |all| at(all, "/proc/sys").root = b"/1/root".to_vec());
        one("mount proc at /srv, which", |all| {
            let second = Mount { id: 9999, device: 99, point: b"/srv".to_vec(), ..at(all, "/proc").clone() };
            all.push(second);
        });
        one("leave /proc/sys writable", |all| {
            let below = at(all, "/proc").clone();
            all.push(Mount { id: 9999, parent: below.id, device: 99, ..below });
        });
    }
    forged("runc", "at /, which is read-only", |images| mounts(images, |all| at(all, "/").flags &= !REMOUNT_READ_ONLY));
}

#[test]
fn a_container_that_may_mount_has_other_mounts_and_none_may_have_the_node_s() {
    let debug = |images: &mut Images| {
        mounts(images, |all| {
            let debug = Mount { id: 9999, fstype: 11, device: 99, ..at(all, "/dev/mqueue").clone() };
            all.push(Mount { point: b"/sys/kernel/debug".to_vec(), ..debug });
            all.retain(|mount| mount.point != b"/proc/sys");
        });
    };
    let (mut images, mut allowed) = sample("runc", |_| {});
    debug(&mut images);
    refused(&images, &allowed, "mount debugfs");
    allowed.capabilities |= 1 << 21;
    assert_eq!(check(&images, &allowed), Ok(()));
    mounts(&mut images, |all| at(all, "/dev/mqueue").flags |= BIND);
    refused(&images, &allowed, "with flags that no mount has");
    // With any rights, what has no form is refused.
    allowed.privileged = true;
    refused(&images, &allowed, "with flags that no mount has");
}

#[test]
fn a_peer_of_privileged_containers_may_send_other_rights() {
    let (mut images, mut allowed) = sample("runc", |_| {});
    first_creds(&mut images, |creds| creds.permitted[0] |= 1 << 21);
    refused(&images, &allowed, "CAP_SYS_ADMIN");
    allowed.privileged = true;
    assert_eq!(check(&images, &allowed), Ok(()));
}

#[test]
fn files_are_of_the_container() {
    let file = |kind: u32| messages::File { kind, id: 9999, ..messages::File::default() };
    let add = |images: &mut Images, file: messages::File| {
        edit(images, "files", None, |all: &mut Vec<messages::File>| all.push(file));
    };
    for (kind, words) in
        [(0, "of kind 0"), (15, "of kind 15"), (16, "from the node"), (19, "CAP_BPF"), (21, "not known")]
    {
        forged("runc", words, |images| add(images, file(kind)));
    }
    for uflags in [1, 4] {
        forged("runc", "connected to the node's", |images| {
            add(images, messages::File { unix: Some(messages::Unix { uflags }), ..file(5) });
        });
    }
    forged("docker", "open /etc/../../shadow, a path that leads upwards", |images| {
        let regular = messages::Regular { name: b"/etc/../../shadow".to_vec(), mount: None };
        add(images, messages::File { regular: Some(regular), ..file(1) });
    });
    let ghost = |mode: u32| {
        let mut images = sample("docker", |_| {}).0;
        edit(&mut images, "ghost-file", Some(7), |all: &mut Vec<Ghost>| all.push(Ghost { mode }));
        images.content.remove(&("ghost-file", Some(7))).unwrap().1
    };
    for (mode, makes_devices, is_refused) in
        [(0o100_644, false, false), (0o060_600, false, true), (0o020_600, false, true), (0o020_600, true, false)]
    {
        let (mut images, mut allowed) = sample("docker", |_| {});
        allowed.capabilities &= if makes_devices { !0 } else { !(1 << 27) };
        for id in images.numbers("core").collect::<Vec<_>>() {
            edit(&mut images, "core", Some(id), |all: &mut Vec<Core>| {
                let creds = all[0].thread.as_mut().unwrap().creds.as_mut().unwrap();
                let sets = [&mut creds.permitted, &mut creds.effective, &mut creds.bounding];
                sets.into_iter().for_each(|set| set[0] &= !(1 << 27));
            });
        }
        images.add("ghost-file-7.img", ghost(mode));
        assert_eq!(check(&images, &allowed).is_err(), is_refused, "{mode:o} {makes_devices}");
    }
}

#[test]
fn what_is_no_image_or_of_another_form_is_refused() {
    for name in [
        "autofs-5.img",
        "creds-1.img",
        "core-01.img",
        "core-x.img",
        "core.img",
        "evil",
        "ghost-file-0A.img",
        "../x.img",
    ] {
        forged("runc", "which CRIU has not", |images| images.add(name, Vec::new()));
    }
    for name in ["netns-9.img", "route-9.img", "pidns-9.img"] {
        forged("runc", "of a namespace that CRIU would make", |images| images.add(name, Vec::new()));
    }
    forged("runc", "lacks CAP_NET_ADMIN", |images| images.add("nftables-9.img", b"flush ruleset".to_vec()));
    forged("runc", "register program formats", |images| images.add("binfmt-misc.img", Vec::new()));
    forged("runc", "have BPF maps", |images| images.add("bpfmap-file.img", Vec::new()));
    forged("runc", "of version 1", |images| {
        edit(images, "inventory", None, |all: &mut Vec<Inventory>| all[0].img_version = 1);
    });
    forged("runc", "which namespaces are the node's", |images| {
        edit(images, "inventory", None, |all: &mut Vec<Inventory>| all[0].root_ids = None);
    });
    forged("runc", "need the plugin evil", |images| {
        edit(images, "inventory", None, |all: &mut Vec<Inventory>| {
            all[0].plugins = Some(Plugins { plugins: vec![b"evil".to_vec()] });
        });
    });
    forged("runc", "AppArmor profiles", |images| {
        edit(images, "apparmor", None, |all: &mut Vec<Ghost>| all.push(Ghost { mode: 1 }));
    });
    forged("runc", "have no process", |images| edit(images, "pstree", None, Vec::<messages::Process>::clear));
    forged("runc", "have process 1 twice", |images| {
        edit(images, "pstree", None, |all: &mut Vec<messages::Process>| all.push(all[0].clone()));
    });
    forged("runc", "processes and threads", |images| {
        edit(images, "pstree", None, |all: &mut Vec<messages::Process>| all[0].threads.resize(1 << 17, 1));
    });
    forged("runc", "5000 mounts", |images| mounts(images, |all| all.resize(5000, all[0].clone())));
    forged("runc", "in state 9", |images| {
        edit(images, "core", Some(1), |all: &mut Vec<Core>| all[0].task.as_mut().unwrap().state = 9);
    });
    forged("runc", "1 entries more than one in core.img", |images| {
        edit(images, "core", Some(1), |all: &mut Vec<Core>| all.push(all[0].clone()));
    });
    for kind in ["inventory", "pstree", "files"] {
        forged("runc", "does not begin as", |images| images.add(&format!("{kind}.img"), b"12345678".to_vec()));
        forged("runc", "in the middle of an entry", |images| {
            let bytes = images.content[&(kind, None)].1.clone();
            images.add(&format!("{kind}.img"), bytes[..bytes.len() - 1].to_vec());
        });
    }
    forged("runc", "lack core-1.img", |images| drop(images.content.remove(&("core", Some(1)))));
}
