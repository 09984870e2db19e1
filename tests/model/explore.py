"""Breadth first through every order of moves: the first broken promise found is one with the shortest story.

Two coordinators, unaware of each other: the first always acts on what the store says now, the second on what it read
at any earlier moment. Commands and answers are taken late, twice and in any order; the coordinators crash and forget
what they were told; a lease expires, a load fails and a server dies whenever they like, as often as the budget lets
them. A state in which nothing can happen any more must be at rest: every lease ended with a reason, the default
residents loaded and served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swapper.core import abandoned, machine, plan, tend, turn
from swapper.core.commit import Commit
from swapper.core.errand import Verb
from swapper.core.keeping import RECALL
from swapper.core.orders import Report
from swapper.core.spec import Spec
from swapper.core.steps import PLACED
from swapper.core.types import Card, Demand, LeaseState, Step, WorkClass, World
from swapper.store import codec
from tests.model.parts import (
    CARD,
    GATEWAY,
    Rules,
    State,
    agent,
    awaited,
    carried_out,
    end,
    gateway,
    holders,
    pending,
    write,
)
from tests.model.promises import Broken, on_commit, stated, told_by

Move = tuple[str, State]
_MAY_FAIL = (Step.DRAIN, Step.SAVE, Step.RELEASE, Step.VACATE, Step.LOAD, Step.RESTORE)


@dataclass(frozen=True, slots=True)
class Explored:
    """`story` is empty when every state kept its promises; else the moves to `broken`, in order."""

    states: int
    ends: int
    broken: str | None = None
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{number:3}. {move}" for number, move in enumerate(self.story, 1)]
        return "\n".join([f"{self.states} states, {self.ends} ends; {self.broken or 'nothing broken'}", *lines])


def explore(start: State, spec: Spec, rules: Rules | None = None, *, limit: int = 1_000_000) -> Explored:
    """Every state within the budget, or the first broken promise."""
    model = _Model(spec, rules or Rules(), start)
    came_from: dict[bytes, tuple[bytes, str] | None] = {_key(start): None}
    queue, ends = deque([start]), 0
    while queue:
        state = queue.popleft()
        key = _key(state)
        going = False
        try:
            for name, following in model.moves(state):
                going = going or not name.startswith("!")
                found = _key(following)
                if found not in came_from:
                    came_from[found] = (key, name)
                    queue.append(following)
            if not going:
                ends += 1
                model.at_rest(state)
        except Broken as broken:
            story = (*_story(came_from, key), *model.doing)
            return Explored(len(came_from), ends, str(broken), story)
        assert len(came_from) < limit, f"more than {limit} states; make the budget smaller"
    return Explored(len(came_from), ends)


def _story(came_from: dict[bytes, tuple[bytes, str] | None], key: bytes) -> Sequence[str]:
    moves: list[str] = []
    while (step := came_from[key]) is not None:
        key, name = step
        moves.append(name)
    return moves[::-1]


def _key(state: State) -> bytes:
    """What tells states apart. Versions count only as far as the second coordinator's view is the newest or not, and
    answers only where somebody waits for them (the others are still taken, by the state that was found first).
    """
    views = [state.world] if state.view is None else [state.world, state.view]
    awaited_now = {identity for world in views for identity in awaited(world)}
    newest = state.view is None or _version(state.view) == _version(state.world)
    told = sorted(codec.encode(r) for r in state.said if (r.executor, r.token, r.n) in awaited_now)
    sent = sorted((c.token, c.n, c.executor) for c in state.sent)
    marks = sorted((lane or "", pair) for lane, pair in state.marks.items())
    ended = sorted((name, lease.state) for name, lease in state.ended.items())
    gates = (state.gate, sorted(state.gates.items()))
    there = (sorted(state.loaded), gates, state.in_flight, sorted(state.alive), state.files, state.deaf)
    rest = (state.budget, there, _seen(state), ended, len(state.hands))
    return repr(([codec.encode(_unversioned(world)) for world in views], newest, told, sent, marks, rest)).encode()


def _seen(state: State) -> object:
    loaded, alive, marks = state.seen
    return sorted(loaded), alive, marks


def _unversioned(world: World) -> World:
    return replace(world, cards={name: replace(card, version=0) for name, card in world.cards.items()})


def _version(world: World) -> int:
    return world.cards[CARD].version


class _Model:
    """The moves out of a state. A name that begins with `!` is a mishap: it need not happen."""

    def __init__(self, spec: Spec, rules: Rules, start: State) -> None:
        self._spec = spec
        self._budget = start.budget
        self._hands = start.hands
        self._rules = rules
        self.doing: tuple[str, ...] = ()

    def moves(self, state: State) -> Iterator[Move]:
        """Every state that may follow, except those that are the same."""
        for source in (self._coordinators, self._executors, self._clients, self._mishaps):
            for name, following in source(state):
                if following is not None and following != state:
                    yield name, following
        self.doing = ()

    def at_rest(self, state: State) -> None:
        """Nothing can happen any more: then all must be as declared; after a mishap a proof may wait for its limit."""
        mishap = (state.budget.failures, state.budget.deaths) != (self._budget.failures, self._budget.deaths)
        if mishap and any(c.verb == "vacate" and holders(state, c) for c in pending(state.world)):
            return
        card = state.world.cards[CARD]
        defaults = frozenset(t.id for t in self._spec.tenants.values() if t.default) - {*card.unused}
        if state.world.leases or state.world.errands:
            left = (*state.world.leases, *(errand.id for errand in state.world.errands))
            raise Broken(f"nothing moves, and {', '.join(left)} did not end (N1)")
        asked = self._hands[: len(self._hands) - len(state.hands)]
        if asked and not mishap and card.residents and asked[-1].sends_away:
            raise Broken(f"nothing moves, and {card.residents} are back though they were sent off by hand")
        if asked and not mishap and not card.residents and asked[-1].verb is Verb.LOAD:
            raise Broken("nothing moves, and nobody was loaded by hand")
        if state.world.demand:
            raise Broken(f"nothing moves, and a call of {state.world.demand[0].tenant} waits (N1)")
        wanted = state.budget.wants != self._budget.wants
        if wanted and not state.deaf and not any(c.verb == PLACED for c in state.sent):
            raise Broken("nothing moves, and nobody says what became of the conversation that a call waits for (N1)")
        if (
            card.swap is not None
            or frozenset(card.residents) != defaults
            or state.loaded != defaults
            or (defaults and not (state.gate[1] or state.deaf))
        ):
            raise Broken(f"nothing moves, and the card is not as declared: {card}, loaded {set(state.loaded)} (N2)")

    def _tried(self, name: str) -> str:
        self.doing = (name,)
        return name

    def _coordinators(self, state: State) -> Iterator[tuple[str, State | None]]:
        for report in (None, *self._news(state)):
            words = f"takes {_words(report)}" if report else "looks at what is due"
            name = self._tried(f"coordinator {words}")
            commit = self._decide(state, state.world, report)
            yield name, commit and write(state, commit, self._rules)
            if state.view is not None and state.view is not state.world:
                name = self._tried(f"the other coordinator, on an old view, {words}")
                commit = self._decide(state, state.view, report)
                yield name, replace(write(state, commit, self._rules) or state, view=None) if commit else None
        if state.view is None and (spent := state.spend("looks")):
            yield "!the other coordinator reads the store", replace(spent, view=state.world)

    def _news(self, state: State) -> list[Report]:
        """The answers that somebody waits for; each of the others, late or twice, must change nothing."""
        news: list[Report] = []
        for report in state.said:
            views = [state.world] if state.view is None else [state.world, state.view]
            if any((report.executor, report.token, report.n) in awaited(view) for view in views):
                news.append(report)
            elif machine.on_report(state.world, self._spec, report) is not None:
                raise Broken(f"{_words(report)} was taken though nobody waits for it")
        return news

    def _decide(self, state: State, world: World, report: Report | None) -> Commit | None:
        loaded, alive, marks = state.seen
        states = {t: "loaded" if t in loaded else "unloaded" for t in self._spec.tenants}
        used = plan.needs(self._spec, loaded)
        free = 0 if alive else self._spec.cards[CARD].total_mib - used
        unwanted = {CARD: world.now_ms - abandoned.GRACE_MS}
        seen = turn.Seen({"main"}, states, {CARD: {"free_mib": free}}, {CARD: marks}, unwanted=unwanted)
        answers = (report,) if report else ()
        commit = turn.decide(world, self._spec, seen, answers, lambda: f"sw_{world.next_token}").commit
        if commit is not None:
            on_commit(world, commit, self._spec)
            self._all_told(state, world, commit)
        return commit

    def _all_told(self, state: State, world: World, commit: Commit) -> None:
        """What the gateway said, if it lives, has a line by the time its model is told to leave (N3)."""
        swap = commit.cards[0].swap if commit.cards else None
        if swap is None or not world.gateways:
            return
        told = {h for r in state.said if (r.executor, r.token) == (GATEWAY, swap.token) for h in told_by(r)}
        for command in commit.commands:
            if command.verb == Step.RELEASE:
                stated(str(command.tenant), told, swap.conversations)

    def _executors(self, state: State) -> Iterator[tuple[str, State | None]]:
        for command in state.sent:
            what = f"{command.verb} {command.token % 1000}.{command.n}"
            if command.executor == GATEWAY:
                yield self._tried(f"gateway obeys {what}"), gateway(state, command)
                if command.verb == RECALL and (spent := state.spend("failures")):
                    yield self._tried(f"!gateway fails at {what}"), gateway(spent, command, fails=True)
                continue
            yield self._tried(f"agent carries out {what}"), agent(state, command, self._rules)
            spent = state.spend("failures")
            if spent and command.verb in _MAY_FAIL:
                yield self._tried(f"!agent fails at {what}"), agent(spent, command, self._rules, fails=True)
        seen = (state.loaded, bool(state.alive), carried_out(state))
        yield self._tried("agent tells what it sees"), replace(state, seen=seen)
        if state.in_flight:
            yield self._tried("the call is answered"), replace(state, in_flight=0)
        for demand in state.world.demand:
            answered = replace(state, world=replace(state.world, demand=()))
            if state.gates.get(demand.tenant, (0, False))[1]:
                yield self._tried(f"the call of {demand.tenant} is answered"), answered
            elif spent := answered.spend("leavers"):
                yield f"!the client that calls {demand.tenant} leaves", spent

    def _clients(self, state: State) -> Iterator[tuple[str, State | None]]:
        for name, lease in state.world.leases.items():
            if lease.state is LeaseState.GRANTED:
                gone = replace(state, alive=state.alive - {name})
                yield f"the holder of {name} exits and releases it", end(gone, lease)
                if spent := state.spend("deaths"):
                    yield f"!{name} is released, and its holder stays", end(spent, lease)
            elif spent := state.spend("deaths"):
                yield f"!{name} is cancelled", end(spent, lease)
        for name in state.alive - state.world.leases.keys():
            yield f"the holder of {name} exits", replace(state, alive=state.alive - {name})

    def _mishaps(self, state: State) -> Iterator[tuple[str, State | None]]:
        world = state.world
        for name, lease in world.leases.items():
            if lease.state is LeaseState.GRANTED and (spent := state.spend("expiries")):
                late = replace(lease, expires_ms=world.now_ms)
                yield f"!{name} expires", replace(spent, world=replace(world, leases={**world.leases, name: late}))
        if spent := state.spend("crashes"):
            crashed = replace(spent, said=(), view=None)
            commit = machine.resume(world, self._spec, world.cards[CARD])
            yield "!the coordinators crash and resume", (commit and write(crashed, commit, self._rules)) or crashed
        if state.gate[1] and state.loaded and not state.in_flight and (spent := state.spend("calls")):
            yield "!a call begins", replace(spent, in_flight=1)
        if not state.deaf and (spent := state.spend("wants")):
            yield self._tried("!a call wants a conversation from disk"), self._wanted(spent)
        if not state.deaf and (spent := state.spend("losses")):
            alone = replace(world, gateways=(), demand=())
            shut = {tenant: (epoch, False) for tenant, (epoch, _) in state.gates.items()}
            dead = replace(spent, world=alone, in_flight=0, deaf=True, gate=(state.gate[0], False), gates=shut)
            yield "!the gateway dies", dead
        if state.loaded and not state.in_flight and (spent := state.spend("deaths")):
            yield "!the server dies", replace(spent, loaded=frozenset())
        if state.hands:
            hand, *others = state.hands
            asked = replace(world, errands=(*world.errands, hand))
            yield f"!{hand.verb} by hand", replace(state, world=asked, hands=tuple(others))
        away = next((t.id for t in self._spec.tenants.values() if not t.default), None)
        if away and not (state.deaf or world.demand) and (spent := state.spend("callers")):
            calls = (Demand("g1", away, WorkClass.INTERACTIVE, 1, 0, 0),)
            yield f"!a client calls {away}", replace(spent, world=replace(world, demand=calls))
        if (rested := _rested(world)) != world:
            yield "a rest is over", replace(state, world=rested)

    def _wanted(self, state: State) -> State | None:
        """The coordinator takes it at once; the files of the model that serves are those that may come back."""
        world, (tenant, *_) = state.world, self._spec.tenants
        data = {"snapshot": state.files[0][0] if state.files else "none", "talks": list(state.talking.talks)}
        report = Report(GATEWAY, CARD, tenant, 0, 0, "wanted", "ok", data=data)
        commit = tend.on_wanted(world, self._spec, report, swap_id=f"sw_{world.next_token}", token=world.next_token)
        return commit and write(state, commit, self._rules)


def _words(report: Report) -> str:
    return f"the answer of {report.executor.partition(':')[0]} to {report.verb} {report.token % 1000}.{report.n}"


def _rested(world: World) -> World:
    card: Card = world.cards[CARD]
    fault = card.fault and replace(card.fault, retry_ms=min(card.fault.retry_ms, world.now_ms))
    failed = {t: replace(f, retry_ms=min(f.retry_ms, world.now_ms)) for t, f in card.failed.items()}
    return replace(world, cards={CARD: replace(card, fault=fault, failed=failed)})
