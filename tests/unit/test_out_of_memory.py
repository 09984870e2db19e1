"""A model that runs out of memory as it is loaded: one resident more leaves for it, once, and it is tried again."""

from __future__ import annotations

from dataclasses import replace

from swapper.core.types import LeaseState
from tests.support.play import GIB, MED, SMALL, Play, spec, tenant

BIG = "llama/big"
OOM = "cudaMalloc failed: out of memory"


def play(*residents: str) -> Play:
    return Play(spec(tenant("med", default=True), tenant("small", 4 * GIB), tenant("big", 10 * GIB)), *residents)


def runs_out(found: Play) -> None:
    """Every load of the big one fails, until it is told so."""
    found.run(until="load")
    swap = found.swap.id
    while found.card.swap is not None and found.swap.id == swap and found.swap.stage == "load":
        found.answer(found.pending("load"), ok=False, detail=OOM, out_of_memory=True)


def crowded() -> Play:
    """It fits beside both by its need, and does not."""
    found = play(MED, SMALL)
    found.demand((BIG, 1, 0))
    found.decide()
    assert found.swap.from_ == ()
    runs_out(found)
    return found


def test_one_more_leaves_by_value_and_it_is_tried_again_at_once() -> None:
    found = crowded()
    assert found.card.residents == (MED, SMALL)
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((SMALL,), (BIG,))
    found.run()
    assert found.card.residents == (MED, BIG)
    assert found.card.failed == {}


def test_it_is_said_who_leaves_for_it() -> None:
    found = crowded()
    (alert,) = [alert for commit in found.commits for alert in commit.alerts]
    assert alert.text == (
        f"{BIG} ran out of memory while it was loaded; {SMALL} leaves as well, and it is tried once more: {OOM}"
    )


def test_the_second_time_it_rests_and_who_left_for_it_comes_back() -> None:
    found = crowded()
    found.decide()
    runs_out(found)
    assert found.swap.back
    assert found.swap.to == (SMALL,)
    found.run()
    assert found.card.failed[BIG].retry_ms > found.world.now_ms
    assert not found.decide()


def test_where_nobody_is_left_to_leave_it_rests_at_once() -> None:
    found = play()
    found.spec = spec(tenant("big", 10 * GIB), tenant("small", 4 * GIB, evict_never=True))
    found.demand((BIG, 1, 0))
    found.decide()
    runs_out(found)
    assert found.card.failed[BIG].retry_ms > found.world.now_ms
    assert not found.decide()


def test_another_failure_sends_nobody_away() -> None:
    found = play(MED, SMALL)
    found.demand((BIG, 1, 0))
    found.decide()
    found.run(until="load")
    while found.card.swap is not None and found.swap.stage == "load":
        found.answer(found.pending("load"), ok=False, detail="no such file")
    assert found.card.residents == (MED, SMALL)
    found.pass_time(60_000)
    found.decide()
    assert found.swap.from_ == ()


def test_who_comes_back_after_a_lease_may_push_out_one_that_is_not_owed() -> None:
    found = play(SMALL)
    found.world = replace(
        found.world, cards={"gpu0": replace(found.card, return_to=(MED,), return_lease="r", residents=(SMALL,))}
    )
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((), (MED,))
    runs_out(found)
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((SMALL,), (MED,))


def test_what_comes_beside_it_stays() -> None:
    found = play(SMALL)
    found.enqueue("a")
    found.decide()
    found.run()
    found.end("a")
    found.spec = spec(tenant("small", 4 * GIB), tenant("big", 10 * GIB), tenant("med"))
    found.world = replace(found.world, cards={"gpu0": replace(found.card, return_to=(SMALL, BIG))})
    found.decide()
    assert found.swap.to == (SMALL, BIG)
    found.run(until="load")
    first, second = sorted(found.swap.pending, key=lambda command: command.tenant == BIG)
    found.answer(first)
    while found.card.swap is not None and any(c.tenant == BIG for c in found.swap.pending):
        (again,) = [c for c in found.swap.pending if c.tenant == BIG]
        found.answer(again, ok=False, detail=OOM, out_of_memory=True)
    del second
    found.run()
    assert SMALL in found.card.residents
    assert found.ended["a"].state is LeaseState.RELEASED


def owed_both(first: str, second: str) -> Play:
    """After a lease both are owed; one came, and beside it the other ran out of memory."""
    found = play(first)
    owed = replace(found.card, return_to=(second, first), return_lease="r")
    found.world = replace(found.world, cards={"gpu0": owed})
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((), (second,))
    runs_out(found)
    return found


def test_a_default_that_is_owed_pushes_out_one_that_is_owed_as_well_and_would_keep_it_away() -> None:
    found = owed_both(SMALL, MED)
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((SMALL,), (MED,))
    found.run()
    assert found.card.residents == (MED,)


def test_for_one_that_is_owed_no_default_leaves_and_nobody_is_said_to() -> None:
    found = owed_both(MED, SMALL)
    (alert,) = [alert for commit in found.commits for alert in commit.alerts]
    assert alert.text == f"{SMALL} could not be loaded: {OOM}"
    assert found.card.failed[SMALL].retry_ms > found.world.now_ms
    found.decide()
    assert found.card.swap is None
