# Kinds of state, each in a process of its own: set up, left alone while the container moves, and looked at when told to.
#
#   kinds.py DIR NAME...   makes DIR/NAME, with `ready`, or `missing WHY` where this machine does not have the kind; as soon as DIR/look exists,
#                          with `same`, or `changed HOW`
#   kinds.py --list        their names
#
# A kind is a generator: what comes before its `yield` sets it up, what comes after it fails if anything is not what it was. The process of the
# kind with number N is called `kN-NAME`.
import ctypes, fcntl, mmap, os, select, signal, socket, struct, sys, threading, time, traceback, zlib

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
KINDS = {}


def kind(function):
    KINDS[function.__name__] = function
    return function


class Missing(Exception):
    pass


def call(result):
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def syscall(*arguments):
    return call(libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]))


def prctl(*arguments):
    return call(libc.prctl(*[ctypes.c_ulong(a) if isinstance(a, int) else a for a in list(arguments) + [0] * (5 - len(arguments))]))


def same(now, then, what=''):
    if now != then:
        raise AssertionError(f'{what} {now!r} instead of {then!r}')


def keeps(look):
    """The kind is all that `look` sees."""
    before = look()
    yield before
    same(look(), before)


def text(path):
    with open(path, errors='replace') as f:
        return f.read()


def told_of(address, name):
    """The words that /proc/self/smaps has of a mapping under this name."""
    found = False
    for line in text('/proc/self/smaps').splitlines():
        first = line.split(' ', 1)[0]
        if '-' in first and not first.endswith(':'):
            begin, end = (int(x, 16) for x in first.split('-'))
            found = begin <= address < end
        elif found and first == name + ':':
            return line.split()[1:]
    return []


def flags_of(address):
    return sorted(set(told_of(address, 'VmFlags')) - {'sd', 'um', 'uw'})


libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def memory(size=1 << 20, flags=0x22, fd=-1):
    address = libc.mmap(None, size, 3, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        call(-1)
    return address


def advised(advice):
    address = memory()
    call(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(1 << 20), advice))
    yield from keeps(lambda: flags_of(address))


for name, advice in dict(dontfork=10, mergeable=12, hugepage=14, nohugepage=15, dontdump=16, wipeonfork=18).items():
    KINDS['madvise_' + name] = lambda advice=advice: advised(advice)


@kind
def grows_down():
    address = memory(1 << 16, 0x122)
    ctypes.memset(address, 7, 4096)
    yield from keeps(lambda: flags_of(address))


@kind
def mlocked():
    address = memory()
    call(libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(1 << 16)))
    yield from keeps(lambda: flags_of(address))


@kind
def droppable():
    address = memory(1 << 16, 0x08 | 0x20)
    yield from keeps(lambda: flags_of(address))


@kind
def mapping_name():
    address = memory()
    buffer = ctypes.create_string_buffer(b'cache of pages')
    prctl(0x53564d41, 0, ctypes.c_void_p(address), ctypes.c_ulong(1 << 20), buffer)
    yield from keeps(lambda: '[anon:cache of pages]' in text('/proc/self/maps'))


@kind
def shared_mapping_name():
    address = memory(flags=0x21)
    buffer = ctypes.create_string_buffer(b'pool')
    prctl(0x53564d41, 0, ctypes.c_void_p(address), ctypes.c_ulong(1 << 20), buffer)
    yield from keeps(lambda: 'anon_shmem:pool' in text('/proc/self/maps'))


@kind
def protection_keys():
    key = call(libc.pkey_alloc(0, 0))
    address = memory()
    ctypes.memset(address, 5, 4096)
    call(libc.pkey_mprotect(ctypes.c_void_p(address), ctypes.c_size_t(1 << 20), 3, key))
    call(libc.pkey_set(key, 2))

    def look():
        return told_of(address, 'ProtectionKey'), libc.pkey_get(key)

    before = look()
    yield
    same(look(), before)
    same(call(libc.pkey_alloc(0, 0)) != key, True, 'a key that is in use was given away:')


@kind
def memory_merge():
    prctl(67, 1)
    yield from keeps(lambda: prctl(68))


@kind
def personality():
    call(libc.personality(0x0040000))
    yield from keeps(lambda: text('/proc/self/personality'))


@kind
def personality_read_implies_exec():
    call(libc.personality(0x0400000))
    yield from keeps(lambda: text('/proc/self/personality'))


@kind
def coredump_filter():
    with open('/proc/self/coredump_filter', 'w') as f:
        f.write('0x7f')
    yield from keeps(lambda: text('/proc/self/coredump_filter'))


@kind
def autogroup():
    os.setsid()
    with open('/proc/self/autogroup', 'w') as f:
        f.write('7')
    yield from keeps(lambda: text('/proc/self/autogroup').split()[-1])


@kind
def core_scheduling():
    prctl(62, 1, 0, 0, 0)
    cookie = ctypes.c_ulong()

    def look():
        prctl(62, 0, 0, 0, ctypes.byref(cookie))
        return cookie.value != 0
    yield from keeps(look)


@kind
def speculation_store_bypass():
    prctl(53, 0, 4)
    yield from keeps(lambda: prctl(52, 0))


@kind
def speculation_indirect_branch():
    prctl(53, 1, 4)
    yield from keeps(lambda: prctl(52, 1))


@kind
def speculation_l1d_flush():
    prctl(53, 2, 2)
    yield from keeps(lambda: prctl(52, 2))


@kind
def cpuid_fault():
    syscall(158, 0x1012, 0)
    yield from keeps(lambda: syscall(158, 0x1011, 0))


@kind
def gs_base():
    syscall(158, 0x1001, ctypes.c_ulong(0x12345678))

    def look():
        value = ctypes.c_ulong()
        syscall(158, 0x1004, ctypes.byref(value))
        return value.value
    yield from keeps(look)


@kind
def securebits():
    prctl(28, 1 << 0 | 1 << 2)
    yield from keeps(lambda: prctl(27))


@kind
def ambient_capabilities():
    class Header(ctypes.Structure):
        _fields_ = [('version', ctypes.c_uint32), ('pid', ctypes.c_int)]
    header, data = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    call(libc.capget(ctypes.byref(header), data))
    data[2] = 1 << 10
    call(libc.capset(ctypes.byref(header), data))
    prctl(47, 2, 10, 0, 0)
    yield from keeps(lambda: [l for l in text('/proc/self/status').splitlines() if l.startswith('Cap')])


@kind
def parent_death_signal():
    prctl(1, 10)

    def look():
        value = ctypes.c_int()
        prctl(2, ctypes.byref(value))
        return value.value
    yield from keeps(look)


@kind
def syscall_user_dispatch():
    selector = ctypes.create_string_buffer(1)
    prctl(59, 1, 0, 0, selector)
    yield
    raise AssertionError('nothing tells what has become of it')


@kind
def alternate_stack():
    class Stack(ctypes.Structure):
        _fields_ = [('sp', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]
    area = memory(1 << 16)
    stack = Stack(area, -(1 << 31), 1 << 16)
    call(libc.sigaltstack(ctypes.byref(stack), None))

    def look():
        now = Stack()
        call(libc.sigaltstack(None, ctypes.byref(now)))
        return now.sp, now.flags & 0xffffffff, now.size
    yield from keeps(look)


@kind
def signal_flags():
    class Action(ctypes.Structure):
        _fields_ = [('handler', ctypes.c_void_p), ('flags', ctypes.c_ulong), ('restorer', ctypes.c_void_p), ('mask', ctypes.c_ulong)]
    restorer = ctypes.cast(libc.abort, ctypes.c_void_p).value
    flags = [0x40000000, 0x80000000, 0x10000000, 0x08000000, 0x2, 0x1, 0x4, 0x800]
    for i, flag in enumerate(flags):
        action = Action(ctypes.cast(libc.abort, ctypes.c_void_p).value, flag | 0x04000000, restorer, 1 << 3)
        syscall(13, 40 + i, ctypes.byref(action), 0, 8)

    def look():
        found = []
        for i, _ in enumerate(flags):
            action = Action()
            syscall(13, 40 + i, 0, ctypes.byref(action), 8)
            found.append((action.handler, action.flags, action.restorer, action.mask))
        return found
    yield from keeps(look)


def signalled(number, reader, write):
    """`reader` sends a signal when there is something to read."""
    fcntl.fcntl(reader, 10, number)
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    yield from keeps(lambda: (fcntl.fcntl(reader, 11), fcntl.fcntl(reader, fcntl.F_GETOWN), fcntl.fcntl(reader, fcntl.F_GETFL)))
    write(b'x')
    info = signal.sigtimedwait([number], 2)
    same(info is not None and info.si_signo, number)


def tcp_connection():
    """Both ends, and who listens."""
    server = socket.create_server(('127.0.0.1', 0))
    one = socket.create_connection(server.getsockname())
    return one, server.accept()[0], server


@kind
def signal_of_a_pipe():
    reader, writer = os.pipe()
    yield from signalled(42, reader, lambda data: os.write(writer, data))


@kind
def signal_of_a_socket():
    one, two = socket.socketpair()
    yield from signalled(43, one, two.send)


@kind
def signal_of_a_tcp_socket():
    one, two, server = tcp_connection()
    yield from signalled(44, one, two.send)


@kind
def owner_of_a_socket_in_siocspgrp():
    one, two = socket.socketpair()
    fcntl.ioctl(one, 0x8902, struct.pack('i', os.getpid()))
    yield from keeps(lambda: struct.unpack('i', fcntl.ioctl(one, 0x8904, b'\0' * 4)))


@kind
def packet_pipe():
    reader, writer = os.pipe2(os.O_DIRECT)
    for part in (b'one', b'two', b'three'):
        os.write(writer, part)
    yield
    same([os.read(reader, 100) for _ in range(3)], [b'one', b'two', b'three'])
    os.write(writer, b'a')
    os.write(writer, b'b')
    same(os.read(reader, 100), b'a')


@kind
def pipe_size():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, 1031, 1 << 18)
    os.write(writer, b'x' * 200000)
    before = fcntl.fcntl(reader, 1032)
    yield
    same(fcntl.fcntl(reader, 1032), before)
    same(len(os.read(reader, 1 << 20)), 200000)


@kind
def semaphore_with_undo():
    ident = call(libc.semget(0, 2, 0o1600))
    call(libc.semctl(ident, 0, 16, 5))
    pid = os.fork()
    if pid == 0:
        operation = struct.pack('hhh', 0, -1, 0x1000)
        call(libc.semop(ident, operation, 1))
        while True:
            time.sleep(1)
    time.sleep(0.3)
    same(libc.semctl(ident, 0, 12), 4)
    yield
    same(libc.semctl(ident, 0, 12), 4)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    same(libc.semctl(ident, 0, 12), 5, 'after the death of who had decreased it:')


@kind
def locked_segment():
    ident = call(libc.shmget(0, 1 << 16, 0o1600))
    call(libc.shmctl(ident, 11, None))

    def look():
        for line in text('/proc/sysvipc/shm').splitlines()[1:]:
            if int(line.split()[1]) == ident:
                return line.split()[2]
    yield from keeps(look)


@kind
def rw_hint():
    fd = os.open('/tmp/hinted', os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, 1036, struct.pack('Q', 4))
    yield from keeps(lambda: fcntl.fcntl(fd, 1035, b'\0' * 8))


@kind
def file_flags():
    fds = [os.open('/tmp/flags%d' % i, os.O_RDWR | os.O_CREAT | f) for i, f in
           enumerate([os.O_NOATIME, os.O_SYNC, os.O_DSYNC, os.O_APPEND, os.O_NONBLOCK, os.O_LARGEFILE])]
    yield from keeps(lambda: [fcntl.fcntl(f, fcntl.F_GETFL) for f in fds])


