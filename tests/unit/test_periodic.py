"""Idle slots are saved by the clock: one at a time, only what was used since, and whoever calls or waits goes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from swapper.core import clock, keeping, machine, periodic, tend, turn
from swapper.core.conversations import Keeping, Strategy
from swapper.core.orders import Command, Report
from swapper.core.turn import Seen
from swapper.core.types import Demand, Gate, WorkClass
from tests.support.play import MED, SMALL, Play, spec, tenant

EVERY_MS = 600_000
FIRST: Mapping[str, object] = {
    "id": "a" * 32,
    "links": ["a" * 32],
    "tokens": 50,
    "used_ms": 1,
    "recallable": True,
    "slot": 1,
    "snapshot": "old.kv",
}
SECOND: Mapping[str, object] = {
    "id": "b" * 32,
    "links": ["b" * 32],
    "tokens": 90,
    "used_ms": 2,
    "recallable": True,
    "slot": 0,
}
SLOTS = [{"slot": 0, "tokens": 90}, {"slot": 1, "tokens": 50}]
BY_SLOTS: dict[str, Any] = {"slots": SLOTS, "strategies": ["slots", "replay"], "fingerprint": "f"}
HYBRID: dict[str, Any] = {**BY_SLOTS, "strategies": ["rewind", "replay"]}


class Clocked(Play):
    """One resident whose slots are saved every ten minutes; `start` begins what is due, as a turn would."""

    def __init__(self, *gateways: str) -> None:
        kept = replace(tenant("med"), every_ms=EVERY_MS)
        super().__init__(spec(kept, tenant("small", 4096)), MED, gateways=gateways or ("g1",))
        self.world = replace(self.world, gates={MED: Gate(3, open=True)})
        self.demand()

    def demand(self, *records: tuple[str, int, int], oldest_ms: int | None = None) -> None:
        """Beside the calls the gateway says that there is something to save."""
        super().demand(*records, oldest_ms=oldest_ms)
        unsaved = Demand("g1", MED, WorkClass.BATCH, 0, 0, None, unsaved=True)
        self.world = replace(self.world, demand=(*self.world.demand, unsaved))

    def start(self) -> bool:
        decision = turn.decide(self.world, self.spec, Seen({"main"}), (), lambda: "sw_9")
        if decision.commit is not None:
            self.apply(decision.commit)
        return self.card.swap is not None

    def asked(self, *talks: Mapping[str, object]) -> None:
        self.answer(self.pending("talks"), talks=list(talks))

    def save_after(self) -> int:
        return self.card.save_after[MED] - self.world.now_ms


def words(play: Play) -> list[Command]:
    return [c for c in play.commits[-1].commands if c.token == 0]


def test_the_gateways_are_asked_then_the_server_then_the_slot_is_saved_under_its_conversations_name() -> None:
    play = Clocked()
    assert play.start()
    (asked,) = play.swap.pending
    assert (asked.executor, asked.verb, asked.args) == ("gateway:g1", "talks", {})
    play.asked(FIRST)
    assert play.pending("drain").args == {"limit_ms": periodic.ASK_MS}
    play.answer(play.pending("drain"), **BY_SLOTS)
    save = play.pending("save")
    assert save.args == {
        "slot": 1,
        "name": save.args["name"],
        "strategy": "slots",
        "holds": 50,
        "conversation": {"id": "a" * 32, "links": ["a" * 32], "used_ms": 1},
        "replaces": "old.kv",
    }
    play.answer(save, tokens=50, bytes=7)
    assert play.card.swap is None
    (word,) = words(play)
    assert (word.verb, word.args["snapshot"], word.args["id"]) == ("saved", save.args["name"], "a" * 32)
    assert word.args["ms"] == play.world.now_ms
    assert [(c.snapshot, c.saved, c.bytes) for c in play.commits[-1].conversations] == [(save.args["name"], True, 7)]
    assert play.world.gates[MED] == Gate(3, open=True)
    assert play.card.residents == (MED,)
    assert play.log == {}  # it moves nobody, so it is not among the swaps


def test_the_gateways_hear_which_snapshot_was_replaced() -> None:
    play = Clocked()
    play.start()
    play.asked(FIRST)
    play.answer(play.pending("drain"), **BY_SLOTS)
    play.answer(play.pending("save"), tokens=50, bytes=7)
    (word,) = words(play)
    assert word.args["replaces"] == "old.kv"


def test_one_conversation_is_saved_at_a_time_and_the_next_a_little_later() -> None:
    play = Clocked()
    play.start()
    play.asked({**FIRST, "saved_ms": 10}, SECOND)
    play.answer(play.pending("drain"), **BY_SLOTS)
    (save,) = play.swap.pending
    assert save.args["slot"] == 0  # what was longest without a snapshot goes first
    play.answer(save, tokens=90)
    assert play.save_after() == periodic.SPACE_MS
    assert not play.start()
    play.pass_time(periodic.SPACE_MS)
    assert play.start()
    play.asked({**FIRST, "saved_ms": 10}, {**SECOND, "restored": True})
    play.answer(play.pending("drain"), **BY_SLOTS)
    assert play.pending("save").args["slot"] == 1


def test_what_was_not_used_since_its_snapshot_is_not_saved_and_the_server_is_not_even_asked() -> None:
    play = Clocked()
    play.start()
    play.asked({**FIRST, "restored": True}, {**SECOND, "tokens": 0})
    assert play.card.swap is None
    assert play.save_after() == EVERY_MS


@pytest.mark.parametrize(("ago", "saved"), [(EVERY_MS - 1, False), (EVERY_MS, True), (-5, True)])
def test_no_conversation_is_saved_more_often_than_configured_whatever_the_clock_did(ago: int, *, saved: bool) -> None:
    play = Clocked()
    play.start()
    play.asked({**FIRST, "saved_ms": play.world.now_ms - ago})
    assert (play.card.swap is not None) is saved
    if not saved:
        assert play.save_after() == periodic.SPACE_MS  # old enough in a millisecond


def test_after_a_load_nothing_is_due_before_the_time_is_over() -> None:
    play = Clocked()
    play.enqueue("a")
    play.decide()
    play.run(drain={"slots": []})
    play.end("a")
    while play.card.swap is not None or play.decide():
        play.run(load={"n_slots": 2, "snapshots": []})
    assert play.card.residents == (MED,)
    assert not play.start()
    play.pass_time(EVERY_MS)
    assert play.start()


def test_nothing_is_due_where_none_is_configured_nothing_is_unsaved_the_gate_is_shut_or_only_texts_are_kept() -> None:
    play = Clocked()
    started = play.world
    for world in (
        replace(started, gates={MED: Gate(4, open=False)}),
        replace(started, gateways=()),
        replace(started, demand=()),
        replace(started, cards={"gpu0": replace(play.card, keeping={MED: Keeping((Strategy.REPLAY,))})}),
    ):
        play.world = world
        assert not play.start()
    play.world = started
    play.spec = spec(tenant("med"))
    assert not play.start()


@pytest.mark.parametrize("calls", [(MED, 0, 1), (MED, 1, 0), (SMALL, 1, 0)])
def test_while_a_call_of_it_runs_or_one_waits_for_the_card_nothing_is_begun(calls: tuple[str, int, int]) -> None:
    play = Clocked()
    play.demand(calls)
    assert periodic.due(play.world, play.spec, play.card) is None
    play.demand((SMALL, 0, 1))  # another resident's, beside it
    assert periodic.due(play.world, play.spec, play.card) == MED


def test_a_lease_ends_the_asking_at_once_and_waits_only_for_a_save_under_way() -> None:
    play = Clocked()
    play.start()
    play.asked(FIRST)
    play.enqueue("a")
    assert play.decide()  # the server has not answered
    assert play.swap.lease == "a"

    play = Clocked()
    play.start()
    play.asked(FIRST, SECOND)
    play.answer(play.pending("drain"), **BY_SLOTS)
    play.enqueue("a")
    assert not play.decide()
    play.answer(play.pending("save"), tokens=90)
    assert play.decide()
    assert play.swap.lease == "a"


def test_a_call_that_came_while_the_server_was_asked_goes_first_and_the_rest_waits() -> None:
    play = Clocked()
    play.start()
    play.asked(FIRST)
    asked = play.pending("drain")
    play.demand((MED, 0, 1))
    play.answer(asked, **BY_SLOTS)
    assert play.card.swap is None
    play.demand()
    play.world = replace(play.world, cards={"gpu0": replace(play.card, save_after={})})
    play.start()
    play.demand((MED, 0, 1))
    assert play.decide()
    assert play.card.swap is None
    assert play.save_after() == periodic.AGAIN_MS


def test_a_server_at_work_for_somebody_else_is_tried_later_and_nobody_is_told() -> None:
    answers: tuple[dict[str, Any], ...] = ({"ok": False, "detail": "slots at work: 1"}, {"gone": True})
    for answer in answers:
        play = Clocked()
        play.start()
        play.asked(FIRST)
        play.answer(play.pending("drain"), **answer)
        assert play.card.swap is None
        assert play.save_after() == periodic.AGAIN_MS
        assert not play.commits[-1].alerts


def test_a_slot_that_was_used_meanwhile_is_no_failure_and_a_full_disk_is_one() -> None:
    play = Clocked()
    play.start()
    play.asked(FIRST)
    play.answer(play.pending("drain"), **BY_SLOTS)
    play.answer(play.pending("save"), ok=False, detail="slot 1 is at work", busy=True)
    assert play.card.swap is None
    assert (play.save_after(), play.commits[-1].alerts, words(play)) == (periodic.AGAIN_MS, (), [])
    play.pass_time(periodic.AGAIN_MS)
    play.start()
    play.asked(FIRST)
    play.answer(play.pending("drain"), **BY_SLOTS)
    play.answer(play.pending("save"), ok=False, detail="7 MiB free")
    assert play.card.swap is None
    (alert,) = play.commits[-1].alerts
    assert "7 MiB free" in alert.text
    assert play.save_after() == EVERY_MS


def test_a_hybrid_models_conversation_is_rewound_first_and_saved_as_it_stands_then() -> None:
    play = Clocked()
    play.start()
    play.asked(FIRST)
    play.answer(play.pending("drain"), **HYBRID)
    recall = play.pending(keeping.RECALL)
    assert (recall.executor, recall.args["conversation"]) == ("gateway:g1", "a" * 32)
    assert recall.args["limit_ms"] == periodic.REWIND_MS
    play.answer(recall, slot=0, tokens=44, cache_n=30, prompt_n=14)
    save = play.pending("save")
    assert (save.args["slot"], save.args["holds"], save.args["strategy"]) == (0, 44, "rewind")
    play.answer(save, tokens=44)
    assert [word.verb for word in words(play)] == ["saved"]


def test_a_hybrid_models_conversation_whose_text_is_not_kept_is_not_saved() -> None:
    play = Clocked()
    play.start()
    play.asked({**FIRST, "recallable": False})
    play.answer(play.pending("drain"), **HYBRID)
    assert play.card.swap is None
    assert play.save_after() == EVERY_MS
    assert [(word.verb, word.args) for word in words(play)] == [("passed", {"ids": ["a" * 32]})]


def test_what_stands_in_no_slot_any_more_is_passed_over_once_and_what_is_too_young_is_not() -> None:
    play = Clocked()
    play.start()
    young = {**SECOND, "id": "c" * 32, "slot": None, "tokens": 70, "saved_ms": play.world.now_ms - 1}
    play.asked({**FIRST, "slot": None, "tokens": 60}, young)
    play.answer(play.pending("drain"), **BY_SLOTS)
    assert play.card.swap is None
    assert [(word.verb, word.args) for word in words(play)] == [("passed", {"ids": ["a" * 32]})]


def test_while_a_call_came_meanwhile_nothing_is_passed_over() -> None:
    play = Clocked()
    play.start()
    play.asked({**FIRST, "slot": None, "tokens": 60})
    play.demand((MED, 0, 1))
    play.answer(play.pending("drain"), **BY_SLOTS)
    assert words(play) == []


def test_a_rewind_that_fails_ends_it() -> None:
    play = Clocked()
    play.start()
    play.asked(FIRST)
    play.answer(play.pending("drain"), **HYBRID)
    play.answer(play.pending(keeping.RECALL), ok=False, detail="too slow")
    assert play.card.swap is None
    assert words(play) == []


def test_a_gateway_that_goes_or_does_not_know_the_verb_keeps_nobody_waiting() -> None:
    play = Clocked("g1", "g2")
    play.start()
    play.gateways("g2")
    play.decide()
    play.answer(play.pending("talks", "gateway:g2"), ok=False, detail="a gateway does not know 'talks'")
    assert play.card.swap is None


def test_a_conversation_asked_for_meanwhile_may_be_asked_for_again() -> None:
    play = Clocked()
    play.start()
    report = Report(
        "gateway:g1", "gpu0", MED, 0, 0, "wanted", "ok", data={"snapshot": "x.kv", "tokens": 9, "talks": []}
    )
    commit = tend.on_wanted(play.world, play.spec, report, swap_id="sw_8", token=999)
    assert commit is not None
    assert commit.commands[-1].args["again"] is True


def test_a_card_that_only_saves_by_the_clock_is_idle_so_that_displaced_defaults_come_back() -> None:
    play = Clocked()
    play.start()
    assert not turn.busy(play.world, play.spec, "gpu0")
    play.demand((SMALL, 1, 0))
    assert turn.busy(play.world, play.spec, "gpu0")


def test_what_is_due_moves_along_with_the_stores_clock() -> None:
    play = Clocked()
    play.start()
    play.asked({**FIRST, "restored": True})
    play.world = replace(play.world, now_ms=play.world.now_ms - 3_600_000)
    commit = clock.moved(play.world, play.spec, -3_600_000)
    assert commit is not None
    assert commit.cards[0].save_after == {MED: play.world.now_ms + EVERY_MS}


def test_after_a_restart_the_question_is_asked_again() -> None:
    play = Clocked()
    play.start()
    commit = machine.resume(play.world, play.spec, play.card)
    assert commit is not None
    assert [c.verb for c in commit.commands] == ["talks"]
