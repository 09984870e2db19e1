"""Conversations sent again after a load, one after the other, yielding to every real call.

Invariant: at most one replay of a tenant runs; a call of another conversation ends it at once (it is begun again when
the tenant is idle), a call of the very conversation waits for it, since that is its own prompt being read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence


class _Queue:
    """What of one tenant is still to be replayed, the running one first."""

    __slots__ = ("items", "now", "task")

    def __init__(self, items: Sequence[tuple[str, str]]) -> None:
        self.items = list(items)
        self.now: asyncio.Task[None] | None = None
        self.task: asyncio.Task[None] | None = None


class Replays:
    """`idle(tenant)` returns once no call of it is in flight; `replay(tenant, snapshot, id)` sends one.

    Both may be cancelled.
    """

    def __init__(
        self, idle: Callable[[str], Awaitable[None]], replay: Callable[[str, str, str], Awaitable[None]]
    ) -> None:
        self._idle = idle
        self._replay = replay
        self._queues: dict[str, _Queue] = {}

    def start(self, tenant: str, items: Sequence[tuple[str, str]]) -> None:
        """Begin with these (snapshot, id), in this order; what was going on of the tenant is dropped."""
        self.stop(tenant)
        if items:
            queue = self._queues[tenant] = _Queue(items)
            queue.task = asyncio.create_task(self._work(tenant, queue), name=f"replays of {tenant}")

    async def make_room(self, tenant: str, name: str | None) -> None:
        """A call of the conversation `name` (None: of none that is known) is about to be sent."""
        queue = self._queues.get(tenant)
        if queue is None or queue.now is None:
            return
        if queue.items[0][1] == name:
            await asyncio.wait({queue.now})
        else:
            queue.now.cancel()

    def stop(self, tenant: str) -> list[tuple[str, str]]:
        """Drop what is left of a tenant; returns it."""
        queue = self._queues.pop(tenant, None)
        for task in () if queue is None else (queue.task, queue.now):
            if task is not None:
                task.cancel()
        return [] if queue is None else queue.items

    def stop_all(self) -> None:
        """Drop everything."""
        for tenant in tuple(self._queues):
            self.stop(tenant)

    async def _work(self, tenant: str, queue: _Queue) -> None:
        while queue.items:
            await self._idle(tenant)  # not as part of it: a call that waits for a replay is in flight itself
            snapshot, name = queue.items[0]
            queue.now = asyncio.create_task(self._one(tenant, snapshot, name), name=f"replay {snapshot}")
            await asyncio.wait({queue.now})
            if not queue.now.cancelled():
                queue.items.pop(0)
            queue.now = None
        if self._queues.get(tenant) is queue:
            del self._queues[tenant]

    async def _one(self, tenant: str, snapshot: str, name: str) -> None:
        await self._replay(tenant, snapshot, name)
