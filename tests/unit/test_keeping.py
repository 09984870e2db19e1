"""What is saved of the slots of a tenant that leaves, under which name, and what is said of what cannot be kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import saving
from swapper.core.conversations import Conversation, ProofResult
from tests.support.play import MED
from tests.unit.keeping_play import A, B, leaving, lines, save_all, saves, talk


def test_a_slot_is_saved_as_the_only_conversation_of_as_many_tokens() -> None:
    play = leaving([talk(A, 1500, 2), talk(B, 900, 1)], [{"slot": 0, "tokens": 900}, {"slot": 1, "tokens": 1500}])
    found = {c.args["slot"]: c.args["conversation"] for c in saves(play)}
    assert found[0] == {"id": B, "links": [B], "used_ms": 1}
    assert found[1] == {"id": A, "links": [A], "used_ms": 2}


def test_of_one_that_two_gateways_tell_of_the_later_use_counts_and_who_has_its_request() -> None:
    early, late = (Conversation(MED, n, "", 100 * n, 0, head=A, used_ms=n, gateway=f"g{n}") for n in (1, 2))
    for told in ((early, late), (late, early)):
        assert saving.newest(told) == [late]
    nobody = replace(late, gateway=None)
    for told in ((nobody, late), (late, nobody)):
        assert saving.newest(told) == [late]


def test_where_the_gateway_knows_the_slot_equal_lengths_are_told_apart() -> None:
    slots = [{"slot": 0, "tokens": 1500}, {"slot": 1, "tokens": 1500}]
    play = leaving([talk(A, 1500, 2, slot=1), talk(B, 1500, 1)], slots)
    found = {c.args["slot"]: c.args["conversation"] for c in saves(play)}
    assert {slot: said["id"] for slot, said in found.items()} == {1: A, 0: B}  # pyright: ignore[reportIndexIssue]


def test_slots_of_equal_length_that_nobody_tells_apart_are_not_saved_but_their_conversations_recalled() -> None:
    slots = [{"slot": 0, "tokens": 1500}, {"slot": 1, "tokens": 1500}, {"slot": 2, "tokens": 7}]
    play = leaving([talk(A, 1500, 2), talk(B, 1500, 1)], slots)
    assert [c.args["slot"] for c in saves(play)] == [2]
    assert [verb for verb, _ in save_all(play)] == ["save", "recall", "save", "recall", "save"]


def test_without_sweep_what_is_beyond_the_slots_is_cold_and_said_so() -> None:
    play = leaving([talk(A, 1500, 2), talk(B, 800, 1)], [{"slot": 0, "tokens": 1500}], sweep=False)
    assert [c.verb for c in play.swap.pending] == ["save"]
    assert lines(play)[B].result is ProofResult.COLD
    assert "sweep: false" in (lines(play)[B].reason or "")


def test_a_conversation_whose_text_is_not_kept_cannot_be_recalled_and_is_cold() -> None:
    play = leaving([talk(A, 1500, 2), talk(B, 800, 1, recallable=False)], [{"slot": 0, "tokens": 1500}])
    assert "not kept" in (lines(play)[B].reason or "")


@pytest.mark.parametrize(
    ("talks", "strategies"),
    [([talk(A, 9, 1, recallable=False)], ["replay"]), ([talk(A, 9, 1)], [])],
)
def test_where_conversations_are_required_nothing_is_unloaded_that_cannot_be_kept(
    talks: list[dict[str, object]], strategies: list[str]
) -> None:
    play = leaving(talks, [], strategies, save_required=True)
    assert play.swap.back
    assert play.card.residents == (MED,)


def test_what_was_restored_and_not_used_since_is_saved_as_it_is_and_keeps_its_name() -> None:
    untouched = talk(A, 1500, 2, slot=1, snapshot="old.kv", restored=True)
    play = leaving([untouched], [{"slot": 1, "tokens": 0}], ["rewind", "replay"])
    (save,) = saves(play)
    assert (save.args["slot"], save.args["strategy"], save.args["replaces"]) == (1, "rewind", "old.kv")
    assert save.args["conversation"] == {"id": A, "links": [A], "used_ms": 2}
    assert not lines(play)[A].restored


def test_a_new_save_of_a_conversation_names_the_snapshot_it_came_back_from() -> None:
    play = leaving([talk(A, 900, 2, snapshot="old.kv")], [])
    play.answer(play.pending("recall"), slot=0, tokens=900)
    assert play.pending("save").args["replaces"] == "old.kv"


def test_where_only_texts_are_kept_a_slot_that_nobody_knows_is_said_to_be_lost() -> None:
    play = leaving([talk(A, 900, 2)], [{"slot": 0, "tokens": 900}, {"slot": 1, "tokens": 77}], ["replay"])
    cold = [c for c in play.swap.conversations if c.result is ProofResult.COLD]
    assert [(c.slot, c.tokens) for c in cold] == [(1, 77)]


@pytest.mark.parametrize("strategies", [["replay"], []], ids=["replay", "off"])
def test_a_slot_that_nobody_knows_is_said_to_be_lost_and_holds_nothing_up_where_conversations_are_required(
    strategies: list[str],
) -> None:
    """Nobody will ever be able to keep it: its gateway died, and it would hold the card for ever."""
    play = leaving([], [{"slot": 1, "tokens": 77}], strategies, save_required=True)
    assert play.swap.stage == "release"
    assert [(c.slot, c.tokens, c.result) for c in play.swap.conversations] == [(1, 77, ProofResult.COLD)]
    assert all(c.reason for c in play.swap.conversations)


def test_a_known_conversation_whose_slot_turns_out_empty_is_said_to_be_cold() -> None:
    play = leaving([talk(A, 900, 2)], [{"slot": 0, "tokens": 900}, {"slot": 1, "tokens": 77}])
    for save in saves(play):
        play.answer(save, tokens=0, bytes=0)
    assert play.swap.stage == "release"
    assert [(c.head, c.result, bool(c.reason)) for c in play.swap.conversations] == [(A, ProofResult.COLD, True)]


def test_a_conversation_that_an_unnamed_slot_might_have_held_is_cold_once_that_one_turns_out_empty() -> None:
    play = leaving([talk(A, 900, 2, recallable=False)], [{"slot": 0, "tokens": 0}])
    assert [c.head for c in play.swap.conversations] == [""]
    play.answer(play.pending("save"), tokens=0, bytes=0)
    assert play.swap.stage == "release"
    assert [(c.head, c.result, bool(c.reason)) for c in play.swap.conversations] == [(A, ProofResult.COLD, True)]


def test_what_cannot_be_recalled_but_came_from_a_snapshot_is_kept_as_it_was_saved_before() -> None:
    old = talk(A, 900, 2, recallable=False, snapshot="old.kv")
    play = leaving([old], [], save_required=True)
    assert play.swap.stage == "release"
    assert (lines(play)[A].snapshot, lines(play)[A].saved) == ("old.kv", True)
    assert "as it was saved before" in (lines(play)[A].reason or "")


def test_what_was_restored_in_vain_before_holds_nothing_up_where_conversations_are_required() -> None:
    vain = talk(A, 900, 2, recallable=False, restored=True)
    play = leaving([vain], [], ["replay"], save_required=True)
    assert play.swap.stage == "release"
    assert lines(play)[A].result is ProofResult.COLD


def test_an_older_state_of_a_conversation_that_another_gateway_knows_is_not_saved_beside_it() -> None:
    newer = {**talk(B, 900, 2), "links": [A, B]}
    play = leaving([talk(A, 800, 1), newer], [])
    save_all(play)
    assert [c.head for c in play.swap.conversations] == [B]


def test_what_came_from_a_snapshot_that_another_has_gone_on_from_is_not_said_to_be_as_it_was_saved_before() -> None:
    """The save of the one that has gone on replaces that file."""
    grown = talk(B, 900, 2, snapshot="old.kv")
    untouched = talk(A, 800, 1, recallable=False, snapshot="old.kv", restored=True)
    play = leaving([untouched, grown], [])
    save_all(play)
    assert [c.head for c in play.swap.conversations] == [B]
    used = {**untouched, "restored": False}
    play = leaving([used, grown], [])
    save_all(play)
    assert (lines(play)[A].saved, lines(play)[A].result) == (False, ProofResult.COLD)


@pytest.mark.parametrize("slot", [1, None])
def test_what_was_restored_is_not_where_something_ran_since_though_as_many_tokens_are_there(slot: int | None) -> None:
    restored = talk(A, 1500, 2, slot=slot, snapshot="old.kv", restored=True)
    play = leaving([restored, talk(B, 0, 3)], [{"slot": 1, "tokens": 1500, "gone_on": True}])
    assert saves(play) == []
    assert {name: (line.slot, line.recall) for name, line in lines(play).items()} == {A: (-1, True), B: (-1, True)}
