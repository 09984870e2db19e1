"""The coordinator in virtual time, on a store whose clock is stepped, and after gaps in its own service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import pytest

from swapper.coordinator import GAP_MS, Coordinator
from swapper.core import turn
from swapper.core.commit import Alert, Commit
from swapper.core.orders import Report
from swapper.core.types import Demand, Lease, LeaseRequest, LeaseState, WorkClass, World
from swapper.store.memory import MemoryStore
from swapper.store.protocol import Inputs
from tests.support.play import DRAIN, GIB, spec, tenant
from tests.support.virtual_time import virtual

EPOCH_MS, HOUR = 1_800_000_000_000, 3_600_000
MED, BIG = "llama/med", "llama/big"
SPEC = spec(tenant("med", default=True), tenant("big", need_mib=20 * GIB))
STEPS = pytest.mark.parametrize("step_ms", [2 * HOUR, -2 * HOUR], ids=["ahead", "back"])


@dataclass
class Stepped:
    """A store and its clock, a coordinator or two, an agent and a gateway.

    `holds`: verbs that nobody answers. `demand`: what the gateway has to tell.
    """

    step_ms: int = 0
    holds: set[str] = field(default_factory=set[str])
    demand: tuple[Demand, ...] = ()
    stops_s: list[float] = field(default_factory=list[float])
    """How long a coordinator is stopped, each time it waits for something to happen."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.now_ms)
        self._ids = count(1)
        inputs = self.store.inputs

        async def stopped(*, after: str, block_ms: int) -> Inputs:
            answer = await inputs(after=after, block_ms=block_ms)
            if block_ms and self.stops_s:
                await asyncio.sleep(self.stops_s.pop())
            return answer

        self.store.inputs = stopped

    def now_ms(self) -> int:
        return EPOCH_MS + self.step_ms + int(asyncio.get_running_loop().time() * 1000)

    async def coordinate(self) -> asyncio.Task[None]:
        made = Coordinator(self.store, SPEC, lambda prefix: f"{prefix}_{next(self._ids)}")
        task = asyncio.create_task(made.run())
        self.tasks.append(task)
        await made.listening.wait()
        return task

    async def work(self, executor: str) -> None:
        after = "0"
        while True:
            for stored in await self.store.outbox(executor, after=after, block_ms=1000):
                after = stored.id
                command = stored.command
                identity = (command.executor, command.card, command.tenant, command.token, command.n, command.verb)
                if command.verb not in self.holds:
                    await self.store.report(Report(*identity, "ok"))

    async def beat(self) -> None:
        while True:
            await self.store.beat("g1", self.demand, ttl_ms=10_000)
            await asyncio.sleep(3)

    async def heartbeats(self, lease: Lease) -> None:
        while True:
            await self.store.heartbeat(lease.id, lease.token or 0)
            await asyncio.sleep(lease.request.ttl_ms / 3000)

    async def hello(self) -> None:
        await self.store.report(Report("agent:main", "", None, 0, 0, "hello", "ok", data={"mark": 0}))

    async def until(self, wanted: Callable[[World], bool], limit_s: float = 60) -> World:
        async with asyncio.timeout(limit_s):
            while not wanted(world := await self.store.read()):
                await self.store.events(after="$", limit=1, block_ms=50)
        return world

    async def lease(self, name: str, state: LeaseState, limit_s: float = 60, **wish: int) -> Lease:
        """The lease once it is in that state; asked for if nobody has."""
        if await self.store.lease(name) is None:
            request = LeaseRequest("ann", **wish)  # pyright: ignore[reportArgumentType]
            await self.store.enqueue(request, lease_id=name, max_queue=10)
        async with asyncio.timeout(limit_s):
            while (lease := await self.store.lease(name)) is None or lease.state is not state:
                await self.store.events(after="$", limit=1, block_ms=50)
        return lease

    async def alerts(self) -> list[str]:
        events = await self.store.events(after="0", limit=1_000, block_ms=0)
        return [event.data for event in events if event.type == "alert"]


