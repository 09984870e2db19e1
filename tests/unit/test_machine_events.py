"""The card machine over time: holders that end, limits, gateways, what is seen, partial leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from swapper.core import clock, machine, reuse, rollback
from swapper.core.conversations import ProofResult
from swapper.core.orders import Report
from swapper.core.types import Gate, LeaseState, Step, StepOutcome
from tests.support.play import GIB, MED, SLOTS, SMALL, Play, granted, offers, spec, tenant


def test_an_expired_holder_leaves_the_card_only_after_the_grace() -> None:
    play = granted()
    play.pass_time(30_001)
    play.decide()
    assert play.lease("a").state is LeaseState.EXPIRED
    assert "heartbeat" in (play.lease("a").reason or "")
    departed = play.swap.pending[0].args["departed"]
    assert departed == [
        {"lease": "a", "label": "", "pid": None, "free_ms": play.world.now_ms + 30_000, "started": None}
    ]


def test_a_holder_that_is_named_after_the_grant_is_waited_for_by_its_process() -> None:
    play = granted()
    asked = replace(play.lease("a").request, holder_pid=4711, holder_started=12)
    play.world = replace(play.world, leases={**play.world.leases, "a": replace(play.lease("a"), request=asked)})
    play.decide()
    assert [(hold.pid, hold.started) for hold in play.card.holds] == [(4711, 12)]
    play.pass_time(30_001)
    play.decide()
    (left,) = cast("list[Mapping[str, object]]", play.swap.pending[0].args["departed"])
    assert (left["pid"], left["started"]) == (4711, 12)


def test_which_leases_stay_is_told_with_the_order_to_prove() -> None:
    play = Play(spec(tenant("med", need_mib=4 * GIB)), MED)
    play.enqueue("part", vram_mib=4 * GIB)
    play.decide()
    play.run()
    play.enqueue("more", vram_mib=4 * GIB)
    play.decide()
    assert play.pending("vacate").args["stays"] == ["part"]


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


def past_the_drain_limit(*, gateway_answers: bool, silent: tuple[str, ...] = ()) -> Play:
    """Its calls were ended at the limit, and 30 s later the server is not known to be idle."""
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain")
    play.pass_time(600_000)
    play.decide()
    play.answer(play.pending("cut"), ended=1, requeued=0)
    if gateway_answers:
        play.answer(play.pending("drain"))
        assert play.pending("drain").executor == "agent:main"
    play.pass_time(30_000)
    play.silent = silent
    play.decide()
    play.run()
    assert play.lease("a").state is LeaseState.FAILED
    assert play.card.residents == (MED,)
    return play


def test_calls_that_are_not_ours_are_never_cut_the_swap_turns_back() -> None:
    play = past_the_drain_limit(gateway_answers=True)
    assert play.lease("a").reason == "the server is still busy with calls that did not come through swapper"


def test_of_a_server_that_does_not_answer_it_is_not_said_that_it_is_busy() -> None:
    play = past_the_drain_limit(gateway_answers=True, silent=(MED,))
    assert play.lease("a").reason == f"the server of {MED} does not answer, so that nobody knows whether it is idle"


def test_of_a_gateway_that_did_not_say_that_its_calls_ended_the_server_is_not_blamed() -> None:
    play = past_the_drain_limit(gateway_answers=False)
    assert play.lease("a").reason == "gateway:g1 did not say that its calls have ended"


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


def test_with_reopen_a_server_whose_gateways_are_idle_says_itself_whether_it_is() -> None:
    """One that hangs is started anew at its limit, and has left then: to turn back before that would go on for ever."""
    play = Play(spec(tenant("med"), on_drain_limit="reopen"), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain")
    play.answer(play.pending("drain", "gateway:"))
    asked = play.pending("drain", "agent:")
    play.pass_time(600_000 + 1)
    play.decide()
    assert play.card.phase == "drain"
    assert asked.args["limit_ms"] == 600_000
    play.answer(asked, gone=True)
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED


def test_with_reopen_a_server_that_is_not_idle_at_its_limit_stays() -> None:
    play = Play(spec(tenant("med"), on_drain_limit="reopen"), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain")
    play.answer(play.pending("drain", "gateway:"))
    for _ in range(2):  # it is asked once more
        play.answer(play.pending("drain", "agent:"), ok=False, detail="3 prompts are in its queue")
    play.run()
    assert play.lease("a").state is LeaseState.FAILED
    assert play.card.residents == (MED,)


def test_a_gateway_with_calls_in_flight_is_waited_for_and_an_idle_one_is_not_asked_twice() -> None:
    play = Play(spec(tenant("med")), MED, gateways=("busy", "idle"))
    play.enqueue("a")
    play.decide()
    play.answer(play.pending("close", "gateway:busy"), in_flight=1)
    play.answer(play.pending("close", "gateway:idle"), in_flight=0)
    assert [c.executor for c in play.swap.pending] == ["gateway:busy"]
    play.answer(play.pending("drain", "gateway:busy"))
    assert [c.executor for c in play.swap.pending] == ["agent:main"], "what slots hold is asked when nothing runs"
    play.answer(play.pending("drain", "agent:main"), slots=SLOTS)
    assert play.swap.stage is Step.SAVE
    assert [(r.step, r.outcome) for r in play.swap.steps][:2] == [(Step.CLOSE, "done"), (Step.DRAIN, "done")]


def test_a_gateway_process_that_died_is_not_waited_for() -> None:
    play = Play(spec(tenant("med")), MED, gateways=("g1", "g2"))
    play.enqueue("a")
    play.decide()
    play.answer(play.pending("close", "gateway:g1"), in_flight=0)
    assert play.swap.stage is Step.CLOSE
    play.gateways("g1")
    play.decide()
    assert play.swap.stage is Step.DRAIN


def test_a_gateway_that_dies_leaves_no_line_of_the_table_open() -> None:
    play = Play(spec(tenant("med"), tenant("small")), MED, SMALL)
    play.enqueue("a")
    play.decide()
    play.gateways()
    play.decide()
    closes = [r.outcome for r in play.swap.steps if r.step is Step.CLOSE]
    assert closes == [StepOutcome.DONE, StepOutcome.DONE]


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
    commit = rollback.retoken(play.world, play.spec, play.card, 500)
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
    commit = reuse.on_proof(play.card, back, report)
    assert commit is not None
    assert commit.conversations[0].result is ProofResult.WARM
    assert reuse.on_proof(play.card, commit.swaps[0], report) is None


def test_after_a_gap_no_granted_lease_expires_before_its_ttl_or_thirty_seconds() -> None:
    play = granted()
    play.pass_time(1_000_000)
    commit = clock.moved(play.world, play.spec)
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


@pytest.mark.parametrize(("open_", "verb"), [(True, "open"), (False, "close")])
def test_a_gateway_that_knows_a_higher_epoch_gets_the_gate_as_it_is_above_that(open_: bool, verb: str) -> None:
    """The store was rolled back; the gateway obeys nothing below the highest it saw."""
    play = Play(spec(tenant("med")), MED)
    play.world = replace(play.world, gates={MED: Gate(3, open=open_)})
    ahead = Report("gateway:g1", "", MED, 0, 0, "ahead", "ok", data={"epoch": 7})
    commit = rollback.on_gate_ahead(play.world, play.spec, ahead)
    assert commit is not None
    assert commit.gates == {MED: Gate(8, open=open_)}
    assert [(c.executor, c.verb, c.token, c.args["epoch"]) for c in commit.commands] == [("gateway:g1", verb, 0, 8)]
    play.apply(commit)
    assert rollback.on_gate_ahead(play.world, play.spec, ahead) is None, "said twice"


def test_a_load_that_goes_out_again_under_a_higher_token_is_preceded_by_a_new_proof() -> None:
    """The store was rolled back to the load: what came onto the card since is forgotten, and may still be there."""
    play = Play(spec(tenant("med", default=True)))
    play.decide()
    play.run(until="load")
    commit = rollback.retoken(play.world, play.spec, play.card, play.swap.token + 100)
    assert commit is not None
    play.apply(commit)
    assert [(c.verb, c.token, c.args["need_mib"]) for c in play.swap.pending] == [("vacate", play.swap.token, 8 * GIB)]
    play.run()
    assert play.card.residents == (MED,)


def test_a_model_that_is_there_after_all_counts_as_failed_no_more() -> None:
    """Its load was answered with an error, and went on."""
    play = Play(spec(tenant("med", default=True)))
    play.decide()
    play.run(until="load")
    play.answer(play.pending("load"), ok=False, detail="busy")
    play.answer(play.pending("load"), ok=False, detail="busy")
    assert MED in play.card.failed
    play.observe({MED: "loaded"})
    assert (play.card.residents, play.card.failed) == ((MED,), {})
