"""Least frequently used, with ageing: each use is worth one, from the floor of the moment.

M. Arlitt, L. Cherkasova, J. Dilley, R. Friedrich, T. Jin, "Evaluating content management techniques for web
proxy caches", SIGMETRICS Performance Evaluation Review 27(4), 2000: LFU with dynamic ageing, K = F + L. It
needs no period and no factor. A chunk that has left begins anew. Equal keys leave in the order of their last
use.
"""

from kvtide.policies.greedy_dual import GreedyDual


class LFUPolicy(GreedyDual):
    """LFU with dynamic ageing over runs."""

    def worth(self, uses: int, chunks: int) -> int:
        return uses
