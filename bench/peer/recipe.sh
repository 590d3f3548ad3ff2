#!/usr/bin/env bash
# The peer that Tranship is measured against: stop-and-copy migration of a runc container by stock runc and stock CRIU
# alone, as it is published everywhere: the memory goes straight to CRIU's page server on the destination while the
# container stands still, the rest of the images follows as a tar stream, and `runc restore` brings it up there.
#
#   recipe.sh --source SHELL --dest SHELL --dest-address IP --name NAME --dest-bundle DIR [--dir DIR] [--port PORT]
#             [--parent IFACE] [--delay S]
#
# SHELL is a command that gives a root shell on a node: `ssh root@node bash` on real hosts, `nsenter … bash` in the lab.
# Each is started once, so that no step pays for logging in. NAME's network namespace is /run/netns/NAME on both nodes,
# its eth0 a macvlan on PARENT. The bundle is on both nodes already; CRIU's files (--dir) are on a tmpfs on both. The restore
# begins S seconds later than it could.
#
# What was done to make it as fast as the plain recipe can be:
#   - everything that is no part of the recipe happens before the freeze: both page server and tar receiver are up and
#     listening, the container's addresses are known, CRIU's feature detection is cached (CRIU caches it in /run);
#   - nothing is waited for by sleeping; a step begins when the one before has ended;
#   - nothing is compressed or encrypted, no image touches a disk.
#
# Prints lines `step NAME BEGIN END` (s since the Unix epoch) and at the end `freeze TIME` and `running TIME`: the first
# task frozen and the last task running, as CRIU's own logs have it. A log's clock is tied to the machine's by the time of
# the log's last write, so both are right to within the kernel's tick (4 ms) plus, on real hosts, the clocks' difference.
set -euo pipefail

fail() { echo "recipe: $*" >&2; exit 1; }

source_shell= dest_shell= address= name= bundle= dir=/run/recipe port=27000 parent=eth0 delay=0
while [ $# -gt 1 ]; do
    case $1 in
        --source) source_shell=$2 ;;
        --dest) dest_shell=$2 ;;
        --dest-address) address=$2 ;;
        --name) name=$2 ;;
        --dest-bundle) bundle=$2 ;;
        --dir) dir=$2 ;;
        --port) port=$2 ;;
        --parent) parent=$2 ;;
        --delay) delay=$2 ;;
        *) fail "unknown option $1" ;;
    esac
    shift 2
done
[ $# = 0 ] || fail "option $1 has no value"
for needed in source_shell dest_shell address name bundle; do
    [ -n "${!needed}" ] || fail "the option for $needed is missing"
done
tar_port=$((port + 1))

# --- two shells that stay open -------------------------------------------------------------------------------------
fifos=$(mktemp -d)
trap 'rm -r "$fifos"' EXIT
open_shell() { # open_shell NODE COMMAND
    mkfifo "$fifos/$1.in" "$fifos/$1.out"
    $2 < "$fifos/$1.in" > "$fifos/$1.out" &
}
open_shell source "$source_shell"
exec {source_in}> "$fifos/source.in" {source_out}< "$fifos/source.out"
open_shell dest "$dest_shell"
exec {dest_in}> "$fifos/dest.in" {dest_out}< "$fifos/dest.out"

# on NODE COMMANDS: runs them in that node's shell; what they print is in $said.
on() {
    local in="$1_in" out="$1_out" line
    # stdin is the shell's own command stream: keep the commands off it.
    printf '{ %s\n} < /dev/null; printf "\\n::%%s\\n" $?\n' "$2" >&"${!in}"
    said=
    while IFS= read -r line <&"${!out}"; do
        case $line in
            ::0) return 0 ;;
            ::*) fail "on the $1, exit status ${line#::}: $2: ${said:-nothing was printed}" ;;
            *) said+=$line$'\n' ;;
        esac
    done
    fail "the shell on the $1 ended during: $2"
}
step() { # step NAME NODE COMMANDS
    local begin=$EPOCHREALTIME
    on "$2" "$3"
    printf 'step %s %s %s\n' "$1" "$begin" "$EPOCHREALTIME"
}

