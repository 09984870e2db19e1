"""The shipped machine keeps its promises in every order of events within the budget, and its mutants do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import answers, byhand, comeback, keeping, machine, policy, saving, steps, turn, unused
from swapper.core.commit import Commit
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.draft import Draft
from swapper.core.errand import Errand, Verb
from swapper.core.spec import Spec
from swapper.core.types import Card, Gate, Lease, LeaseRequest, Step, World
from tests.model.explore import Explored, explore
from tests.model.parts import CARD, Budget, Rules, State, Talking
from tests.support.play import GIB, MED, spec, tenant

SPEC = spec(tenant("med", default=True))
BIG = tenant("big", 20 * GIB)
TWO = spec(tenant("med", default=True), BIG, idle_restore_ms=0)
"""There is room for one of them; the default comes back once nobody calls the other one."""
NOTHING = Budget()


def talk(name: str, tokens: int, used_ms: int, **more: object) -> dict[str, object]:
    return {"id": name, "links": [name], "tokens": tokens, "used_ms": used_ms, "recallable": True, **more}


TALKS = (talk("there", 1_000, 3), talk("in the cache", 700, 2), talk("text lost", 600, 1, recallable=False))
"""One in the model's only slot, one that a recall may bring there, one that nobody has the text of."""


def kept_by(*strategies: str) -> Talking:
    return Talking(TALKS, ({"slot": 0, "tokens": 1000},), strategies)


SLOTS, REWIND, REPLAY, OFF = kept_by("slots"), kept_by("rewind"), kept_by("replay"), kept_by()


UNLOAD, LOAD = Errand("sw_u", CARD, Verb.UNLOAD, (MED,)), Errand("sw_l", CARD, Verb.LOAD, (MED,))
VACATE, FORCE = Errand("sw_v", CARD, Verb.VACATE), Errand("sw_f", CARD, Verb.VACATE, force=True)


def start(leases: int, budget: Budget, talking: Talking | None = None, hands: tuple[Errand, ...] = ()) -> State:
    """The default resident serves; so many whole leases wait; by hand may be asked for, at any time, in this order."""
    waiting = {
        name: Lease(name, LeaseRequest("ann", ttl_ms=1_000, holder_pid=seq), seq, 0)
        for seq, name in enumerate("ab"[:leases], 1)
    }
    card = Card(CARD, residents=(MED,))
    world = World(0, {CARD: card}, waiting, queued=leases, gateways=("g1",), gates={MED: Gate(1, open=True)})
    seen = (frozenset({MED}), False, (0, 0))
    serves = {"loaded": frozenset({MED}), "gate": (1, True), "seen": seen}
    return State(world, budget, talking or Talking(), hands=hands, **serves)  # pyright: ignore[reportArgumentType]


def kept(found: Explored, at_least: int) -> bool:
    """Nothing was broken, and the search was no smaller than it is meant to be."""
    assert found.broken is None, str(found)
    return found.states >= at_least


def test_nothing_happens_but_what_should() -> None:
    assert kept(explore(start(2, NOTHING), SPEC), 90)


@pytest.mark.parametrize(
    ("leases", "budget", "at_least"),
    [
        pytest.param(1, Budget(1, 1, 0, 0, 0, 1), 4_000, id="expiry, crash, two coordinators"),
        pytest.param(1, Budget(1, 1, 1, 0, 0, 0), 1_700, id="expiry, crash, failure"),
        pytest.param(1, Budget(1, 0, 1, 1, 1, 0), 3_000, id="expiry, failure, death, call"),
        pytest.param(1, Budget(0, 0, 1, 1, 0, 1), 16_000, id="failure, death, two coordinators"),
        pytest.param(2, Budget(1, 1, 0, 0, 0, 0), 800, id="two leases, expiry, crash"),
        pytest.param(2, Budget(1, 0, 1, 0, 0, 1), 19_000, id="two leases, expiry, failure, two coordinators"),
        pytest.param(2, Budget(0, 0, 3, 0, 0, 0), 1_000, id="two leases, three failures"),
    ],
)
def test_promises_are_kept_in_every_order(leases: int, budget: Budget, at_least: int) -> None:
    assert kept(explore(start(leases, budget), SPEC), at_least)


