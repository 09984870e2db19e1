"""The watch over a measured card: who is foreign on it, which tenant is over its need, what each takes. Pure.

`look` folds each reading into a `Watch`; `due` is the commit by which the card's record follows what was seen for long
enough. Each thing is told once when it begins and once when it is over. Invariant: what could not be read, a process
whose size its driver does not tell, and one that cannot be seen from the card's host, is unknown, and no reason to say
anything. A process that is nobody's counts only once it was so for `SETTLE_MS` without a tenant of the card loading:
the child of a router is its model's only once it is seen loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from swapper.core import foreign
from swapper.core.commit import Alert, AlertKind, Commit
from swapper.core.excess import gone_text, intruder_text, is_over, kept_text, over_text, word
from swapper.core.foreign import Process
from swapper.core.spec import Spec, TenantSpec, measured_need
from swapper.core.types import Card, Step, World
from swapper.core.watched import Intruder, Need, NeedFrom, Overrun

SETTLE_MS = 5_000
"""Two looks of an agent, which tells every change within one, and the way of its report."""
LEFT_MS = 60_000
"""So long what a tenant left behind may take to go before it is told of as foreign."""
STEP_MIB = 64
"""What a tenant takes is learned in steps, so that a few bytes more are no news."""

Key = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A process without an owner. `since_ms`: since when it has had more than its card lets pass; None: it has not.

    `left_by`: whose it was.
    """

    process: Process
    since_ms: int | None
    left_by: str | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """What the last readings of a card showed. `read`: the last one is good, and none of its processes is unknown.

    `used`: tenant -> MiB of its processes. `above`: since when a tenant takes too much, ms; `steady`: since when it is
    loaded. `owners`: whose each process was.
    """

    read: bool = False
    sightings: tuple[Sighting, ...] = ()
    used: Mapping[str, int] = field(default_factory=dict[str, int])
    above: Mapping[str, int] = field(default_factory=dict[str, int])
    steady: Mapping[str, int] = field(default_factory=dict[str, int])
    owners: Mapping[Key, str] = field(default_factory=dict[Key, str])

    def later(self, ms: int) -> Watch:
        """The same where the clock was stepped by so much meanwhile."""
        return replace(
            self,
            sightings=tuple(
                replace(one, since_ms=None if one.since_ms is None else one.since_ms + ms) for one in self.sightings
            ),
            above={t: since + ms for t, since in self.above.items()},
            steady={t: since + ms for t, since in self.steady.items()},
        )


def look(
    before: Watch, spec: Spec, card: str, reading: Mapping[str, object], states: Mapping[str, str], now_ms: int
) -> Watch:
    """What the reading adds. `states`: of all tenants, seen with it."""
    if "held" not in reading or reading.get("note") is not None or reading.get("pool") in (None, "declared"):
        return replace(before, read=False)
    was = before if before.read else Watch(owners=before.owners)
    found = foreign.processes(reading)
    mine = [t for t in spec.tenants.values() if t.card == card]
    loading = any(states.get(t.id) == "loading" for t in mine)
    used = _used(mine, found)
    return Watch(
        read=True,
        sightings=tuple(_sightings(was, found, spec.cards[card].foreign_mib, None if loading else now_ms)),
        used=used,
        above={t.id: was.above.get(t.id, now_ms) for t in mine if is_over(t, used.get(t.id))},
        steady={t.id: was.steady.get(t.id, now_ms) for t in mine if states.get(t.id) == "loaded"},
        owners={_key(one): whose for one in found if (whose := one.owner or was.owners.get(_key(one))) is not None},
    )


def _key(process: Process) -> Key:
    return process.pid, process.started


def _used(tenants: list[TenantSpec], found: tuple[Process, ...]) -> dict[str, int]:
    """Not known of anybody where a process could be anybody's, nor of a tenant that has one of unknown size."""
    if any(one.owner is None and not one.line for one in found):
        return {}
    sizes = {t.id: [one.mib for one in found if one.owner == t.id] for t in tenants}
    return {t: sum(mib for mib in all_ if mib is not None) for t, all_ in sizes.items() if None not in all_}


def _sightings(was: Watch, found: tuple[Process, ...], pass_mib: int, now_ms: int | None) -> Iterator[Sighting]:
    """`now_ms` None: a tenant is loading, and which of these is its process will be known then."""
    before = {_key(one.process): one.since_ms for one in was.sightings}
    for one in found:
        if one.owner is None and one.line:
            since_ms = None if (one.mib or 0) <= pass_mib or now_ms is None else before.get(_key(one)) or now_ms
            yield Sighting(one, since_ms, was.owners.get(_key(one)))


