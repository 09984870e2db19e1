"""A coordinator whose store goes back to an older copy, in virtual time, unnoticed by any call that was under way."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swapper.coordinator import Coordinator
from swapper.core.orders import Command, Report, answer_to
from swapper.core.types import Gate, LeaseRequest
from swapper.store.memory import MemoryStore
from tests.support.play import MED, spec, tenant
from tests.support.virtual_time import virtual

AGENT, START_MS = "agent:main", 1_000_000


class Rig:
    """A coordinator on a store in memory, and an agent that answers when told to."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.store = MemoryStore(lambda: int(START_MS + loop.time() * 1000))
        ids = itertools.count()
        self.coordinator = Coordinator(self.store, spec(tenant("med")), lambda prefix: f"{prefix}{next(ids)}")
        self._task = asyncio.create_task(self.coordinator.run())
        self._after = "0"

    async def say(self, verb: str, executor: str = AGENT, tenant: str | None = None, **data: object) -> None:
        """Volunteer something."""
        await self.store.report(Report(executor, "", tenant, 0, 0, verb, "ok", data=data))

    async def order(self) -> Command:
        """The next command to the agent."""
        found = await self.store.outbox(AGENT, after=self._after, block_ms=5000)
        self._after = found[0].id
        return found[0].command

    async def granted(self, lease: str) -> int:
        """Ask for the card and carry out what that takes; the token."""
        await self.store.enqueue(LeaseRequest("me"), lease_id=lease, max_queue=9)
        order = await self.order()
        await self.store.report(answer_to(order, "ok"))
        await asyncio.sleep(0.5)
        found = await self.store.lease(lease)
        assert found is not None
        assert found.token is not None
        return found.token

    async def stop(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@virtual
async def test_what_is_pending_in_the_older_copy_goes_out_again_once_the_agents_mark_shows_it() -> None:
    rig = Rig()
    await rig.coordinator.listening.wait()
    await rig.say("hello", mark=0)
    await rig.store.enqueue(LeaseRequest("me"), lease_id="a", max_queue=9)
    first = await rig.order()
    older = rig.store.copy()
    await rig.store.report(answer_to(first, "ok"))
    await asyncio.sleep(0.5)
    await rig.store.end("a", first.token)
    highest = await rig.granted("b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.store, "_cut", lambda: None)
        rig.store.rollback(older)
    await asyncio.sleep(2)  # its view is never older than a second
    await rig.say("hello", mark=highest)
    assert await rig.order() == first
    await rig.stop()


@virtual
async def test_a_gateways_higher_epoch_is_gone_above() -> None:
    rig = Rig()
    await rig.coordinator.listening.wait()
    await rig.say("ahead", executor="gateway:g1", tenant=MED, epoch=7)
    await asyncio.sleep(0.5)
    assert (await rig.store.read()).gates == {MED: Gate(8, open=False)}
    await rig.stop()
