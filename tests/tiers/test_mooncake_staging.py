"""Stretches of the staging buffer: never two over one another, and all of it comes back."""

from hypothesis import given
from hypothesis import strategies as st

from kvtide.tiers.mooncake_staging import PAGE_BYTES, Staging, rounded

PAGES = 24


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8 * PAGE_BYTES)), max_size=80))
def test_stretches_never_overlap_and_are_found_while_there_is_room(
    steps: list[tuple[bool, int]],
) -> None:
    staging = Staging(PAGES * PAGE_BYTES)
    free = [True] * PAGES
    held: list[tuple[int, int]] = []
    for takes, number in steps:
        if takes:
            pages = rounded(number) // PAGE_BYTES
            fits = [at for at in range(PAGES - pages + 1) if all(free[at : at + pages])]
            start = staging.take(number)
            assert start == (fits[0] * PAGE_BYTES if fits else None) or pages == 0
            if start is None:
                continue
            for page in range(start // PAGE_BYTES, start // PAGE_BYTES + pages):
                assert free[page]
                free[page] = False
            held.append((start, number))
        elif held:
            start, byte_count = held.pop(number % len(held))
            staging.give_back(start, byte_count)
            for page in range(start // PAGE_BYTES, (start + rounded(byte_count)) // PAGE_BYTES):
                free[page] = True
    for start, byte_count in held:
        staging.give_back(start, byte_count)
    assert staging.take(PAGES * PAGE_BYTES) == 0


def test_what_is_longer_than_the_buffer_never_fits() -> None:
    assert Staging(PAGE_BYTES).take(PAGE_BYTES + 1) is None
