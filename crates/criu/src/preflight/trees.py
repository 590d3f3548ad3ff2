# A random tree of processes with sessions, groups, zombies and orphans; the seed is the first line of /shared/seed.
import random
chance = random.Random(int(open('/shared/seed').read()))
COUNT = 14
pairs = [socket.socketpair() for _ in range(COUNT)]
pids = {}


def obey(own):
    while True:
        order, number = pairs[own][1].recv(64).decode().split()
        number = int(number)
        answer = 0
        try:
            if order == 'fork':
                answer = os.fork()
                if answer == 0:
                    own = number
                    continue
            elif order == 'session': os.setsid()
            elif order == 'group': os.setpgid(0, number)
            elif order == 'reaper': libc.prctl(36, number, 0, 0, 0)
            elif order == 'ignore': signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            elif order == 'end': os._exit(0)
        except OSError:
            answer = -1
        pairs[own][1].send(str(answer).encode())


def command(process, order, number=0):
    pairs[process][0].send(f'{order} {number}'.encode())
    return int(pairs[process][0].recv(64))


def ended(pid):
    try:
        with open(f'/proc/{pid}/stat') as f: return f.read().rsplit(')', 1)[1].split()[0] == 'Z'
    except OSError:
        return True


# Of zombies below a helper that CRIU makes it may miss the end, and wait for ever (restorer.c, `wait_zombies`): the first process has none.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
has_zombies = chance.random() < 0.5
pids[0] = os.fork()
if pids[0] == 0:
    if has_zombies: signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    obey(0)
last = 0
REAPERS = chance.choice([0, 0, 1, 4])
GROUPS = chance.choice([0, 3])
for _ in range(70):
    if not pids: break
    process = chance.choice(sorted(pids))
    order = chance.choices(['fork', 'session', 'end', 'reaper', 'group', 'ignore'], [10, 6, 4, REAPERS, GROUPS, 1])[0]
    if order == 'fork':
        if last + 1 < COUNT:
            last += 1
            pids[last] = command(process, 'fork', last)
    elif order == 'end':
        pid = pids.pop(process)
        pairs[process][0].send(b'end 0')
        while not ended(pid): time.sleep(0.001)
    elif order == 'group':
        command(process, 'group', chance.choice([0] + sorted(pids.values())))
    else:
        command(process, order, chance.choice([0, 1, 1]))
ready()