# --- before the freeze ---------------------------------------------------------------------------------------------
images=$dir/images work=$dir/work
for node in source dest; do
    on "$node" "mkdir -p $images $work && criu check --feature mem_dirty_track > /dev/null 2>&1 || true"
done
on source "ip -n $name -o -4 addr show dev eth0 | { read -r _ _ _ cidr _; echo \$cidr; }
           ip -n $name -o link show dev eth0 | sed 's/.*link.ether \\([0-9a-f:]*\\).*/\\1/'"
{ read -r cidr; read -r mac; } <<< "$said"

on dest "trap 'kill \$pages \$tar 2> /dev/null' EXIT"
# Both receivers say by a pipe of their own when they listen, and end with their one connection.
on dest "mkfifo $dir/serving $dir/listening
    criu page-server --images-dir $images --work-dir $work --log-file page-server.log --address $address --port $port \
        --status-fd 9 9> $dir/serving > /dev/null 2>&1 & pages=\$!
    IFS= read -r -d '' _ < $dir/serving || { tail -n 3 $work/page-server.log; false; }"
on dest "perl -MSocket -e '
        socket(my \$l, PF_INET, SOCK_STREAM, 0); setsockopt(\$l, SOL_SOCKET, SO_REUSEADDR, 1);
        bind(\$l, sockaddr_in($tar_port, inet_aton(q($address)))) && listen(\$l, 1) or die \$!;
        open(R, q(>), q($dir/listening)); print R qq(\\n); close(R);
        accept(my \$c, \$l) or die \$!; open(STDIN, q(<&), \$c); exec qw(tar -x -C $images)' & tar=\$!
    read -r _ < $dir/listening"

# --- the migration --------------------------------------------------------------------------------------------------
step dump source "runc checkpoint --tcp-established --page-server $address:$port --image-path $images --work-path $work $name 2>&1 ||
    { grep -a Error $work/dump.log; false; }"
# The container is dead. Its sockets went without a word, as CRIU keeps them in repair mode; now its address goes too.
step 'source network' source "ip netns delete $name"
# All pages and all other images are there when both receivers have ended.
step images source "tar -c -C $images . > /dev/tcp/$address/$tar_port"
step 'images received' dest 'wait $pages && wait $tar'
# Packets that arrive before the sockets exist draw an RST, datagrams an ICMP error, which must not get out. (Letting no
# packets in would be another way, but would lose those that come between CRIU's opening the sockets and our opening the
# namespace.)
step network dest "ip netns add $name
    ip link add link $parent name eth0 address $mac netns $name type macvlan mode bridge
    ip netns exec $name sh -c '
        nft \"add table ip quiet; add chain ip quiet out { type filter hook output priority 0; };
             add rule ip quiet out tcp flags & rst == rst drop;
             add rule ip quiet out icmp type destination-unreachable drop\" &&
        echo 1 > /proc/sys/net/ipv4/conf/all/arp_notify &&
        ip link set lo up && ip addr add $cidr dev eth0 && ip link set eth0 up'"
sleep "$delay"
step restore dest "runc restore --detach --tcp-established --image-path $images --work-path $work --bundle $bundle $name 2>&1 ||
    { grep -a Error $work/restore.log; false; }"
step 'allow resets' dest "ip netns exec $name nft delete table ip quiet"

# --- what the logs say ------------------------------------------------------------------------------------------------
# at LOG PATTERN: when the first line that matches was written, in s since the epoch.
at='at() { awk -v last=$(stat -c %.6Y $1) -v pattern="$2" "
        { t = \$1; gsub(/[()]/, \"\", t); if (\$1 ~ /^\\(/) end = t } !found && \$0 ~ pattern { found = t }
        END { if (!found) exit 1; printf \"%.6f\\n\", last - (end - found) }" $1; }'
on source "$at; at $work/dump.log 'freezing |Seized task'"
printf 'freeze %s\n' $said
on dest "$at; at $work/restore.log 'Tasks resumed'"
printf 'running %s\n' $said
for node in source dest; do on "$node" "rm -r $dir"; done
