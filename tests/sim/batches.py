"""A gate before a thing that is on its card by leases of its own: prompts wait, one lease serves all that come.

Invariant: the lease's life is the shipped one (`swapper.comfyui.holding`); a prompt is rendered only in a lease that
the gate was told is granted, and by what runs then. Prompts are their clients': they outlive the gate's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TypeVar

from swapper.comfyui.holding import Holding, Wish, either
from swapper.core.types import Lease, LeaseState, WorkClass
from swapper.errors import StoreDown
from swapper.store.protocol import QueueFull, Store
from swapper.store.tail import Tail
from tests.sim.box import Box, Prompts
from tests.sim.world import World
from workers.control import Phase

T = TypeVar("T")

RETRY_S, REST_S, LOOK_S, LINGER_S = 0.5, 3.0, 0.1, 1.0


class BatchGate:
    """See the module text. One life of a gate, in a process."""

    def __init__(self, world: World, store: Store, tail: Tail, box: Box, prompts: Prompts) -> None:
        self._world = world
        self._box = box
        self._prompts = prompts
        wish = Wish(box.plan.name, box.card, box.plan.part_mib, 3_600_000, 100)
        self._holding = Holding(store, tail, wish, lambda: world.new_id("ls"))

    async def run(self) -> None:
        """Until cancelled."""
        lease = await self._stored(self._holding.found)
        while True:
            if lease is None:
                while not self._prompts.waiting:
                    self._prompts.changed.clear()
                    await self._prompts.changed.wait()
                lease = await self._stored(self._asked)
            granted = await self._holding.settled(lease, lambda _: bool(self._prompts.waiting), self._prompts.changed)
            if granted is not None and granted.state is LeaseState.GRANTED:
                await self._serve(granted)
            elif granted is not None:
                self._world.say(f"the gate of {self._box.plan.name} gets no lease: {granted.reason}")
                await asyncio.sleep(REST_S)
            lease = None

    async def _stored(self, call: Callable[[], Coroutine[None, None, T]]) -> T:
        while True:
            with suppress(StoreDown):
                return await call()
            await asyncio.sleep(RETRY_S)

    async def _asked(self) -> Lease:
        answer: Lease | QueueFull = await self._holding.ask(WorkClass.NORMAL, len(self._prompts.waiting))
        assert not isinstance(answer, QueueFull)
        return answer

    async def _serve(self, lease: Lease) -> None:
        lost, work = asyncio.create_task(self._holding.lost(lease)), asyncio.create_task(self._work(lease))
        try:
            await asyncio.wait({lost, work}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                self._world.say(f"the gate of {self._box.plan.name} lost {lease.id}: {lost.result()}")
        finally:
            for task in (lost, work):
                task.cancel()
            await asyncio.gather(lost, work, return_exceptions=True)
        await self._holding.give_back(lease)
        self._world.disturbed()

    async def _work(self, lease: Lease) -> None:
        """Render until none has come for the linger; what dies over a prompt has it again once it runs."""
        box, waiting = self._box, self._prompts.waiting
        idle_since = self._world.now
        while waiting or self._world.now - idle_since < LINGER_S:
            if not waiting or box.phase is not Phase.UP:
                self._prompts.changed.clear()
                await either(self._prompts.changed, limit_s=LOOK_S)
                continue
            run, takes_s = box.run, waiting[0]
            self._world.check.rendering(box.plan.name, lease.id)
            await box.render(takes_s)
            if box.run == run and box.phase is Phase.UP:
                waiting.pop(0)
                self._world.say(f"{box.plan.name} rendered one in {lease.id}; {len(waiting)} wait")
            idle_since = self._world.now
