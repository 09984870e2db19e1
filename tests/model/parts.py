"""What surrounds the machine in the model: a store, an agent, a gateway and holders, each as simple as its promise.

Invariant: every part is a pure function of a frozen State, and none knows what the machine intends. The machine itself
(core/turn.py and below) is the shipped one. Time stands still: what the clock would bring (an expiry, the end of a
rest) is a move of its own, so that it comes at any moment. `Broken` says which promise a move broke.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from swapper.core.apply import apply, changed
from swapper.core.commit import Commit
from swapper.core.errand import Errand
from swapper.core.keeping import RECALL
from swapper.core.orders import Command, Report, answer_to
from swapper.core.steps import PLACED
from swapper.core.types import FINAL, Lease, LeaseState, Step, World
from tests.model.promises import Broken
from tests.support.play import MED

CARD, GATEWAY = "gpu0", "gateway:g1"
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the parts hold to; a mutant drops one."""

    compare_and_set: bool = True
    fence: bool = True


@dataclass(frozen=True, slots=True)
class Budget:
    """How often what need not happen may still happen.

    `expiries` of leases, `crashes` of all coordinators, `failures` of commands, `deaths` (of the server, a cancelled
    lease, a release by a holder that stays), `calls` that begin, `looks` of the second coordinator, `losses` of the
    gateway with all it knew, calls that want a conversation from disk (`wants`), and of a model that is away
    (`callers`), whose clients may leave (`leavers`).
    """

    expiries: int = 0
    crashes: int = 0
    failures: int = 0
    deaths: int = 0
    calls: int = 0
    looks: int = 0
    losses: int = 0
    wants: int = 0
    callers: int = 0
    leavers: int = 0


@dataclass(frozen=True, slots=True)
class Talking:
    """What the gateway says of conversations whenever it is drained, and the agent of the slots and of the model.

    `strategies` None: nobody says anything of conversations; none: they cannot be kept.
    """

    talks: tuple[Mapping[str, object], ...] = ()
    slots: tuple[Mapping[str, int], ...] = ()
    strategies: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Everything. `sent` and `said` only grow (a crash of the coordinators forgets `said`): any of them may be taken
    again, late, in any order. `view` is what the second coordinator read some time ago. `alive`: leases whose holder
    runs. `loaded`: tenants in VRAM. `seen`: what the agent last told, (loaded, a holder seen, carried out). `files`:
    (name, whose) of the snapshots on disk. `deaf`: the gateway is no more. `hands`: what is still to be asked for by
    hand, in this order. `gate`: the default resident's, at the gateway; `gates`: those of others.
    """

    world: World
    budget: Budget
    talking: Talking = Talking()
    view: World | None = None
    sent: tuple[Command, ...] = ()
    said: tuple[Report, ...] = ()
    marks: Mapping[str | None, Pair] = field(default_factory=dict[str | None, Pair])
    answers: Mapping[Pair, Report] = field(default_factory=dict[Pair, Report])
    loaded: frozenset[str] = frozenset()
    gate: tuple[int, bool] = (0, False)
    gates: Mapping[str, tuple[int, bool]] = field(default_factory=dict[str, tuple[int, bool]])
    in_flight: int = 0
    alive: frozenset[str] = frozenset()
    seen: tuple[frozenset[str], bool, Pair] = (frozenset(), False, (0, 0))
    ended: Mapping[str, Lease] = field(default_factory=dict[str, Lease])
    granted: Mapping[str, int] = field(default_factory=dict[str, int])
    files: tuple[tuple[str, str], ...] = ()
    deaf: bool = False
    hands: tuple[Errand, ...] = ()

    def spend(self, what: str) -> State | None:
        """One less of the budget; None when it is used up."""
        left = getattr(self.budget, what)
        return replace(self, budget=replace(self.budget, **{what: left - 1})) if left else None


def write(state: State, commit: Commit, rules: Rules) -> State | None:
    """The store's `commit`: every guard, then everything. None: a conflict."""
    world = state.world
    unseen = [c.name for c in commit.cards if c.version != world.cards[c.name].version]
    stale = [c.id for c in commit.leases if c.id not in world.leases or world.leases[c.id].state not in c.expect]
    late = bool(commit.tokens) and commit.tokens[0] <= world.token
    late = late or not {*commit.over} <= {errand.id for errand in world.errands}
    if rules.compare_and_set and (unseen or stale or late):
        return None
    if unseen:
        raise Broken(f"a commit over a version of {unseen[0]} that it had not seen")
    after = apply(world, commit)
    changes = {c.id: changed(world.leases[c.id], c, world.now_ms) for c in commit.leases if c.id in world.leases}
    granted = {**state.granted}
    for name, lease in changes.items():
        if lease.state is LeaseState.GRANTED and world.leases[name].state is not LeaseState.GRANTED:
            granted[name] = granted.get(name, 0) + 1
            if granted[name] > 1:
                raise Broken(f"{name} was granted twice")
    ended = {name: lease for name, lease in changes.items() if lease.state in FINAL}
    if nameless := [name for name, lease in ended.items() if not lease.reason]:
        raise Broken(f"{nameless[0]} ended without a reason (N1)")
    new = frozenset(name for name in granted if granted[name] > state.granted.get(name, 0))
    if new and (beside := state.loaded | state.alive):
        raise Broken(f"{', '.join(new)} was granted beside {', '.join(sorted(beside))} (S1)")
    return replace(
        state,
        world=after,
        sent=(*state.sent, *(c for c in commit.commands if c not in state.sent)),
        granted=granted,
        ended={**state.ended, **ended},
        alive=state.alive | new,
    )


