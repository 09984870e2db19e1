"""Equal questions asked in the same moment go to the server once.

Invariant: nobody gets an answer to a question that was sent before they asked it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Joined(Generic[T]):
    """Calls `ask` for those who ask about the same key in one round of the event loop."""

    def __init__(self, ask: Callable[[str], Awaitable[T]]) -> None:
        self._ask = ask
        self._asked: dict[str, asyncio.Task[T]] = {}

    async def __call__(self, key: str) -> T:
        """The answer of `ask(key)`; raises what it raises."""
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._send(key))
            task.add_done_callback(_seen)
        return await asyncio.shield(task)

    async def _send(self, key: str) -> T:
        await asyncio.sleep(0)
        del self._asked[key]
        return await self._ask(key)


def _seen(task: asyncio.Task[T]) -> None:
    """Whoever waited has the exception; if all of them were cancelled, nobody needs it."""
    if not task.cancelled():
        task.exception()
