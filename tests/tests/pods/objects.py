"""What the containers of a pod share besides their network: files in /dev/shm and System V objects.

objects.py make     makes them, and ends
objects.py front    counts in all of them, and waits for `back` after each step; complains in /dev/shm/complaints
objects.py back     sees what `front` has counted
objects.py check    looks at those that nobody uses; prints how far the count is, and the complaints
"""
import ctypes, mmap, os, struct, sys, time

c = ctypes.CDLL(None, use_errno=True)
c.shmat.restype = ctypes.c_void_p
c.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
c.shmdt.argtypes = [ctypes.c_void_p]
c.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
c.msgsnd.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
c.msgrcv.restype = ctypes.c_ssize_t
c.msgrcv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_int]

CREATE, EXCL, RMID, SET, STAT = 0o1000, 0o2000, 0, 1, 2
GETALL, SETALL, SETVAL = 13, 17, 16
NOWAIT, COPY = 0o4000, 0o40000
COUNTED, IDLE, REMOVED, TURNS, VALUES, TALK, LETTERS = 0x5101, 0x5102, 0x5103, 0x5104, 0x5105, 0x5106, 0x5107
LENGTH = 4 << 20
LETTER = [(7, b"seven"), (3, b""), (9, bytes(range(256)) * 16)]
SHM = "/dev/shm/"


def done(value, what):
    if value < 0:
        raise OSError(ctypes.get_errno(), what)
    return value


def attach(id, length):
    at = c.shmat(id, None, 0)
    assert at != ctypes.c_void_p(-1).value, "shmat"
    return (ctypes.c_char * length).from_address(at)


def segment(key, flags=0, length=0):
    return done(c.shmget(key, length, flags), "shmget %#x" % key)


def semaphores(key):
    return done(c.semget(key, 0, 0), "semget")


def queue(key):
    return done(c.msgget(key, 0), "msgget")


def operate(id, number, by):
    class Operation(ctypes.Structure):
        _fields_ = [("number", ctypes.c_ushort), ("by", ctypes.c_short), ("flags", ctypes.c_short)]
    one = Operation(number, by, 0)
    done(c.semop(id, ctypes.byref(one), 1), "semop")


def send(id, kind, content):
    message = struct.pack("l", kind) + content
    done(c.msgsnd(id, message, len(content), 0), "msgsnd")


def receive(id, kind, flags=0):
    room = ctypes.create_string_buffer(8 + 8192)
    length = done(c.msgrcv(id, room, 8192, kind, flags), "msgrcv")
    return struct.unpack_from("l", room)[0], room.raw[8:8 + length]


def give(kind, id, uid, gid, mode):
    """Gives an object away; uid, gid and mode come at the same places in all three structures (ipc_perm)."""
    control = {"shm": lambda command, s: c.shmctl(id, command, s), "sem": lambda command, s: c.semctl(id, 0, command, s),
               "msg": lambda command, s: c.msgctl(id, command, s)}[kind]
    structure = ctypes.create_string_buffer(256)
    done(control(STAT, structure), "stat")
    struct.pack_into("II", structure, 4, uid, gid)
    struct.pack_into("I", structure, 20, mode)
    done(control(SET, structure), "set")