def end(state: State, lease: Lease) -> State:
    """A client ends its lease: granted ones are released, the others cancelled."""
    how = LeaseState.RELEASED if lease.state is LeaseState.GRANTED else LeaseState.CANCELLED
    left = {name: other for name, other in state.world.leases.items() if name != lease.id}
    ended = {**state.ended, lease.id: replace(lease, state=how)}
    return replace(state, world=replace(state.world, leases=left), ended=ended)


def pending(world: World) -> tuple[Command, ...]:
    """The commands the running swap waits for."""
    swap = world.cards[CARD].swap
    return swap.pending if swap else ()


def awaited(world: World) -> set[tuple[str, int, int]]:
    """Who is to answer what: (executor, token, n)."""
    return {(c.executor, c.token, c.n) for c in pending(world)}


def carried_out(state: State) -> Pair:
    """What the agent tells of its marks: everything it began is answered, because a command is one move here."""
    return max(state.marks.values(), default=(0, 0))


def agent(state: State, command: Command, rules: Rules, *, fails: bool = False) -> State | None:
    """One command at the agent; None where nothing comes of it (refused, or said already)."""
    pair, lane = (command.token, command.n), command.tenant
    mark = state.marks.get(lane, (0, 0))
    if rules.fence and (recorded := state.answers.get(pair)) is not None:
        return replace(state, said=(*state.said, recorded)) if recorded not in state.said else None
    if (rules.fence and pair <= mark) or (command.verb == Step.VACATE and bool(holders(state, command)) is not fails):
        return None  # overtaken; or a proof that goes on waiting (its time is up only where that is a failure)
    before = state.loaded
    state, report = _effect(state, command, fails=fails)
    if pair < mark and state.loaded != before:
        raise Broken(f"{command.verb} {command.token}.{command.n} was carried out after {mark[0]}.{mark[1]} (S2)")
    return replace(
        state,
        marks={**state.marks, lane: max(pair, mark)},
        answers={**state.answers, pair: report},
        said=(*state.said, report),
    )


def holders(state: State, command: Command) -> list[str]:
    """Who keeps the card: what is loaded, and the departed whose process runs."""
    departed = cast("Sequence[Mapping[str, str]]", command.args["departed"])
    others = state.loaded - set(cast("Sequence[str]", command.args["arriving"]))
    return [*sorted(others), *sorted({left["lease"] for left in departed} & state.alive)]


def _effect(state: State, command: Command, *, fails: bool) -> tuple[State, Report]:
    tenant = command.tenant or ""
    if fails:
        data = {"holders": holders(state, command), "free_mib": 0} if command.verb == Step.VACATE else {}
        return state, answer_to(command, "failed", "it would not", data=data)
    if command.verb == Step.RELEASE:
        if state.in_flight and tenant in state.loaded:
            raise Broken(f"{tenant} was unloaded with a call in flight (S4)")
        state = replace(state, loaded=state.loaded - {tenant})
    elif command.verb == Step.LOAD:
        if state.alive:
            raise Broken(f"{tenant} was loaded beside the holder of {', '.join(sorted(state.alive))} (S1)")
        if beside := state.loaded - {tenant}:
            raise Broken(f"{tenant} was loaded beside {', '.join(sorted(beside))}, and there is room for one (S3)")
        state = replace(state, loaded=state.loaded | {tenant})
        offered = [_offered(name, whose) for name, whose in reversed(state.files)]
        return state, answer_to(command, "ok", data={"n_slots": 1, "snapshots": offered, **_kept(state)})
    elif command.verb in (Step.DRAIN, Step.SAVE, Step.RESTORE) and state.talking.strategies is not None:
        return _conversations(state, command)
    return state, answer_to(command, "ok")


