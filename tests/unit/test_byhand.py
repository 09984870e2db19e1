"""What is asked for by hand: loads, unloads, vacated cards and pins, played on the card machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import turn
from swapper.core.commit import AlertKind
from swapper.core.errand import Errand, Verb
from swapper.core.explain import explain_demand, explain_errand, explain_lease
from swapper.core.types import Fault, LeaseState, Step, StepOutcome, Swap, WorkClass
from tests.support.play import DRAIN, GIB, MED, SAVED, SLOTS, SMALL, Play, granted, offers, spec, tenant

LARGE = "llama/large"


def play(*residents: str, on_drain_limit: str = "end") -> Play:
    """A default, one beside which it fits, and one that needs the whole card."""
    tenants = (tenant("med", default=True), tenant("small", 4 * GIB), tenant("large", 20 * GIB))
    return Play(spec(*tenants, on_drain_limit=on_drain_limit), *residents)


def run(of: Play) -> None:
    of.run(drain={"slots": SLOTS}, save=SAVED, load={"n_slots": 2, "snapshots": offers(of)})


def do(of: Play, verb: Verb, *tenants: str, force: bool = False, drain_ms: int | None = None) -> Swap:
    """Asked for, and done at once."""
    name = of.by_hand(verb, *tenants, force=force, drain_ms=drain_ms)
    of.decide()
    run(of)
    assert name not in {errand.id for errand in of.world.errands}
    return of.log[name]


def waiting(of: Play) -> Errand:
    """The one errand that is not over."""
    (errand,) = of.world.errands
    return errand


# Loads.


def test_a_load_is_an_ordinary_swap_under_the_id_it_was_asked_for_by() -> None:
    found = play(MED)
    swap = do(found, Verb.LOAD, SMALL)
    assert (swap.cause, swap.from_, swap.to, swap.outcome) == ("manual", (), (SMALL,), "done")
    assert found.card.residents == (MED, SMALL)
    assert found.world.gates[SMALL].open


def test_a_load_of_one_that_does_not_fit_sends_away_whom_a_call_would() -> None:
    by_hand, by_call = play(MED, SMALL), play(MED, SMALL)
    by_call.demand((LARGE, 1, 0))
    by_call.decide()
    left = by_call.swap.from_
    assert do(by_hand, Verb.LOAD, LARGE).from_ == left
    assert by_hand.card.residents == (LARGE,)


def test_a_load_of_one_that_is_there_is_done_and_says_so() -> None:
    found = play(MED)
    swap = do(found, Verb.LOAD, MED)
    assert (swap.outcome, swap.reason, swap.steps) == ("done", f"{MED} was on gpu0 already", ())


def test_a_load_waits_for_a_lease_and_says_for_which_and_is_not_lost() -> None:
    found = granted()
    found.by_hand(Verb.LOAD, MED)
    assert not found.decide()
    assert "load llama/med waits: gpu0 is held by a" in explain_errand(found.world, found.spec, waiting(found))
    found.end("a")
    found.decide()
    run(found)
    assert found.card.residents == (MED,)
    found.decide()
    assert found.world.errands == ()


def test_a_load_that_can_never_fit_ends_with_the_numbers() -> None:
    found = Play(spec(tenant("huge", 99 * GIB)))
    swap = do(found, Verb.LOAD, "llama/huge")
    assert swap.outcome == "compensated"
    assert swap.reason == "llama/huge needs 101,376 MiB, and gpu0 has 24,576 MiB to give"


def test_a_load_that_fails_ends_with_the_reason_and_is_not_tried_for_ever() -> None:
    found = play()
    name = found.by_hand(Verb.LOAD, LARGE)
    found.decide()
    found.run(until="load")
    for _ in range(2):  # once more, as any load
        found.answer(found.pending("load"), ok=False, detail="no such file")
    swap = found.log[name]
    assert swap.outcome == "compensated"
    assert "no such file" in (swap.reason or "")
    assert found.world.errands == ()


def test_who_could_not_be_loaded_and_rests_is_tried_at_once_by_hand() -> None:
    found = play()
    found.by_hand(Verb.LOAD, SMALL)
    found.decide()
    found.run(until="load")
    for _ in range(2):
        found.answer(found.pending("load"), ok=False, detail="no such file")
    assert found.card.failed[SMALL].retry_ms > found.world.now_ms
    assert do(found, Verb.LOAD, SMALL).outcome == "done"


def test_one_that_ran_out_of_memory_is_tried_once_more_under_the_same_id_with_one_fewer_beside_it() -> None:
    found = play(MED)
    name = found.by_hand(Verb.LOAD, SMALL)
    found.decide()
    found.run(until="load")
    for _ in range(2):
        found.answer(found.pending("load"), ok=False, detail="cudaMalloc failed", out_of_memory=True)
    assert found.log[name].outcome is None
    assert "once the agent beside the card" in explain_errand(found.world, found.spec, waiting(found))
    found.decide()
    assert (found.swap.id, found.swap.from_) == (name, (MED,))
    run(found)
    assert found.log[name].outcome == "done"
    assert found.card.residents == (SMALL,)


def test_who_comes_inside_a_lease_of_its_own_only_is_not_loaded_by_hand() -> None:
    found = Play(spec(tenant("comfyui", by_lease=True)))
    swap = do(found, Verb.LOAD, "llama/comfyui")
    assert (swap.outcome, swap.to) == ("compensated", ())
    assert "inside a lease of its own" in (swap.reason or "")


# Unloads.


def test_an_unload_drains_and_saves_as_for_a_lease_so_that_the_next_load_restores() -> None:
    found = play(MED)
    swap = do(found, Verb.UNLOAD, MED)
    assert [r.step for r in swap.steps] == [Step.CLOSE, Step.DRAIN, Step.SAVE, Step.RELEASE, Step.VACATE]
    assert [c.saved for c in swap.conversations] == [True, True]
    back = do(found, Verb.LOAD, MED)
    assert [c.restored for c in back.conversations] == [True, True]


def test_who_was_unloaded_by_hand_stays_away_until_it_is_asked_for() -> None:
    found = play(MED)
    do(found, Verb.UNLOAD, MED)
    found.pass_time(10 * found.spec.policy.idle_restore_ms)
    assert not found.decide()
    found.demand((MED, 1, 0))
    assert found.decide()
    run(found)
    assert found.card.unused == ()


def test_who_is_unloaded_while_a_lease_holds_the_card_does_not_come_back_after_it() -> None:
    found = granted(default=True)
    swap = do(found, Verb.UNLOAD, MED)
    assert (swap.outcome, swap.reason) == ("done", f"{MED} was not on gpu0")
    found.end("a")
    while found.decide():
        run(found)
    assert (found.card.residents, found.card.return_to) == ((), None)


def test_who_is_still_owed_is_not_kept_waiting_for_one_that_was_sent_off() -> None:
    found = play(MED, SMALL)
    found.enqueue("a")
    found.decide()
    run(found)
    do(found, Verb.UNLOAD, SMALL)
    assert found.card.return_to == (MED,)


def test_a_call_for_another_one_owed_does_not_bring_who_was_sent_off() -> None:
    found = play(MED, SMALL)
    found.enqueue("a")
    found.decide()
    run(found)
    do(found, Verb.UNLOAD, MED)
    found.end("a")
    found.demand((SMALL, 1, 0))
    found.decide()
    run(found)
    assert found.card.residents == (SMALL,)


def test_the_calls_in_flight_have_as_long_as_was_said_and_are_ended_then() -> None:
    found = play(MED)
    found.demand((MED, 0, 1))
    found.by_hand(Verb.UNLOAD, MED, drain_ms=30_000)
    found.decide()
    found.answer(found.pending("close"), in_flight=1)
    found.pass_time(29_999)
    assert not found.decide()
    found.pass_time(1)
    assert found.decide()
    assert found.swap.forced_ms == found.world.now_ms
    assert any(c.verb == "cut" for c in found.commits[-1].commands)


def test_with_no_time_at_all_a_model_without_calls_is_not_said_to_have_lost_any() -> None:
    found = play(MED)
    found.by_hand(Verb.UNLOAD, MED, drain_ms=0)
    found.decide()
    assert not found.decide()
    found.answer(found.pending("close"), in_flight=0)
    assert not found.decide()
    assert (found.swap.stage, found.swap.forced_ms) == (Step.DRAIN, None)


def test_without_a_word_they_have_as_long_as_their_class() -> None:
    found = play(MED)
    found.demand((MED, 0, 1))
    found.by_hand(Verb.UNLOAD, MED)
    found.decide()
    found.answer(found.pending("close"), in_flight=1)
    found.pass_time(DRAIN[WorkClass.INTERACTIVE] - 1)
    assert not found.decide()


def test_with_reopen_an_unload_whose_calls_go_on_is_given_up_and_says_so() -> None:
    found = play(MED, on_drain_limit="reopen")
    found.demand((MED, 0, 1))
    name = found.by_hand(Verb.UNLOAD, MED, drain_ms=1_000)
    found.decide()
    found.answer(found.pending("close"), in_flight=1)
    found.pass_time(1_000)
    found.decide()
    found.run()
    assert found.log[name].outcome == "compensated"
    assert "still running" in (found.log[name].reason or "")
    assert (found.card.residents, found.card.unused) == ((MED,), ())


def test_an_unload_of_who_is_not_there_is_done_at_once() -> None:
    found = play()
    assert do(found, Verb.UNLOAD, SMALL).outcome == "done"


def test_an_unload_waits_for_the_swap_that_brings_its_model() -> None:
    found = play()
    found.demand((MED, 1, 0))
    found.decide()
    name = found.by_hand(Verb.UNLOAD, MED)
    found.decide()
    assert waiting(found).id == name
    found.demand()
    run(found)
    found.decide()
    run(found)
    assert found.card.residents == ()
    assert found.log[name].outcome == "done"


def test_who_never_leaves_is_not_unloaded_and_it_says_why() -> None:
    found = Play(spec(tenant("frigate", evict_never=True)), "llama/frigate")
    swap = do(found, Verb.UNLOAD, "llama/frigate")
    assert (swap.outcome, found.card.residents) == ("compensated", ("llama/frigate",))
    assert "evict: never" in (swap.reason or "")


def test_an_unload_leaves_those_beside_it_alone_and_their_gates_open() -> None:
    found = play(MED, SMALL)
    do(found, Verb.UNLOAD, MED)
    assert found.card.residents == (SMALL,)


# One after the other.


def test_the_same_twice_is_done_once_and_both_end() -> None:
    found = play(MED)
    first, second = (found.by_hand(Verb.UNLOAD, MED) for _ in range(2))
    while found.decide():
        run(found)
    assert [found.log[name].outcome for name in (first, second)] == ["done", "done"]
    assert len(found.log[first].steps) == 5
    assert found.log[second].steps == ()


def test_an_unload_and_a_load_after_it_are_a_restart() -> None:
    found = play(MED)
    first, second = found.by_hand(Verb.UNLOAD, MED), found.by_hand(Verb.LOAD, MED)
    while found.decide():
        run(found)
    assert found.card.residents == (MED,)
    assert [bool(found.log[name].steps) for name in (first, second)] == [True, True]


def test_a_load_that_waits_is_taken_back_by_an_unload_after_it() -> None:
    found = granted()
    first, second = found.by_hand(Verb.LOAD, MED), found.by_hand(Verb.UNLOAD, MED)
    found.decide()
    assert found.log[first].outcome == "compensated"
    assert found.log[first].reason == f"taken back by unload {second}, which came after it"
    found.end("a")
    while found.decide():
        run(found)
    assert found.card.residents == ()


# Vacated cards.


def test_a_vacated_card_is_empty_and_nobody_comes_back_to_it_unasked() -> None:
    found = play(SMALL)  # the default is away: it was displaced
    swap = do(found, Verb.VACATE)
    assert (swap.from_, swap.outcome, found.card.residents) == ((SMALL,), "done", ())
    assert {*found.card.unused} == {MED, SMALL}, "nothing is said of one that would not have come by itself"
    found.pass_time(10 * found.spec.policy.idle_restore_ms)
    assert not found.decide()


def test_a_vacate_that_is_turned_back_keeps_nobody_off() -> None:
    tenants = (tenant("med", 20 * GIB, default=True), tenant("small", 8 * GIB, save_required=True))
    found = Play(spec(*tenants), SMALL)
    name = found.by_hand(Verb.VACATE)
    found.decide()
    found.run(until="save", drain={"slots": SLOTS})
    while "save" in found.verbs():
        found.answer(found.pending("save"), ok=False, detail="disk full")
    found.run()
    assert (found.log[name].outcome, found.card.residents, found.card.unused) == ("compensated", (SMALL,), ())


def test_a_card_whose_lease_goes_on_is_empty_once_that_ends() -> None:
    found = granted(default=True)
    swap = do(found, Verb.VACATE)
    assert "a keeps gpu0 until it ends" in (swap.reason or "")
    assert found.lease("a").state is LeaseState.GRANTED
    found.end("a")
    assert not any(found.decide() and found.card.residents for _ in range(2))


def test_by_force_leases_are_revoked_and_their_holders_seen_gone() -> None:
    found = granted()
    name = found.by_hand(Verb.VACATE, force=True)
    found.decide()
    assert found.lease("a").state is LeaseState.REVOKED
    assert name in (found.lease("a").reason or "")
    departed = found.pending("vacate").args["departed"]
    assert [one["lease"] for one in departed] == ["a"]  # pyright: ignore
    run(found)
    assert found.log[name].outcome == "done"


def test_by_force_a_lease_that_was_being_prepared_waits_again_and_is_not_lost() -> None:
    found = play(MED)
    found.enqueue("a")
    found.decide()
    found.demand((MED, 0, 1))
    found.answer(found.pending("close"), in_flight=1)
    name = found.by_hand(Verb.VACATE, force=True)
    found.decide()
    assert found.lease("a").state is LeaseState.QUEUED
    while found.decide() or found.card.swap is not None:
        run(found)
    assert found.log[name].outcome == "done"
    assert found.lease("a").state is LeaseState.GRANTED


def test_by_force_a_load_that_goes_on_is_stopped_and_who_left_for_it_stays_away() -> None:
    found = play(MED)
    found.demand((LARGE, 1, 0))
    found.decide()
    found.run(until="load", drain={"slots": SLOTS}, save=SAVED)
    name = found.by_hand(Verb.VACATE, force=True)
    found.decide()
    assert [(c.verb, c.tenant) for c in found.swap.pending] == [("release", LARGE)]
    found.demand()
    while found.decide() or found.card.swap is not None:
        run(found)
    assert (found.log[name].outcome, found.card.residents) == ("done", ())
    assert found.card.unused == (MED,)


def test_a_load_nobody_had_to_leave_for_that_is_stopped_by_force_ends_on_record() -> None:
    found = play()
    found.demand((MED, 1, 0))
    found.decide()
    found.run(until="load")
    stopped = found.swap.id
    found.by_hand(Verb.VACATE, force=True)
    found.decide()
    found.demand()
    found.run()
    assert found.log[stopped].outcome == "compensated"
    assert "vacated by force" in (found.log[stopped].reason or "")


def test_by_force_calls_end_as_soon_as_their_gate_is_shut_whatever_the_configuration_says() -> None:
    found = play(MED, on_drain_limit="reopen")
    found.demand((MED, 0, 1))
    found.by_hand(Verb.VACATE, force=True)
    found.decide()
    found.answer(found.pending("close"), in_flight=1)
    found.decide()
    assert any(c.verb == "cut" for c in found.commits[-1].commands)


def test_by_force_a_server_that_stays_busy_is_not_waited_for_and_what_it_held_is_said_to_be_lost() -> None:
    found = play(MED)
    name = found.by_hand(Verb.VACATE, force=True)
    found.decide()
    found.run(until="drain")
    while found.pending("drain").executor != "agent:main":
        found.answer(found.pending("drain"))
    found.pass_time(30_000)
    found.decide()
    found.answer(found.pending("cut"))
    found.pass_time(30_000)
    found.decide()
    assert found.verbs() == ["release"]
    run(found)
    swap = found.log[name]
    assert swap.outcome == "done"
    assert [c.reason for c in swap.conversations] == [
        "what its slots held is not known: the server is still busy with calls that did not come through swapper"
    ]
    assert StepOutcome.FORCED in {r.outcome for r in swap.steps}


def test_by_force_what_is_required_and_cannot_be_saved_holds_nobody_up() -> None:
    found = Play(spec(tenant("med", save_required=True)), MED)
    name = found.by_hand(Verb.VACATE, force=True)
    found.decide()
    found.run(until="save", drain={"slots": SLOTS})
    while "save" in found.verbs():
        found.answer(found.pending("save"), ok=False, detail="disk full")
    found.run()
    assert (found.log[name].outcome, found.card.residents) == ("done", ())


def at_fault() -> Play:
    found = play()
    fault = Fault("1 MiB free of the 2 needed; held by pid 7", 2, found.world.now_ms, 5, found.world.now_ms + 600_000)
    found.world = replace(found.world, cards={"gpu0": replace(found.card, fault=fault)})
    return found


def test_a_fault_is_left_by_force_and_said_to_be_over() -> None:
    found = at_fault()
    do(found, Verb.VACATE)
    assert found.card.fault is not None
    do(found, Verb.VACATE, force=True)
    assert found.card.fault is None
    over = [alert for commit in found.commits for alert in commit.alerts if alert.over]
    assert [alert.kind for alert in over] == [AlertKind.FAULT]


def test_a_model_can_be_unloaded_while_its_card_is_at_fault() -> None:
    found = at_fault()
    found.world = replace(found.world, cards={"gpu0": replace(found.card, residents=(MED,))})
    assert do(found, Verb.UNLOAD, MED).from_ == (MED,)


# Pins.


def pinned(*residents: str) -> Play:
    found = play(*residents)
    swap = do(found, Verb.PIN, MED)
    assert (swap.outcome, swap.steps, found.card.pinned) == ("done", (), (MED,))
    return found


def test_a_pinned_tenant_leaves_for_no_call_and_who_waits_is_told() -> None:
    found = pinned(MED)
    found.demand((LARGE, 1, 0))
    assert not found.decide()
    said = explain_demand(found.world, found.spec, LARGE)
    assert f"does not fit beside {MED}, pinned on gpu0; `swapper unpin {MED}` would make room" in said


def test_a_load_by_hand_that_a_pin_keeps_out_ends_and_says_so() -> None:
    found = pinned(MED)
    swap = do(found, Verb.LOAD, LARGE)
    assert (swap.outcome, found.card.residents) == ("compensated", (MED,))
    assert "pinned on gpu0" in (swap.reason or "")


@pytest.mark.parametrize("vram_mib", [None, 20 * GIB])
def test_a_lease_waits_for_a_pin_and_says_so_until_it_is_let_go(vram_mib: int | None) -> None:
    found = pinned(MED)
    found.enqueue("a", vram_mib=vram_mib)
    assert not found.decide()
    said = explain_lease(found.world, found.spec, found.lease("a"), 1)
    assert f"no room beside {MED}, pinned on gpu0; `swapper unpin {MED}` would make room" in said
    do(found, Verb.UNPIN, MED)
    assert found.lease("a").state is LeaseState.GRANTED


def test_a_lease_of_maintenance_waits_for_no_pin() -> None:
    found = pinned(MED)
    found.enqueue("a", WorkClass.MAINTENANCE)
    found.decide()
    run(found)
    assert found.lease("a").state is LeaseState.GRANTED
    found.end("a")
    found.decide()
    run(found)
    assert (found.card.residents, found.card.pinned) == ((MED,), (MED,))


def test_a_lease_beside_a_pinned_tenant_is_granted() -> None:
    found = pinned(MED)
    found.enqueue("a", vram_mib=8 * GIB)
    found.decide()
    run(found)
    assert found.lease("a").state is LeaseState.GRANTED


def test_by_hand_a_pinned_tenant_can_be_unloaded_and_is_pinned_when_it_is_there_again() -> None:
    found = pinned(MED)
    assert do(found, Verb.UNLOAD, MED).from_ == (MED,)
    do(found, Verb.LOAD, MED)
    found.demand((LARGE, 1, 0))
    assert not found.decide()


def test_a_pin_is_set_while_a_swap_runs_and_for_who_is_not_there_yet() -> None:
    found = play()
    found.demand((MED, 1, 0))
    found.decide()
    found.by_hand(Verb.PIN, MED)
    found.decide()
    assert found.card.pinned == (MED,)
    assert found.swap.to == (MED,)


def test_errands_of_a_card_that_is_configured_no_more_end_with_that() -> None:
    found = play()
    name = found.by_hand(Verb.LOAD, MED)
    gone = replace(found.spec, cards={})
    commit = turn.decide(found.world, gone, turn.Seen({"main"}), (), lambda: "sw").commit
    assert commit is not None
    assert commit.over == (name,)
    assert [(s.outcome, s.reason) for s in commit.swaps] == [("compensated", "card gpu0 is not configured any more")]
