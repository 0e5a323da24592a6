"""What the samples of the adviser say: its cost in the hooks. Pure."""

from collections.abc import Mapping, Sequence

from benchmarks.frame.bars import at_most
from benchmarks.frame.registry import Sample, UnfitError, Verdict
from benchmarks.frame.rounds import whole_rounds
from benchmarks.frame.statistics import median, ratio_of_medians
from benchmarks.scheduler.adviser_vocabulary import ADVISER, CHATS, LONG, OFF, ON, SWITCHES, WORKS

MIN_ROUNDS = 7
LIMIT = 1.05
WORK_SLACK = 0.02  # of the chunks that are stored
TOLD = frozenset({"on_new_request", "request_finished_all_groups"})
"""Hooks in which the adviser is told something, for the note."""


def judge_adviser(samples: Sequence[Sample]) -> Verdict:
    """Compare the hooks with the adviser to those without.

    Raises:
        UnfitError: The samples are not of the same work, or the adviser was not there.
    """
    taken = [one for one in samples if one["row"] == ADVISER]
    _check_told({one["arm"]: one for one in taken if "told" in one})
    bars, notes = [], []
    for work in WORKS:
        found = whole_rounds([one for one in taken if one.get("work") == work], SWITCHES)
        if len(found) < MIN_ROUNDS:
            raise UnfitError(f"{work}: {len(found)} rounds; {MIN_ROUNDS} are needed")
        for one in found:
            _check_work(work, one)
        us = {arm: [sum(one[arm]["hooks_us"].values()) for one in found] for arm in SWITCHES}
        bars.append(at_most(f"hooks, adviser on over off, {work}", ratio_of_medians(us[ON], us[OFF]), LIMIT))
        notes.append(_note(work, us, found))
    return Verdict(tuple(bars), tuple(notes))


def _check_told(told: Mapping[str, Sample]) -> None:
    if set(told) != set(SWITCHES):
        raise UnfitError("nobody says what the ghosts were told")
    if not told[ON]["told"]:
        raise UnfitError("the ghosts were told of no request: there was no adviser")
    if told[OFF]["told"]:
        raise UnfitError(f"ghosts were told of {told[OFF]['told']:.0f} requests by an adviser that is off")


def _check_work(work: str, one: Mapping[str, Sample]) -> None:
    on, off = one[ON], one[OFF]
    if work == LONG and (on["asked"], off["asked"]) != (2, 2):
        raise UnfitError(f"{work}: {on['asked']} and {off['asked']} lookups")
    if not off["stored_chunks"] or not on["asked"]:
        raise UnfitError(f"{work}: nothing was stored or looked up")
    if abs(on["stored_chunks"] - off["stored_chunks"]) > WORK_SLACK * off["stored_chunks"]:
        raise UnfitError(f"{work}: {on['stored_chunks']} and {off['stored_chunks']} chunks were stored")


def _note(work: str, us: Mapping[str, Sequence[float]], found: Sequence[Mapping[str, Sample]]) -> str:
    told = {arm: median([_told_us(one[arm]) for one in found]) for arm in SWITCHES}
    each = f"; of it a chat's {(told[ON] - told[OFF]) / 32:+,.1f}" if work == CHATS else ""
    busy = {arm: median([one[arm]["busy_us"] for one in found]) for arm in SWITCHES}
    return (
        f"hooks, {work}: {median(us[ON]):,.0f} us with the adviser, {median(us[OFF]):,.0f} without;"
        f" where requests come and end {told[ON]:,.0f} and {told[OFF]:,.0f}{each};"
        f" of processor time {busy[ON]:,.0f} and {busy[OFF]:,.0f}"
    )


def _told_us(sample: Sample) -> float:
    return sum(us for hook, us in sample["hooks_us"].items() if hook in TOLD)
