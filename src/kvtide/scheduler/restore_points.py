"""At which token counts a prompt can be continued, and which chunks behind a window that takes.

The writer's side of ``chunks_needed``: what no restore point needs is never read, so it is not written.
"""

from collections.abc import Collection

from kvtide.geometry import GroupGeometry, chunks_needed


def chunks_kept(
    group: GroupGeometry, interval_tokens: int, ends: Collection[int], first: int, stop: int
) -> list[range]:
    """Choose those of the chunks ``[first, stop)`` that a reader of some restore point needs.

    Args:
        group: Looks back over a window, or to the last multiple of its local attention.
        interval_tokens: Every multiple of it is a restore point.
        ends: Restore points beside these.
        first: First chunk.
        stop: One past the last.

    Returns:
        Chunks in order, neighbours together.
    """
    if group.window_tokens is not None and group.window_tokens > interval_tokens:
        return [range(first, stop)] if first < stop else []
    end = stop * group.tokens_per_chunk
    nearest = (first * group.tokens_per_chunk // interval_tokens + 1) * interval_tokens
    points = {*range(nearest, end + interval_tokens, interval_tokens), *ends}
    kept: list[range] = []
    for point in sorted(points):
        needed = chunks_needed(group, 0, point)
        begin, last = max(first, needed.start), min(stop, needed.stop)
        if kept and begin <= kept[-1].stop:
            begin, before = kept[-1].start, kept.pop()
            last = max(last, before.stop)
        if begin < last:
            kept.append(range(begin, last))
    return kept
