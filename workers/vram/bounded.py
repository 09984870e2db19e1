"""A blocking look in bounded time: a driver that hangs costs one thread, and never the agent.

Invariant: one look at a time, each in a daemon thread of its own (a thread that hangs in a driver cannot be ended, and
nothing may wait for it at exit). Whoever asks while a look hangs is told so at once, and no further thread is started
until it came back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from workers.backend import Unread

T = TypeVar("T")

LIMIT_S = 5.0
"""A look that takes longer counts as hanging (a driver that was asleep takes two or three)."""


class Bounded(Generic[T]):
    """`whom` is named in the sentence when it hangs."""

    def __init__(self, whom: str, limit_s: float = LIMIT_S) -> None:
        self._whom = whom
        self._limit_s = limit_s
        self._running: asyncio.Future[T] | None = None
        self._since = 0.0

    async def call(self, look: Callable[[], T]) -> T | Unread:
        """What `look` returns, begun after this was called; raises what it raises."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limit_s
        while self._running is not None:
            if loop.time() - self._since >= self._limit_s:
                await asyncio.sleep(0)  # who asks again and again lets the answer through
                return self._hangs(loop.time())
            await asyncio.wait({self._running}, timeout=max(0.0, deadline - loop.time()))
        running = self._begin(loop, look)
        await asyncio.wait({running}, timeout=self._limit_s)
        return running.result() if running.done() else self._hangs(loop.time())

    def _begin(self, loop: asyncio.AbstractEventLoop, look: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = loop.create_future()
        self._running, self._since = future, loop.time()

        def over(result: T | None, error: BaseException | None) -> None:
            self._running = None
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)  # pyright: ignore[reportArgumentType]
                return
            future.set_exception(error)
            future.exception()  # who asked may have left: then nobody needs it

        def work() -> None:
            result, error = None, None
            try:
                result = look()
            except BaseException as caught:  # handed to whoever asked
                error = caught
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(over, result, error)

        threading.Thread(target=work, name=f"look at {self._whom}", daemon=True).start()
        return future

    def _hangs(self, now: float) -> Unread:
        waited = now - self._since
        return Unread(f"{self._whom} has not answered for {waited:.0f} s; if it stays so, restart it or the machine")
