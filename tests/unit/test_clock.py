"""The store's clock is stepped, or our service has a gap: what is on record keeps the time it had left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import machine
from swapper.core.clock import STEP_MS, Look, between, moved, step_between
from swapper.core.types import Departed, Failure, Fault, LeaseState
from tests.support.play import MED, Play, granted, spec, tenant

HOUR = 3_600_000
STEPS = pytest.mark.parametrize("step_ms", [HOUR, -HOUR], ids=["ahead", "back"])


def stepped(play: Play, step_ms: int) -> None:
    """The store's clock is stepped, and its records follow."""
    play.pass_time(step_ms)
    commit = moved(play.world, play.spec, step_ms)
    assert commit is not None
    play.apply(commit)


def ended(play: Play) -> list[LeaseState]:
    play.decide()
    return [lease.state for lease in play.ended.values() if lease.state is not LeaseState.GRANTED]


def test_a_step_is_what_the_two_clocks_do_not_share() -> None:
    then = Look(1_000_000, 0, 0, 10)
    assert step_between(then, Look(1_100_000, 0, 100_000, 100_010)) == 0
    assert step_between(then, Look(1_100_000 + HOUR, 0, 100_000, 100_010)) == HOUR - 10
    assert step_between(then, Look(1_100_000 - HOUR, 0, 100_000, 100_010)) == 10 - HOUR


def test_drift_and_latency_are_no_step() -> None:
    then = Look(1_000_000, 0, 0, 0)
    for off_ms in (STEP_MS, -STEP_MS):
        assert step_between(then, Look(1_060_000 + off_ms, 0, 60_000, 60_000)) == 0


def test_a_look_in_the_middle_of_which_we_were_stopped_proves_no_step() -> None:
    tight, wide = Look(1_000_000, 0, 0, 1), Look(1_000_010, 0, 10, 10 + HOUR)
    assert step_between(tight, wide) == 0
    assert step_between(wide, Look(1_000_020 + HOUR, 0, 20 + HOUR, 21 + HOUR)) == 0
    assert step_between(tight, Look(1_000_020 + HOUR, 0, 20 + HOUR, 21 + HOUR)) == 0


def test_a_step_that_another_coordinator_took_into_account_is_none() -> None:
    then = Look(1_000_000, 500, 0, 1)
    assert step_between(then, Look(1_000_000 + HOUR, 500 + HOUR, 0, 1)) == 0


def test_a_store_put_back_to_before_a_step_has_it_still_before_it() -> None:
    then = Look(1_000_000 + HOUR, HOUR, 0, 0)
    assert step_between(then, Look(1_000_000 + HOUR, 0, 0, 0)) == HOUR


def test_a_decision_is_good_for_the_time_that_our_clock_says_it_is() -> None:
    assert between(Look(1_000_000, 0, 0, 10), 70) == (1_000_060 - STEP_MS, 1_000_070 + STEP_MS)


@STEPS
def test_a_lease_keeps_its_max_hold_and_lives_its_ttl_from_the_step(step_ms: int) -> None:
    play = granted()
    play.pass_time(20_000)
    stepped(play, step_ms)
    lease = play.lease("a")
    assert lease.expires_ms == play.world.now_ms + 30_000
    assert lease.granted_ms == play.world.now_ms - 20_000
    assert ended(play) == []
    play.pass_time(29_999)
    assert ended(play) == []
    play.pass_time(1)
    assert ended(play) == [LeaseState.EXPIRED]


@STEPS
def test_a_lease_whose_holder_beats_is_revoked_when_it_was_held_for_its_max_hold(step_ms: int) -> None:
    play = granted()
    stepped(play, step_ms)
    held = replace(play.lease("a"), expires_ms=play.world.now_ms + 9 * HOUR)
    play.world = replace(play.world, leases={"a": held})
    play.pass_time(HOUR - 1)
    assert ended(play) == []
    play.pass_time(1)
    assert ended(play) == [LeaseState.REVOKED]


