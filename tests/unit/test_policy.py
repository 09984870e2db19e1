"""Who gets the card next: class first, then arrival; whole leases; the previous residents come back."""

from __future__ import annotations

from swapper.core import policy
from swapper.core.explain import explain_demand, explain_lease
from swapper.core.types import LeaseState, WorkClass
from tests.support.play import GIB, Play, granted, spec, tenant

MED = "llama/med"
BIG = "llama/big"


def serving() -> Play:
    return Play(spec(tenant("med", default=True), tenant("big", need_mib=20 * GIB)), MED)


def test_an_idle_card_with_its_resident_has_nothing_to_do() -> None:
    assert not serving().decide()


def test_the_higher_class_goes_first_then_arrival() -> None:
    play = serving()
    for lease, klass in [("batch", "batch"), ("second", "normal"), ("third", "normal"), ("first", "interactive")]:
        play.enqueue(lease, WorkClass(klass))
        play.pass_time(1)
    order: list[str] = []
    while play.decide():
        play.run()
        for lease in list(play.world.leases.values()):
            if lease.state is LeaseState.GRANTED:
                order.append(lease.id)
                play.end(lease.id)
    assert order == ["first", "second", "third", "batch"]


def test_who_arrived_first_goes_first_though_the_clock_was_stepped_back_meanwhile() -> None:
    play = serving()
    play.enqueue("first")
    play.pass_time(-500_000)
    play.enqueue("second")
    play.decide()
    assert play.swap.lease == "first"


def test_a_lease_is_not_considered_before_its_time() -> None:
    play = serving()
    play.enqueue("later", not_before_ms=play.world.now_ms + 10)
    assert not play.decide()
    play.pass_time(10)
    assert play.decide()


def test_calls_for_another_model_swap_it_in_and_its_predecessor_out() -> None:
    play = serving()
    play.demand((BIG, 1, 0))
    play.decide()
    play.run()
    assert play.card.residents == (BIG,)
    assert play.card.return_to is None


def test_a_displaced_default_comes_back_once_the_card_has_been_idle() -> None:
    play = serving()
    play.demand((BIG, 1, 0))
    play.decide()
    play.run()
    play.demand()
    assert not play.decide()
    choice = policy.choose(play.world, play.spec, play.card, idle_since_ms=play.world.now_ms - 120_000)
    assert choice is not None
    assert (choice.leaving, choice.arriving) == ((BIG,), (MED,))


def test_defaults_are_loaded_at_the_start_when_they_fit() -> None:
    play = Play(spec(tenant("med", default=True), tenant("small", need_mib=4 * GIB, default=True)))
    play.decide()
    assert play.swap.to == (MED, "llama/small")


def test_calls_that_wait_through_a_lease_bring_back_everyone_the_lease_displaced() -> None:
    play = Play(spec(tenant("med"), tenant("small", need_mib=4 * GIB)), MED, "llama/small")
    play.enqueue("a")
    play.decide()
    play.run()
    play.demand((MED, 1, 0))
    play.end("a")
    play.decide()
    assert play.swap.to == (MED, "llama/small")
    assert play.swap.lease == "a"


def test_who_could_not_be_loaded_after_a_lease_is_still_owed_and_comes_later() -> None:
    play = Play(spec(tenant("med"), tenant("small", need_mib=4 * GIB)), MED, "llama/small")
    play.enqueue("a")
    play.decide()
    play.run()
    play.end("a")
    play.decide()
    play.run(until="load")
    for _ in range(2):
        loads = [c for c in play.swap.pending if c.tenant == "llama/small"]
        play.answer(loads[0], ok=False, detail="out of memory")
    play.run()
    assert play.card.residents == (MED,)
    assert play.card.return_to == (MED, "llama/small")
    play.pass_time(30_000)
    play.decide()
    play.run()
    assert play.card.residents == (MED, "llama/small")
    assert play.card.return_to is None


