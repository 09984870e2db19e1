"""What runs in a process: the shipped coordinator, agent and gateway, wired as `swapper.app` wires them.

Invariant: a part that ends by itself is a bug and is said to the check; a store that does not answer while the process
starts ends it, as it ends `swapper serve`, and whoever supervises it starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, cast

from swapper.coordinator import Coordinator
from swapper.core.types import Step
from swapper.errors import BackendError, StoreDown
from swapper.gateway.admission import Admission
from swapper.gateway.child import Children
from swapper.gateway.context import GatewayContext, Limits, Target
from swapper.gateway.listed import ModelInfo
from swapper.gateway.member import Member
from swapper.jobs.runner import Jobs
from swapper.store.protocol import Store
from swapper.store.tail import Tail
from tests.sim.batches import BatchGate
from tests.sim.front import Links, Session
from tests.sim.jobs import recipes
from tests.sim.meter import Meter
from tests.sim.others import backend_of, session_of
from tests.sim.physical import SimMarks, WatchedRouter, finder
from tests.sim.process import Process, RouterWire, StoreWire
from tests.sim.world import AGENTS_HOST, Place, World
from tests.support.fake_router import FakeRouter
from tests.support.fake_session import FakeSession
from workers.agent import Agent
from workers.backend import Backend, TenantState
from workers.llama.lifecycle import Limits as BackendLimits
from workers.llama.router import LlamaRouter
from workers.llama.slots import Keep
from workers.observe import Sight
from workers.verbs import Outcome, Verbs
from workers.vram.declared import Declared

if TYPE_CHECKING:
    from swapper.core.orders import Command

PARTS: Mapping[str, frozenset[str]] = {
    "main": frozenset({"coordinator", "agent", "gateway"}),
    "second": frozenset({"coordinator", "gateway"}),
    "brain": frozenset({"coordinator"}),
    "hands": frozenset({"agent"}),
    "door": frozenset({"gateway"}),
}
AGAIN_S = 1.0
LIMITS = BackendLimits(load_s=10, save_s=6, restore_s=6, answer_s=6, admit_s=4, start_s=4)
LOOKS: ContextVar[list[int] | None] = ContextVar("LOOKS", default=None)
"""When the looks at the card of the command in progress began, ms."""


class Serving:
    """One life of a process. `context` is its gateway's, once it is there."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.process = Process(name, world.rng, world.say)
        self.store = cast("Store", StoreWire(self.process, world.store))
        world.sessions[name] = FakeSession(cast("Mapping[str, FakeRouter]", self._wires()))
        world.talks[name] = session_of(self.process, world)
        self.context: GatewayContext | None = None
        self.marks: SimMarks | None = None
        self.power = False
        self.doomed = False
        """Whether somebody kills it, and starts it again."""
        self._backends: dict[str, Backend] = {}
        self._tail: Tail | None = None
        self.jobs: Jobs | None = None
        self._stopping = False
        self._parts: list[asyncio.Task[None]] = []
        self.process.on_death.append(self._died)

    def _wires(self) -> dict[str, RouterWire]:
        return {place.url: RouterWire(self.process, place.router) for place in self.world.places.values()}

    def wire(self, url: str) -> tuple[RouterWire, str | None] | None:
        """The connection to whoever listens at a URL: a router, or one of the children (with its port)."""
        base = "/".join(url.split("/")[:3])
        place = next((place for place in self.world.places.values() if place.url == base), None)
        if place is not None:
            return RouterWire(self.process, place.router), None
        box = next((box for box in self.world.servers if box.url == base), None)
        if box is not None:
            return RouterWire(self.process, cast("FakeRouter", box)), None
        port = base.rpartition(":")[2]
        routers = (place.router for place in self.world.places.values())
        router = next((one for one in routers if one.listens(port)), None)
        return None if router is None else (RouterWire(self.process, router), port)

    def _died(self) -> None:
        if self.marks is not None:
            self.marks.sever(power=self.power)
        if self.context is not None:
            self.world.in_flight.pop(self.context.admission.gateway, None)

    async def run(self) -> None:
        """Start the parts and serve until killed or stopped. Runs in the process."""
        parts, world = PARTS[self.process.name], self.world
        try:
            if "gateway" in parts:
                self.context = await self._gateway()
            if "coordinator" in parts:
                coordinator = Coordinator(self.store, world.spec, world.new_id)
                self._part("coordinator", coordinator.run())
                await coordinator.listening.wait()
            if "agent" in parts:
                agent = await self._agent()
                self._part("agent", agent.run())
                self._gates()
                self.jobs = self._jobs(agent)
                self._part("jobs", self.jobs.run())
        except StoreDown:
            world.say(f"{self.process.name} cannot start: the store does not answer")
            self.process.kill()
        await asyncio.Event().wait()

    def _jobs(self, agent: Agent) -> Jobs:
        world = self.world
        self._tail = self._tail or Tail(self.store)
        return Jobs(
            self.store,
            self._tail,
            recipes(world.plan),
            world.folder / "jobs",
            host=AGENTS_HOST,
            max_queue=100,
            new_id=world.new_id,
            now_ms=world.now_ms,
            fence=agent.sure,
            env={},
            url="http://127.0.0.1:1",
        )

    def _gates(self) -> None:
        """Those before what is there by leases of its own."""
        for place in self.world.places.values():
            for box in place.boxes:
                if box.plan.by_lease:
                    self._tail = self._tail or Tail(self.store)
                    gate = BatchGate(self.world, self.store, self._tail, box, place.prompts[box.plan.name])
                    self._part(f"gate of {box.plan.name}", gate.run())

    def _part(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=name)
        self._parts.append(task)

        def ended(task: asyncio.Task[None]) -> None:
            if self.process.alive and not self._stopping:
                error = "cancelled" if task.cancelled() else repr(task.exception())
                self.world.check.fail(f"the {name} of {self.process.name} ended by itself: {error}")

        task.add_done_callback(ended)

    async def stop(self) -> None:
        """Stop as on SIGTERM: the parts in reverse order, then what they stood on."""
        self._stopping = True
        for part in reversed(self._parts):
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        if self._tail is not None:
            await self._tail.close()
        if self.context is not None:
            await self.context.member.close()
        for backend in self._backends.values():
            await backend.close()
        if self.marks is not None:
            self.marks.close()

    async def _agent(self) -> Agent:
        world = self.world
        for place in world.places.values():
            self._backends[place.server] = self._backend(place)
            for box in place.boxes:
                self._backends[box.plan.name] = backend_of(self.process, world, box)
        marks = SimMarks.open(world.folder / "marks.jsonl")
        assert isinstance(marks, SimMarks)
        self.marks = marks
        probes = {place.plan.name: _probe(world, place) for place in world.places.values()}
        remaining = world.works.remaining
        agent = Agent(AGENTS_HOST, self.store, self._backends, world.spec.tenants, probes, marks, remaining=remaining)
        await agent.claim()
        for backend in self._backends.values():
            try:
                await backend.start()
            except BackendError as error:
                world.say(f"{self.process.name}: {error}")
        agent._verbs = _WatchedVerbs(agent._verbs, agent._sight, world)  # pyright: ignore[reportPrivateUsage]
        return agent

    def _backend(self, place: Place) -> LlamaRouter:
        world = self.world
        return LlamaRouter(
            place.url,
            tenants={t.id: t.id.partition("/")[2] for t in world.spec.tenants.values() if t.server == place.server},
            server=place.server,
            state_dir=world.folder,
            slot_dir=place.slot_dir,
            strategy=place.plan.strategy,
            control=_Control(place.router, world) if world.plan.controlled else None,
            keep=Keep(free_bytes=0),
            limits=LIMITS,
            now_ms=world.now_ms,
        )

    async def _gateway(self) -> GatewayContext:
        world, name = self.world, self.process.name
        dead, ours = world.gateway_of.get(name), world.new_id("g")
        if dead is not None:
            await self.store.leave(dead)
        world.gateway_of[name] = ours
        admission = Admission(ours, clock=lambda: int(world.now * 1000))
        member = Member(self.store, admission, alone=world.plan.layout == "one")
        await member.start()
        world.in_flight[ours] = admission.in_flight
        session = Session(self)
        targets = _targets(world)
        context = GatewayContext(
            names={target.model: tenant for tenant, target in targets.items()},
            targets=targets,
            models=tuple(ModelInfo(target.model, tenant) for tenant, target in targets.items()),
            limits=Limits(max_wait_ms=30_000, keepalive_ms=2_000, retry_ms=10_000),
            admission=admission,
            member=member,
            links=Links(session),  # pyright: ignore[reportArgumentType]
            session=session,  # pyright: ignore[reportArgumentType]
        )
        routers = [place.router for place in world.places.values()]
        context.children = Children(
            session,  # pyright: ignore[reportArgumentType]
            find=finder(routers),
            clock=lambda: world.now,
        )
        return context


