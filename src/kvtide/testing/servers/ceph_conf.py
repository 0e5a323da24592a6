"""What a monitor, a storage daemon in memory and a radosgw are told, for tests: one of each, on loopback."""

CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = {address}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
# Without authentication there is no encryption, which daemons ask of a monitor otherwise.
ms mon client mode = crc secure
ms mon cluster mode = crc secure
ms mon service mode = crc secure
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 1073741824
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
run dir = {folder}/run
admin socket =
pid file =
log file =
log to stderr = false
"""
