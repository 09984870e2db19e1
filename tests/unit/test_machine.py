"""The card machine, played without a store: every step, every failure, and where the card ends up."""

from __future__ import annotations

import pytest

from swapper.core import machine
from swapper.core.types import LeaseState, ProofResult, Report, Step, StepOutcome
from tests.support.play import GIB, Play, spec, tenant

MED = "llama/med"
SMALL = "llama/small"
SLOTS = [{"slot": 0, "tokens": 4000}, {"slot": 1, "tokens": 3900}]
SAVED: dict[str, object] = {"tokens": 4000, "bytes": 64 << 20}


def offers(play: Play) -> list[dict[str, object]]:
    """What the agent would offer for restoring: everything the last swap saved."""
    return [
        {"snapshot": c.snapshot, "slot": c.slot, "tokens": c.tokens, "bytes": c.bytes}
        for swap in play.log.values()
        for c in swap.conversations
        if c.saved
    ]


def granted(**traits: bool) -> Play:
    """A card that med served and whose whole lease `a` is granted now."""
    play = Play(spec(tenant("med", **traits)), MED)
    play.enqueue("a")
    play.decide()
    play.run(drain={"slots": SLOTS}, save=SAVED)
    assert play.lease("a").state is LeaseState.GRANTED
    return play


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


def test_an_expired_holder_leaves_the_card_only_after_the_grace() -> None:
    play = granted()
    play.pass_time(30_001)
    play.decide()
    assert play.lease("a").state is LeaseState.EXPIRED
    assert "heartbeat" in (play.lease("a").reason or "")
    departed = play.swap.pending[0].args["departed"]
    assert departed == [{"lease": "a", "label": "", "pid": None, "free_ms": play.world.now_ms + 30_000}]


def test_a_lease_held_beyond_its_max_hold_is_revoked() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a", max_hold_ms=10_000, ttl_ms=60_000)
    play.decide()
    play.run()
    play.pass_time(10_001)
    play.decide()
    assert play.lease("a").state is LeaseState.REVOKED


def test_a_queued_lease_past_its_deadline_expires() -> None:
    play = granted()
    play.enqueue("b", deadline_ms=play.world.now_ms + 5)
    play.pass_time(6)
    play.decide()
    assert play.lease("b").state is LeaseState.EXPIRED


def test_calls_still_running_at_the_drain_limit_are_ended_and_recorded_as_forced() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain")
    assert not play.decide()
    play.pass_time(600_000)
    play.decide()
    play.answer(play.pending("cut"), ended=1, requeued=0)
    play.run()
    drain = next(r for r in play.log["sw_100"].steps if r.step is Step.DRAIN)
    assert drain.outcome is StepOutcome.FORCED
    assert play.lease("a").state is LeaseState.GRANTED


def test_calls_that_are_not_ours_are_never_cut_the_swap_turns_back() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain")
    play.pass_time(600_000)
    play.decide()
    play.answer(play.pending("cut"), ended=1, requeued=0)
    play.pass_time(30_000)
    play.decide()
    play.run()
    assert play.lease("a").state is LeaseState.FAILED
    assert "did not come through swapper" in (play.lease("a").reason or "")
    assert play.card.residents == (MED,)


def test_with_reopen_the_drain_limit_turns_the_swap_back() -> None:
    play = Play(spec(tenant("med"), on_drain_limit="reopen"), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain")
    play.pass_time(600_000)
    play.decide()
    play.run()
    assert play.lease("a").state is LeaseState.FAILED
    assert play.card.residents == (MED,)


def test_a_gateway_process_that_died_is_not_waited_for() -> None:
    play = Play(spec(tenant("med")), MED, gateways=("g1", "g2"))
    play.enqueue("a")
    play.decide()
    play.answer(play.pending("close", "gateway:g1"), in_flight=0)
    assert play.swap.stage is Step.CLOSE
    play.gateways("g1")
    play.decide()
    assert play.swap.stage is Step.DRAIN


@pytest.mark.parametrize("stage", ["close", "drain"])
def test_a_gateway_that_joins_while_the_gates_close_is_told_before_anything_is_saved(stage: str) -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until=stage)
    play.gateways("g1", "g2")
    while not any(c.executor == "gateway:g2" for c in play.swap.pending):
        play.answer(play.swap.pending[0])
    assert play.swap.stage == stage
    assert play.pending("close", "gateway:g2").args["epoch"] == play.world.gates[MED].epoch
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED


