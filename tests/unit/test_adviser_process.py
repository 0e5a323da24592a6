"""The process that keeps ghosts: what goes to it and comes back, and what its end changes (nothing)."""

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from io import FileIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.adviser.child import Child
from kvtide.adviser.frames import (
    Forget,
    FrameError,
    FrameReader,
    Message,
    answer_frame,
    answer_of,
    framed,
    message_of,
)
from kvtide.adviser.ghosts import GAUGES, Ghosts, split
from kvtide.adviser.process import HASH_BYTES, MESSAGE_BYTES, ProcessAdviser
from kvtide.advising import Arrival, GhostPlan, GhostTier, Growth, HashView, Paces
from kvtide.metrics import MetricsDelta

PLAN = GhostPlan(16, (GhostTier("host", "lru", 100),))
PATIENCE_S = 60.0

numbers = st.floats(0.0, 1e9)
fingerprints = st.binary(max_size=9).map(lambda some: some * 8)
arrivals = st.builds(
    Arrival,
    st.integers(0, 1 << 62),
    numbers,
    st.integers(0, 1 << 40),
    fingerprints,
    st.builds(Paces, numbers, numbers, st.lists(numbers, max_size=3).map(tuple)),
)
tiers = st.builds(
    GhostTier,
    st.sampled_from(["host", "disk"]),
    st.just("lru"),
    st.integers(1, 99),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
)
plans = st.builds(GhostPlan, st.integers(1, 512), st.lists(tiers, max_size=2).map(tuple), st.integers(1, 99))
growths = st.builds(Growth, st.integers(0, 1 << 62), fingerprints)


def arrival(visit: int, chunk_count: int = 4) -> Arrival:
    chunks = b"".join((100 * visit + at).to_bytes(8, "little") for at in range(chunk_count))
    return Arrival(visit, float(visit), 16 * chunk_count, chunks)


def tell(adviser: ProcessAdviser, message: Arrival | Growth) -> None:
    """As the scheduler does: the engine's hashes beside an empty message."""
    hashes = [part + b"tail" * 6 for part in split(message.chunks)]
    view = HashView(hashes, 0, len(hashes), 1, len(hashes))
    if isinstance(message, Arrival):
        adviser.arrived(message._replace(chunks=b""), view)
    else:
        adviser.grown(message._replace(chunks=b""), view)