@pytest.mark.parametrize(
    ("talking", "budget", "at_least"),
    [
        pytest.param(SLOTS, Budget(expiries=1, crashes=1), 700, id="slots: expiry, crash"),
        pytest.param(SLOTS, Budget(failures=1, losses=1), 2_000, id="slots: failure, loss of the gateway"),
        pytest.param(SLOTS, Budget(looks=1), 1_600, id="slots: two coordinators"),
        pytest.param(SLOTS, Budget(crashes=1, wants=1), 1_100, id="slots: crash, one wanted from disk"),
        pytest.param(REWIND, Budget(crashes=1, failures=1), 2_400, id="rewind: crash, failure"),
        pytest.param(REWIND, Budget(expiries=1, losses=1), 1_300, id="rewind: expiry, loss of the gateway"),
        pytest.param(REWIND, Budget(deaths=1, wants=1), 2_000, id="rewind: death, one wanted from disk"),
        pytest.param(REWIND, Budget(crashes=1, failures=1, wants=1), 1_000, id="rewind: crash, failure, one wanted"),
        pytest.param(REWIND, Budget(losses=1, wants=1), 1_000, id="rewind: loss of the gateway, one wanted"),
        pytest.param(REPLAY, Budget(failures=1, losses=1), 1_000, id="replay: failure, loss of the gateway"),
        pytest.param(OFF, Budget(deaths=1, losses=1), 1_000, id="off: death, loss of the gateway"),
    ],
)
def test_conversations_are_kept_or_stated_in_every_order(talking: Talking, budget: Budget, at_least: int) -> None:
    assert kept(explore(start(1, budget, talking), SPEC), at_least)


@pytest.mark.parametrize(
    ("leases", "hands", "budget", "at_least"),
    [
        pytest.param(0, (UNLOAD, LOAD), Budget(crashes=1, calls=1), 600, id="unload, load: crash, call"),
        pytest.param(0, (UNLOAD, LOAD), Budget(failures=1, looks=1), 4_000, id="unload, load: failure, two looks"),
        pytest.param(1, (UNLOAD,), Budget(crashes=1, expiries=1), 1_600, id="unload: a lease, crash, expiry"),
        pytest.param(1, (LOAD, UNLOAD), Budget(deaths=1), 3_000, id="load, unload: a lease, death"),
        pytest.param(1, (VACATE, LOAD), Budget(failures=1), 3_300, id="vacate, load: a lease, failure"),
        pytest.param(1, (FORCE,), Budget(calls=1, crashes=1), 4_400, id="by force: a lease, call, crash"),
        pytest.param(1, (FORCE,), Budget(looks=1), 6_200, id="by force: a lease, two coordinators"),
    ],
)
def test_what_is_asked_for_by_hand_is_done_once_in_every_order(
    leases: int, hands: tuple[Errand, ...], budget: Budget, at_least: int
) -> None:
    assert kept(explore(start(leases, budget, hands=hands), SPEC), at_least)


@pytest.mark.parametrize(
    ("leases", "budget", "at_least"),
    [
        pytest.param(0, Budget(callers=2, leavers=2), 5_000, id="two calls"),
        pytest.param(0, Budget(callers=1, leavers=1, crashes=1), 900, id="crash"),
        pytest.param(0, Budget(callers=1, leavers=1, failures=1), 2_000, id="failure"),
        pytest.param(0, Budget(callers=1, leavers=1, looks=1), 5_000, id="two coordinators"),
        pytest.param(0, Budget(callers=1, leavers=1, losses=1), 1_500, id="loss of the gateway"),
        pytest.param(1, Budget(callers=1, leavers=1), 2_500, id="a lease"),
    ],
)
def test_a_client_may_leave_at_any_moment_of_the_swap_to_the_model_it_called(
    leases: int, budget: Budget, at_least: int
) -> None:
    assert kept(explore(start(leases, budget), TWO), at_least)


def test_a_load_that_was_given_up_and_not_stopped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "begun", never)
    found = explore(start(0, Budget(callers=1, leavers=1)), TWO)
    assert "there is room for one (S3)" in (found.broken or "")


def test_of_who_is_sent_off_by_hand_conversations_are_kept_or_stated_in_every_order() -> None:
    for talking, budget, at_least in ((SLOTS, Budget(failures=1), 900), (REWIND, Budget(losses=1), 500)):
        assert kept(explore(start(0, budget, talking, (UNLOAD, LOAD)), SPEC), at_least)


def nothing_to_do(_: Draft) -> None:
    """A step that is passed over."""


def never(*_: object, **__: object) -> None:
    """No choice."""


def always(*_: object) -> bool:
    return True


def broken(budget: Budget, rules: Rules | None = None) -> str:
    found = explore(start(2, budget), SPEC, rules)
    print(found)
    return found.broken or ""


def test_without_the_fence_a_late_command_starts_something() -> None:
    assert "(S2)" in broken(NOTHING, Rules(fence=False))


