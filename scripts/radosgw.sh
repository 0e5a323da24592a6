#!/bin/sh
# Installs Ceph's S3 gateway and the two daemons below it, from Debian, for tests/servers/test_objects_radosgw.py
# and benchmarks. Nothing of it is started: kvtide.testing.servers.s3 does that, in a temporary folder.
set -eu

if [ "$(id -u)" -ne 0 ]; then
    echo "scripts/radosgw.sh: installs packages, so run it as root: sudo scripts/radosgw.sh" >&2
    exit 1
fi
for program in radosgw radosgw-admin ceph ceph-mon ceph-osd monmaptool; do
    if ! command -v "$program" >/dev/null; then
        apt-get update -q
        # Debian enables units for the daemons; without a /etc/ceph/ceph.conf they have nothing to run.
        DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends radosgw ceph-common ceph-mon ceph-osd
        break
    fi
done
radosgw --version
