"""The process that holds Mooncake's client, with a library in it that goes wrong on purpose.

The real child and the real tier; only ``mooncake.store`` is ours: it keeps objects in a dict, and does to a
call what a file tells it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.errors import CorruptRecordError, TierError, TierFullError, TierUnavailableError
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.mooncake import MooncakeTier
from kvtide.tiers.mooncake_client import environment_of_child
from kvtide.tiers.mooncake_options import MooncakeOptions

LIBRARY = """
import ctypes, json, os, pathlib

FAULTS = pathlib.Path(__file__).with_name("faults.json")

def fault(name):
    return json.loads(FAULTS.read_text()).get(name)

if fault("import"):
    raise ImportError(fault("import"))

class MooncakeDistributedStore:
    def __init__(self):
        self._objects, self._registered, self.reads = {}, set(), 0

    def setup(self, *arguments):
        FAULTS.with_name("setup.json").write_text(json.dumps(arguments))
        return fault("setup") or 0

    def register_buffer(self, address, size):
        self._registered.add(address)
        return fault("register") or 0

    def unregister_buffer(self, address):
        self._registered.remove(address)
        FAULTS.with_name("unregistered").touch()
        return 0

    def close(self):
        FAULTS.with_name("closed").touch()
        return 0

    def _faulty(self, name, ends):
        what = fault(name)
        if what == "die":
            ctypes.string_at(0)
        if what == "hang":
            ctypes.CDLL(None).pause()
        if what == "raise":
            raise ValueError("not like this")
        return ends if what is None else what

    def batch_is_exist(self, keys):
        return self._faulty("exist", [int(key in self._objects) for key in keys])

    def batch_put_from(self, keys, places, sizes):
        ends = self._faulty("put", [0] * len(keys))
        for key, place, size, end in zip(keys, places, sizes, ends):
            if end == 0:
                self._objects[key] = ctypes.string_at(place, size)
        return ends

    def batch_get_into(self, keys, places, sizes):
        ends = []
        for key, place, size in zip(keys, places, sizes):
            found = self._objects.get(key)
            if found is None:
                ends.append(-704)
            elif len(found) > size:
                ends.append(-600)
            else:
                ctypes.memmove(place, found, len(found))
                ends.append(len(found))
                self.reads += 1
                if self.reads <= (fault("damaged_reads") or 0):
                    ctypes.memset(place + size - 1, 0, 1)
        return self._faulty("get", ends)

    def get_size(self, key):
        return len(self._objects[key])

    def batch_remove(self, keys, force):
        FAULTS.with_name("forced.json").write_text(json.dumps(force))
        return self._faulty("remove", [0 if self._objects.pop(key, None) else -704 for key in keys])
"""


class Library:
    """How the library in the child is told what to do wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "mooncake"
        self.folder.mkdir()
        (self.folder / "__init__.py").touch()
        (self.folder / "store.py").write_text(LIBRARY)
        self.goes_wrong()

    def goes_wrong(self, **faults: object) -> None:
        new = self.folder / "new.json"
        new.write_text(json.dumps(faults))
        new.replace(self.folder / "faults.json")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Library(tmp_path)


@pytest.fixture
def tier(library: Library) -> Iterator[MooncakeTier]:
    made = tier_with()
    yield made
    made.close()


def tier_with(**options: object) -> MooncakeTier:
    options = {"master": "127.0.0.1:50051", "buffer": "1MiB", **options}
    return MooncakeTier(TierPlace(IDENTITY, 0, 0, options), MooncakeOptions.read_from(options))


def written(tier: MooncakeTier, number: int = 1, deadline_s: float = DEADLINE_S) -> Written:
    return tier.write(name_of(number), memoryview(payload_of(number)), deadline_s)


def read(tier: MooncakeTier, number: int = 1, deadline_s: float = DEADLINE_S) -> bytearray | None:
    payload = bytearray(PAYLOAD_BYTES)
    return payload if tier.read_into(name_of(number).key, memoryview(payload), deadline_s) else None


def asked(tier: MooncakeTier, number: int = 1, deadline_s: float = DEADLINE_S) -> list[bool]:
    return tier.contains([name_of(number).key], deadline_s)


CALLS: dict[str, Callable[..., object]] = {"put": written, "get": read, "exist": asked}


def test_without_faults_it_keeps_what_is_written(tier: MooncakeTier) -> None:
    tier.open()
    assert written(tier) is Written.NEW
    assert written(tier) is Written.THERE_ALREADY
    assert read(tier) == payload_of(1)
    assert read(tier, 2) is None
    assert asked(tier) == [True]
    assert "master 127.0.0.1:50051" in tier.ping(DEADLINE_S)