def test_without_the_compare_and_set_a_decision_overwrites_what_it_has_not_seen() -> None:
    assert "had not seen" in broken(Budget(0, 0, 0, 0, 0, 1), Rules(compare_and_set=False))


def test_without_the_proof_a_lease_is_granted_beside_a_holder_that_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps._BEGIN, Step.VACATE, nothing_to_do)  # pyright: ignore[reportPrivateUsage]
    assert "(S1)" in broken(Budget(1, 0, 0, 0, 0, 0))


def test_without_the_drain_a_model_is_unloaded_under_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps._BEGIN, Step.DRAIN, nothing_to_do)  # pyright: ignore[reportPrivateUsage]
    assert "(S4)" in broken(Budget(0, 0, 0, 0, 1, 0))


def test_without_the_way_back_the_card_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_come_back", never)
    assert "(N2)" in broken(NOTHING)


def test_believing_what_was_seen_before_an_order_was_carried_out_never_comes_to_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turn._Fold, "_fresh", always)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="more than 2000 states"):
        explore(start(2, NOTHING), SPEC, limit=2_000)


def test_a_lease_whose_swap_was_given_up_must_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(draft: Draft, reason: str) -> None:
        draft.alert(reason)

    monkeypatch.setattr(answers, "give_up", forgets)
    assert "(N1)" in broken(Budget(0, 0, 3, 0, 0, 0))


def by_hand(*hands: Errand) -> str:
    found = explore(start(0, NOTHING, hands=hands), SPEC)
    print(found)
    return found.broken or ""


def test_who_is_sent_off_by_hand_and_not_kept_off_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(_spec: Spec, card: Card, *_: object) -> Card:
        return card

    monkeypatch.setattr(unused, "sent_off", forgets)
    assert "sent off by hand" in by_hand(UNLOAD)


def test_a_load_that_waits_is_taken_back_by_the_unload_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    do = byhand._do  # pyright: ignore[reportPrivateUsage]

    def sees_none_after(draft: Draft, errand: Errand, before: list[Errand], _after: list[Errand]) -> Commit | None:
        return do(draft, errand, before, ())

    monkeypatch.setattr(byhand, "_do", sees_none_after)
    assert "sent off by hand" in by_hand(UNLOAD, LOAD, replace(UNLOAD, id="sw_again"))


def kept_badly(budget: Budget, talking: Talking = REWIND) -> str:
    found = explore(start(1, budget, talking), SPEC)
    print(found)
    return found.broken or ""


def test_a_model_that_is_told_to_leave_beside_its_recalls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = steps._BEGIN  # pyright: ignore[reportPrivateUsage]
    save, release = begin[Step.SAVE], begin[Step.RELEASE]

    def both(draft: Draft) -> None:
        save(draft)
        release(draft)

    monkeypatch.setitem(begin, Step.SAVE, both)
    assert "(S4)" in kept_badly(NOTHING)


def test_a_recall_that_is_not_awaited_leaves_its_conversation_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    recall = keeping.recall

    def sent(draft: Draft, tenant: str) -> bool:
        went = recall(draft, tenant)
        draft.update(pending=tuple(c for c in draft.swap.pending if c.verb != keeping.RECALL))
        return went

    monkeypatch.setattr(keeping, "recall", sent)
    assert "neither saved nor stated (N3)" in kept_badly(NOTHING)


def test_a_recall_of_a_gateway_that_is_gone_must_not_be_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_lost_gateways", never)
    assert "(N1)" in kept_badly(Budget(losses=1))


def test_what_a_gateway_said_and_nobody_noted_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "note_known", never)
    assert "nothing is said of" in kept_badly(NOTHING)


def test_what_cannot_be_kept_must_be_stated_before_its_model_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saving.plan_saves

    def without_the_lost(*told: object) -> tuple[Conversation, ...]:
        lines = whole(*told)  # pyright: ignore[reportArgumentType]
        return tuple(c for c in lines if c.result is not ProofResult.COLD)

    monkeypatch.setattr(saving, "plan_saves", without_the_lost)
    assert "nothing is said of ['text lost'] (N3)" in kept_badly(NOTHING)


def test_a_line_that_is_dropped_as_a_model_comes_back_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> tuple[Conversation, ...]:
        return ()

    monkeypatch.setattr(comeback, "of_tenant", none)
    assert "which was saved (N3)" in kept_badly(NOTHING)


def test_who_waits_for_a_conversation_from_disk_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_say_placed", never)
    assert "what became of the conversation" in kept_badly(Budget(wants=1))
