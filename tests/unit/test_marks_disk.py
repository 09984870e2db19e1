"""What becomes of the marks and of the agent when their disk is full, fails, or is taken away."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from swapper.core.orders import Command, Report
from tests.unit.agent_doubles import MemoryLink, RecordingBackend, Running, at_work, command
from workers import marks as marks_module
from workers.marks import Fresh, Marks, Old, Repeat

FULL = "No space left on device"
GONE = "folder or its lock file was taken away"


class Disk:
    """The disk of the marks: `broken` calls of `os` fail as on a full one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._whole = {name: getattr(os, name) for name in ("write", "fdatasync", "fsync")}

    def breaks(self, *calls: str) -> None:
        def fail(*_args: object) -> int:
            raise OSError(errno.ENOSPC, FULL)

        for call in calls:
            self._monkeypatch.setattr(os, call, fail)

    def heals(self) -> None:
        for name, call in self._whole.items():
            self._monkeypatch.setattr(os, name, call)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "marks"


def answer(order: Command, outcome: str = "ok") -> Report:
    return Report(order.executor, order.card, order.tenant, order.token, order.n, order.verb, outcome)


def reopened(marks: Marks, path: Path) -> Marks:
    marks.close()
    return Marks.open(path)


FIRST, SECOND = command("load", 9, 1), command("load", 9, 2)


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_mark_that_cannot_be_made_durable_is_none(path: Path, disk: Disk, call: str) -> None:
    marks = Marks.open(path)
    disk.breaks(call)
    with pytest.raises(OSError, match=FULL):
        marks.begin(FIRST)
    assert (marks.verdict(FIRST), marks.highest_token) == (Fresh(), 0)
    disk.heals()
    assert marks.begin(FIRST) == Fresh()
    marks = reopened(marks, path)
    assert marks.begin(FIRST) == Repeat(None)
    marks.close()


def test_what_a_full_disk_missed_is_written_once_there_is_room(path: Path, disk: Disk) -> None:
    marks = Marks.open(path)
    disk.breaks("write")
    with pytest.raises(OSError, match=FULL):
        marks.finish(answer(FIRST, "failed"), of=FIRST)
    with pytest.raises(OSError, match=FULL):
        marks.advance("1-0")
    disk.heals()
    assert not marks.advance("2-0", wait=False)
    assert marks.advance("2-0")
    assert marks.advance("3-0", wait=False)
    marks = reopened(marks, path)
    assert (marks.answer(FIRST), marks.outbox) == (answer(FIRST, "failed"), "3-0")
    marks.close()


def test_after_a_failed_sync_no_mark_is_added_to_what_may_not_be_on_the_disk(path: Path, disk: Disk) -> None:
    marks = Marks.open(path)
    marks.begin(FIRST)
    disk.breaks("fdatasync")
    with pytest.raises(OSError, match=FULL):
        marks.begin(SECOND)
    before = path.stat().st_ino
    disk.heals()
    marks.begin(SECOND)
    assert path.stat().st_ino != before
    marks = reopened(marks, path)
    assert marks.verdict(FIRST) == Old((9, 2))
    marks.close()


def test_marks_whose_folder_is_away_begin_nothing_until_it_is_back(path: Path) -> None:
    marks, away = Marks.open(path), path.parent.with_name("away")
    marks.begin(FIRST)
    path.parent.rename(away)
    with pytest.raises(OSError, match=GONE):
        marks.begin(SECOND)
    away.rename(path.parent)
    assert marks.begin(SECOND) == Fresh()
    marks = reopened(marks, path)
    assert marks.verdict(FIRST) == Old((9, 2))
    marks.close()


def test_marks_whose_folder_was_removed_leave_those_of_the_next_agent_there_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks.open(path)
    marks.begin(SECOND)
    shutil.rmtree(path.parent)
    with pytest.raises(OSError, match=GONE):
        marks.begin(command("load", 9, 3))
    theirs = Marks.open(path)
    theirs.begin(FIRST)
    content = path.read_bytes()
    monkeypatch.setattr(marks_module, "COMPACT_BYTES", 10)
    for write in (lambda: marks.begin(command("load", 9, 3)), lambda: marks.advance("1-0")):
        with pytest.raises(OSError, match=GONE):
            write()
    assert path.read_bytes() == content
    for each in (marks, theirs):
        each.close()


def test_a_log_that_was_removed_is_written_anew_with_the_next_mark(path: Path) -> None:
    marks, other = Marks.open(path), command("load", 9, 1, tenant="llama/big")
    marks.begin(other)
    path.unlink()
    marks.begin(SECOND)
    marks = reopened(marks, path)
    assert (marks.verdict(other), marks.verdict(FIRST)) == (Repeat(None), Old((9, 2)))
    marks.close()


