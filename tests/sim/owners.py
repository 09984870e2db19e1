"""Who uses swapper: owners of leases, each with its own habits, clients of models, and an operator.

Invariant: an owner holds VRAM only once it was told of its grant, and lets go as its plan says; all of them act through
a process that lives, and hear nothing where none does. A client's conversation only grows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

from swapper.core.errand import Errand, Verb
from swapper.core.jobs import Job
from swapper.core.types import FINAL, Lease, LeaseRequest, LeaseState, WorkClass
from swapper.errors import StoreDown
from swapper.store.protocol import Ended, Enqueued, Idempotency, KeyReused, NotFound, QueueFull, Store, WrongToken
from tests.sim.front import ask, request_of
from tests.sim.plan import TROUBLE_S, BoxPlan, CallPlan, HandPlan, JobPlan, OwnerPlan, Way
from tests.sim.serve import Serving
from tests.sim.whose import opening
from tests.sim.world import EPOCH_MS, Place, World

if TYPE_CHECKING:
    from swapper.jobs.runner import Jobs

T = TypeVar("T")

POLL_S, AGAIN_S = 0.4, 0.3
PATIENCE_S = 1.5


class People:
    """All of them. `serving` gives the processes that live."""

    def __init__(self, world: World, serving: Callable[[], list[Serving]]) -> None:
        self.world = world
        self.serving = serving
        self.acknowledged: dict[str, OwnerPlan] = {}
        self.jobs: list[str] = []
        """Those that were taken."""
        self.errands: list[str] = []

    async def _api(self, call: Callable[[Store], Awaitable[T]]) -> T:
        """Ask through some process that lives, until one answers."""
        while True:
            for serving in self.serving():
                if serving.process.name == "hands":
                    continue
                task = serving.process.spawn(_call(call, serving.store))
                await asyncio.wait({task}, timeout=PATIENCE_S)
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task})
                    continue
                if not task.cancelled() and not isinstance(task.exception(), StoreDown):
                    return task.result()
            await asyncio.sleep(AGAIN_S)

    async def own(self, plan: OwnerPlan) -> None:
        """The life of one lease."""
        world = self.world
        await asyncio.sleep(plan.at)
        lease = await self._enqueued(plan)
        if lease is None or plan.way is Way.VANISHES:
            return
        if plan.way is Way.CANCELS:
            await asyncio.sleep(plan.work_s)
            await self._end(lease.id)
            return
        granted = await self._granted(lease.id)
        if granted is None or granted.token is None or granted.card is None:
            return
        place = world.places[granted.card]
        mib = place.plan.capacity if plan.vram_mib is None else plan.vram_mib
        world.say(f"{plan.name} holds {mib} MiB of {granted.card} by {lease.id}")
        place.vram.take(f"lease {lease.id}", mib)
        try:
            ended = await self._work(plan, granted)
            if ended and plan.overstay_s and plan.way is Way.LATE:
                await asyncio.sleep(plan.overstay_s)
        finally:
            if plan.way is not Way.KEEPS:
                self._let_go(plan, granted)
        if plan.way in (Way.FORGETS, Way.LATE):
            return
        await self._end(lease.id, granted.token)
        if plan.way is Way.KEEPS:
            await asyncio.sleep(plan.overstay_s)
            self._let_go(plan, granted)

    def _let_go(self, plan: OwnerPlan, lease: Lease) -> None:
        self.world.check.seen.dutiful.discard(lease.id)
        self.world.places[str(lease.card)].vram.let_go(f"lease {lease.id}")
        self.world.say(f"{plan.name} lets go of {lease.card}")
        self.world.disturbed()

    async def _enqueued(self, plan: OwnerPlan) -> Lease | None:
        deadline = None if plan.deadline_s is None else EPOCH_MS + int((plan.at + plan.deadline_s) * 1000)
        request = LeaseRequest(
            plan.name,
            card=plan.card,
            vram_mib=plan.vram_mib,
            klass=plan.klass,
            ttl_ms=plan.ttl_ms,
            max_hold_ms=plan.max_hold_ms,
            deadline_ms=deadline,
        )
        key = Idempotency(f"key of {plan.name}", "the same")
        names = (self.world.new_id("ls") for _ in iter(int, 1))
        answer = await self._api(
            lambda store: store.enqueue(request, lease_id=next(names), max_queue=100, idempotency=key)
        )
        match answer:
            case Enqueued(lease=lease):
                self.world.say(f"{plan.name} ({plan.way}) asks for {plan.card} {plan.vram_mib or 'whole'}: {lease.id}")
                self.acknowledged[lease.id] = plan
                return lease
            case QueueFull() | KeyReused():
                self.world.check.fail(f"{plan.name} was refused: {answer}")
                return None

    async def _granted(self, name: str) -> Lease | None:
        """Wait for the grant; None when it ended, or nobody knows it any more."""
        while True:
            lease = await self._api(lambda store: store.lease(name))
            if lease is None or lease.state in FINAL:
                return None
            if lease.state is LeaseState.GRANTED:
                return lease
            await asyncio.sleep(POLL_S)

    async def _work(self, plan: OwnerPlan, lease: Lease) -> bool:
        """Work, with a heartbeat now and then; True when it was told to stop."""
        world, token = self.world, lease.token or 0
        until = world.now + plan.work_s
        if plan.way in (Way.DUTIFUL, Way.KEEPS):
            world.check.seen.dutiful.add(lease.id)
        if plan.way in (Way.FORGETS, Way.LATE):
            await asyncio.sleep(plan.work_s)
            if plan.way is Way.LATE:
                await asyncio.sleep(max(0.0, plan.ttl_ms / 1000 - plan.work_s))
                return True
            return False
        while world.now < until:
            answer = await self._api(lambda store: store.heartbeat(lease.id, token))
            if isinstance(answer, NotFound | WrongToken | Ended):
                world.say(f"{plan.name} is told {type(answer).__name__}")
                return True
            await asyncio.sleep(min(plan.ttl_ms / 3000, max(0.05, until - world.now)))
        return False

    async def send(self, place: Place, box: BoxPlan) -> None:
        """The clients of a gate: each prompt at its time."""
        prompts = place.prompts[box.name]
        for at, takes_s in box.prompts:
            await asyncio.sleep(max(0.0, at - self.world.now))
            prompts.waiting.append(takes_s)
            prompts.changed.set()
            self.world.say(f"a prompt for {box.name}, {takes_s:.1f} s")
            self.world.disturbed()

    async def submit(self, plan: JobPlan) -> None:
        """A job, asked for until somebody takes it; cancelled later, if that is its plan."""
        await asyncio.sleep(plan.at)
        job = None
        while job is None:
            job = await self._at_jobs(lambda jobs: jobs.submit(jobs.recipes[plan.name], {}, "jo", WorkClass.NORMAL))
        self.jobs.append(job.id)
        self.world.say(f"{job.id} of {plan.name} is taken")
        if plan.cancel_s is not None:
            await asyncio.sleep(plan.cancel_s)
            asked = await self._api(lambda store: store.job(job.id))
            while asked is not None and await self._at_jobs(lambda jobs, one=asked: jobs.cancel(one)) is None:
                pass

    async def _at_jobs(self, call: Callable[[Jobs], Coroutine[None, None, Job]]) -> Job | None:
        """Ask whoever runs the jobs; None, a moment later, where nobody answered."""
        for jobs, serving in [(one.jobs, one) for one in self.serving()]:
            if jobs is not None:
                task = serving.process.spawn(call(jobs))
                await asyncio.wait({task})
                if not task.cancelled() and not isinstance(task.exception(), StoreDown):
                    return task.result()
        await asyncio.sleep(AGAIN_S)
        return None

    async def by_hand(self, plan: HandPlan) -> None:
        """What an operator does: asked for until it is taken."""
        await asyncio.sleep(plan.at)
        world = self.world
        if plan.force:
            world.check.seen.forced.add(plan.card)
        tenants = () if plan.verb is Verb.VACATE else (world.tenant(plan.name),)
        drain_ms = None if plan.drain_s is None else round(plan.drain_s * 1000)
        errand = Errand(world.new_id("sw"), plan.card, plan.verb, tenants, "op", drain_ms, plan.force)
        await self._ask_for(errand)
        if plan.verb is Verb.PIN:
            await asyncio.sleep(max(0.0, TROUBLE_S - world.now))
            while pinned := self._pinned():
                for card, names in pinned:
                    await self._ask_for(Errand(world.new_id("sw"), card, Verb.UNPIN, names, "op"))
                await asyncio.sleep(AGAIN_S)

    def _pinned(self) -> list[tuple[str, tuple[str, ...]]]:
        """Who would keep a lease waiting for ever."""
        cards = self.world.store.library.read(self.world.now_ms()).cards
        return [(name, card.pinned) for name, card in cards.items() if card.pinned]

    async def _ask_for(self, errand: Errand) -> None:
        await self._api(lambda store: store.errand(errand, max_errands=100))
        self.errands.append(errand.id)
        whom = " ".join(errand.tenants) or errand.card
        self.world.say(f"by hand: {errand.verb} {whom}{' by force' * errand.force}: {errand.id}")

    async def _end(self, name: str, token: int | None = None) -> None:
        answer = await self._api(lambda store: store.end(name, token))
        if isinstance(answer, WrongToken) and token is None:
            lease = await self._api(lambda store: store.lease(name))
            if lease is not None and lease.token is not None:
                await self._end(name, lease.token)

    # ---- models

    @property
    def fronts(self) -> list[Serving]:
        """The processes with a gateway that is there."""
        return [serving for serving in self.serving() if serving.context is not None]

    async def call(self, plan: CallPlan) -> None:
        """One call by model name."""
        await asyncio.sleep(plan.at)
        await self.ask(plan)

    async def ask(self, plan: CallPlan) -> int:
        """The status of its answer; 0 where there was none."""
        fronts = self.fronts
        if not fronts:
            self.world.say(f"call {plan.model}: nobody listens")
            return 0
        front = fronts[plan.talk % len(fronts)]
        said = opening(plan.talk, plan.model) * 20 + "and on " * int(self.world.now / 4)
        path, body = request_of(plan, said, plan.model)
        self.world.check.heads.asked(path, body, plan.talk, plan.model)
        self.world.say(f"call {plan.model} at {front.process.name}{' stream' if plan.stream else ''} {plan.tokens}")
        result = await ask(front, path, body, plan.hang_up_s)
        told = _error(result.body) if result.status != 200 else ""
        self.world.say(f"call {plan.model}: {result.status} {len(result.body)}{'' if result.whole else ' cut'} {told}")
        return result.status if result.whole else 0


async def _call(call: Callable[[Store], Awaitable[T]], store: Store) -> T:
    return await call(store)


def _error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
