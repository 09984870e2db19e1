"""The card machine, played without a store: every step, every failure, and where the card ends up."""

from __future__ import annotations

import pytest

from swapper.core.conversations import ProofResult
from swapper.core.types import LeaseState, Step
from tests.support.play import GIB, MED, SLOTS, SMALL, Play, granted, offers, spec, tenant


def test_a_whole_lease_is_granted_after_every_step_in_order() -> None:
    play = granted()
    swap = play.log["sw_100"]
    steps = [r.step for r in swap.steps]
    assert steps == [Step.CLOSE, Step.DRAIN, Step.SAVE, Step.RELEASE, Step.VACATE]
    assert swap.outcome == "done"
    assert [c.saved for c in swap.conversations] == [True, True]
    assert play.lease("a").token == swap.token
    assert play.card.phase == "hold"
    assert play.card.residents == ()
    assert play.card.return_to == (MED,)


def test_the_grant_waits_for_the_proof_that_the_vram_is_free() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="vacate", drain={"slots": []})
    assert play.lease("a").state is LeaseState.PREPARING
    assert play.pending("vacate").args["need_mib"] == 24 * GIB


def test_the_previous_residents_come_back_with_their_conversations_when_the_lease_ends() -> None:
    play = granted()
    play.end("a")
    play.decide()
    play.run(load={"n_slots": 2, "snapshots": offers(play)}, restore={"tokens": 4000})
    back = play.log["sw_101"]
    assert [r.step for r in back.steps] == [Step.VACATE, Step.LOAD, Step.RESTORE, Step.OPEN]
    assert back.lease == "a"
    assert {c.result for c in back.conversations} == {ProofResult.UNPROVED}
    assert sorted(c.slot for c in back.conversations) == [0, 1]
    assert play.card.residents == (MED,)
    assert play.card.return_to is None
    assert play.world.gates[MED].open


def test_consecutive_leases_cost_one_handover_and_arrive_in_order() -> None:
    play = granted()
    play.enqueue("b")
    play.enqueue("c")
    play.end("a")
    play.decide()
    play.run()
    assert play.lease("b").state is LeaseState.GRANTED
    assert play.lease("b").swap_id is None
    assert play.card.return_to == (MED,)
    assert (play.lease("b").token or 0) > (play.lease("a").token or 0)


def test_a_repeated_or_late_answer_changes_nothing() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    close = play.pending("close")
    play.answer(close, in_flight=0)
    before = play.card
    play.answer(close, in_flight=0)
    assert play.card == before


def test_a_required_save_that_fails_twice_reopens_and_loses_nothing() -> None:
    play = Play(spec(tenant("med", save_required=True)), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="save", drain={"slots": SLOTS})
    for command in [*play.swap.pending]:
        play.answer(command, detail="disk full", ok=False)
    play.answer(play.swap.pending[0], ok=False, detail="disk full")
    play.run()
    assert play.lease("a").state is LeaseState.FAILED
    assert "disk full" in (play.lease("a").reason or "")
    assert play.card.residents == (MED,)
    assert play.card.return_to is None
    assert play.world.gates[MED].open
    assert play.log["sw_100"].outcome == "compensated"
    assert all(r.step != "release" for r in play.log["sw_100"].steps)
    lost, kept = play.log["sw_100"].conversations
    assert (lost.saved, lost.result, kept.result) == (False, None, None)
    assert lost.reason == "disk full; nothing was unloaded, it is where it was"


@pytest.mark.parametrize(
    ("each", "said"), [(300, "2 conversations saved (under 1 MiB)"), (64 << 20, "2 conversations saved (128 MiB)")]
)
def test_a_grant_says_how_much_was_saved(each: int, said: str) -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(drain={"slots": SLOTS}, save={"tokens": 10, "bytes": each})
    assert (play.lease("a").explain or "").endswith(said)


def test_what_was_gone_before_is_cold_also_when_the_swap_turns_back() -> None:
    play = Play(spec(tenant("med"), tenant("small", 2 * GIB)), MED, SMALL)
    play.enqueue("a")
    play.decide()
    while len(agents := [c for c in play.swap.pending if c.executor == "agent:main"]) < 2:
        play.answer(play.swap.pending[0])
    for command in agents:
        play.say(command, {"gone": True} if command.tenant == SMALL else {"slots": SLOTS})
    play.end("a", LeaseState.CANCELLED)
    play.decide()
    play.run()
    swap = play.log["sw_100"]
    assert swap.outcome == "compensated"
    assert [(c.tenant, c.result) for c in swap.conversations if c.slot == -1] == [(SMALL, ProofResult.COLD)]


