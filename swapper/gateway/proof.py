"""Reads from answers whether restored conversations were reused, and reports it; the client never waits for it.

Invariant: an answer is only looked at while its tenant has unproved conversations; a slot is trusted only when it is
the answer's own word or the one idle slot that holds as many tokens as the answer left in it; what cannot be told
apart stays unproved.
Seen on llama-server b10434: `timings.cache_n/prompt_n/predicted_n` or `usage`, in the last chunk of a stream; `id_slot`
only in `/completion`; a slot's `n_prompt_tokens` is prompt + generated - 1, while its counters of cached and processed
tokens are back to 0 once the answer is complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import aiohttp
import msgspec

from swapper.core.proof import judge
from swapper.gateway.context import Target

TAIL_BYTES = 1 << 20
"""How much of the end of an answer is kept: `/completion` repeats its whole prompt in the last event."""
LAST_EVENTS = 6
"""How many events from the end are parsed to find the numbers."""


class _Timings(msgspec.Struct):
    cache_n: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    timings: _Timings | None = None
    usage: _Usage | None = None
    id_slot: int | None = None


class SlotLine(msgspec.Struct):
    """One slot of `GET /slots`; `id_task` and `n_prompt_tokens` (tokens in it) are absent until a task ran in it."""

    id: int
    is_processing: bool = False
    id_task: int | None = None
    n_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Reuse:
    """What an answer says: prompt tokens from the slot, prompt tokens read anew, and the slot where it tells.

    `left` is how many tokens the answer left in its slot; None where the answer does not count what it generated.
    """

    cache_n: int
    prompt_n: int
    slot: int | None = None
    left: int | None = None


@dataclass(frozen=True, slots=True)
class Unproved:
    """A restored conversation of which no answer has shown anything yet."""

    snapshot: str
    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What one answer proved, as the data of a `proof` report; `card` and `tenant` address it."""

    card: str
    tenant: str
    data: Mapping[str, object]


_answer = msgspec.json.Decoder(_Answer)
_slots = msgspec.json.Decoder(list[SlotLine])


