"""The shipped machine keeps its promises in every order of events within the budget, and its mutants do not."""

from __future__ import annotations

import pytest

from swapper.core import answers, policy, steps, turn
from swapper.core.draft import Draft
from swapper.core.types import Card, Gate, Lease, LeaseRequest, Step, World
from tests.model.explore import Explored, explore
from tests.model.parts import CARD, Budget, Rules, State
from tests.support.play import MED, spec, tenant

SPEC = spec(tenant("med", default=True))
NOTHING = Budget()


def start(leases: int, budget: Budget) -> State:
    """The default resident serves; so many whole leases wait."""
    waiting = {
        name: Lease(name, LeaseRequest("ann", ttl_ms=1_000, holder_pid=seq), seq, 0)
        for seq, name in enumerate("ab"[:leases], 1)
    }
    card = Card(CARD, residents=(MED,))
    world = World(0, {CARD: card}, waiting, queued=leases, gateways=("g1",), gates={MED: Gate(1, open=True)})
    return State(world, budget, loaded=frozenset({MED}), gate=(1, True), seen=(frozenset({MED}), False, (0, 0)))


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
