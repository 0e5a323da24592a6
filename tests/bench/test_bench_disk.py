"""The judge of ``disk`` on planted samples, and the arms on a few chunks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import disk as bench
from benchmarks.frame.registry import Bench, UnfitError
from benchmarks.frame.rounds import rounds
from benchmarks.storage import child, vocabulary
from benchmarks.storage.pages import Pages
from benchmarks.storage.vocabulary import MIB, NATIVE, OURS, PLAIN, READ, WRITE

Samples = list[dict[str, Any]]
NOISE = (1.00, 1.02, 0.99, 1.01, 0.98, 1.00, 1.01, 0.99, 1.00, 1.00, 1.00)


def planted(slowdown: float = 1.0, count: int = 7) -> Samples:
    """Samples in which kvtide takes ``slowdown`` times as long as the yardstick, and vLLM twice as long."""
    samples: Samples = []
    for size in vocabulary.CHUNK_BYTES:
        for what, arms in vocabulary.ARMS.items():
            for index, order in rounds(arms, count):
                for arm in order:
                    factor = {OURS: slowdown, NATIVE: 2.0}.get(arm, 1.0)
                    samples.append(
                        {
                            "what": what,
                            "chunk_bytes": size,
                            "threads": vocabulary.THREADS,
                            "direct": True,
                            "round": index,
                            "arm": arm,
                            "wall_s": 0.3 * NOISE[index % len(NOISE)] * factor,
                            "cpu_s": 0.1,
                            "byte_count": bench._byte_count(what, size),
                            "others_cores": 0.02,
                            "stolen_cores": 0.0,
                            "wrong_pages": 0,
                        }
                    )
    return samples


def first(samples: Samples, **wanted: Any) -> dict[str, Any]:
    return next(one for one in samples if wanted.items() <= one.items())


def test_the_bar_is_the_one_that_was_promised() -> None:
    (bar,) = bench.judge(planted()).bars
    assert (bar.bar, bar.sense.value) == (0.80, "at least")
    assert "1 GiB, chunks of 1 MiB" in bar.name
    assert vocabulary.THREADS == 4


@pytest.mark.parametrize(("slowdown", "met"), [(1.0, True), (1.2, True), (1.3, False)])
def test_a_quarter_longer_is_on_the_bar(slowdown: float, met: bool) -> None:
    (bar,) = bench.judge(planted(slowdown)).bars
    assert bar.ratio == pytest.approx(1 / slowdown)
    assert bar.met is met


def test_only_reading_the_size_of_the_bar_counts() -> None:
    samples = planted()
    for one in samples:
        if one["arm"] == OURS and (one["what"], one["chunk_bytes"]) != (READ, vocabulary.BAR_CHUNK_BYTES):
            one["wall_s"] *= 10
    verdict = bench.judge(samples)
    assert verdict.bars[0].ratio == pytest.approx(1)
    shown = [note for note in verdict.notes if "kvtide / plain 0.100" in note]
    assert len(shown) == 7, "and every other row is shown as it is"


def test_each_row_says_how_sure_it_is_and_what_vllm_reaches() -> None:
    note = next(note for note in bench.judge(planted()).notes if note.startswith("reading, chunks of 1 MiB"))
    assert "kvtide / plain 1.000 (1.000 to 1.000 in 95 % of resamples), kvtide / vLLM fs 2.00" in note


def test_disturbed_rounds_do_not_count_while_there_are_enough_others() -> None:
    samples = planted(count=9)
    for one in samples:
        if one["round"] < 2 and one["arm"] == PLAIN:
            one.update(others_cores=0.5, wall_s=one["wall_s"] / 5)
    verdict = bench.judge(samples)
    assert verdict.bars[0].ratio == pytest.approx(1, abs=0.02)
    assert verdict.notes[0] == "7 of 9 rounds were undisturbed and count"


def test_on_a_busy_machine_all_count_and_the_reader_is_told() -> None:
    samples = planted(1.5)
    for one in samples:
        one["others_cores"] = 0.5
    verdict = bench.judge(samples)
    assert not verdict.bars[0].met
    assert verdict.notes[0].startswith("NOT A QUIET MACHINE: only 0 of 7")


def test_without_direct_io_the_reader_is_told() -> None:
    samples = planted()
    for one in samples:
        one["direct"] = False
    assert bench.judge(samples).notes[1].startswith("THROUGH THE PAGE CACHE")


def test_as_one_of_all_the_bar_is_kept_and_what_is_left_out_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def planted_child(function: str, arguments: tuple[Any, ...], *rest: object) -> Samples:
        asked[:] = arguments[2]
        sizes = {size for size, _, _ in asked}
        return [
            one for one in planted(count=min(rounds for *_, rounds in asked)) if one["chunk_bytes"] in sizes
        ]

    monkeypatch.setattr(bench, "in_child", planted_child)
    verdict = bench.judge(bench.measure(Bench(tmp_path, None, lambda *told: None, alone=False)))
    assert asked == [(MIB, 1 << 30, 9), (65_536, 1 << 28, 7)]
    assert [bar.bar for bar in verdict.bars] == [0.80]
    assert [note for note in verdict.notes if note.startswith("NOT MEASURED")] == [
        f"NOT MEASURED: chunks of {size}: is shown and has no bar; make bench ONLY=disk measures it"
        for size in ("256 KiB", "4 MiB")
    ]
    bench.measure(Bench(tmp_path, None, lambda *told: None))
    assert [(size, rounds) for size, _, rounds in asked] == [
        (MIB, 11),
        (65_536, 7),
        (4 * 65_536, 7),
        (4 * MIB, 7),
    ]


def change(**values: Any) -> Callable[[Samples], None]:
    return lambda samples: first(samples, what=READ, chunk_bytes=MIB, arm=OURS).update(values)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (change(wrong_pages=1), "1 pages were not what had been written"),
        (change(threads=8), "8 threads; the bar is about 4"),
        (change(byte_count=MIB), f"{MIB} bytes are another amount of work"),
        (change(arm=PLAIN), "a sample of plain too many"),
        (change(wall_s=0.0), "a sample is damaged"),
        (lambda samples: first(samples, what=READ).pop("wall_s"), "a sample is damaged"),
        (list.pop, "no sample of"),
        (
            lambda samples: samples.append({"chunk_bytes": MIB, "absent": "of no interest"}),
            "no chunks of 1 MiB; the bar is about them",
        ),
        (list.clear, "0 rounds; 7 are needed"),
        (
            lambda samples: samples.__setitem__(slice(None), planted(count=6)),
            "6 rounds; 7 are needed",
        ),
    ],
)
def test_samples_of_something_else_are_not_judged(plant: Callable[[Samples], None], said: str) -> None:
    samples = planted()
    plant(samples)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


def test_a_page_that_did_not_come_is_seen() -> None:
    pages = Pages(8 * 65_536, 65_536)
    pages.fill()
    assert pages.wrong_pages() == 0
    pages.chunk(3)[4096:4104] = bytes(8)
    assert pages.wrong_pages() == 1
    pages.spoil()
    assert pages.wrong_pages() == 8 * 65_536 // 4096
    pages.close()


def test_every_arm_moves_the_bytes_it_is_asked_to(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    told: list[str] = []
    size, total = 65_536, 16 * 65_536
    samples = child.measure_sizes(told.append, str(tmp_path / "disk"), 2, [(size, total, 1)], total, 1)
    assert [(one["what"], one["arm"]) for one in samples] == [
        *((READ, arm) for arm in vocabulary.ARMS[READ]),
        *((WRITE, arm) for arm in vocabulary.ARMS[WRITE]),
    ]
    assert {one["wrong_pages"] for one in samples} == {0}
    assert len(told) == 3
    assert not (tmp_path / "disk").exists()
