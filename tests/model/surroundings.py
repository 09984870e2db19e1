"""What surrounds the coordinator in the property tests: agents, gateways and holders, each as simple as its promise.

Invariant: none of them knows what the machine intends; each obeys its own marks and epochs as the real one does, and
says `Broken` when an order would break a promise. Time comes from whoever asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from swapper.core import plan
from swapper.core.keeping import RECALL
from swapper.core.orders import Command, Report, answer_to
from swapper.core.periodic import PASSED, SAVED, TALKS
from swapper.core.spec import Spec
from swapper.core.steps import PLACED
from swapper.core.types import Demand, Gate, Lease, Step, WorkClass
from tests.model.promises import Broken

Pair = tuple[int, int]
Lane = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that uses the VRAM of a lease; `named`: the lease told its pid, so that it can be seen."""

    lease: str
    card: str
    vram_mib: int | None
    named: bool


class Machine:
    """What is really there: models in VRAM, processes that hold leases, and snapshots, the newest first.

    `ways`: the strategies that an agent says suit a tenant. `empty`: slots turn out empty when they are to be saved.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.loaded: set[str] = set()
        self.holders: dict[str, Holder] = {}
        self.broken: set[str] = set()
        self.files: dict[str, list[dict[str, object]]] = {}
        self.ways: dict[str, list[str]] = {}
        self.empty = False

    def tenants(self, card: str) -> set[str]:
        """Those in the VRAM of a card."""
        return {t for t in self.loaded if self._spec.tenants[t].card == card}

    def beside(self, card: str) -> list[Holder]:
        """The processes that hold VRAM of a card."""
        return [h for h in self.holders.values() if h.card == card]

    def free_mib(self, card: str) -> int:
        """What the probe reads: capacity less what is loaded; holders are invisible to it."""
        of = self._spec.cards[card]
        return of.total_mib - of.reserve_mib - plan.needs(self._spec, self.tenants(card))

    def hold(self, lease: Lease) -> None:
        """A lease was granted: its holder takes the VRAM it was promised. S1, S3."""
        card, want = lease.card or "", lease.request.vram_mib
        others, whole = self.beside(card), want is None
        tenants = {t for t in self.tenants(card) if not (whole and self._spec.tenants[t].evict_never)}
        if (whole and (others or tenants)) or any(h.vram_mib is None for h in others):
            raise Broken(f"{lease.id} was granted beside {[h.lease for h in others]} and {sorted(tenants)} (S1)")
        promised = sum(h.vram_mib or 0 for h in others) + (want or 0)
        if not whole and promised > self.free_mib(card):
            raise Broken(f"{promised} MiB promised on {card}, {self.free_mib(card)} are left by tenants (S3)")
        self.holders[lease.id] = Holder(lease.id, card, want, lease.request.holder_pid is not None)

    def load(self, tenant: str) -> None:
        """A model comes into VRAM: there must be room beside the holders."""
        card = self._spec.tenants[tenant].card
        others = self.beside(card)
        if any(h.vram_mib is None for h in others) and not self._spec.tenants[tenant].evict_never:
            raise Broken(f"{tenant} was loaded beside the holder of {others[0].lease} (S1)")
        self.loaded.add(tenant)
        if self.free_mib(card) < sum(h.vram_mib or 0 for h in others):
            raise Broken(f"{tenant} was loaded where there was no room for it (S3)")


class Agent:
    """Carries out what it is told, lane by lane; `said` are its answers, to be heard in any order."""

    def __init__(self, name: str, spec: Spec, machine: Machine) -> None:
        self.name = name
        self.said: list[Report] = []
        self.marks: dict[Lane, Pair] = {}
        self._spec = spec
        self._machine = machine
        self._answers: dict[tuple[Lane, Pair], Report] = {}
        self._todo: dict[Lane, list[tuple[int, Command]]] = {}

    def take(self, command: Command, now_ms: int) -> None:
        """An order arrives; one known already is answered from the record."""
        lane, pair = (command.card, command.tenant), (command.token, command.n)
        if (lane, pair) in self._answers:
            self.said.append(self._answers[lane, pair])
        elif all(command != queued for _, queued in self._todo.get(lane, ())):
            self._todo.setdefault(lane, []).append((now_ms, command))

    @property
    def lanes(self) -> list[Lane]:
        """Where something is to be done."""
        return sorted((lane for lane, todo in self._todo.items() if todo), key=repr)

    def next(self, lane: Lane) -> Command:
        """What is to be done next in a lane."""
        return self._todo[lane][0][1]

    def work(self, lane: Lane, now_ms: int, slots: int, *, fails: bool = False) -> bool:
        """The next thing of a lane; False when it is a proof that goes on waiting."""
        since, command = self._todo[lane][0]
        pair = (command.token, command.n)
        newest = max((c.token, c.n) for _, c in self._todo[lane])
        if pair < self.marks.get(lane, (0, 0)) or (pair < newest and command.verb == Step.VACATE):
            mark = max(self.marks.get(lane, (0, 0)), newest)
            higher = {"mark": mark[0]} if mark[0] > command.token else {}
            report = answer_to(command, "refused", "overtaken", data=higher)
        else:
            self.marks[lane] = pair
            over = now_ms - since >= int(str(command.args.get("limit_ms", 0)))
            if command.verb == Step.VACATE and not fails and (holders := self._in_the_way(command, now_ms)):
                if not over:
                    return False
                report = self._not_free(command, holders)
            else:
                report = self._carry_out(command, slots, fails=fails)
        self._todo[lane].pop(0)
        self._answers[lane, pair] = report
        self.said.append(report)
        return True

    def carried_out(self, card: str) -> Pair:
        """This order and all before it are carried out."""
        waiting = [(c.token, c.n) for lane, todo in self._todo.items() for _, c in todo if lane[0] == card]
        done = [pair for (lane, pair) in self._answers if lane[0] == card and pair < min(waiting, default=(1 << 63, 0))]
        return max(done, default=(0, 0))

    def _in_the_way(self, command: Command, now_ms: int) -> list[str]:
        for left in cast("Sequence[Mapping[str, object]]", command.args["departed"]):
            holder = self._machine.holders.get(str(left["lease"]))
            if holder is not None and left["pid"] is None and now_ms >= cast("int", left["free_ms"]):
                del self._machine.holders[holder.lease]  # nobody could see it; it had its grace
        departed = {str(left["lease"]) for left in cast("Sequence[Mapping[str, object]]", command.args["departed"])}
        seen = sorted(departed & self._machine.holders.keys())
        short = self._machine.free_mib(command.card) < cast("int", command.args["need_mib"])
        stay = sorted(self._machine.loaded & set(cast("Sequence[str]", command.args["leaving"])))
        return seen or stay or ([*sorted(self._machine.tenants(command.card))] if short else [])

    def _not_free(self, command: Command, holders: list[str]) -> Report:
        free = 0 if any(h in self._machine.holders for h in holders) else self._machine.free_mib(command.card)
        return answer_to(command, "failed", "not free", data={"holders": holders, "free_mib": free})

    def _carry_out(self, command: Command, slots: int, *, fails: bool) -> Report:
        tenant = command.tenant or ""
        if fails:
            return self._not_free(command, []) if not tenant else answer_to(command, "failed", "it would not")
        data: dict[str, object] = {}
        match command.verb:
            case Step.DRAIN if tenant not in self._machine.loaded:
                data = {"gone": True}
            case Step.DRAIN:
                data = {"slots": [{"slot": slot, "tokens": 1000} for slot in range(slots)], **self._kept(tenant)}
            case Step.SAVE | Step.RESTORE if tenant not in self._machine.loaded:
                return answer_to(command, "failed", "nobody is there")
            case Step.SAVE if self._machine.empty:
                data = {"tokens": 0, "bytes": 0}
            case Step.SAVE:
                self._store(tenant, str(command.args["name"]), command)
                data = {"tokens": 1000, "bytes": 1}
            case Step.RELEASE:
                self._machine.loaded.discard(tenant)
            case Step.LOAD if tenant in self._machine.broken:
                return answer_to(command, "failed", "its file is gone")
            case Step.LOAD:
                self._machine.load(tenant)
                data = {"n_slots": 2, "snapshots": self._machine.files.get(tenant, []), **self._kept(tenant)}
            case Step.RESTORE:
                if command.args["snapshot"] not in {kept["snapshot"] for kept in self._machine.files.get(tenant, ())}:
                    return answer_to(command, "failed", "there is no such file")
                if command.args.get("tells") and "takes" not in command.args:
                    data = {"leaves": {"slot": 0, "tokens": 1000, "id": _first(command.args["talks"])}}
                elif "displaced" in command.args:
                    data = {"slot": 0, "displaced": self._store(tenant, str(command.args["displaced"]), command)}
            case _:
                pass
        return answer_to(command, "ok", data=data)

    def _kept(self, tenant: str) -> dict[str, object]:
        ways = self._machine.ways.get(tenant)
        return {} if ways is None else {"strategies": ways, "fingerprint": "one"}

    def _store(self, tenant: str, name: str, command: Command) -> Mapping[str, object]:
        """A snapshot that nobody has a name for where the command gives none; beyond the fourth the oldest goes."""
        whose = cast("Mapping[str, object]", command.args.get("conversation", {}))
        strategy = command.args.get("strategy", "slots")
        about = {"id": whose.get("id", ""), "links": whose.get("links", []), "strategy": strategy}
        kept = {"snapshot": name, "slot": command.args["slot"], "tokens": 1000, "bytes": 1, **about}
        self._machine.files[tenant] = [kept, *self._machine.files.get(tenant, ())][:4]
        return kept


def _first(talks: object) -> object:
    """Whose conversation would have to make room: the first one that is told, if any is."""
    told = cast("Sequence[Mapping[str, object]]", talks)
    return told[0]["id"] if told else ""


@dataclass(slots=True)
class Gateway:
    """One gateway process with its calls; `calls[tenant]` are in flight.

    `talks[tenant]`: the conversations it knows; `recalling`: what it was told to recall and has not answered;
    `wanting`: snapshots that a call of its waits for.
    """

    name: str
    gates: dict[str, Gate]
    calls: Counter[str] = field(default_factory=Counter[str])
    waiting: Counter[str] = field(default_factory=Counter[str])
    said: list[Report] = field(default_factory=list[Report])
    asked_ms: int = 0
    talks: dict[str, list[Mapping[str, object]]] = field(default_factory=dict[str, list[Mapping[str, object]]])
    recalling: list[Command] = field(default_factory=list[Command])
    wanting: set[str] = field(default_factory=set[str])
    _draining: list[Command] = field(default_factory=list[Command])
    _answers: dict[Pair, Report] = field(default_factory=dict[Pair, Report])
    _marks: dict[Lane, Pair] = field(default_factory=dict[Lane, Pair])

    def take(self, command: Command) -> None:
        """An order arrives; epochs order those outside a swap."""
        pair, tenant = (command.token, command.n), command.tenant or ""
        lane = (command.card, command.tenant)
        if command.verb == PASSED:
            return
        if command.verb in (PLACED, SAVED):
            self.wanting.discard(str(command.args["snapshot"]))
            return
        if pair in self._answers and command.token:
            self.said.append(self._answers[pair])
            return
        if command.token and pair < self._marks.get(lane, (0, 0)):
            self._say(command, answer_to(command, "refused", "older"))
            return
        self._marks[lane] = max(pair, self._marks.get(lane, (0, 0)))
        if command.verb == TALKS:
            self._say(command, answer_to(command, "ok", data=self._known(tenant)))
            return
        if command.verb == RECALL:
            self.recalling += [command] if command not in self.recalling else []
            return
        epoch, mine = cast("int", command.args["epoch"]), self.gates.get(tenant, Gate(0, open=False)).epoch
        if command.verb in (Step.CLOSE, Step.OPEN):
            if epoch < mine:
                self._say(command, answer_to(command, "refused", "an older epoch", data={"epoch": mine}))
                return
            self.gates[tenant] = Gate(epoch, open=command.verb == Step.OPEN)
            if command.verb == Step.OPEN:
                self._draining = [c for c in self._draining if c.tenant != tenant]
                self.admit(tenant)
            known = {} if self.calls[tenant] or command.verb == Step.OPEN else self._known(tenant)
            self._say(command, answer_to(command, "ok", data={"in_flight": self.calls[tenant], **known}))
            return
        if command.verb == "cut":
            self.calls[tenant] = 0
        if command not in self._draining:
            self._draining.append(command)
        self.drained()

    def call(self, tenant: str, now_ms: int) -> None:
        """A client calls a model by its name."""
        self.waiting[tenant] += 1
        self.asked_ms = now_ms
        self.admit(tenant)

    def admit(self, tenant: str) -> None:
        """Whoever waits goes through where the gate is open."""
        if self.gates.get(tenant, Gate(0, open=False)).open:
            self.calls[tenant] += self.waiting[tenant]
            self.waiting[tenant] = 0

    def drained(self) -> None:
        """Those who wait for the end of the calls hear of it."""
        for command in [c for c in self._draining if not self.calls[c.tenant or ""]]:
            self._draining.remove(command)
            data = self._known(command.tenant or "") if command.verb == Step.DRAIN else {}
            self._say(command, answer_to(command, "ok", data=data))

    def recalled(self, *, ok: bool) -> None:
        """What it was told to recall stands in a slot, or is not to be had any more."""
        there: dict[str, object] = {"slot": 1, "tokens": 1000, "cache_n": 999, "prompt_n": 1}
        for command in self.recalling:
            gone = answer_to(command, "failed", "it was not in the cache any more")
            self._say(command, answer_to(command, "ok", data=there) if ok else gone)
        self.recalling = []

    def _known(self, tenant: str) -> dict[str, object]:
        return {"talks": self.talks.get(tenant, [])}

    def demand(self) -> tuple[Demand, ...]:
        """What it tells with its beat."""
        names = sorted(t for t in {*self.calls, *self.waiting} if self.calls[t] or self.waiting[t])
        klass = WorkClass.INTERACTIVE
        calls = (Demand(self.name, t, klass, self.waiting[t], self.calls[t], self.asked_ms) for t in names)
        unsaved = sorted(t for t, talks in self.talks.items() if any(not talk.get("restored") for talk in talks))
        return (*calls, *(Demand(self.name, t, WorkClass.BATCH, 0, 0, None, unsaved=True) for t in unsaved))

    def _say(self, command: Command, report: Report) -> None:
        if command.token:
            self._answers[command.token, command.n] = report
            self.said.append(report)