def test_after_a_rolled_back_store_the_pending_commands_go_out_under_a_higher_token() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    before = play.swap.pending
    commit = machine.retoken(play.world, play.spec, play.card, 500)
    assert commit is not None
    play.apply(commit)
    assert [c.verb for c in play.swap.pending] == [c.verb for c in before]
    assert {c.token for c in play.swap.pending} == {500}
    play.run()
    assert play.lease("a").token == 500


def test_after_a_restart_what_is_pending_is_sent_again_unchanged() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    commit = machine.resume(play.world, play.spec, play.card)
    assert commit is not None
    assert commit.commands == play.swap.pending


def test_a_resident_that_vanished_is_brought_back() -> None:
    play = Play(spec(tenant("med")), MED)
    assert play.observe({MED: "failed"})
    assert play.card.residents == ()
    assert not play.world.gates[MED].open
    play.decide()
    play.run()
    assert play.card.residents == (MED,)
    assert play.log["sw_100"].cause == "recovery"


def test_an_unreachable_server_proves_nothing() -> None:
    play = Play(spec(tenant("med")), MED)
    assert not play.observe({MED: "unreachable"})


def test_a_model_found_loaded_becomes_a_resident_and_its_gate_opens() -> None:
    play = Play(spec(tenant("med")))
    assert play.observe({MED: "loaded"})
    assert play.card.residents == (MED,)
    assert play.world.gates[MED].open
    assert play.commits[-1].commands[0].verb == "open"


def test_a_proof_is_said_once() -> None:
    play = granted()
    play.end("a")
    play.decide()
    play.run(load={"n_slots": 2, "snapshots": offers(play)}, restore={"tokens": 4000})
    back = play.log["sw_101"]
    report = Report(
        "gateway:g1",
        "gpu0",
        MED,
        0,
        0,
        "proof",
        "ok",
        data={"swap": back.id, "snapshot": back.conversations[0].snapshot, "result": "warm", "cache_n": 3999},
    )
    commit = machine.on_proof(play.card, back, report)
    assert commit is not None
    assert commit.conversations[0].result is ProofResult.WARM
    assert machine.on_proof(play.card, commit.swaps[0], report) is None


def test_after_a_gap_no_granted_lease_expires_before_its_ttl_or_thirty_seconds() -> None:
    play = granted()
    play.pass_time(1_000_000)
    commit = machine.extend_after_gap(play.world)
    assert commit is not None
    play.apply(commit)
    assert play.lease("a").expires_ms == play.world.now_ms + 30_000
    assert not play.decide()


@pytest.mark.parametrize("vram", [4 * GIB, 10 * GIB])
def test_a_partial_lease_that_fits_leaves_the_residents_serving(vram: int) -> None:
    play = Play(spec(tenant("med"), tenant("small", need_mib=4 * GIB)), MED, SMALL)
    play.enqueue("a", vram_mib=vram)
    play.decide()
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED
    assert play.card.residents == (MED, SMALL)
    assert play.card.phase == "steady"


def test_a_partial_lease_sends_away_only_what_it_must_and_that_comes_back() -> None:
    play = Play(spec(tenant("med", default=True), tenant("small", need_mib=6 * GIB)), MED, SMALL)
    play.enqueue("a", vram_mib=12 * GIB)
    play.decide()
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED
    assert play.card.residents == (MED,)
    play.end("a")
    play.decide()
    play.run()
    assert play.card.residents == (MED, SMALL)
    assert play.card.return_to is None


def test_a_tenant_that_is_never_evicted_stays_beside_a_whole_lease() -> None:
    play = Play(spec(tenant("med"), tenant("small", evict_never=True)), MED, SMALL)
    play.enqueue("a")
    play.decide()
    play.run(until="vacate")
    assert play.pending("vacate").args["need_mib"] == 16 * GIB
    play.run()
    assert play.card.residents == (SMALL,)
