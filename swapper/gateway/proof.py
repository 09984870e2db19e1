"""What an answer tells of the prompt tokens it reused, and which unproved conversation that proves warm or cold.

Invariant: an answer is looked at once it has passed, and no client waits for that; a slot is trusted only when it is
the answer's own word or the one idle slot that holds as many tokens as the answer left in it; what cannot be told
apart stays unproved.
Seen on llama-server b10434: `timings.cache_n/prompt_n/predicted_n` or `usage`, in the last chunk of a stream; `id_slot`
only in `/completion`; a slot's `n_prompt_tokens` is prompt + generated - 1, while its counters of cached and processed
tokens are back to 0 once the answer is complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import aiohttp
import msgspec

from swapper.core.proof import judge
from swapper.gateway.context import Target
from swapper.snapshots.conversation import ATTACHED_LINKS, Conversation, Match, Relation

TAIL_BYTES = 1 << 20
"""How much of the end of an answer is kept: `/completion` repeats its whole prompt in the last event."""
LOOK_S = 5.0
"""How long a look at the slots may take."""
HEAD_BYTES = 1 << 14
LAST_EVENTS = 6
"""How many events from the end are parsed to find the numbers."""
LAST_LINES = 1_000
"""How many lines from the end are looked at for them."""


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
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None

    def spent(self) -> Spent | None:
        """The prompt's tokens; what is not said to come from a cache was processed, as far as anybody knows."""
        if self.prompt_tokens is not None:
            cached = _cached(self.prompt_tokens_details)
            return Spent(cached, self.prompt_tokens - cached)
        if self.input_tokens is None:
            return None
        if self.input_tokens_details is not None:  # OpenAI's Responses count the whole prompt
            cached = _cached(self.input_tokens_details)
            return Spent(cached, self.input_tokens - cached)
        return Spent(self.cache_read_input_tokens or 0, self.input_tokens + (self.cache_creation_input_tokens or 0))


