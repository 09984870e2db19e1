"""The shipped core on the twin's library, with everything around it, in plain calls; for the property tests.

Invariant: what is decided is committed on the view it was decided on, with all of the store's guards; every order that
a commit gives reaches its executor, and every answer may be heard now, later or again. `check` says `Broken` when what
is stored, what is really there and what was promised before do not fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from swapper.core import machine, plan, rollback, turn
from swapper.core.apply import apply
from swapper.core.commit import Commit, Committed
from swapper.core.errand import Errand, Verb
from swapper.core.orders import Command, Report
from swapper.core.spec import Spec
from swapper.core.types import ACTIVE, FINAL, Card, Lease, LeaseRequest, LeaseState, Step, Swap, World
from swapper.store.memory_library import Library
from swapper.store.memory_streams import NOTHING, written
from swapper.store.protocol import Enqueued, StoredEvent
from tests.model.promises import Broken, carried_out, closed, on_commit, stated, told_by
from tests.model.surroundings import Agent, Gateway, Lane, Machine
from tests.store.acts import fold, unmoved

AGENT = "agent:main"
TTL_MS = 10_000
BEAT_MS = 5_000


class Rig:
    """One host, some cards; see the module text."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.now = 1_700_000_000_000
        self.library = Library(lambda: self.now)
        self.machine = Machine(spec)
        self.agent = Agent(AGENT, spec, self.machine)
        self.gateways: dict[str, Gateway] = {}
        self.orders: list[Command] = []
        self.heard: list[Report] = []
        self.asked: list[str] = []
        self.errands: list[str] = []
        self.looks: list[turn.Seen] = []
        self.seen = turn.Seen({"main"})
        self._idle: dict[str, int] = {}
        self._ended: dict[str, Lease] = {}
        self._swaps: dict[str, Swap] = {}
        self._told: dict[str, set[str]] = {}
        self._highest = 0
        self._names = 0
        self.settle()

    # What clients, processes and the clock do.

    def read(self) -> World:
        return self.library.read(self.now)

    def lease(self, name: str) -> Lease:
        found = self.library.leases.get(name)
        if found is None:
            raise Broken(f"{name} was acknowledged and is lost (N1)")
        return found

    def ask(self, request: LeaseRequest) -> str:
        name = self.name("l")
        if not isinstance(self.library.enqueue(self.now, request, name, 1_000, None), Enqueued):
            raise Broken(f"{name} was refused")
        self.asked.append(name)
        return name

    def by_hand(self, verb: Verb, card: str, *tenants: str, force: bool = False, drain_ms: int | None = None) -> None:
        errand = Errand(self.name("sw"), card, verb, tenants, force=force, drain_ms=drain_ms)
        self.library.errand(self.now, errand, 1_000)
        self.errands.append(errand.id)

    def end(self, name: str, *, stays: bool = False) -> None:
        """The client releases or cancels; its process stays where it says so and can be seen."""
        lease = self.lease(name)
        self.library.end(self.now, name, lease.token)
        if name in self.machine.holders and not (stays and self.machine.holders[name].named):
            del self.machine.holders[name]

    def name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def join(self, name: str) -> None:
        self.gateways[name] = Gateway(name, dict(self.read().gates))
        self.beat(name)

    def beat(self, name: str) -> None:
        self.library.beat(self.now, name, self.gateways[name].demand(), TTL_MS)

    def gone(self, name: str, *, said: bool) -> None:
        """A gateway's process is no more; its calls are ended by that."""
        del self.gateways[name]
        if said:
            self.library.leave(name)

    def pass_time(self, ms: int) -> None:
        until = self.now + ms
        while self.now < until:
            self.now = min(self.now + BEAT_MS, until)
            for name in self.gateways:
                self.beat(name)

    # How orders and answers travel.

    def deliver(self, command: Command) -> None:
        if command.executor == AGENT:
            self.agent.take(command, self.now)
        elif (gateway := self.gateways.get(command.executor.removeprefix("gateway:"))) is not None:
            gateway.take(command)
            self.beat(gateway.name)

    def work(self, lane: Lane, slots: int = 1, *, fails: bool = False) -> bool:
        command = self.agent.next(lane)
        loaded = self.machine.loaded.copy()
        worked = self.agent.work(lane, self.now, slots, fails=fails)
        for tenant in loaded - self.machine.loaded:
            if any(gateway.calls[tenant] for gateway in self.gateways.values()):
                raise Broken(f"{tenant} was unloaded by {command.token}.{command.n} with a call in flight (S4)")
        return worked

    def said(self) -> list[tuple[list[Report], int]]:
        """Every answer not heard yet: the list it is in, and where."""
        lists = [self.agent.said, *(gateway.said for gateway in self.gateways.values())]
        return [(said, at) for said in lists for at in range(len(said))]

    def hear(self, report: Report) -> None:
        """What the coordinator does with a report, as `Coordinator._turn` has it."""
        self.heard.append(report)
        swap = turn.card_of(self.read(), report.card).swap
        if swap is not None and any((c.executor, c.n) == (report.executor, report.n) for c in swap.pending):
            self._told.setdefault(f"{swap.id} {report.tenant}", set()).update(told_by(report))
        if report.outcome != "refused":
            self.settle((report,))
            return
        self.settle()
        if "epoch" in report.data:
            self.write(lambda world: rollback.on_gate_refused(world, self.spec, report))
        elif isinstance(mark := report.data.get("mark"), int):
            self.library.raise_token(mark)
            self._highest = max(self._highest, mark)
            self.write(lambda world: self._retoken(world, report))
        self.settle()

    def _retoken(self, world: World, report: Report) -> Commit | None:
        card = turn.card_of(world, report.card)
        overtaken = card.swap is not None and card.swap.token == report.token
        return rollback.retoken(world, self.spec, card, world.next_token) if overtaken else None

    def look(self) -> turn.Seen:
        """What the agent sees now, to be told at once or later."""
        states = {t: "loaded" if t in self.machine.loaded else "unloaded" for t in self.spec.tenants}
        free = {card: self.machine.free_mib(card) for card in self.spec.cards}
        carried_out = {card: self.agent.carried_out(card) for card in self.spec.cards}
        seen = turn.Seen({"main"}, states, {card: {"free_mib": mib} for card, mib in free.items()}, carried_out)
        self.looks.append(seen)
        return seen

    def see(self, seen: turn.Seen) -> None:
        self.seen = seen
        self.settle()

    # Deciding and writing.

    def settle(self, answers: Sequence[Report] = ()) -> None:
        """Decide until nothing is left to decide; the same answers again must change nothing."""
        for _ in range(50):
            world = self.read()
            decision = self.decide(world, answers)
            commit = decision.commit
            if commit is None:
                return self._on_time()
            if not decision.more and self.decide(apply(world, commit), answers).commit is not None:
                raise Broken("a turn left something to be decided and did not say so")
            if not self.commit(world, commit):
                raise Broken("a commit on a view just read was refused")
        raise Broken("the coordinator goes on deciding for ever")

    def _on_time(self) -> None:
        """Nobody was left who is past a limit."""
        for lease in self.read().leases.values():
            asked = lease.request
            held = (lease.expires_ms, (lease.granted_ms or 0) + asked.max_hold_ms)
            limits = held if lease.state is LeaseState.GRANTED else (asked.deadline_ms,)
            if any(limit is not None and limit <= self.now for limit in limits):
                raise Broken(f"{lease.id} is {lease.state} past its limit")

    def decide(self, world: World, answers: Sequence[Report] = ()) -> turn.Decision:
        for card in self.spec.cards:
            if turn.busy(world, self.spec, card):
                self._idle[card] = world.now_ms
            self._idle.setdefault(card, world.now_ms)
        seen = replace(self.seen, idle_since=dict(self._idle))
        return turn.decide(world, self.spec, seen, answers, lambda: self.name("sw"))

    def write(self, decide: Callable[[World], Commit | None]) -> bool:
        world = self.read()
        commit = decide(world)
        if commit is not None and not self.commit(world, commit):
            raise Broken("a commit on a view just read was refused")
        return commit is not None

    def commit(self, world: World, commit: Commit) -> bool:
        """Write what was decided on `world`, which may be old by now; False when the store refuses."""
        before = self.read()
        on_commit(world, commit, self.spec)
        self._all_told(commit)
        if not isinstance(self.library.commit(self.now, commit), Committed):
            if self.read() != before:
                raise Broken("a refused commit changed something")
            return False
        tokens = (self._highest, *commit.tokens)
        if any(later <= earlier for earlier, later in pairwise(tokens)):
            raise Broken(f"tokens do not rise: {tokens} (S2)")
        self._highest = tokens[-1]
        for card in commit.cards:
            if card.version != turn.card_of(before, card.name).version:
                raise Broken(f"{card.name} was overwritten at a version that was not read")
        if world == before:
            self._same(apply(world, commit), self.read())
        for change in commit.leases:
            if change.state is LeaseState.GRANTED:
                self.machine.hold(self.lease(change.id))
        self.orders.extend(commit.commands)
        self._swaps.update({swap.id: swap for swap in commit.swaps})
        for command in commit.commands:
            self.deliver(command)
        return True

    def _all_told(self, commit: Commit) -> None:
        """Whatever the gateways said has a line by the time its model is told to leave (N3)."""
        for swap in (card.swap for card in commit.cards if card.swap is not None):
            for command in (c for c in commit.commands if c.verb == Step.RELEASE and c.token == swap.token):
                tenant = str(command.tenant)
                if self.spec.tenants[tenant].save:
                    stated(tenant, self._told.get(f"{swap.id} {tenant}", set()), swap.conversations)

    def _same(self, foreseen: World, stored: World) -> None:
        for what in ("cards", "gates", "token"):
            if getattr(foreseen, what) != getattr(stored, what):
                raise Broken(f"the {what} are not what the commit was said to leave")
        active = {name: lease for name, lease in stored.leases.items() if lease.state in ACTIVE}
        if foreseen.leases != {name: active.get(name) for name in foreseen.leases}:
            raise Broken("the leases are not what the commit was said to leave")

    # What must hold at any time.

    def check(self) -> None:
        world = self.read()
        self._leases()
        for card in world.cards.values():
            self._card(world, card)
        running = {card.swap.id for card in world.cards.values() if card.swap is not None}
        waiting = {errand.id for errand in world.errands}
        for errand in {*self.errands} - waiting:
            carried_out(errand, self.library.swap(errand))
        for swap in self._swaps.values():
            if swap.id not in running | waiting:
                closed(swap)
        for report in self.heard:
            if machine.on_report(world, self.spec, report) is not None:
                raise Broken(f"the answer to {report.verb} {report.n} would be taken again")

    def _leases(self) -> None:
        for name in self.asked:
            lease = self.lease(name)
            if name in self._ended and lease != self._ended[name]:
                raise Broken(f"{name} ended and changed afterwards: {self._ended[name]} to {lease} (N1)")
            if lease.state in FINAL:
                self._ended[name] = lease
                if not lease.reason:
                    raise Broken(f"{name} is {lease.state} without a reason (N1)")
            if (lease.state is LeaseState.GRANTED) and (lease.token is None or lease.expires_ms is None):
                raise Broken(f"{name} is granted without a token or an end")

    def _card(self, world: World, card: Card) -> None:
        swap, spec = card.swap, self.spec
        if swap is not None and not swap.pending:
            raise Broken(f"{card.name} waits for nobody: {swap}")
        if len(set(card.residents)) != len(card.residents) or len({h.lease for h in card.holds}) != len(card.holds):
            raise Broken(f"{card.name} names somebody twice: {card}")
        for hold in card.holds:
            state = self.lease(hold.lease).state
            if state not in FINAL and (state is LeaseState.GRANTED) is not hold.granted:
                raise Broken(f"{hold.lease} is {state}, its hold says granted={hold.granted}")
            if not hold.granted and not (swap and swap.grants and swap.lease == hold.lease):
                raise Broken(f"{hold.lease} is prepared by no swap")
        for lease in world.leases.values():
            held = lease.id in {h.lease for h in card.holds}
            if lease.state in (LeaseState.PREPARING, LeaseState.GRANTED) and lease.card == card.name and not held:
                raise Broken(f"{lease.id} is {lease.state} and {card.name} does not know (N1)")
        if card.whole is not None and len(card.holds) > 1:
            raise Broken(f"{card.name} is promised whole and to others (S1): {card.holds}")
        leaving, coming = (swap.from_, swap.to) if swap else ((), ())
        there = {t for t in card.residents if t not in leaving} | set(coming)
        evictable = plan.needs(spec, (t for t in there if not spec.tenants[t].evict_never))
        if plan.held(card) + evictable > plan.capacity(spec, card.name):
            raise Broken(f"{card.name} has promised {plan.held(card)} MiB beside {card.residents} (S3)")
        for tenant in (t for t in spec.tenants.values() if t.card == card.name):
            gate = world.gates.get(tenant.id)
            is_open = gate is not None and gate.open
            if is_open and tenant.id not in card.residents:
                raise Broken(f"the gate of {tenant.id} is open, and it is not there (S4)")
            if swap is None and tenant.id in card.residents and not is_open:
                raise Broken(f"{tenant.id} is there and its gate is shut")
        if swap is None and card.return_to is not None and set(card.return_to) <= set(card.residents):
            raise Broken(f"{card.name} still waits for {card.return_to}, all of whom are there")

    def folded(self) -> None:
        """The event log gives what is stored."""
        entries = self.library.streams.after("events", NOTHING)
        events = (StoredEvent(written(at), kind, name, int(v), data) for at, (kind, name, v, data) in entries)
        folded = fold(tuple(events))
        if folded.cards != dict(self.read().cards):
            raise Broken("the log does not fold to the cards")
        for name in self.asked:
            if folded.leases[name] != unmoved(self.lease(name)):
                raise Broken(f"the log does not fold to {name}")
        for swap_id, swap in folded.swaps.items():
            if swap != self.library.swap(swap_id):
                raise Broken(f"the log does not fold to {swap_id}")

    # To rest.

    def rest(self) -> None:
        """From here on everybody does what he should: everything must end, and the declared residents serve."""
        self.looks.clear()
        for card in self.spec.cards:
            self.by_hand(Verb.UNPIN, card, *(t.id for t in self.spec.tenants.values() if t.card == card))
        for _ in range(400):
            while self._round():
                pass
            if self._declared() is None:
                return
            self.pass_time(30_000)
        raise Broken(f"everybody did what he should, and {self._declared()} (N2)")

    def _round(self) -> bool:
        """Everybody once; True when something came of it."""
        went = [self.work(lane) for lane in self.agent.lanes]
        for gateway in self.gateways.values():
            gateway.calls.clear()
            gateway.talks.clear()  # what cannot be kept and must be would hold its model for ever
            gateway.drained()
            gateway.recalled(ok=True)
            for tenant in self.machine.broken:
                gateway.waiting[tenant] = 0  # they were told that it cannot be loaded
            self.beat(gateway.name)
        for said, _ in self.said():
            while said:
                self.hear(said.pop(0))
                went.append(True)
        for name in self.asked:
            lease = self.lease(name)
            if lease.state is LeaseState.GRANTED or (lease.state in FINAL and name in self.machine.holders):
                self.end(name)
                went.append(True)
        before = self.read()
        self.see(self.look())
        return any(went) or self.read() != before

    def _declared(self) -> str | None:
        """What is not as it should be at rest."""
        world = self.read()
        if waiting := [name for name in self.asked if self.lease(name).state not in FINAL]:
            return f"{waiting} did not end"
        if world.errands:
            return f"{world.errands} are not over"
        if hungry := [g.name for g in self.gateways.values() if any(g.waiting.values())]:
            return f"calls wait at {hungry}"
        if left := [g.name for g in self.gateways.values() if g.wanting]:
            return f"calls at {left} wait for a conversation that lies on disk"
        for card in world.cards.values():
            off = {*card.unused}
            defaults = {t.id for t in self.spec.tenants.values() if t.default and t.card == card.name} - off
            if card.swap or card.fault or card.holds or self._could_come(card, defaults):
                return f"{card} is not at rest"
            if not defaults <= set(card.residents) or set(card.residents) != self.machine.tenants(card.name):
                return f"{sorted(defaults)} are declared, {card.residents} are there of {sorted(self.machine.loaded)}"
        for gateway in self.gateways.values():
            for tenant, gate in world.gates.items():
                mine = gateway.gates.get(tenant)
                if mine is None or (mine.open is not gate.open and mine.epoch <= gate.epoch):
                    return f"{gateway.name} has {tenant} at {mine}, the store at {gate}"
        return None

    def _could_come(self, card: Card, defaults: set[str]) -> bool:
        """Whether somebody is owed for whom there would be room beside those who should stay."""
        spec, owed = self.spec, {*(card.return_to or ())} - self.machine.broken
        stay = {t for t in card.residents if t in owed | defaults}
        rooms = (plan.needs(spec, (t for t in {*stay, one} if not spec.tenants[t].evict_never)) for one in owed - stay)
        return any(room <= plan.capacity(spec, card.name) for room in rooms)