@asynccontextmanager
async def served(coordinators: int = 1) -> AsyncGenerator[Stepped]:
    made = Stepped()
    work = (made.work("agent:main"), made.work("gateway:g1"), made.beat())
    made.tasks += [asyncio.create_task(one) for one in work]
    for _ in range(coordinators):
        await made.coordinate()
    await made.hello()
    await made.until(lambda world: any(card.residents for card in world.cards.values()))
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


@STEPS
@virtual
async def test_a_lease_that_was_left_alone_ends_by_its_ttl_whatever_the_clock_does(step_ms: int) -> None:
    async with served() as rig:
        await rig.lease("ls_a", LeaseState.GRANTED)
        rig.step_ms = step_ms
        await rig.lease("ls_a", LeaseState.EXPIRED, limit_s=32)
        await rig.lease("ls_b", LeaseState.GRANTED, limit_s=32)


@STEPS
@virtual
async def test_a_lease_whose_holder_beats_is_held_as_long_as_it_may_be(step_ms: int) -> None:
    async with served(coordinators=2) as rig:
        lease = await rig.lease("ls_a", LeaseState.GRANTED, max_hold_ms=600_000)
        rig.tasks.append(asyncio.create_task(rig.heartbeats(lease)))
        granted = asyncio.get_running_loop().time()
        await asyncio.sleep(60)
        rig.step_ms = step_ms
        await rig.lease("ls_a", LeaseState.REVOKED, limit_s=700)
        assert 599 < asyncio.get_running_loop().time() - granted < 602


@STEPS
@virtual
async def test_a_drain_ends_at_its_limit_and_its_gateway_stays_a_member(step_ms: int) -> None:
    async with served() as rig:
        rig.holds, rig.demand = {"drain"}, (Demand("g1", MED, WorkClass.NORMAL, 0, 1, None),)
        asked = asyncio.get_running_loop().time()
        await rig.lease("ls_a", LeaseState.PREPARING)
        await rig.until(lambda world: world.cards["gpu0"].phase == "drain")
        await asyncio.sleep(60)
        rig.step_ms = step_ms
        world = await rig.until(lambda world: world.stepped_ms != 0)
        await asyncio.sleep(1)
        swap = (await rig.store.read()).cards["gpu0"].swap
        assert swap is not None
        assert [order.executor for order in swap.pending] == ["gateway:g1"], "it is still waited for"
        world = await rig.until(lambda world: (s := world.cards["gpu0"].swap) is None or bool(s.forced_ms), 700)
        limit_s = DRAIN[WorkClass.NORMAL] / 1000
        assert limit_s - 1 < asyncio.get_running_loop().time() - asked < limit_s + 3
        assert world.gateways == ("g1",)


@STEPS
@virtual
async def test_a_default_that_calls_displaced_comes_back_after_the_same_time(step_ms: int) -> None:
    async with served(coordinators=2) as rig:
        rig.demand = (Demand("g1", BIG, WorkClass.NORMAL, 1, 0, None),)
        await rig.until(lambda world: world.cards["gpu0"].residents == (BIG,))
        rig.demand = ()
        await rig.until(lambda world: world.demand == ())
        idle = asyncio.get_running_loop().time()
        await asyncio.sleep(60)
        rig.step_ms = step_ms
        await rig.until(lambda world: world.cards["gpu0"].residents == (MED,), 200)
        assert 118 < asyncio.get_running_loop().time() - idle < 125


@STEPS
@virtual
async def test_two_coordinators_take_a_step_into_account_once_and_say_so_once(step_ms: int) -> None:
    async with served(coordinators=2) as rig:
        rig.step_ms = step_ms
        await rig.until(lambda world: world.stepped_ms != 0)
        await asyncio.sleep(10)
        world = await rig.store.read()
        assert abs(world.stepped_ms - step_ms) < 1_000
        assert len(await rig.alerts()) == 1
        rig.step_ms = 0
        await rig.until(lambda world: abs(world.stepped_ms) < 1_000)
        assert len(await rig.alerts()) == 2