def pattern(length):
    return (b"".join(struct.pack("I", n * 2654435761 & 0xffffffff) for n in range(1024)) * (length // 4096 + 1))[:length]


def make():
    segment(COUNTED, CREATE | EXCL | 0o600, LENGTH)
    idle = segment(IDLE, CREATE | EXCL | 0o640, 3 * 4096 + 100)
    attach(idle, 3 * 4096 + 100)[:] = pattern(3 * 4096 + 100)
    give("shm", idle, 1234, 5678, 0o620)
    segment(REMOVED, CREATE | EXCL | 0o600, 8192)
    done(c.semget(TURNS, 2, CREATE | EXCL | 0o600), "semget")
    values = done(c.semget(VALUES, 3, CREATE | EXCL | 0o644), "semget")
    done(c.semctl(values, 0, SETALL, (ctypes.c_ushort * 3)(5, 0, 32767)), "SETALL")
    give("sem", values, 1234, 5678, 0o440)
    done(c.msgget(TALK, CREATE | EXCL | 0o600), "msgget")
    letters = done(c.msgget(LETTERS, CREATE | EXCL | 0o600), "msgget")
    for kind, content in LETTER:
        send(letters, kind, content)
    give("msg", letters, 1234, 5678, 0o622)
    # Ids of queues that are gone leave gaps.
    for _ in range(3):
        done(c.msgctl(done(c.msgget(0, 0o600), "msgget"), RMID, None), "RMID")
    done(c.msgget(0, 0o600), "msgget")
    with open(SHM + "counted", "wb") as file:
        file.write(bytes(LENGTH))
    with open(SHM + "still", "wb") as file:
        file.write(pattern(100_000))
    os.link(SHM + "still", SHM + "linked")
    os.mkdir(SHM + "dir")
    os.chmod(SHM + "dir", 0o1770)
    os.symlink("../still", SHM + "dir/link")
    os.chown(SHM + "still", 1234, 5678)
    os.chmod(SHM + "still", 0o4640)


def complain(text):
    with open(SHM + "complaints", "a") as file:
        file.write(text + "\n")


def play(front):
    counted, removed = attach(segment(COUNTED), LENGTH), attach(segment(REMOVED), 8192)
    turns, talk = semaphores(TURNS), queue(TALK)
    opened = open(SHM + "counted", "r+b")
    mapped = mmap.mmap(opened.fileno(), LENGTH)
    own = open(SHM + "own-%d" % front, "w+b")
    own.write(pattern(50_000))
    own.flush()
    os.unlink(own.name)
    private = attach(segment(0, CREATE | 0o600, 1 << 20), 1 << 20)
    send(talk, 3 if front else 4, b"ready")
    receive(talk, 4 if front else 3)
    if front:
        done(c.shmctl(segment(REMOVED), RMID, None), "RMID")
    step, steps = 0, LENGTH // 8
    while True:
        step += 1
        at = step * 4099 % steps * 8
        count = struct.pack("Q", step)
        if front:
            counted[at:at + 8], mapped[at:at + 8], removed[0:8], counted[0:8] = count, count, count, count
            os.pwrite(opened.fileno(), count, 8)
            operate(turns, 0, 1)
            send(talk, 1, count)
            said = receive(talk, 2)[1]
            operate(turns, 1, -1)
            time.sleep(0.002)
        else:
            operate(turns, 0, -1)
            said = receive(talk, 1)[1]
            seen = counted[at:at + 8], mapped[at:at + 8], removed[0:8], counted[0:8], mapped[8:16]
            if seen != (count,) * 5 and at > 16:
                complain("back sees %r instead of %d" % ([struct.unpack("Q", one)[0] for one in seen], step))
            # What was counted long ago is there, too.
            past = (step + 1) // 2
            at_past = past * 4099 % steps * 8
            if at_past > 16 and not counted[at_past:at_past + 8] == mapped[at_past:at_past + 8] == struct.pack("Q", past):
                complain("back does not see %d any more in step %d" % (past, step))
            send(talk, 2, count)
            operate(turns, 1, 1)
        private[at % (1 << 20):at % (1 << 20) + 8] = count
        if said != count:
            complain("%r was said in step %d" % (said, step))
        if private[at % (1 << 20):at % (1 << 20) + 8] != count or os.pread(own.fileno(), 50_000, 0) != pattern(50_000):
            complain("what only one container has is another")
        named = os.stat(SHM + "counted")
        if os.fstat(opened.fileno())[1:3] != named[1:3]:
            complain("the open file is not the one of its name")


def check():
    problems = []
    def same(what, is_so, should):
        if is_so != should:
            problems.append("%s: %.80r instead of %.80r" % (what, is_so, should))
    same("idle segment", attach(segment(IDLE), 3 * 4096 + 100)[:], pattern(3 * 4096 + 100))
    values = (ctypes.c_ushort * 3)()
    done(c.semctl(semaphores(VALUES), 0, GETALL, values), "GETALL")
    same("semaphores", list(values), [5, 0, 32767])
    letters = queue(LETTERS)
    for number, letter in enumerate(LETTER):
        same("letter %d" % number, receive(letters, number, NOWAIT | COPY), letter)
    same("file", open(SHM + "dir/link", "rb").read(), pattern(100_000))
    still, linked = os.stat(SHM + "still"), os.stat(SHM + "linked")
    same("links", (linked.st_ino, linked.st_nlink), (still.st_ino, 2))
    same("owner", (still.st_uid, still.st_gid, still.st_mode & 0o7777), (1234, 5678, 0o4640))
    same("directory", os.stat(SHM + "dir").st_mode & 0o7777, 0o1770)
    same("names", sorted(name for name in os.listdir(SHM) if name != "complaints"), ["counted", "dir", "linked", "still"])
    if os.path.exists(SHM + "complaints"):
        problems.append(open(SHM + "complaints").read())
    print(struct.unpack("Q", attach(segment(COUNTED), LENGTH)[0:8])[0], " ".join(problems))


role = sys.argv[1]
if role == "make":
    make()
elif role == "check":
    check()
else:
    try:
        play(role == "front")
    except BaseException as error:
        complain("%s: %r" % (role, error))
        raise
