#!/usr/bin/env bash
# Executes the blocks of docs/setup.md on two hosts, as a new user pastes them, with a client that is connected to the container all the while.
#
#   usage: hosts.sh CHECKOUT BIN      BIN has the programs. In namespaces of its own (`suites isolate`).
#
# A host is made of namespaces; its /usr, /etc and /opt begin as this machine's, without Tranship. What the machine cannot give has a stand-in, in the
# host's /usr/local/bin: `apt-get` and `debootstrap` (no mirror is asked; files come from this machine), `make build` (has been built), `ssh` and `scp` (run on
# the other host), `systemctl` (starts what the units name; the suite `confined` has systemd).
set -euo pipefail

checkout=$1 bin=$2
# What else this was started with belongs to none of the hosts.
for descriptor in /proc/self/fd/*; do
    descriptor=${descriptor##*/}
    [ "$descriptor" -le 2 ] || [ "$descriptor" = 255 ] || exec {descriptor}<&-
done
# Seen by the hosts, too, which have a /tmp of their own.
work=$(mktemp -d "$bin/setup-XXXXXX")
hosts="a b"
declare -A pid
server=

fail() { echo "setup: $*" >&2; exit 1; }

# What `suites isolate` runs as a host: its own files over this machine's.
cat > "$work/host" << 'END'
set -euo pipefail
name=$1 work=$2
hostname "$name"
mount -t tmpfs -o mode=755 tmpfs /srv
mkdir /run/layers && mount -t tmpfs tmpfs /run/layers
for top in etc opt usr; do
    mkdir -p /run/layers/$top/upper /run/layers/$top/work
    mount -t overlay -o "lowerdir=/$top,upperdir=/run/layers/$top/upper,workdir=/run/layers/$top/work" overlay /$top
done
rm -rf /etc/tranship /usr/lib/tranship /usr/bin/tranship /usr/bin/transhipd /etc/systemd/system/transhipd*
mount -t tmpfs -o mode=700 tmpfs /var/lib/tranship
cp "$work"/stand-ins/* /usr/local/bin/
touch /run/is-up
exec sleep infinity
END

mkdir "$work/stand-ins"
cat > "$work/stand-ins/apt-get" << 'END'
#!/bin/sh
# Nothing is installed: what the commands need is there, or they fail.
[ "$1" = install ]
END
cat > "$work/stand-ins/make" << END
#!/bin/sh
[ "\$*" = build ] && [ -x $bin/transhipd ] && { [ -e target/release ] || ln -s $bin target/release; }
END
cat > "$work/stand-ins/debootstrap" << 'END'
#!/usr/bin/env bash
# A root filesystem with redis-server and a shell, of this machine's files.
set -eu
root=${!#}
mkdir -p "$root"/{bin,dev,etc,proc,run,sys,tmp,usr/bin}
for program in /usr/bin/redis-server /bin/sh; do
    cp --parents -L $(ldd $program | grep -o '/[^ ]*') "$root"
    cp -L $program "$root/usr/bin/"
done
ln -s /usr/bin/sh "$root/bin/sh"
END
cat > "$work/stand-ins/ssh" << END
#!/usr/bin/env bash
# ssh root@HOST COMMAND…: has it run by whoever made the hosts.
set -eu
host=\${1#root@}; shift
request=\$(mktemp -d $work/request-XXXXXX)
mkfifo "\$request"/{in,out,status}
printf '%s\n' "\$*" > "\$request/command"
printf '%s\n' "\$host" > "\$request/new" && mv "\$request/new" "\$request/host"
cat <&0 > "\$request/in" &
cat "\$request/out"
status=\$(cat "\$request/status")
kill \$! 2> /dev/null || true
exit "\$status"
END
cat > "$work/stand-ins/scp" << 'END'
#!/usr/bin/env bash
# scp FILE… root@HOST:DIRECTORY/
set -eu
to=${!#}; host=${to%%:*}; directory=${to#*:}; files=("${@:1:$#-1}")
for file in "${files[@]}"; do
    tar -C "$(dirname "$file")" -c "$(basename "$file")" | ssh "$host" tar -C "$directory" -x
done
END
cat > "$work/stand-ins/systemctl" << 'END'
#!/usr/bin/env bash
# systemctl daemon-reload | enable --now transhipd
set -eu
[ "$*" = "enable --now transhipd" ] || { [ "$*" = daemon-reload ]; exit; }
mkdir -p -m 700 /run/tranship
for unit in transhipd-launcher transhipd; do
    # Whether the request comes from the unit only systemd can tell.
    command=$(sed -n 's/^ExecStart=//p' /etc/systemd/system/$unit.service | sed 's/ --unit [^ ]*//')
    setsid $command > /run/$unit.log 2>&1 < /dev/null &
    until [ -S "$([ $unit = transhipd ] && echo /run/tranship/agent.sock || echo /run/tranship/launcher.sock)" ]; do
        kill -0 $! || { cat /run/$unit.log >&2; exit 1; }
        sleep 0.05
    done