def test_the_library_is_set_up_as_the_options_say(library: Library) -> None:
    tier = tier_with(local_hostname="here", segment="2MiB", protocol="rdma", device="mlx5_1")
    tier.open()
    tier.close()
    arguments = json.loads((library.folder / "setup.json").read_text())
    assert arguments == ["here", "P2PHANDSHAKE", 2 << 20, 0, "rdma", "mlx5_1", "127.0.0.1:50051"]


def test_the_address_towards_the_master_is_found(tier: MooncakeTier, library: Library) -> None:
    tier.open()
    assert json.loads((library.folder / "setup.json").read_text())[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "says_goodbye"),
    [({}, False), ({"segment": "2MiB"}, True), ({"metadata": "http://127.0.0.1:8080/metadata"}, True)],
    ids=["nobody knows of it", "lends memory", "a metadata server"],
)
def test_closing_unregisters_and_takes_leave_of_who_knows_of_it(
    library: Library, options: dict[str, object], says_goodbye: bool
) -> None:
    tier = tier_with(**options)
    tier.open()
    tier.close()
    assert (library.folder / "unregistered").exists()
    assert (library.folder / "closed").exists() == says_goodbye


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"import": "libibverbs.so.1: cannot open"}, r"libibverbs\.so\.1.*Debian: libibverbs1"),
        ({"setup": -1}, r"code -1; see that mooncake_master runs.*tiers\.options\.master"),
        ({"register": -600}, "staging buffer cannot be registered: code -600"),
        ({"exist": [-900]}, r"RPC_FAIL \(-900\)"),
    ],
)
def test_what_keeps_it_from_opening_is_told_and_it_opens_later(
    tier: MooncakeTier, library: Library, faults: dict[str, object], said: str
) -> None:
    library.goes_wrong(**faults)
    for _ in range(2):
        with pytest.raises(TierUnavailableError, match=said):
            tier.open()
    library.goes_wrong()
    tier.open()
    assert written(tier) is Written.NEW


@pytest.mark.parametrize("call", CALLS)
def test_a_client_that_dies_within_a_call_is_told_by_its_signal_and_replaced(
    tier: MooncakeTier, library: Library, call: str
) -> None:
    tier.open()
    library.goes_wrong(**{call: "die"})
    with pytest.raises(TierUnavailableError, match="signal 11"):
        CALLS[call](tier)
    library.goes_wrong()
    assert read(tier) is None
    assert written(tier) is Written.NEW


@pytest.mark.parametrize("call", CALLS)
def test_a_library_that_raises_is_trouble_of_the_medium(
    tier: MooncakeTier, library: Library, call: str
) -> None:
    library.goes_wrong(**{call: "raise"})
    with pytest.raises(TierUnavailableError, match="ValueError: not like this"):
        CALLS[call](tier)
    library.goes_wrong()
    assert written(tier) is Written.NEW


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("put", []),
        ("exist", [0, 0]),
        ("get", ["0"]),
        ("get", [None]),
        ("get", [8448.0]),
        ("get", {"0": 8448}),
        ("get", 8448),
        ("exist", [True]),
    ],
    ids=repr,
)
def test_an_answer_to_something_else_is_not_believed(
    tier: MooncakeTier, library: Library, call: str, answer: object
) -> None:
    tier.open()
    written(tier, 2)
    library.goes_wrong(**{call: answer})
    with pytest.raises(TierUnavailableError):
        CALLS[call](tier)


@pytest.mark.parametrize(
    ("faults", "call", "error", "said"),
    [
        ({"put": [-200]}, "put", TierFullError, "NO_AVAILABLE_HANDLE"),
        ({"put": [-800]}, "put", TierUnavailableError, "TRANSFER_FAIL"),
        ({"put": [-4242]}, "put", TierUnavailableError, "unknown code -4242"),
        ({"exist": [-901]}, "put", TierUnavailableError, "RPC_TIMEOUT"),
        ({"get": [-800]}, "get", TierUnavailableError, "TRANSFER_FAIL"),
        ({"get": [-4242]}, "get", TierUnavailableError, "unknown code -4242"),
        ({"get": [0]}, "get", CorruptRecordError, "0 bytes, where 8448 are due"),
        ({"get": [1 << 60]}, "get", CorruptRecordError, "1152921504606846976 bytes"),
        ({"get": [8448]}, "get", CorruptRecordError, "no record begins here"),
        ({"exist": [-1]}, "exist", TierUnavailableError, "INTERNAL_ERROR"),
    ],
)
def test_every_number_ends_as_its_error(
    tier: MooncakeTier,
    library: Library,
    faults: dict[str, object],
    call: str,
    error: type[TierError],
    said: str,
) -> None:
    library.goes_wrong(**faults)
    with pytest.raises(error, match=said):
        CALLS[call](tier)


