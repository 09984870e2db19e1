"""Many clients at once, each with calls drawn from a seed: every kind of call, hang-ups at any byte, and what is right.

Invariant: an answer is right only if it is whole and its text is the one the server itself gave before; everything else
must be a refusal that says its code. What a client got before it hung up must be the beginning of such an answer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.support.wire import Got, Wire, request, wire

Body = dict[str, Any]
LEAVES = 0.15
"""So many of the calls are given up."""
PATIENCE_S = 120.0
"""Longer than any call may wait."""
CLOSE = 0.99


@dataclass(frozen=True, slots=True)
class Ask:
    """One call, and what it must be answered: a text, or numbers. `kind` names how that stands in the answer."""

    kind: str
    path: str
    body: Body
    want: str | tuple[float, ...] = ""

    @property
    def stream(self) -> bool:
        """Whether it is answered in events."""
        return bool(self.body.get("stream"))

    def wanting(self, want: str | tuple[float, ...]) -> Ask:
        """The same with what is right."""
        return Ask(self.kind, self.path, self.body, want)

    def streamed(self) -> Ask:
        """The same in events."""
        return Ask(self.kind, self.path, {**self.body, "stream": True}, self.want)

    def raw(self) -> bytes:
        """As it is sent."""
        return request(json.dumps(self.body).encode(), self.path)


def asks(model: str, number: int) -> list[Ask]:
    """Every kind of call that a chat model is asked, about one thing."""
    prompt, size = f"tell me of number {number} " * (number % 5 + 1), 60 if number % 3 == 0 else 8 + number % 9
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": size, "temperature": 0}
    named = {"model": model, **chat}
    plain = {"model": model, "prompt": prompt, "max_tokens": size, "n_predict": size, "temperature": 0}
    return [
        Ask("chat", "/v1/chat/completions", named),
        Ask("chat", f"/upstream/{model}/v1/chat/completions", chat),
        Ask("text", "/v1/completions", plain),
        Ask("content", "/completion", plain),
        Ask("messages", "/v1/messages", named),
        Ask("tokens", "/tokenize", {"model": model, "content": prompt}),
    ]


def probes(model: str, number: int) -> list[Ask]:
    """The two prompts behind `asks`, asked so that the answer tells how close the choice of each token was."""
    chat, _, _, raw, *_ = asks(model, number)
    return [
        Ask("chat", chat.path, {**chat.body, "logprobs": True, "top_logprobs": 2}),
        Ask("content", raw.path, {**raw.body, "n_probs": 2}),
    ]


def margin(kind: str, body: bytes) -> float:
    """How far apart the two likeliest tokens were where that was least; by less than rounding, it may be the other."""
    value = json.loads(body)
    tokens = value["choices"][0]["logprobs"]["content"] if kind == "chat" else value["completion_probabilities"]
    pairs = (sorted(one["logprob"] for one in token["top_logprobs"]) for token in tokens)
    return min(pair[-1] - pair[-2] for pair in pairs)


STREAMS = frozenset({"chat", "text", "content", "messages"})


def said(kind: str, body: bytes) -> str | tuple[float, ...]:
    """What a plain answer says."""
    value = json.loads(body)
    match kind:
        case "chat":
            return str(value["choices"][0]["message"]["content"])
        case "text":
            return str(value["choices"][0]["text"])
        case "content":
            return str(value["content"])
        case "messages":
            return "".join(part["text"] for part in value["content"])
        case "tokens":
            return json.dumps(value["tokens"])
        case _:
            return tuple(value["data"][0]["embedding"])


@dataclass(slots=True)
class Streamed:
    """What a stream has said so far: `ended` by its last event, or with an error's `code`."""

    text: str = ""
    ended: bool = False
    code: str | None = None


def streamed(kind: str, body: bytes) -> Streamed:
    """Reads all whole events. Raises where one of them is none of its API's."""
    found = Streamed()
    for event in body.decode().split("\n\n")[:-1]:
        lines = [line.removeprefix("data: ") for line in event.split("\n") if line.startswith("data: ")]
        for line in lines:
            if line == "[DONE]":
                found.ended = found.code is None
            else:
                _event(kind, json.loads(line), found)
    return found


def _event(kind: str, value: Body, found: Streamed) -> None:
    if "error" in value:
        found.code, found.ended = str(value["error"]["code"]), False
        return
    match kind:
        case "chat":
            choices = value["choices"]
            found.text += (choices[0]["delta"].get("content") or "") if choices else ""
        case "text":
            found.text += value["choices"][0]["text"] if value["choices"] else ""
        case "content":
            found.text += value["content"]
            found.ended = found.ended or bool(value["stop"])
        case _:
            found.text += value.get("delta", {}).get("text") or ""
            found.ended = found.ended or value["type"] == "message_stop"


