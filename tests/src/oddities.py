# Odd states that a move carries; /tmp/state says, ten times a second, what they are like.
import ctypes, json, mmap, os, select, signal, socket, struct, threading, time

libc = ctypes.CDLL(None, use_errno=True)
COMM = 'процессы'.encode()  # the kernel cuts it in the middle of a letter
libc.prctl(15, COMM, 0, 0, 0)


def odd_thread():
    libc.prctl(15, b'\xff) R \x1b', 0, 0, 0)
    libc.prctl(29, 234567, 0, 0, 0)
    while True:
        slacks.append(libc.prctl(30, 0, 0, 0, 0))
        del slacks[:-1]
        time.sleep(0.05)


slacks = []
threading.Thread(target=odd_thread, daemon=True).start()
libc.prctl(29, 123456, 0, 0, 0)
with open('/proc/self/coredump_filter', 'w') as out:
    out.write('0x7f')
with open('/proc/self/autogroup', 'w') as out:
    out.write('7')
libc.syscall(251, 1, 0, 2 << 13 | 3)  # ioprio_set: best effort, 3

# Of sockets: (level, name, value) of a closed one of TCP, a raw one, and two of UDP.
tcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
udp6 = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
OPTIONS = [(tcp, 6, 10, 9000), (tcp, 6, 16, 1), (tcp, 6, 23, 5), (tcp, 6, 30, 1), (tcp, 6, 44, 5000), (tcp, 1, 44, 1),
           (udp, 0, 4, b'\x01\x01\x01\x00'), (udp, 0, 23, 1), (udp, 1, 43, 1), (raw, 0, 5, 1), (udp6, 41, 33, 1), (udp6, 41, 72, 1),
           (udp6, 17, 101, 1)]
known = []
for s, level, name, value in OPTIONS:
    try:
        s.setsockopt(level, name, value)
        known.append((s, level, name))
    except OSError:
        pass  # one that this kernel does not have

odd = b'/tmp/\xd0\xff\n(\x1b[31m'
os.mkdir(odd)
os.chdir(odd)
file = os.open(odd + b'/a (deleted)', os.O_RDWR | os.O_CREAT)
os.write(file, b'file' * 4096)
mapped = mmap.mmap(file, 8192)

zero = os.open('/dev/zero', os.O_RDWR)
shared = mmap.mmap(zero, 1 << 20)
private = mmap.mmap(zero, 1 << 20, flags=mmap.MAP_PRIVATE)
os.close(zero)
shared[5000:5006] = b'shared'
private[5000:5007] = b'private'
if os.fork() == 0:
    while True:
        shared[9000:9008] = struct.pack('d', time.monotonic())
        time.sleep(0.01)

reader, writer = os.pipe()
copy = os.dup(reader)
epoll = select.epoll()
epoll.register(reader, select.EPOLLIN)
os.close(reader)
os.write(writer, b'x')

# Mount points of the container's, and what is in them.
MOUNTS = [b'/run/sp ace', b'/run/ta\tb', b'/run/back\\slash', b'/run/lit\\040eral', '/run/Ж'.encode()]
for mount in MOUNTS:
    with open(mount + b'/\xff\n', 'wb') as out:
        out.write(mount)
    os.symlink(b'/\xfe ' + mount, mount + b'/\xfd')
held = os.open(MOUNTS[3] + b'/\xff\n', os.O_RDONLY)

# An abstract name with zero bytes, one of a file, and connections to both.
listeners, clients = [], []
for name in b'\0odd\0\xff\n', b'/tmp/\xff\n.sock':
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    client.connect(name)
    listeners.append(listener)
    clients.append((client, listener.accept()[0]))

child = os.fork()
if child == 0:
    os.execve('/bin/sleep', [b'\xff\n', b'1000000'], {b'\xff': b'\xfe\n'})
memory = libc.memfd_create(b'm\xff\n(deleted)', 0)
os.ftruncate(memory, 4096)
in_memory = mmap.mmap(memory, 4096)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, odd, 0x100) >= 0


def talk(listener, pair):
    """Over a connection that lasts, and over a new one."""
    pair[0].sendall(b'old')
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        client.sendall(b'new')
        with accepted:
            return [os.fsencode(listener.getsockname()).hex(), pair[1].recv(9).decode(), accepted.recv(9).decode()]


def watched():
    os.close(os.open(odd + b'/\xff', os.O_CREAT | os.O_WRONLY))
    os.unlink(odd + b'/\xff')
    return os.read(watch, 4096)[16:].rstrip(b'\0').hex()


while True:
    before = shared[9000:9008]
    time.sleep(0.1)
    state = {
        'comm': open('/proc/self/comm', 'rb').read().hex(),
        'threads': sorted(open(f'/proc/self/task/{t}/comm', 'rb').read().hex() for t in os.listdir('/proc/self/task')),
        'slack': [libc.prctl(30, 0, 0, 0, 0), slacks[0]],
        'core dump': open('/proc/self/coredump_filter').read(),
        'autogroup': open('/proc/self/autogroup').read().split()[-1],
        'io priority': libc.syscall(252, 1, 0),
        'options': [s.getsockopt(level, name, 40).hex() for s, level, name in known],
        'cwd': os.getcwdb().hex(),
        'link': os.readlink(f'/proc/self/fd/{file}'.encode()).hex(),
        'mapped': mapped[4090:4098].hex(),
        'shared': shared[5000:5006].decode(),
        'written': before != shared[9000:9008],
        'private': private[5000:5007].decode(),
        'epoll': len(epoll.poll(0)),
        'mounts': [[sorted(name.hex() for name in os.listdir(mount)), open(mount + b'/\xff\n', 'rb').read().hex(),
                    os.readlink(mount + b'/\xfd').hex()] for mount in MOUNTS],
        'held': os.readlink(f'/proc/self/fd/{held}'.encode()).hex(),
        'sockets': [talk(*pair) for pair in zip(listeners, clients)],
        'child': [open(f'/proc/{child}/{name}', 'rb').read().hex() for name in ('cmdline', 'environ')],
        'memfd': os.readlink(f'/proc/self/fd/{memory}'.encode()).hex(),
        'watched': watched(),
    }
    with open('/tmp/state.new', 'w') as out:
        json.dump(state, out)
    os.rename('/tmp/state.new', '/tmp/state')