done
END
chmod +x "$work"/stand-ins/*

on() { # on HOST COMMAND…
    local host=$1; shift
    nsenter --target "${pid[$host]}" --all --wdns="$checkout" env PATH="/usr/local/bin:$PATH" "$@"
}

tell() {
    for host in $hosts; do
        [ -z "${pid[$host]:-}" ] || on "$host" sh -c 'tail -n 30 /run/transhipd*.log' 2> /dev/null | sed "s/^/$host: /" >&2
    done
}

end() {
    local status=$?
    [ $status = 0 ] || tell
    [ -z "$server" ] || kill "$server"
    for host in $hosts; do [ -z "${pid[$host]:-}" ] || kill "${pid[$host]}"; done
    wait
    rm -r "$work"
    exit $status
}
trap end EXIT

# The segment that both hosts and a client are on.
ip link add br0 type bridge
ip link set br0 up
ip address add 192.0.2.9/24 dev br0
number=0
for host in $hosts; do
    number=$((number + 1))
    "$bin/suites" isolate "setup-$host" -- bash "$work/host" "$host" "$work" &
    for _ in $(seq 400); do
        for found in $(pgrep -x sleep); do
            [ "$(tr '\0' ' ' < "/proc/$found/cmdline")" = "sleep infinity " ] || continue
            [ "$(nsenter --target "$found" --uts hostname)" = "$host" ] && pid[$host]=$found
        done
        [ -z "${pid[$host]:-}" ] || break
        sleep 0.05
    done
    [ -n "${pid[$host]:-}" ] || fail "host $host does not come up"
    ip link add "to-$host" type veth peer name eth0 netns "${pid[$host]}"
    ip link set "to-$host" master br0 up
    nsenter --target "${pid[$host]}" --net ip address add "192.0.2.$number/24" dev eth0
    nsenter --target "${pid[$host]}" --net ip link set eth0 up
done
# Does what `ssh` asks for.
serve() {
    while sleep 0.02; do
        for asked in "$work"/request-*/host; do
            [ -e "$asked" ] || continue
            local request=${asked%/host} host command status=0
            host=$(cat "$asked") command=$(cat "${asked%/host}/command")
            rm "$asked"
            on "$host" sh -c "cd / && $command" < "$request/in" > "$request/out" || status=$?
            echo "$status" > "$request/status"
        done
    done
}
serve &
server=$!

# A connection to the container, from before the move until after it.
connect() {
    for _ in $(seq 200); do
        { exec 8<> /dev/tcp/192.0.2.10/6379; } 2> /dev/null && return
        sleep 0.05
    done
    fail "nobody answers at 192.0.2.10:6379"
}
ask() {
    printf '%s\r\n' "$*" >&8
    local answer; read -r -t 20 answer <&8 || fail "no answer to $*"
    printf '%s\n' "${answer%$'\r'}"
}

# The blocks: of each its hosts, and its file.
awk -v work="$work" '
    /^```sh$/ { getline; if ($0 ~ /^# on /) { n++; file = sprintf("%s/block-%02d", work, n); inside = 1 } }
    /^```$/ { if (inside) close(file); inside = 0 }
    inside { print > file }' "$checkout/docs/setup.md"
count=0
for block in "$work"/block-*; do
    count=$((count + 1))
    case $(sed '1s/,.*//; q' "$block") in
        "# on a and b") where="a b" ;;
        "# on a") where=a ;;
        "# on b") where=b ;;
        *) fail "$(head -1 "$block") names no host" ;;
    esac
    # Before the last one the container runs.
    if grep -q '^tranship move redis --to b$' "$block"; then
        connect
        [ "$(ask INCR counter)" = :1 ] || fail "Redis counts wrongly before the move"
    fi
    for host in $where; do
        echo "--- on $host"; cat "$block"
        on "$host" bash -e -o pipefail "$block" || fail "a block of docs/setup.md failed on $host"
    done
done
[ $count -ge 12 ] || fail "docs/setup.md has only $count blocks"
[ "$(ask INCR counter)" = :2 ] || fail "Redis counts wrongly after the move"
[ "$(on b runc list -q)" = redis ] || fail "runc on b does not list redis"
[ -z "$(on a runc list -q)" ] || fail "runc on a still lists redis"
on b runc exec redis /bin/sh -c 'kill -0 1'
on b runc delete --force redis
echo "setup: $count blocks, and the container moved under a connected client"