@dataclass(slots=True)
class Tally:
    """How calls ended: `right`, `left`, or a refusal's code; `wrong` tells each that was neither."""

    ends: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    @property
    def calls(self) -> int:
        """All of them."""
        return self.ends.total() + len(self.wrong)


class Storm:
    """`clients` of them, each making `each` calls on connections that it keeps while they last.

    `beside` is called each time another part of all calls is over, with that part's number; there are `parts`.
    """

    def __init__(self, url: str, pool: Sequence[Ask], *, clients: int, each: int, seed: int, parts: int) -> None:
        self.tally = Tally()
        self._url = url
        self._pool = pool
        self._clients = clients
        self._each = each
        self._seed = seed
        self._parts = parts
        self._over = asyncio.Condition()

    async def rage(self, beside: Callable[[int], Awaitable[None]]) -> Tally:
        """Until all is over."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beside(beside))
            for number in range(self._clients):
                tasks.create_task(self._client(Random(f"{self._seed}/{number}")))
        return self.tally

    async def more(self, calls: int) -> None:
        """Until so many more calls were answered, or all are over."""
        ends, total = self.tally.ends, self._clients * self._each
        wanted = ends["right"] + calls
        async with self._over:
            await self._over.wait_for(lambda: ends["right"] >= wanted or self.tally.calls >= total)

    async def _beside(self, beside: Callable[[int], Awaitable[None]]) -> None:
        total = self._clients * self._each
        for part in range(self._parts):
            async with self._over:
                await self._over.wait_for(lambda part=part: self.tally.calls >= total * part // self._parts)
            await beside(part)

    async def _client(self, random: Random) -> None:
        left = self._each
        while left:
            async with wire(self._url) as connection:
                connection.patience_s = PATIENCE_S
                stays = True
                while stays and left:
                    left -= 1
                    stays = await self._call(connection, random)

    async def _call(self, connection: Wire, random: Random) -> bool:
        """Whether the connection stays."""
        ask = random.choice(self._pool)
        try:
            if random.random() < LEAVES:
                await self._given_up(connection, ask, random)
                return False
            got = await connection.call(ask.raw())
            self._judge(ask, got)
            return got.complete and "close" not in got.all("Connection")
        except Exception as error:  # the supervisor: whatever a client met is told at the end
            self.tally.wrong.append(f"{ask.path} {ask.body}: {error!r}")
            return False
        finally:
            async with self._over:
                self._over.notify_all()

    async def _given_up(self, connection: Wire, ask: Ask, random: Random) -> None:
        """At any byte: of the request, or of the answer."""
        raw = ask.raw()
        if random.random() < 0.3:
            await connection.send(raw[: random.randrange(len(raw))])
        else:
            await connection.send(raw)
            enough, came = random.choice((0, 0, 1, 100, 600 if ask.stream else 150)), b""
            while len(came) < enough and (more := await connection.some()):
                came += more
        connection.leave(reset=random.random() < 0.5)
        self.tally.ends["left"] += 1

    def _judge(self, ask: Ask, got: Got) -> None:
        end = verdict(ask, got)
        if end is None:
            self.tally.wrong.append(f"{ask.path} {ask.body}: {self._told(ask, got)}")
        else:
            self.tally.ends[end] += 1

    def _told(self, ask: Ask, got: Got) -> str:
        """What is wrong: where it differs, and whose answer it is, if anybody's."""
        text = streamed(ask.kind, got.body).text if ask.stream else str(said(ask.kind, got.body))
        want = str(ask.want)
        at = next((at for at, (one, other) in enumerate(zip(text, want, strict=False)) if one != other), None)
        whose = [f"{other.path} {other.body}" for other in self._pool if text and other.want == text]
        return (
            f"{len(text)} for {len(want)} characters, other than wanted from {at}; that of {whose}; {text!r} {want!r}"
        )


def verdict(ask: Ask, got: Got) -> str | None:
    """`right`, the code of a refusal, `broken` for an answer that is visibly cut, or None: it is wrong."""
    if got.status != 200:
        return str(got.error()["code"])
    if ask.stream:
        seen = streamed(ask.kind, got.body)
        if not str(ask.want).startswith(seen.text):
            return None
        if got.complete and seen.ended and seen.text == ask.want:
            return "right"
        return seen.code if got.complete else "broken"
    if not got.complete:
        return "broken"
    text = said(ask.kind, got.body)
    right = near(text, ask.want) if isinstance(text, tuple) else text == ask.want
    return "right" if right else None


def near(one: tuple[float, ...], other: str | tuple[float, ...]) -> bool:
    """Two directions that are the same but for rounding."""
    if isinstance(other, str) or len(one) != len(other):
        return False
    size = math.hypot(*one) * math.hypot(*other)
    return size > 0 and sum(a * b for a, b in zip(one, other, strict=True)) / size > CLOSE
