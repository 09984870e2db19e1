"""A store put back to the middle of a swap out: who was to leave may have come back since, and served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import rollback
from swapper.core.orders import Report
from swapper.core.types import LeaseState
from tests.support.play import MED, SAVED, SLOTS, Play, spec, tenant

SINCE = [{"slot": 1, "tokens": 777}]


def leaving(until: str) -> Play:
    """On its way out for lease `a`, and so far."""
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until=until, drain={"slots": SLOTS}, save=SAVED)
    return play


def retoken(play: Play) -> int:
    """What happens once an agent refuses an order as older than what it obeyed."""
    token = play.swap.token + 50
    commit = rollback.retoken(play.world, play.spec, play.card, token)
    assert commit is not None
    play.apply(commit)
    return token


@pytest.mark.parametrize("until", ["close", "drain", "save", "release"])
def test_it_is_closed_drained_and_asked_anew_before_it_is_unloaded(until: str) -> None:
    play = leaving(until)
    epoch = play.world.gates[MED].epoch
    token = retoken(play)
    assert [(c.verb, c.token) for c in play.swap.pending] == [("close", token)]
    assert play.world.gates[MED].epoch > epoch
    play.run(until="release", drain={"slots": SINCE}, save=SAVED)
    assert [(c.slot, c.saved) for c in play.swap.conversations] == [(1, True)]
    play.run()
    assert (play.lease("a").state, play.lease("a").token) == (LeaseState.GRANTED, token)


def test_calls_that_were_let_in_since_have_the_whole_time_of_a_drain() -> None:
    play = leaving("release")
    play.pass_time(play.spec.policy.drain_ms[play.lease("a").request.klass] + 1)
    retoken(play)
    assert not play.decide()
    assert play.swap.forced_ms is None


def test_of_one_that_was_let_go_by_the_order_of_before_nothing_is_said_to_be_lost() -> None:
    play = leaving("release")
    before = play.swap.conversations
    retoken(play)
    play.run(drain={"gone": True})
    assert play.log["sw_100"].conversations == before
    assert play.card.saved == before


def test_a_swap_that_turns_back_is_not_begun_again() -> None:
    play = leaving("release")
    for _ in range(2):
        play.run(until="vacate")
        play.answer(play.pending("vacate"), ok=False, detail="held", holders=["pid 9"])
        if play.card.swap is None:
            break
    play.decide()
    play.run(until="load")
    retoken(play)
    assert play.verbs() == ["vacate"]


@pytest.mark.parametrize("until", ["drain", "save", "release"])
def test_a_gateway_that_let_calls_in_since_is_closed_above_that_and_all_is_asked_anew(until: str) -> None:
    play = leaving(until)
    token, epoch = play.swap.token, play.world.gates[MED].epoch + 4
    ahead = Report("gateway:g1", "", MED, 0, 0, "ahead", "ok", data={"epoch": epoch})
    commit = rollback.on_gate_ahead(play.world, play.spec, ahead)
    assert commit is not None
    play.apply(commit)
    (close,) = play.swap.pending
    assert (close.verb, close.executor) == ("close", "gateway:g1")
    assert close.token > token
    assert close.args["epoch"] == play.world.gates[MED].epoch
    assert play.world.gates[MED].epoch > epoch
    play.run(drain={"slots": SINCE}, save=SAVED)
    assert play.lease("a").state is LeaseState.GRANTED


def test_a_gateway_ahead_of_another_tenants_gate_lets_the_swap_go_on() -> None:
    play = leaving("release")
    play.spec = replace(play.spec, tenants={**play.spec.tenants, "llama/x": tenant("x")})
    pending = play.swap.pending
    commit = rollback.on_gate_ahead(
        play.world, play.spec, Report("gateway:g1", "", "llama/x", 0, 0, "ahead", "ok", data={"epoch": 4})
    )
    assert commit is not None
    play.apply(commit)
    assert play.swap.pending == pending