class Tail:
    """The last TAIL_BYTES of an answer as it passes."""

    __slots__ = ("_chunks", "_cut", "_size", "sse")

    def __init__(self, *, sse: bool) -> None:
        self.sse = sse
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        """Remember a chunk, forgetting the oldest beyond the limit."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size > TAIL_BYTES and len(self._chunks) > 1:
            self._size -= len(self._chunks.popleft())
            self._cut = True

    def reuse(self) -> Reuse | None:
        """The numbers, or None where the answer has none (or its beginning is gone)."""
        text = b"".join(self._chunks)
        if self.sse:
            return next((found for found in map(_reuse, _last_events(text)) if found), None)
        return None if self._cut else _reuse(text)


def _last_events(text: bytes) -> Iterable[bytes]:
    """The data of the last events, newest first."""
    events = [event for event in text.replace(b"\r\n", b"\n").split(b"\n\n") if event.strip()]
    for event in reversed(events[-LAST_EVENTS:]):
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        yield b"\n".join(lines)


def _reuse(text: bytes) -> Reuse | None:
    try:
        answer = _answer.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    timings, usage = answer.timings, answer.usage
    if timings is not None and timings.cache_n is not None and timings.prompt_n is not None:
        left = _left(timings.cache_n + timings.prompt_n, timings.predicted_n)
        return Reuse(timings.cache_n, timings.prompt_n, answer.id_slot, left)
    if usage is None or usage.prompt_tokens is None or usage.prompt_tokens_details is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens
    if cached is None:
        return None
    left = _left(usage.prompt_tokens, usage.completion_tokens)
    return Reuse(cached, usage.prompt_tokens - cached, answer.id_slot, left)


def _left(prompt: int, generated: int | None) -> int | None:
    return None if generated is None else prompt + max(generated, 1) - 1


def pick_slot(lines: Iterable[SlotLine], claimed: Mapping[int, int], reuse: Reuse) -> SlotLine | None:
    """The slot that answered: idle, its last task not `claimed` (slot -> task), tokens fitting. None: unclear."""
    fitting = [
        line
        for line in lines
        if line.id_task is not None
        and not line.is_processing
        and claimed.get(line.id) != line.id_task
        and (reuse.left is None or line.n_prompt_tokens == reuse.left)
    ]
    return fitting[0] if len(fitting) == 1 else None


class _Ledger:
    """What is unproved of one tenant, by slot, and which (slot, task) an earlier answer already claimed."""

    __slots__ = ("card", "claimed", "swap", "unproved")

    def __init__(self, card: str, swap: str, unproved: Iterable[Unproved]) -> None:
        self.card = card
        self.swap = swap
        self.unproved = {one.slot: one for one in unproved}
        self.claimed: dict[int, int] = {}


class Proofs:
    """The unproved conversations of this gateway process. `send` delivers a finding."""

    def __init__(self, send: Callable[[Finding], Awaitable[None]]) -> None:
        self._send = send
        self._ledgers: dict[str, _Ledger] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def expect(self, tenant: str, card: str, swap: str, unproved: Iterable[Unproved]) -> None:
        """After an `open`: these conversations were restored and are to be proved."""
        ledger = _Ledger(card, swap, unproved)
        if ledger.unproved:
            self._ledgers[tenant] = ledger
        else:
            self._ledgers.pop(tenant, None)

    def forget(self, tenant: str) -> None:
        """The gate closes: what is unproved now stays so."""
        self._ledgers.pop(tenant, None)

    def tap(self, tenant: str, *, sse: bool) -> Tail | None:
        """Something that watches an answer pass, or None while nothing is to be proved."""
        return Tail(sse=sse) if tenant in self._ledgers else None

    def answered(self, tail: Tail, target: Target, session: aiohttp.ClientSession) -> None:
        """An answer was delivered in full: find out, in the background, what it proves."""
        task = asyncio.create_task(self._settle(tail, target, session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Return when no answer is being looked at."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def close(self) -> None:
        """Give up what is being looked at."""
        for task in tuple(self._tasks):
            task.cancel()
        await self.idle()

    async def _settle(self, tail: Tail, target: Target, session: aiohttp.ClientSession) -> None:
        reuse = tail.reuse()
        ledger = self._ledgers.get(target.tenant)
        if reuse is None or ledger is None:
            return
        slot = reuse.slot
        if slot is None:
            lines = await _read_slots(target, session)
            line = pick_slot(lines, ledger.claimed, reuse)
            if line is None or line.id_task is None:
                return
            slot = line.id
            ledger.claimed[slot] = line.id_task
        one = ledger.unproved.pop(slot, None)
        if one is None:
            return
        if not ledger.unproved and self._ledgers.get(target.tenant) is ledger:
            del self._ledgers[target.tenant]
        result, reason = judge(one.tokens, reuse.cache_n, reuse.prompt_n)
        data = {
            "swap": ledger.swap,
            "snapshot": one.snapshot,
            "slot": slot,
            "result": result.value,
            "cache_n": reuse.cache_n,
            "prompt_n": reuse.prompt_n,
            "reason": reason,
        }
        await self._send(Finding(ledger.card, target.tenant, data))


async def _read_slots(target: Target, session: aiohttp.ClientSession) -> list[SlotLine]:
    params = {"model": target.model, "autoload": "false"} if target.router else None
    try:
        async with session.get(
            target.url + "/slots", params=params, headers=target.auth(), timeout=aiohttp.ClientTimeout(total=5)
        ) as answer:
            return _slots.decode(await answer.read()) if answer.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return []


def read_unproved(value: object) -> tuple[Unproved, ...]:
    """The `unproved` argument of an `open` command: `[{snapshot, slot, tokens}]`."""
    if not isinstance(value, list | tuple):
        return ()
    return tuple(msgspec.convert(item, Unproved) for item in cast("list[object]", value))
