"""One question to one server, through the real OpenAI client, streamed and timed.

Knows the completions endpoint and what vLLM adds to it. Does not know conversations or what the answer is
compared with. Prompts go as token ids and answers come back as token ids: text in between could be split
into other tokens and would be another prompt.
"""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvtide.demo.errors import DemoError
from kvtide.demo.servers import SERVED_NAME, Server

REQUEST_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back.

    Attributes:
        ttft_ms: From sending the request to the first generated token.
        total_s: From sending the request to the end of the stream.
        prompt_tokens: As the server counted them.
        cached_tokens: Prompt tokens that the server says it did not compute.
        token_ids: Generated tokens.
        logprobs: One per generated token, ``float.hex()``.
    """

    ttft_ms: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[str, ...]


class Client:
    """Asks one server; an asynchronous context that closes its connections."""

    def __init__(self, server: Server) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self.server = server
        self._openai: Any = AsyncOpenAI(
            base_url=f"{server.address}/v1",
            api_key="none is needed",
            timeout=REQUEST_LIMIT_S,
            # A request that was silently sent twice would be a hit and a wrong time.
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._openai.close()

    async def ask(self, prompt: list[int], new_tokens: int) -> Reply:
        """Ask for exactly ``new_tokens`` greedy tokens.

        Raises:
            DemoError: The server failed, or answered otherwise than it was asked to.
        """
        from httpx import HTTPError
        from openai import OpenAIError

        try:
            reply = await self._streamed(prompt, new_tokens)
        # A stream that breaks off in the middle is httpx' error, not the client's.
        except (OpenAIError, HTTPError) as error:
            name = self.server.plan.name
            raise DemoError(f"server {name} failed a request: {error!r}\n{self.server.log_tail()}") from None
        if not len(reply.token_ids) == len(reply.logprobs) == new_tokens:
            raise DemoError(
                f"server {self.server.plan.name} gave {len(reply.token_ids)} tokens and {len(reply.logprobs)}"
                f" log-probabilities where {new_tokens} were asked for"
            )
        return reply

    async def _streamed(self, prompt: list[int], new_tokens: int) -> Reply:
        token_ids: list[int] = []
        logprobs: list[str] = []
        usage: Any = None
        first_s = 0.0
        sent_s = time.perf_counter()
        stream = await self._openai.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            max_tokens=new_tokens,
            temperature=0,
            logprobs=0,
            stream=True,
            stream_options={"include_usage": True},
            # min_tokens keeps the end of the answer from being said early: every answer has one length, and
            # unlike ignore_eos it does not let the model run on past its own end.
            extra_body={"return_token_ids": True, "min_tokens": new_tokens},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.token_ids and not token_ids:
                    first_s = time.perf_counter()
                token_ids += choice.token_ids or ()
                logprobs += [value.hex() for value in choice.logprobs.token_logprobs]
            usage = chunk.usage or usage
        ended_s = time.perf_counter()
        details = getattr(usage, "prompt_tokens_details", None)
        if details is None:
            raise DemoError(f"server {self.server.plan.name} did not say how many prompt tokens were cached")
        return Reply(
            ttft_ms=(first_s - sent_s) * 1e3,
            total_s=ended_s - sent_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
        )
