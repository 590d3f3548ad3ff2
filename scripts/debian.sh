# Sourced by scripts that need newer packages of Debian's than the machine has: from the mirror that apt is already set up with,
# unpacked below a prefix, and installed nowhere.

# Directory for apt's own state; the sourcing script makes it, and removes it.
: "${work:?}"

debian_mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -E '/debian/?$' | head -n 1)
debian_keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# unpack_debian SUITE PREFIX PACKAGE...: packages of that suite, with the libraries they need, into the empty directory PREFIX.
unpack_debian() {
    local suite=$1 prefix=$2
    shift 2
    [ -n "$debian_mirror" ] || { echo "${0##*/}: apt knows no Debian mirror; add one to its sources" >&2; return 1; }
    [ -e "$debian_keyring" ] || { echo "${0##*/}: $debian_keyring is missing; apt-get install debian-archive-keyring" >&2; return 1; }
    rm -rf --one-file-system "$work/apt"
    mkdir -p "$work"/apt/{etc,state/lists/partial,cache/archives/partial}
    echo "deb [signed-by=$debian_keyring] $debian_mirror $suite main" > "$work/apt/etc/sources.list"
    : > "$work/apt/state/status"
    # With an empty dpkg status apt resolves the whole closure, of which programs and scripts in Python are not needed.
    local options=(-o Dir::State="$work/apt/state" -o Dir::State::status="$work/apt/state/status"
        -o Dir::Cache="$work/apt/cache" -o Dir::Etc::sourcelist="$work/apt/etc/sources.list"
        -o Dir::Etc::sourceparts=/dev/null -o APT::Architecture="$(dpkg --print-architecture)"
        -o APT::Install-Recommends=false -o APT::Sandbox::User=root -qq)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" install --download-only -y "$@"
    rm -rf --one-file-system "$prefix"
    mkdir -p "$prefix"
    local deb
    for deb in "$work"/apt/cache/archives/*.deb; do
        case $(basename "$deb") in python* | libpython* | perl* | debconf* | dpkg* | tar_* | media-types* | netbase* | tzdata*) continue ;; esac
        dpkg -x "$deb" "$prefix"
    done
    # usr/lib/TRIPLET/ld-linux-ARCH.so.N, which is the real file; others of the name are links to it.
    loader=$(find "$prefix" -name 'ld-linux*.so.*' -type f | head -n 1)
    lib=$(dirname "$loader")
    loader=$(basename "$loader")
    lib=${lib#"$prefix"}
}

# take_place NEW OLD: puts a directory in the place of another one.
take_place() {
    if [ -d "$2" ]; then rm -rf --one-file-system "$2"; fi
    mv "$1" "$2"
}
