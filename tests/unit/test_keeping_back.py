"""What comes back with a tenant: from its snapshots, from disk on demand, by its text; and what is proved of it."""

from __future__ import annotations

import pytest

from swapper.core import reuse
from swapper.core.conversations import ProofResult
from swapper.core.orders import Report
from swapper.core.types import LeaseState
from tests.support.play import MED, Play, spec, tenant
from tests.unit.keeping_play import A, B, C, back, leave, leaving, lines, nothing, offered, proof, save_all, talk


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


def test_slots_that_share_one_cache_take_no_more_than_it_holds_and_the_rest_stays_on_disk() -> None:
    play = leaving([talk(A, 1500, 3), talk(B, 1500, 2)], [])
    save_all(play)
    back(play, offered, n_ctx_shared=2000)
    assert [c.verb for c in play.swap.pending] == ["open"]
    kept = {c.head: c.kept for c in play.swap.conversations}
    assert kept == {A: False, B: True}


def test_a_refused_snapshot_is_cold_and_its_text_is_replayed_on_a_second_line() -> None:
    play = leaving([talk(A, 900, 3)], [])
    save_all(play)
    why = "saved under another llama-server build"
    back(play, lambda play: [{**one, "refused": why} for one in offered(play)])
    cold, again = play.swap.conversations
    assert (cold.result, cold.reason) == (ProofResult.COLD, why)
    assert (again.strategy, again.head, again.result) == ("replay", A, None)
    assert play.pending("open").args["recall"]


def test_a_conversation_nobody_knows_that_finds_no_room_is_said_to_be_cold() -> None:
    """Nobody will ask for it, so that it cannot come back on demand."""
    play = leaving([], [{"slot": 0, "tokens": 900}, {"slot": 1, "tokens": 77}])
    save_all(play)
    back(play, offered, n_slots=1)
    assert [(c.slot, c.result, bool(c.reason)) for c in play.swap.conversations] == [
        (0, ProofResult.UNPROVED, False),
        (-1, ProofResult.COLD, True),
    ]


def test_a_gateway_that_took_over_from_one_that_died_is_asked_to_replay() -> None:
    play = leaving([talk(A, 900, 2)], [], ["replay"])
    play.run()
    play.gateways("g2")
    back(play, nothing, strategies=["replay"], fingerprint="f1")
    (again,) = play.pending("open").args["recall"]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    assert again["gateway"] == "gateway:g2"


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


def test_however_often_one_comes_and_goes_it_has_one_line_of_its_swap() -> None:
    play = leaving([talk(A, 900, 3), talk(B, 800, 2)], [])
    save_all(play)
    back(play, offered).run()
    swap, links = play.log["sw_101"], (A,)
    assert {c.head for c in swap.conversations} == {A, B}
    for turn in range(12):
        links = (*links, f"{turn:031x}x", f"{turn:031x}y")
        named: dict[str, object] = {"id": links[-1], "links": list(links)}
        said = proof(f"med.{turn}.d.kv", result="warm", cache_n=500, tokens=510, made_room=True, **named)
        commit = reuse.on_proof(play.card, swap, said)
        assert commit is not None
        (swap,) = commit.swaps
    assert [(c.head, c.snapshot) for c in swap.conversations if c.head != B] == [(links[-1], "med.11.d.kv")]
    assert len(swap.conversations) == 2


@pytest.mark.parametrize(("required", "slots", "goes"), [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_where_they_are_required_no_more_conversations_than_slots_are_left_to_be_read_again(
    required: bool, slots: int, goes: bool
) -> None:
    play = leaving([talk(A, 900, 2)], [], ["replay"], save_required=required)
    back(play, nothing, n_slots=slots, strategies=["replay"], fingerprint="f1").run()
    play.enqueue("b")
    play.decide()
    leave(play, [talk(A, 900, 2), talk(B, 800, 1), talk(C, 14, 3)], [], ["replay"])
    assert (play.swap.back, lines(play)[B].saved) == (not goes, goes)
    assert lines(play)[A].saved
    if not goes:
        assert lines(play)[B].reason == (
            "this model's can only be read again from their text, each into a slot, and there are 2 for 1: raise "
            "parallel, or write snapshots: {required: false}; nothing was unloaded, it is where it was"
        )
