# Sourced by scripts that boot kernels of Debian's in virtual machines without hardware support. What they need is taken from the mirrors that
# apt is set up with, and installed nowhere but for qemu.

say() { echo "${0##*/}: $*"; }
die() { echo "${0##*/}: $*" >&2; exit 1; }

# need PROGRAM PACKAGE: installs the package where the program is missing.
need() {
    if command -v "$1" >/dev/null; then return; fi
    [ "$(id -u)" = 0 ] || die "$2 is missing, and installing it needs root"
    say "installing $2"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null \
        || die "apt could not install $2; see its message above"
}

# unpack PACKAGE DIRECTORY: downloads a package, once, and unpacks it into DIRECTORY/PACKAGE.
unpack() {
    if [ -e "$2/$1" ]; then return; fi
    say "downloading $1"
    mkdir -p "$2/packages"
    # apt-get would have another user download, who may not write here.
    (cd "$2/packages" && apt-get download -qq -o APT::Sandbox::User=root "$1") || die "apt could not download $1; try \`apt-get update\`"
    dpkg -x "$2"/packages/"$1"_*.deb "$2/$1.new"
    mv "$2/$1.new" "$2/$1"
    rm "$2"/packages/"$1"_*.deb
}

# newest_kernel SERIES: the name of the package of Debian's newest kernel for clouds of this series, e.g. 6.1.
newest_kernel() {
    apt-cache search --names-only "^linux-image-${1//./\\.}\.[0-9].*-cloud-amd64\$" | cut -d' ' -f1 | sort -V | tail -n 1
}