@kind
def high_descriptor():
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    fd = os.open('/dev/null', os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.dup2(fd, 950)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    yield
    os.fstat(950)
    same(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 64)


def option(family, type_, protocol, level, name, value, prepare=None):
    s = socket.socket(family, type_, protocol)
    if prepare:
        prepare(s)
    s.setsockopt(level, name, value)
    size = len(value) if isinstance(value, bytes) else 4
    yield from keeps(lambda: s.getsockopt(level, name, size))


TCP, UDP = (socket.AF_INET, socket.SOCK_STREAM, 0), (socket.AF_INET, socket.SOCK_DGRAM, 0)
UDP6, UNIX = (socket.AF_INET6, socket.SOCK_DGRAM, 0), (socket.AF_UNIX, socket.SOCK_DGRAM, 0)
RAW = (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
TCP6 = (socket.AF_INET6, socket.SOCK_STREAM, 0)
for name, (socket_kind, level, number, value) in {
    'so_mark': (UDP, 1, 36, 7), 'so_priority': (UDP, 1, 12, 5), 'so_busy_poll': (UDP, 1, 46, 20), 'so_prefer_busy_poll': (UDP, 1, 69, 1),
    'so_busy_poll_budget': (UDP, 1, 70, 16), 'so_incoming_cpu': (UDP, 1, 49, 1), 'so_rcvlowat': (TCP, 1, 18, 5), 'so_txrehash': (TCP, 1, 74, 0),
    'so_buf_lock': (UDP, 1, 72, 3), 'so_reserve_mem': (TCP, 1, 73, 4096), 'so_rcvmark': (UDP, 1, 75, 1), 'so_rcvpriority': (UDP, 1, 82, 1),
    'so_passpidfd': (UNIX, 1, 76, 1), 'so_passcred': (UNIX, 1, 16, 1), 'so_passsec': (UNIX, 1, 34, 1), 'so_passrights_off': (UNIX, 1, 83, 0),
    'so_inq': (UNIX, 1, 84, 1),
    'so_peek_off': (UNIX, 1, 42, 3), 'so_nofcs': (UDP, 1, 43, 1), 'so_select_err_queue': (UDP, 1, 45, 1), 'so_rxq_ovfl': (UDP, 1, 40, 1),
    'so_wifi_status': (UDP, 1, 41, 1), 'so_timestamping': (UDP, 1, 37, 0x1a), 'so_timestampns_new': (UDP, 1, 64, 1), 'so_zerocopy': (UDP, 1, 60, 1),
    'so_txtime': (UDP, 1, 61, struct.pack('ii', 1, 0)), 'so_max_pacing_rate': (TCP, 1, 47, 100000), 'so_linger': (TCP, 1, 13, struct.pack('ii', 1, 7)),
    'so_no_check': (UDP, 1, 11, 1), 'so_oobinline': (TCP, 1, 10, 1), 'so_dontroute': (UDP, 1, 5, 1), 'so_bindtodevice': (UDP, 1, 25, b'lo\0'),
    'so_rcvtimeo': (TCP, 1, 20, struct.pack('qq', 3, 0)), 'so_debug': (UDP, 1, 1, 1), 'so_keepalive': (TCP, 1, 9, 1),
    'ip_hdrincl': (RAW, 0, 3, 1), 'icmp_filter': (RAW, 255, 1, 0x55), 'ip_tos': (UDP, 0, 1, 0x10), 'ip_ttl': (UDP, 0, 2, 33),
    'ip_recvopts': (UDP, 0, 6, 1), 'ip_options': (UDP, 0, 4, b'\x01\x01\x01\x00'), 'ip_mtu_discover': (UDP, 0, 10, 2), 'ip_recverr': (UDP, 0, 11, 1),
    'ip_recvtos': (UDP, 0, 13, 1), 'ip_freebind': (UDP, 0, 15, 1), 'ip_minttl': (TCP, 0, 21, 9), 'ip_nodefrag': (RAW, 0, 22, 1),
    'ip_checksum': (UDP, 0, 23, 1), 'ip_bind_address_no_port': (TCP, 0, 24, 1), 'ip_recvfragsize': (UDP, 0, 25, 1),
    'ip_recverr_rfc4884': (UDP, 0, 26, 1), 'ip_multicast_ttl': (UDP, 0, 33, 9), 'ip_multicast_loop': (UDP, 0, 34, 0), 'ip_multicast_all': (UDP, 0, 49, 0),
    'ip_unicast_if': (UDP, 0, 50, struct.pack('!i', 1)), 'ip_local_port_range': (TCP, 0, 51, (50000 << 16) | 40000), 'ip_transparent': (TCP, 0, 19, 1),
    'ip_router_alert': (RAW, 0, 5, 1), 'ip_pktinfo': (UDP, 0, 8, 1),
    'ipv6_tclass': (UDP6, 41, 67, 0x20), 'ipv6_unicast_hops': (UDP6, 41, 16, 9), 'ipv6_mtu': (UDP6, 41, 24, 1300), 'ipv6_dontfrag': (UDP6, 41, 62, 1),
    'ipv6_recvtclass': (UDP6, 41, 66, 1), 'ipv6_recverr': (UDP6, 41, 25, 1), 'ipv6_flowinfo_send': (UDP6, 41, 33, 1), 'ipv6_autoflowlabel': (UDP6, 41, 70, 1),
    'ipv6_addr_preferences': (UDP6, 41, 72, 1), 'ipv6_minhopcount': (TCP6, 41, 73, 5), 'ipv6_recvpathmtu': (UDP6, 41, 60, 1), 'ipv6_v6only': (UDP6, 41, 26, 1),
    'ipv6_freebind': (UDP6, 41, 78, 1), 'ipv6_transparent': (UDP6, 41, 75, 1), 'ipv6_multicast_all': (UDP6, 41, 29, 0), 'ipv6_rthdr': (UDP6, 41, 56, 1),
    'tcp_congestion': (TCP, 6, 13, b'reno'), 'tcp_defer_accept': (TCP, 6, 9, 10), 'tcp_user_timeout': (TCP, 6, 18, 9000), 'tcp_keepidle': (TCP, 6, 4, 77),
    'tcp_syncnt': (TCP, 6, 7, 3), 'tcp_linger2': (TCP, 6, 8, 17), 'tcp_window_clamp': (TCP, 6, 10, 9000), 'tcp_quickack': (TCP, 6, 12, 0),
    'tcp_thin_linear': (TCP, 6, 16, 1), 'tcp_notsent_lowat': (TCP, 6, 25, 5000), 'tcp_save_syn': (TCP, 6, 27, 1), 'tcp_fastopen': (TCP, 6, 23, 5),
    'tcp_fastopen_connect': (TCP, 6, 30, 1), 'tcp_fastopen_no_cookie': (TCP, 6, 34, 1), 'tcp_inq': (TCP, 6, 36, 1), 'tcp_tx_delay': (TCP, 6, 37, 1000),
    'tcp_maxseg': (TCP, 6, 2, 900), 'tcp_rto_max_ms': (TCP, 6, 44, 5000), 'tcp_rto_min_us': (TCP, 6, 45, 5000), 'tcp_delack_max_us': (TCP, 6, 46, 5000),
    'udp_segment': (UDP, 17, 103, 1000), 'udp_gro': (UDP, 17, 104, 1), 'udp_no_check6_tx': (UDP6, 17, 101, 1), 'udp_encap': (UDP, 17, 100, 2),
}.items():
    KINDS[name] = lambda k=socket_kind, l=level, n=number, v=value: option(*k, l, n, v)


def connected(level, number, value):
    """An option of an established TCP connection."""
    one, two, server = tcp_connection()
    one.setsockopt(level, number, value)
    size = len(value) if isinstance(value, bytes) else 4
    before = one.getsockopt(level, number, size)
    yield
    same(one.getsockopt(level, number, size), before)
    one.send(b'x')
    same(two.recv(1), b'x')


for name, (level, number, value) in {
    'tcp_congestion': (6, 13, b'reno'), 'tcp_user_timeout': (6, 18, 9000), 'tcp_keepidle': (6, 4, 77), 'tcp_notsent_lowat': (6, 25, 5000),
    'tcp_inq': (6, 36, 1), 'tcp_nodelay': (6, 1, 1), 'tcp_cork': (6, 3, 1), 'tcp_syncnt': (6, 7, 3), 'tcp_linger2': (6, 8, 17),
    'tcp_window_clamp': (6, 10, 9000), 'tcp_thin_linear': (6, 16, 1), 'tcp_tx_delay': (6, 37, 1000), 'tcp_rto_max_ms': (6, 44, 5000),
    'so_mark': (1, 36, 7), 'so_priority': (1, 12, 5), 'so_rcvlowat': (1, 18, 5), 'so_linger': (1, 13, struct.pack('ii', 1, 7)), 'so_oobinline': (1, 10, 1),
    'so_rcvbuf': (1, 8, 40000), 'so_sndbuf': (1, 7, 40000), 'so_max_pacing_rate': (1, 47, 100000), 'so_timestamping': (1, 37, 0x1a), 'so_zerocopy': (1, 60, 1),
    'ip_tos': (0, 1, 0x10), 'ip_ttl': (0, 2, 33), 'ip_minttl': (0, 21, 9), 'so_sndtimeo': (1, 21, struct.pack('qq', 3, 0)), 'so_busy_poll': (1, 46, 20),
    'ip_recvttl': (0, 12, 1),
}.items():
    KINDS['connected_' + name] = lambda l=level, n=number, v=value: connected(l, n, v)


@kind
def tcp_tls():
    one, two, server = tcp_connection()
    one.setsockopt(6, 31, b'tls')
    yield
    same(one.getsockopt(6, 31, 16).rstrip(b'\0'), b'tls')


def signed(listens):
    """A socket with a key for the segments of one peer."""
    s = socket.socket()
    s.bind(('127.0.0.1', 0))
    if listens:
        s.listen()
    peer = struct.pack('=HH4s120x', socket.AF_INET, 0, socket.inet_aton('127.0.0.9'))
    s.setsockopt(6, 14, peer + struct.pack('=BBHi80s', 0, 0, 3, 0, b'key'))
    yield
    raise AssertionError('nothing tells what has become of it')


KINDS['tcp_md5_key'] = lambda: signed(True)
KINDS['tcp_md5_key_of_a_closed_socket'] = lambda: signed(False)


@kind
def reuseport_program():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(1, 15, 1)
    s.bind(('127.0.0.1', 0))
    code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0))
    s.setsockopt(1, 51, struct.pack('HxxxxxxP', 1, ctypes.addressof(code)))
    yield
    raise AssertionError('nothing tells what has become of it')


@kind
def flow_label():
    s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    request = socket.inet_pton(socket.AF_INET6, '::1') + struct.pack('!I', 0x12345) + struct.pack('=BBHHHI', 0, 255, 1, 0, 60, 0)
    s.setsockopt(41, 32, request)
    yield
    raise AssertionError('nothing tells what has become of it')


@kind
def timestamps_of_a_unix_socket():
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    two.setsockopt(1, 35, 1)
    yield
    same(two.getsockopt(1, 35), 1)
    one.send(b'x')
    same(len(two.recvmsg(10, 100)[1]), 1)


@kind
def excluded_unlinked_files():
    """IN_EXCL_UNLINK: what is done to a file that has no name any more is not reported."""
    os.makedirs('/tmp/excluded', exist_ok=True)
    file = os.open('/tmp/excluded/file', os.O_RDWR | os.O_CREAT)
    os.unlink('/tmp/excluded/file')
    fd = call(libc.inotify_init())
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    call(libc.inotify_add_watch(fd, b'/tmp/excluded', 0x04000000 | 0x2 | 0x100))
    yield
    os.write(file, b'x')
    open('/tmp/excluded/other', 'w').close()
    events = os.read(fd, 4096)
    same(struct.unpack_from('iI', events)[1], 0x100)


def filtered(lock):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(('127.0.0.1', 0))
    code = struct.pack('HBBI', 6, 0, 0, 0)
    buffer = ctypes.create_string_buffer(code)
    s.setsockopt(1, 26, struct.pack('HxxxxxxP', 1, ctypes.addressof(buffer)))
    if lock:
        s.setsockopt(1, 44, 1)
    yield
    same(s.getsockopt(1, 44), int(lock))
    s.settimeout(0.2)
    s.sendto(b'x', s.getsockname())
    try:
        s.recv(10)
        raise AssertionError('the filter has let a datagram through')
    except TimeoutError:
        pass


@kind
def socket_filter_of_ebpf():
    program = ctypes.create_string_buffer(struct.pack('BBhiBBhi', 0xb7, 0, 0, 0, 0x95, 0, 0, 0))
    license = ctypes.create_string_buffer(b'GPL')
    attributes = struct.pack('IIQQ', 1, 2, ctypes.addressof(program), ctypes.addressof(license)).ljust(128, b'\0')
    fd = syscall(321, 5, ctypes.create_string_buffer(attributes), 128)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(1, 50, fd)
    os.close(fd)
    yield
    raise AssertionError('it was refused')


@kind
def raw_socket_that_is_connected():
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 89)
    s.connect(('127.0.0.1', 7))
    yield from keeps(s.getpeername)


@kind
def raw_socket_that_is_connected_without_a_port():
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 89)
    s.connect(('127.0.0.1', 0))
    yield
    raise AssertionError('it was refused')


