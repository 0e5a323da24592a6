"""The judge of ``stores`` on planted samples, and the arms on a few records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import stores as bench
from benchmarks.frame.registry import Bench, UnfitError
from benchmarks.frame.rounds import rounds
from benchmarks.storage import store_names, stores_child
from benchmarks.storage.ours import names_of
from benchmarks.storage.pages import Pages
from benchmarks.storage.plain import in_turns
from benchmarks.storage.store_names import (
    ARMS,
    DIRECTIONS,
    DIRECTORY,
    FILES,
    GET,
    MOONCAKE,
    MOONCAKE_BATCHED,
    MOTO,
    PUT,
    RADOSGW,
    RECORD_BYTES,
    UNCACHED,
    VALKEY,
    WORK,
)
from benchmarks.storage.vocabulary import MIB, OURS, PLAIN

Samples = list[dict[str, Any]]
NOISE = (1.00, 1.02, 0.99, 1.01, 0.98, 1.00, 1.01, 0.99, 1.00)
JUDGED = (UNCACHED, VALKEY, MOONCAKE, RADOSGW)
SMALL = 65_536


def planted(slowdown: float = 1.0, count: int = 7, absent: tuple[str, ...] = ()) -> Samples:
    """Samples in which kvtide takes ``slowdown`` times as long as the store's own client."""
    left_out = {*absent, *(() if RADOSGW in absent else (FILES,))}
    samples: Samples = [{"kind": kind, "absent": "not installed"} for kind in absent]
    for kind in (kind for kind in WORK if kind not in left_out):
        for size in RECORD_BYTES:
            for what in WORK[kind].directions:
                for index, order in rounds(ARMS, min(count, WORK[kind].rounds)):
                    samples += [one_sample(kind, size, what, index, arm, slowdown) for arm in order]
    return samples


def one_sample(kind: str, size: int, what: str, index: int, arm: str, slowdown: float) -> dict[str, Any]:
    got = {"wrong_chunks": 0} if what == GET else {}
    return {
        "kind": kind,
        "record_bytes": size,
        "what": what,
        "threads": store_names.THREADS,
        "round": index,
        "arm": arm,
        "wall_s": 0.3 * NOISE[index % len(NOISE)] * (slowdown if arm == OURS else 1.0),
        "cpu_s": 0.1,
        "all_cpu_s": 0.2,
        "byte_count": WORK[kind].moved_bytes(what),
        "others_cores": 0.02,
        "stolen_cores": 0.0,
        **got,
    }


def of(samples: Samples, **wanted: Any) -> Samples:
    return [one for one in samples if wanted.items() <= one.items()]


def test_every_store_size_and_direction_has_the_bar_that_was_promised() -> None:
    bars = bench.judge(planted()).bars
    assert [bar.name for bar in bars] == [
        f"{kind}, {size}, {what}: kvtide / its own client"
        for kind in JUDGED
        for size in ("1 MiB", "4 MiB")
        for what in ("put", "get")
    ]
    assert {(bar.bar, bar.sense.value) for bar in bars} == {(0.85, "at least")}
    assert store_names.THREADS == 4


@pytest.mark.parametrize(("slowdown", "met"), [(1.0, True), (1.17, True), (1.18, False)])
def test_a_sixth_longer_is_on_the_bar(slowdown: float, met: bool) -> None:
    for bar in bench.judge(planted(slowdown)).bars:
        assert bar.ratio == pytest.approx(1 / slowdown)
        assert bar.met is met


def test_one_slow_row_is_one_missed_bar() -> None:
    samples = planted()
    for one in of(samples, kind=VALKEY, record_bytes=4 * MIB, what=GET, arm=OURS):
        one["wall_s"] *= 2
    verdict = bench.judge(samples)
    assert [bar.name for bar in verdict.bars if not bar.met] == [
        "valkey, 4 MiB, get: kvtide / its own client"
    ]
    (note,) = (note for note in verdict.notes if note.startswith("valkey, 4 MiB, get"))
    assert "0.500 (0.500 to 0.500 in 95 % of resamples)" in note


def test_a_store_that_is_shown_has_no_bar() -> None:
    samples = planted()
    for one in of(samples, kind=MOTO, arm=OURS):
        one["wall_s"] *= 10
    verdict = bench.judge(samples)
    assert all(bar.met for bar in verdict.bars)
    assert sum(note.startswith(MOTO) and "(no bar): 0.100" in note for note in verdict.notes) == 4


def test_what_is_not_there_is_said_and_the_others_are_judged() -> None:
    verdict = bench.judge(planted(absent=(MOONCAKE, MOONCAKE_BATCHED, RADOSGW)))
    assert verdict.notes[:3] == (
        "NOT MEASURED: mooncake: not installed",
        "NOT MEASURED: mooncake, batched: not installed",
        "NOT MEASURED: objects, radosgw: not installed",
    )
    assert len(verdict.bars) == 8
    assert any(note.startswith(FILES) for note in verdict.notes)


def test_as_one_of_all_what_has_a_bar_keeps_it_and_what_has_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, int] = {}

    def planted_child(function: str, arguments: tuple[Any, ...], *rest: object) -> Samples:
        kind, rounds_asked = arguments[0], arguments[5]
        asked[kind] = rounds_asked
        return of(planted(count=rounds_asked), kind=kind)

    monkeypatch.setattr(bench, "in_child", planted_child)
    verdict = bench.judge(bench.measure(Bench(tmp_path, None, lambda *told: None, alone=False)))
    assert tuple(asked) == JUDGED
    assert min(asked.values()) >= bench.MIN_ROUNDS
    assert len(verdict.bars) == 16
    assert [note.partition(":")[2] for note in verdict.notes if note.startswith("NOT MEASURED")] == [
        f" {kind}: is shown and has no bar; make bench ONLY=stores measures it"
        for kind in (DIRECTORY, MOONCAKE_BATCHED, FILES, MOTO)
    ]
    asked.clear()
    bench.measure(Bench(tmp_path, None, lambda *told: None))
    assert set(asked) == set(WORK) - {FILES}
    assert asked[UNCACHED] == 19