@STEPS
def test_a_drain_keeps_its_limit_and_so_do_the_calls_that_were_ended(step_ms: int) -> None:
    play = Play(spec(tenant("med")), MED)
    play.demand((MED, 0, 1))
    play.enqueue("a")
    play.decide()
    play.pass_time(400_000)
    stepped(play, step_ms)
    assert not play.decide()
    play.pass_time(200_000)
    assert play.decide()
    assert play.swap.forced_ms == play.world.now_ms
    stepped(play, -step_ms)
    assert not play.decide()
    assert play.swap.forced_ms == play.world.now_ms
    assert [record.started_ms for record in play.swap.steps] == [play.world.now_ms - 600_000]


@STEPS
def test_a_grace_and_a_rest_keep_their_time(step_ms: int) -> None:
    play = Play(spec(tenant("med")), MED)
    now = play.world.now_ms
    card = replace(
        play.card,
        departed=(Departed("x", "", None, now + 20_000),),
        fault=Fault("held", 1, now - 5, 2, now + 30_000),
        failed={MED: Failure("out of memory", 3, now + 120_000)},
    )
    play.world = replace(play.world, cards={"gpu0": card})
    stepped(play, step_ms)
    now = play.world.now_ms
    assert play.card.departed[0].free_ms == now + 20_000
    assert play.card.fault == Fault("held", 1, now - 5, 2, now + 30_000)
    assert play.card.failed[MED].retry_ms == now + 120_000


def test_times_of_day_that_a_client_named_stay() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a", not_before_ms=play.world.now_ms + HOUR, deadline_ms=play.world.now_ms + 2 * HOUR)
    before = play.lease("a")
    stepped(play, HOUR)
    assert play.lease("a").request == before.request
    assert play.lease("a").created_ms == before.created_ms + HOUR
    assert play.decide(), "its time has come"


def test_a_step_is_said_for_each_card_and_counted_and_every_card_is_written() -> None:
    play = Play(spec(tenant("med")), MED)
    play.world = replace(play.world, stepped_ms=7)
    commit = moved(play.world, play.spec, -7_200_000)
    assert commit is not None
    assert commit.stepped == (7, -7_199_993)
    assert [alert.card for alert in commit.alerts] == ["gpu0"]
    assert "stepped back by 7200 s" in commit.alerts[0].text
    assert [card.name for card in commit.cards] == ["gpu0"]


def test_after_a_start_nothing_lies_further_ahead_than_its_own_duration_though_nobody_saw_the_step() -> None:
    """The clock was stepped back while no coordinator ran."""
    play = granted()
    now = play.world.now_ms
    card = replace(
        play.card,
        departed=(Departed("x", "", None, now + 30_000),),
        fault=Fault("held", 1, now, 9, now + 600_000),
        failed={MED: Failure("out of memory", 9, now + 600_000)},
    )
    play.world = replace(play.world, cards={"gpu0": card})
    play.pass_time(-HOUR)
    commit = moved(play.world, play.spec)
    assert commit is not None
    play.apply(commit)
    now = play.world.now_ms
    assert (play.lease("a").granted_ms, play.lease("a").expires_ms) == (now, now + 30_000)
    assert play.card.departed[0].free_ms == now + 30_000
    assert play.card.fault == Fault("held", 1, now, 9, now + 600_000)
    assert play.card.failed[MED].retry_ms == now + 600_000


def test_a_gap_changes_no_card_and_nothing_on_record_is_no_commit() -> None:
    play = granted()
    commit = moved(play.world, play.spec)
    assert commit is not None
    assert (commit.cards, commit.alerts, commit.stepped) == ((), (), None)
    assert moved(replace(play.world, leases={}, gateways=()), play.spec) is None


def test_a_drain_that_began_ahead_ends_within_its_limit() -> None:
    play = Play(spec(tenant("med")), MED)
    play.demand((MED, 0, 1))
    play.enqueue("a")
    play.decide()
    play.pass_time(-HOUR)
    commit = moved(play.world, play.spec)
    assert commit is not None
    play.apply(commit)
    play.pass_time(600_000)
    assert machine.on_time(play.world, play.spec, play.card) is not None