def wait_until(what: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until_s, "it never came to that"
        time.sleep(0.01)


@contextmanager
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    source, target = os.pipe()
    with FileIO(source) as reading, FileIO(target, "w") as writing:
        yield reading, writing


# -- frames ---------------------------------------------------------------------------------------


@given(messages=st.lists(arrivals | plans | growths, max_size=4), cut=st.integers(1, 99))
def test_whatever_is_sent_arrives_however_it_was_cut(messages: list[Message], cut: int) -> None:
    stream = b"".join(map(framed, messages))
    reader = FrameReader()
    found = [
        message_of(frame)
        for at in range(0, len(stream), cut)
        for frame in reader.frames(stream[at : at + cut])
    ]
    assert found == messages


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(frame: bytes) -> None:
    try:
        message = message_of(frame)
    except FrameError:
        return
    assert isinstance(message, Arrival | GhostPlan | Growth | Forget)


def test_a_frame_longer_than_any_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(FrameError, match="4294967295 bytes"):
        list(FrameReader().frames(b"\xff" * 4))


@pytest.mark.parametrize(
    "frame",
    [
        b"[1]",
        b"{",
        b'{"no_such|": 1}',
        b'{"ghost_requests|": -1}',
        b'{"ghost_requests|": NaN}',
        b'{"ghost_hit_points|host,2": Infinity}',
        b'{"ghost_requests|": "many"}',
        b"\xff\xfe",
    ],
)
def test_an_answer_that_metrics_cannot_take_is_refused(frame: bytes) -> None:
    with pytest.raises(FrameError):
        answer_of(frame)


def test_a_gauge_may_be_taken_back() -> None:
    assert math.isnan(answer_of(answer_frame({"ghost_hit_points|host,2": math.nan})[4:]).popitem()[1])


# -- the child, called here -----------------------------------------------------------------------


def answers_to(messages: list[Message]) -> dict[str, float]:
    with pipe() as (source, into), pipe() as (out, target):
        into.write(b"".join(map(framed, messages)))
        into.close()
        Child(source.fileno(), target.fileno()).serve(os.getppid())
        target.close()
        told = MetricsDelta()
        for frame in FrameReader().frames(out.read()):
            told.merge(answer_of(frame))
        return told.data


def test_a_child_says_what_ghosts_say() -> None:
    ghosts = Ghosts(PLAN)
    ghosts.feed(arrival(1))
    assert answers_to([PLAN, arrival(1)]).keys() == ghosts.answers().keys()


def test_a_child_is_silent_before_it_knows_of_what() -> None:
    assert answers_to([arrival(1), Growth(1, b""), Forget()]) == {}


def test_a_child_ends_when_its_parent_is_another_one() -> None:
    with pipe() as (source, _), pipe() as (_, target):
        Child(source.fileno(), target.fileno()).serve(os.getppid() + 1)


# -- the process ----------------------------------------------------------------------------------


def total(adviser: ProcessAdviser, so_far: MetricsDelta, name: str) -> float:
    for answer in adviser.take():
        so_far.merge(dict(answer))
    return float(so_far.data.get(name, 0.0))


def test_a_short_life_has_no_process() -> None:
    with closing(ProcessAdviser(start_after=5)) as adviser:
        adviser.planned(PLAN)
        for visit in range(4):
            tell(adviser, arrival(visit))
        assert adviser.child_id is None


def test_long_prompts_do_not_wait_until_there_are_many() -> None:
    room = 8 * (1000 * HASH_BYTES + MESSAGE_BYTES)
    with closing(ProcessAdviser(start_after=99, queue_bytes=room)) as adviser:
        adviser.planned(PLAN)
        told = MetricsDelta()
        for visit in range(3):
            tell(adviser, arrival(visit, 1000))
        wait_until(lambda: total(adviser, told, "ghost_requests|") == 3)


def test_nothing_is_started_before_sizes_are_known_and_nothing_is_lost() -> None:
    with closing(ProcessAdviser(start_after=2)) as adviser:
        for visit in range(6):
            tell(adviser, arrival(visit))
        assert adviser.child_id is None
        adviser.planned(PLAN)
        tell(adviser, arrival(6))
        told = MetricsDelta()
        wait_until(lambda: total(adviser, told, "ghost_requests|") == 7)
        assert told.data["ghost_queried_tokens|"] == 7 * 64


def test_ghosts_in_a_process_say_what_they_say_here() -> None:
    ghosts, told = Ghosts(PLAN), MetricsDelta()
    with closing(ProcessAdviser(start_after=1)) as adviser:
        adviser.planned(PLAN)
        for visit in range(1100):
            one = arrival(visit % 60)._replace(visit=visit, now_s=float(visit), paces=Paces(1e-3, 1e-6))
            tell(adviser, one)
            tell(adviser, Growth(visit, b""))
            ghosts.feed(one)
        wait_until(lambda: total(adviser, told, "ghost_requests|") == 1100)
        child = adviser.child_id
    expected = ghosts.answers()
    assert told.data == pytest.approx(expected)
    assert {key.partition("|")[0] for key in expected} >= set(GAUGES)
    with pytest.raises(ProcessLookupError):
        os.kill(child or 0, 0)


def test_a_child_that_is_killed_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with closing(ProcessAdviser(start_after=1)) as adviser, caplog.at_level(logging.WARNING):
        adviser.planned(PLAN)
        tell(adviser, arrival(1))
        wait_until(lambda: adviser.child_id is not None)
        os.kill(adviser.child_id or 0, signal.SIGKILL)
        wait_until(lambda: not adviser.is_on)
        for visit in range(9):
            tell(adviser, arrival(visit))
            tell(adviser, Growth(visit, b""))
        adviser.forget()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "serving goes on: their process has ended with -9" in caplog.text


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/no/such/program"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with 3"),
        ([sys.executable, "-c", "print('hello', flush=True); input()"], "a frame of 1819043176 bytes"),
    ],
)
def test_a_process_that_is_not_ours_ends_ghosts_and_nothing_else(
    command: list[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(ProcessAdviser(start_after=1, command=command)) as adviser:
        adviser.planned(PLAN)
        tell(adviser, arrival(1))
        wait_until(lambda: not adviser.is_on)
    assert reason in caplog.text


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted() -> None:
    frozen = [sys.executable, "-c", "import time; time.sleep(600)"]
    room = 10 * (4 * HASH_BYTES + MESSAGE_BYTES)
    with closing(ProcessAdviser(start_after=1, queue_bytes=room, command=frozen)) as adviser:
        for visit in range(25):  # no plan, so nothing leaves the queue
            tell(adviser, arrival(visit))
        assert list(adviser.take()) == [{"ghost_dropped_requests|": 15}]
        assert list(adviser.take()) == []
        adviser.planned(PLAN)
        # A process that reads nothing keeps nobody waiting, whether it is told something or ended.
        for visit in range(25, 60):
            tell(adviser, arrival(visit, 2000))
    assert not adviser.is_on


def test_a_child_does_not_outlive_a_server_that_is_killed() -> None:
    server = """
import sys, time
from kvtide.adviser.process import ProcessAdviser
from kvtide.advising import Arrival, GhostPlan, GhostTier, HashView
adviser = ProcessAdviser(start_after=1)
adviser.planned(GhostPlan(16, (GhostTier("host", "lru", 100),)))
adviser.arrived(Arrival(1, 0.0, 16, b""), HashView([b"x" * 32], 0, 1, 1, 1))
while adviser.child_id is None:
    time.sleep(0.01)
print(adviser.child_id, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not _lives(child))


def _lives(process_id: int) -> bool:
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@settings(deadline=None, max_examples=20)
@given(st.lists(arrivals | growths, max_size=6))
def test_no_message_breaks_ghosts(messages: list[Message]) -> None:
    ghosts = Ghosts(PLAN)
    for message in messages:
        if isinstance(message, Arrival):
            ghosts.feed(message)
        elif isinstance(message, Growth):
            ghosts.grown(message)
    ghosts.answers()