def optioned(family_, type_, protocol, level, name, value):
    s = socket.socket(family_, type_, protocol)
    s.setsockopt(level, name, value)
    yield from keeps(lambda: s.getsockopt(level, name))


KINDS['raw_checksum'] = lambda: optioned(10, 3, 89, 255, 7, 4)
KINDS['raw_header'] = lambda: optioned(2, 3, 255, 0, 3, 1)
KINDS['udp_lite'] = lambda: optioned(2, 2, 136, 136, 10, 8)
KINDS['socket_filter'] = lambda: filtered(False)
KINDS['locked_socket_filter'] = lambda: filtered(True)


def family(number, type_, protocol=0, prepare=None):
    s = socket.socket(number, type_, protocol)
    if prepare:
        prepare(s)
    yield
    s.getsockname()
    raise AssertionError('nothing tells what has become of it')


KINDS['vsock'] = lambda: family(40, 1, 0, lambda s: (s.bind((0xffffffff, 7102)), s.listen()))
KINDS['xdp'] = lambda: family(44, 3)


@kind
def ping_socket():
    with open('/proc/sys/net/ipv4/ping_group_range', 'w') as f:
        f.write('0 100')
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    s.bind(('127.0.0.1', 77))
    before = s.getsockname()
    yield
    same(s.getsockname(), before)


@kind
def sysctl_of_unix_sockets():
    os.mkdir('/tmp/proc')
    call(libc.mount(b'proc', b'/tmp/proc', b'proc', 0, None))
    path = '/tmp/proc/sys/net/unix/max_dgram_qlen'
    with open(path, 'w') as f:
        f.write('77')
    yield from keeps(lambda: text(path))


def netlink(protocol, group):
    s = socket.socket(16, 3, protocol)
    s.bind((0, group))
    before = s.getsockname()
    yield
    same(s.getsockname(), before)


# The kernel tells group 1 of events of the whole machine, which would wait unread; group 2 is udev's.
for name, (protocol, group) in dict(generic=(16, 0), uevent=(15, 2), netfilter=(12, 0), audit=(9, 0), diag=(4, 0), connector=(11, 0), xfrm=(6, 0)).items():
    KINDS['netlink_' + name] = lambda p=protocol, g=group: netlink(p, g)

def stream(path, type_=1):
    s = socket.socket(1, type_)
    s.bind(path)
    if type_ != 2:
        s.listen(5)
    return s


def reached(path, listener):
    """Whether who connects to a path reaches this socket."""
    client = socket.socket(1, listener.type)
    client.settimeout(5)
    client.connect(path)
    if listener.type == socket.SOCK_DGRAM:
        client.send(b'x')
        return listener.recv(9) == b'x'
    listener.settimeout(5)
    return listener.accept()[0].getsockopt(1, 4) == 0


def bound_at(name, act=lambda: None, at=None, directory='/', type_=1, also=()):
    """A Unix socket that was bound to a name; something is done to its file, which is at `at` then, and at other names; no other files come."""
    os.chdir(directory)
    s = stream(name, type_)
    act()
    os.chdir('/')
    around = os.path.dirname(os.fsencode(at or name))
    look = lambda: sorted(os.listdir(around)) if os.path.isdir(around) else None
    before = look()
    yield
    same(os.fsencode(s.getsockname()), os.fsencode(name))
    same(look(), before)
    if not at:
        same(os.path.exists(name), False)
        return
    for path in (at, *also):
        same(reached(path, s), True)


def new_directory(path):
    os.makedirs(path)
    return path


SOCKETS = '/tmp/sockets/'
KINDS['socket_file'] = lambda: bound_at(new_directory(SOCKETS + 'plain') + '/s', at=SOCKETS + 'plain/s')
KINDS['socket_file_of_a_symbolic_link'] = lambda: bound_at(linked_directory() + '/s', at=SOCKETS + 'linked/s')
KINDS['socket_file_of_a_relative_name'] = lambda: bound_at('./s', at=SOCKETS + 'relative/s', directory=new_directory(SOCKETS + 'relative'))
KINDS['socket_file_of_the_parent'] = lambda: bound_at('../s', at=SOCKETS + 'family/s', directory=new_directory(SOCKETS + 'family/below'))
KINDS['socket_file_not_utf8'] = lambda: bound_at(os.fsencode(new_directory(SOCKETS + 'bytes')) + b'/\xff\x01\n', at=os.fsencode(SOCKETS) + b'bytes/\xff\x01\n')
KINDS['socket_file_removed'] = lambda: bound_at(new_directory(SOCKETS + 'removed') + '/s', lambda: os.unlink(SOCKETS + 'removed/s'))
KINDS['socket_file_removed_with_directory'] = \
    lambda: bound_at(new_directory(SOCKETS + 'gone') + '/s', lambda: (os.unlink(SOCKETS + 'gone/s'), os.rmdir(SOCKETS + 'gone')))
KINDS['socket_file_renamed'] = \
    lambda: bound_at(new_directory(SOCKETS + 'renamed') + '/s', lambda: os.rename(SOCKETS + 'renamed/s', SOCKETS + 'renamed/t'), SOCKETS + 'renamed/t')
KINDS['socket_file_of_datagrams_renamed'] = \
    lambda: bound_at(new_directory(SOCKETS + 'dgram') + '/s', lambda: os.rename(SOCKETS + 'dgram/s', SOCKETS + 'dgram/t'), SOCKETS + 'dgram/t', type_=2)
KINDS['socket_file_renamed_and_replaced'] = lambda: bound_at(new_directory(SOCKETS + 'replaced') + '/s', replace, SOCKETS + 'replaced/t')
KINDS['socket_file_in_a_renamed_directory'] = \
    lambda: bound_at(new_directory(SOCKETS + 'one') + '/s', lambda: os.rename(SOCKETS + 'one', SOCKETS + 'two'), SOCKETS + 'two/s')
KINDS['socket_file_linked'] = \
    lambda: bound_at(new_directory(SOCKETS + 'twice') + '/s', lambda: os.link(SOCKETS + 'twice/s', SOCKETS + 'twice/t'), SOCKETS + 'twice/t', also=[SOCKETS + 'twice/s'])
KINDS['socket_file_linked_and_removed'] = lambda: bound_at(new_directory(SOCKETS + 'moved') + '/s', link_and_remove, SOCKETS + 'moved/t')
KINDS['socket_file_of_a_relative_name_renamed'] = \
    lambda: bound_at('s.tmp', lambda: os.rename('s.tmp', 's'), SOCKETS + 'relative-renamed/s', new_directory(SOCKETS + 'relative-renamed'))
KINDS['socket_file_of_a_relative_name_in_a_renamed_directory'] = \
    lambda: bound_at('x/s', lambda: os.rename('x', 'y'), SOCKETS + 'deep/y/s', os.path.dirname(new_directory(SOCKETS + 'deep/x')))
KINDS['socket_file_of_a_relative_name_linked_and_removed'] = \
    lambda: bound_at('s.1', lambda: (os.link('s.1', 's'), os.unlink('s.1')), SOCKETS + 'relative-linked/s', new_directory(SOCKETS + 'relative-linked'))
KINDS['socket_file_linked_elsewhere'] = \
    lambda: bound_at(new_directory(SOCKETS + 'far') + '/s', lambda: os.link(SOCKETS + 'far/s', new_directory(SOCKETS + 'away') + '/s'), SOCKETS + 'far/s')


@kind
def socket_files_of_one_name():
    directory = new_directory(SOCKETS + 'same')
    kept = [renamed_once(directory, name) for name in 'ab']
    yield
    for name, s in kept:
        same(reached(name, s), True)


def renamed_once(directory, name):
    s = stream(directory + '/s')
    os.rename(directory + '/s', f'{directory}/{name}')
    return f'{directory}/{name}', s


@kind
def socket_file_renamed_with_connections():
    path = new_directory(SOCKETS + 'connected') + '/s'
    s = stream(path)
    client = socket.socket(1)
    client.connect(path)
    accepted = s.accept()[0]
    os.rename(path, path + '.final')
    os.chmod(path + '.final', 0o621)
    os.chown(path + '.final', 5, 6)
    yield
    client.send(b'x')
    same(accepted.recv(9), b'x')
    is_ = os.stat(path + '.final')
    same((is_.st_mode & 0o777, is_.st_uid, is_.st_gid, reached(path + '.final', s)), (0o621, 5, 6, True))


KINDS['socket_file_hidden'] = lambda: bound_at(new_directory(SOCKETS + 'hidden') + '/s', hide, SOCKETS + 'hidden/s')
KINDS['socket_abstract_of_one_byte'] = lambda: bound_at(b'\0k', at=b'\0k')
KINDS['socket_abstract_of_all_bytes'] = lambda: bound_at(b'\0' + b'k' * 107, at=b'\0' + b'k' * 107)
KINDS['socket_of_packets'] = lambda: bound_at(b'\0packets', at=b'\0packets', type_=5)


def linked_directory():
    os.symlink(new_directory(SOCKETS + 'linked'), '/tmp/linked-directory')
    return '/tmp/linked-directory'


def replace():
    os.rename(SOCKETS + 'replaced/s', SOCKETS + 'replaced/t')
    open(SOCKETS + 'replaced/s', 'w').close()


def link_and_remove():
    os.link(SOCKETS + 'moved/s', SOCKETS + 'moved/t')
    os.unlink(SOCKETS + 'moved/s')


def hide():
    call(libc.mount(b'none', (SOCKETS + 'hidden').encode(), b'tmpfs', 0, None))


@kind
def socket_name_without_an_end():
    path = SOCKETS.encode().ljust(108, b'n')
    os.makedirs(SOCKETS, exist_ok=True)
    s = socket.socket(1, 1)
    call(libc.bind(s.fileno(), struct.pack('H', 1) + path, 110))
    yield from keeps(lambda: s.getsockname())


@kind
def packets_of_unix():
    one, other = socket.socketpair(1, 5)
    for message in (b'ab', b'c'):
        one.send(message)
    one.close()
    yield
    same([other.recv(9), other.recv(9), other.recv(9)], [b'ab', b'c', b''])


def empty_message(type_, messages):
    one, other = socket.socketpair(1, type_)
    for message in messages:
        one.send(message)
    yield
    other.settimeout(5)
    same([other.recv(9) for _ in messages], messages)


KINDS['empty_datagram_of_unix'] = lambda: empty_message(2, [b'', b'x'])


def asked_for(option, type_=2):
    one, other = socket.socketpair(1, type_)
    other.setsockopt(1, option, 1)
    one.send(b'x')
    yield
    same(len(other.recvmsg(9, 99)[1]), 1)


# SO_PASSCRED, SO_TIMESTAMP
KINDS['unread_with_credentials'] = lambda: asked_for(16)
KINDS['unread_stream_with_credentials'] = lambda: asked_for(16, 1)
KINDS['unread_with_time'] = lambda: asked_for(29)


def sent(*fds):
    """Descriptors that are nowhere but in the queue of a socket."""
    one, other = socket.socketpair(1, 1)
    socket.send_fds(one, [b'x'], fds)
    for fd in set(fds):
        os.close(fd)
    yield
    same(len(socket.recv_fds(other, 9, 300)[1]), len(fds))


def sent_watch():
    fd = call(libc.inotify_init1(0))
    call(libc.inotify_add_watch(fd, b'/tmp', 0x100))
    yield from sent(fd)


KINDS['sent_file'] = lambda: sent(os.open('/tmp/sent', os.O_RDWR | os.O_CREAT))
KINDS['sent_eventfd'] = lambda: sent(os.eventfd(5))
KINDS['sent_memfd'] = lambda: sent(os.memfd_create('sent'))
KINDS['sent_socket'] = lambda: sent(stream(b'\0sent').detach())
KINDS['sent_watch'] = sent_watch
KINDS['sent_timer'] = lambda: sent(call(libc.timerfd_create(1, 0)))
KINDS['sent_terminal'] = lambda: sent(*os.openpty())
KINDS['sent_more_than_252'] = lambda: sent(*[os.open('/dev/null', os.O_RDONLY)] * 253)


