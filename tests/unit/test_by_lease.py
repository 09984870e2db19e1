"""A tenant that is on the card only inside a lease of its own (ComfyUI behind its gate): it comes and goes with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import machine
from swapper.core.explain import explain_lease
from swapper.core.spec import TenantSpec
from swapper.core.types import LeaseState
from tests.support.play import GIB, MED, SMALL, Play, spec, tenant

RENDER = "llama/render"
WHOLE = replace(tenant("render", 24 * GIB), by_lease=True)
PART = replace(tenant("render", 6 * GIB), by_lease=True)


def play(*residents: str, part: bool = False) -> Play:
    return Play(spec(tenant("med", default=True), tenant("small", 4 * GIB), PART if part else WHOLE), *residents)


def rendering(*residents: str, part: bool = False) -> Play:
    """Its lease is granted."""
    found = play(*residents, part=part)
    found.enqueue("r", holder=RENDER, vram_mib=6 * GIB if part else None)
    found.decide()
    found.run()
    assert found.lease("r").state is LeaseState.GRANTED
    return found


def test_its_lease_is_granted_once_it_is_loaded_on_a_card_of_its_own() -> None:
    found = play(MED)
    found.enqueue("r", holder=RENDER)
    found.decide()
    assert (found.swap.from_, found.swap.to, found.swap.cause) == ((MED,), (RENDER,), "lease r")
    found.run(until="load")
    assert found.lease("r").state is LeaseState.PREPARING
    found.run()
    assert found.lease("r").state is LeaseState.GRANTED
    assert found.card.residents == (RENDER,)
    assert found.card.return_to == (MED,)
    assert not found.decide()


def test_when_its_lease_ends_it_leaves_as_the_others_come_back() -> None:
    found = rendering(MED)
    found.end("r")
    found.decide()
    assert (found.swap.from_, found.swap.to, found.swap.cause) == ((RENDER,), (MED,), "lease r")
    found.run()
    assert found.card.residents == (MED,)
    assert found.card.return_to is None
    assert not found.decide()


def test_with_nobody_to_come_back_it_leaves_all_the_same() -> None:
    found = rendering()
    found.spec = spec(tenant("small", 4 * GIB), WHOLE)
    found.end("r")
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((RENDER,), ())
    found.run()
    assert found.card.residents == ()
    assert not found.decide()


def test_a_next_lease_of_its_own_finds_it_there_and_one_of_somebody_else_does_not() -> None:
    found = rendering(MED)
    found.end("r")
    found.enqueue("again", holder=RENDER)
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((), (RENDER,))
    found.run()
    assert found.lease("again").state is LeaseState.GRANTED
    found.end("again")
    found.enqueue("encode")
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((RENDER,), ())
    found.run()
    assert found.lease("encode").state is LeaseState.GRANTED
    assert found.card.return_to == (MED,)


def test_one_that_takes_a_part_leaves_the_others_where_they_are() -> None:
    found = rendering(MED, part=True)
    assert found.card.residents == (MED, RENDER)
    found.demand((SMALL, 1, 0))
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((), (SMALL,))
    found.run()
    found.end("r")
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((RENDER,), ())


def test_what_its_lease_holds_is_counted_once_and_it_is_not_sent_away_for_others() -> None:
    found = rendering(MED, part=True)  # 8 of MED, 6 of its lease: 10 left
    found.enqueue("ten", vram_mib=10 * GIB)
    found.decide()
    assert found.swap.from_ == ()
    found.run()
    found.enqueue("nine", vram_mib=9 * GIB)
    assert not found.decide()  # MED alone may leave, which is too little


def test_when_it_cannot_be_loaded_its_lease_fails_with_the_reason_and_the_others_come_back() -> None:
    found = play(MED)
    found.enqueue("r", holder=RENDER)
    found.decide()
    found.run(until="load")
    while found.swap.stage == "load" and not found.swap.back:
        found.answer(found.pending("load"), ok=False, detail="no module named torch")
    lease = found.lease("r")
    assert (lease.state, lease.reason) == (LeaseState.FAILED, f"{RENDER} could not be loaded: no module named torch")
    found.run()
    assert found.card.residents == (MED,)
    found.enqueue("s", holder=RENDER)
    assert not found.decide()  # it rests
    said = explain_lease(found.world, found.spec, found.lease("s"), 1)
    assert said.startswith(f"queued, number 1: {RENDER} could not be loaded (no module named torch); next try in ")


def test_on_an_empty_card_its_lease_fails_as_well() -> None:
    found = play()
    found.spec = spec(WHOLE)
    found.enqueue("r", holder=RENDER)
    found.decide()
    found.run(until="load")
    while found.card.swap is not None:
        found.answer(found.pending("load"), ok=False, detail="gone")
    assert found.lease("r").state is LeaseState.FAILED
    assert found.card.holds == ()


def test_a_lease_given_up_while_it_loads_sends_it_away_again() -> None:
    found = play(MED)
    found.enqueue("r", holder=RENDER)
    found.decide()
    found.run(until="load")
    found.end("r", LeaseState.CANCELLED)
    found.decide()
    found.run()
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((RENDER,), (MED,))
    found.run()
    assert found.card.residents == (MED,)


def test_one_that_dies_in_its_lease_is_brought_back_into_it() -> None:
    found = rendering(MED)
    commit = machine.on_observed(found.world, found.spec, found.card, {RENDER: "stopped"}, None)
    assert commit is not None
    found.apply(commit)
    assert found.card.return_to == (MED,)
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((), (RENDER,))
    found.run()
    assert found.lease("r").state is LeaseState.GRANTED
    assert found.card.residents == (RENDER,)


def test_one_that_somebody_uses_without_a_lease_is_sent_away() -> None:
    found = play(MED)
    commit = machine.on_observed(found.world, found.spec, found.card, {MED: "loaded", RENDER: "loaded"}, None)
    assert commit is not None
    found.apply(commit)
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((RENDER,), ())
    found.run()
    assert found.card.residents == (MED,)


def test_a_swap_back_that_fails_does_not_bring_it_back() -> None:
    found = rendering(MED)
    found.end("r")
    found.decide()
    found.run(until="load")
    while found.card.swap is not None and found.swap.stage == "load":
        found.answer(found.pending("load"), ok=False, detail="out of memory")
    found.run()
    assert RENDER not in found.card.residents
    assert RENDER not in (found.card.return_to or ())


@pytest.mark.parametrize("part", [False, True])
def test_the_proof_asks_for_no_more_than_its_lease(part: bool) -> None:
    found = play(MED, part=part)
    found.enqueue("r", holder=RENDER, vram_mib=6 * GIB if part else None)
    found.decide()
    found.run(until="vacate")
    assert found.pending("vacate").args["need_mib"] == (6 * GIB if part else 24 * GIB)


def test_one_that_left_and_keeps_its_vram_is_not_owed_to_the_card() -> None:
    found = rendering()
    found.spec = spec(tenant("small", 4 * GIB), WHOLE)
    found.end("r")
    found.decide()
    found.run(until="vacate")
    found.answer(found.pending("vacate"), ok=False, free_mib=0, holders=["pid 7 (python)"])
    assert found.card.fault is not None
    assert found.card.return_to is None


def test_after_a_lease_that_expired_its_own_release_is_the_proof_and_no_grace_is_waited_for() -> None:
    found = rendering(MED)
    found.pass_time(found.lease("r").request.ttl_ms)
    found.decide()
    assert found.lease("r").state is LeaseState.EXPIRED
    assert found.card.departed == ()
    assert (found.swap.from_, found.swap.to) == ((RENDER,), (MED,))
    found.run()
    assert found.card.residents == (MED,)


@pytest.mark.parametrize(("part", "mib"), [(False, 24 * GIB), (True, 6 * GIB)])
def test_one_that_was_lost_comes_back_into_its_lease_once_that_much_is_proved_free(part: bool, mib: int) -> None:
    found = rendering(part=part)
    assert found.observe({RENDER: "unloaded"})
    found.decide()
    assert found.swap.to == (RENDER,)
    assert found.pending("vacate").args["need_mib"] == mib


def at_fault_by(other: TenantSpec) -> Play:
    """Its engine began `other` inside a whole lease, and it never comes up: the next whole lease found no room."""
    found = Play(spec(tenant("med", default=True), other))
    for name in "ab":
        found.enqueue(name)
    found.decide()
    found.run()
    found.observe({MED: "unloaded", other.id: "loading"})
    found.end("a")
    found.decide()
    found.answer(found.pending("vacate"), ok=False, holders=["render run 1"], free_mib=18 * GIB)
    assert found.card.fault is not None
    return found


@pytest.mark.parametrize("other", [PART, tenant("render", 6 * GIB)], ids=["there by lease", "kind none"])
def test_what_its_engine_began_and_never_comes_up_is_sent_away_from_a_card_at_fault(other: TenantSpec) -> None:
    found = at_fault_by(replace(other, serves_models=False))
    found.decide()
    found.run()
    assert found.card.residents == (MED,)
    found.enqueue("c")
    seen = {MED: "loaded", RENDER: "loading"}
    while found.observe(seen, free_mib=10 * GIB):
        pass
    assert found.card.residents == (MED, RENDER)
    found.decide()
    assert RENDER in found.swap.from_
    found.run()
    found.observe({MED: "loaded"}, free_mib=16 * GIB)
    found.decide()
    found.run()
    assert found.lease("c").state is LeaseState.GRANTED


def test_a_model_that_somebody_else_loads_is_no_resident_before_it_is_there() -> None:
    """Its gate would be opened for calls."""
    found = at_fault_by(tenant("render", 6 * GIB))
    found.decide()
    found.run()
    found.observe({MED: "loaded", RENDER: "loading"}, free_mib=10 * GIB)
    assert RENDER not in found.card.residents


def test_what_is_begun_on_a_card_that_is_not_at_fault_is_left_to_come_up() -> None:
    found = play(MED)
    found.spec = spec(tenant("med", default=True), replace(PART, serves_models=False))
    assert not found.observe({MED: "loaded", RENDER: "loading"}, free_mib=10 * GIB)
