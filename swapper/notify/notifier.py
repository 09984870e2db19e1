"""Follows the event log and has sent what is worth telling: one of all processes on a store, from where the last came.

Invariant: the book is noted in the store before a message of it is sent, and again after, by whoever has the claim:
what happened is told at least once, twice only where the teller died, or lost its claim, between a sending and its
note. A server that fails is tried again, later each time, and keeps no other waiting; its failure is said once, and its
return.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from swapper.config.recipients import Recipient
from swapper.errors import StoreDown
from swapper.notify.book import STALE_MS, Book, Message, due_ms, hear, merged, post, read, turn, unpost, written
from swapper.notify.worth import worth_telling
from swapper.store.protocol import Held, Store, StoredEvent

log = structlog.get_logger(__name__)

EXECUTOR = "notify"
CLAIM_MS = 15_000
"""So long after it was last heard another may tell."""
NOTE_S = 60.0
"""So often it is noted how far the log was read though there was nothing to tell."""
AGAIN_S = (10.0, 60.0, 300.0, 900.0)
"""The pause after a failure, after the next, and so on; the last for all further ones."""
_BLOCK_MS, _PAGE, _RETRY_S = 5_000, 500, 1.0


Send = Callable[[Recipient, Message], Awaitable[str | None]]


@dataclass(slots=True)
class _Line:
    """One recipient: what is being sent, how often that failed in a row, and when it is tried again (loop's clock)."""

    recipient: Recipient
    sending: asyncio.Task[str | None] | None = None
    messages: tuple[Message, ...] = ()
    failures: int = 0
    next_s: float = 0.0


class Notifier:
    """See the module text. `owner` is the same in each run on one state folder; `send` as in post.py.

    `clock` gives ms since the epoch.
    """

    def __init__(
        self,
        store: Store,
        recipients: Sequence[Recipient],
        owner: str,
        send: Send,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._store = store
        self._owner = owner
        self._send = send
        self._clock = clock
        self._lines = {one.id: _Line(one) for one in recipients}
        self._book: Book | None = None
        self._claimed_s = 0.0
        self._noted_s = 0.0
        self._noted = Book()

    async def begin(self) -> None:
        """Take the place to go on from before anything else is logged; later `run` is soon enough. Raises StoreDown."""
        await self._claim()

    async def run(self) -> None:
        """Tell until cancelled; while the store is away, or another tells, it waits."""
        try:
            while True:
                try:
                    held = await self._claim()
                    if held is None:
                        await self._follow()
                    else:
                        await asyncio.sleep(min(held.left_ms / 1000, _BLOCK_MS / 1000))
                except StoreDown:
                    await asyncio.sleep(_RETRY_S)
        finally:
            sending = [line.sending for line in self._lines.values() if line.sending is not None]
            for one in sending:
                one.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def close(self) -> None:
        """Let another go on at once; where the store is away the claim runs out by itself."""
        try:
            await self._store.unclaim(EXECUTOR, self._owner)
        except StoreDown:
            log.info("store down while leaving; the claim to notify runs out by itself")

    async def _claim(self) -> Held | None:
        """Have it, with the book as it was noted last; None once that is so."""
        asked_s = _now_s()
        who = f"swapper, process {os.getpid()} on {socket.gethostname()}"
        answer = await self._store.claim(EXECUTOR, self._owner, who=who, ttl_ms=CLAIM_MS)
        if isinstance(answer, Held):
            self._book = None
            return answer
        self._claimed_s = asked_s
        if self._book is None:
            self._book = await self._resumed()
        return None

    async def _resumed(self) -> Book:
        """As it was noted; where nothing was, what is logged already is nobody's news."""
        book = read(await self._store.noted(EXECUTOR) or "")
        if book is not None:
            self._noted = book
            known = {one: messages for one, messages in book.unsent.items() if one in self._lines}
            return replace(book, unsent=known)
        at = "0"
        while page := await self._store.events(after=at, limit=_PAGE, block_ms=0):
            at = page[-1].id
        await self._note(book := Book(at=at))
        return book

    async def _note(self, book: Book) -> bool:
        """Keep the book; False when another tells by now."""
        ours = await self._store.note(EXECUTOR, self._owner, written(book))
        if ours:
            self._noted_s, self._noted = _now_s(), book
        else:
            self._book = None
        return ours

    async def _follow(self) -> None:
        """Read, and send what is due, for as long as the claim is ours. Raises StoreDown."""
        reading: asyncio.Task[tuple[StoredEvent, ...]] | None = None
        live = False
        try:
            while self._book is not None and (
                _now_s() - self._claimed_s < CLAIM_MS / 3000 or await self._claim() is None
            ):
                self._book = self._sent(self._book)
                if reading is not None and reading.done():
                    reading, page = None, reading.result()
                    self._book = self._heard(self._book, page, live=live)
                    live = len(page) < _PAGE
                self._book = self._turned(self._book)
                if self._must_note(self._book) and not await self._note(self._book):
                    return
                self._start_sending()
                if reading is None:
                    read_on = self._store.events(after=self._book.at, limit=_PAGE, block_ms=_BLOCK_MS)
                    reading = asyncio.create_task(read_on, name="notify-log")
                sending = {line.sending for line in self._lines.values() if line.sending is not None}
                await asyncio.wait({reading, *sending}, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _heard(self, book: Book, events: Sequence[StoredEvent], *, live: bool) -> Book:
        """`live`: we were waiting for them, so they are of now, whatever the store's clock shows beside ours."""
        now_ms = self._clock()
        for event in events:
            notice = worth_telling(event)
            if notice is not None:
                book = hear(book, replace(notice, at_ms=now_ms) if live else notice, now_ms)
            book = replace(book, at=event.id)
        return book

    def _turned(self, book: Book) -> Book:
        book, message = turn(book, self._clock())
        return book if message is None else post(book, message, self._lines)

    def _must_note(self, book: Book) -> bool:
        """Before anything is sent, after anything was; else now and then, so that little is read again."""
        old = _now_s() - self._noted_s >= NOTE_S
        return book.unsent != self._noted.unsent or (old and book.at != self._noted.at)

    def _sent(self, book: Book) -> Book:
        """Take what became of the sendings that ended."""
        for key, line in self._lines.items():
            if line.sending is None or not line.sending.done():
                continue
            why, line.sending = line.sending.result(), None
            name = line.recipient.name
            if why is None:
                book = unpost(book, key, line.messages)
                if line.failures:
                    log.info("notifications are sent again", to=name)
                line.failures = 0
                continue
            line.next_s = _now_s() + AGAIN_S[min(line.failures, len(AGAIN_S) - 1)]
            line.failures += 1
            if line.failures == 1:
                mend = "it is tried again; swapper check --notify sends a test message"
                log.warning("a notification could not be sent", to=name, why=why, mend=mend)
        return book

    def _start_sending(self) -> None:
        assert self._book is not None
        now_ms = self._clock()
        for key, line in self._lines.items():
            messages = self._book.unsent.get(key, ())
            if line.sending is not None or not messages or _now_s() < line.next_s:
                continue
            line.messages = messages
            fresh = tuple(one for one in messages if now_ms - one.at_ms <= STALE_MS)
            sending = self._send(line.recipient, merged(fresh)) if fresh else _nothing()
            line.sending = asyncio.ensure_future(sending)

    def _patience_s(self) -> float:
        """Until something is due though nothing comes."""
        assert self._book is not None
        due, now_s = due_ms(self._book, self._clock()), _now_s()
        waits = [CLAIM_MS / 3000, NOTE_S]
        if due is not None:
            waits.append((due - self._clock()) / 1000)
        waits += [
            line.next_s - now_s
            for key, line in self._lines.items()
            if line.sending is None and self._book.unsent.get(key)
        ]
        return max(min(waits), 0.0)


async def _nothing() -> str | None:
    """Of what is a day old nothing is sent."""
    return None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
