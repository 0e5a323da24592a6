"""What the two sides of ``jitter`` say to each other: a turn, and what came of it.

Values only. Imports nothing that is heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

OURS, CONTROL = "kvtide", "control"
ARMS = (OURS, CONTROL)

TOKENS_PER_BLOCK = 32

RUNNERS = 4
RUNNER_PROMPT_TOKENS = 64
RUNNER_TOKENS = 44
OTHERS = 7
OTHER_EVERY_TOKENS = 6
SHARED_TOKENS = 640
NEW_TOKENS = 128
OTHER_TOKENS = 8
PREFILL_TOKENS = 64
"""Of one prompt in one step, so that a step stays short: two of an other's steps are prefill."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has started.

    Attributes:
        vocabulary: Token ids are below this.
        threads: Of the model's thread pool.
        block_count: Blocks of the engine's own KV cache.
        block_bytes: Of one, all layers.
    """

    vocabulary: int
    threads: int
    block_count: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Other:
    """A request that comes while the runners run.

    Attributes:
        at_token: It comes when each runner has so many tokens.
        shared_tokens: At the start of the prompt, known from earlier: not computed again.
        prompt: Token ids.
    """

    at_token: int
    shared_tokens: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine is asked to do.

    Attributes:
        runners: Prompts of the requests whose tokens are timed.
        runner_tokens: How many each of them generates.
        others: In the order in which they come.
        other_tokens: How many each of them generates.
    """

    runners: tuple[tuple[int, ...], ...]
    runner_tokens: int
    others: tuple[Other, ...]
    other_tokens: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that were copied.

    Attributes:
        loaded_bytes: From host memory.
        stored_bytes: To host memory.
        written_bytes: From there to disk.
    """

    loaded_bytes: int = 0
    stored_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            self.loaded_bytes + other.loaded_bytes,
            self.stored_bytes + other.stored_bytes,
            self.written_bytes + other.written_bytes,
        )

    def __sub__(self, other: "Moved") -> "Moved":
        return Moved(
            self.loaded_bytes - other.loaded_bytes,
            self.stored_bytes - other.stored_bytes,
            self.written_bytes - other.written_bytes,
        )


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What a turn took.

    Attributes:
        gaps_us: Between two tokens of one runner, all runners, in the order they came.
        wall_s: From the runners' first tokens to their last.
        cpu_s: Processor time of the process from the runners' first tokens until it has come to rest.
        rested: Whether it has come to rest.
        step_count: Steps in ``wall_s``.
        computed_tokens: Tokens of the others' prompts that were computed.
        cached_tokens: Tokens of them that were not.
        output_tokens: Of runners and others.
        due: What the load gave reason to copy.
        moved: What was copied: by kvtide's own metrics, or by the control.
        counters: Of vLLM and kvtide, what they went up by; ``name`` or ``name{label value,label value}``.
    """

    gaps_us: tuple[int, ...]
    wall_s: float
    cpu_s: float
    rested: bool
    step_count: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    due: Moved
    moved: Moved
    counters: Mapping[str, float] = field(default_factory=dict)