class _Completed(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    """`response`: where the last event of a Responses stream has it."""

    timings: _Timings | None = None
    usage: _Usage | None = None
    id_slot: int | None = None
    response: _Completed | None = None

    def spent(self) -> Spent | None:
        """What it says of its prompt, by whichever API."""
        timings = self.timings
        if timings is not None and timings.prompt_n is not None:
            return Spent(timings.cache_n or 0, timings.prompt_n)
        usage = self.usage or (None if self.response is None else self.response.usage)
        return None if usage is None else usage.spent()


class _Message(msgspec.Struct):
    usage: _Usage


class _Started(msgspec.Struct):
    message: _Message


@dataclass(frozen=True, slots=True)
class Spent:
    """Prompt tokens of one answer: from a cache, and processed."""

    cached: int
    processed: int


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
    """A restored conversation of which no answer has shown anything yet.

    `stands`: nothing is known to have been put into its slot since, by a process that saw all that was.
    """

    snapshot: str
    slot: int
    tokens: int
    id: str = ""
    links: tuple[str, ...] = ()
    strategy: str = "slots"
    used_ms: int = 0
    stands: bool = True


_answer = msgspec.json.Decoder(_Answer)
_started = msgspec.json.Decoder(_Started)
_slots = msgspec.json.Decoder(list[SlotLine])


class Tail:
    """The last TAIL_BYTES of an answer as it passes; `head`: its first event as well, where one API has the numbers."""

    __slots__ = ("_chunks", "_cut", "_head", "_size", "sse")

    def __init__(self, *, sse: bool, head: bool = False) -> None:
        self.sse = sse
        self._head: bytearray | None = bytearray() if sse and head else None
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        """Remember a chunk, forgetting the oldest beyond the limit."""
        if self._head is not None and len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size > TAIL_BYTES and len(self._chunks) > 1:
            self._size -= len(self._chunks.popleft())
            self._cut = True

    def last_event(self) -> bytes:
        """The data of the last event, nothing where there is none."""
        return next(_last_events(b"".join(self._chunks)), b"")

    def reuse(self) -> Reuse | None:
        """The numbers, or None where the answer has none (or its beginning is gone)."""
        text = b"".join(self._chunks)
        if self._head is not None:
            return _of_message(bytes(self._head), text)
        if self.sse:
            return next((found for found in map(_reuse, _last_events(text)) if found), None)
        return None if self._cut else _reuse(text)

    def spent(self) -> Spent | None:
        """The prompt's tokens, also where nothing is said of a cache; None where the answer does not count them."""
        text = b"".join(self._chunks)
        if not self.sse:
            return None if self._cut else _spent(text)
        late = next((found for found in map(_spent, _last_events(text)) if found is not None), None)
        if self._head is None or (late is not None and late.cached + late.processed):
            return late
        usage = _first_usage(bytes(self._head))
        return None if usage is None else usage.spent()


def _of_message(head: bytes, text: bytes) -> Reuse | None:
    """Anthropic's stream: the prompt stands in the first event, `message_start`, what was generated in a late one."""
    prompt = _first_usage(head)
    if prompt is None:
        return None
    generated: int | None = None
    for event in _last_events(text):
        try:
            found = _answer.decode(event).usage
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if found is not None and found.output_tokens is not None:
            generated = found.output_tokens
            break
    return _of_usage(prompt, generated, None)


def _first_usage(head: bytes) -> _Usage | None:
    first = head.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    started = next((line[5:] for line in first.split(b"\n") if line.startswith(b"data:")), b"")
    try:
        return _started.decode(started).message.usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _spent(text: bytes) -> Spent | None:
    try:
        return _answer.decode(text).spent()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _cached(details: _Details | None) -> int:
    return 0 if details is None else details.cached_tokens or 0


def _of_usage(usage: _Usage, generated: int | None, slot: int | None) -> Reuse | None:
    """OpenAI counts the whole prompt and of it the cached tokens, Anthropic those that were not cached beside them."""
    if usage.cache_read_input_tokens is not None and usage.input_tokens is not None:
        cached, read = usage.cache_read_input_tokens, usage.input_tokens
        return Reuse(cached, read, slot, _left(cached + read, generated))
    if usage.prompt_tokens is None or usage.prompt_tokens_details is None:
        return None
    known = usage.prompt_tokens_details.cached_tokens
    return (
        None
        if known is None
        else Reuse(known, usage.prompt_tokens - known, slot, _left(usage.prompt_tokens, generated))
    )


def _last_events(text: bytes) -> Iterator[bytes]:
    """The data of the last events, newest first; only they are looked at, however long the text is."""
    data: list[bytes] = []
    events = 0
    for line in islice(_lines_from_the_end(text), LAST_LINES):
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif not line and data:
            yield b"\n".join(reversed(data))
            data.clear()
            events += 1
        if events == LAST_EVENTS:
            return
    if data:
        yield b"\n".join(reversed(data))


def _lines_from_the_end(text: bytes) -> Iterator[bytes]:
    end = len(text)
    while end >= 0:
        start = text.rfind(b"\n", 0, end) + 1
        yield text[start:end].removesuffix(b"\r")
        end = start - 1


def _reuse(text: bytes) -> Reuse | None:
    try:
        answer = _answer.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    timings, usage = answer.timings, answer.usage
    if timings is not None and timings.cache_n is not None and timings.prompt_n is not None:
        left = _left(timings.cache_n + timings.prompt_n, timings.predicted_n)
        return Reuse(timings.cache_n, timings.prompt_n, answer.id_slot, left)
    if usage is None:
        return None
    generated = usage.completion_tokens if usage.output_tokens is None else usage.output_tokens
    return _of_usage(usage, generated, answer.id_slot)


def _left(prompt: int, generated: int | None) -> int | None:
    return None if generated is None else prompt + max(generated, 1) - 1


def pick_slot(
    lines: Iterable[SlotLine], claimed: Mapping[int, int], reuse: Reuse, *, latest: bool = False
) -> SlotLine | None:
    """The slot that answered: idle, its last task not `claimed` (slot -> task), tokens fitting. None: unclear.

    `latest`: no other call was sent or answered since, so that of several it is the one with the newest task.
    """
    lines = tuple(lines)
    fitting = [
        line
        for line in lines
        if line.id_task is not None
        and not line.is_processing
        and claimed.get(line.id) != line.id_task
        and (reuse.left is None or line.n_prompt_tokens == reuse.left)
    ]
    if latest and not any(line.is_processing for line in lines):
        return max(fitting, key=lambda line: line.id_task or 0, default=None)
    return fitting[0] if len(fitting) == 1 else None


class Ledger:
    """What is unproved of one tenant, and which (slot, task) an earlier answer already claimed."""

    __slots__ = ("card", "claimed", "swap", "unproved")

    def __init__(self, card: str, swap: str, unproved: Iterable[Unproved]) -> None:
        self.card = card
        self.swap = swap
        self.unproved = {one.snapshot: one for one in unproved}
        self.claimed: dict[int, int] = {}

    def expect(self, one: Unproved) -> None:
        """One more came back: what lay in its slot does so no more."""
        gone = [other for other in self.unproved.values() if other.slot == one.slot]
        self.unproved.update({other.snapshot: replace(other, stands=False) for other in gone})
        self.unproved[one.snapshot] = one

    def of(self, name: str | None, slot: int | None) -> Unproved | None:
        """The one with this id; else the one in this slot, if it has none."""
        found = (one for one in self.unproved.values() if name and one.id == name)
        in_slot = (one for one in self.unproved.values() if slot is not None and one.slot == slot and not one.id)
        return next(found, None) or next(in_slot, None)


def finding(ledger: Ledger, match: Match | None, reuse: Reuse, slot: int | None) -> Mapping[str, object] | None:
    """What an answer proved, as the data of a `proof` report; None: nothing. Said once of each.

    `match` is what was known of the call's conversation before this answer. Only a conversation that went on, in the
    slot it was restored into and still lay in, shows by being read anew that it was kept in vain.
    """
    talk = None if match is None or match.relation is Relation.BRANCHED else match.conversation
    one = ledger.of(None if talk is None else talk.id, slot)
    if one is None:
        return None
    del ledger.unproved[one.snapshot]
    saved = min(one.tokens, talk.prompt or one.tokens) if talk is not None else one.tokens
    result, reason = judge(saved, reuse.cache_n, reuse.prompt_n)
    return {
        "swap": ledger.swap,
        "snapshot": one.snapshot,
        "slot": one.slot if slot is None else slot,
        "result": result.value,
        "cache_n": reuse.cache_n,
        "reason": reason,
        "tokens": one.tokens,
        "made_room": True,
        "continued": match is not None and match.whole and slot == one.slot and one.stands,
        **({} if talk is None or talk.id != one.id else _named(talk)),
    }


def _named(talk: Conversation) -> Mapping[str, object]:
    """Whose it was: as many links as tell that an earlier line of the swap was of an older state of it."""
    return {"id": talk.id, "links": [link.hex() for link in talk.links.newest(ATTACHED_LINKS)]}


async def read_slots(target: Target, session: aiohttp.ClientSession) -> list[SlotLine]:
    """`GET /slots` of the model; nothing where the server does not tell."""
    params = {"model": target.model, "autoload": "false"} if target.router else None
    try:
        async with (
            asyncio.timeout(LOOK_S),
            session.get(target.url + "/slots", params=params, headers=target.auth()) as answer,
        ):
            return _slots.decode(await answer.read()) if answer.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return []


def read_unproved(value: object) -> tuple[Unproved, ...]:
    """The `unproved` argument of an `open` command: `[{snapshot, slot, tokens, id, links, strategy, used_ms}]`."""
    if not isinstance(value, list | tuple):
        return ()
    return tuple(msgspec.convert(item, Unproved) for item in cast("list[object]", value))