@kind
def mount_namespace():
    """A mount namespace of its own, with all mounts of the container in it, and one that the container has not."""
    if libc.unshare(0x20000):
        raise Missing('no mount namespace: ' + os.strerror(ctypes.get_errno()))
    call(libc.mount(None, b'/', None, 1 << 18 | 16384, None))
    os.makedirs('/tmp/own', exist_ok=True)
    call(libc.mount(b'own', b'/tmp/own', b'tmpfs', 6, b'size=1m'))
    with open('/tmp/own/file', 'w') as f:
        f.write('mine')
    os.setxattr('/tmp/own/file', 'trusted.own', b'mine')
    os.utime('/tmp/own/file', ns=(7, 123456789))
    own = lambda: (os.stat('/tmp/own/file').st_mtime_ns, os.getxattr('/tmp/own/file', 'trusted.own'), text('/tmp/own/file'))
    mounts = lambda: sorted((words[3], words[4], words[5]) for words in map(str.split, text('/proc/self/mountinfo').splitlines()))
    yield from keeps(lambda: (mounts(), own()))


@kind
def seccomp_strict():
    """A child in strict mode, in which it may read and write only."""
    (asked, ask), (answer, answered) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        prctl(22, 1)
        while True:
            os.write(answered, os.read(asked, 1))
    mode = lambda: [line for line in text(f'/proc/{child}/status').splitlines() if line.startswith('Seccomp:')]
    def echo():
        os.write(ask, b'x')
        return os.read(answer, 1), mode()
    yield from keeps(echo)


@kind
def netlink_connected():
    s = socket.socket(16, 3, 0)
    s.bind((0, 0))
    s.connect((0, 0))
    name = lambda: call(libc.getpeername(s.fileno(), buffer, ctypes.byref(ctypes.c_int(12)))) or buffer.raw
    buffer = ctypes.create_string_buffer(12)
    yield from keeps(name)


@kind
def netlink_connected_to_group_32():
    s = socket.socket(16, 3, 0)
    s.bind((0, 0))
    s.connect((0, 1 << 31))
    yield from keeps(s.getpeername)


def netfilter(kind_, attribute):
    """Has packets of the firewall handed to it."""
    s = socket.socket(16, 3, 12)
    s.bind((0, 0))
    message = struct.pack('BBH', 0, 0, socket.htons(3)) + attribute
    s.send(struct.pack('IHHII', 16 + len(message), kind_, 5, 1, 0) + message)
    s.settimeout(5)
    error = struct.unpack_from('i', s.recv(99), 16)[0]
    if error:
        raise OSError(-error, os.strerror(-error))
    yield
    raise AssertionError('it was refused')


KINDS['netfilter_queue'] = lambda: netfilter(3 << 8 | 2, struct.pack('HHBBH', 8, 1, 1, 0, 0))
KINDS['netfilter_log'] = lambda: netfilter(4 << 8 | 1, struct.pack('HHBxxx', 5, 1, 1))


@kind
def netlink_group_40():
    s = socket.socket(16, 3, 0)
    s.bind((0, 0))
    s.setsockopt(270, 1, 33)
    yield from keeps(lambda: s.getsockopt(270, 9, 8))


@kind
def packet_socket_options():
    s = socket.socket(17, 3, socket.htons(3))
    s.bind(('lo', 3))
    s.setsockopt(263, 8, 1)
    s.setsockopt(263, 10, 2)
    s.setsockopt(263, 12, 5)
    yield from keeps(lambda: [s.getsockopt(263, n) for n in (8, 10, 12)])


@kind
def packet_fanout():
    s = socket.socket(17, 3, socket.htons(3))
    s.bind(('lo', 3))
    s.setsockopt(263, 18, 7)
    yield from keeps(lambda: s.getsockopt(263, 18))


def packet_option(name, value):
    s = socket.socket(17, 3, socket.htons(3))
    s.bind(('lo', 3))
    s.setsockopt(263, name, value)
    yield from keeps(lambda: s.getsockopt(263, name))


for name, (number, value) in dict(origdev=(9, 1), vnet_hdr=(15, 1), tx_has_off=(19, 1), qdisc_bypass=(20, 1), ignore_outgoing=(23, 1),
                                  vnet_hdr_size=(24, 12)).items():
    KINDS['packet_' + name] = lambda n=number, v=value: packet_option(n, v)


def packet_members(*requests):
    s = socket.socket(17, 3, socket.htons(3))
    s.bind(('lo', 3))
    for request in requests:
        s.setsockopt(263, 1, struct.pack('iHH8s', 1, request, 0, b''))
    yield from keeps(lambda: s.getsockname())


KINDS['packet_memberships'] = lambda: packet_members(1, 2)
KINDS['packet_membership_twice'] = lambda: packet_members(1, 1)


def device(path, flags=os.O_RDWR):
    fd = os.open(path, flags)
    yield
    os.fstat(fd)
    os.readlink(f'/proc/self/fd/{fd}')


for path in ['kvm', 'fuse', 'loop-control', 'kmsg', 'rtc0', 'urandom', 'random', 'full', 'vhost-net', 'uinput', 'hpet', 'mem', 'port', 'udmabuf',
             'userfaultfd', 'autofs', 'ptmx', 'tty', 'console', 'cpu_dma_latency', 'btrfs-control', 'zero', 'snapshot', 'mapper/control', 'net/tun', 'vsock']:
    KINDS['dev_' + path.replace('/', '_').replace('-', '_')] = lambda p=path: device('/dev/' + p)
for path in ['self/mem', 'self/pagemap', 'self/ns/net', 'self/maps', 'self/task', 'self/fdinfo', 'self/root', 'self/exe', 'self/comm', 'self/mountinfo',
             'self/oom_score_adj', 'self/cgroup', 'kmsg', 'sys/kernel/hostname', 'sysrq-trigger', 'net/tcp', 'self/net', 'pressure/memory', 'self/attr/current', 'self/environ', 'self/clear_refs']:
    KINDS['proc_' + path.replace('/', '_').replace('-', '_')] = \
        lambda p=path: device('/proc/' + p, os.O_WRONLY if p in ('sysrq-trigger', 'self/clear_refs') else os.O_RDONLY)
for path in ['kernel/mm', 'kernel/mm/transparent_hugepage/enabled', 'class/net/lo/mtu', 'class/net', 'fs/cgroup', 'devices']:
    KINDS['sys_' + path.replace('/', '_')] = lambda p=path: device('/sys/' + p, os.O_RDONLY)


@kind
def mount_tree():
    path = ctypes.create_string_buffer(b'/tmp')
    fd = syscall(428, -100, path, 1)
    yield
    raise AssertionError('nothing tells what has become of it')


def mounted_here(name, source=b'none', type_=b'tmpfs', flags=0):
    """The options of a mount, its type and what the type's are."""
    path = '/tmp/mounted/' + name
    os.makedirs(path)
    call(libc.mount(source, path.encode(), type_, flags, None))
    lines = lambda: [line.split() for line in text('/proc/self/mountinfo').splitlines()]
    yield from keeps(lambda: [(line[5], line[line.index('-') + 1]) for line in lines() if line[4] == path])


KINDS['mount_noatime'] = lambda: mounted_here('mount_noatime', flags=1024 | 2 | 4 | 8)
KINDS['mount_nosymfollow'] = lambda: mounted_here('mount_nosymfollow', flags=256)
KINDS['mount_of_proc'] = lambda: mounted_here('mount_of_proc', type_=b'proc')
KINDS['mount_of_ramfs'] = lambda: mounted_here('mount_of_ramfs', type_=b'ramfs')
KINDS['mount_of_hugetlbfs'] = lambda: mounted_here('mount_of_hugetlbfs', type_=b'hugetlbfs')


def bound_file(name, make, after=lambda path: None):
    """Another file shows what was made."""
    os.makedirs('/tmp/mounted', exist_ok=True)
    path, place = '/tmp/shown-' + name, '/tmp/mounted/' + name
    kept = make(path)
    open(place, 'w').close()
    call(libc.mount(path.encode(), place.encode(), None, 4096, None))
    after(path)
    return place, kept


def written(path):
    with open(path, 'w') as f:
        f.write('content')


@kind
def mount_of_a_file():
    path, _ = bound_file('mount_of_a_file', written)
    yield from keeps(lambda: text(path))


@kind
def mount_of_a_removed_file():
    path, _ = bound_file('mount_of_a_removed_file', written, os.unlink)
    yield from keeps(lambda: text(path))


@kind
def mount_of_a_socket():
    path, listener = bound_file('mount_of_a_socket', stream)
    yield
    same(reached(path, listener), True)


@kind
def mount_of_a_fifo():
    path, _ = bound_file('mount_of_a_fifo', os.mkfifo)
    yield from keeps(lambda: os.stat(path).st_mode)


@kind
def mount_of_a_namespace():
    path = '/tmp/mounted/mount_of_a_namespace'
    os.makedirs('/tmp/mounted', exist_ok=True)
    open(path, 'w').close()
    call(libc.mount(b'/proc/self/ns/uts', path.encode(), None, 4096, None))
    yield from keeps(lambda: os.stat(path).st_ino == os.stat('/proc/self/ns/uts').st_ino)


@kind
def timer_cancelled_on_set():
    fd = syscall(283, 0, 0)
    syscall(286, fd, 3, struct.pack('qqqq', 0, 0, int(time.time()) + 10000, 0), 0)
    yield
    info = text(f'/proc/self/fdinfo/{fd}')
    same('settime flags: 03' in info, True, info)


@kind
def timer_of_boot_time():
    fd = syscall(283, 7, 0)
    syscall(286, fd, 0, struct.pack('qqqq', 0, 0, 10000, 0), 0)
    yield
    info = text(f'/proc/self/fdinfo/{fd}')
    same('clockid: 7' in info, True, info)


@kind
def timer_of_alarm():
    fd = syscall(283, 9, 0)
    yield
    info = text(f'/proc/self/fdinfo/{fd}')
    same('clockid: 9' in info, True, info)


@kind
def posix_timer_overrun():
    signal.pthread_sigmask(signal.SIG_BLOCK, [45])
    event = struct.pack('QiiQQQQQQ', 0, 45, 0, 0, 0, 0, 0, 0, 0)
    timer = ctypes.c_int()
    syscall(222, 1, event, ctypes.byref(timer))
    syscall(223, timer.value, 0, struct.pack('qqqq', 0, 1000000, 0, 1000000), 0)
    time.sleep(0.3)
    yield
    signal.sigtimedwait([45], 2)
    overrun = syscall(225, timer.value)
    same(overrun > 200, True, f'{overrun} overruns:')


def epolled(events):
    reader, writer = os.pipe()
    poll = select.epoll()
    poll.register(reader, events)
    os.write(writer, b'x')
    first = poll.poll(0)
    yield
    same(len(first), 1)
    return poll, reader, writer


@kind
def epoll_edge_triggered():
    rest = yield from epolled(select.EPOLLIN | select.EPOLLET)
    poll, reader, writer = rest
    same(len(poll.poll(0)) <= 1, True)
    os.write(writer, b'y')
    same(len(poll.poll(0)), 1)


@kind
def epoll_one_shot():
    poll, reader, writer = yield from epolled(select.EPOLLIN | select.EPOLLONESHOT)
    same(poll.poll(0), [])


@kind
def epoll_parameters():
    poll = select.epoll()
    fcntl.ioctl(poll, 0x40088a01, struct.pack('IHBB', 100, 8, 0, 0))
    yield from keeps(lambda: fcntl.ioctl(poll, 0x80088a02, b'\0' * 8))


@kind
def inotify_one_shot():
    os.makedirs('/tmp/watched', exist_ok=True)
    fd = call(libc.inotify_init())
    call(libc.inotify_add_watch(fd, b'/tmp/watched', 0x80000000 | 0x100 | 0x04000000))
    yield
    open('/tmp/watched/new', 'w').close()
    same(len(os.read(fd, 4096)) > 0, True)
    open('/tmp/watched/newer', 'w').close()
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    try:
        left = os.read(fd, 4096)
    except BlockingIOError:
        left = b''
    same(b'newer' in left, False)


def watched(prepare, act):
    """An inotify watch; how it is made says `prepare`, which returns what `act` needs."""
    fd = call(libc.inotify_init())
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    thing = prepare(fd)
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        pass
    yield
    act(thing)
    same(len(os.read(fd, 4096)) > 0, True)


def fifo(fd):
    os.mkfifo('/tmp/fifo')
    call(libc.inotify_add_watch(fd, b'/tmp/fifo', 0x4))


def hidden(fd):
    file = os.open('/tmp/renamed', os.O_RDWR | os.O_CREAT)
    call(libc.inotify_add_watch(fd, b'/tmp/renamed', 0x2))
    os.rename('/tmp/renamed', '/tmp/other-name')
    return file


def removed(make, remove, path):
    """Watches what has lost its name and is open."""
    def prepare(fd):
        make(path)
        file = os.open(path, os.O_RDONLY)
        call(libc.inotify_add_watch(fd, path.encode(), 0x4 | 0x1))
        remove(path)
        return file
    return prepare


