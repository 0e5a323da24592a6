"""vLLM's own KV events, written down as docs/traces.md says, tell of the same prefixes as our recording."""

import random
from pathlib import Path

import msgspec
import pytest
from vllm.distributed.kv_events import KVEventBatch

from kvtide.sim.traces import TraceRequest, read_trace
from kvtide.testing import FaultPlan, FaultyDevice, VirtualClock
from kvtide.vllm.testing import EngineShape, ModelEngine

PROMPTS = {
    "first": list(range(1, 31)),
    "branch": list(range(1, 13)) + list(range(50, 63)),
    "other": list(range(100, 123)),
    "longer": list(range(1, 31)) + list(range(70, 90)),
}


class Listener:
    """What a subscriber of vLLM's publisher does: a line a batch."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def publish(self, batch: KVEventBatch) -> None:
        # As it comes over the wire.
        raw = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
        self.file.write(msgspec.json.encode(raw) + b"\n")

    def shutdown(self) -> None:
        self.file.close()


def shape(requests: list[TraceRequest]) -> list[list[int]]:
    seen: dict[bytes, int] = {}
    return [
        [seen.setdefault(one, len(seen)) for one in (*request.block_hashes, *request.generated_hashes)]
        for request in requests
    ]


@pytest.mark.parametrize("as_numbers", [False, True])
def test_events_tell_of_the_same_prefixes_as_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_numbers: bool
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(as_numbers)))
    recorded, listened = tmp_path / "recorded.jsonl", tmp_path / "events.jsonl"
    plan, clock = FaultPlan(random.Random(0), {"instant": 1.0}), VirtualClock()
    engine = ModelEngine(
        tmp_path,
        EngineShape(with_events=True, settings={"record_trace": str(recorded)}),
        lambda rank, direction: FaultyDevice(plan, clock),
        clock,
    )
    engine.scheduler.kv_event_publisher = listener = Listener(listened)
    # The engine stamps batches with the time of day, which is of no use in a test.
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, 6)
        while engine.busy:
            engine.step()
            clock.advance(0.001)
    listener.shutdown()
    engine.connector.shutdown()
    engine.close()

    told, whole = list(read_trace(listened)), list(read_trace(recorded))
    assert read_trace(listened).format == "kv-events"
    assert shape(told) == shape(whole)
    assert len(whole) == len(PROMPTS)
    assert {request.block_tokens for request in told} == {request.block_tokens for request in whole}
