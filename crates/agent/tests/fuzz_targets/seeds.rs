//! Makes the seeds: texts and messages of this machine's kernel about processes and namespaces that were made for it, and messages of our own.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tranship_wire::{Codec, FrameHeader, HELLO_PREFIX_LEN, Hello, Purpose, Refusal, RefusalKind, Welcome};

/// A process with a descriptor of each kind and mappings of each kind, and the kernel's lists of what a network namespace has.
const SUBJECT: &str = r#"
import ctypes, mmap, os, select, signal, socket, struct, subprocess, sys, threading, time
out = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def keep(target, name, data):
    os.makedirs(f'{out}/{target}', exist_ok=True)
    open(f'{out}/{target}/{name}', 'wb').write(data[:6000])
def run(*words): subprocess.run(words, check=False, stderr=subprocess.DEVNULL)

run('ip', 'link', 'set', 'lo', 'up')
run('ip', 'link', 'add', 'eth0', 'type', 'dummy')
run('ip', 'addr', 'add', '10.77.0.2/24', 'dev', 'eth0')
run('ip', 'link', 'set', 'eth0', 'up')
run('ip', 'route', 'add', 'default', 'via', '10.77.0.1')
run('ip', 'rule', 'add', 'from', '10.77.0.0/24', 'table', '7', 'priority', '100')
run('ip', 'neigh', 'add', '10.77.0.9', 'lladdr', '02:00:00:00:00:09', 'dev', 'eth0')
subprocess.run(['nft', '-f', '-'], input=b'''table inet filter { set s { type ipv4_addr; elements = { 10.0.0.1, 10.0.0.2 } }
 counter c { }
 chain in { type filter hook input priority 0
  ct state established accept
  ip saddr @s tcp dport 80 counter accept
  meta l4proto udp drop
 }
}
table ip nat { chain pre { type nat hook prerouting priority -100
 tcp dport 8080 redirect to :80
 }
}''', check=False)

# Descriptors.
fds = {}
fds['eventfd'] = libc.eventfd(3, 0)
e = select.epoll(); kept.append(e); e.register(fds['eventfd'], 1); fds['epoll'] = e.fileno()
fds['inotify'] = libc.inotify_init(); libc.inotify_add_watch(fds['inotify'], b'/etc', 0x100); libc.inotify_add_watch(fds['inotify'], b'/etc/passwd', 0x2)
fds['fanotify'] = libc.fanotify_init(0x200, 0); libc.fanotify_mark(fds['fanotify'], 1, ctypes.c_uint64(0x8000020), -100, b'/etc')
fds['timerfd'] = libc.timerfd_create(1, 0); libc.timerfd_settime(fds['timerfd'], 0, struct.pack('qqqq', 1, 5, 2, 7), None)
fds['signalfd'] = libc.signalfd(-1, struct.pack('Q', 1 << 9), 0)
fds['pidfd'] = os.pidfd_open(os.getpid())
fds['pty'], fds['slave'] = os.openpty()
fds['memfd'] = os.memfd_create('a name')
f = os.open('/tmp', os.O_TMPFILE | os.O_RDWR); fds['locked'] = f; libc.flock(f, 2)
l = os.open(f'/dev/shm/lease-{os.getpid()}', os.O_RDONLY | os.O_CREAT); libc.fcntl(l, 1024, 0); fds['lease'] = l
libc.syscall.restype = ctypes.c_long
fds['io_uring'] = libc.syscall(425, 4, ctypes.create_string_buffer(120))
fds['bpf'] = libc.syscall(321, 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(100), 116)
r, w = os.pipe(); fds['pipe'] = r
tcp = socket.socket(); tcp.bind(('127.0.0.1', 0)); tcp.listen(); c = socket.create_connection(tcp.getsockname()); s, _ = tcp.accept(); c.send(b'unread')
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(('127.0.0.1', 0)); udp.sendto(b'x', udp.getsockname())
udp.setsockopt(0, 35, socket.inet_aton('239.7.7.7') + socket.inet_aton('127.0.0.1'))
six = socket.socket(socket.AF_INET6); six.bind(('::1', 0)); six.listen()
a, b = socket.socketpair(); named = socket.socket(socket.AF_UNIX); named.bind('\0abstract'); named.listen(); waiting = socket.socket(socket.AF_UNIX); waiting.connect('\0abstract')
group = socket.socket(16, 3, 0); group.bind((0, 1))
packet = socket.socket(17, 3, 0)
fds['socket'] = tcp.fileno()
for name, fd in fds.items():
    try: keep('proc_fdinfo', name, open(f'/proc/self/fdinfo/{fd}', 'rb').read())
    except OSError: pass

