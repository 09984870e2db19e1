"""One reader of the event log for the whole process; everybody who waits over HTTP is woken by it.

Invariant: whoever registers first and reads the store afterwards misses nothing: the tail starts at the oldest
retained event, so a wake-up may be spurious but is never lost. It polls nothing; it only retries while the store is
away, and then wakes everybody so that they look for themselves. Touches only the store's `events`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Generator
from contextlib import contextmanager
from itertools import takewhile
from typing import Protocol

from swapper.errors import StoreDown
from swapper.store.protocol import StoredEvent

_PAGE = 1000
_RECENT = 500
_BLOCK_MS = 15_000
_CANCEL_S = 0.05
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class EventLog(Protocol):
    """The one function of the store that the tail uses."""

    async def events(self, *, after: str, limit: int, block_ms: int) -> tuple[StoredEvent, ...]:
        """See swapper/store/protocol.py."""
        ...


class Tail:
    """See the module text. Starts with the first watcher; `close` wakes everybody and ends it."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._task: asyncio.Task[None] | None = None
        self._subjects: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._all: set[asyncio.Event] = set()
        self._caught_up = asyncio.Event()
        self._last = "0"
        self._recent: deque[StoredEvent] = deque(maxlen=_RECENT)
        self.closed = False

    @contextmanager
    def watch(self, subject: str) -> Generator[asyncio.Event]:
        """A flag that is set whenever something happened to the subject (a lease or swap id, a card's name)."""
        self._start()
        flag = asyncio.Event()
        self._subjects[subject].add(flag)
        try:
            yield flag
        finally:
            self._subjects[subject].discard(flag)
            if not self._subjects[subject]:
                del self._subjects[subject]

    @contextmanager
    def watch_all(self) -> Generator[asyncio.Event]:
        """A flag that is set whenever anything was logged."""
        self._start()
        flag = asyncio.Event()
        self._all.add(flag)
        try:
            yield flag
        finally:
            self._all.discard(flag)

    async def end(self) -> str:
        """The id of the newest event that was seen, once the retained log was read through."""
        self._start()
        await self._caught_up.wait()
        return self._last

    def after(self, last: str) -> tuple[StoredEvent, ...] | None:
        """What was seen after the event `last`; None when that is too long ago to say: then the store must be asked."""
        if last == self._last:
            return ()
        newer = list(takewhile(lambda event: event.id != last, reversed(self._recent)))
        return tuple(reversed(newer)) if len(newer) < len(self._recent) else None

    async def close(self) -> None:
        """Stop reading and wake everybody; later watchers find `closed` set."""
        self.closed = True
        self._caught_up.set()
        self._wake_everybody()
        while self._task is not None and not self._task.done():
            self._task.cancel()  # repeated: a client library may swallow one while its read begins
            await asyncio.wait({self._task}, timeout=_CANCEL_S)

    def _start(self) -> None:
        if self._task is None and not self.closed:
            self._task = asyncio.create_task(self._run(), name="api-tail")

    async def _run(self) -> None:
        failures = 0
        while not self.closed:
            block_ms = _BLOCK_MS if self._caught_up.is_set() else 0
            try:
                batch = await self._log.events(after=self._last, limit=_PAGE, block_ms=block_ms)
            except StoreDown:
                self._wake_everybody()
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            if failures:
                failures = 0
                self._wake_everybody()
            self._deliver(batch)

    def _deliver(self, batch: tuple[StoredEvent, ...]) -> None:
        if not batch:
            self._caught_up.set()
            return
        self._last = batch[-1].id
        self._recent.extend(batch)
        for subject in {event.subject for event in batch}:
            for flag in self._subjects.get(subject, ()):
                flag.set()
        for flag in self._all:
            flag.set()

    def _wake_everybody(self) -> None:
        for flags in (self._all, *self._subjects.values()):
            for flag in flags:
                flag.set()