def bound(fd):
    server = socket.socket(socket.AF_UNIX)
    server.bind('/tmp/watched-socket')
    call(libc.inotify_add_watch(fd, b'/tmp/watched-socket', 0x4))
    return server


def linked(fd):
    os.symlink('/tmp', '/tmp/watched-link')
    call(libc.inotify_add_watch(fd, b'/tmp/watched-link', 0x02000000 | 0x4))


def touch(path):
    open(path, 'w').close()


KINDS['watch_of_a_removed_file'] = \
    lambda: watched(removed(touch, os.unlink, '/tmp/watched-removed'), lambda f: os.fchmod(f, 0o600))
KINDS['watch_of_a_removed_directory'] = \
    lambda: watched(removed(os.mkdir, os.rmdir, '/tmp/watched-removed-directory'), lambda f: os.fchmod(f, 0o700))
KINDS['watch_of_a_socket'] = lambda: watched(bound, lambda _: os.chmod('/tmp/watched-socket', 0o600))
KINDS['watch_of_a_symbolic_link'] = lambda: watched(linked, lambda _: os.utime('/tmp/watched-link', (1, 1), follow_symlinks=False))
KINDS['watch_of_dev_pts'] = lambda: watched(lambda fd: call(libc.inotify_add_watch(fd, b'/dev/pts', 0x4)), lambda _: os.chmod('/dev/pts', 0o755))
KINDS['watch_of_dev_mqueue'] = lambda: watched(lambda fd: call(libc.inotify_add_watch(fd, b'/dev/mqueue', 0x100)), lambda _: call(libc.mq_open(b'/new', os.O_CREAT | os.O_RDWR, 0o600, None)))


def mounted(directory):
    os.mkdir(directory)
    call(libc.mount(b'none', directory.encode(), b'tmpfs', 0, None))
    return directory


def fanotify(flags, mark, directory, unread=False):
    """A mark of fanotify, with an event that waits or without."""
    path = f'{directory}/marked-{os.getpid()}'
    touch(path)
    fd = syscall(300, 0x2 | flags, 0)
    syscall(301, fd, 0x1 | mark, 0x20, -100, ctypes.create_string_buffer(path.encode()))
    if unread:
        open(path).close()

    def marks():
        lines = [line.split() for line in text(f'/proc/self/fdinfo/{fd}').splitlines() if line.startswith('fanotify')]
        return [[word for word in line if word.split(':')[0] in ('fanotify', 'flags', 'event-flags', 'mflags', 'mask')] for line in lines]
    before = marks()
    yield
    same(marks(), before)
    open(path).close()
    same(len(os.read(fd, 4096)) > 0, True)


@kind
def fanotify_of_a_removed_file():
    path = '/tmp/marked-and-removed'
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fd = syscall(300, 0x2, 0)
    syscall(301, fd, 0x1, 0x20, -100, ctypes.create_string_buffer(path.encode()))
    os.unlink(path)
    yield
    raise AssertionError('it was refused')


KINDS['fanotify_of_a_file'] = lambda: fanotify(0, 0, '/tmp')
KINDS['fanotify_of_a_mount'] = lambda: fanotify(0, 0x10, mounted('/tmp/marked-mount'))
KINDS['fanotify_of_a_filesystem'] = lambda: fanotify(0, 0x100, mounted('/tmp/marked-filesystem'))
KINDS['fanotify_with_names'] = lambda: fanotify(0x600, 0, '/tmp')
KINDS['fanotify_unread'] = lambda: fanotify(0, 0, '/tmp', True)


def overmounted(make, flags):
    """Something that is open in a directory on which another filesystem was mounted."""
    directory = '/tmp/overmounted-' + make.__name__
    os.mkdir(directory)
    make(directory + '/it')
    fd = os.open(directory + '/it', flags)
    call(libc.mount(b'none', directory.encode(), b'tmpfs', 0, None))
    before = os.fstat(fd).st_mode
    yield
    same(os.fstat(fd).st_mode, before)
    call(libc.umount2(directory.encode(), 0))
    same(os.stat(directory + '/it').st_mode, before)


KINDS['overmounted_file'] = lambda: overmounted(touch, os.O_RDONLY)
KINDS['overmounted_fifo'] = lambda: overmounted(os.mkfifo, os.O_RDWR)
KINDS['overmounted_directory'] = lambda: overmounted(os.mkdir, os.O_RDONLY)


def told(child):
    """What a child, that ends then, writes into a pipe."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(lambda number: os.write(writer, struct.pack('i', number)))
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    return struct.unpack('i', os.read(reader, 4))[0]


def orphan(tell):
    """Begins a session, and leaves a process in it."""
    os.setsid()
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    tell(pid)


def orphaned(reaper):
    if reaper:
        prctl(36, 1)
    pid = told(orphan)
    yield from keeps(lambda: (os.getsid(pid), os.getpgid(pid)))


KINDS['orphan'] = lambda: orphaned(False)
KINDS['orphan_of_a_subreaper'] = lambda: orphaned(True)


@kind
def nested_processes():
    """Each is the child of the one before. Each has what the ones above have written, and a page of its own."""
    depth, page = 40, 4096
    answer, answered = os.pipe()
    written = bytearray(b'all' * depth * page)
    level = 0
    def tell(*_):
        os.write(answered, struct.pack('IIII', level, os.getpid(), os.getppid(), zlib.crc32(written)))
    while level < depth and os.fork() == 0:
        level += 1
        written[level * page] = level
        signal.signal(signal.SIGUSR1, tell)
        tell()
    if level:
        while True:
            signal.pause()
    told = lambda: sorted(struct.unpack('IIII', os.read(answer, 16)) for _ in range(depth))
    before = told()
    def ask():
        for _, pid, _, _ in before:
            os.kill(pid, signal.SIGUSR1)
        return told()
    same(ask(), before)
    same(len({sum for _, _, _, sum in before}), depth)
    yield
    same(ask(), before)


@kind
def born_before_the_session():
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    before = os.getsid(pid)
    os.setsid()
    yield from keeps(lambda: (os.getsid(pid) == before, os.getsid(0) == os.getpid()))


@kind
def group_that_its_leader_has_left():
    os.setsid()
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        os.setpgid(pid, 0)
        pids.append(pid)
    one, two, three = pids
    os.setpgid(two, one)
    os.setpgid(one, three)
    yield from keeps(lambda: [os.getpgid(pid) for pid in pids])


KINDS['watch_of_a_fifo'] = lambda: watched(fifo, lambda _: os.chmod('/tmp/fifo', 0o600))
KINDS['watch_of_a_renamed_file'] = lambda: watched(hidden, lambda f: os.write(f, b'x'))
KINDS['watch_of_dev'] = lambda: watched(lambda fd: call(libc.inotify_add_watch(fd, b'/dev', 0x100)), lambda _: open('/dev/zzz', 'w').close())
KINDS['watch_of_dev_null'] = lambda: watched(lambda fd: call(libc.inotify_add_watch(fd, b'/dev/null', 0x2)), lambda _: open('/dev/null', 'w').write('x'))
KINDS['watch_of_sys'] = lambda: watched(lambda fd: call(libc.inotify_add_watch(fd, b'/sys/class', 0x4)), lambda _: os.chmod('/sys/class', 0o755))
KINDS['watch_of_cgroup'] = lambda: watched(lambda fd: call(libc.inotify_add_watch(fd, b'/sys/fs/cgroup', 0x4)), lambda _: os.chmod('/sys/fs/cgroup', 0o755))


def say_when_asked(its, tty, terminal):
    """Says what a session sees of its terminal, until nobody asks any more."""
    while its.recv(1):
        its.send(f'{os.tcgetpgrp(tty) == os.getpid()} {os.ttyname(terminal)}'.encode())
    os._exit(0)


def begin_session():
    """Leads a session with a terminal of which this process has both ends."""
    os.setsid()
    master, slave = os.openpty()
    os.close(os.open(os.ttyname(slave), os.O_RDWR))
    return master, slave


def session_of_its_own(name):
    """A child leads a session with this terminal, and says what it sees of it."""
    ours, its = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        os.setsid()
        terminal = os.open(name, os.O_RDWR)
        tty = os.open('/dev/tty', os.O_RDWR)
        say_when_asked(its, tty, terminal)
    its.close()
    return ours


def answer(child):
    child.send(b'?')
    return child.recv(100)


@kind
def terminal_by_dev_tty():
    parent, child = socket.socketpair()
    if os.fork() == 0:
        master, slave = begin_session()
        say_when_asked(child, os.open('/dev/tty', os.O_RDWR), slave)
    child.close()
    yield from keeps(lambda: answer(parent))


@kind
def terminal_by_dev_tty_and_master():
    master, slave = os.openpty()
    child = session_of_its_own(os.ttyname(slave))
    answer(child)
    yield
    raise AssertionError('it was refused')


@kind
def terminal_by_dev_tty_and_slave():
    # The master's process comes after it.
    parent, reader = socket.socketpair()
    if os.fork() == 0:
        master, slave = begin_session()
        if os.fork() == 0:
            os.close(slave)
            while True:
                time.sleep(1)
        os.close(master)
        say_when_asked(reader, os.open('/dev/tty', os.O_RDWR), slave)
    reader.close()
    yield from keeps(lambda: answer(parent))


@kind
def exclusive_terminal():
    master, slave = os.openpty()
    fcntl.ioctl(slave, 0x540C)
    yield from keeps(lambda: fcntl.ioctl(slave, 0x80045440, b'\0' * 4))


@kind
def packet_terminal():
    master, slave = os.openpty()
    fcntl.ioctl(master, 0x5420, struct.pack('i', 1))
    yield from keeps(lambda: fcntl.ioctl(master, 0x80045438, b'\0' * 4))


@kind
def locked_termios():
    master, slave = os.openpty()
    lock = bytearray(60)
    lock[12] = 8
    fcntl.ioctl(slave, 0x5457, bytes(lock))
    yield from keeps(lambda: fcntl.ioctl(slave, 0x5456, b'\0' * 60))


@kind
def stopped_terminal():
    import termios
    master, slave = os.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    os.set_blocking(slave, False)
    yield
    try:
        os.write(slave, b'x')
    except BlockingIOError:
        return
    os.set_blocking(master, False)
    try:
        got = os.read(master, 10)
    except BlockingIOError:
        return
    raise AssertionError(f'{got!r} came through')


@kind
def stopped_terminal_with_output():
    import termios
    master, slave = os.openpty()
    os.write(slave, b'out')
    termios.tcflow(slave, termios.TCOOFF)
    yield
    raise AssertionError('nothing tells what has become of it')


@kind
def unread_state_of_terminal():
    import termios
    master, slave = os.openpty()
    fcntl.ioctl(master, 0x5420, struct.pack('i', 1))
    termios.tcflush(slave, termios.TCOFLUSH)
    same(select.select([], [], [master], 0)[2], [master])
    yield
    raise AssertionError('nothing tells what has become of it')


def end_of(pid):
    """How a child ended: a status, or a signal less than zero. It stays a zombie."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


@kind
def ends_of_zombies():
    """So few that criu makes them; one of them led a session that goes on without it."""
    def start(status):
        pid = os.fork()
        if pid == 0:
            if status >= 0:
                os._exit(status)
            if status != -signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        return pid
    ends = [0, 1, 127, 128, 200, 255, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGRTMIN, -signal.SIGRTMAX]
    pids = [start(status) for status in ends]
    leader = os.fork()
    if leader == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pause()
        os._exit(143)
    look = lambda: [end_of(pid) for pid in pids + [leader]]
    yield look()
    same(look(), ends + [143])


@kind
def zombie_with_a_core_file():
    import resource
    pid = os.fork()
    if pid == 0:
        os.mkdir('/tmp/core-file')
        os.chdir('/tmp/core-file')
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        except ValueError:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGABRT)
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if end.si_code != os.CLD_DUMPED:
        raise Missing('no core file is written here')
    yield


@kind
def zombies_that_descriptors_refer_to():
    def start(status):
        pid = os.fork()
        if pid == 0:
            os._exit(status)
        return pid
    pids = [start(130 + number) for number in range(20)]
    process = os.pidfd_open(pids[3])
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.fcntl(receiver, fcntl.F_SETOWN, pids[7])
    look = lambda: [end_of(pid) for pid in pids] + [fcntl.fcntl(receiver, fcntl.F_GETOWN) == pids[7]]
    yield look()
    same(look(), [130 + number for number in range(20)] + [True])
    same(select.select([process], [], [], 0)[0], [process])
    signal.pidfd_send_signal(process, 0)


