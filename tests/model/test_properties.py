"""The shipped core under whatever clients, executors, clocks and accidents do, in random order; see rig.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swapper.core.commit import Commit
from swapper.core.conversations import ProofResult
from swapper.core.errand import Verb
from swapper.core.spec import CardSpec, PolicySpec, Spec, TenantSpec
from swapper.core.types import FINAL, Gate, LeaseRequest, Step, WorkClass, World
from tests.model import said
from tests.model.rig import Rig
from tests.support.play import DRAIN

TOTAL, RESERVE = 24, 2
ROOM = TOTAL - RESERVE
EXAMPLES, STEPS = 400, 50
VERBS = st.sampled_from([Step.DRAIN, Step.SAVE, Step.RELEASE, Step.VACATE, Step.LOAD, Step.RESTORE])
SOME_MS = st.sampled_from([1, 500, 5_000, 30_000, 61_000, 130_000, 700_000])
THEN = st.sampled_from(["go on", "look", "nothing"])
"""What the coordinator does at once, and perhaps the executors."""
TRAITS = ("default", "evict_never", "save", "save_required", "sweep")
WAYS = st.sampled_from([["slots", "replay"], ["slots"], ["rewind", "replay"], ["replay"], []])
TALKS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from("abcd"),
            "links": st.just([]),
            "tokens": st.sampled_from([0, 70, 700, 1000]),
            "used_ms": st.integers(1, 9),
            "recallable": st.booleans(),
            "slot": st.sampled_from([None, None, 0, 1]),
            "restored": st.booleans(),
            "snapshot": st.sampled_from([None, None, "older"]),
        }
    ),
    max_size=4,
    unique_by=lambda talk: str(talk["id"]),
)
"""What a gateway knows: each conversation once."""


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """One or two cards, a few tenants whose keepers fit together, and everybody else beside those who never leave."""
    cards = ["gpu0", "gpu1"][: draw(st.integers(1, 2))]
    tenants: dict[str, TenantSpec] = {}
    for number in range(draw(st.integers(1, 4))):
        card = draw(st.sampled_from(cards))
        traits = {trait: draw(st.booleans()) and draw(st.booleans()) for trait in TRAITS}
        traits["default"] = traits["default"] or not number
        every_ms = draw(st.sampled_from([None, None, 20_000]))
        need_mib = draw(st.sampled_from([3, 7, 12, 20]))
        mine = replace(TenantSpec(f"m{number}", "llama", card, "main", need_mib, every_ms=every_ms), **traits)
        if _fit([*tenants.values(), mine], card):
            tenants[mine.id] = mine
    policy = PolicySpec(DRAIN, on_drain_limit=draw(st.sampled_from(["end", "reopen"])))
    return Spec({name: CardSpec(name, TOTAL, RESERVE) for name in cards}, tenants, policy)


def _fit(tenants: list[TenantSpec], card: str) -> bool:
    here = [t for t in tenants if t.card == card]
    stay = sum(t.need_mib for t in here if t.evict_never)
    kept = sum(t.need_mib for t in here if t.default or t.evict_never)
    most = max((t.need_mib for t in here if not t.evict_never), default=0)
    return kept <= ROOM and stay + most <= ROOM


class Everything(RuleBasedStateMachine):
    """Rules are what others do; the coordinator answers each at once, or later, or on what it read before."""

    rig: Rig
    view: tuple[World, Commit] | None = None

    @initialize(spec=specs())
    def begin(self, spec: Spec) -> None:
        self.rig = Rig(spec)
        self.view = None
        self.rig.join("g1")
        self.rig.settle()
        self.it_goes_on()

    # Clients.

    @rule(data=st.data(), klass=st.sampled_from(WorkClass), pid=st.booleans(), then=THEN)
    def somebody_asks(self, data: st.DataObject, klass: WorkClass, pid: bool, then: str) -> None:
        spec = self.rig.spec
        card = data.draw(st.sampled_from([None, *spec.cards]))
        least = min(self._room(name) for name in ([card] if card else spec.cards))
        vram = data.draw(st.none() | st.integers(1, least)) if least else None
        dated = data.draw(st.sampled_from([False, False, False, True]))
        later = st.none() | SOME_MS.map(lambda ms: self.rig.now + ms) if dated else st.none()
        request = LeaseRequest(
            data.draw(st.sampled_from(["ann", "ben"])),
            card,
            vram,
            klass=klass,
            ttl_ms=data.draw(st.sampled_from([3_600_000, 30_000, 1_000])),
            max_hold_ms=data.draw(st.sampled_from([3_600_000, 60_000])),
            not_before_ms=data.draw(later),
            deadline_ms=data.draw(later),
            holder_pid=7 if pid else None,
        )
        self.rig.ask(request)
        self._then(then)

    def _room(self, card: str) -> int:
        """What a partial lease may get there."""
        stay = (t for t in self.rig.spec.tenants.values() if t.card == card and t.evict_never)
        return ROOM - sum(t.need_mib for t in stay)

    @precondition(lambda self: self._active())
    @rule(data=st.data(), stays=st.booleans(), then=THEN)
    def a_client_ends_its_lease(self, data: st.DataObject, stays: bool, then: str) -> None:
        """Mostly one that holds the card."""
        granted = [name for name in self._active() if self.rig.lease(name).token]
        self.rig.end(data.draw(st.sampled_from(granted or self._active())), stays=stays)
        self._then(then)

    @precondition(lambda self: self._active())
    @rule(data=st.data(), right=st.booleans())
    def a_heartbeat(self, data: st.DataObject, right: bool) -> None:
        name = data.draw(st.sampled_from(self._active()))
        before = self.rig.lease(name)
        self.rig.library.heartbeat(self.rig.now, name, (before.token or 0) + (not right), None)
        after = self.rig.lease(name)
        assert after.state is before.state
        assert (after.expires_ms or 0) >= (before.expires_ms or 0)

    @precondition(lambda self: bool(self.rig.machine.holders))
    @rule(data=st.data())
    def a_holder_exits(self, data: st.DataObject) -> None:
        del self.rig.machine.holders[data.draw(st.sampled_from(sorted(self.rig.machine.holders)))]

    @precondition(lambda self: bool(self.rig.gateways))
    @rule(data=st.data(), then=THEN)
    def a_call(self, data: st.DataObject, then: str) -> None:
        gateway = self.rig.gateways[data.draw(st.sampled_from(sorted(self.rig.gateways)))]
        gateway.call(data.draw(st.sampled_from(sorted(self.rig.spec.tenants))), self.rig.now)
        self.rig.beat(gateway.name)
        self._then(then)

    @precondition(lambda self: bool(self.rig.gateways))
    @rule(data=st.data(), waiting=st.booleans())
    def calls_end(self, data: st.DataObject, waiting: bool) -> None:
        gateway = self.rig.gateways[data.draw(st.sampled_from(sorted(self.rig.gateways)))]
        (gateway.waiting if waiting else gateway.calls).clear()
        gateway.drained()
        self.rig.beat(gateway.name)

    @rule(data=st.data(), verb=st.sampled_from(Verb), force=st.booleans(), drain_ms=st.none() | SOME_MS, then=THEN)
    def somebody_does_it_by_hand(
        self, data: st.DataObject, verb: Verb, force: bool, drain_ms: int | None, then: str
    ) -> None:
        tenant = self.rig.spec.tenants[data.draw(st.sampled_from(sorted(self.rig.spec.tenants)))]
        if verb is Verb.VACATE:
            self.rig.by_hand(verb, tenant.card, force=force)
        else:
            self.rig.by_hand(verb, tenant.card, tenant.id, drain_ms=drain_ms if verb is Verb.UNLOAD else None)
        self._then(then)

    # Executors.

    @precondition(lambda self: bool(self.rig.agent.lanes))
    @rule(data=st.data(), slots=st.integers(0, 2), fails=st.sampled_from([False, False, False, True]))
    def the_agent_works(self, data: st.DataObject, slots: int, fails: bool) -> None:
        self.rig.work(data.draw(st.sampled_from(self.rig.agent.lanes)), slots, fails=fails)

    @precondition(lambda self: bool(self.rig.said()))
    @rule(data=st.data(), forget=st.sampled_from([True, True, False]))
    def an_answer_is_heard(self, data: st.DataObject, forget: bool) -> None:
        told, at = data.draw(st.sampled_from(self.rig.said()))
        report = told.pop(at) if forget else told[at]
        self.rig.hear(report)

    @rule(slots=st.integers(0, 2), until=st.none() | VERBS, fails=st.none() | VERBS, recalls=st.booleans())
    def it_goes_on(
        self, slots: int = 1, until: Step | None = None, fails: Step | None = None, recalls: bool = True
    ) -> None:
        """Orders are carried out and answers heard until somebody has to wait, or the order `until` comes."""
        for _ in range(40):
            lanes = [lane for lane in self.rig.agent.lanes if self.rig.agent.next(lane).verb != until]
            went = [self.rig.work(lane, slots, fails=self.rig.agent.next(lane).verb == fails) for lane in lanes]
            if recalls:
                self.recalls_end(ok=True)
            for told, _at in self.rig.said():
                while told:
                    self.rig.hear(told.pop(0))
                    went.append(True)
            if not any(went):
                return

    @precondition(lambda self: bool(self.rig.orders))
    @rule(data=st.data())
    def an_order_arrives_again(self, data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(self.rig.orders[-30:]))
        before = self.rig.machine.loaded.copy()
        self.rig.deliver(command)
        assert self.rig.machine.loaded == before

    @precondition(lambda self: bool(self.rig.heard))
    @rule(data=st.data())
    def an_old_answer_is_heard(self, data: st.DataObject) -> None:
        """Whatever was heard once changes nothing when it comes again."""
        report = data.draw(st.sampled_from(self.rig.heard))
        self.rig.settle()
        before = self.rig.read()
        if report.outcome != "refused":
            self.rig.settle((report,))
            assert self.rig.read() == before

    @rule(waits=st.booleans())
    def the_agent_looks(self, waits: bool) -> None:
        seen = self.rig.look()
        if not waits:
            self.rig.see(seen)

    @precondition(lambda self: bool(self.rig.looks))
    @rule(data=st.data())
    def an_old_look_is_told(self, data: st.DataObject) -> None:
        seen = data.draw(st.sampled_from(self.rig.looks[-6:]))
        self.rig.see(seen)
        before = self.rig.read()
        self.rig.see(seen)
        assert self.rig.read() == before

    @precondition(lambda self: bool(self.rig.machine.loaded))
    @rule(data=st.data())
    def a_tenant_dies(self, data: st.DataObject) -> None:
        self.rig.machine.loaded.discard(data.draw(st.sampled_from(sorted(self.rig.machine.loaded))))

    @precondition(lambda self: any(not t.default for t in self.rig.spec.tenants.values()))
    @rule(data=st.data())
    def a_model_cannot_be_loaded_any_more(self, data: st.DataObject) -> None:
        others = [t.id for t in self.rig.spec.tenants.values() if not t.default]
        self.rig.machine.broken.add(data.draw(st.sampled_from(others)))

    # Conversations.

    @precondition(lambda self: bool(self._lines(ProofResult.UNPROVED)))
    @rule(data=st.data(), warm=st.booleans(), continued=st.booleans())
    def an_answer_shows_what_was_reused(self, data: st.DataObject, warm: bool, continued: bool) -> None:
        swap, at = data.draw(st.sampled_from(self._lines(ProofResult.UNPROVED)))
        said.prove(self.rig, swap, at, ProofResult.WARM if warm else ProofResult.COLD, continued=continued)

    @precondition(lambda self: bool(self._lines(None)))
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "failed"]))
    def a_replay_is_told_of(self, data: st.DataObject, outcome: str) -> None:
        said.replayed(self.rig, *data.draw(st.sampled_from(self._lines(None))), outcome)

    @precondition(lambda self: bool(self.rig.gateways))
    @rule(data=st.data(), talks=TALKS)
    def a_gateway_knows_conversations(self, data: st.DataObject, talks: list[dict[str, object]]) -> None:
        gateway = self.rig.gateways[data.draw(st.sampled_from(sorted(self.rig.gateways)))]
        gateway.talks[data.draw(st.sampled_from(sorted(self.rig.spec.tenants)))] = [*talks]

    @rule(data=st.data(), ways=WAYS, empty=st.booleans())
    def conversations_are_kept_otherwise(self, data: st.DataObject, ways: list[str], empty: bool) -> None:
        self.rig.machine.ways[data.draw(st.sampled_from(sorted(self.rig.spec.tenants)))] = ways
        self.rig.machine.empty = empty

    @precondition(lambda self: any(gateway.recalling for gateway in self.rig.gateways.values()))
    @rule(ok=st.booleans())
    def recalls_end(self, ok: bool) -> None:
        for gateway in self.rig.gateways.values():
            gateway.recalled(ok=ok)

    @precondition(lambda self: bool(self.rig.gateways))
    @rule(data=st.data(), then=THEN)
    def a_call_wants_a_conversation_from_disk(self, data: st.DataObject, then: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.rig.gateways)))
        tenant = data.draw(st.sampled_from(sorted(self.rig.spec.tenants)))
        files = [str(kept["snapshot"]) for kept in self.rig.machine.files.get(tenant, ())]
        said.want(self.rig, name, tenant, data.draw(st.sampled_from([*files, "gone"])))
        self._then(then)

    # Processes and time.

    @precondition(lambda self: len(self.rig.gateways) < 3)
    @rule(data=st.data(), then=THEN, between=st.booleans())
    def a_gateway_joins(self, data: st.DataObject, then: str, between: bool) -> None:
        """Perhaps between the coordinator's reading and its writing, with a call at once."""
        world = self.rig.read()
        commit = self.rig.decide(world).commit if between else None
        self.rig.join(name := self.rig.name("g"))
        if between:
            self.rig.gateways[name].call(data.draw(st.sampled_from(sorted(self.rig.spec.tenants))), self.rig.now)
            self.rig.beat(name)
        if commit is not None:
            self.rig.commit(world, commit)
        self._then(then)

    @precondition(lambda self: bool(self.rig.gateways))
    @rule(data=st.data(), said=st.booleans(), then=THEN)
    def a_gateway_leaves(self, data: st.DataObject, said: bool, then: str) -> None:
        self.rig.gone(data.draw(st.sampled_from(sorted(self.rig.gateways))), said=said)
        self._then(then)

    @rule(ms=SOME_MS, then=THEN)
    def time_passes(self, ms: int, then: str) -> None:
        self.rig.pass_time(ms)
        self._then(then)

    @rule()
    def the_coordinator_looks(self) -> None:
        self.rig.settle()

    @rule(answers=st.booleans())
    def another_coordinator_decides(self, answers: bool) -> None:
        """It reads and decides, and is slow to write: see the next rule."""
        world = self.rig.read()
        waiting = [told[at] for told, at in self.rig.said()][:2] if answers else []
        commit = self.rig.decide(world, [r for r in waiting if r.outcome != "refused"]).commit
        self.view = (world, commit) if commit is not None else None

    @precondition(lambda self: self.view is not None)
    @rule()
    def the_other_coordinator_writes(self) -> None:
        assert self.view is not None
        self.rig.commit(*self.view)
        self.view = None

    @rule(lane=st.sampled_from(["", "m0", "m1"]), ahead=st.integers(1, 1 << 22))
    def an_agent_knows_a_higher_token(self, lane: str, ahead: int) -> None:
        """The store is an older copy: what it orders next is refused."""
        card = self.rig.spec.tenants[lane].card if lane in self.rig.spec.tenants else "gpu0"
        self.rig.agent.marks[card, lane or None] = (self.rig.read().next_token + ahead, 1)

    @precondition(lambda self: bool(self.rig.gateways))
    @rule(data=st.data())
    def a_gateway_knows_a_higher_epoch(self, data: st.DataObject) -> None:
        gateway = self.rig.gateways[data.draw(st.sampled_from(sorted(self.rig.gateways)))]
        for tenant, gate in [*gateway.gates.items()]:
            gateway.gates[tenant] = Gate(gate.epoch + 2, open=gate.open)

    # What must hold.

    @invariant()
    def everything_fits_together(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.rest()
            self.rig.check()
            self.rig.folded()

    def _then(self, then: str) -> None:
        match then:
            case "look":
                self.rig.settle()
            case "go on":
                self.rig.settle()
                self.it_goes_on()
            case _:
                pass

    def _active(self) -> list[str]:
        return [name for name in self.rig.asked if self.rig.lease(name).state not in FINAL]

    def _lines(self, result: ProofResult | None) -> list[tuple[str, int]]:
        """(swap, nth) of the conversations that are known to be so."""
        return [
            (swap.id, at)
            for swap in self.rig.library.swaps(5, None)
            for at, talk in enumerate(swap.conversations)
            if talk.result is result and (result is not None or (talk.strategy == "replay" and talk.tenant in swap.to))
        ]


@pytest.mark.timeout(400)
def test_the_core_keeps_its_promises_whatever_happens() -> None:
    """To find a failure's shortest story takes longer than a test otherwise may."""
    run_state_machine_as_test(
        Everything,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
