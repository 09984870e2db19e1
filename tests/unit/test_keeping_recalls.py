"""Conversations in no slot, or not fit to be saved as they lie: their requests are sent again before the save."""

from __future__ import annotations

from swapper.core import keeping, saving
from swapper.core.conversations import ProofResult
from swapper.core.types import LeaseState
from tests.support.play import MED, Play, spec, tenant
from tests.unit.keeping_play import A, B, C, leave, leaving, lines, save_all, saves, talk


def test_the_ones_used_last_are_recalled_first_and_named_so() -> None:
    """Also where one of them lies in a slot, and is rewound there."""
    talks = [talk(A, 900, 1), talk(B, 1500, 3), talk(C, 700, 2, slot=0)]
    play = leaving(talks, [{"slot": 0, "tokens": 700}], ("rewind", "replay"))
    recalled = [args["conversation"] for verb, args in save_all(play) if verb == keeping.RECALL]
    assert recalled == [B, C, A]


def test_beyond_the_slots_one_after_the_other_is_recalled_and_saved_the_most_recent_first() -> None:
    talks = [talk(A, 1500, 3), talk(B, 800, 2), talk(C, 700, 1)]
    play = leaving(talks, [{"slot": 0, "tokens": 1500}])
    done = save_all(play)
    assert [verb for verb, _ in done] == ["save", "recall", "save", "recall", "save"]
    assert [args["conversation"] for verb, args in done if verb == "recall"] == [B, C]
    assert done[2][1]["slot"] == 1
    play.run()
    assert play.lease("a").state is LeaseState.GRANTED
    assert [c.head for c in play.card.saved] == [A, B, C]


def test_a_hybrid_model_is_rewound_before_each_save_and_what_nobody_knows_is_saved_as_it_is() -> None:
    slots = [{"slot": 0, "tokens": 1500}, {"slot": 1, "tokens": 444}]
    play = leaving([talk(A, 1500, 2)], slots, ("rewind", "replay"))
    (plain,) = saves(play)
    assert (plain.args["slot"], plain.args["strategy"]) == (1, "slots")
    done = save_all(play)
    assert [verb for verb, _ in done] == ["save", "recall", "save"]
    assert done[2][1]["strategy"] == "rewind"


def test_one_that_lies_in_a_slot_and_cannot_be_rewound_is_saved_as_it_lies() -> None:
    play = leaving([talk(A, 900, 2)], [{"slot": 1, "tokens": 900}], ["rewind", "replay"])
    play.answer(play.pending("recall"), ok=False, detail="no answer")
    (save,) = saves(play)
    assert (save.args["slot"], save.args["strategy"]) == (1, "slots")


def test_one_whose_slot_was_taken_by_a_recall_is_not_saved_from_there() -> None:
    slots = [{"slot": 0, "tokens": 800}, {"slot": 1, "tokens": 900}]
    play = leaving([talk(A, 900, 2), talk(B, 800, 1)], slots, ["rewind", "replay"])
    play.answer(play.pending("recall"), slot=0, tokens=890, cache_n=0, prompt_n=890)
    play.answer(play.pending("save"), tokens=890)
    play.answer(play.pending("recall"), ok=False, detail="no answer")
    assert play.swap.stage == "release"
    assert (lines(play)[B].result, lines(play)[B].reason) == (ProofResult.COLD, "no answer")


def test_a_recall_that_fails_makes_one_conversation_cold_and_the_others_are_saved() -> None:
    play = leaving([talk(A, 900, 2), talk(B, 800, 1)], [])
    play.answer(play.pending("recall"), ok=False, detail="it took longer than 15 s")
    assert lines(play)[A].reason == "it took longer than 15 s"
    assert save_all(play)[0][1]["conversation"] == B


def test_when_a_gateway_dies_over_a_recall_its_conversations_are_cold_and_the_swap_goes_on() -> None:
    play = leaving([talk(A, 900, 2), talk(B, 800, 1)], [])
    play.gateways()
    play.decide()
    assert play.swap.stage == "release"
    assert {c.reason for c in play.swap.conversations} == {"the gateway that had its last request is gone"}


def test_of_a_gateway_that_dies_over_a_recall_another_is_asked_which_may_have_found_the_text_on_disk() -> None:
    play = leaving([talk(A, 900, 2)], [])
    first = play.pending("recall")
    play.gateways("g2")
    play.decide()
    again = play.pending("recall")
    assert (first.executor, again.executor) == ("gateway:g1", "gateway:g2")
    assert again.args["conversation"] == A
    play.answer(again, ok=False, detail="its last request is not kept (any more)")
    assert lines(play)[A].reason == "its last request is not kept (any more)"


def test_the_time_for_recalls_ends_with_the_drain_limit_of_who_waits() -> None:
    play = leaving([talk(A, 900, 2), talk(B, 800, 1)], [])
    play.pass_time(play.spec.policy.drain_ms[play.lease("a").request.klass])
    play.answer(play.pending("recall"), slot=0, tokens=900)
    play.answer(play.pending("save"), tokens=900, bytes=1)
    assert lines(play)[B].reason == "there was no time left to recall it"
    assert play.swap.stage == "release"


def test_a_drain_that_lasts_to_its_limit_takes_no_time_from_the_saving() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.pass_time(play.spec.policy.drain_ms[play.lease("a").request.klass] - 1)
    leave(play, [talk(A, 900, 2)], [])
    assert play.pending("recall").args["limit_ms"] == keeping.RECALL_MS


def test_after_two_that_were_not_in_the_cache_any_more_the_older_ones_are_not_looked_for() -> None:
    play = leaving([talk(A, 900, 3), talk(B, 800, 2), talk(C, 700, 1)], [])
    for _ in range(2):
        play.say(play.pending("recall"), {"evicted": True}, ok=False, detail="not in the cache")
    assert play.swap.stage == "release"
    assert "cannot be there either" in (lines(play)[C].reason or "")


def test_more_than_are_recalled_at_a_time_are_said_cold_before_anything_is_unloaded() -> None:
    many = [talk(f"{n:032x}", 900 + n, n) for n in range(saving.MOST + 1)]
    play = leaving(many, [])
    assert "used after it" in (lines(play)[f"{0:032x}"].reason or "")
    assert sum(c.recall for c in play.swap.conversations) == saving.MOST


def test_what_is_too_short_to_be_worth_it_is_not_recalled_and_holds_nothing_up() -> None:
    play = leaving([talk(A, 900, 2), talk(B, 14, 1)], [], save_required=True)
    assert [args["conversation"] for verb, args in save_all(play) if verb == "recall"] == [A]
    assert lines(play)[B].reason == saving.TOO_SHORT
    assert not play.swap.back


def test_a_recall_that_fails_turns_a_swap_back_where_conversations_are_required() -> None:
    play = leaving([talk(A, 900, 2)], [], save_required=True)
    play.answer(play.pending("recall"), ok=False, detail="no answer")
    assert play.swap.back
    play.run()
    assert play.lease("a").state is LeaseState.FAILED


def test_a_required_conversation_whose_gateway_dies_before_its_recall_turns_the_swap_back() -> None:
    play = leaving([talk(A, 900, 2)], [], save_required=True)
    play.gateways()
    play.decide()
    assert play.log["sw_100"].outcome == "compensated"
    assert play.card.residents == (MED,)
