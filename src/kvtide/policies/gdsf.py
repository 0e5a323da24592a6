"""GreedyDual-Size-Frequency: a use is worth what it saves.

L. Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy",
HPL-98-69R1, 1998: K = L + F * C / S.

What a prefix cache makes of it: the size S of each chunk is one, and its cost C what has to be computed to
have it back where nothing of its prompt is left, all tokens up to its end; counted in chunks, which changes
no order. So ends of long prompts outlive those of short ones that are asked for as often. Within a prompt
the last chunk leaves first nevertheless, though it costs most: without those before it, it would be of
no use.
"""

from kvtide.policies.greedy_dual import GreedyDual


class GDSFPolicy(GreedyDual):
    """GDSF over runs."""

    def worth(self, uses: int, chunks: int) -> int:
        return uses * chunks
