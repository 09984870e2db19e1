"""The card machine when things happen at the worst moment: ends that meet grants, late leavers, old stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from swapper.core import rollback
from swapper.core.conversations import ProofResult
from swapper.core.explain import explain_lease
from swapper.core.orders import Report
from swapper.core.types import Gate, LeaseState
from tests.support.play import GIB, MED, SMALL, Play, granted, spec, tenant


def test_a_cancel_that_meets_the_proof_is_no_grant_and_the_card_goes_on() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.enqueue("b")
    play.decide()
    play.run(until="vacate")
    play.end("a", LeaseState.CANCELLED)
    play.answer(play.pending("vacate"))
    assert play.lease("a").state is LeaseState.CANCELLED
    assert play.card.holds == ()
    play.decide()
    play.run()
    assert play.lease("b").state is LeaseState.GRANTED


def test_a_resident_that_left_the_configuration_leaves_first_and_breaks_nothing() -> None:
    play = Play(spec(tenant("med"), tenant("small", need_mib=20 * GIB)), "llama/gone", MED)
    play.demand((SMALL, 1, 0))
    play.decide()
    assert play.swap.from_ == ("llama/gone", MED)


def test_a_drain_that_fails_twice_says_that_conversations_may_be_lost() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain", close={"in_flight": 0})
    for _ in range(2):
        play.answer(play.pending("drain"), ok=False, detail="no answer from /slots")
    play.run()
    (lost,) = play.log["sw_100"].conversations
    assert (lost.saved, lost.result) == (False, ProofResult.COLD)
    assert "no answer from /slots" in (lost.reason or "")
    assert "1 not saved" in (play.lease("a").explain or "")


def test_a_resident_that_died_before_its_drain_is_said_to_have_taken_its_conversations_along() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="drain", close={"in_flight": 0})
    play.answer(play.pending("drain"), slots=[], gone=True)
    play.run()
    (lost,) = play.log["sw_100"].conversations
    assert (lost.saved, lost.result) == (False, ProofResult.COLD)
    assert "not loaded any more" in (lost.reason or "")
    assert play.lease("a").state is LeaseState.GRANTED


def test_the_displaced_resident_comes_back_although_another_model_was_served_first() -> None:
    play = Play(spec(tenant("med"), tenant("small", need_mib=4 * GIB)), MED)
    play.enqueue("a")
    play.decide()
    play.run()
    play.demand((SMALL, 1, 0))
    play.end("a")
    play.decide()
    assert play.swap.to == (SMALL,)
    play.run()
    play.demand()
    play.decide()
    play.run()
    assert set(play.card.residents) == {MED, SMALL}
    assert play.card.return_to is None


def test_a_resident_lost_while_another_is_still_owed_is_not_forgotten() -> None:
    play = Play(spec(tenant("med"), tenant("small", need_mib=4 * GIB)), MED, SMALL)
    play.enqueue("a")
    play.decide()
    play.run()
    play.end("a")
    play.decide()
    play.run(until="load")
    first, second = play.swap.pending
    play.answer(first, ok=False, detail="exit code 1")
    play.answer(second)
    play.answer(play.pending("load"), ok=False, detail="exit code 1")
    play.run()
    assert play.card.residents == (SMALL,)
    play.observe({SMALL: "failed"})
    assert set(play.card.return_to or ()) == {MED, SMALL}


def test_a_holder_that_leaves_while_the_proof_is_under_way_must_be_seen_gone_as_well() -> None:
    play = Play(spec(tenant("med", need_mib=4 * GIB)), MED)
    play.enqueue("part", vram_mib=4 * GIB, holder_pid=123)
    play.decide()
    play.run()
    play.enqueue("more", vram_mib=4 * GIB)
    play.decide()
    play.end("part")
    play.decide()
    play.answer(play.pending("vacate"))
    (again,) = play.swap.pending
    assert [d["pid"] for d in again.args["departed"]] == [123]  # pyright: ignore
    play.answer(again)
    assert play.lease("more").state is LeaseState.GRANTED
    assert play.card.departed == ()


def test_after_a_second_fault_in_a_row_nothing_is_tried_without_a_rest() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    for _ in range(2):
        play.run(until="vacate")
        play.answer(play.pending("vacate"), ok=False, free_mib=0, holders=["pid 7"])
        play.decide()
    assert play.card.fault is not None
    assert play.card.swap is None
    play.pass_time(30_000)
    assert play.decide()


def test_who_cannot_come_back_onto_an_empty_card_is_tried_again_soon_and_then_ever_later() -> None:
    play = Play(spec(tenant("med", default=True)), MED)
    play.enqueue("a")
    play.decide()
    play.run()
    play.end("a")
    for rest_ms in (5_000, 10_000, 20_000):
        assert play.decide()
        play.run(until="load")
        for _ in range(2):
            play.answer(play.pending("load"), ok=False, detail="its slot folder is gone")
        play.decide()
        play.pass_time(rest_ms - 1)
        assert not play.decide()
        play.pass_time(1)


def test_an_owed_tenant_that_left_the_configuration_does_not_hold_up_the_defaults() -> None:
    play = Play(spec(tenant("med", default=True)))
    play.world = replace(play.world, cards={"gpu0": replace(play.card, return_to=("llama/gone",))})
    play.decide()
    assert play.swap.to == (MED,)
    play.run()
    assert play.card.return_to is None


def test_leases_of_a_card_that_left_the_configuration_end_with_the_reason() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a", card="gpu9")
    assert "not configured" in explain_lease(play.world, play.spec, play.lease("a"), 1)
    play.decide()
    assert play.lease("a").state is LeaseState.FAILED
    assert "gpu9" in (play.lease("a").reason or "")


def test_a_gateway_that_knows_a_higher_epoch_is_told_again_above_it() -> None:
    play = Play(spec(tenant("med")), MED, gateways=("g1", "g2"))
    play.enqueue("a")
    play.decide()
    close = play.pending("close", "gateway:g1")
    refused = Report(close.executor, "gpu0", MED, close.token, close.n, "close", "refused", data={"epoch": 7})
    commit = rollback.on_gate_refused(play.world, play.spec, refused)
    assert commit is not None
    play.apply(commit)
    assert play.world.gates[MED] == Gate(8, open=False)
    assert [c.args["epoch"] for c in play.swap.pending] == [8, 8]
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED


@pytest.mark.parametrize(("need", "expected"), [(8 * GIB, (MED, SMALL)), (20 * GIB, (SMALL,))])
def test_residents_loaded_since_the_first_lease_come_back_and_who_is_owed_where_it_fits_beside_them(
    need: int, expected: tuple[str, ...]
) -> None:
    play = granted()
    play.end("a")
    play.demand((SMALL, 1, 0))
    play.spec = spec(tenant("med", need_mib=20 * GIB), tenant("small", need_mib=20 * GIB))
    play.decide()
    play.run()
    assert (play.card.residents, play.card.return_to) == ((SMALL,), (MED,))
    play.spec = spec(tenant("med", need_mib=need), tenant("small", need_mib=need))
    play.demand()
    play.enqueue("b")
    play.decide()
    play.run()
    assert play.card.return_to == expected


def test_a_load_that_fails_alone_stands_in_the_record_as_ended() -> None:
    play = Play(spec(tenant("med", default=True)))
    play.decide()
    play.run(until="load")
    for _ in range(2):
        play.answer(play.pending("load"), ok=False, detail="exit code 1")
    swap = play.log["sw_100"]
    assert (swap.to, swap.outcome, swap.reason) == ((MED,), "compensated", "exit code 1")
    assert [r.outcome for r in swap.steps if r.tenant] == ["failed"]


def test_a_saved_conversation_whose_snapshot_is_not_offered_any_more_is_told_cold() -> None:
    play = granted(default=True)
    saved = sorted(talk.snapshot for talk in play.card.saved)
    assert len(saved) == 2
    play.end("a")
    play.decide()
    play.run(until="load")
    kept = {"snapshot": saved[0], "slot": 0, "tokens": 4000, "bytes": 1}
    play.answer(play.pending("load"), n_slots=2, snapshots=[kept])
    told = {talk.snapshot: talk.result for talk in play.swap.conversations}
    assert told == {saved[0]: None, saved[1]: ProofResult.COLD}
    assert next(talk.reason for talk in play.swap.conversations if talk.snapshot == saved[1])
    assert [order.args["snapshot"] for order in play.swap.pending] == [saved[0]]
    play.run()
    assert play.card.saved == ()


def test_a_tenant_of_ours_that_somebody_loads_during_the_proof_becomes_the_resident_and_the_lease_waits_again() -> None:
    play = Play(spec(tenant("med", default=True), tenant("small", 20 * GIB)), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="vacate")
    assert play.observe({MED: "unloaded", SMALL: "loading"}) is False
    assert play.observe({MED: "unloaded", SMALL: "loaded"}) is True
    assert play.card.residents == (SMALL,)
    assert play.world.gates[SMALL].open
    assert play.lease("a").state is LeaseState.QUEUED
    assert (play.card.holds, play.card.return_to) == ((), (MED,))
    assert [swap.outcome for swap in play.log.values()] == ["compensated"]
    play.decide()
    assert play.swap.from_ == (SMALL,)
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED


def test_a_tenant_that_the_swap_itself_sent_away_or_brings_does_not_end_its_proof() -> None:
    play = Play(spec(tenant("med", default=True)), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="vacate")
    assert play.observe({MED: "loaded"}) is False, "its release may have come to nothing: the proof says so"
    back = granted(default=True)
    back.end("a")
    back.decide()
    assert back.swap.stage == "vacate"
    assert back.observe({MED: "loaded"}) is False


def test_a_tenant_loaded_by_somebody_that_fits_beside_does_not_end_the_proof() -> None:
    play = Play(spec(tenant("med", default=True), tenant("small", 2 * GIB)))
    play.decide()
    assert play.swap.stage == "vacate"
    assert play.observe({SMALL: "loaded"}) is False


def test_a_card_at_fault_is_at_fault_also_while_it_is_proved_again() -> None:
    play = granted(default=True)
    play.end("a")
    play.decide()
    play.answer(play.pending("vacate"), ok=False, free_mib=0, holders=["encode (pid 9)"])
    play.decide()
    assert play.swap.stage == "vacate"
    assert play.card.phase == "fault"


def test_the_proof_asks_for_the_process_that_a_lease_named_and_for_its_start() -> None:
    play = Play(spec(tenant("med")))
    play.enqueue("a", holder_pid=77, holder_started=4711)
    play.decide()
    play.run()
    play.end("a")
    play.enqueue("b")
    play.decide()
    play.decide()
    (departed,) = cast("list[Mapping[str, object]]", play.pending("vacate").args["departed"])
    assert (departed["pid"], departed["started"]) == (77, 4711)


def test_who_waits_for_a_departed_process_is_told_its_number_at_once() -> None:
    play = Play(spec(tenant("med")))
    play.enqueue("a", holder_pid=77, label="encode")
    play.decide()
    play.run()
    play.end("a")
    play.enqueue("b")
    play.decide()
    assert "waiting for encode (pid 77) to end" in explain_lease(play.world, play.spec, play.lease("b"), 1)


def test_a_conversation_that_could_not_be_saved_is_an_alert() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="save", drain={"slots": [{"slot": 0, "tokens": 4000}]})
    for _ in range(2):
        play.answer(play.pending("save"), ok=False, detail="not in the slot folder")
    told = [alert.text for commit in play.commits for alert in commit.alerts]
    assert told == [f"a conversation of {MED} could not be saved: not in the slot folder"]


def test_a_fault_lasts_as_long_as_the_grace_of_a_holder_that_named_no_process() -> None:
    play = granted(default=True)
    play.pass_time(3_700_000)
    play.decide()  # held for longer than its max_hold: revoked, and it named no process
    (left,) = play.card.departed
    play.run(until="vacate")
    play.answer(play.pending("vacate"), ok=False, free_mib=0, holders=["a"])
    assert play.card.fault is not None
    assert not play.observe({MED: "unloaded"}, free_mib=24 * GIB)
    play.pass_time(left.free_ms - play.world.now_ms)
    assert play.observe({MED: "unloaded"}, free_mib=24 * GIB)
    assert play.card.fault is None


def test_who_was_not_seen_to_leave_at_its_release_has_to_be_seen_gone_by_the_proof() -> None:
    play = Play(spec(tenant("med"), tenant("small", 4 * GIB, evict_never=True)), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="release")
    for _ in range(2):
        play.answer(play.pending("release"), ok=False, detail="it would not")
    assert play.pending("vacate").args["leaving"] == [MED]


def test_a_fault_names_its_holders_or_nobody_or_why_it_was_not_looked() -> None:
    said: dict[str, object] = {"free_mib": 8_192, "holders": list[str]()}
    cases: tuple[tuple[dict[str, object], str], ...] = (
        (said, "8192 MiB free of the 24576 needed; held by nobody we can name"),
        ({}, "the agent's own sentence"),
        ({**said, "unread": "the driver is gone"}, "the agent's own sentence"),
    )
    for data, reason in cases:
        play = Play(spec(tenant("med")), MED)
        play.enqueue("a")
        play.decide()
        play.run(until="vacate")
        play.say(play.pending("vacate"), data, ok=False, detail="the agent's own sentence")
        assert play.card.fault is not None
        assert play.card.fault.reason == reason