def _kept(state: State) -> dict[str, object]:
    ways = state.talking.strategies
    return {} if ways is None else {"strategies": list(ways), "fingerprint": "one"}


def _offered(name: str, whose: str) -> dict[str, object]:
    return {"snapshot": name, "slot": 0, "tokens": 1000, "bytes": 1, "id": whose, "links": [whose]}


def _conversations(state: State, command: Command) -> tuple[State, Report]:
    """What an agent does about conversations: of a model that is not there it can save and restore nothing."""
    there = command.tenant in state.loaded
    if command.verb == Step.DRAIN:
        data: dict[str, object] = {"slots": list(state.talking.slots)} if there else {"gone": True}
        return state, answer_to(command, "ok", data={**data, **_kept(state)})
    if not there:
        return state, answer_to(command, "failed", "nobody is there")
    if command.verb == Step.SAVE:
        whose = cast("Mapping[str, str]", command.args.get("conversation", {})).get("id", "")
        state = replace(state, files=(*state.files, (str(command.args["name"]), whose)))
        return state, answer_to(command, "ok", data={"tokens": 1000, "bytes": 1})
    if command.args["snapshot"] not in {name for name, _ in state.files}:
        return state, answer_to(command, "failed", "there is no such file")
    if (name := command.args.get("displaced")) is None:
        return state, answer_to(command, "ok")
    if command.args.get("tells") and "takes" not in command.args:
        (there, *_) = state.talking.talks
        return state, answer_to(command, "ok", data={"leaves": {"slot": 0, "tokens": 1000, "id": there["id"]}})
    state = replace(state, files=(*state.files, (str(name), "")))
    return state, answer_to(command, "ok", data={"slot": 0, "tokens": 1000, "displaced": _offered(str(name), "")})


def gateway(state: State, command: Command, *, fails: bool = False) -> State | None:
    """One command at the gateway; its answer to `drain` comes once nothing is in flight."""
    if state.deaf or command.verb == PLACED:
        return None
    if command.verb == RECALL:
        data = {"slot": 0, "tokens": 1000, "cache_n": 1000, "prompt_n": 0}
        answer = (
            answer_to(command, "failed", "it was not there any more") if fails else answer_to(command, "ok", data=data)
        )
        heard = {(r.token, r.n) for r in state.said if r.executor == GATEWAY}
        return None if (command.token, command.n) in heard else replace(state, said=(*state.said, answer))
    if command.tenant != MED:
        return _others_gate(state, command)
    epoch, (mine, _) = int(str(command.args["epoch"])), state.gate
    if command.verb in (Step.CLOSE, Step.OPEN) and epoch < mine:
        return None
    data: dict[str, object] = {}
    if command.verb in (Step.CLOSE, Step.OPEN):
        state = replace(state, gate=(epoch, command.verb == Step.OPEN))
        data = {"in_flight": state.in_flight}
    elif command.verb == "cut":
        state = replace(state, in_flight=0)
    elif state.in_flight:
        return None
    if not state.in_flight and command.verb != Step.OPEN and state.talking.talks:
        data["talks"] = list(state.talking.talks)
    return _said(state, answer_to(command, "ok", data=data))


def _others_gate(state: State, command: Command) -> State | None:
    """Of a model whose calls take no time and have no conversations."""
    tenant, epoch = str(command.tenant), int(str(command.args["epoch"]))
    if command.verb in (Step.CLOSE, Step.OPEN):
        if epoch < state.gates.get(tenant, (0, False))[0]:
            return None
        state = replace(state, gates={**state.gates, tenant: (epoch, command.verb == Step.OPEN)})
    return _said(state, answer_to(command, "ok", data={"in_flight": 0}))


def _said(state: State, report: Report) -> State:
    awaited = report.token and report not in state.said
    return replace(state, said=(*state.said, report)) if awaited else state