@STEPS
@virtual
async def test_a_step_that_no_coordinator_saw_prolongs_nothing_that_is_over(step_ms: int) -> None:
    async with served() as rig:
        await rig.lease("ls_a", LeaseState.GRANTED)
        coordinator = rig.tasks.pop()
        coordinator.cancel()
        await asyncio.gather(coordinator, return_exceptions=True)
        rig.step_ms = step_ms
        await rig.coordinate()
        await rig.hello()
        await rig.lease("ls_a", LeaseState.REVOKED if step_ms > 0 else LeaseState.EXPIRED, limit_s=32)


@STEPS
@virtual
async def test_a_grant_at_the_moment_of_a_step_has_its_whole_time(step_ms: int) -> None:
    """The commit that grants was decided by the clock before: the store refuses it, and it is decided anew."""
    async with served() as rig:
        commit = rig.store.commit
        before = len(await rig.alerts())

        async def at_the_grant(value: object, *, now_ms: int | None = None) -> object:
            changes = value.leases  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
            if any(change.state is LeaseState.GRANTED for change in changes):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
                rig.step_ms = step_ms
            return await commit(value, now_ms=now_ms)  # pyright: ignore[reportArgumentType]

        rig.store.commit = at_the_grant  # pyright: ignore[reportAttributeAccessIssue]
        lease = await rig.lease("ls_a", LeaseState.GRANTED, max_hold_ms=600_000)
        assert len(await rig.alerts()) == before + 1
        assert abs((lease.granted_ms or 0) - rig.now_ms()) < 1_000
        await rig.lease("ls_a", LeaseState.EXPIRED, limit_s=32)


@virtual
async def test_it_is_decided_again_only_where_a_turn_was_cut_short() -> None:
    """Also in vain: it is not asked whether something is left."""
    store = MemoryStore(lambda: EPOCH_MS)
    coordinator = Coordinator(store, SPEC, lambda prefix: prefix)
    cut_short = [turn.Decision(Commit(alerts=(Alert("gpu0", "x"),)), more) for more in (False, True, True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn, "decide", lambda *_: cut_short.pop())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        await coordinator._settle()  # pyright: ignore[reportPrivateUsage]
    assert cut_short == []


@pytest.mark.parametrize(
    ("ttl_ms", "stopped_s"),
    [(30_000, 3_000), (5_000, 0.2 + GAP_MS / 1000)],
    ids=["an hour", "as long as a holder with the shortest ttl can bear"],
)
@virtual
async def test_after_a_gap_a_granted_lease_gets_its_time_back(ttl_ms: int, stopped_s: float) -> None:
    async with served() as rig:
        await rig.lease("ls_a", LeaseState.GRANTED, ttl_ms=ttl_ms)
        rig.stops_s.append(stopped_s)
        await rig.store.wake()
        await asyncio.sleep(stopped_s + 1)
        lease = await rig.store.lease("ls_a")
        assert lease is not None
        assert lease.state is LeaseState.GRANTED
        assert 28_000 < (lease.expires_ms or 0) - rig.now_ms() <= 30_000
        assert await rig.alerts() == []


@virtual
async def test_what_agents_say_before_it_has_the_store_again_is_heard() -> None:
    store = MemoryStore(lambda: EPOCH_MS + int(asyncio.get_running_loop().time() * 1000))
    made = Coordinator(store, SPEC, lambda prefix: f"{prefix}_1")
    task = asyncio.create_task(made.run())
    await made.listening.wait()
    await asyncio.sleep(1)
    store.down()
    await asyncio.sleep(0.1)
    store.up()
    await store.report(
        Report("agent:main", "", None, 0, 0, "observed", "ok", data={"tenants": {"llama/med": "failed"}})
    )
    await asyncio.sleep(2)
    assert made.seen.states == {"llama/med": "failed"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
