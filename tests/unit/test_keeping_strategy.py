"""A strategy that was seen to fail is used no more for that model, build and preset; and none that did not fail."""

from __future__ import annotations

from dataclasses import replace

from swapper.core import keeping, reuse
from swapper.core.commit import Commit
from swapper.core.conversations import ProofResult, Strategy
from swapper.core.types import Swap
from tests.support.play import MED, Play
from tests.unit.keeping_play import A, B, back, leave, leaving, lines, nothing, offered, proof, save_all, talk


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