def test_disturbed_rounds_do_not_count_while_there_are_enough_others() -> None:
    samples = planted(count=9)
    for one in samples:
        if one["round"] < 2 and one["arm"] == PLAIN:
            one.update(others_cores=0.5, wall_s=one["wall_s"] / 5)
    verdict = bench.judge(samples)
    assert [bar.ratio for bar in verdict.bars] == pytest.approx([1.0] * 16, abs=0.02)
    assert not any("NOT A QUIET MACHINE" in note for note in verdict.notes)


def test_on_a_busy_machine_all_count_and_the_reader_is_told_where() -> None:
    samples = planted(1.5)
    for one in of(samples, kind=VALKEY, record_bytes=MIB, what=PUT):
        one["stolen_cores"] = 0.5
    verdict = bench.judge(samples)
    assert not any(bar.met for bar in verdict.bars)
    (note,) = (note for note in verdict.notes if note.startswith("NOT A QUIET MACHINE"))
    assert "valkey, 1 MiB, put (0);" in note
    assert "get" not in note


def change(**values: Any) -> Callable[[Samples], None]:
    return lambda samples: of(samples, kind=VALKEY, what=GET, arm=OURS)[0].update(values)


def lose(**wanted: Any) -> Callable[[Samples], None]:
    def plant(samples: Samples) -> None:
        for one in of(samples, **wanted):
            samples.remove(one)

    return plant


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (change(wrong_chunks=1), "valkey, 1 MiB, get, kvtide: 1 records were not what had been put"),
        (change(threads=8), "8 threads; the bar is about 4"),
        (change(byte_count=MIB), f"{MIB} bytes are another amount of work"),
        (change(byte_count=512 * MIB), "valkey, 1 MiB, get: samples of 268435456, 536870912 bytes"),
        (change(arm=PLAIN), "a sample of plain too many"),
        (change(wall_s=0.0), "a sample is damaged"),
        (change(all_cpu_s=None), "a sample is damaged"),
        (lambda samples: of(samples, what=GET)[0].pop("wrong_chunks"), "a sample is damaged"),
        (list.pop, "no sample of"),
        (list.clear, "lost, or too many"),
        (lose(kind=MOONCAKE), "samples of mooncake: lost, or too many"),
        (lose(kind=DIRECTORY, record_bytes=MIB), "directory, 1 MiB, put: 0 rounds; 7 are needed"),
        (lambda samples: samples.__setitem__(slice(None), planted(count=6)), "6 rounds; 7 are needed"),
        (
            lambda samples: samples.__setitem__(slice(None), planted(absent=JUDGED)),
            "no store could be measured",
        ),
    ],
)
def test_samples_of_something_else_are_not_judged(plant: Callable[[Samples], None], said: str) -> None:
    samples = planted()
    plant(samples)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


def test_one_byte_that_did_not_come_is_seen() -> None:
    pages = Pages(4 * SMALL, SMALL)
    pages.fill()
    assert pages.wrong_chunks() == 0
    pages.chunk(2)[5000] ^= 1
    assert pages.wrong_chunks() == 1
    pages.blank()
    assert pages.wrong_chunks() == 4
    pages.close()


def test_prompts_share_folders_and_no_chunk() -> None:
    one, other = names_of(8, 1), names_of(8, 2)
    assert [name.key[:2] for name in one] == [name.key[:2] for name in other]
    assert not {name.key for name in one} & {name.key for name in other}
    assert [name.parent_hash for name in one] == [None, *(name.key[:32] for name in one[:-1])]


def test_every_number_is_worked_on_once_and_trouble_is_told() -> None:
    done: list[int] = []
    in_turns(done.append, 100, 4)
    assert sorted(done) == list(range(100))
    with pytest.raises(ZeroDivisionError):
        in_turns(lambda at: done.append(1 // at), 100, 4)


@pytest.mark.parametrize("kind", [DIRECTORY, UNCACHED])
def test_both_arms_move_the_bytes_they_are_asked_to(tmp_path: Path, kind: str) -> None:
    told: list[str] = []
    folder = tmp_path / "stores"
    samples = stores_child.measure_store(
        told.append, kind, str(folder), 2, (SMALL, 2 * SMALL), 8 * SMALL, 2, gets=3
    )
    assert [(one["record_bytes"], one["round"], one["arm"], one["what"]) for one in samples] == [
        (size, index, arm, what)
        for size in (SMALL, 2 * SMALL)
        for index, order in enumerate((ARMS[::-1], ARMS))
        for arm in order
        for what in DIRECTIONS
    ]
    assert [one["wrong_chunks"] for one in samples if one["what"] == GET] == [0] * 8
    assert {(one["what"], one["byte_count"]) for one in samples} == {(PUT, 8 * SMALL), (GET, 24 * SMALL)}
    assert len(told) == 7
    assert not folder.exists()


def test_a_store_that_cannot_be_started_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (sample,) = stores_child.measure_store(lambda text: None, VALKEY, str(tmp_path / "stores"), 2, (), 0, 0)
    assert sample["kind"] == VALKEY
    assert sample["absent"].endswith("is not installed; run make servers")