def due(world: World, spec: Spec, card: Card, watch: Watch) -> Commit | None:
    """What is to be said and remembered now; None where the record has it all."""
    if not watch.read:
        return None
    alerts: list[Alert] = []
    intruders = _intruders(world, spec, card, watch, alerts)
    overruns = _overruns(world, spec, card, watch, alerts)
    needs = {**card.needs, **dict(_needs(world, spec, card, watch))}
    after = replace(card, intruders=intruders, overruns=overruns, needs=needs)
    return Commit(cards=(after,), alerts=tuple(alerts)) if after != card else None


def _intruders(world: World, spec: Spec, card: Card, watch: Watch, alerts: list[Alert]) -> tuple[Intruder, ...]:
    leased = foreign.leased_on(world, card)
    found = {_key(one.process): one for one in watch.sightings if foreign.is_foreign(one.process, leased)}
    pass_mib = spec.cards[card.name].foreign_mib
    taken = sum(one.process.mib or 0 for one in found.values())
    kept: list[Intruder] = []
    for one in card.intruders:
        seen = found.pop((one.pid, one.started), None)
        if seen is not None and (seen.process.mib is None or seen.process.mib > pass_mib // 2):
            kept.append(one)
            continue
        data = {"holders": [word(one)]}
        alerts.append(Alert(card.name, gone_text(card, one), data, AlertKind.FOREIGN_VRAM, over=True))
    if taken <= spec.cards[card.name].reserve_mib or (card.swap is not None and card.swap.stage is Step.LOAD):
        return tuple(kept)
    for one in found.values():
        if one.since_ms is None or world.now_ms - one.since_ms < (LEFT_MS if one.left_by else SETTLE_MS):
            continue
        p = one.process
        new = Intruder(p.pid, p.started, p.mib or 0, one.since_ms, p.name, p.container)
        text = intruder_text(spec, card, new, taken, one.left_by)
        alerts.append(Alert(card.name, text, {"holders": [word(new)], "mib": new.mib}, AlertKind.FOREIGN_VRAM))
        kept.append(new)
    return tuple(kept)


def _overruns(world: World, spec: Spec, card: Card, watch: Watch, alerts: list[Alert]) -> Mapping[str, Overrun]:
    after = dict(card.overruns)
    for tenant, one in card.overruns.items():
        configured = spec.tenants.get(tenant)
        used = watch.used.get(tenant)
        over = configured is not None and (used is None or used > configured.need_mib)
        if one.raised and not over:
            data = {"tenant": tenant}
            alerts.append(Alert(card.name, kept_text(card, tenant, used), data, AlertKind.OVER_NEED, over=True))
            after[tenant] = replace(one, raised=False)
        away = one.away and tenant not in card.residents and configured is not None
        after[tenant] = replace(after[tenant], away=away)
        if not (after[tenant].raised or away or one.rests(world.now_ms)):
            del after[tenant]
    for tenant, since_ms in watch.above.items():
        before = after.get(tenant)
        if (before is not None and before.raised) or world.now_ms - since_ms < SETTLE_MS:
            continue
        after[tenant] = replace(before or Overrun(0, 0), mib=watch.used[tenant], since_ms=since_ms, raised=True)
        text = over_text(spec, card, spec.tenants[tenant], after[tenant])
        alerts.append(Alert(card.name, text, {"tenant": tenant, "mib": watch.used[tenant]}, AlertKind.OVER_NEED))
    return after


def acted(card: Card, leaving: Collection[str], arriving: Collection[str], now_ms: int) -> Mapping[str, Overrun]:
    """A swap begins that restarts, or sends away, who is over its need."""
    return {
        t: replace(one, acted_ms=now_ms, away=t not in arriving) if t in leaving else one
        for t, one in card.overruns.items()
    }


def ran_out(card: Card, tenant: TenantSpec, free_mib: int) -> Card:
    """It did not fit into what was free, so it takes more than that. What was declared stays."""
    if tenant.need_from is NeedFrom.DECLARED:
        return card
    keeping = card.keeping.get(tenant.id)
    need = Need(max(tenant.need_mib, free_mib + 1), "" if keeping is None else keeping.fingerprint)
    return replace(card, needs={**card.needs, tenant.id: need})


def _needs(world: World, spec: Spec, card: Card, watch: Watch) -> Iterator[tuple[str, Need]]:
    """What those that serve take, where that is more than was known of them, or the first that is."""
    for tenant in card.residents if card.swap is None else ():
        configured, used = spec.tenants.get(tenant), watch.used.get(tenant)
        since_ms = watch.steady.get(tenant)
        if configured is None or configured.need_from is NeedFrom.DECLARED or not used or since_ms is None:
            continue
        if world.now_ms - since_ms < SETTLE_MS:
            continue
        mib = -(-used // STEP_MIB) * STEP_MIB
        if mib > (measured_need(card, tenant) or 0):
            keeping = card.keeping.get(tenant)
            yield tenant, Need(mib, "" if keeping is None else keeping.fingerprint)
