"""A world in memory that the core can be played on: commits are applied as the store would, answers are scripted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from swapper.core import byhand, machine, policy
from swapper.core.apply import apply, changed
from swapper.core.commit import Commit
from swapper.core.errand import Errand, Verb
from swapper.core.orders import Command, Report
from swapper.core.spec import CardSpec, PolicySpec, Spec, TenantSpec
from swapper.core.types import Card, Demand, Lease, LeaseRequest, LeaseState, Swap, WorkClass, World

GIB = 1024
MED = "llama/med"
SMALL = "llama/small"
SLOTS = [{"slot": 0, "tokens": 4000}, {"slot": 1, "tokens": 3900}]
SAVED: dict[str, object] = {"tokens": 4000, "bytes": 64 << 20}
DRAIN = dict.fromkeys(WorkClass, 600_000)


def tenant(name: str, need_mib: int = 8 * GIB, **traits: bool) -> TenantSpec:
    return replace(TenantSpec(f"llama/{name}", "llama", "gpu0", "main", need_mib), **traits)


def spec(*tenants: TenantSpec, total_mib: int = 24 * GIB, **numbers: object) -> Spec:
    return Spec(
        {"gpu0": CardSpec("gpu0", total_mib)},
        {t.id: t for t in tenants},
        PolicySpec(drain_ms=DRAIN, **numbers),  # pyright: ignore[reportArgumentType]
    )


class Play:
    """One card `gpu0`, one gateway `g1`, one agent; `log` keeps every swap that ended."""

    def __init__(self, of: Spec, *residents: str, gateways: tuple[str, ...] = ("g1",)) -> None:
        self.spec = of
        card = Card("gpu0", residents=residents)
        self.world = World(1_000_000, {"gpu0": card}, {}, gateways=gateways)
        self.log: dict[str, Swap] = {}
        self.commits: list[Commit] = []
        self.ended: dict[str, Lease] = {}
        self.silent: tuple[str, ...] = ()
        self._tokens = count(100)
        self._seq = count(1)

    @property
    def card(self) -> Card:
        return self.world.cards["gpu0"]

    @property
    def swap(self) -> Swap:
        assert self.card.swap is not None
        return self.card.swap

    def lease(self, lease_id: str) -> Lease:
        return self.world.leases.get(lease_id) or self.ended[lease_id]

    def enqueue(self, lease_id: str, klass: WorkClass = WorkClass.NORMAL, **fields: object) -> None:
        request = LeaseRequest("ann", klass=klass, **fields)  # pyright: ignore[reportArgumentType]
        lease = Lease(lease_id, request, next(self._seq), self.world.now_ms, card=request.card)
        self.world = replace(self.world, leases={**self.world.leases, lease_id: lease})

    def by_hand(
        self, verb: Verb, *tenants: str, force: bool = False, drain_ms: int | None = None, name: str | None = None
    ) -> str:
        """The id of the errand, and of the swap it becomes."""
        errand_id = name or f"sw_{verb}_{next(self._seq)}"
        asked_ms = self.world.now_ms
        errand = Errand(errand_id, "gpu0", verb, tenants, force=force, drain_ms=drain_ms, asked_ms=asked_ms)
        self.world = replace(self.world, errands=(*self.world.errands, errand))
        return errand_id

    def end(self, lease_id: str, state: LeaseState = LeaseState.RELEASED) -> None:
        """The client ends its lease."""
        self.ended[lease_id] = replace(self.world.leases[lease_id], state=state)
        left = {name: lease for name, lease in self.world.leases.items() if name != lease_id}
        self.world = replace(self.world, leases=left)

    def demand(self, *records: tuple[str, int, int], oldest_ms: int | None = None) -> None:
        """(tenant, waiting, running) at the one gateway."""
        since = self.world.now_ms if oldest_ms is None else oldest_ms
        found = tuple(Demand("g1", t, WorkClass.INTERACTIVE, w, r, since) for t, w, r in records)
        self.world = replace(self.world, demand=found)

    def pass_time(self, ms: int) -> None:
        self.world = replace(self.world, now_ms=self.world.now_ms + ms)

    def gateways(self, *names: str) -> None:
        self.world = replace(self.world, gateways=names)

    def decide(self) -> bool:
        """What the coordinator does when woken: what is due, then the policy. True when something changed."""
        changed = False
        while commit := (
            machine.overdue_in_queue(self.world, self.spec)
            or machine.on_time(self.world, self.spec, self.card, self.silent)
            or byhand.due(self.world, self.spec, self.card)
        ):
            self.apply(commit)
            changed = True
        choice = policy.choose(self.world, self.spec, self.card, idle_since_ms=self.world.now_ms)
        if choice is not None:
            token = next(self._tokens)
            self.apply(machine.start(self.world, self.spec, self.card, choice, swap_id=f"sw_{token}", token=token))
            changed = True
        return changed

    def answer(self, command: Command, *, ok: bool = True, detail: str | None = None, **data: object) -> None:
        self.say(command, data, ok=ok, detail=detail)

    def say(self, command: Command, data: Mapping[str, object], *, ok: bool = True, detail: str | None = None) -> None:
        report = Report(
            command.executor,
            command.card,
            command.tenant,
            command.token,
            command.n,
            command.verb,
            "ok" if ok else "failed",
            detail,
            data=data,
        )
        self.take(report)

    def take(self, report: Report) -> None:
        commit = machine.on_report(self.world, self.spec, report)
        if commit is not None:
            self.apply(commit)

    def observe(self, states: Mapping[str, str], free_mib: int | None = None) -> bool:
        commit = machine.on_observed(self.world, self.spec, self.card, states, free_mib)
        if commit is not None:
            self.apply(commit)
        return commit is not None

    def pending(self, verb: str, executor: str = "") -> Command:
        """The first awaited command of a verb."""
        return next(c for c in self.swap.pending if c.verb == verb and c.executor.startswith(executor))

    def verbs(self) -> list[str]:
        return sorted({c.verb for c in self.swap.pending})

    def run(self, *, until: str | None = None, **data: Mapping[str, object]) -> None:
        """Answer every command with ok (and the verb's data) until the swap ends or a verb is awaited."""
        while self.card.swap is not None:
            if until is not None and any(c.verb == until for c in self.swap.pending):
                return
            command = self.swap.pending[0]
            self.say(command, data.get(command.verb, {}))

    def apply(self, commit: Commit) -> None:
        for card in commit.cards:
            assert card.version == self.world.cards[card.name].version, "decided on an unseen version"
        for change in commit.leases:
            lease = self.world.leases[change.id]
            assert lease.state in change.expect, f"{change.id} is {lease.state}"
            self.ended[change.id] = changed(lease, change, self.world.now_ms)
        self.log.update({swap.id: swap for swap in commit.swaps})
        self.world = apply(self.world, commit)
        self.commits.append(commit)


def offers(play: Play) -> list[dict[str, object]]:
    """What the agent would offer for restoring: everything the last swap saved."""
    return [
        {"snapshot": c.snapshot, "slot": c.slot, "tokens": c.tokens, "bytes": c.bytes}
        for swap in play.log.values()
        for c in swap.conversations
        if c.saved
    ]


def granted(**traits: bool) -> Play:
    """A card that med served and whose whole lease `a` is granted now."""
    play = Play(spec(tenant("med", **traits)), MED)
    play.enqueue("a")
    play.decide()
    play.run(drain={"slots": SLOTS}, save=SAVED)
    assert play.lease("a").state is LeaseState.GRANTED
    return play
