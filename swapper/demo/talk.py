"""A chat client for the demo: long conversations, streamed, with the time to the first token of each answer.

Invariant: an answer goes into the next turn exactly as it was streamed, so that what lies in a slot is a prefix of what
is sent. One character is one token of the demo's models. The caller owns the connections.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp

from swapper.client.sse import messages
from swapper.errors import SwapperError

ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: `cache_n` of the prompt's tokens were reused, `prompt_n` were read, in `ttft_ms` the text began."""

    text: str
    ttft_ms: float
    cache_n: int
    prompt_n: int

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.cache_n + self.prompt_n


@dataclass(slots=True)
class Talk:
    """A conversation with a model: what was said so far."""

    model: str
    chain: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    async def say(self, session: aiohttp.ClientSession, url: str, text: str) -> Turn:
        """One turn that becomes part of the conversation. Raises SwapperError when there is no whole answer."""
        turn = await self.ask(session, url, text)
        self.chain += [{"role": "user", "content": text}, {"role": "assistant", "content": turn.text}]
        return turn

    async def ask(self, session: aiohttp.ClientSession, url: str, text: str) -> Turn:
        """The same turn without its becoming part, so that it can be put again. Raises SwapperError as `say` does."""
        chain = [*self.chain, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": chain, "stream": True, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        reading = Reading()
        try:
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise SwapperError(f"{self.model} did not answer ({response.status}): {await response.text()}")
                async for message in messages(response.content):
                    reading.take(message.data)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SwapperError(f"The answer of {self.model} broke off: {str(error) or type(error).__name__}") from error
        return reading.turn()


class Reading:
    """What has arrived of one streamed answer; its clock runs from the start."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._ttft_ms: float | None = None
        self._text: list[str] = []
        self._timings: Mapping[str, Any] | None = None

    def take(self, data: str) -> None:
        """One `data:` line; chunks without text are keepalives, or the role."""
        if data == "[DONE]":
            return
        chunk = cast("dict[str, Any]", json.loads(data))
        if "error" in chunk:
            raise SwapperError(f"The model stopped answering: {chunk['error'].get('message', chunk['error'])}")
        self._timings = chunk.get("timings", self._timings)
        for choice in chunk.get("choices", ()):
            if text := choice["delta"].get("content"):
                if self._ttft_ms is None:
                    self._ttft_ms = (time.perf_counter() - self._begun) * 1000
                self._text.append(text)

    def turn(self) -> Turn:
        """The whole of it; `timings` come with the last chunk (llama-server)."""
        if self._timings is None or self._ttft_ms is None:
            raise SwapperError("The model's answer ended before it was complete.")
        return Turn("".join(self._text), self._ttft_ms, self._timings["cache_n"], self._timings["prompt_n"])


def story(number: int, tokens: int) -> str:
    """A text of `tokens` characters, unlike that of any other number from its first character on."""
    lines = [f"{number} is the shelf whose log this is; keep it in mind."]
    length = len(lines[0])
    while length < tokens:
        count = len(lines)
        lines.append(
            f"shelf {number}, box {count * 7919 % 1000:03d}: {count * 31 % 97} pieces, seen by {count * 13 % 29}"
        )
        length += len(lines[-1]) + 1
    return "\n".join(lines)[:tokens]