def opened_shared_memory(mapped):
    """Shared memory without a name, opened by what the kernel tells of mappings."""
    memory = mmap.mmap(-1, 3 * 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fd = os.open(f'/proc/self/map_files/{address:x}-{address + 3 * 4096:x}', os.O_RDWR)
    if not mapped:
        call(libc.munmap(ctypes.c_void_p(address), 3 * 4096))
    os.pwrite(fd, b'hello', 4096 - 2)
    os.lseek(fd, 3, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    other = os.fork()
    if other == 0:
        while True:
            signal.pause()
    look = lambda: (os.pread(fd, 9, 4096 - 4), os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_CUR), fcntl.fcntl(fd, fcntl.F_GETFL))
    yield from keeps(look)
    os.write(fd, b'end')
    same(os.pread(fd, 3, 3 * 4096), b'end')
    if mapped:
        same(memory[4094:4099], b'hello')
        memory[0:3] = b'new'
        same(os.pread(fd, 3, 0), b'new')
        with open(f'/proc/{other}/mem', 'rb') as f:
            f.seek(address)
            same(f.read(3), b'new')


KINDS['shared_memory_that_is_open'] = lambda: opened_shared_memory(False)
KINDS['shared_memory_that_is_open_and_mapped'] = lambda: opened_shared_memory(True)


@kind
def many_zombies():
    """Of a process, and of a thread of it; some lead a group of their own."""
    def start(number):
        pid = os.fork()
        if pid == 0:
            if number % 3 == 0:
                os.setpgid(0, 0)
            with open('/proc/self/comm', 'w') as f:
                f.write(f'z) {number}')
            os._exit(number)
        return pid
    pids = [start(number) for number in range(60)]
    def by_thread():
        pids.extend(start(number) for number in range(60, 100))
        time.sleep(1000000)
    threading.Thread(target=by_thread, daemon=True).start()
    while len(pids) < 100:
        time.sleep(0.001)
    killed = os.fork()
    if killed == 0:
        signal.pause()
    os.kill(killed, signal.SIGKILL)
    def look(pid):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        name, rest = text(f'/proc/{pid}/stat').split('(', 1)[1].rsplit(') ', 1)
        state, parent, group, session = rest.split()[:4]
        return name, state, int(parent) == os.getpid(), int(group) == pid, int(session) == os.getsid(0)
    before = [look(pid) for pid in pids]
    yield
    same([look(pid) for pid in pids], before)
    same([os.waitpid(pid, 0) for pid in pids], [(pid, number << 8) for number, pid in enumerate(pids)])
    same(os.waitpid(killed, 0), (killed, signal.SIGKILL))


def stopped_child(act):
    """A child that a signal stops in `act`, in a process group of its own; continued, it looks at its memory and ends."""
    pid = os.fork()
    if pid == 0:
        content = os.urandom(1 << 16)
        copy = bytes(content)
        os.setpgid(0, 0)
        act()
        os._exit(7 if copy == content else 1)
    same(os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), True)
    yield
    same(text(f'/proc/{pid}/stat').rsplit(') ', 1)[1][0], 'T', 'it is')
    os.kill(pid, signal.SIGCONT)
    # Its parent is told once more of the stop.
    same(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 7)


@kind
def stopped_by_sigstop():
    yield from stopped_child(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@kind
def stopped_by_sigtstp():
    yield from stopped_child(lambda: os.kill(os.getpid(), signal.SIGTSTP))


@kind
def stopped_by_sigttin():
    yield from stopped_child(lambda: os.kill(os.getpid(), signal.SIGTTIN))


@kind
def stopped_by_sigttou():
    yield from stopped_child(lambda: os.kill(os.getpid(), signal.SIGTTOU))


@kind
def stopped_with_threads():
    def act():
        done = []
        threads = [threading.Thread(target=lambda: done.append(time.sleep(0.05))) for _ in range(5)]
        for thread in threads:
            thread.start()
        os.kill(os.getpid(), signal.SIGSTOP)
        for thread in threads:
            thread.join()
        same(len(done), 5)
    yield from stopped_child(act)


@kind
def stopped_and_never_waited_for():
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(7)
    while text(f'/proc/{pid}/stat').rsplit(') ', 1)[1][0] != 'T':
        time.sleep(0.001)
    yield
    found, status = os.waitpid(pid, os.WUNTRACED)
    same((found, os.WIFSTOPPED(status)), (pid, True))
    os.kill(pid, signal.SIGCONT)
    same(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 7)


@kind
def background_job_that_reads_its_terminal():
    """As `cat &` of a shell: it is stopped until it is in the foreground."""
    master, slave = os.openpty()
    leader = os.fork()
    if leader == 0:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.setsid()
        fcntl.ioctl(slave, 0x540e, 0)
        job = os.fork()
        if job == 0:
            os.setpgid(0, 0)
            os._exit(7 if os.read(slave, 10) == b'line\n' else 1)
        os.waitpid(job, os.WUNTRACED)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        os.write(slave, b'stopped')
        signal.sigwait([signal.SIGUSR1])
        os.tcsetpgrp(slave, job)
        os.kill(job, signal.SIGCONT)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
    same(os.read(master, 10), b'stopped')
    yield
    os.write(master, b'line\n')
    os.kill(leader, signal.SIGUSR1)
    same(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]), 7)


def led(act):
    """A child leads a session with a terminal of which this process has the master."""
    master, slave = os.openpty()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        fcntl.ioctl(slave, 0x540E, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        act(slave)
        os.write(writer, b'x')
        while True:
            signal.pause()
    os.read(reader, 1)
    os.close(slave)
    return pid, master


def job(slave, ends=False):
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    os.setpgid(pid, pid)
    os.tcsetpgrp(slave, pid)
    if ends:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def of_terminal(pid):
    """The session, the terminal and the group in the foreground."""
    return text(f'/proc/{pid}/stat').rsplit(')', 1)[1].split()[3:6]


def session(act):
    pid, master = led(act)
    yield from keeps(lambda: of_terminal(pid))


KINDS['terminal_with_a_job'] = lambda: session(job)
KINDS['terminal_whose_job_has_ended'] = lambda: session(lambda slave: job(slave, True))
KINDS['terminal_that_nobody_has_open'] = lambda: session(os.close)


@kind
def terminal_of_a_session_with_an_orphan_before_its_leader():
    master, slave = os.openpty()
    reader, writer = os.pipe()
    above = os.fork()
    if above == 0:
        leader = os.fork()
        if leader == 0:
            os.setsid()
            fcntl.ioctl(slave, 0x540E, 0)
            middle = os.fork()
            if middle == 0:
                if os.fork():
                    os._exit(0)
            else:
                os.waitpid(middle, 0)
                os.write(writer, b'x')
            while True:
                signal.pause()
        signal.pause()
    os.read(reader, 1)
    os.kill(above, 9)
    os.waitpid(above, 0)
    yield
    raise AssertionError('it was refused')


@kind
def terminal_whose_master_is_closed():
    master, slave = os.openpty()
    os.close(master)
    yield
    same(os.read(slave, 9), b'')


def left_terminal(output):
    master, slave = os.openpty()
    os.write(slave, output)
    os.close(slave)
    yield
    raise AssertionError('it was refused')


@kind
def terminal_whose_slave_is_closed():
    """Also one in packet mode, and one that is locked."""
    import termios
    terminals = [os.openpty() for _ in range(3)]
    mode = termios.tcgetattr(terminals[0][1])
    mode[3] ^= termios.ECHO
    termios.tcsetattr(terminals[0][1], termios.TCSANOW, mode)
    masters = [master for master, _ in terminals]
    fcntl.ioctl(masters[1], termios.TIOCPKT, struct.pack('i', 1))
    # TIOCSPTLCK
    fcntl.ioctl(masters[2], 0x40045431, struct.pack('i', 1))
    for _, slave in terminals:
        os.close(slave)
    # TIOCGPTN
    path = '/dev/pts/%d' % struct.unpack('i', fcntl.ioctl(masters[0], 0x80045430, bytes(4)))
    def state(master):
        watched = select.poll()
        watched.register(master, select.POLLIN)
        try:
            return watched.poll(0), os.read(master, 9)
        except OSError as error:
            return watched.poll(0), error.errno
    before = [state(master) for master in masters]
    yield before
    same([state(master) for master in masters], before)
    slave = os.open(path, os.O_RDWR | os.O_NOCTTY)
    same(termios.tcgetattr(slave), mode)
    os.write(slave, b'again')
    same(os.read(masters[0], 9), b'again')


KINDS['terminal_whose_slave_is_closed_with_output'] = lambda: left_terminal(b'last')


@kind
def terminal_with_an_end_of_input():
    master, slave = os.openpty()
    os.write(master, b'ab\x04')
    yield
    same(os.read(slave, 9), b'ab')


def second_devpts(number):
    own = [os.openpty() for _ in range(2 - number)]
    path = f'/tmp/pts{number}'
    os.mkdir(path)
    call(libc.mount(b'devpts', path.encode(), b'devpts', 0, b'newinstance,ptmxmode=666,mode=620'))
    master = os.open(path + '/ptmx', os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, 0x40045431, struct.pack('i', 0))
    slave = os.open(path + '/0', os.O_RDWR | os.O_NOCTTY)
    yield
    os.write(slave, b'x')
    same(os.read(master, 9), b'x')


KINDS['terminal_of_another_devpts'] = lambda: second_devpts(1)


@kind
def terminal_line_discipline():
    master, slave = os.openpty()
    fcntl.ioctl(slave, 0x5423, struct.pack('i', 3))
    yield from keeps(lambda: fcntl.ioctl(slave, 0x5424, b'\0' * 4))


@kind
def io_priority():
    syscall(251, 1, 0, 2 << 13 | 3)
    yield from keeps(lambda: syscall(252, 1, 0))


@kind
def scheduler_fifo():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(3))
    yield from keeps(lambda: (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority))


@kind
def memory_policy_of_a_mapping():
    address = memory()
    mask = ctypes.c_ulong(1)
    syscall(237, ctypes.c_ulong(address), 1 << 20, 2, ctypes.byref(mask), 64, 0)

    def look():
        mode, nodes = ctypes.c_int(), ctypes.c_ulong()
        syscall(239, ctypes.byref(mode), ctypes.byref(nodes), 64, ctypes.c_ulong(address), 2)
        return mode.value, nodes.value
    yield from keeps(look)


@kind
def robust_futexes():
    def look():
        head, size = ctypes.c_void_p(), ctypes.c_size_t()
        syscall(274, 0, ctypes.byref(head), ctypes.byref(size))
        return head.value, size.value
    yield from keeps(look)


@kind
def tid_address():
    def look():
        value = ctypes.c_void_p()
        prctl(40, ctypes.byref(value))
        return value.value
    yield from keeps(look)


@kind
def limits_of_all_kinds():
    import resource
    resource.setrlimit(resource.RLIMIT_RTTIME, (1000000, 2000000))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (70000, 80000))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (50, 60))
    yield from keeps(lambda: text('/proc/self/limits'))


@kind
def cpu_time():
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    before = time.process_time()
    yield
    same(time.process_time() >= before, True, f'{time.process_time()} s of CPU time after {before} s:')


@kind
def children_cpu_time():
    pid = os.fork()
    if pid == 0:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        os._exit(0)
    os.waitpid(pid, 0)
    before = os.times().children_user
    yield
    same(os.times().children_user >= before, True, f'{os.times().children_user} after {before}:')


@kind
def start_time():
    look = lambda: text('/proc/self/stat').rsplit(')', 1)[1].split()[19]
    before = look()
    yield
    same(look(), before)


@kind
def login_uid():
    with open('/proc/self/loginuid', 'w') as f:
        f.write('1000')
    yield from keeps(lambda: text('/proc/self/loginuid'))


@kind
def dumpable_zero():
    prctl(4, 0)
    yield from keeps(lambda: prctl(3))


@kind
def thread_name_of_others():
    ready = threading.Event()

    def run():
        prctl(15, ctypes.create_string_buffer(b'worker one'))
        ready.set()
        while True:
            time.sleep(1)
    threading.Thread(target=run, daemon=True).start()
    ready.wait()
    yield from keeps(lambda: sorted(text(f'/proc/self/task/{t}/comm') for t in os.listdir('/proc/self/task')))


@kind
def process_title():
    yield from keeps(lambda: (text('/proc/self/cmdline'), text('/proc/self/environ')))