def test_who_is_owed_and_cannot_be_loaded_does_not_keep_the_defaults_away() -> None:
    play = Play(spec(tenant("med", 20 * GIB, default=True), tenant("big", 20 * GIB)), BIG)
    play.enqueue("a")
    play.decide()
    play.run()
    play.end("a")
    play.decide()
    play.run(until="load")
    for _ in range(2):
        play.answer(play.pending("load"), ok=False, detail="its file is gone")
    play.decide()
    play.run()
    assert play.card.residents == (MED,)
    play.pass_time(30_000)
    choice = policy.choose(play.world, play.spec, play.card, idle_since_ms=0)
    assert choice is None, "it is tried again when it is asked for, not in the place of a default"


def test_a_call_that_waited_longer_than_the_next_lease_is_served_before_it() -> None:
    play = serving()
    play.enqueue("a", WorkClass.INTERACTIVE)
    play.decide()
    play.run()
    play.demand((MED, 1, 0))
    play.pass_time(5)
    play.enqueue("b", WorkClass.INTERACTIVE)
    play.end("a")
    play.decide()
    assert play.swap.to == (MED,)


def test_the_room_of_who_is_never_evicted_is_kept_free_while_it_is_away() -> None:
    play = Play(spec(tenant("med"), tenant("small", 6 * GIB, evict_never=True)), MED)
    play.enqueue("first", vram_mib=12 * GIB)
    play.enqueue("second", vram_mib=9 * GIB)
    play.decide()
    play.run()
    assert play.card.residents == ()
    assert not play.decide()
    assert play.lease("second").state is LeaseState.QUEUED
    play.demand(("llama/small", 1, 0))
    play.decide()
    assert play.swap.to == ("llama/small",)
    assert play.swap.from_ == ()


def test_a_whole_lease_waits_for_partial_holders() -> None:
    play = Play(spec(tenant("med")))
    play.enqueue("part", vram_mib=1 * GIB)
    play.decide()
    play.run()
    play.enqueue("whole")
    assert not play.decide()
    assert "part" in explain_lease(play.world, play.spec, play.lease("whole"), 1)


def test_a_lease_that_can_never_fit_is_left_and_said() -> None:
    play = serving()
    play.enqueue("huge", vram_mib=99 * GIB)
    assert not play.decide()
    assert "never" in explain_lease(play.world, play.spec, play.lease("huge"), 1)


def test_every_wait_has_its_sentence() -> None:
    play = serving()
    play.enqueue("a")
    play.enqueue("b")
    play.decide()
    assert "gate is being closed" in explain_lease(play.world, play.spec, play.lease("a"), None)
    play.run()
    sentence = explain_lease(play.world, play.spec, play.lease("b"), 1)
    bounds = "for another 30 s if no heartbeat comes, for at most 60 min if they do"
    assert sentence == f"queued, number 1: gpu0 is held by a, {bounds}"
    assert "held by a" in explain_demand(play.world, play.spec, MED)
    play.end("a")
    play.decide()
    play.run()
    assert "released" in explain_lease(play.world, play.spec, play.lease("a"), None)


def test_who_waits_behind_a_holder_that_stays_is_told_its_name_also_while_the_card_is_looked_at_again() -> None:
    play = granted(default=True)
    play.end("a")
    play.decide()
    play.answer(play.pending("vacate"), ok=False, free_mib=0, holders=["encode (pid 9)"])
    play.enqueue("b")
    assert "held by encode (pid 9)" in explain_lease(play.world, play.spec, play.lease("b"), 1)
    play.decide()
    said = explain_lease(play.world, play.spec, play.lease("b"), 1)
    assert "the VRAM is being proved free" in said
    assert "held by encode (pid 9)" in said


def test_a_whole_lease_that_waits_for_a_partial_one_to_end_is_not_overtaken_by_later_partial_ones() -> None:
    play = Play(spec(tenant("med")))
    play.enqueue("first", vram_mib=2 * GIB)
    play.decide()
    play.run()
    play.enqueue("whole")
    play.enqueue("later", vram_mib=2 * GIB)
    assert not play.decide()
    assert play.lease("later").state is LeaseState.QUEUED
    play.end("first")
    play.decide()
    assert play.swap.lease == "whole"
