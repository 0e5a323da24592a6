"""What chat and agent sessions ask for: how many turns, how long, how far apart.

The shape is that of Mooncake's conversation trace (Qin et al., FAST 2025; 12,031 requests in 59 minutes): of
its sessions with more than one turn, the deciles of each figure below. Seeded; knows no cache and no clock.
"""

from dataclasses import dataclass

import numpy as np

# Quantiles 0, 0.1, ..., 1; the last is set so that the mean is the trace's.
FIRST_PROMPT_TOKENS = (100, 1_287, 1_849, 3_386, 4_755, 6_083, 7_956, 10_890, 15_310, 24_998, 64_500)
"""Of a session's first prompt; mean 10,875."""
ADDED_TOKENS = (1, 1, 8, 11, 16, 26, 53, 178, 704, 4_229, 14_700)
"""By which a prompt exceeds the one before it and its answer; mean 1,257."""
OUTPUT_TOKENS = (1, 24, 100, 213, 291, 350, 399, 447, 504, 597, 1_007)
"""Of an answer; mean 343."""
GAP_S = (20, 42, 57, 75, 96, 123, 162, 225, 318, 474, 1_076)
"""From one turn's arrival to the next one's; mean 213."""
MEAN_TURNS = 2.94
"""Of sessions with more than one."""
SYSTEM_TOKENS = 512
"""With which every prompt begins: all requests of the trace share their first block, which is as long."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        gap_s: After the arrival of the turn before, unless its answer takes longer; 0 for the first.
        prompt_tokens: All of the prompt: what was said before, and what is new.
        output_tokens: Of the answer.
    """

    gap_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation.

    Attributes:
        begin_s: When its first turn arrives.
        turns: In order.
    """

    begin_s: float
    turns: tuple[Turn, ...]


def sessions(hour_s: float, turns_per_s: float, seed: int) -> list[Session]:
    """Draw the sessions that begin within ``hour_s`` seconds, as a Poisson process."""
    random = np.random.default_rng(seed)
    found: list[Session] = []
    begin_s = 0.0
    while (begin_s := begin_s + float(random.exponential(MEAN_TURNS / turns_per_s))) < hour_s:
        # At least two; beyond that geometric, so that the mean is the trace's.
        count = 1 + int(random.geometric(1 / (MEAN_TURNS - 1)))
        found.append(Session(begin_s, tuple(_turns(random, count))))
    return found


def _turns(random: np.random.Generator, count: int) -> list[Turn]:
    turns: list[Turn] = []
    for index in range(count):
        if index:
            before = turns[-1]
            gap_s = _drawn(random, GAP_S)
            prompt_tokens = before.prompt_tokens + before.output_tokens + round(_drawn(random, ADDED_TOKENS))
        else:
            gap_s, prompt_tokens = 0.0, SYSTEM_TOKENS + round(_drawn(random, FIRST_PROMPT_TOKENS))
        turns.append(Turn(gap_s, prompt_tokens, max(1, round(_drawn(random, OUTPUT_TOKENS)))))
    return turns


def _drawn(random: np.random.Generator, quantiles: tuple[float, ...]) -> float:
    """Draw from a distribution given by its deciles, evenly within each."""
    return float(np.interp(random.uniform(), np.linspace(0, 1, len(quantiles)), quantiles))
