"""What is saved of a tenant that leaves, in which order, and what comes back: by slots, by recalls, by its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from swapper.core import keeping, reuse, saving
from swapper.core.commit import Commit
from swapper.core.conversations import Conversation, ProofResult, Strategy
from swapper.core.types import Command, LeaseState, Report, Swap
from tests.support.play import MED, Play, spec, tenant

Offer = Callable[[Play], Sequence[Mapping[str, object]]]
A, B, C = "a" * 32, "b" * 32, "c" * 32


def talk(id: str, tokens: int, used_ms: int, **more: object) -> dict[str, object]:
    return {"id": id, "links": [id], "tokens": tokens, "used_ms": used_ms, "recallable": True, **more}


def leaving(
    talks: Sequence[Mapping[str, object]],
    slots: Sequence[Mapping[str, int]],
    strategies: Sequence[str] = ("slots", "replay"),
    fingerprint: str = "f1",
    **traits: bool,
) -> Play:
    """A lease wants the card that med serves; its drain is answered."""
    play = Play(spec(tenant("med", **traits)), MED)
    play.enqueue("a")
    play.decide()
    leave(play, talks, slots, strategies, fingerprint)
    return play


def leave(
    play: Play,
    talks: Sequence[Mapping[str, object]],
    slots: Sequence[Mapping[str, int]],
    strategies: Sequence[str] = ("slots", "replay"),
    fingerprint: str = "f1",
) -> None:
    play.say(play.pending("close"), {"in_flight": 0, "talks": talks})
    play.say(play.pending("drain"), {"slots": slots, "strategies": strategies, "fingerprint": fingerprint})


def saves(play: Play) -> list[Command]:
    return [c for c in play.swap.pending if c.verb == "save"]


def save_all(play: Play) -> list[tuple[str, Mapping[str, object]]]:
    """Answer recalls and saves until the release; what was commanded, in order."""
    done: list[tuple[str, Mapping[str, object]]] = []
    while play.swap.stage == "save":
        command = play.swap.pending[0]
        done.append((command.verb, command.args))
        if command.verb == keeping.RECALL:
            play.answer(command, slot=1, tokens=1500, cache_n=1499, prompt_n=1)
        else:
            play.answer(command, tokens=1500, bytes=3 << 20)
    return done


def back(play: Play, offer: Offer, n_slots: int = 2, **load: object) -> Play:
    """The lease ends and the resident comes back, its agent offering snapshots; stops when the gateway is to open."""
    play.run()
    snapshots = offer(play)
    play.end("a")
    play.decide()
    play.run(until="load")
    play.say(play.pending("load"), {"n_slots": n_slots, "snapshots": snapshots, **load})
    play.run(until="open", restore={"tokens": 1500})
    return play


def offered(play: Play) -> list[dict[str, object]]:
    return [
        {"snapshot": c.snapshot, "slot": c.slot, "tokens": c.tokens, "bytes": c.bytes, "id": c.head, "links": [c.head]}
        for c in sorted(play.card.saved, key=lambda c: -c.used_ms)
        if c.strategy != Strategy.REPLAY
    ]


def nothing(_: Play) -> list[dict[str, object]]:
    return []


def lines(play: Play) -> dict[str, Conversation]:
    return {c.head: c for c in play.swap.conversations}


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


def test_the_ones_used_last_are_recalled_first_and_named_so() -> None:
    """Also where one of them lies in a slot, and is rewound there."""
    talks = [talk(A, 900, 1), talk(B, 1500, 3), talk(C, 700, 2, slot=0)]
    play = leaving(talks, [{"slot": 0, "tokens": 700}], ("rewind", "replay"))
    recalled = [args["conversation"] for verb, args in save_all(play) if verb == keeping.RECALL]
    assert recalled == [B, C, A]


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


def test_without_sweep_what_is_beyond_the_slots_is_cold_and_said_so() -> None:
    play = leaving([talk(A, 1500, 2), talk(B, 800, 1)], [{"slot": 0, "tokens": 1500}], sweep=False)
    assert [c.verb for c in play.swap.pending] == ["save"]
    assert lines(play)[B].result is ProofResult.COLD
    assert "sweep: false" in (lines(play)[B].reason or "")


def test_a_conversation_whose_text_is_not_kept_cannot_be_recalled_and_is_cold() -> None:
    play = leaving([talk(A, 1500, 2), talk(B, 800, 1, recallable=False)], [{"slot": 0, "tokens": 1500}])
    assert "not kept" in (lines(play)[B].reason or "")


def test_a_hybrid_model_is_rewound_before_each_save_and_what_nobody_knows_is_saved_as_it_is() -> None:
    slots = [{"slot": 0, "tokens": 1500}, {"slot": 1, "tokens": 444}]
    play = leaving([talk(A, 1500, 2)], slots, ("rewind", "replay"))
    (plain,) = saves(play)
    assert (plain.args["slot"], plain.args["strategy"]) == (1, "slots")
    done = save_all(play)
    assert [verb for verb, _ in done] == ["save", "recall", "save"]
    assert done[2][1]["strategy"] == "rewind"


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


def test_the_time_for_recalls_ends_with_the_drain_limit_of_who_waits() -> None:
    play = leaving([talk(A, 900, 2), talk(B, 800, 1)], [])
    play.pass_time(play.spec.policy.drain_ms[play.lease("a").request.klass])
    play.answer(play.pending("recall"), slot=0, tokens=900)
    play.answer(play.pending("save"), tokens=900, bytes=1)
    assert lines(play)[B].reason == "there was no time left to recall it"
    assert play.swap.stage == "release"


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


def test_a_recall_that_fails_turns_a_swap_back_where_conversations_are_required() -> None:
    play = leaving([talk(A, 900, 2)], [], save_required=True)
    play.answer(play.pending("recall"), ok=False, detail="no answer")
    assert play.swap.back
    play.run()
    assert play.lease("a").state is LeaseState.FAILED


def test_a_model_that_cannot_be_restored_keeps_the_text_alone_and_its_gateway_replays_it() -> None:
    play = leaving([talk(A, 900, 2), talk(B, 800, 1)], [{"slot": 0, "tokens": 900}], ["replay"])
    assert play.swap.stage == "release"
    back(play, nothing, n_slots=1, strategies=["replay"], fingerprint="f1")
    args = play.pending("open").args
    assert args["recall"] == [{"snapshot": f"replay:{A}", "id": A, "tokens": 900, "gateway": "gateway:g1"}]
    assert args["loaded"] is True
    assert "more conversations than slots" in (lines(play)[B].reason or "")


def test_a_replay_is_unproved_until_an_answer_shows_reuse() -> None:
    play = leaving([talk(A, 900, 2)], [], ["replay"])
    back(play, nothing, strategies=["replay"], fingerprint="f1").run()
    swap = play.log["sw_101"]
    said = Report(
        "gateway:g1", "gpu0", MED, 0, 0, "recalled", "ok", data={"snapshot": f"replay:{A}", "slot": 1, "tokens": 890}
    )
    commit = reuse.on_recalled(play.card, swap, said)
    assert commit is not None
    (line,) = commit.conversations
    assert (line.restored, line.slot, line.tokens, line.result) == (True, 1, 890, ProofResult.UNPROVED)
    assert reuse.on_recalled(play.card, commit.swaps[0], said) is None


def test_what_does_not_fit_the_slots_stays_on_disk_and_the_gateways_are_told() -> None:
    play = leaving([talk(A, 900, 3), talk(B, 800, 2), talk(C, 700, 1)], [])
    save_all(play)
    back(play, offered)
    args = play.pending("open").args
    assert [one["id"] for one in args["unproved"]] == [A, B]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    assert [one["id"] for one in args["kept"]] == [C]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]


def test_a_refused_snapshot_is_cold_and_its_text_is_replayed_on_a_second_line() -> None:
    play = leaving([talk(A, 900, 3)], [])
    save_all(play)
    why = "saved under another llama-server build"
    back(play, lambda play: [{**one, "refused": why} for one in offered(play)])
    cold, again = play.swap.conversations
    assert (cold.result, cold.reason) == (ProofResult.COLD, why)
    assert (again.strategy, again.head, again.result) == ("replay", A, None)
    assert play.pending("open").args["recall"]


def proof(snapshot: str, **data: object) -> Report:
    return Report("gateway:g1", "gpu0", MED, 0, 0, "proof", "ok", data={"snapshot": snapshot, **data})


def read_anew(play: Play, swap: Swap, nth: int) -> Commit:
    told = proof(swap.conversations[nth].snapshot, result="cold", reason="read again", continued=True)
    commit = reuse.on_proof(play.card, swap, told)
    assert commit is not None
    play.apply(commit)
    return commit


def two_came_back() -> tuple[Play, Swap]:
    play = leaving([talk(A, 900, 3), talk(B, 800, 2)], [])
    save_all(play)
    back(play, offered, strategies=["slots", "replay"], fingerprint="f1").run()
    return play, play.log["sw_101"]


def test_two_continued_conversations_that_were_read_anew_demote_a_strategy_for_that_model_build_and_preset() -> None:
    play, swap = two_came_back()
    assert not read_anew(play, swap, 0).alerts
    assert keeping.of(play.card, MED).strategy is Strategy.SLOTS
    commit = read_anew(play, swap, 1)
    assert keeping.of(play.card, MED).strategy is Strategy.REPLAY
    assert "from now on: replay" in commit.alerts[0].text
    play.enqueue("b")
    play.decide()
    leave(play, [talk(A, 900, 3)], [{"slot": 0, "tokens": 900}])
    assert play.swap.stage == "release"
    assert lines(play)[A].strategy == "replay"


def test_a_strategy_that_brought_one_back_warm_is_not_doubted_again() -> None:
    play, swap = two_came_back()
    commit = reuse.on_proof(play.card, swap, proof(swap.conversations[0].snapshot, result="warm", cache_n=900))
    assert commit is not None
    play.apply(commit)
    for _ in range(keeping.DOUBTS):
        play.apply(replace(commit, cards=(keeping.doubt(play.card, MED, "slots", "bad luck"),)))
    assert keeping.of(play.card, MED).strategy is Strategy.SLOTS


def test_a_new_build_gets_every_strategy_again() -> None:
    play = leaving([talk(A, 900, 3)], [])
    card = play.card
    for _ in range(keeping.DOUBTS):
        card = keeping.doubt(card, MED, "slots", "seen to fail")
    assert keeping.of(card, MED).strategy is Strategy.REPLAY
    play.world.cards["gpu0"] = card  # pyright: ignore[reportIndexIssue]
    save_all(play)
    back(play, nothing, strategies=["slots", "replay"], fingerprint="f2")
    assert keeping.of(play.card, MED).strategy is Strategy.SLOTS


def test_an_edited_conversation_that_was_read_anew_demotes_nothing() -> None:
    play = leaving([talk(A, 900, 3)], [])
    save_all(play)
    back(play, offered).run()
    swap = play.log["sw_101"]
    commit = reuse.on_proof(play.card, swap, proof(swap.conversations[0].snapshot, result="cold", reason="edited"))
    assert commit is not None
    assert not commit.alerts
    assert commit.conversations[0].result is ProofResult.COLD


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


def test_a_conversation_nobody_knows_that_finds_no_room_is_said_to_be_cold() -> None:
    """Nobody will ask for it, so that it cannot come back on demand."""
    play = leaving([], [{"slot": 0, "tokens": 900}, {"slot": 1, "tokens": 77}])
    save_all(play)
    back(play, offered, n_slots=1)
    assert [(c.slot, c.result, bool(c.reason)) for c in play.swap.conversations] == [
        (0, ProofResult.UNPROVED, False),
        (-1, ProofResult.COLD, True),
    ]


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


def test_slots_that_share_one_cache_take_no_more_than_it_holds_and_the_rest_stays_on_disk() -> None:
    play = leaving([talk(A, 1500, 3), talk(B, 1500, 2)], [])
    save_all(play)
    back(play, offered, n_ctx_shared=2000)
    assert [c.verb for c in play.swap.pending] == ["open"]
    kept = {c.head: c.kept for c in play.swap.conversations}
    assert kept == {A: False, B: True}


def test_a_gateway_that_took_over_from_one_that_died_is_asked_to_replay() -> None:
    play = leaving([talk(A, 900, 2)], [], ["replay"])
    play.run()
    play.gateways("g2")
    back(play, nothing, strategies=["replay"], fingerprint="f1")
    (again,) = play.pending("open").args["recall"]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    assert again["gateway"] == "gateway:g2"


def test_a_required_conversation_whose_gateway_dies_before_its_recall_turns_the_swap_back() -> None:
    play = leaving([talk(A, 900, 2)], [], save_required=True)
    play.gateways()
    play.decide()
    assert play.log["sw_100"].outcome == "compensated"
    assert play.card.residents == (MED,)


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


def test_an_older_state_of_a_conversation_that_another_gateway_knows_is_not_saved_beside_it() -> None:
    newer = {**talk(B, 900, 2), "links": [A, B]}
    play = leaving([talk(A, 800, 1), newer], [])
    save_all(play)
    assert [c.head for c in play.swap.conversations] == [B]


def test_a_text_whose_turn_to_be_replayed_did_not_come_is_kept_for_the_next_load() -> None:
    play = leaving([talk(A, 900, 2, unread=True), talk(B, 800, 1)], [{"slot": 0, "tokens": 800}])
    save_all(play)
    assert (lines(play)[A].strategy, lines(play)[A].saved) == ("replay", True)
    back(play, offered)
    assert [one["id"] for one in play.pending("open").args["recall"]] == [A]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]


def test_a_swap_that_turns_back_before_its_release_has_nothing_replayed() -> None:
    play = leaving([talk(A, 900, 2)], [], ["replay"], save_required=False)
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.say(play.pending("close"), {"in_flight": 0, "talks": [talk(A, 900, 2), talk(B, 800, 1)]})
    play.say(play.pending("drain"), {"slots": [{"slot": 0, "tokens": 800}], "strategies": ["slots"], "fingerprint": ""})
    play.end("a", LeaseState.CANCELLED)
    play.decide()
    assert play.swap.back
    assert play.pending("open").args["recall"] == []


def test_more_than_are_recalled_at_a_time_are_said_cold_before_anything_is_unloaded() -> None:
    many = [talk(f"{n:032x}", 900 + n, n) for n in range(saving.MOST + 1)]
    play = leaving(many, [])
    assert "used after it" in (lines(play)[f"{0:032x}"].reason or "")
    assert sum(c.recall for c in play.swap.conversations) == saving.MOST


def test_what_made_room_and_came_back_gets_a_line_of_its_own_once_it_is_proved() -> None:
    play = leaving([talk(A, 900, 3)], [])
    save_all(play)
    back(play, offered).run()
    swap = play.log["sw_101"]
    said = proof("med.9.d.kv", result="warm", cache_n=500, tokens=510, made_room=True)
    commit = reuse.on_proof(play.card, swap, said)
    assert commit is not None
    assert [c.snapshot for c in commit.swaps[0].conversations][-1] == "med.9.d.kv"
    assert commit.conversations[0].result is ProofResult.WARM


def test_what_is_too_short_to_be_worth_it_is_not_recalled_and_holds_nothing_up() -> None:
    play = leaving([talk(A, 900, 2), talk(B, 14, 1)], [], save_required=True)
    assert [args["conversation"] for verb, args in save_all(play) if verb == "recall"] == [A]
    assert lines(play)[B].reason == saving.TOO_SHORT
    assert not play.swap.back