# Mappings.
kept += [mmap.mmap(-1, 1 << 21), mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE), mmap.mmap(fds['memfd'], 0) if os.ftruncate(fds['memfd'], 8192) is None else None]
m = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE); libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m))), 4096); kept.append(m)
removed = os.open('/tmp/with a space', os.O_RDWR | os.O_CREAT); os.ftruncate(removed, 4096); kept.append(mmap.mmap(removed, 4096)); os.unlink('/tmp/with a space')
shm = libc.shmget(0, 4096, 0o600); libc.shmat.restype = ctypes.c_void_p; libc.shmat(shm, None, 0); libc.shmctl(shm, 0, None); libc.semget(0, 3, 0o600)
threading.Thread(target=lambda: time.sleep(100), daemon=True).start()
signal.setitimer(signal.ITIMER_REAL, 1000); libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p()))
own = lambda name: open(f'/proc/self/{name}', 'rb').read()
keep('proc_status', 'self', own('status'))
keep('proc_status', 'init', open('/proc/1/status', 'rb').read())
maps, smaps = own('maps'), own('smaps')
pick = lambda text, words: b'\n'.join(l for l in text.split(b'\n') if any(w in l for w in words)) + b'\n'
words = [b'[', b'/tmp', b'/dev', b'/SYSV', b'memfd', b'libc', b' 00:00 0']
keep('proc_maps', 'maps', pick(maps, words))
blocks = smaps.split(b'VmFlags:')
keep('proc_maps', 'smaps', b'VmFlags:'.join(blocks[-12:]))
run('mount', '-t', 'tmpfs', '-o', 'size=64k,mode=755', 'tmpfs', '/mnt')
os.mkdir('/mnt/a b'); run('mount', '-t', 'tmpfs', 'none', '/mnt/a b'); run('mount', '--make-shared', '/mnt/a b')
keep('proc_mountinfo', 'namespace', pick(own('mountinfo'), [b' - proc ', b' - sysfs ', b' - tmpfs ', b' - devtmpfs ', b' - devpts ', b' - cgroup', b' - mqueue ']))
keep('proc_mountinfo', 'locks', open('/proc/locks', 'rb').read())
for name in ['stat', 'timers', 'numa_maps', 'cgroup', 'auxv', 'limits', 'syscall']:
    try: keep('proc_others', name, own(name)[:1500])
    except OSError: pass
for path in ['/proc/sysvipc/shm', '/proc/sysvipc/sem', '/proc/net/igmp', '/proc/net/igmp6', '/proc/net/mcfilter', '/sys/devices/system/cpu/online', '/proc/net/sockstat']:
    try: keep('proc_others', path.strip('/').replace('/', '-'), open(path, 'rb').read()[:1500])
    except OSError: pass
