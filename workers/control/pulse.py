"""A pulse: many wait for the next beat, which any thread may give.

Invariant: whoever takes `next` before a look misses nothing that happens after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress


class Pulse:
    """Belongs to the loop in which somebody first waits for it."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def next(self) -> asyncio.Event:
        """Set at the next beat."""
        self._loop = asyncio.get_running_loop()
        return self._next

    def beat(self) -> None:
        """Wake all who wait; only in the loop's own thread."""
        self._next.set()
        self._next = asyncio.Event()

    def beat_from_anywhere(self) -> None:
        """The same, from a thread. Nobody waits in a loop that is closed."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.beat)

    async def beats(self) -> AsyncIterator[None]:
        """One item at once, then one for each beat or burst of them."""
        while True:
            turn = self.next()
            yield None
            await turn.wait()
