"""Marks survive what a crash leaves behind, and never forget which command came last."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from swapper.core.orders import Command, Report
from swapper.errors import ConfigError
from tests.unit.agent_doubles import command
from workers import marks as marks_module
from workers.marks import Fresh, Marks, Old, Repeat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "marks"


def answer(order: Command, **data: object) -> Report:
    return Report(order.executor, order.card, order.tenant, order.token, order.n, order.verb, "ok", data=data)


def reopened(marks: Marks, path: Path) -> Marks:
    marks.close()
    return Marks.open(path)


def test_a_lane_never_used_has_no_mark(path: Path) -> None:
    marks = Marks.open(path)
    assert marks.mark("gpu0", "llama/med") == (0, 0)
    assert (marks.highest_token, marks.carried_out("gpu0"), marks.outbox) == (0, (0, 0), None)
    marks.close()


def test_what_was_begun_finished_and_read_is_known_to_the_next_run(path: Path) -> None:
    order = command("load", 9, 2)
    marks = Marks.open(path)
    assert marks.begin(order) == Fresh()
    marks.finish(answer(order, n_slots=2, snapshots=[{"slot": 0}]))
    marks.advance("17-0")

    marks = reopened(marks, path)
    assert marks.begin(order) == Repeat(answer(order, n_slots=2, snapshots=[{"slot": 0}]))
    assert marks.begin(command("load", 9, 1)) == Old((9, 2))
    assert (marks.mark("gpu0", "llama/med"), marks.highest_token, marks.outbox) == ((9, 2), 9, "17-0")
    marks.close()


def test_lanes_have_marks_of_their_own(path: Path) -> None:
    marks = Marks.open(path)
    marks.begin(command("load", 9, 2))
    marks.begin(command("vacate", 8, 1, tenant=None))
    marks.begin(command("load", 12, 1, card="gpu1", tenant="llama/big"))
    assert marks.mark("gpu0", None) == (8, 1)
    assert marks.highest_token == 12
    marks.close()


def test_a_card_is_carried_out_up_to_the_oldest_command_in_progress_on_it(path: Path) -> None:
    marks = Marks.open(path)
    release, vacate, elsewhere = command("release", 9, 4), command("vacate", 9, 5, tenant=None), command("load", 12, 1)
    for order in (release, vacate, replace(elsewhere, card="gpu1")):
        marks.begin(order)
    assert (marks.carried_out("gpu0"), marks.carried_out("gpu1")) == ((9, 3), (12, 0))
    marks.finish(answer(release))
    assert marks.carried_out("gpu0") == (9, 4)
    marks.finish(answer(vacate))
    assert (marks.carried_out("gpu0"), marks.carried_out("gpu1")) == ((9, 5), (12, 0))
    marks.close()


def test_what_an_earlier_token_left_open_does_not_hold_the_card_back(path: Path) -> None:
    marks = Marks.open(path)
    marks.begin(command("load", 9, 3))
    vacate = command("vacate", 12, 2, tenant=None)
    marks.begin(vacate)
    assert marks.carried_out("gpu0") == (12, 1)
    marks.finish(answer(vacate))
    assert marks.carried_out("gpu0") == (12, 2)
    marks = reopened(marks, path)
    assert marks.carried_out("gpu0") == (12, 2)
    marks.close()


def test_a_command_begun_but_not_finished_is_to_be_executed_again(path: Path) -> None:
    marks = Marks.open(path)
    marks.begin(command("load", 9, 1))
    marks = reopened(marks, path)
    assert marks.begin(command("load", 9, 1)) == Repeat(None)
    marks.close()


def saves(*ns: int, token: int = 9) -> list[Command]:
    return [command("save", token, n) for n in ns]


def test_those_begun_side_by_side_are_each_to_be_executed_again_until_answered(path: Path) -> None:
    marks = Marks.open(path)
    assert marks.begin_all(saves(1, 2, 3)) == [Fresh()] * 3
    marks.finish(answer(saves(2)[0]))
    for _ in range(2):  # from the log, then from the compacted log
        marks = reopened(marks, path)
        assert marks.begin_all(saves(1, 2, 3)) == [Repeat(None), Repeat(answer(saves(2)[0])), Repeat(None)]
    assert marks.mark("gpu0", "llama/med") == (9, 3)
    marks.close()


def test_a_command_that_joins_one_to_be_repeated_does_not_make_that_old(path: Path) -> None:
    marks = Marks.open(path)
    marks.begin_all(saves(1, 2))
    marks.finish(answer(saves(1)[0]))
    assert marks.begin_all(saves(2, 3)) == [Repeat(None), Fresh()]
    marks = reopened(marks, path)
    assert marks.begin_all(saves(2, 3)) == [Repeat(None), Repeat(None)]
    marks.close()


@pytest.mark.parametrize("newer", [command("release", 9, 3), command("load", 10, 1)])
def test_what_comes_after_them_makes_those_begun_side_by_side_old(path: Path, newer: Command) -> None:
    marks = Marks.open(path)
    marks.begin_all(saves(1, 2))
    marks.finish(answer(saves(1)[0]))
    marks.begin(newer)
    for _ in range(2):
        mark = (newer.token, newer.n)
        answered = Repeat(answer(saves(1)[0])) if newer.token == 9 else Old(mark)
        assert [marks.verdict(save) for save in saves(1, 2)] == [answered, Old(mark)]
        assert marks.verdict(newer) == Repeat(None)
        marks = reopened(marks, path)
    marks.close()


def test_a_torn_mark_of_several_leaves_all_of_them_unbegun(path: Path) -> None:
    marks = Marks.open(path)
    before = len(path.read_bytes())
    marks.begin_all(saves(1, 2))
    marks.close()
    path.write_bytes(path.read_bytes()[: before + 60])
    marks = Marks.open(path)
    assert [marks.verdict(save) for save in saves(1, 2)] == [Fresh(), Fresh()]
    marks.close()


def test_a_log_from_before_several_could_begin_together_is_read(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"type":"begun","card":"gpu0","tenant":"llama/med","token":9,"n":2}\n')
    marks = Marks.open(path)
    assert [marks.verdict(save) for save in saves(1, 2)] == [Old((9, 2)), Repeat(None)]
    marks.close()


def test_a_line_that_need_not_wait_is_left_to_a_thread_when_the_log_is_to_be_compacted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks.open(path)
    assert marks.advance("1-0", wait=False)
    monkeypatch.setattr(marks_module, "COMPACT_BYTES", 10)
    assert not marks.advance("2-0", wait=False)
    assert marks.outbox == "1-0"
    assert marks.advance("2-0")
    assert marks.advance("3-0", wait=False)
    marks = reopened(marks, path)
    assert marks.outbox == "3-0"
    marks.close()


def test_an_answer_that_could_not_be_written_is_still_known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks.open(path)
    order = saves(1)[0]
    marks.begin(order)

    def full(_fd: int, _data: bytes) -> int:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space"):
            marks.finish(answer(order))
    assert marks.verdict(order) == Repeat(answer(order))
    marks.close()


def test_an_earlier_answer_of_the_lane_is_still_on_record(path: Path) -> None:
    first, second = command("save", 9, 1), command("save", 9, 2)
    marks = Marks.open(path)
    for order in (first, second):
        marks.begin(order)
        marks.finish(answer(order))
    marks = reopened(marks, path)
    assert marks.begin(first) == Repeat(answer(first))
    marks.close()


def test_only_the_last_answers_of_a_lane_are_kept_and_the_mark_always(path: Path) -> None:
    marks = Marks.open(path)
    for n in range(1, marks_module.REPORTS_KEPT + 2):
        marks.begin(command("save", 9, n))
        marks.finish(answer(command("save", 9, n)))
    assert marks.begin(command("save", 9, 1)) == Old((9, marks_module.REPORTS_KEPT + 1))
    marks.close()


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_costs_that_line_only(path: Path, cut: int) -> None:
    marks = Marks.open(path)
    marks.begin(command("load", 9, 1))
    before = len(path.read_bytes())
    marks.finish(answer(command("load", 9, 1)))
    marks.close()
    path.write_bytes(path.read_bytes()[: before + cut])

    marks = Marks.open(path)
    assert marks.begin(command("load", 9, 1)) == Repeat(None)
    assert marks.begin(command("load", 9, 2)) == Fresh()
    marks = reopened(marks, path)
    assert marks.mark("gpu0", "llama/med") == (9, 2)
    marks.close()


def test_garbage_where_a_power_cut_lost_pages_hides_no_later_mark(path: Path) -> None:
    marks = Marks.open(path)
    marks.begin(command("load", 9, 1))
    marks.close()
    durable = path.read_bytes()
    path.write_bytes(b"\0\0\xff{\n" + durable)
    marks = Marks.open(path)
    assert marks.mark("gpu0", "llama/med") == (9, 1)
    marks.close()


def test_opening_writes_the_log_anew_and_small(path: Path) -> None:
    marks = Marks.open(path)
    for n in range(1, 200):
        marks.begin(command("load", 9, n))
        marks.advance(f"{n}-0")
    long = path.stat().st_size
    marks = reopened(marks, path)
    assert path.stat().st_size < long / 50
    assert (marks.mark("gpu0", "llama/med"), marks.outbox) == ((9, 199), "199-0")
    assert [p.name for p in path.parent.iterdir() if p.name.endswith(".new")] == []
    marks.close()


def test_a_log_that_grew_long_is_compacted_while_it_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks_module, "COMPACT_BYTES", 1_000)
    marks = Marks.open(path)
    for n in range(1, 300):
        marks.begin(command("load", 9, n))
        marks.finish(answer(command("load", 9, n)))
    assert path.stat().st_size < 20_000
    marks = reopened(marks, path)
    assert marks.begin(command("load", 9, 299)) == Repeat(answer(command("load", 9, 299)))
    marks.close()


def test_a_crash_while_compacting_leaves_the_old_log(path: Path) -> None:
    marks = Marks.open(path)
    marks.begin(command("load", 9, 1))
    marks.close()
    path.with_name("marks.new").write_bytes(b'{"type":"beg')
    marks = Marks.open(path)
    assert marks.mark("gpu0", "llama/med") == (9, 1)
    marks.close()


def test_two_agents_cannot_share_their_marks(path: Path) -> None:
    marks = Marks.open(path)
    with pytest.raises(ConfigError, match="another agent uses these marks"):
        Marks.open(path)
    reopened(marks, path).close()


def test_an_answer_on_record_answers_the_very_command_only(path: Path) -> None:
    """A store that was rolled back within a swap gives the same number out again, for something else."""
    saved, marks = command("save", 9, 2), Marks.open(path)
    marks.begin(saved)
    marks.finish(answer(saved), of=saved)

    marks = reopened(marks, path)
    assert marks.answer(saved) == answer(saved)
    other_verb = replace(saved, verb="release", args={"limit_ms": 1})
    other_slot = replace(saved, args={**saved.args, "slot": 7})
    for order in (other_verb, other_slot):
        assert marks.answer(order) is None
        assert marks.verdict(order) == Old((saved.token, saved.n))
    marks.close()


def test_what_a_command_of_an_older_token_came_to_answers_nothing_any_more(path: Path) -> None:
    """Sent again by a store that was rolled back: the card may have changed hands since."""
    proof, later, marks = command("vacate", 9, 1, tenant=None), command("vacate", 10, 1, tenant=None), Marks.open(path)
    marks.begin(proof)
    marks.finish(answer(proof), of=proof)
    marks.begin(later)
    for _ in range(2):
        assert (marks.answer(proof), marks.verdict(proof)) == (None, Old((10, 1)))
        marks = reopened(marks, path)
    marks.close()
