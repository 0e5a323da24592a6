#!/bin/sh
# Installs Ceph's S3 gateway and the two daemons below it, from Debian, for tests/servers/test_objects_radosgw.py
# and benchmarks. Nothing of it is started: kvtide.testing.servers.s3 does that, in a temporary folder.
set -eu

if [ "$(id -u)" -ne 0 ]; then
    echo "scripts/radosgw.sh: installs packages, so run it as root: sudo scripts/radosgw.sh" >&2
    exit 1
fi
for program in radosgw radosgw-admin ceph ceph-mon ceph-osd monmaptool; do
    command -v "$program" >/dev/null 2>&1 && continue
    # The packages must not start daemons of their own on this machine.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        radosgw ceph-common ceph-mon ceph-osd >/dev/null
    break
done
radosgw --version
