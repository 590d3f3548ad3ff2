# A process with a descriptor of each kind and mappings of each kind, and the kernel's lists of what a network namespace has.
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
