"""Cards whose VRAM only their probe knows: nothing starts on them before it was read, and afterwards all does."""

from __future__ import annotations

from dataclasses import replace

from swapper.core import plan, policy
from swapper.core.explain import explain_lease
from swapper.core.types import LeaseState
from tests.support.play import GIB, Play, spec, tenant

TOTAL = 24 * GIB


def unread() -> Play:
    """A card that was never read, with a default model."""
    play = Play(spec(tenant("med", default=True), total_mib=0))
    cards = {"gpu0": replace(play.spec.cards["gpu0"], measured=True)}
    play.spec = replace(play.spec, cards=cards)
    return play


def test_on_a_card_that_was_never_read_nothing_is_loaded_and_no_lease_prepared() -> None:
    play = unread()
    play.enqueue("a")
    assert policy.choose(play.world, play.spec, play.card, idle_since_ms=0) is None
    said = explain_lease(play.world, play.spec, play.world.leases["a"], 1)
    assert "how much VRAM gpu0 has is not known yet" in said
    play.spec = play.spec.learned({"gpu0": TOTAL})
    choice = policy.choose(play.world, play.spec, play.card, idle_since_ms=0)
    assert choice is not None
    assert choice.lease == "a"


def test_a_proof_that_a_restart_asks_for_before_the_card_was_read_asks_for_more_than_any_has() -> None:
    play = unread()
    play.spec = play.spec.learned({"gpu0": TOTAL})
    play.enqueue("a")
    play.decide()
    swap = play.card.swap
    assert swap is not None
    assert plan.vacate_need(play.spec, play.card, swap) == TOTAL
    assert plan.vacate_need(unread().spec, play.card, swap) == plan.UNKNOWN_MIB


def test_a_probe_that_cannot_be_read_is_a_fault_in_its_own_words() -> None:
    play = unread()
    play.spec = play.spec.learned({"gpu0": TOTAL})
    play.enqueue("a")
    play.decide()
    said = "the VRAM of gpu0 cannot be read: the driver is gone; load it"
    play.answer(play.pending("vacate"), ok=False, detail=said, free_mib=0, holders=[], unread="x")
    assert play.card.fault is not None
    assert play.card.fault.reason == said
    assert play.lease("a").state is LeaseState.FAILED


def test_a_proof_names_the_leases_that_stay_so_that_what_they_use_of_their_promise_counts_for_it() -> None:
    play = unread()
    play.spec = play.spec.learned({"gpu0": TOTAL})
    play.enqueue("part", vram_mib=4 * GIB, holder_pid=12, holder_started=7)
    play.decide()
    play.run()
    assert play.lease("part").state is LeaseState.GRANTED
    play.demand(("llama/med", 1, 0))
    play.decide()
    play.run(until="vacate")
    args = play.pending("vacate").args
    assert args["need_mib"] == 12 * GIB
    assert args["holding"] == [{"pid": 12, "started": 7, "tenant": None, "vram_mib": 4 * GIB}]
