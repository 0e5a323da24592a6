"""Who runs next: the modelled engine's queue, its running requests and its blocks, as in vLLM's scheduler.

First come, first served; prompts in pieces within a budget of tokens; what finds no block takes the blocks of
whoever came last. Asks the scheduler half in vLLM's order. Knows no time but the one it is told.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.sim.serving_blocks import EngineBlocks
from kvtide.sim.serving_request import ServedRequest, ServedStep


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What vLLM is started with; defaults are those of its server.

    Attributes:
        block_count: ``--num-gpu-blocks-override``, in blocks of the trace.
        step_tokens: ``--max-num-batched-tokens``.
        running: ``--max-num-seqs``.
    """

    block_count: int
    step_tokens: int = 8192
    running: int = 256

    def __post_init__(self) -> None:
        for name in ("step_tokens", "running"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "give 1 or more")


class EngineQueue:
    """Requests and blocks.

    Args:
        half: Is asked and told.
        limits: Of the engine.
        block_tokens: Tokens of a block.
        chunk_blocks: Blocks of a chunk.
        tier_count: Tiers below host memory.

    Attributes:
        brought: Chunks that were brought back to host memory and not read since, and from which tier.
        loading: Who owns blocks and has not run: what they hold is on its way, or has come.
        running: In the order of their admission.
        deferred: Somebody was told to ask again, in the last step.
    """

    def __init__(
        self,
        half: OffloadingConnectorScheduler,
        limits: EngineLimits,
        block_tokens: int,
        chunk_blocks: int = 1,
        tier_count: int = 0,
    ) -> None:
        self._half = half
        self._limits = limits
        self._block_tokens = block_tokens
        self._chunk_blocks = chunk_blocks
        self._tier_count = tier_count
        self.brought: dict[bytes, int] = {}
        self.blocks = EngineBlocks(limits.block_count)
        self.waiting: deque[ServedRequest] = deque()
        self.loading: dict[str, ServedRequest] = {}
        self._loaded: set[str] = set()
        self.running: list[ServedRequest] = []
        self.deferred = False
        self.preemption_count = 0
        self._ended = False
        half.bind_block_pool(self.blocks)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is there."""
        return not (self.running or self.waiting or self.loading)

    def arrive(self, request: ServedRequest, now_s: float) -> None:
        """Queue a request.

        Raises:
            ConfigError: The engine could never hold it.
        """
        needed = self._blocks_of(request.last_tokens)
        if needed >= self._limits.block_count:
            raise ConfigError(
                "engine_blocks",
                self._limits.block_count,
                f"request {request.index} alone needs {needed} blocks of {self._block_tokens} tokens;"
                f" give {needed + 1} or more",
            )
        self._half.on_new_request(request, now_s)
        self.waiting.append(request)

    def plan(self, now_s: float) -> ServedStep:
        """Plan a step: who computes how many tokens in which blocks."""
        step = ServedStep()
        room = self._grow_running(step)
        self.deferred = False
        if step.preempted_req_ids is None:
            self._admit(step, room, now_s)
        return step

    def decode_more(self, step: ServedStep, most: int) -> None:
        """Take up to ``most`` steps as one, of requests that all generate, as far as blocks are free."""
        most = min(most, *(one.last_tokens - one.num_tokens for one in step.decoding))
        if most <= 1:
            return
        wanted = {
            one: self._blocks_of(one.num_computed_tokens + most) - len(one.blocks) for one in step.decoding
        }
        if sum(count for count in wanted.values() if count > 0) > self.blocks.free_count:
            return
        step.decode_count = most
        for request, count in wanted.items():
            step.num_scheduled_tokens[request.request_id] = most
            if count > 0:
                self._note_grown(step, request, self._give(request, count))

    def compute(self, step: ServedStep) -> list[ServedRequest]:
        """Note that a step has been computed; names whoever got a first token by it."""
        first = []
        for request, _, count in step.prompts:
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                self._name(request, request.num_computed_tokens)
                if request.num_tokens == request.num_prompt_tokens + 1:
                    first.append(request)
                self._ended = self._ended or request.num_tokens >= request.last_tokens
        count, ended = step.decode_count, self._ended
        for request in step.decoding:
            request.num_computed_tokens += count
            request.num_tokens = tokens = request.num_tokens + count
            if tokens >= request.news_tokens:
                self._name(request, tokens - 1)
            if tokens >= request.last_tokens:
                ended = True
        self._ended = ended
        return first

    def finish(self, now_s: float) -> list[ServedRequest]:
        """End requests that have generated all they were asked for."""
        if not self._ended:
            return []
        self._ended = False
        ended = [one for one in self.running if one.num_tokens >= one.last_tokens]
        self.running = [one for one in self.running if one.num_tokens < one.last_tokens]
        for request in ended:
            self._half.request_finished_all_groups(request, request.table, now_s)
            self._let_go(request)
        return ended

    def end_load(self, request_id: str, well: bool) -> bool:
        """Note the end of a load; False for one that was given up before."""
        request = self.loading.get(request_id)
        if request is None or request_id in self._loaded:
            return False
        if well:
            self._share(request, request.num_computed_tokens)
            self._loaded.add(request_id)
            return True
        del self.loading[request_id]
        self._let_go(request)
        request.num_computed_tokens = 0
        request.loaded_tokens = [0] * (1 + self._tier_count)
        self.waiting.appendleft(request)
        return True

    def check_invariants(self) -> None:
        """Check the blocks of an engine that is idle or between two steps."""
        holders = (*self.running, *self.loading.values())
        self.blocks.check_invariants(len({block for one in holders for block in one.blocks}))

    # -- who runs -----------------------------------------------------------------------------------

    def _grow_running(self, step: ServedStep) -> int:
        """Give running requests what they compute next; says how many tokens of the step are left."""
        room, at, preempted = self._limits.step_tokens, 0, []
        numbers, decoding = step.num_scheduled_tokens, step.decoding
        while at < len(self.running) and room > 0:
            request = self.running[at]
            computed, tokens = request.num_computed_tokens, request.num_tokens
            # Nearly all there is to do, hundreds of times a step: a token more where there is room.
            if computed == tokens - 1 >= request.num_prompt_tokens and tokens <= request.room_tokens:
                if tokens >= request.news_tokens:
                    self._name(request, tokens)
                numbers[request.request_id] = 1
                decoding.append(request)
                room -= 1
                at += 1
                continue
            count = min(tokens - computed, room)
            wanted = self._blocks_of(computed + count) - len(request.blocks)
            while wanted > self.blocks.free_count:
                last = self.running.pop()
                self._preempt(last)
                preempted.append(last.request_id)
                if last is request:
                    break
            else:
                if wanted > 0:
                    self._note_grown(step, request, self._give(request, wanted))
                self._schedule(step, request, count)
                room -= count
                at += 1
        if preempted:
            step.preempted_req_ids = preempted
        return room

    def _admit(self, step: ServedStep, room: int, now_s: float) -> None:
        """Let those on who wait: first whoever owns blocks, then in the order in which they came."""
        for request in [one for one in self.loading.values() if one.request_id in self._loaded]:
            if room <= 0 or len(self.running) >= self._limits.running:
                return
            count = min(request.num_tokens - request.num_computed_tokens, room)
            wanted = self._blocks_of(request.num_tokens) - len(request.blocks)
            if wanted > self.blocks.free_count:
                return
            self._give(request, self._blocks_of(request.num_computed_tokens + count) - len(request.blocks))
            del self.loading[request.request_id]
            self._loaded.discard(request.request_id)
            self._half.update_state_after_alloc(request, request.table, 0, now_s)
            self._run(step, request, count)
            room -= count
        skipped: list[ServedRequest] = []
        while self.waiting and room > 0 and len(self.running) < self._limits.running:
            request = self.waiting[0]
            admitted = self._admit_one(step, request, room, now_s)
            if admitted is None:
                break
            self.waiting.popleft()
            if admitted < 0:
                skipped.append(request)
            room -= max(0, admitted)
        self.deferred = bool(skipped)
        self.waiting.extendleft(reversed(skipped))

    def _admit_one(self, step: ServedStep, request: ServedRequest, room: int, now_s: float) -> int | None:
        """Admit a request, to compute or to load.

        Returns:
            Tokens it computes in this step; -1 when it has to ask again; None when it does not fit.
        """
        own = self.blocks.find(request.block_hashes, (request.num_tokens - 1) // self._block_tokens)
        own_tokens = len(own) * self._block_tokens
        loaded_tokens, _ = self._half.get_num_new_matched_tokens(request, own_tokens, now_s)
        if loaded_tokens is None:
            return -1
        free = self.blocks.free_count - self.blocks.idle_count(own)
        if self._blocks_of(request.num_tokens) - len(own) > free:
            return None
        computed = own_tokens + loaded_tokens
        count = 0 if loaded_tokens else min(request.num_tokens - computed, room)
        wanted = self._blocks_of(computed + count) - len(own)
        if loaded_tokens and wanted > free - self._reserved():
            return None
        self.blocks.touch(own)
        request.blocks = list(own)
        request.named_count = len(own)
        self._give(request, wanted)
        request.num_computed_tokens = computed
        if request.engine_tokens < 0:
            request.engine_tokens = own_tokens
            request.loaded_tokens = self._sources(request, own_tokens, computed)
        self._half.update_state_after_alloc(request, request.table, loaded_tokens, now_s)
        if loaded_tokens:
            self.loading[request.request_id] = request
        else:
            self._run(step, request, count)
        return count

    def _sources(self, request: ServedRequest, own_tokens: int, restored_tokens: int) -> list[int]:
        """Say how many tokens of a load each tier has given; what nobody has read since counts as its."""
        tokens = [0] * (1 + self._tier_count)
        tokens[0] = restored_tokens - own_tokens
        if self.brought and tokens[0]:
            size = self._chunk_blocks
            chunk_tokens = size * self._block_tokens
            for chunk in range(own_tokens // chunk_tokens, restored_tokens // chunk_tokens):
                tier = self.brought.pop(request.block_hashes[(chunk + 1) * size - 1], 0)
                if tier:
                    part = min(chunk_tokens, (chunk + 1) * chunk_tokens - own_tokens)
                    tokens[0] -= part
                    tokens[tier] += part
        return tokens

    def _reserved(self) -> int:
        """Blocks that those still need whose prompts are being computed or loaded."""
        unfinished: Iterable[ServedRequest] = (
            *self.loading.values(),
            *(one for one in self.running if one.num_computed_tokens < one.num_tokens - 1),
        )
        return sum(self._blocks_of(one.num_tokens) - len(one.blocks) for one in unfinished)

    def _run(self, step: ServedStep, request: ServedRequest, count: int) -> None:
        request.look_ahead()
        self.running.append(request)
        self._schedule(step, request, count)

    def _schedule(self, step: ServedStep, request: ServedRequest, count: int) -> None:
        step.num_scheduled_tokens[request.request_id] = count
        if request.num_computed_tokens == request.num_tokens - 1 >= request.num_prompt_tokens:
            step.decoding.append(request)
            return
        step.prompts.append((request, request.num_computed_tokens, count))
        # As vLLM does: what this step computes can be hit by whoever is admitted behind it.
        self._share(request, request.num_computed_tokens + count)

    def _preempt(self, request: ServedRequest) -> None:
        self._let_go(request)
        request.num_computed_tokens = 0
        self.preemption_count += 1
        self.waiting.appendleft(request)

    # -- blocks -------------------------------------------------------------------------------------

    def _blocks_of(self, token_count: int) -> int:
        return -(-token_count // self._block_tokens)

    def _give(self, request: ServedRequest, count: int) -> list[int]:
        given = self.blocks.take(count) if count > 0 else []
        request.blocks += given
        request.room_tokens = len(request.blocks) * self._block_tokens
        return given

    def _let_go(self, request: ServedRequest) -> None:
        self.blocks.free_blocks(reversed(request.blocks))
        request.blocks, request.room_tokens, request.named_count = [], 0, 0

    def _name(self, request: ServedRequest, token_count: int) -> None:
        """Take in new names of a request that generates, and let others use what so many tokens come to."""
        request.name_generated()
        self._share(request, token_count)
        request.look_ahead()

    def _share(self, request: ServedRequest, token_count: int) -> None:
        """Let others use blocks that hold what so many tokens come to."""
        whole = min(token_count // self._block_tokens, len(request.block_hashes))
        if whole > request.named_count:
            span = slice(request.named_count, whole)
            self.blocks.name(request.blocks[span], request.block_hashes[span])
            request.named_count = whole

    @staticmethod
    def _note_grown(step: ServedStep, request: ServedRequest, given: list[int]) -> None:
        grown = step.grown
        grown.req_ids.append(request.request_id)
        grown.new_block_ids = [*grown.new_block_ids, (given,)]
