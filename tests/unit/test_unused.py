"""A model with a `ttl` that nobody uses leaves its card, and comes back when it is asked for, not before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import machine, policy, unused
from swapper.core.types import Card, Demand, WorkClass
from tests.support.play import MED, SMALL, Play, spec, tenant

TTL_MS = 300_000


def play(**traits: bool) -> Play:
    med = replace(tenant("med", default=True, **traits), ttl_ms=TTL_MS)
    return Play(spec(med, tenant("small", 4_096)), MED, SMALL)


class Looks:
    """The coordinator's turns, with what it remembers of use."""

    def __init__(self, of: Play) -> None:
        self.of = of
        self.used: dict[str, int] = {}

    def turn(self) -> bool:
        found = self.of
        unused.note(found.world, found.spec, self.used)
        over = unused.expired(found.world, found.spec, found.card, self.used)
        since = found.world.now_ms - 10 * TTL_MS
        choice = policy.choose(found.world, found.spec, found.card, idle_since_ms=since, unused=over)
        if choice is not None:
            token = 1_000 + len(found.commits)
            found.apply(machine.start(found.world, found.spec, found.card, choice, swap_id=f"sw_{token}", token=token))
        return choice is not None

    def idle(self, ms: int) -> bool:
        self.of.pass_time(ms)
        return self.turn()


def left() -> Looks:
    """The model has left for its ttl."""
    looks = Looks(play())
    assert not looks.turn()
    assert looks.idle(TTL_MS)
    looks.of.run()
    return looks


def test_it_leaves_once_nobody_called_it_for_so_long_and_others_stay() -> None:
    looks = Looks(play())
    assert not looks.turn()
    assert not looks.idle(TTL_MS - 1)
    assert looks.idle(1)
    swap = looks.of.swap
    assert (swap.from_, swap.to, swap.cause) == ((MED,), (), "ttl")
    looks.of.run()
    assert looks.of.card.residents == (SMALL,)


def said(waiting: int, running: int, *, used: bool) -> Demand:
    """What a gateway says of the model."""
    return Demand("g1", MED, WorkClass.INTERACTIVE, waiting, running, None, used=used)


@pytest.mark.parametrize("demand", [said(0, 0, used=True), said(1, 0, used=False)])
def test_work_that_was_done_or_waits_counts_as_use(demand: Demand) -> None:
    looks = Looks(play())
    looks.turn()
    looks.of.world = replace(looks.of.world, demand=(demand,))
    assert not looks.idle(2 * TTL_MS)
    looks.of.demand()
    assert not looks.idle(TTL_MS - 1)
    assert looks.idle(1)


def test_a_call_that_only_looks_is_no_use() -> None:
    looks = Looks(play())
    looks.turn()
    looks.of.world = replace(looks.of.world, demand=(said(0, 1, used=False),))
    assert not looks.idle(TTL_MS - 1)
    assert looks.idle(1)


def test_one_that_is_pinned_stays() -> None:
    looks = Looks(play())
    looks.turn()
    looks.of.world = replace(looks.of.world, cards={"gpu0": replace(looks.of.card, pinned=(MED,))})
    assert not looks.idle(2 * TTL_MS)


def test_a_call_for_another_one_that_is_owed_does_not_bring_it_along() -> None:
    looks = left()
    owed = replace(looks.of.card, residents=(), return_to=(MED, SMALL))
    looks.of.world = replace(looks.of.world, cards={"gpu0": owed})
    looks.of.demand((SMALL, 1, 0))
    assert looks.turn()
    assert looks.of.swap.to == (SMALL,)


def test_one_that_somebody_else_loads_serves_and_is_owed_like_any_other_from_then_on() -> None:
    looks = left()
    assert looks.of.observe({MED: "loaded", SMALL: "loaded"})
    assert MED in looks.of.card.residents
    assert looks.of.card.unused == ()


def test_so_does_one_that_is_loaded_while_its_card_is_proved_free() -> None:
    looks = left()
    looks.of.enqueue("a")
    looks.of.decide()
    looks.of.run(until="vacate")
    assert looks.of.observe({MED: "loaded", SMALL: "unloaded"})
    assert looks.of.card.unused == ()


def test_though_it_is_a_default_it_comes_back_only_when_it_is_asked_for() -> None:
    looks = left()
    assert not looks.idle(10 * TTL_MS)
    looks.of.demand((MED, 1, 0))
    assert looks.turn()
    assert looks.of.swap.to == (MED,)
    looks.of.run()
    assert looks.of.card.residents == (SMALL, MED)
    assert looks.of.card.unused == ()
    assert not looks.turn()


def test_a_lease_does_not_bring_it_back_either() -> None:
    looks = left()
    looks.of.enqueue("a")
    assert looks.turn()
    looks.of.run()
    looks.of.end("a")
    looks.of.decide()
    assert looks.of.swap.to == (SMALL,)
    looks.of.run()
    assert not looks.turn()


def test_its_time_begins_with_its_load() -> None:
    looks = left()
    looks.idle(5 * TTL_MS)
    looks.of.demand((MED, 1, 0))
    looks.turn()
    looks.of.run()
    looks.of.demand()
    assert not looks.idle(TTL_MS - 1)
    assert looks.idle(1)


@pytest.mark.parametrize("stays", ["evict_never", "by_lease"])
def test_one_that_is_to_stay_stays(stays: str) -> None:
    found = play(**{stays: True})
    assert unused.expired(found.world, found.spec, Card("gpu0", residents=(MED,)), {MED: 0}) == ()


def test_one_that_was_never_seen_has_its_time_still_ahead() -> None:
    found = play()
    assert unused.expired(found.world, found.spec, found.card, {}) == ()
