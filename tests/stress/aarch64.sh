#!/usr/bin/env bash
# Runs tests as aarch64 code, under QEMU's user-mode emulation, in a directory of Debian's arm64 packages (torch's CPU build
# among them). As root, on Debian with binfmt_misc; an hour of one core for the files below, most of it torch's import.
#
#     tests/stress/aarch64.sh PLACE [tests/test_ring.py ...]
#
# What it shows: system call numbers, structures, flags and the machine code of the fence. What it can't: how such a
# processor reorders, since the host's does not. MADV_DONTFORK and MADV_POPULATE_* do nothing in the emulator, and
# /proc/PID/syscall shows the host's numbers: five tests of test_memory.py and two of test_wait.py fail for that.
set -euo pipefail
place=$(mkdir -p "$1" && cd "$1" && pwd)
shift
tests=("${@:-tests/test_memory.py}")
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
root=$place/root

packages() { # fetch for one architecture, without touching this system's own lists
    local architecture=$1 && shift
    local apt=$place/apt-$architecture
    mkdir -p "$apt"/{lists/partial,cache/archives/partial,state}
    touch "$apt/state/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$apt/sources.list"
    cat >"$apt/apt.conf" <<CONF
Dir::State "$apt/state";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Architecture "$architecture";
APT::Architectures {"$architecture";};
APT::Sandbox::User "root";
CONF
    APT_CONFIG=$apt/apt.conf apt-get update -qq
    APT_CONFIG=$apt/apt.conf apt-get install -qq --yes --no-install-recommends --download-only "$@"
}

if [[ ! -x $root/usr/bin/python3.13 ]]; then
    packages amd64 qemu-user
    packages arm64 python3-torch bash coreutils dash libc6
    mkdir -p "$place/qemu" "$root"/{usr/bin,usr/lib,usr/sbin,proc,dev,sys,tmp,root,repository,pytest}
    for name in bin lib sbin; do ln -sfn usr/$name "$root/$name"; done
    dpkg -x "$place"/apt-amd64/cache/archives/qemu-user_*.deb "$place/qemu"
    for package in "$place"/apt-arm64/cache/archives/*.deb; do dpkg -x "$package" "$root"; done
    ln -sf python3.13 "$root/usr/bin/python3"
    python3 -m pip install -q --target "$root/pytest" "pytest>=9" pytest-timeout pytest-xdist
fi

mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
[[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]] ||
    echo ":qemu-aarch64:M::$magic:$mask:$place/qemu/usr/bin/qemu-aarch64:F" >/proc/sys/fs/binfmt_misc/register

# A mount namespace of its own, so that nothing stays mounted.
exec unshare --mount --propagation private bash -euo pipefail -c '
    root=$1 repository=$2 && shift 2
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    mount --bind "$repository" "$root/repository"
    lib=/usr/lib/aarch64-linux-gnu
    exec chroot "$root" env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 \
        PYTHONPATH=/pytest:/repository LD_LIBRARY_PATH=$lib/blas:$lib/lapack \
        bash -c "cd /repository && exec python3 -m pytest -p no:cacheprovider -q --timeout 900 -W default \"\$@\"" - "$@"
' - "$root" "$repository" "${tests[@]}"
