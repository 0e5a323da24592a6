"""What lies in host memory is judged although nobody loads it."""

from collections.abc import Callable

import pytest

from kvtide.vllm.testing import Harness, WrongBytesError
from kvtide.vllm.testing.promises import LeakError
from kvtide.vllm.testing.rest import check_books, pools_of
from kvtide.vllm.testing.stored import check_stored

Build = Callable[..., Harness]
PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens


def stored(harness: Harness) -> Harness:
    harness.store.auto_finish = True
    harness.add("stored", PROMPT, 1)
    harness.drain()
    return harness


@pytest.mark.parametrize(
    ("arguments", "chunks"), [({}, 7), ({"blocks_per_chunk": 2}, 3), ({"window_tokens": 5}, 14)]
)
def test_every_chunk_is_looked_at_and_the_device_gets_back_what_it_held(
    build: Build, arguments: dict[str, int], chunks: int
) -> None:
    harness = stored(build(**arguments))
    assert check_stored(harness) == chunks
    assert harness.check_cached() > 0


def test_one_wrong_byte_is_found(build: Build) -> None:
    harness = stored(build())
    for index in range(7 * pools_of(harness)[0].slot_bytes):
        pools_of(harness)[0].view[index] ^= 1
        with pytest.raises(WrongBytesError, match="host memory"):
            check_stored(harness)
        pools_of(harness)[0].view[index] ^= 1
    check_stored(harness)


def test_what_other_weights_computed_is_found(build: Build) -> None:
    harness = stored(build())
    harness.oracle.new_weights()
    with pytest.raises(WrongBytesError):
        check_stored(harness)
    assert harness.scheduler.reset_prefix_cache(reset_connector=True)
    assert check_stored(harness) == 0


def test_more_open_stores_than_the_queue_may_hold_are_found(build: Build) -> None:
    harness = build(store_queue=1 << 20)
    harness.add("stored", PROMPT, 1)
    harness.step()
    check_books(harness)
    harness.shape.settings["store_queue"] = 100
    with pytest.raises(LeakError, match="100 may be"):
        check_books(harness)