def test_a_compaction_that_fails_leaves_the_log_in_use_and_nothing_beside_it(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks.open(path)
    marks.advance("1-0")
    monkeypatch.setattr(marks_module, "COMPACT_BYTES", 10)
    disk.breaks("fsync")
    with pytest.raises(OSError, match=FULL):
        marks.advance("2-0")
    assert marks.begin(FIRST) == Fresh()
    assert {each.name for each in path.parent.iterdir()} == {"marks", "marks.lock"}
    disk.heals()
    marks = reopened(marks, path)
    assert (marks.verdict(FIRST), marks.outbox) == (Repeat(None), "2-0")
    marks.close()


def test_a_new_log_whose_folder_could_not_be_synced_is_the_one_written_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks.open(path)
    marks.advance("1-0")

    def fail(_folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(marks_module, "COMPACT_BYTES", 10)
        patched.setattr(marks_module, "_sync_folder", fail)
        with pytest.raises(OSError, match="Input/output"):
            marks.advance("2-0")
    assert marks.advance("3-0")
    marks = reopened(marks, path)
    assert marks.outbox == "3-0"
    marks.close()


@pytest.fixture
def running(path: Path, link: MemoryLink, backend: RecordingBackend) -> Running:
    return lambda: at_work(path, link, {"llama": backend})


async def test_on_a_full_disk_every_command_fails_with_a_sentence_and_nothing_is_changed(
    link: MemoryLink, backend: RecordingBackend, running: Running, disk: Disk, path: Path
) -> None:
    orders = [
        command("save", 9, 1, slot=0, name="a"),
        command("save", 9, 2, slot=1, name="b"),
        command("release", 9, 3, limit_ms=500),
        command("vacate", 9, 4, tenant=None, need_mib=1, limit_ms=500),
        command("load", 9, 5),
        command("restore", 9, 6, snapshot="a", slot=0),
        command("restore", 9, 7, snapshot="b", slot=1),
        command("drain", 9, 8),
    ]
    async with running():
        disk.breaks("write")
        await link.send(*orders)
        details = {(await link.answer(9, order.n)).detail for order in orders}
        assert details == {f"{path} cannot be written, and until it can this agent changes nothing: {FULL}"}
        assert [call for call in backend.calls if not call.startswith("drain")] == []
        disk.heals()
        await link.send(command("load", 10, 1))
        assert (await link.answer(10, 1)).outcome == "ok"


async def test_what_failed_on_a_full_disk_is_not_begun_by_a_later_run(
    link: MemoryLink, backend: RecordingBackend, running: Running, disk: Disk
) -> None:
    async with running():
        disk.breaks("write")
        await link.send(command("load", 9, 1))
        assert (await link.answer(9, 1)).outcome == "failed"
        disk.heals()
        await link.send(command("load", 9, 2, tenant="llama/big"))
        await link.answer(9, 2)
    async with running():
        await link.send(command("load", 9, 1))
        assert (await link.answer(9, 1, count=2)).outcome == "failed"
    assert backend.calls == ["load llama/big"]


async def test_an_answer_that_cannot_be_recorded_is_told_and_recorded_later(
    link: MemoryLink, backend: RecordingBackend, running: Running, disk: Disk
) -> None:
    slow = backend.hold("load llama/med")
    async with running():
        await link.send(command("load", 9, 1))
        await slow.begun.wait()
        disk.breaks("write")
        slow.end.set()
        assert (await link.answer(9, 1)).outcome == "ok"
        disk.heals()
        await link.send(command("load", 9, 2, tenant="llama/big"))
        await link.answer(9, 2)
    link.reads.clear()
    async with running():
        await link.send(command("load", 9, 1))
        assert (await link.answer(9, 1, count=2)).outcome == "ok"
    assert backend.calls == ["load llama/med", "load llama/big"]


async def test_a_drain_that_is_overtaken_on_a_full_disk_is_refused_as_on_any(
    link: MemoryLink, backend: RecordingBackend, running: Running, disk: Disk
) -> None:
    waiting = backend.hold("drain llama/med")
    async with running():
        disk.breaks("write")
        await link.send(command("drain", 9, 1))
        await waiting.begun.wait()
        await link.send(command("load", 9, 2))
        assert (await link.answer(9, 1)).outcome == "refused"
        assert (await link.answer(9, 2)).outcome == "failed"
    assert backend.calls == ["drain llama/med"]
