"""What must hold at the end, once nothing goes wrong any more and no lease is left (N1, N2, N3, nothing left over).

Invariant: it waits, looks and calls models; it repairs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from swapper.core.types import FINAL
from tests.sim.box import Box
from tests.sim.owners import People
from tests.sim.plan import CallPlan
from tests.sim.world import DRAIN_MS, GRACE_MS, VACATE_MS, World
from workers.control import Phase

RECOVERY_S = 30.0
STOP_LIMITS_S = 45.0 + (DRAIN_MS + 30_000 + VACATE_MS + GRACE_MS) / 1000
"""Release and kill, the drain of ours and of others' calls, the proof, the grace: what may be in force then."""
LOOK_S = 0.5


def unmet(world: World) -> list[str]:
    """What is not yet as it should be."""
    found: list[str] = []
    stored = world.store.library.read(world.now_ms())
    for name, place in world.places.items():
        card = stored.cards.get(name)
        wanted = [world.tenant(model.name) for model in place.plan.models if model.default]
        if card is None:
            found.append(f"{name} was never written")
            continue
        if card.swap is not None:
            found.append(f"{name} is in a swap, {card.phase}")
        if card.fault is not None:
            found.append(f"{name} is in fault: {card.fault.reason}")
        found += [f"{name} is held by {hold.lease}" for hold in card.holds]
        wanted = [tenant for tenant in wanted if tenant not in card.unused]
        for box in (box for box in place.boxes if box.plan.default and box.plan.name not in card.unused):
            if box.plan.name not in card.residents or box.phase is not Phase.UP:
                found.append(f"{box.plan.name} is no resident of {name}, or does not run")
        for box in (box for box in place.boxes if box.plan.by_lease):
            waiting = len(place.prompts[box.plan.name].waiting)
            if waiting:
                found.append(f"{waiting} prompts of {box.plan.name} wait")
            elif box.holds and _missed(world, box, fault=card.fault is not None):
                found.append(f"{box.plan.name} is on {name} without a lease")
        for tenant in wanted:
            gate = stored.gates.get(tenant)
            child = place.router.child(tenant.partition("/")[2])
            if tenant not in card.residents:
                found.append(f"{tenant} is no resident of {name}")
            elif gate is None or not gate.open:
                found.append(f"the gate of {tenant} is shut")
            elif child is None or child.value != "loaded" or child.mute:
                found.append(f"{tenant} is not loaded, or answers nothing")
    found += [f"{box.plan.name} answers nobody" for box in world.servers if box.silent]
    found += [f"{job.id} is {job.state}" for job in world.store.library.jobs(100, unfinished=True)]
    found += [f"{errand.id} waits: {errand.verb} {errand.tenants}" for errand in stored.errands]
    found += [f"{lease.id} is {lease.state}" for lease in stored.leases.values() if lease.state not in FINAL]
    return found


def _missed(world: World, box: Box, *, fault: bool) -> bool:
    """Whether somebody should have seen that it is there: not what never comes up and is in nobody's way."""
    seen = world.plan.measured or box.holder not in world.check.stuck
    return seen and (fault or box.phase is not Phase.STARTING)


def limit_s(world: World) -> float:
    """Until when all must be well: 30 s after the last trouble, and the limits in force then."""
    now_ms = world.now_ms()
    stored = world.store.library.read(now_ms)
    rests = [f.retry_ms for card in stored.cards.values() for f in card.failed.values()]
    rests += [card.fault.retry_ms for card in stored.cards.values() if card.fault is not None]
    rest_s = max((max(rests, default=0) - now_ms) / 1000, 0.0)
    return world.quiet_from + RECOVERY_S + STOP_LIMITS_S + rest_s


async def settled(world: World, people: People) -> None:
    """Wait until all is well, and a gateway is there to be asked."""
    limit = limit_s(world)
    while (missing := unmet(world) + ([] if people.fronts else ["no gateway is there"])) and world.check.broken is None:
        if world.now > limit:
            world.check.fail(f"not recovered {world.now - world.quiet_from:.0f} s after the last trouble: {missing}")
            return
        await asyncio.sleep(LOOK_S)
    world.say(f"all is well {world.now - world.quiet_from:.1f} s after the last trouble")


async def served(world: World, people: People) -> None:
    """Each declared resident answers (N2), but who was sent off by hand."""
    stored = world.store.library.read(world.now_ms())
    for name, place in world.places.items():
        for model in place.plan.models:
            off = world.tenant(model.name) in stored.cards[name].unused
            if model.default and not off and world.check.broken is None:
                call = CallPlan(world.now, model.name, 1, stream=False, tokens=2, hang_up_s=60, chat=False)
                status = await people.ask(call)
                if status != 200:
                    world.check.fail(f"{model.name} is resident and answers {status} (N2)")


def leases_ended(world: World, people: People) -> None:
    """Every acknowledged lease that the store still has is final, once; the others a rollback took (N1)."""
    for name in people.acknowledged:
        lease = world.store.library.leases.get(name)
        if lease is None and name not in world.check.seen.lost:
            world.check.fail(f"{name} was acknowledged and is not there any more (N1)")
        elif lease is not None and lease.state not in FINAL:
            world.check.fail(f"{name} is still {lease.state} (N1)")


def jobs_ended(world: World, people: People) -> None:
    """Every job that was taken is over, unless a rollback took it; nothing of any runs (N1)."""
    for name in people.jobs:
        if world.store.library.job(name) is None and not world.check.seen.rollbacks:
            world.check.fail(f"{name} was taken and is not there any more (N1)")
    for name, work in world.works.of.items():
        if work.runs:
            world.check.fail(f"the process of {name} runs, and nobody waits for it (N1)")


def errands_ended(world: World, people: People) -> None:
    """All that was asked for by hand ended in a swap on record, unless a rollback took it (N1)."""
    for name in people.errands:
        swap = world.store.library.swap(name)
        if swap is None and not world.check.seen.rollbacks:
            world.check.fail(f"{name} was asked for by hand and is not there any more (N1)")
        elif swap is not None and swap.outcome is None:
            world.check.fail(f"{name} was asked for by hand and has no end (N1)")


def nothing_left(world: World, tasks: Iterable[asyncio.Task[object]], allowed: Callable[[str], bool]) -> None:
    """After everything was stopped."""
    left = sorted(str(task.get_name()) + " " + str(task.get_coro()) for task in tasks if not task.done())
    left = [name for name in left if not allowed(name)]
    if left:
        world.check.fail(f"tasks left over: {left}")
    if world.store.readers:
        world.check.fail(f"{world.store.readers} calls still wait at the store")