def test_a_best_effort_save_that_fails_goes_on_and_is_said_to_be_cold() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="save", drain={"slots": SLOTS})
    first, second = play.swap.pending
    play.answer(first, ok=False, detail="disk full")
    play.answer(play.swap.pending[-1], ok=False, detail="disk full")
    play.answer(second, tokens=4000, bytes=64 << 20)
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED
    lost, kept = play.log["sw_100"].conversations
    assert (lost.saved, lost.result, lost.reason) == (False, ProofResult.COLD, "disk full")
    assert kept.saved


def test_a_server_that_cannot_save_is_not_a_failure() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="save", drain={"slots": SLOTS[:1]})
    for _ in range(2):
        play.answer(play.pending("save"), ok=False, detail="no --slot-save-path", unsupported=True)
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED
    assert play.log["sw_100"].conversations[0].strategy == "off"


def test_vram_that_stays_held_is_a_fault_and_no_grant() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="vacate")
    play.answer(play.pending("vacate"), ok=False, free_mib=20 * GIB, holders=["pid 4711 python"])
    assert play.lease("a").state is LeaseState.FAILED
    assert "4711" in (play.lease("a").reason or "")
    assert play.card.phase == "fault"
    play.enqueue("b")
    play.decide()
    assert play.lease("b").state is LeaseState.QUEUED, "no grant on hope"
    play.run()
    assert play.card.residents == (MED,), "the previous residents come back where they fit"
    assert play.observe({MED: "loaded"}, free_mib=16 * GIB)
    assert play.card.fault is None


def test_a_model_that_cannot_be_loaded_brings_the_previous_one_back() -> None:
    play = Play(spec(tenant("med", need_mib=20 * GIB), tenant("small")), MED)
    play.demand((SMALL, 1, 0))
    play.decide()
    play.run(until="load")
    for _ in range(2):
        play.answer(play.pending("load"), ok=False, detail="exit code 1: bad magic")
    play.run()
    swap = play.log["sw_100"]
    assert swap.outcome == "compensated"
    assert play.card.residents == (MED,)
    assert play.card.failed[SMALL].reason == "exit code 1: bad magic"
    assert not play.decide(), "a failed model rests before it is tried again"
    play.pass_time(30_000)
    assert play.decide()


def test_a_failed_restore_is_cold_and_never_fatal() -> None:
    play = granted()
    play.end("a")
    play.decide()
    play.run(until="restore", load={"n_slots": 2, "snapshots": offers(play)})
    first, second = play.swap.pending
    play.answer(first, ok=False, detail="digest differs")
    play.answer(second, tokens=4000)
    play.run()
    results = {c.result for c in play.log["sw_101"].conversations}
    assert results == {ProofResult.COLD, ProofResult.UNPROVED}
    assert play.card.residents == (MED,)


def test_a_refused_snapshot_is_listed_cold_with_its_reason() -> None:
    play = granted()
    play.end("a")
    play.decide()
    refused = [{**offers(play)[0], "refused": "cache types differ"}]
    play.run(load={"n_slots": 2, "snapshots": refused})
    talk = play.log["sw_101"].conversations[0]
    assert (talk.result, talk.reason, talk.restored) == (ProofResult.COLD, "cache types differ", False)


def test_a_lease_cancelled_before_the_release_reopens_at_once() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain")
    play.end("a", LeaseState.CANCELLED)
    play.decide()
    play.run()
    assert play.log["sw_100"].outcome == "compensated"
    assert play.card.residents == (MED,)
    assert play.card.holds == ()
    assert play.world.gates[MED].open


def test_a_lease_cancelled_after_the_release_is_not_granted_and_the_residents_return() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="release")
    play.end("a", LeaseState.CANCELLED)
    play.decide()
    play.run()
    assert play.lease("a").state is LeaseState.CANCELLED
    assert play.card.phase == "steady"
    play.decide()
    play.run()
    assert play.card.residents == (MED,)
    assert play.card.return_to is None
