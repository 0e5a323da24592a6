"""What is asked of an engine in a walk: prompts that share, repeat, continue, and some that do not fit.

Draws requests from a seed and remembers them; does not know what becomes of them.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.lora.request import LoRARequest

from kvtide.jobs import OffloadPolicy
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.shape import EngineShape, Siblings
from kvtide.vllm.testing.sibling import HELD

ADAPTERS = tuple(LoRARequest(name, index + 1, f"adapters/{name}") for index, name in enumerate("ab"))


@dataclass(frozen=True, slots=True)
class Identity:
    """What beside the tokens determines the KV."""

    lora_request: LoRARequest | None = None
    cache_salt: str | None = None

    @property
    def name(self) -> str:
        """As the engine under test calls it."""
        adapter = self.lora_request.lora_name if self.lora_request is not None else ""
        return f"{adapter}/{self.cache_salt}" if adapter or self.cache_salt else ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        kind: For counting.
        prompt: Its tokens.
        max_tokens: To generate.
        identity: What beside the tokens determines the KV.
        arguments: The rest of ``ModelEngine.add``.
    """

    kind: str
    prompt: list[int]
    max_tokens: int
    identity: Identity = Identity()
    arguments: dict[str, Any] = field(default_factory=dict)

    def answer(self) -> list[int]:
        """What a run without any cache generates."""
        return PatternModel.answer(self.prompt, self.max_tokens, self.identity.name)

    def traits(self) -> set[str]:
        """What is special about it, for counting."""
        params = self.arguments.get("extra_args", {}).get("kv_transfer_params", {})
        special = set(self.arguments) - {"extra_args"}
        told = {HELD: "of a sibling", "offload_policy": "stored whole"}
        special |= {told.get(name, "limits") for name in params}
        return special | ({"adapter or salt"} if self.identity.name else set())

    def all_arguments(self) -> dict[str, Any]:
        """For ``ModelEngine.add``."""
        return {
            "lora_request": self.identity.lora_request,
            "cache_salt": self.identity.cache_salt,
            **self.arguments,
        }


class Asker:
    """Draws requests that fit the device.

    Args:
        chance: The only source of choice.
        shape: Of the engine.
    """

    def __init__(self, chance: random.Random, shape: EngineShape) -> None:
        self._chance = chance
        self._shape = shape
        self._longest = min(shape.longest_tokens, 360)
        self._stems: list[tuple[list[int], Identity]] = []
        self._asked: list[Ask] = []
        self._crowded = False

    def new_day(self, crowded: bool = False, many: bool = False) -> None:
        """Other stems; some of what was asked before is remembered.

        Args:
            crowded: Two or three prompts fill the device, and most are asked again.
            many: So many stems are asked in turn that host memory has forgotten one when its turn comes.
        """
        chance, self._crowded = self._chance, crowded
        self._asked = self._asked[-chance.randrange(1, 8) :]
        self._stems = []
        count = chance.randrange(2, 5) if crowded else chance.randrange(1, 5)
        for _ in range(chance.randrange(8, 16) if many else count):
            identity = Identity(
                chance.choice((None, None, None, None, *ADAPTERS)),
                chance.choice((None, None, None, None, "salt", "pepper")),
            )
            tenths = chance.randrange(6, 9)
            length = self._longest * tenths // 10 if crowded else chance.randrange(self._longest // 2)
            self._stems.append((self._tokens(length), identity))

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its answer that fit the device."""
        return self._longest

    def draw(self) -> Ask:
        """Draw one request."""
        ask = self._drawn()
        self._asked.append(ask)
        return ask

    def again(self, count: int) -> list[Ask]:
        """Name up to so many of today's requests to ask again, no two of which share their beginning."""
        latest = {tuple(ask.prompt[:8]): ask for ask in self._asked}
        return [replace(ask, kind="again") for ask in list(latest.values())[-count:]]

    def stems(self, whole: bool) -> list[Ask]:
        """Today's stems as requests of their own.

        Args:
            whole: Continued to the longest that fits the device; otherwise by one token.
        """
        longest = self._longest - 2
        return [
            Ask("stem", stem + self._tokens(max(1, longest - len(stem)) if whole else 1), 1, identity)
            for stem, identity in self._stems
        ]

    def fillers(self, block_count: int) -> list[Ask]:
        """Draw new prompts that take so many blocks together, none of them shared."""
        shape, asks = self._shape, []
        left = block_count // shape.blocks_per_tokens - 1
        while left > 0:
            blocks = min(left, self._chance.randrange(1, 8))
            asks.append(Ask("filler", self._tokens(blocks * shape.tokens_per_block - 1), 2))
            left -= blocks
        return asks

    def _drawn(self) -> Ask:
        chance, identity = self._chance, Identity()
        kinds = ("stem", "session", "repeat", "one token", "long", "new")
        kind = chance.choices(kinds, (36, 8, 36, 2, 4, 4) if self._crowded else (36, 24, 16, 3, 4, 8))[0]
        if kind in ("session", "repeat") and not self._asked:
            kind = "new"
        match kind:
            case "stem":
                stem, identity = chance.choice(self._stems)
                prompt = stem + self._tokens(chance.randrange(1, 14))
            case "session":
                earlier = chance.choice(self._asked[-12:])
                identity = earlier.identity
                generated = earlier.answer()[: chance.randrange(earlier.max_tokens + 1)]
                prompt = earlier.prompt + generated + self._tokens(chance.randrange(1, 9))
            case "repeat":
                earlier = chance.choice(self._asked[-12:])
                prompt, identity = earlier.prompt, earlier.identity
            case "one token":
                prompt = self._tokens(1)
            case "long":
                prompt = self._tokens(self._longest)
            case _:
                prompt = self._tokens(chance.randrange(1, 40))
        max_tokens = chance.choice((1, 1, 2, 3, 5, 8, 13, 24))
        max_tokens = min(max_tokens, self._longest // 4)
        prompt = prompt[: self._longest - max_tokens]
        return Ask(kind, prompt, max_tokens, identity, self._arguments(len(prompt)))

    def _arguments(self, prompt_tokens: int) -> dict[str, Any]:
        chance = self._chance
        arguments: dict[str, Any] = {}
        if chance.random() < 0.05:
            arguments["prompt_logprobs"] = 1
        elif chance.random() < 0.05:
            arguments["skip_reading_prefix_cache"] = True
        if self._shape.priority:
            arguments["priority"] = chance.randrange(3)
        held = (prompt_tokens - 1) // self._shape.tokens_per_block
        params: dict[str, Any] = {}
        if self._shape.siblings is not Siblings.NONE and held and chance.random() < 0.4:
            params[HELD] = chance.randrange(1, held + 1) * self._shape.tokens_per_block
        if chance.random() < 0.06:
            name = chance.choice(("max_load_tokens", "max_offload_tokens", "no_read", "no_write"))
            params[name] = chance.randrange(40) if name.startswith("max") else True
        elif chance.random() < 0.06:
            params["offload_policy"] = OffloadPolicy.REQUEST_LEVEL.value
        if params:
            arguments["extra_args"] = {"kv_transfer_params": params}
        return arguments

    def _tokens(self, count: int) -> list[int]:
        # Few different ones at the beginning, so that prompts share by chance too.
        return [self._chance.randrange(3 if index < 2 else 90) for index in range(count)]