@pytest.mark.parametrize("code", [-703, -704, -707, -710, -712])
def test_codes_that_are_misses_are_misses(tier: MooncakeTier, library: Library, code: int) -> None:
    written(tier)
    library.goes_wrong(get=[code])
    assert read(tier) is None


def test_somebody_else_was_faster(tier: MooncakeTier, library: Library) -> None:
    library.goes_wrong(put=[-705])
    assert written(tier) is Written.THERE_ALREADY


def test_only_what_is_damaged_is_removed_against_a_lease(tier: MooncakeTier, library: Library) -> None:
    forced = library.folder / "forced.json"
    written(tier)
    tier.discard([name_of(1).key])
    assert json.loads(forced.read_text()) is False
    written(tier)
    with pytest.raises(CorruptRecordError):
        tier.read_into(name_of(1).key, memoryview(bytearray(PAYLOAD_BYTES + 1)), DEADLINE_S)
    assert json.loads(forced.read_text()) is True
    assert read(tier) is None


def test_a_record_that_was_expelled_while_it_was_read_is_read_anew(
    tier: MooncakeTier, library: Library
) -> None:
    written(tier)
    library.goes_wrong(damaged_reads=2)
    assert read(tier) == payload_of(1)
    library.goes_wrong(damaged_reads=9)
    with pytest.raises(CorruptRecordError, match="the payload is damaged"):
        read(tier)
    library.goes_wrong()
    assert read(tier) is None


@pytest.mark.parametrize("fault", ["die", "raise", [-706], [-900]], ids=str)
def test_trouble_with_forgetting_is_never_raised(tier: MooncakeTier, library: Library, fault: object) -> None:
    written(tier)
    library.goes_wrong(remove=fault)
    tier.discard([name_of(1).key])


def test_calls_that_hang_cost_their_deadline_and_their_places(tier: MooncakeTier, library: Library) -> None:
    tier.open()
    library.goes_wrong(get="hang")
    for _ in range(20):
        with pytest.raises(TierUnavailableError, match=r"in time|have not been answered"):
            read(tier, deadline_s=0.05)
    library.goes_wrong()


def test_a_call_that_hangs_does_not_hold_others(tier: MooncakeTier, library: Library) -> None:
    tier.open()
    library.goes_wrong(get="hang")
    with pytest.raises(TierUnavailableError):
        read(tier, deadline_s=3.0)
    library.goes_wrong()
    assert asked(tier, deadline_s=2.0) == [False]


def test_a_client_that_has_died_with_late_calls_is_replaced(tier: MooncakeTier, library: Library) -> None:
    tier.open()
    library.goes_wrong(get="hang")
    for _ in range(20):  # more than there are channels
        with pytest.raises(TierUnavailableError):
            read(tier, deadline_s=0.05)
    library.goes_wrong()
    os.kill(tier._client.child(time.monotonic() + DEADLINE_S).pid, signal.SIGTERM)
    with pytest.raises(TierUnavailableError, match="signal 15"):
        asked(tier)
    assert asked(tier) == [False]


def test_a_call_that_never_ends_ends_its_process(
    tier: MooncakeTier, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.tiers.mooncake_client.STUCK_S", 0.2)
    tier.open()
    library.goes_wrong(get="hang")
    with pytest.raises(TierUnavailableError):
        read(tier, deadline_s=0.3)
    library.goes_wrong()
    with pytest.raises(TierUnavailableError, match="has not been answered for"):
        asked(tier)
    assert asked(tier) == [False]


def test_a_tier_that_is_closed_while_a_call_hangs_ends_all_the_same(library: Library) -> None:
    tier = tier_with()
    tier.open()
    pid = tier._client.child(time.monotonic() + DEADLINE_S).pid
    library.goes_wrong(get="hang")
    with pytest.raises(TierUnavailableError):
        read(tier, deadline_s=0.05)
    tier.close()
    assert not Path(f"/proc/{pid}").exists()


def test_what_the_user_has_set_for_the_library_stays() -> None:
    environment = environment_of_child({"MC_RPC_TIMEOUT_MS": "7", "HOME": "/root"})
    assert environment["MC_RPC_TIMEOUT_MS"] == "7"
    assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == environment["MC_TCP_STATUS_TIMEOUT_SEC"] == "2"
    assert environment["HOME"] == "/root"


def test_naming_the_tier_does_not_load_the_library() -> None:
    code = "import kvtide.tiers.mooncake, sys; sys.exit('mooncake' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
