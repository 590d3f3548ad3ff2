"""Changes one of CRIU's images, as a peer could that forges them: forge.py DIRECTORY WHAT (images/*.proto of CRIU)."""

import glob
import struct
import sys

directory, what = sys.argv[1:]
SYS_ADMIN = 1 << 21
BIND = 4096


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def fields(message):
    at, out = 0, []

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 2:
            length = number()
            value = message[at:at + length]
            at += length
        else:
            value = number()
        out.append((key >> 3, value))
    return out


def encoded(all_fields):
    out = b""
    for number, value in all_fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            out += varint(number << 3) + varint(value)
    return out


def edit(pattern, change):
    [path] = glob.glob(f"{directory}/{pattern}")
    data = open(path, "rb").read()
    at, entries = 8, []
    while at < len(data):
        length = struct.unpack("<I", data[at:at + 4])[0]
        entries.append(fields(data[at + 4:at + 4 + length]))
        at += 4 + length
    entries = [encoded(entry) for entry in change(entries)]
    # Nothing of the directory is on a disk, and the agent has not opened it yet.
    with open(path, "wb") as file:
        file.write(data[:8] + b"".join(struct.pack("<I", len(entry)) + entry for entry in entries))


def within(message, path, change):
    if not path:
        return change(message)
    return [(n, encoded(within(fields(v), path[1:], change)) if n == path[0] else v) for n, v in message]


def capabilities(creds):
    sets = {9: 0, 10: 0, 11: 0, 12: 0}

    def more(number, value):
        sets[number] += 1
        return value | SYS_ADMIN if sets[number] == 1 else value

    return [(n, more(n, v) if n in sets else v) for n, v in creds]


def mounts(entries):
    as_dict = [dict(entry) for entry in entries]
    [root] = [mount for mount in as_dict if mount[7] == b"/"]
    [model] = [entry for entry in entries if dict(entry)[7] == b"/tmp"]
    change = {1: 5, 2: 9999, 3: 9999, 4: root[2], 5: 1 << 21, 7: b"/mnt", 8: b"/var", 9: b"", 17: BIND}
    return [[(n, change.get(n, v)) for n, v in model if n != 18]] + entries


if what == "capability":
    edit("core-1.img", lambda entries: [within(entries[0], [5, 10], capabilities)])
elif what == "mount":
    edit("mountpoints-*.img", mounts)
elif what == "pid-namespace":
    # The number of the namespace in which criu was when it dumped.
    edit("ids-1.img", lambda entries: [[(n, 1 if n == 5 else v) for n, v in entries[0]]])
elif what == "file":
    open(f"{directory}/autofs-9.img", "wb").close()
else:
    sys.exit(f"no way to forge {what}")
