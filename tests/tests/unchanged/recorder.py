"""Keeps what waits to be taken: content of queues, errors, signals, events, locks, times.

On port 7000 it takes one word per connection. `fill` makes everything anew, and answers "ready". `take` takes
everything out, and answers what it was, {kind: what was found}. A kind is a generator: it makes what waits, yields,
and returns what it finds afterwards. What it returns is the same each time if nobody has touched it in between.
Marks (who has used something last, and when) are told as `KIND_marks`.
"""

import array, ctypes, errno, fcntl, json, os, select, signal, socket, struct, termios, threading, time

libc = ctypes.CDLL(None, use_errno=True)
KINDS = {}


class Marked(tuple):
    """What was found, and whether the marks are what they were."""


ROOT = '/tmp/recorder'
UNIX, INET = socket.AF_UNIX, socket.AF_INET
STREAM, DGRAM, SEQPACKET = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET
SIGNALS = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN + 1, signal.SIGRTMIN + 2, signal.SIGIO, signal.SIGURG]
EVENTS = 0xfff


def kind(function):
    KINDS[function.__name__] = function


class Fd(int):
    """A descriptor that is closed when nothing refers to it."""

    def __del__(self):
        os.close(self)


def pair(make):
    return [Fd(fd) for fd in make]


def call(name, *arguments):
    done = getattr(libc, name)(*arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), name)
    return done


def rest(fd, size=65536):
    """All that can be read, one item for each read."""
    os.set_blocking(fd, False)
    found = []
    while True:
        try:
            found.append(os.read(fd, size).decode('latin1'))
        except OSError as error:
            found.append(errno.errorcode[error.errno])
            return found
        if not found[-1]:
            return found


def times(path):
    stat = os.stat(path)
    return [stat.st_atime_ns, stat.st_mtime_ns, stat.st_ctime_ns]


def make(name, content='content\n' * 1000):
    path = f'{ROOT}/{name}'
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w') as file:
        file.write(content)
    return path


# Pipes


@kind
def pipe():
    reader, writer = pair(os.pipe())
    os.write(writer, b'abc')
    os.write(writer, b'def')
    yield
    return rest(reader)


@kind
def fifo():
    path = f'{ROOT}/fifo'
    os.makedirs(ROOT, exist_ok=True)
    os.path.exists(path) or os.mkfifo(path)
    both = Fd(os.open(path, os.O_RDWR))
    os.write(both, b'abc')
    yield
    return rest(both)


# Sockets


def packets(s):
    s.setblocking(False)
    found = []
    while True:
        try:
            data, ancillary, _, sender = s.recvmsg(4096, socket.CMSG_SPACE(64))
        except OSError as error:
            return found + [errno.errorcode[error.errno]]
        passed = [fd for _, _, data in ancillary for fd in array.array('i', data)]
        names = [os.readlink(f'/proc/self/fd/{fd}').split(':')[0] for fd in passed]
        for fd in passed:
            os.close(fd)
        found.append([data.decode('latin1'), names, str(sender)])
        if not data:
            return found


def unix(of_type):
    one, other = socket.socketpair(UNIX, of_type)
    reader = pair(os.pipe())[0]
    one.send(b'first')
    socket.send_fds(one, [b'second'], [reader])
    one.send(b'third')
    other.send(b'back')
    yield
    return [packets(other), packets(one)]


@kind
def unix_stream():
    return (yield from unix(STREAM))


@kind
def unix_datagrams():
    return (yield from unix(DGRAM))


@kind
def unix_packets():
    return (yield from unix(SEQPACKET))


@kind
def unix_error():
    """The peer was closed with something unread, while there is something to read."""
    one, other = socket.socketpair(UNIX, STREAM)
    one.send(b'unread')
    other.send(b'data')
    other.close()
    yield
    return packets(one)


@kind
def unix_error_without_data():
    one, other = socket.socketpair(UNIX, STREAM)
    one.send(b'unread')
    other.close()
    yield
    return [one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), packets(one)]


@kind
def unix_waits_to_be_accepted():
    listener = socket.socket(UNIX, STREAM)
    listener.bind('\0recorder')
    listener.listen()
    client = socket.socket(UNIX, STREAM)
    client.connect('\0recorder')
    yield
    listener.settimeout(5)
    server, _ = listener.accept()
    client.send(b'late')
    return packets(server)


