"""A client that leaves while the model it called comes: the swap turns back, or is finished where that is shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import abandoned
from swapper.core.abandoned import GRACE_MS, NEARLY_MS
from swapper.core.conversations import ProofResult
from swapper.core.types import Step, WorkClass
from tests.support.play import GIB, MED, SAVED, SLOTS, Play, offers, spec, tenant

BIG = "llama/big"
OTHER = "llama/other"


def play(*residents: str, loads: dict[str, int] | None = None) -> Play:
    """`big` fits beside nobody; a client calls it."""
    found = Play(spec(tenant("med"), tenant("big", 20 * GIB), tenant("other", 20 * GIB)), *residents)
    found.world = replace(found.world, cards={"gpu0": replace(found.card, loads=loads or {})})
    found.demand((BIG, 1, 0))
    found.decide()
    return found


def reached(step: Step, *residents: str, loads: dict[str, int] | None = None) -> Play:
    found = play(*(residents or (MED,)), loads=loads)
    found.run(until=step, drain={"slots": SLOTS}, save=SAVED)
    assert found.swap.stage is step
    return found


def gives_up(found: Play, after_ms: int = GRACE_MS) -> bool:
    """Whether the swap turns back now that nobody has waited for so long."""
    commit = abandoned.due(found.world, found.spec, found.card, found.world.now_ms - after_ms)
    if commit is not None:
        found.apply(commit)
    return commit is not None


@pytest.mark.parametrize("step", [Step.CLOSE, Step.DRAIN, Step.SAVE])
def test_before_the_release_it_reopens_at_once_and_nothing_was_unloaded(step: Step) -> None:
    found = reached(step)
    swap_id = found.swap.id
    found.demand()
    assert gives_up(found, after_ms=0)
    assert found.verbs() == ["open"]
    found.run()
    swap = found.log[swap_id]
    assert (swap.outcome, swap.reason) == ("compensated", f"nobody waits for {BIG} any more")
    assert found.card.residents == (MED,)
    assert found.world.gates[MED].open
    assert not any(command.verb == "release" for commit in found.commits for command in commit.commands)


def test_while_the_proof_runs_those_who_left_come_back_with_their_conversations() -> None:
    found = reached(Step.VACATE)
    saved = offers(found)
    found.demand()
    assert gives_up(found)
    found.run(load={"n_slots": 2, "snapshots": saved})
    assert found.card.residents == (MED,)
    (swap,) = found.log.values()
    assert [talk.result for talk in swap.conversations] == [ProofResult.UNPROVED] * 2
    assert not any(r.tenant == BIG and r.step is Step.LOAD for r in swap.steps)


def test_what_is_being_loaded_is_stopped_and_seen_gone_before_those_who_left_come_back() -> None:
    found = reached(Step.LOAD)
    load, saved = found.pending("load"), offers(found)
    found.demand()
    assert gives_up(found)
    assert [(c.verb, c.tenant) for c in found.swap.pending] == [("release", BIG)]
    assert found.pending("release").n > load.n
    found.answer(load)
    assert found.verbs() == ["release"]
    found.answer(found.pending("release"))
    assert found.verbs() == ["vacate"]
    found.run(load={"n_slots": 2, "snapshots": saved})
    (swap,) = found.log.values()
    assert found.card.residents == (MED,)
    assert [r.step for r in swap.steps if r.tenant == BIG] == [Step.LOAD, Step.RELEASE]
    assert all(talk.restored for talk in swap.conversations)


def test_what_does_not_stop_has_to_be_seen_gone_by_the_proof() -> None:
    found = reached(Step.LOAD)
    found.demand()
    gives_up(found)
    for _ in range(2):
        found.answer(found.pending("release"), ok=False, detail="it is still there")
    assert found.pending("vacate").args["leaving"] == [BIG]


def test_the_conversations_of_what_was_stopped_wait_on() -> None:
    """They are on disk from its last visit, and come back with it."""
    found = reached(Step.LOAD)
    kept = replace(next(iter(found.card.saved)), tenant=BIG, snapshot="from before")
    found.world = replace(found.world, cards={"gpu0": replace(found.card, saved=(kept,))})
    found.demand()
    gives_up(found)
    found.run(until="vacate")
    assert kept in found.card.saved


def test_after_the_release_a_client_that_comes_back_soon_finds_its_swap_going_on() -> None:
    found = reached(Step.LOAD)
    found.demand()
    assert not gives_up(found, after_ms=GRACE_MS - 1)
    found.demand((BIG, 1, 0))
    assert not gives_up(found)


def test_since_when_nobody_waits_is_noted_and_forgotten_once_somebody_does() -> None:
    found, unwanted = reached(Step.LOAD), dict[str, int]()
    abandoned.note(found.world, found.spec, unwanted)
    assert unwanted == {}
    found.demand()
    since = found.world.now_ms
    for _ in range(2):
        abandoned.note(found.world, found.spec, unwanted)
        assert unwanted == {"gpu0": since}
        found.pass_time(500)
    found.demand((BIG, 1, 0))
    abandoned.note(found.world, found.spec, unwanted)
    assert unwanted == {}


@pytest.mark.parametrize(
    ("loads", "so_far_ms", "back"),
    [
        pytest.param({}, 3_000, True, id="nothing was measured"),
        pytest.param({BIG: 60_000}, 3_000, True, id="what comes back was not"),
        pytest.param({BIG: 60_000, MED: 8_000}, 3_000, True, id="most of it is still to come"),
        pytest.param({BIG: 60_000, MED: 8_000}, 53_000, False, id="what is left is less than the way back"),
        pytest.param({BIG: 10_000, MED: 8_000}, 15_000, False, id="any moment now"),
        pytest.param({BIG: 10_000, MED: 8_000}, 21_000, True, id="it takes far longer than it did"),
    ],
)
def test_with_nobody_else_waiting_what_is_left_is_held_against_the_way_back(
    loads: dict[str, int], so_far_ms: int, back: bool
) -> None:
    found = reached(Step.LOAD, loads=loads)
    found.pass_time(so_far_ms)
    found.demand()
    assert gives_up(found) is back


@pytest.mark.parametrize(("left_ms", "back"), [(NEARLY_MS + 1, True), (NEARLY_MS, False)])
@pytest.mark.parametrize("who", ["a call", "a lease"])
def test_where_others_wait_only_a_load_that_is_nearly_over_is_finished(who: str, left_ms: int, back: bool) -> None:
    found = reached(Step.LOAD, loads={BIG: 60_000, MED: 60_000})
    found.pass_time(60_000 - left_ms)
    found.demand(*([(OTHER, 1, 0)] if who == "a call" else []))
    if who == "a lease":
        found.enqueue("a", WorkClass.BATCH)
    assert gives_up(found) is back


def test_onto_an_empty_card_it_is_finished_unless_others_wait() -> None:
    found = play()
    found.run(until="load")
    assert found.swap.from_ == ()
    found.demand()
    assert not gives_up(found)
    found.demand((OTHER, 1, 0))
    assert gives_up(found)
    found.run()
    assert found.card.residents == ()
    found.decide()
    assert found.swap.to == (OTHER,)


@pytest.mark.parametrize("step", [Step.RESTORE, Step.OPEN])
def test_what_is_loaded_stays(step: Step) -> None:
    found = reached(Step.LOAD)
    snapshot = {"snapshot": "s", "slot": 0, "tokens": 2_000, "bytes": 1}
    found.run(until=step, load={"n_slots": 1, "snapshots": [snapshot]})
    assert found.swap.stage is step
    found.demand((OTHER, 1, 0))
    assert not gives_up(found)


def test_what_left_is_gone_first_before_it_turns_back() -> None:
    """A release under way cannot be taken back."""
    found = reached(Step.RELEASE)
    found.demand()
    assert not gives_up(found)
    found.run(until="vacate")
    assert gives_up(found)


def test_who_comes_back_after_a_lease_does_not_need_a_caller() -> None:
    found = Play(spec(tenant("med", default=True)))
    found.decide()
    assert found.swap.to == (MED,)
    assert not gives_up(found)


def test_without_a_gateway_nobody_knows_who_waits() -> None:
    found = reached(Step.LOAD)
    found.demand()
    found.gateways()
    assert not gives_up(found)


def test_what_a_load_took_is_remembered() -> None:
    found = reached(Step.LOAD)
    found.pass_time(12_345)
    found.run()
    assert found.card.loads == {BIG: 12_345}
