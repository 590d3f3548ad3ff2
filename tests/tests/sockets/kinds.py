"""Sockets of many kinds, each in a process of its own that bears the kind's name.

    kinds.py carried|refused|KIND,…

Whoever connects to port 7000 gets {kind: "ready" or why it could not be set up}, and, for each byte that it sends, {kind: "ok" or what is wrong}.
A kind is a function that makes sockets and returns a check, which may be called several times.
"""

import ctypes, json, os, select, signal, socket, struct, subprocess, sys, time

MPTCP, SOL_NETLINK, SO_PROTOCOL = 262, 270, 38
IP_RECVERR, SO_ZEROCOPY, MSG_ZEROCOPY, MSG_MORE, UDP_CORK = 11, 60, 0x4000000, 0x8000, 1
KEPT, CARRIED, REFUSED = [], {}, {}


class Socket(socket.socket):
    """A socket that stays open when nothing refers to it."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        KEPT.append(self)


socket.socket = Socket
new = Socket
INET, INET6, UNIX, NETLINK = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK
STREAM, DGRAM, RAW = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW


def carried(kind):
    CARRIED[kind.__name__] = kind


def refused(kind):
    REFUSED[kind.__name__] = kind


def equal(found, expected):
    if found != expected:
        raise Exception(f"{found!r} instead of {expected!r}")


def pair(family=INET, address="127.0.0.1", protocol=0):
    listener = new(family, STREAM, protocol)
    listener.bind((address, 0))
    listener.listen()
    client = new(family, STREAM, protocol)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    return client, server


def talk(client, server):
    for one, other in (client, server), (server, client):
        other.settimeout(5)
        one.sendall(b"x")
        equal(other.recv(1), b"x")


def state(tcp):
    return tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0]


def until(what, condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise Exception(f"waited in vain: {what}")


def ip(*command):
    subprocess.run(["ip", *command], check=True)


def stays_named(s):
    name = s.getsockname()[:2]
    return lambda: equal(s.getsockname()[:2], name)


# Netlink


@carried
def netlink_unbound():
    s = new(NETLINK, RAW, 0)

    def check():
        equal(s.getsockname(), (0, 0))
        equal(s.getsockopt(socket.SOL_SOCKET, SO_PROTOCOL), 0)

    return check


@carried
def netlink_audit():
    return stays_named(new(NETLINK, RAW, 9))


@carried
def netlink_generic():
    s = new(NETLINK, RAW, 16)
    s.bind((0, 0))
    return stays_named(s)


@carried
def netlink_events():
    s = new(NETLINK, RAW, 15)
    s.bind((0, 1))
    return stays_named(s)


@carried
def netlink_options():
    s = new(NETLINK, RAW, 0)
    s.bind((0, 0))
    names = 3, 4, 5, 10, 11, 12
    for name in names:
        s.setsockopt(SOL_NETLINK, name, 1)
    return lambda: equal([s.getsockopt(SOL_NETLINK, name) for name in names], [1] * len(names))


# TCP


def multipath(family, address, reach):
    listener = new(family, STREAM, MPTCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if family == INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind((address, 0))
    listener.listen(7)

    def check():
        client = socket.create_connection((reach, listener.getsockname()[1]), 5)
        listener.settimeout(5)
        server, _ = listener.accept()
        talk(client, server)
        client.close()
        server.close()
        equal(listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1)

    return check


@carried
def multipath_listener():
    return multipath(INET, "0.0.0.0", "127.0.0.1")


@carried
def multipath_listener_of_both_families():
    return multipath(INET6, "::", "127.0.0.1")


@carried
def accepted_from_multipath_listener():
    listener = new(INET, STREAM, MPTCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return lambda: talk(client, server)


def half_closed(family, address):
    client, server = pair(family, address)
    server.sendall(b"abc")
    server.shutdown(socket.SHUT_WR)
    # 8: CLOSE_WAIT, 5: FIN_WAIT2
    until("the end to arrive", lambda: (state(client), state(server)) == (8, 5))

    def check():
        equal((state(client), state(server)), (8, 5))
        client.settimeout(5)
        equal(client.recv(10, socket.MSG_PEEK), b"abc")
        client.sendall(b"y")
        equal(server.recv(1), b"y")

    return check


@carried
def half_closed_4():
    return half_closed(INET, "127.0.0.1")


@carried
def half_closed_6():
    return half_closed(INET6, "::1")


@carried
def half_closed_and_read():
    client, server = pair()
    server.shutdown(socket.SHUT_WR)
    until("the end to arrive", lambda: state(client) == 8)

    def check():
        client.settimeout(5)
        equal(client.recv(1), b"")
        equal(state(client), 8)

    return check


@carried
def closed_by_both():
    client, server = pair()
    server.shutdown(socket.SHUT_WR)
    client.shutdown(socket.SHUT_WR)
    until("both to be closed", lambda: state(client) == 7)

    def check():
        equal(client.recv(1), b"")
        equal(state(client), 7)

    return check


def segments(family, address):
    client, server = pair(family, address)
    talk(client, server)

    def check():
        talk(client, server)
        sizes = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) for s in (client, server)]
        equal([size > 16000 for size in sizes], [True, True])

    return check


@carried
def segment_size_4():
    return segments(INET, "127.0.0.1")


@carried
def segment_size_6():
    return segments(INET6, "::1")


@carried
def full_buffers_in_both_directions():
    ends = pair()
    sent = []
    for end in ends:
        end.setblocking(False)
        count, tries = 0, 0
        while tries < 10:
            try:
                count += end.send(bytes(4096))
                tries = 0
            except BlockingIOError:
                tries += 1
                time.sleep(0.02)
        sent.append(count)

    moved = []

    def check():
        # The first check is before the move.
        if moved:
            for end, count in zip(ends, sent[::-1]):
                end.settimeout(10)
                while count > 0:
                    count -= len(end.recv(65536))
            sent[:] = 0, 0
            talk(*ends)
        moved.append(True)

    return check


# Addresses that are gone, and link-local ones


def gone(address, make):
    length, more = (128, ["nodad"]) if ":" in address else (32, [])
    ip("addr", "add", f"{address}/{length}", "dev", "lo", *more)
    s = make(address)
    ip("addr", "del", f"{address}/{length}", "dev", "lo")
    return stays_named(s)


def bound(kind):
    def make(address):
        s = new(INET6 if ":" in address else INET, kind)
        s.bind((address, 0))
        return s

    return make


def listening(address):
    s = bound(STREAM)(address)
    s.listen()
    return s


def connected_to_itself(address):
    s = bound(DGRAM)(address)
    s.connect((address, 99))
    return s


@carried
def bound_to_address_that_is_gone():
    return gone("10.99.0.1", bound(STREAM))


@carried
def listens_at_address_that_is_gone():
    return gone("10.99.0.2", listening)


@carried
def datagrams_of_address_that_is_gone():
    return gone("10.99.0.3", bound(DGRAM))


@carried
def connected_datagrams_of_address_that_is_gone():
    return gone("10.99.0.4", connected_to_itself)


@carried
def connection_of_address_that_is_gone():
    return gone("10.99.0.5", lambda address: pair(address=address)[0])


@carried
def bound_to_address_6_that_is_gone():
    return gone("fd99::1", bound(STREAM))


@carried
def route_through_loopback():
    ip("route", "add", "10.98.0.0/24", "dev", "lo")

    def check():
        routes = subprocess.run(["ip", "route", "show", "10.98.0.0/24"], capture_output=True, text=True, check=True).stdout
        equal(routes.split(), ["10.98.0.0/24", "dev", "lo", "scope", "link"])

    return check


def link_local():
    found = []

    def look():
        for line in open("/proc/net/if_inet6"):
            address, index, _, _, flags, _ = line.split()
            # 0x40: tentative
            if address.startswith("fe80") and not int(flags, 16) & 0x40:
                found.append((socket.inet_ntop(INET6, bytes.fromhex(address)), 0, 0, int(index, 16)))
        return found

    until("a link-local address", look)
    return found[0]


@carried
def link_local_listener():
    s = new(INET6, STREAM)
    s.bind(link_local())
    s.listen()
    return stays_named(s)


@carried
def link_local_connection():
    listener = new(INET6, STREAM)
    listener.bind(link_local())
    listener.listen()
    client = new(INET6, STREAM)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    return lambda: talk(client, server)


@carried
def link_local_datagrams():
    receiver, sender = new(INET6, DGRAM), new(INET6, DGRAM)
    receiver.bind(link_local())
    sender.connect(receiver.getsockname())

    def check():
        receiver.settimeout(5)
        sender.send(b"x")
        equal(receiver.recv(1), b"x")

    return check


# What is refused


@refused
def multipath_connection():
    client, server = pair(protocol=MPTCP)
    return lambda: talk(client, server)


@refused
def multipath_client_of_tcp_server():
    listener = new(INET, STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = new(INET, STREAM, MPTCP)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    return lambda: talk(client, server)


@refused
def multipath_bound():
    s = new(INET, STREAM, MPTCP)
    s.bind(("127.0.0.1", 0))
    return stays_named(s)


def datagram_pair(family, address):
    receiver, sender = new(family, DGRAM), new(family, DGRAM)
    receiver.bind((address, 0))
    sender.connect(receiver.getsockname())
    return receiver, sender


@refused
def corked_datagrams():
    receiver, sender = datagram_pair(INET, "127.0.0.1")
    sender.setsockopt(socket.IPPROTO_UDP, UDP_CORK, 1)
    return lambda: equal(sender.getsockopt(socket.IPPROTO_UDP, UDP_CORK), 1)


def unfinished(family, address):
    receiver, sender = datagram_pair(family, address)
    sender.send(bytes(100), MSG_MORE)

    def check():
        sender.send(b"x")
        receiver.settimeout(5)
        equal(len(receiver.recv(1000)), 101)
        sender.send(bytes(100), MSG_MORE)

    return check


@refused
def unfinished_datagram_4():
    return unfinished(INET, "127.0.0.1")


@refused
def unfinished_datagram_6():
    return unfinished(INET6, "::1")


def poll_for(s, event):
    poll = select.poll()
    poll.register(s, event)
    until("an event", lambda: any(found & event for _, found in poll.poll(0)))


@refused
def error_of_reset_connection():
    client, server = pair()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()
    poll_for(client, select.POLLERR)
    # Whether it still is there, without taking it.
    return lambda: poll_for(client, select.POLLERR)


@refused
def error_queue_of_connection():
    client, server = pair()
    client.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
    client.send(b"x", MSG_ZEROCOPY)
    poll_for(client, select.POLLERR)
    return lambda: poll_for(client, select.POLLERR)


@refused
def udp_error_queue():
    s = new(INET, DGRAM)
    s.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
    s.connect(("127.0.0.1", 7104))
    s.send(b"x")
    poll_for(s, select.POLLERR)
    return lambda: poll_for(s, select.POLLERR)


@refused
def error_of_unix_connection():
    left, right = socket.socketpair()
    left.send(b"x")
    right.close()
    poll_for(left, select.POLLERR)
    return lambda: poll_for(left, select.POLLERR)


@refused
def unaccepted_with_data():
    listener = new(UNIX, STREAM)
    listener.bind("\0unaccepted")
    listener.listen()
    client = new(UNIX, STREAM)
    client.connect("\0unaccepted")
    client.send(b"early")
    return lambda: equal(bool(select.select([listener], [], [], 0)[0]), True)


@refused
def error_of_unix_packets():
    left, right = socket.socketpair(UNIX, socket.SOCK_SEQPACKET)
    left.send(b"x")
    right.send(b"y")
    right.close()
    poll_for(left, select.POLLERR)
    return lambda: poll_for(left, select.POLLERR)


@refused
def urgent_byte():
    client, server = pair()
    client.send(b"ab")
    client.send(b"!", socket.MSG_OOB)
    poll_for(server, select.POLLPRI)
    return lambda: poll_for(server, select.POLLPRI)


@refused
def urgent_byte_of_unix_connection():
    left, right = socket.socketpair()
    left.send(b"a")
    left.send(b"!", socket.MSG_OOB)
    return lambda: poll_for(right, select.POLLPRI)


@refused
def sender_of_unix_datagram():
    sender, receiver = new(UNIX, DGRAM), new(UNIX, DGRAM)
    sender.bind("\0sender")
    receiver.bind("\0receiver")
    sender.sendto(b"x", "\0receiver")
    sender.close()
    return lambda: equal(receiver.recvfrom(10, socket.MSG_PEEK), (b"x", b"\0sender"))


@refused
def credentials_of_dead_process():
    listener = new(UNIX, STREAM)
    listener.bind("\0credentials")
    listener.listen()
    child = os.fork()
    if child == 0:
        client = new(UNIX, STREAM)
        client.connect("\0credentials")
        if os.fork() == 0:
            signal.pause()
        os._exit(0)
    server, _ = listener.accept()
    os.waitpid(child, 0)
    peer = lambda: struct.unpack("iii", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return lambda: equal(peer(), (child, 0, 0))


@refused
def closed_connection():
    """The port of its peer stands for the name of its process, which does not have it any more."""
    client, server = pair()
    server.setblocking(False)
    sent = 0
    while True:
        try:
            sent += server.send(bytes(65536))
        except BlockingIOError:
            break
    server.close()

    def check():
        equal(state(client), 1)
        equal(len(client.recv(1 << 16, socket.MSG_PEEK)) > 0, True)

    return check


@refused
def tun_without_interface():
    os.mknod("/dev/tun", 0o20600, os.makedev(10, 200))
    tun = os.open("/dev/tun", os.O_RDWR)
    return lambda: os.fstat(tun)


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]


def map_socket(s, size, protection):
    if LIBC.mmap(None, size, protection, 1, s.fileno(), 0) == 2**64 - 1:
        raise OSError(ctypes.get_errno(), "mmap")


@refused
def mapped_connection():
    client, server = pair()
    map_socket(client, 4096, 1)
    return lambda: talk(client, server)


@refused
def mapped_ring_of_closed_socket():
    s = new(socket.AF_PACKET, RAW, 0)
    s.setsockopt(263, 5, struct.pack("IIII", 4096, 2, 2048, 4))
    map_socket(s, 8192, 3)
    s.close()
    return lambda: None


def serve(kinds):
    children = []
    for name, kind in kinds.items():
        (asked, ask), (answer, answered) = os.pipe(), os.pipe()
        if os.fork() == 0:
            with open("/proc/self/comm", "w") as comm:
                comm.write(name[:15])
            say = lambda text: os.write(answered, (text + "\n").encode())
            try:
                check = kind()
                say("ready")
            except BaseException as error:
                say(f"cannot be set up: {error!r}")
            while os.read(asked, 1):
                try:
                    check()
                    say("ok")
                except BaseException as error:
                    say(repr(error))
            os._exit(0)
        children.append((name, ask, os.fdopen(answer)))
    ready = {name: answer.readline().strip() for name, _, answer in children}
    listener = new(INET, STREAM)
    listener.bind(("0.0.0.0", 7000))
    listener.listen()
    while True:
        client, _ = listener.accept()
        client.sendall((json.dumps(ready) + "\n").encode())
        while client.recv(1):
            found = {}
            for name, ask, answer in children:
                os.write(ask, b"?")
                ended = select.select([answer], [], [], 20)[0]
                found[name] = answer.readline().strip() if ended else "the check does not end"
            client.sendall((json.dumps(found) + "\n").encode())
        client.close()


which = {"carried": CARRIED, "refused": REFUSED}.get(sys.argv[1])
every = {**CARRIED, **REFUSED}
serve(which or {name: every[name] for name in sys.argv[1].split(",")})