@kind
def tcp():
    listener = socket.create_server(('127.0.0.1', 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    server.sendall(b'to the client')
    client.sendall(b'to the server')
    yield
    return [packets(client), packets(server)]


def datagrams():
    one, other = socket.socket(INET, DGRAM), socket.socket(INET, DGRAM)
    one.bind(('127.0.0.1', 7101))
    other.bind(('127.0.0.1', 7102))
    return one, other


@kind
def udp():
    one, other = datagrams()
    for data in b'first', b'', b'second':
        one.sendto(data, other.getsockname())
    yield
    other.setblocking(False)
    found = []
    for _ in range(4):
        try:
            found.append(str(other.recvfrom(100)))
        except BlockingIOError:
            found.append('none')
    return found


def refused_datagram(s, port):
    s.connect(('127.0.0.1', port))
    s.send(b'to nobody')
    poll = select.poll()
    poll.register(s, 0)
    poll.poll(5000)


@kind
def udp_error():
    s = socket.socket(INET, DGRAM)
    refused_datagram(s, 7103)
    yield
    return s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@kind
def udp_error_queue():
    s = socket.socket(INET, DGRAM)
    s.setsockopt(socket.IPPROTO_IP, 11, 1)
    refused_datagram(s, 7104)
    yield
    try:
        data, ancillary, _, _ = s.recvmsg(100, 500, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 'none'
    return [data.decode(), str(ancillary[0][2][:16])]


# Terminals


def terminal(local=0, output=0, given=0):
    master, slave = pair(os.openpty())
    mode = termios.tcgetattr(slave)
    mode[0] = mode[0] & ~termios.IXON | given
    mode[1] = output
    mode[3] = local
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    return master, slave


def settled(fd, size):
    """Waits until so much can be read of a terminal: what is written comes a moment later."""
    for _ in range(1000):
        if struct.unpack('i', fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0] == size:
            return
        time.sleep(0.005)


def after(master, slave):
    """What waits, and the mode."""
    flags = [fcntl.fcntl(fd, fcntl.F_GETFL) & ~0o100000 for fd in (master, slave)]
    mode = termios.tcgetattr(slave)
    characters = b''.join(bytes([c]) if isinstance(c, int) else c for c in mode[6])
    return [flags, mode[:6], characters.hex(), rest(master), rest(slave)]


@kind
def terminal_output():
    master, slave = terminal(output=termios.OPOST | termios.ONLCR)
    os.write(slave, b'one\ntwo\r\n')
    settled(master, 11)
    yield
    return after(master, slave)


@kind
def terminal_raw():
    master, slave = terminal()
    os.write(master, bytes(range(256)))
    os.write(slave, bytes(range(256)))
    settled(master, 256)
    settled(slave, 256)
    yield
    return after(master, slave)


@kind
def terminal_lines():
    master, slave = terminal(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN, given=termios.ICRNL)
    os.write(master, b'one\rtwo\nthr\x04\x04five\n')
    settled(master, 16)
    yield
    return after(master, slave)


def unfinished(written, echoed, finished):
    """A line that is finished later; what waits at the master before and after that is so long."""
    master, slave = terminal(termios.ICANON | termios.ECHO)
    os.write(master, written)
    settled(master, echoed)
    yield
    os.write(master, b'ished\n')
    settled(master, finished)
    return after(master, slave)


@kind
def terminal_unfinished_line():
    return (yield from unfinished(b'one\nunfin', 9, 15))


@kind
def terminal_only_unfinished_line():
    return (yield from unfinished(b'unfin', 5, 11))


@kind
def terminal_packets():
    master, slave = terminal()
    fcntl.ioctl(master, termios.TIOCPKT, struct.pack('i', 1))
    os.write(slave, b'one\n')
    settled(master, 4)
    yield
    return after(master, slave)


# Signals


@kind
def signals():
    """In the order in which the kernel gives them out, with what came with them."""
    first, second = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
    for value, number in enumerate([second, first, first, signal.SIGUSR2, first]):
        call('sigqueue', os.getpid(), number, ctypes.c_void_p(value))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    yield
    found = []
    while taken := signal.sigtimedwait(SIGNALS, 0):
        found.append([taken.si_signo, taken.si_code, taken.si_pid, taken.si_uid, taken.si_status])
    return found


@kind
def signal_descriptor():
    number = signal.SIGRTMIN + 3
    mask = (ctypes.c_ulong * 16)(1 << (number - 1))
    queue = Fd(call('signalfd', -1, mask, os.O_NONBLOCK))
    for value in 3, 1, 2:
        call('sigqueue', os.getpid(), number, ctypes.c_void_p(value))
    yield
    data = b''
    for _ in range(20):
        try:
            data += os.read(queue, 1280)
        except BlockingIOError:
            break
    return [struct.unpack_from('IiiIIiIIIIii', data, at) for at in range(0, len(data), 128)]


# Events


@kind
def eventfd():
    fd = Fd(os.eventfd(7, os.EFD_NONBLOCK) if hasattr(os, 'eventfd') else call('eventfd', 7, os.O_NONBLOCK))
    yield
    return [os.read(fd, 8).hex(), rest(fd, 8)]


@kind
def timerfd():
    fd = Fd(call('timerfd_create', time.CLOCK_MONOTONIC, os.O_NONBLOCK))
    call('timerfd_settime', fd, 0, (ctypes.c_long * 4)(0, 0, 0, 1000), None)
    select.select([fd], [], [], 5)
    yield
    return [os.read(fd, 8).hex(), rest(fd, 8)]


@kind
def epoll_order():
    """Which of three became ready first, in the order of becoming ready."""
    epoll = select.epoll()
    fds = [Fd(call('eventfd', 0, os.O_NONBLOCK)) for _ in range(3)]
    for fd in fds:
        epoll.register(fd, select.EPOLLIN | select.EPOLLET)
    for which in 1, 2, 0:
        os.write(fds[which], struct.pack('Q', 1))
    yield
    return [[fds.index(fd) for fd, _ in epoll.poll(0, 1)] for _ in range(4)]


def watch(*paths, mask=EVENTS):
    queue = Fd(call('inotify_init1', os.O_NONBLOCK))
    for path in paths:
        call('inotify_add_watch', queue, path.encode(), mask)
    return queue


def events(queue):
    found = []
    while True:
        try:
            data = os.read(queue, 65536)
        except BlockingIOError:
            return found
        at = 0
        while at < len(data):
            wd, mask, cookie, size = struct.unpack_from('iIII', data, at)
            found.append([wd, hex(mask), cookie > 0, data[at + 16:at + 16 + size].rstrip(b'\0').decode()])
            at += 16 + size


@kind
def events_unread():
    path = make('unread/file')
    queue = watch(os.path.dirname(path), path)
    os.rename(path, path + '2')
    os.rename(path + '2', path)
    open(path).close()
    yield
    return events(queue)


@kind
def no_events():
    path = make('watched/file')
    directory = os.path.dirname(path)
    queue = watch(directory, path)
    before = times(path)[:2], times(directory)[:2]
    yield
    now = times(path)[:2], times(directory)[:2]
    return [events(queue), now == before, os.listdir(directory)]


# Files


@kind
def positions():
    path = make('position')
    shared = Fd(os.open(path, os.O_RDWR))
    os.lseek(shared, 1234, os.SEEK_SET)
    end = Fd(os.open(path, os.O_WRONLY | os.O_APPEND))
    yield
    return [os.lseek(shared, 0, os.SEEK_CUR), os.lseek(end, 0, os.SEEK_CUR), times(path)[0] > 0]


@kind
def file_times():
    path = make('times/file')
    directory = os.path.dirname(path)
    before = times(path), times(directory)
    held = Fd(os.open(path, os.O_RDONLY))
    yield
    now = times(path), times(directory)
    # The time of the last change cannot be set.
    same = [[was == is_now for was, is_now in zip(*both)] for both in zip(before, now)]
    return Marked(([one[:2] for one in same], [one[2] for one in same]))


@kind
def lease():
    path = make('lease')
    held = Fd(os.open(path, os.O_RDONLY))
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    yield
    return [fcntl.fcntl(held, fcntl.F_GETLEASE), signal.SIGIO in signal.sigpending()]


@kind
def locks():
    path = make('locks')
    flock, posix, of_description = [Fd(os.open(path, os.O_RDWR)) for _ in range(3)]
    fcntl.flock(flock, fcntl.LOCK_SH)
    lock = lambda kind, at: struct.pack('hhqqi4x', kind, os.SEEK_SET, at, 10, 0)
    fcntl.fcntl(posix, fcntl.F_SETLK, lock(fcntl.F_WRLCK, 0))
    fcntl.fcntl(of_description, 37, lock(fcntl.F_RDLCK, 100))
    yield
    file = os.stat(path)
    # Files of others may have the same number on another device.
    place = '%02x:%02x:%d' % (os.major(file.st_dev), os.minor(file.st_dev), file.st_ino)
    lines = [line.split() for line in open('/proc/locks')]
    return sorted([words[1:4] + words[6:] for words in lines if words[5] == place])


# System V


class Ipc(int):
    def __new__(cls, kind, number):
        self = super().__new__(cls, number)
        self.kind = kind
        return self

    def stat(self):
        buffer = ctypes.create_string_buffer(256)
        if self.kind == 'sem':
            call('semctl', self, 0, 2, buffer)
        else:
            call(self.kind + 'ctl', self, 2, buffer)
        return buffer.raw

    def __del__(self):
        libc.semctl(self, 0, 0) if self.kind == 'sem' else getattr(libc, self.kind + 'ctl')(self, 0, None)


@kind
def messages():
    queue = Ipc('msg', call('msgget', 0, 0o1600))
    for text in b'\2second', b'\1first', b'\2third':
        message = struct.pack('q', text[0]) + text[1:]
        call('msgsnd', queue, message, len(text) - 1, 0)
    before = queue.stat()
    yield
    unchanged = queue.stat() == before
    found = []
    buffer = ctypes.create_string_buffer(100)
    while (size := libc.msgrcv(queue, buffer, 92, 0, 0o4000)) >= 0:
        found.append([struct.unpack_from('q', buffer)[0], buffer.raw[8:8 + size].decode()])
    return Marked((found, unchanged))


@kind
def semaphores():
    semaphores = Ipc('sem', call('semget', 0, 3, 0o1600))
    call('semop', semaphores, struct.pack('HhhHhh', 0, 5, 0, 2, 1, 0), 2)
    before = semaphores.stat()
    pids = lambda: [libc.semctl(semaphores, at, 11) for at in range(3)]
    changed_by = pids()
    yield
    values = [[libc.semctl(semaphores, at, what) for what in (12, 14, 15)] for at in range(3)]
    return Marked((values, [semaphores.stat() == before, pids() == changed_by]))


def segment(attached):
    libc.shmat.restype = ctypes.c_void_p
    libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    libc.shmdt.argtypes = [ctypes.c_void_p]
    segment = Ipc('shm', call('shmget', 0, 100000, 0o1600))
    at = libc.shmat(segment, None, 0)
    ctypes.memmove(at, b'content', 7)
    if not attached:
        libc.shmdt(at)
    before = segment.stat()
    yield
    after = segment.stat()
    if not attached:
        at = libc.shmat(segment, None, 0)
    content = ctypes.string_at(at, 7).decode()
    libc.shmdt(at)
    # uapi/asm-generic/shmbuf.h
    places = {'permissions': (0, 48), 'size': (48, 56), 'attached': (88, 96)}
    times_at = {'attached at': (56, 64), 'detached at': (64, 72), 'changed at': (72, 80)}
    marks = times_at | {'maker': (80, 84), 'last': (84, 88)}
    same = lambda places: {name: before[at:end] == after[at:end] for name, (at, end) in places.items()}
    return Marked(([content, same(places)], same(marks)))


@kind
def attached_segment():
    return (yield from segment(True))


@kind
def detached_segment():
    return (yield from segment(False))


def fill(without):
    making = {name: function() for name, function in KINDS.items() if name not in without}
    for name, generator in making.items():
        try:
            next(generator)
        except Exception as error:
            raise Exception(name) from error
    return making


def take(made):
    found = {}
    for name, generator in made.items():
        try:
            next(generator)
        except StopIteration as stop:
            found[name] = stop.value
            if isinstance(stop.value, Marked):
                found[name], found[name + '_marks'] = stop.value
        except Exception as error:
            found[name] = repr(error)
    return found


signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS + [signal.SIGRTMIN + 3])
server = socket.create_server(('', 7000))
made = {}
while True:
    peer, _ = server.accept()
    word = peer.makefile().readline().split()
    if word[:1] == ['fill']:
        made = fill(word[1:])
        peer.sendall(b'"ready"')
    elif word == ['take']:
        peer.sendall(json.dumps(take(made)).encode())
    peer.close()
    del peer