keep('proc_others', 'links', b'socket:[42]')
os.mkdir('/mnt/t'); run('mount', '-t', 'tracefs', 'tracefs', '/mnt/t')
try: keep('proc_others', 'tracepoint', open('/mnt/t/events/writeback/writeback_dirty_folio/format', 'rb').read())
except OSError: keep('proc_others', 'tracepoint', b'name: x\nID: 1009\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\tfield:ino_t ino;\toffset:16;\tsize:8;\tsigned:0;\n\tfield:unsigned long index;\toffset:24;\tsize:8;\tsigned:0;\n')
keep('criu_texts', 'cpuinfo', open('/proc/cpuinfo', 'rb').read().split(b'\n\n')[0])
keep('criu_texts', 'cgroup', own('cgroup'))
keep('criu_texts', 'table', b'7 file /run/tranship/a b\n1 segment /x\n3 pages /y\n')
keep('criu_texts', 'version', b'Version: 4.1.1\nGitID: v4.1.1\n')
with open('/proc/self/pagemap', 'rb') as pagemap:
    start = ctypes.addressof(ctypes.c_char.from_buffer(m)); m[0:1] = b'x'; m[8192:8193] = b'x'
    pagemap.seek(start // 4096 * 8); keep('pagemap', 'own', pagemap.read(8 * 16))

# Netlink.
def ask(protocol, kind, body, flags=0x300):
    s = socket.socket(16, 3, protocol); s.bind((0, 0)); s.settimeout(2)
    s.send(struct.pack('=IHHII', 16 + len(body), kind, 1 | flags, 7, 0) + body)
    datagrams = b''
    while True:
        try: got = s.recv(1 << 16)
        except OSError: return datagrams
        datagrams += got
        at = 0
        while at + 16 <= len(got):
            length, what = struct.unpack_from('=IH', got, at)
            if what in (2, 3): return datagrams
            at += (length + 3) // 4 * 4
def messages(datagrams):
    at = 0
    while at + 16 <= len(datagrams):
        length, what = struct.unpack_from('=IH', datagrams, at)
        if what not in (2, 3): yield datagrams[at:at + length].ljust((length + 3) // 4 * 4, b'\0')
        at += (length + 3) // 4 * 4
for name, kind in [('link', 18), ('address', 22), ('route', 26), ('neighbour', 30), ('rule', 34)]:
    keep('rtnetlink', name, ask(0, kind, bytes(16)))
keep('netlink', 'links', ask(0, 18, bytes(16)))
keep('netlink', 'refused', ask(0, 26, b'\x63' * 12, 4))
for name, body in [('unix', bytes([1, 1, 0, 0]) + b'\xff' * 4 + bytes(4) + struct.pack('=I', 0x1d) + b'\xff' * 8),
                   ('tcp', bytes([2, 6, 0xff, 0]) + b'\xff' * 4 + bytes(40) + b'\xff' * 8), ('tcp6', bytes([10, 6, 0xff, 0]) + b'\xff' * 4 + bytes(40) + b'\xff' * 8),
                   ('udp', bytes([2, 17, 0, 0]) + b'\xff' * 4 + bytes(40) + b'\xff' * 8), ('netlink', bytes([16, 255, 0, 0]) + bytes(4) + struct.pack('=I', 3) + b'\xff' * 8),
                   ('packet', bytes([17, 0, 0, 0]) + bytes(4) + struct.pack('=I', 2) + b'\xff' * 8)]:
    keep('sock_diag', name, ask(4, 20, body))
rules = [b''.join(messages(ask(12, 10 << 8 | kind, bytes(4)))) for kind in (1, 4, 10, 7, 19)]
for name, messages_of in zip(('tables', 'chains', 'sets', 'rules', 'objects'), rules): keep('ruleset', name, messages_of)
keep('ruleset', 'all', b''.join(rules))
keep('netlink', 'rules', rules[3])
keep('conntrack', 'entries', b''.join(messages(ask(12, 1 << 8 | 1, bytes(4)))))
print('ready', flush=True)
"#;

/// Makes all of them below a directory.
pub fn make(seeds: &Path) {
    let mut subject = Command::new("unshare")
        .args(["--net", "--mount", "--ipc", "python3", "-c", SUBJECT])
        .arg(seeds)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(subject.stdout.take().unwrap()).read_line(&mut line).unwrap();
    subject.wait().unwrap();
    assert_eq!(line, "ready\n");
    let keep = |target: &str, name: &str, bytes: &[u8]| {
        fs::create_dir_all(seeds.join(target)).unwrap();
        fs::write(seeds.join(target).join(name), bytes).unwrap();
    };
    wire(&keep);
    messages(&|target, name, value| keep(target, name, serde_json::to_string(&value).unwrap().as_bytes()));
    binary(&keep);
}

fn wire(keep: &impl Fn(&str, &str, &[u8])) {
    let id = "m-4k7tq0zd".parse().unwrap();
    let hello = Hello::new("rack3-host7".parse().unwrap(), Purpose::Pages { stream: 3 }, Some(id)).encode();
    keep("hello", "whole", &hello);
    keep("hello", "body", &hello[HELLO_PREFIX_LEN..]);
    let refused = Welcome::Refused(Refusal { kind: RefusalKind::Node, reason: "no".into() }).encode();
    keep("welcome", "refused", &refused);
    keep("welcome", "body", &refused[HELLO_PREFIX_LEN..]);
    let mut stream = Vec::new();
    let space = tranship_types::AddressSpaceId(7);
    let range = tranship_types::PageRange::new(0x1000, 0x3000).unwrap();
    for header in [FrameHeader::Zero { space, range }, FrameHeader::Ping { timestamp_ns: 5 }, FrameHeader::Named] {
        stream.extend(header.encode());
        keep("frame_header", &format!("{:?}", header.kind()), &header.encode());
    }
    tranship_wire::queue_message(&mut stream, &json!({"request": "clock"})).unwrap();
    keep("stream", "some", &stream);
    let page: Vec<u8> = (0..4096u32).map(|at| (at / 64) as u8).collect();
    keep("packed", "page", &page);
    for codec in Codec::ALL {
        if let Some(packed) = tranship_wire::packed::Packer::new().unwrap().pack(codec, &page) {
            keep("packed", &codec.to_string(), packed);
        }
    }
    keep("runs", "two", &[0, 0, 0x10, 0, 0, 0, 0, 0, 0, 1, 1, 0x85, 1, 3]);
    keep("runs", "wants", &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
}

/// Messages and requests as JSON.
fn messages(keep: &impl Fn(&str, &str, Value)) {
    let config = json!({
        "ociVersion": "1.2.0", "root": {"path": "/var/lib/c/rootfs"}, "hostname": "c", "annotations": {"a": "b"},
        "process": {"args": ["sh"], "cwd": "/", "terminal": false, "capabilities": {"bounding": ["CAP_CHOWN"]}},
        "mounts": [{"destination": "/proc", "type": "proc"}, {"destination": "/etc/hosts", "type": "bind", "source": "/a/c/hosts", "options": ["rbind"]},
            {"destination": "/run/.containerenv", "type": "bind", "source": "/a/env"}, {"destination": "/dev/shm", "type": "bind", "source": "/c/shm"}],
        "linux": {"namespaces": [{"type": "network", "path": "/run/netns/c"}, {"type": "ipc"}], "cgroupsPath": "/c",
            "resources": {"memory": {"limit": 1048576, "swap": -1}, "cpu": {"quota": -1, "period": 100000}, "unified": {"memory.high": "max"},
                "hugepageLimits": [{"pageSize": "2MB", "limit": 5}]}, "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/bus"]},
        "etcFiles": [{"inside": "/etc/hosts", "content": "3132", "modified_ns": 5}],
    });
    let state = json!({"ociVersion": "1.0.2", "id": "c", "pid": 7, "status": "running", "bundle": "/b", "rootfs": "/r", "created": "2026-01-01T00:00:00Z",
        "owner": "", "cgroup_paths": {"freezer": "/sys/fs/cgroup/freezer/c"}, "cgroup-path": "/c", "external_descriptors": ["pipe:[1]"]});
    let docker = json!({"Id": "f88f8c0a1b2c3d4e5f", "Name": "/c", "Image": "sha256:a", "AppArmorProfile": "docker-default",
        "Config": {"Hostname": "c", "Env": ["A=b"], "Cmd": ["sh"], "Labels": {"a": "b"}}, "State": {"Status": "running"},
        "HostConfig": {"NetworkMode": "lab", "Binds": ["data:/data"], "PortBindings": {"80/tcp": [{"HostIp": "", "HostPort": "8080"}]}, "Memory": 0},
        "Mounts": [{"Type": "volume", "Name": "data", "Destination": "/data", "Source": "/v/data/_data", "RW": true}],
        "GraphDriver": {"Data": {"UpperDir": "/u"}}, "RootFS": {"Layers": ["sha256:b"]}, "Size": 7, "Driver": "bridge", "IPAM": {"Config": [{"Subnet": "10.1.0.0/24"}]},
        "NetworkSettings": {"Networks": {"lab": {"NetworkID": "n", "IPAddress": "10.1.0.2", "MacAddress": "02:42:0a:01:00:02", "Aliases": ["c"], "IPAMConfig": null}}}});
    let parameters = json!({"body": docker["Config"], "image": "sha256:a", "layers": ["sha256:b"], "image_bytes": 7, "apparmor": "", "networks":
        [{"name": "lab", "driver": "bridge", "subnets": ["10.1.0.0/24"], "endpoint": {"IPAMConfig": {"IPv4Address": "10.1.0.2"}}}],
        "volumes": [{"name": "data", "inside": "/data", "body": {"Driver": "local"}}]});
    let podman = json!({"image": "a1", "image_name": "docker.io/library/redis", "layers": ["sha256:b"], "described": {"Config": {"Hostname": "c", "Labels": {"a": "b"},
        "Healthcheck": {"Test": ["CMD-SHELL", "true"], "Interval": 5}}, "HostConfig": {"Tmpfs": {"/t": "rw,tmpcopyup"}, "PortBindings": {"80/tcp": [{"HostIp": "::1", "HostPort": "80"}]},
        "CgroupParent": "/lab/a"}, "EffectiveCaps": [], "BoundingCaps": []}, "command": ["sh"], "sysctls": {"net.a": "1"}, "pod": "", "networks":
        [{"name": "podman", "kind": {"driver": "bridge", "subnets": ["10.88.0.0/16"]}, "ips": ["10.88.0.2"], "mac": "02:00:00:00:00:01", "aliases": []}],
        "volumes": [{"name": "v", "inside": "/v", "local": true}]});
    let cached = json!({"kind": "cniCacheV1", "containerId": "c", "ifName": "eth0", "networkName": "lab", "capabilityArgs": {"portMappings": [{"hostPort": 80, "protocol": "TCP"}]},
        "config": "eyJjbmlWZXJzaW9uIjoiMS4wLjAiLCJuYW1lIjoibGFiIiwicGx1Z2lucyI6W3sidHlwZSI6ImJyaWRnZSIsImlwTWFzcSI6dHJ1ZX0seyJ0eXBlIjoicG9ydG1hcCJ9XX0=",
        "result": {"interfaces": [{"name": "br0", "mac": "a"}, {"name": "eth0", "sandbox": "/n"}]}}).to_string();
    let attachment = json!({"network": "lab", "container": "c", "interface": "eth0", "cached": cached, "addresses": [], "reservations": []});
    let identity = json!({"interfaces": [{"name": "eth0", "index": 2, "mac": [2, 0, 0, 0, 0, 1], "mtu": 1500, "addresses": [["10.1.0.2", 24]], "attachment": {"kind": "bridge", "bridge": "br0"}}],
        "routes": [], "rules": [], "neighbours": [], "sysctls": {}, "cni": [attachment]});
    let states = json!([{"task": 1, "descriptor": 3, "options": [{"level": 1, "name": 2, "value": {"bytes": [1, 0, 0, 0]}}], "memberships": [{"interface": "eth0", "group": "239.1.1.1", "but": true, "sources": []}]}]);
    let mounts = json!([{"point": "/t", "source": "tmpfs", "options": [["size", "64k"], ["mode", "755"]], "read_only": false, "bytes": 7}]);
    let digest = json!({"hash": "ab", "entries": 2, "subtrees": {"bin": {"hash": "01", "entries": {"sh": "02"}}}});
    let offer = json!({"request": "offer", "container": "c", "engine": "docker", "mode": "hybrid", "config": config, "parameters": parameters, "network": null,
        "memory_bytes": 1, "shared_bytes": 0, "rootfs": digest, "cpu": {"arch": "x86_64", "vendor": "v", "model": "m", "flags": ["avx"]}, "binds": ["/b"], "tmpfs": mounts,
        "trees": [], "streams": 2, "criu": "4.1.1"});
    accepted::<tranship_wire::message::Request>(&offer);
    accepted::<tranship_types::NetworkIdentity>(&identity);
    accepted::<Vec<tranship_storage::tmpfs::TmpfsMount>>(&mounts);
    accepted::<tranship_storage::TreeDigest>(&digest);
    keep("message", "offer", offer);
    for (name, request) in [
        ("clock", json!({"request": "clock"})),
        ("huge", json!({"request": "huge-pages", "pages": {"space": 1, "runs": [[7, 3], [100, 1]]}})),
        ("skeleton", json!({"request": "skeleton", "files": 3, "early": true})),
        ("probe", json!({"request": "probe", "bytes": 5})),
        (
            "shared",
            json!({"request": "shared", "objects": [{"space": 2147483649u32, "key": 7, "kind": "file", "name": "a", "size": 8192, "sealable": false}]}),
        ),
        (
            "held",
            json!({"request": "held", "frames": [{"interface": "eth0", "bytes": "AAAAAAAAAAAAAAIAAAAAAQIAAAAAAggARQAAHA=="}]}),
        ),
        ("failed", json!({"response": "failed", "message": "m", "blockers": []})),
        (
            "draining",
            json!({"response": "draining", "remote_bytes": 5, "pending_bytes": 6, "waiting": 1, "remote_faults": {"classes": [0, 3, 1]}}),
        ),
    ] {
        match request["request"].is_string() {
            true => accepted::<tranship_wire::message::Request>(&request),
            false => accepted::<tranship_wire::message::Response>(&request),
        }
        keep("message", name, request);
    }
    keep("oci", "config", config);
    keep("oci", "state", state);
    keep("parameters", "docker", parameters);
    keep("parameters", "podman", podman);
    keep("parameters", "described", docker);
    keep("offered", "identity", identity);
    keep("offered", "attachment", attachment);
    keep("offered", "mounts", mounts);
    keep("offered", "digest", digest);
    accepted::<Vec<tranship_network::SocketState>>(&states);
    keep(
        "held",
        "frames",
        json!([{"interface": "eth0", "bytes": "AAAAAAAAAAAAAAIAAAAAAQIAAAAAAggARQAAHAAAAABAEQAACgEAAgoBAAM="}]),
    );
    keep("held", "states", states);
    keep(
        "held",
        "memberships",
        json!([{"interface": "eth0", "group": "239.1.1.1", "but": true, "sources": ["10.0.0.1"]}]),
    );
    for (name, op) in [
        ("mount", json!({"op": "mount", "index": 0, "root": 2})),
        ("park", json!({"op": "park", "ino": 3, "parent": 2, "name": "a%ff"})),
        ("make", json!({"op": "make", "ino": 3, "parent": 2, "name": "l", "kind": "symlink", "target": "/a"})),
        ("unname", json!({"op": "unname", "ino": 3, "parent": 2, "name": "%00%25"})),
    ] {
        accepted::<tranship_storage::copy::Op>(&op);
        keep("tree_op", name, op);
    }
    keep("file", "image", json!({"name": "core-1.img", "size": 900, "mode": 420}));
    let request = json!({"container": "redis", "to": "b", "dry_run": false, "mode": "hybrid", "bandwidth": 1000000, "freeze_timeout_ms": 10000, "allow": ["numa-policy"]});
    accepted::<tranship_api::MoveRequest>(&request);
    keep("api", "move", request);
    let request = json!({"container": "redis", "to": "b", "sample_ms": 500});
    accepted::<tranship_api::PlanRequest>(&request);
    keep("api", "plan", request);
    let request = json!({"containers": {"a": {"to": "b", "depends_on": ["c"]}, "c": {}}, "to": "b", "levels": [["a"], ["c"]], "order": "pipelined"});
    accepted::<tranship_api::GroupRequest>(&request);
    keep("api", "group", request);
    keep("api", "recover", json!({"migration": "m-4k7tq0zd", "keep": "here"}));
}

/// A seed that is refused at once is worth little.
fn accepted<T: serde::de::DeserializeOwned>(value: &Value) {
    if let Err(error) = serde_json::from_value::<T>(value.clone()) {
        panic!("{error}: {value}");
    }
}

/// What is neither text nor JSON.
fn binary(keep: &impl Fn(&str, &str, &[u8])) {
    let raw = |text: &str, target: &str, name: &str| keep(target, name, text.as_bytes());
    raw("m-4k7tq0zd", "api", "id");
    raw("1.5Gbit/s", "api", "bandwidth");
    raw("runc version 1.2.5\ncommit: v1\nspec: 1.2.0\n", "engine_texts", "runc");
    raw("crun version 1.21\n+SYSTEMD +SELINUX +CRIU\n", "engine_texts", "crun");
    raw("3132ff", "engine_texts", "digits");
    raw(
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n22 21 0:58 / /run rw,nosuid shared:9 - tmpfs tmpfs rw\n",
        "engine_texts",
        "mounts",
    );
    raw(
        "HTTP/1.1 200 OK\r\nServer: Docker\r\n\r\n{\"Id\": \"a\", \"Config\": {}, \"HostConfig\": {}}",
        "parameters",
        "answer",
    );
    raw("812 1 230 1 5000000 100\n", "proc_others", "waits");
    raw(
        "inotify wd:1 ino:2a sdev:3d mask:100 ignored_mask:0 fhandle-bytes:20 fhandle-type:f8 \
         f_handle:00000000fb1d0001000102030405060708090a0b0c0d0e0f2a0000000700000000000000\n",
        "proc_fdinfo",
        "overlay",
    );
    journal(keep);
    // CRIU's RPC: a dump with options, a notification.
    keep("criu_rpc", "request", &[8, 1, 0x12, 8, 8, 7, 0x88, 1, 5, 0x92, 1, 0, 0x18, 1]);
    keep(
        "criu_rpc",
        "notification",
        &[
            8, 6, 0x10, 1, 0x2a, 16, 10, 12, b'p', b'o', b's', b't', b'-', b'r', b'e', b's', b't', b'o', b'r', b'e',
            0x10, 7,
        ],
    );
    for message in [&b"L\x07\0\0\0\0\x10\0\0\0\0\0\0\0\x30\0\0\0\0\0\0"[..], b"N", b"M", b"S"] {
        keep("pager_message", &format!("{}", message[0] as char), message);
    }
    let gone = [&b"Z"[..], &7u64.to_le_bytes(), &0x1000u64.to_le_bytes(), &0x3000u64.to_le_bytes()].concat();
    keep("pager_message", "Z", &gone);
    let extents =
        [&b"I"[..], &7u32.to_le_bytes(), &2u32.to_le_bytes(), &0x1000u64.to_le_bytes(), &0u64.to_le_bytes()].concat();
    keep("pager_message", "I", &extents);
    for event in [0x12u8, 0x13, 0x14, 0x15, 0x16] {
        let words = [u64::from(event), 5, 0x7000, 0x2000].map(u64::to_le_bytes).concat();
        keep("records", &format!("userfault-{event:x}"), &words);
    }
    // An event of fanotify with a handle of a tmpfs.
    let mut event =
        [&48u32.to_ne_bytes()[..], &[3, 0, 24, 0], &8u64.to_ne_bytes(), &(-1i32).to_ne_bytes(), &7u32.to_ne_bytes()]
            .concat();
    event.extend(
        [
            &[1, 0, 24, 0][..],
            &[1; 8],
            &12u32.to_ne_bytes(),
            &1u32.to_ne_bytes(),
            &[5, 0, 0, 0, 42, 0, 0, 0, 0, 0, 0, 0],
        ]
        .concat(),
    );
    event[0] = event.len() as u8;
    keep("records", "fanotify", &event);
    // Two names, two structures with two members each, one of them in the other without a name, and a function.
    let types: Vec<u32> = [
        [1, 0x0400_0002, 16, 3, 0, 0, 0, 2, 32],
        [3, 0x0400_0002, 8, 3, 4, 0, 5, 4, 32],
        [7, 0x0100_0000, 4, 32, 7, 0x0c00_0000, 0, 0, 0],
    ]
    .concat();
    let types = &types[..types.len() - 2];
    let strings = b"\0s\0a\0b\0f\0";
    let length = types.len() as u32 * 4;
    let mut btf = [0x0018_eb9f_u32 & 0xffff | 1 << 16, 24, 0, length, length, strings.len() as u32]
        .map(u32::to_le_bytes)
        .concat();
    btf.extend(types.iter().flat_map(|word| word.to_le_bytes()));
    btf.extend(strings);
    keep("btf", "two-structures", &btf);
    keep("certificate", "node", &certificate());
    keep("archive", "image", &archive());
    // A container's record, with an OCI configuration in it.
    let spec = b"\x0a\x03abc\x12\x02{}";
    let record = [&b"\x0a\x01c\x1a\x01i"[..], &[0x2a, spec.len() as u8], spec].concat();
    keep("containerd", "record", &[&[0x0a, record.len() as u8][..], &record].concat());
    keep("containerd", "manifest", br#"{"layers": [{"digest": "sha256:4", "size": 7}], "manifests": [{"digest": "a", "platform": {"os": "linux", "architecture": "amd64"}}]}"#);
}

fn journal(keep: &impl Fn(&str, &str, &[u8])) {
    use tranship_coordinator::{Failure, Journal, Record};
    let directory = tempfile::tempdir().unwrap();
    let begin = Record::Begin {
        id: "m-4k7tq0zd".parse().unwrap(),
        side: tranship_types::Side::Source,
        container: "redis".into(),
        peer: "b".parse().unwrap(),
        context: json!({"a": 1}),
    };
    let mut journal = Journal::create(directory.path(), "m-4k7tq0zd", &begin).unwrap();
    journal.append(&Record::step("freeze")).unwrap();
    journal.append(&Record::step("await-ready")).unwrap();
    journal.decide(&Record::Commit).unwrap();
    let text = fs::read(journal.path()).unwrap();
    let written = text.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    keep("journal", "committed", &text[..written + 64]);
    let cut = written - 20;
    keep("journal", "torn", &[&text[..cut], &[0; 64]].concat());
    journal.append(&Record::Undone { failure: Failure::new("no") }).unwrap();
    let text = fs::read(journal.path()).unwrap();
    keep("journal", "undone", &text[..text.iter().rposition(|byte| *byte != 0).unwrap() + 1]);
}

/// A node's certificate in DER, by the CA that `tranship init` makes.
fn certificate() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("key");
    let der = directory.path().join("der");
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            "/CN=b",
            "-addext",
            "subjectAltName=DNS:b",
            "-outform",
            "DER",
            "-keyout",
        ])
        .arg(key)
        .arg("-out")
        .arg(&der)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    fs::read(der).unwrap()
}

/// An archive of an image with two layers.
fn archive() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| fs::write(directory.path().join(name), content).unwrap();
    file("a", "layer");
    file("b", "other");
    file("manifest.json", r#"[{"Config": "c", "Layers": ["a", "b"]}]"#);
    let made = Command::new("tar")
        .args(["-b", "1", "-C"])
        .arg(directory.path())
        .args(["-c", "a", "b", "manifest.json"])
        .output()
        .unwrap();
    made.stdout
}