@kind
def file_attributes():
    fd = os.open('/tmp/attributes', os.O_RDWR | os.O_CREAT)
    os.setxattr('/tmp/attributes', 'trusted.kind', b'value')
    os.utime('/tmp/attributes', ns=(123456789012345678, 234567890123456789))
    look = lambda: (os.getxattr('/tmp/attributes', 'trusted.kind'), os.stat('/tmp/attributes').st_mtime_ns, os.stat('/tmp/attributes').st_atime_ns)
    yield from keeps(look)


@kind
def inode_flags():
    fd = os.open('/tmp/immutable', os.O_RDWR | os.O_CREAT)
    fcntl.ioctl(fd, 0x40086602, struct.pack('l', 0x20))
    yield from keeps(lambda: fcntl.ioctl(fd, 0x80086601, b'\0' * 8))


@kind
def quota_of_tmpfs():
    yield from keeps(lambda: os.statvfs('/tmp').f_blocks)


@kind
def file_with_holes():
    fd = os.open('/tmp/holes', os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b'end', 1 << 30)
    before = os.fstat(fd).st_blocks
    yield
    same(os.fstat(fd).st_blocks, before)


@kind
def preallocated_file():
    fd = os.open('/tmp/preallocated', os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 1 << 20)
    call(libc.fallocate(fd, 1, ctypes.c_long(1 << 20), ctypes.c_long(1 << 20)))
    look = lambda: (os.fstat(fd).st_blocks, os.fstat(fd).st_size)
    yield from keeps(look)


# System V objects: what nobody uses at the moment, and what makes them unlike new ones.

@kind
def segment_that_nobody_has_attached():
    ident = call(libc.shmget(0x7a7a01, 3 << 12, 0o1640))
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(ident, None, 0)
    ctypes.memmove(address, b'kept', 4)
    call(libc.shmdt(ctypes.c_void_p(address)))
    yield
    same(libc.shmget(0x7a7a01, 0, 0), ident)
    same(ctypes.string_at(libc.shmat(ident, None, 0), 4), b'kept')


@kind
def segment_attached_in_many_ways():
    ident = call(libc.shmget(0, 4 << 12, 0o1600))
    libc.shmat.restype = ctypes.c_void_p
    one, two = libc.shmat(ident, None, 0), libc.shmat(ident, None, 0o10000)
    ctypes.memmove(one + 8192, b'kept', 4)
    call(libc.mprotect(ctypes.c_void_p(one + 4096), ctypes.c_size_t(4096), 0))

    def look():
        lines = [line.split() for line in text('/proc/self/maps').splitlines() if 'SYSV' in line]
        attached = [line.split()[6] for line in text('/proc/sysvipc/shm').splitlines()[1:] if int(line.split()[1]) == ident]
        return [(line[0], line[1], line[2]) for line in lines], attached, ctypes.string_at(two + 8192, 4)
    yield from keeps(look)


@kind
def segment_of_which_a_part_was_unmapped():
    ident = call(libc.shmget(0, 4 << 12, 0o1600))
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(ident, None, 0)
    call(libc.munmap(ctypes.c_void_p(address + 4096), ctypes.c_size_t(4096)))
    yield from keeps(lambda: [line.split()[:3] for line in text('/proc/self/maps').splitlines() if 'SYSV' in line])


@kind
def segment_that_is_executable_and_removed():
    ident = call(libc.shmget(0, 1 << 12, 0o1700))
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(ident, None, 0o100000)
    ctypes.memmove(address, b'kept', 4)
    call(libc.shmctl(ident, 0, None))

    def look():
        lines = [line.split() for line in text('/proc/self/maps').splitlines() if 'SYSV' in line]
        mode = [line.split()[2] for line in text('/proc/sysvipc/shm').splitlines()[1:] if int(line.split()[1]) == ident]
        return [(line[0], line[1]) for line in lines], mode, ctypes.string_at(address, 4)
    yield from keeps(look)


def message(kind, data):
    return ctypes.create_string_buffer(struct.pack('l', kind) + data)


@kind
def messages_of_many_types():
    ident = call(libc.msgget(0x7a7a02, 0o1620))
    sent = [(5, b'one'), (3, b''), (5, b'two'), (1 << 40, b'x' * 5000)]
    for kind_, data in sent:
        call(libc.msgsnd(ident, message(kind_, data), ctypes.c_size_t(len(data)), 0o4000))
    yield
    buffer = ctypes.create_string_buffer(8200)

    def receive(kind_):
        length = call(libc.msgrcv(ident, buffer, ctypes.c_size_t(8192), ctypes.c_long(kind_), 0o4000))
        return struct.unpack('l', buffer.raw[:8])[0], buffer.raw[8:8 + length]
    same([receive(-4), receive(5), receive(0), receive(0)], [sent[1], sent[0], sent[2], sent[3]])
    same(libc.msgget(0x7a7a02, 0), ident)


@kind
def room_of_a_message_queue():
    ident = call(libc.msgget(0, 0o1600))
    data = ctypes.create_string_buffer(120)
    call(libc.msgctl(ident, 2, data))
    fields = bytearray(data.raw)
    struct.pack_into('Q', fields, 88, 777)
    call(libc.msgctl(ident, 1, ctypes.create_string_buffer(bytes(fields))))

    def look():
        call(libc.msgctl(ident, 2, data))
        return struct.unpack_from('Q', data.raw, 88)[0], struct.unpack_from('IIIII', data.raw, 4)
    same(look()[0], 777)
    yield from keeps(look)


@kind
def message_queue_of_posix_that_is_closed():
    fd = call(libc.mq_open(b'/closed', os.O_CREAT | os.O_RDWR, 0o600, None))
    call(libc.mq_send(fd, b'kept', ctypes.c_size_t(4), 3))
    os.close(fd)
    yield
    same(os.path.exists('/dev/mqueue/closed'), True)


# Watches, by the filesystem of what is watched: nothing is reported but what the program does itself.

def heard(fd):
    try:
        data, events = os.read(fd, 65536), []
    except BlockingIOError:
        return []
    while data:
        _, mask, _, length = struct.unpack_from('iIII', data)
        events.append((hex(mask), data[16:16 + length].rstrip(b'\0')))
        data = data[16 + length:]
    return events


def watched_alone(path, act, prepare=lambda: None, mask=0xfff):
    """What is reported of a path is what `act` does, and no more."""
    kept = prepare()
    fd = call(libc.inotify_init1(os.O_NONBLOCK))
    call(libc.inotify_add_watch(fd, path.encode(), mask))
    yield
    same(heard(fd), [], 'reported:')
    act(kept)
    same(len(heard(fd)) > 0, True)


def mounted_for_watch(name):
    path = '/tmp/mounted/' + name
    os.makedirs(path)
    call(libc.mount(b'none', path.encode(), b'tmpfs', 0, None))
    open(path + '/file', 'w').close()


def file_with_a_lost_name(name):
    """A tmpfs that is left to CRIU, since it propagates; an open file has lost its name and has another."""
    mounted_for_watch(name)
    path = '/tmp/mounted/' + name
    call(libc.mount(None, path.encode(), None, 1 << 20, None))
    file = os.open(path + '/lost', os.O_RDWR | os.O_CREAT)
    os.link(path + '/lost', path + '/other')
    os.unlink(path + '/lost')
    return file


def listener_at(path):
    return stream(path)


def renamed_listener(path):
    listener = stream(path + '.tmp')
    os.rename(path + '.tmp', path)
    return listener


def under(name):
    return '/tmp/mounted/' + name


KINDS['watch_of_a_mounted_tmpfs'] = lambda: watched_alone(under('watch_of_a_mounted_tmpfs'), lambda _: os.unlink(under('watch_of_a_mounted_tmpfs/file')), lambda: mounted_for_watch('watch_of_a_mounted_tmpfs'))
KINDS['watch_of_a_file_in_a_mounted_tmpfs'] = lambda: watched_alone(under('watch_of_a_file_in_a_mounted_tmpfs/file'), lambda _: open(under('watch_of_a_file_in_a_mounted_tmpfs/file')).close(), lambda: mounted_for_watch('watch_of_a_file_in_a_mounted_tmpfs'))
KINDS['watch_of_a_tmpfs_that_is_left_to_criu'] = lambda: watched_alone(under('watch_of_a_tmpfs_that_is_left_to_criu'), lambda _: os.unlink(under('watch_of_a_tmpfs_that_is_left_to_criu/file')), lambda: file_with_a_lost_name('watch_of_a_tmpfs_that_is_left_to_criu'))
KINDS['watch_of_a_file_in_a_tmpfs_that_is_left_to_criu'] = lambda: watched_alone(under('watch_of_a_file_in_a_tmpfs_that_is_left_to_criu/file'), lambda _: open(under('watch_of_a_file_in_a_tmpfs_that_is_left_to_criu/file')).close(), lambda: file_with_a_lost_name('watch_of_a_file_in_a_tmpfs_that_is_left_to_criu'))
KINDS['watch_of_shared_memory'] = lambda: watched_alone('/dev/shm/directory', lambda _: open('/dev/shm/directory/new', 'w').close(), lambda: os.mkdir('/dev/shm/directory'))
KINDS['watch_of_a_file_in_shared_memory'] = lambda: watched_alone('/dev/shm/watched', lambda _: os.unlink('/dev/shm/watched'), lambda: open('/dev/shm/watched', 'w').close())
KINDS['watch_of_proc'] = lambda: watched_alone('/proc/self/status', lambda _: open('/proc/self/status').close(), mask=0x20)
KINDS['watch_of_a_directory_with_a_socket'] = lambda: watched_alone('/tmp/with-a-socket', lambda _: os.unlink('/tmp/with-a-socket/s'), lambda: listener_at(new_directory('/tmp/with-a-socket') + '/s'))
KINDS['watch_of_a_directory_with_a_renamed_socket'] = lambda: watched_alone('/tmp/with-a-renamed', lambda _: os.unlink('/tmp/with-a-renamed/s'), lambda: renamed_listener(new_directory('/tmp/with-a-renamed') + '/s'))
KINDS['watch_of_a_directory_with_a_fifo'] = lambda: watched_alone('/tmp/with-a-fifo', lambda _: os.unlink('/tmp/with-a-fifo/f'), lambda: (os.mkfifo(new_directory('/tmp/with-a-fifo') + '/f'), os.open('/tmp/with-a-fifo/f', os.O_RDWR)))
KINDS['watch_of_a_directory_with_a_removed_file'] = lambda: watched_alone('/tmp/with-a-removed', lambda _: open('/tmp/with-a-removed/new', 'w').close(), lambda: (os.open(new_directory('/tmp/with-a-removed') + '/f', os.O_RDWR | os.O_CREAT), os.unlink('/tmp/with-a-removed/f')))
KINDS['watch_of_a_directory_with_a_removed_socket'] = lambda: watched_alone('/tmp/with-a-ghost', lambda _: open('/tmp/with-a-ghost/new', 'w').close(), lambda: (listener_at(new_directory('/tmp/with-a-ghost') + '/s'), os.unlink('/tmp/with-a-ghost/s')))


# Threads and processes.

def in_a_thread(set_up, look):
    """What `look` sees in a thread, which has `set_up` for itself alone."""
    told_, asked, answers = threading.Event(), threading.Event(), []

    def run():
        try:
            set_up()
            answers.append(look())
        except Exception as error:
            answers.append(error)
        told_.set()
        asked.wait()
        answers.append(look())
        told_.set()
    threading.Thread(target=run, daemon=True).start()
    told_.wait()
    if isinstance(answers[0], Exception):
        raise answers[0]
    told_.clear()
    own = look()
    yield
    asked.set()
    told_.wait()
    same(answers[1], answers[0], 'in the thread:')
    same(look(), own)


def status_words(*names):
    lines = dict(line.split(':', 1) for line in text(f'/proc/self/task/{libc.gettid()}/status').splitlines())
    return [lines[name].split() for name in names]


def numbers(*values):
    return (ctypes.c_int * len(values))(*values)


KINDS['users_of_a_thread'] = lambda: in_a_thread(lambda: syscall(117, 0, 5, 0), lambda: status_words('Uid', 'Gid'))
KINDS['groups_of_a_thread'] = lambda: in_a_thread(lambda: syscall(116, 3, numbers(7, 99, 1000)), lambda: status_words('Groups'))
KINDS['niceness_of_a_thread'] = lambda: in_a_thread(lambda: syscall(141, 0, 0, 7), lambda: syscall(140, 0, 0))
KINDS['scheduler_idle_of_a_thread'] = lambda: in_a_thread(lambda: syscall(144, 0, 5, numbers(0)), lambda: syscall(145, 0))
KINDS['timer_slack_of_a_thread'] = lambda: in_a_thread(lambda: prctl(29, 123456), lambda: prctl(30))
KINDS['no_new_privileges_of_a_thread'] = lambda: in_a_thread(lambda: prctl(38, 1), lambda: prctl(39))