class _WatchedVerbs(Verbs):
    def __init__(self, verbs: Verbs, sight: Sight, world: World) -> None:
        self._verbs = verbs
        self._world = world
        looked = sight.on_card

        async def look(card: str) -> dict[str, TenantState]:
            if (looks := LOOKS.get()) is not None:
                looks.append(world.steady_ms())
            return await looked(card)

        sight.on_card = look

    async def run(self, command: Command) -> Outcome:
        """Tell, then carry out."""
        what = f"{command.verb} {command.tenant or command.card} ({command.token & 0xFFFFF}.{command.n})"
        self._world.say(f"    agent: {what}")
        self._world.check.execute(command.card, command.tenant, (command.token, command.n), command.verb)
        looks: list[int] = []
        LOOKS.set(looks)
        outcome = await self._verbs.run(command)
        if command.verb == Step.VACATE and outcome.ok:
            meter = self._world.places[command.card].meter
            since_ms = looks[-1] if looks else self._world.steady_ms()
            self._world.check.proved(command.card, since_ms, meter.unread_ms)
        if not outcome.ok:
            self._world.say(f"    agent: {what} failed: {outcome.detail}")
        return outcome


class _Control:
    """`control: command`: starts the router's process where none runs, and ends what the last one left behind."""

    def __init__(self, router: WatchedRouter, world: World) -> None:
        self._router = router
        self._world = world

    async def ensure(self) -> None:
        """Start it, if it does not run."""
        await asyncio.sleep(0.05)
        if not self._router.alive:
            self._router.clear_away()
            self._world.say(f"    router of {self._router.card} is started")
            self._router.start()

    def alive(self) -> bool | None:
        """Nobody else could be where it listens."""
        return None

    def pid(self) -> int | None:
        """It is no process of this machine."""
        return None

    def log_tail(self, n: int) -> list[str] | None:
        """Its log."""
        return list(self._router.log)[-n:]

    def log_path(self) -> None:
        """It is in memory."""

    async def restart(self, grace_ms: int | None = None) -> None:
        """End it and start it again."""
        del grace_ms
        self._router.die()
        await asyncio.sleep(0.3)
        await self.ensure()


def _targets(world: World) -> dict[str, Target]:
    """Where calls by model name go."""
    found: dict[str, Target] = {}
    for tenant, spec in world.spec.tenants.items():
        if spec.serves_models:
            box = next((box for box in world.servers if box.plan.name == spec.server), None)
            name, url = tenant.partition("/")[2] or tenant, world.places[spec.card].url if box is None else box.url
            found[tenant] = Target(tenant, url, name, router=box is None, slots=box is None)
    return found


def _probe(world: World, place: Place) -> Meter | Declared:
    if world.plan.measured:
        return place.meter
    needs = {tenant: spec.need_mib for tenant, spec in world.spec.tenants.items()}
    return Declared(place.plan.total_mib, place.plan.reserve_mib, needs)
