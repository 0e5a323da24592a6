"""What is counted at the end of a walk, by name."""

from kvtide.vllm.testing.copies import Copies
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.lanes import Lanes
from kvtide.vllm.testing.ranks import siblings_of
from kvtide.vllm.testing.report import Report


def count(report: Report, engine: ModelEngine, copies: Copies, lanes: Lanes) -> None:
    """Add to a report what an engine, its copies and its lanes have counted."""
    shape, happened = engine.shape, report.happened
    happened.update(copies.happened())
    happened.update(lanes.happened())
    happened["late answer"] += engine.answers.late_count
    happened["sibling failed"] += sum(one.failed_count for one in siblings_of(engine.ranks))
    if engine.ledger is not None:
        happened["events about host memory"] += engine.ledger.event_count
    happened[f"engine: {shape.settings['store_policy']}"] += 1
    happened[f"engine: {shape.family}"] += 1
    happened[f"engine: sibling {shape.siblings.value}"] += 1
    if disk := "disk" in shape.settings:
        happened[f"engine: disk {shape.settings['disk_demotion']}"] += 1
    for tier in shape.settings.get("tiers", ()):
        kind = f"{tier['name']} below the disk" if disk else f"{tier['name']} alone"
        happened[f"engine: {kind}"] += 1
        happened[f"steps: {tier['name']}"] += report.steps
    happened.update({f"loaded words: {kind}": n for kind, n in engine.oracle.loaded_words.items()})
    happened["load checked"] += engine.checked_loads
    for name, value in engine.counted.data.items():
        if isinstance(value, int | float):
            happened[f"counted: {name.rstrip('|')}"] += int(value)
    report.loads = int(engine.counted.data.get("transfers|load", 0)) // shape.rank_count
    report.hit_tokens = int(engine.counted.data.get("hit_tokens|host", 0))