def seccomp(program, flags=0):
    """Installs a filter: pairs of instructions of classic BPF."""
    packed = b''.join(struct.pack('HBBI', *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed)
    head = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', len(program), ctypes.addressof(buffer)))
    prctl(38, 1)
    syscall(317, 1, flags, head)


# Answers getpgid(2) with EPERM or another error.
def refusing(error=1):
    return [(0x20, 0, 0, 0), (0x15, 0, 1, 121), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7fff0000)]


def refused_call():
    result = libc.syscall(ctypes.c_long(121), 0)
    return ctypes.get_errno() if result == -1 else 0


KINDS['seccomp_filter_of_a_thread'] = lambda: in_a_thread(lambda: seccomp(refusing()), lambda: (status_words('Seccomp', 'Seccomp_filters'), refused_call()))
KINDS['seccomp_filters_one_over_the_other'] = lambda: in_a_thread(lambda: (seccomp(refusing(5)), seccomp(refusing(9), 2), seccomp(refusing(7), 4)), lambda: (status_words('Seccomp', 'Seccomp_filters'), refused_call()))


@kind
def capability_bounding_set():
    prctl(24, 13)
    yield from keeps(lambda: status_words('CapInh', 'CapPrm', 'CapEff', 'CapBnd'))


@kind
def users_of_all_four_kinds():
    syscall(119, 10, 20, 30)
    syscall(123, 0)
    syscall(117, 11, 0, 33)
    syscall(122, 0)
    yield from keeps(lambda: status_words('Uid', 'Gid', 'CapPrm', 'CapEff'))


def waiting_with_a_mask(wait_):
    """A thread that waits with another mask, and has its own again when the wait is over."""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    told_, masks = threading.Event(), []

    def run():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
        told_.set()
        wait_()
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    told_.wait()
    time.sleep(0.3)
    yield
    signal.pthread_kill(thread.ident, signal.SIGUSR2)
    thread.join(5)
    same(masks, [{signal.SIGUSR1, signal.SIGUSR2}])


EMPTY_MASK = ctypes.create_string_buffer(8)
KINDS['mask_before_sigsuspend'] = lambda: waiting_with_a_mask(lambda: libc.syscall(ctypes.c_long(130), EMPTY_MASK, ctypes.c_long(8)))
KINDS['mask_before_ppoll'] = lambda: waiting_with_a_mask(lambda: libc.syscall(ctypes.c_long(271), None, ctypes.c_long(0), None, EMPTY_MASK, ctypes.c_long(8)))


@kind
def rounding_of_numbers():
    control = ctypes.c_int()
    call(libc.fesetround(0x400))
    yield from keeps(libc.fegetround)


def timer_for_a_thread():
    """A timer of 500 s whose signal comes to the calling thread."""
    event = ctypes.create_string_buffer(struct.pack('Qiii', 5, signal.SIGUSR1, 4, libc.gettid()), 64)
    timer = ctypes.c_int()
    syscall(222, 7, event, ctypes.byref(timer))
    syscall(223, timer.value, 0, ctypes.create_string_buffer(struct.pack('qqqq', 0, 0, 500, 0)), None)
    return timer.value


def timers():
    lines = [line for line in text('/proc/self/timers').splitlines() if not line.startswith('notify')]
    threads = [int(line.rsplit('.', 1)[1]) for line in text('/proc/self/timers').splitlines() if line.startswith('notify')]
    value = ctypes.create_string_buffer(32)
    syscall(224, 0, value)
    return lines, threads, struct.unpack('qqqq', value.raw)[2] > 300


@kind
def timer_that_signals_the_first_thread():
    timer_for_a_thread()
    yield from keeps(timers)


KINDS['timer_that_signals_a_thread'] = lambda: in_a_thread(timer_for_a_thread, timers)


@kind
def reaper_of_those_born_before():
    """Who asks for orphans gets those of children that were born before."""
    read, write = os.pipe()
    go, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        os.read(go, 1)
        before = os.getpid()
        child = os.fork()
        if child == 0:
            while os.getppid() == before:
                time.sleep(0.01)
            os.write(write, str(os.getppid()).encode())
            os._exit(0)
        os._exit(0)
    prctl(36, 1)
    yield
    os.write(end, b'x')
    os.waitpid(pid, 0)
    same(os.read(read, 20), str(os.getpid()).encode())


@kind
def lock_that_a_child_alone_holds():
    path = '/tmp/locked-by-a-child'
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    os.close(fd)

    def look():
        other = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return 'free'
        except BlockingIOError:
            return 'locked'
        finally:
            os.close(other)
    yield from keeps(look)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    same(look(), 'free')


@kind
def domain_name():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    call(libc.setdomainname(b'kinds.test', ctypes.c_size_t(10)))
    yield from keeps(lambda: text('/proc/sys/kernel/domainname'))


@kind
def working_directory_outside_of_the_root():
    os.makedirs('/tmp/jail/in', exist_ok=True)
    pid = os.fork()
    if pid == 0:
        os.chdir('/tmp/jail')
        os.chroot('/tmp/jail/in')
        while True:
            signal.pause()
    time.sleep(0.3)
    yield from keeps(lambda: [os.readlink(f'/proc/{pid}/{name}') for name in ('root', 'cwd')])


# Pipes and files.

@kind
def pipe_whose_writer_is_gone():
    read, write = os.pipe()
    os.write(write, b'rest')
    os.close(write)
    yield
    same((os.read(read, 9), os.read(read, 9)), (b'rest', b''))


@kind
def pipe_whose_reader_is_gone():
    read, write = os.pipe()
    os.close(read)
    yield
    try:
        os.write(write, b'x')
        raise AssertionError('it can be written to')
    except BrokenPipeError:
        pass


@kind
def memfd_opened_twice():
    fd = os.memfd_create('twice', 0x2 | 0x8)
    os.write(fd, b'content')
    other = os.open(f'/proc/self/fd/{fd}', os.O_RDONLY)
    os.lseek(other, 3, 0)
    look = lambda: (os.lseek(fd, 0, 1), os.lseek(other, 0, 1), fcntl.fcntl(fd, 1034), os.fstat(fd).st_mode, fcntl.fcntl(other, 3) & 3,
                    os.readlink(f'/proc/self/fd/{fd}'))
    yield from keeps(look)
    same(os.pread(other, 9, 0), b'content')


@kind
def mapping_beyond_the_end_of_its_file():
    fd = os.open('/tmp/short', os.O_RDWR | os.O_CREAT)
    os.write(fd, b'x' * 100)
    area = mmap.mmap(-1, 4096)
    address = memory(4 << 12, 1, fd)
    maps = lambda: [line.split()[:3] for line in text('/proc/self/maps').splitlines() if line.startswith(f'{address:x}-')]
    yield from keeps(lambda: (maps(), ctypes.string_at(address, 101)))
    os.ftruncate(fd, 8192)
    same(ctypes.string_at(address + 4096, 1), b'\0')


def in_tmpfs(make, look, name):
    """Something in the tmpfs /tmp."""
    path = '/tmp/' + name
    make(path)
    yield from keeps(lambda: look(path))


ACL = struct.pack('<IHHIHHIHHIHHIHHI', 2, 1, 6, 0xffffffff, 2, 7, 1234, 4, 4, 0xffffffff, 16, 7, 0xffffffff, 32, 0, 0xffffffff)


def with_acl(path, kind_='access'):
    (os.mkdir if kind_ == 'default' else touch)(path)
    os.setxattr(path, 'system.posix_acl_' + kind_, ACL)


def times(path):
    is_ = os.lstat(path)
    return is_.st_mode, is_.st_uid, is_.st_gid, is_.st_mtime_ns, is_.st_atime_ns, is_.st_nlink, is_.st_rdev


def symbolic_link(path):
    os.symlink('x' * 4000, path)
    os.lchown(path, 3, 4)
    os.utime(path, ns=(111, 222), follow_symlinks=False)


def old_directory(path):
    os.makedirs(path + '/in')
    os.chmod(path, 0o3711)
    os.utime(path, ns=(-333, 444))


def device_node(path):
    os.mknod(path, 0o20640, os.makedev(1, 7))


def three_names(path):
    touch(path)
    os.link(path, path + '-two')
    os.mkdir(path + '-directory')
    os.link(path, path + '-directory/three')


def with_capability(path):
    touch(path)
    os.chmod(path, 0o4755)
    os.setxattr(path, 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << 10, 0, 0, 0))


KINDS['acl_of_a_file'] = lambda: in_tmpfs(with_acl, lambda p: (os.getxattr(p, 'system.posix_acl_access'), times(p)), 'acl')
KINDS['default_acl_of_a_directory'] = lambda: in_tmpfs(lambda p: with_acl(p, 'default'), lambda p: os.getxattr(p, 'system.posix_acl_default'), 'default-acl')
KINDS['times_of_a_symbolic_link'] = lambda: in_tmpfs(symbolic_link, lambda p: (times(p)[:4], os.readlink(p)), 'symbolic')
KINDS['times_of_a_directory'] = lambda: in_tmpfs(old_directory, times, 'old-directory')
KINDS['device_in_a_tmpfs'] = lambda: in_tmpfs(device_node, times, 'device')
KINDS['names_of_a_file'] = lambda: in_tmpfs(three_names, lambda p: (times(p), os.path.samefile(p, p + '-directory/three')), 'three')
KINDS['capabilities_of_a_file'] = lambda: in_tmpfs(with_capability, lambda p: (times(p), os.getxattr(p, 'security.capability')), 'capable')
KINDS['file_with_a_long_name'] = lambda: in_tmpfs(lambda p: touch(p), times, 'n' * 255)


# Mounts.

def mount_with(name, options, change=lambda path: None):
    """The options, the propagation and the filesystem's own options of what is mounted at a path, in their order."""
    path = under(name)
    os.makedirs(path)
    call(libc.mount(b'none', path.encode(), b'tmpfs', 0, options))
    change(path)

    def look():
        lines = [line.split() for line in text('/proc/self/mountinfo').splitlines() if f' {path} ' in line]
        own = lambda line: sorted(word for word in line[-1].split(',') if not word.startswith('inode'))
        return [(line[5], line[6] == '-', line[6].split(':')[0], own(line)) for line in lines], os.stat(path).st_mode, os.stat(path).st_uid
    yield from keeps(look)


def once_more(path):
    touch(path + '/below')
    call(libc.mount(b'none', path.encode(), b'tmpfs', 0, None))
    touch(path + '/above')


KINDS['mount_with_options_of_tmpfs'] = lambda: mount_with('mount_with_options_of_tmpfs', b'size=1m,nr_inodes=77,mode=1711,uid=5,gid=6')
KINDS['mount_that_is_shared'] = lambda: mount_with('mount_that_is_shared', None, lambda path: call(libc.mount(None, path.encode(), None, 1 << 20, None)))
KINDS['mount_that_cannot_be_bound'] = lambda: mount_with('mount_that_cannot_be_bound', None, lambda path: call(libc.mount(None, path.encode(), None, 1 << 17, None)))
KINDS['mount_over_another'] = lambda: mount_with('mount_over_another', None, once_more)
KINDS['mount_that_is_read_only'] = lambda: mount_with('mount_that_is_read_only', None, lambda path: call(libc.mount(None, path.encode(), None, 1 | 32, None)))


def run(name, directory):
    path = os.path.join(directory, name)

    def say(what):
        with open(path + '.new', 'w') as f:
            f.write(what)
        os.rename(path + '.new', path)
    look = os.path.join(directory, 'look')
    libc.prctl(15, ctypes.create_string_buffer(f'k{NUMBERS[name]}-{name}'.encode()[:15]), 0, 0, 0)
    steps = KINDS[name]()
    try:
        next(steps)
    except Exception as error:
        say(f'missing {error!r}')
        os._exit(0)
    say('ready')
    while not os.path.exists(look):
        time.sleep(0.05)
    try:
        for _ in steps:
            pass
        say('same')
    except BaseException as error:
        say(f'changed {error!r}')
    os._exit(0)


NUMBERS = {name: number for number, name in enumerate(sorted(KINDS))}
if sys.argv[1:] == ['--list']:
    print('\n'.join(NUMBERS))
    sys.exit()
directory, names = sys.argv[1], sys.argv[2:]
os.makedirs(directory, exist_ok=True)
for name in names:
    if os.fork() == 0:
        run(name, directory)
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        time.sleep(0.1)
