"""One turn of the coordinator as one decision: all that answers, the clock, what agents saw and the policy ask for.

Invariant: the commit is what deciding and committing one thing after the other would have left behind, written at
once; where that cannot be told as one write (a lease that changes twice) it ends before, says so, and the next goes on.
Deciding again on the same answers is harmless: an answer that was taken is awaited by nobody. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swapper.core import abandoned, byhand, intruder, machine, periodic, policy, unused, watchdog
from swapper.core.apply import apply
from swapper.core.commit import Commit
from swapper.core.orders import Report
from swapper.core.spec import Spec
from swapper.core.types import Card, World
from swapper.core.watchdog import Watch

AT_ONCE = 100
"""So many decisions on one card are joined at most: what is still due then is due in the next turn."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the agents last said, and what is remembered beside the store; whoever owns it keeps it up to date.

    `hosts`: those whose agent said hello. `states`: tenant id -> TenantState. `readings`: card -> the probe's reading.
    `carried_out`: card -> the (token, n) up to which its agent had carried out everything when it looked.
    `idle_since`: card -> since when no call runs or waits, ms. `used`: tenant with a ttl -> when it was used last, ms.
    `watches`: card -> what its readings showed so far. `troubles`: executor -> server -> why it could not be started.
    `contexts`: tenant -> model at its server -> tokens that a call may have; `inputs`: likewise what it takes.
    `unwanted`: card -> since when nobody waits for what its swap brings, ms.
    """

    hosts: set[str] = field(default_factory=set[str])
    states: dict[str, str] = field(default_factory=dict[str, str])
    readings: dict[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    carried_out: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    idle_since: dict[str, int] = field(default_factory=dict[str, int])
    used: dict[str, int] = field(default_factory=dict[str, int])
    watches: dict[str, Watch] = field(default_factory=dict[str, Watch])
    contexts: dict[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    inputs: dict[str, Mapping[str, Sequence[str]]] = field(default_factory=dict[str, Mapping[str, Sequence[str]]])
    troubles: dict[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    unwanted: dict[str, int] = field(default_factory=dict[str, int])

    def why_not_started(self) -> dict[str, str]:
        """Of every host: server -> why it could not be started."""
        return {server: why for told in self.troubles.values() for server, why in told.items()}

    def free_mib(self, card: str) -> int | None:
        """What the probe says is free; None where it has not said, or a holder that left is still there."""
        reading = self.readings.get(card, {})
        free = reading.get("free_mib")
        return free if isinstance(free, int) and not reading.get("lingering") else None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write now; None when everything is at rest. `more`: cut short, decide again once it was written."""

    commit: Commit | None
    more: bool = False


def decide(world: World, spec: Spec, seen: Seen, answers: Sequence[Report], new_swap: Callable[[], str]) -> Decision:
    """`answers` are taken in order, then each card does what is due, and the policy starts what is worth starting."""
    fold = _Fold(world, spec, seen, new_swap)
    whole = all(fold.add(machine.on_report(fold.world, spec, report)) for report in answers)
    whole = whole and fold.add(machine.overdue_in_queue(fold.world, spec))
    whole = whole and fold.add(byhand.homeless(fold.world, spec))
    whole = whole and all(fold.bring_to_rest(name) for name in spec.cards)
    return Decision(fold.commit, more=not whole)


def card_of(world: World, name: str) -> Card:
    """The card as the store has it; one never written is empty."""
    return world.cards.get(name) or Card(name)


def busy(world: World, spec: Spec, name: str) -> bool:
    """Whether anything holds, moves, or calls for the card's tenants; a save by the clock is none of it."""
    card = card_of(world, name)
    moving = card.swap is not None and not periodic.runs(card.swap)
    asked = any(d.running or d.waiting for d in world.demand if d.tenant in _tenants_of(spec, name))
    return asked or bool(card.holds) or moving


def _tenants_of(spec: Spec, card: str) -> set[str]:
    return {t.id for t in spec.tenants.values() if t.card == card}


class _Fold:
    """Decisions joined into one commit, each made on the world that the ones before it leave."""

    def __init__(self, world: World, spec: Spec, seen: Seen, new_swap: Callable[[], str]) -> None:
        self.world = world
        self.commit: Commit | None = None
        self._spec = spec
        self._seen = seen
        self._new_swap = new_swap

    def add(self, commit: Commit | None) -> bool:
        """False when it could not be joined: then what was joined so far is written first."""
        if commit is None:
            return True
        joined = commit if self.commit is None else self.commit.then(commit)
        if joined is None:
            return False
        self.world, self.commit = apply(self.world, commit), joined
        return True

    def bring_to_rest(self, name: str) -> bool:
        """All that a card asks for; False when not all of it could be joined."""
        for _ in range(AT_ONCE):
            due = self.due(name) or self.start(name)
            if due is None:
                return True
            if not self.add(due):
                return False
        return False

    def due(self, name: str) -> Commit | None:
        """What the clock, or what agents saw, asks of a card."""
        card = card_of(self.world, name)
        silent = [tenant for tenant, state in self._seen.states.items() if state == "unreachable"]
        due = machine.on_time(self.world, self._spec, card, silent) or byhand.due(self.world, self._spec, card)
        due = due or abandoned.due(self.world, self._spec, card, self._seen.unwanted.get(name))
        if due is None and self._fresh(card):
            tenants = _tenants_of(self._spec, name)
            states = {t: s for t, s in self._seen.states.items() if t in tenants}
            due = machine.on_observed(self.world, self._spec, card, states, self._seen.free_mib(name))
        return due or watchdog.due(self.world, self._spec, card, self._seen.watches.get(name, Watch()))

    def start(self, name: str) -> Commit | None:
        """The swap the policy chooses for a card, once the agent beside it is known to be there."""
        if self._spec.cards[name].host not in self._seen.hosts:
            return None
        world, card = self.world, card_of(self.world, name)
        idle = world.now_ms if busy(world, self._spec, name) else self._seen.idle_since.get(name, world.now_ms)
        over = unused.expired(world, self._spec, card, self._seen.used)
        choice = policy.choose(world, self._spec, card, idle_since_ms=idle, unused=over)
        if choice is None:
            return self._save_by_the_clock(card)
        return machine.start(world, self._spec, card, choice, swap_id=self._new_swap(), token=world.next_token)

    def _save_by_the_clock(self, card: Card) -> Commit | None:
        tenant = periodic.due(self.world, self._spec, card)
        if tenant is None:
            return None
        token = self.world.next_token
        return periodic.start(self.world, self._spec, card, tenant, swap_id=self._new_swap(), token=token)

    def _fresh(self, card: Card) -> bool:
        """Only what was seen after the newest command was carried out may contradict the card."""
        return self._seen.carried_out.get(card.name, (0, 0)) >= (intruder.proving(card) or card.ordered)
