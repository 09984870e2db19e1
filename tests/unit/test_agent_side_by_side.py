"""Commands of one lane that run side by side, and when their marks must be on the disk."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from tests.unit.agent_doubles import MemoryLink, RecordingBackend, Running, command
from workers.lanes import AT_ONCE


async def test_saves_of_one_token_that_wait_together_run_side_by_side_and_what_follows_waits_for_them(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    first, second = backend.hold("save llama/med 0"), backend.hold("save llama/med 1")
    async with running():
        await link.send(
            command("save", 9, 1, slot=0, name="a"),
            command("save", 9, 2, slot=1, name="b"),
            command("release", 9, 3, limit_ms=60_000),
        )
        await first.begun.wait()
        await second.begun.wait()
        second.end.set()
        assert (await link.answer(9, 2)).data["snapshot"] == "b"
        assert "release llama/med 60000" not in backend.calls
        first.end.set()
        assert (await link.answer(9, 3)).outcome == "ok"
    assert [report.n for report in link.reports if report.token == 9] == [2, 1, 3]


async def test_no_more_run_side_by_side_than_the_server_has_hands_for(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    held = [backend.hold(f"restore llama/med a {slot}") for slot in range(AT_ONCE)]
    async with running():
        await link.send(*(command("restore", 9, slot + 1, snapshot="a", slot=slot) for slot in range(AT_ONCE + 1)))
        for verb in held:
            await verb.begun.wait()
            verb.end.set()
        assert (await link.answer(9, AT_ONCE + 1)).outcome == "ok"
    assert backend.calls[-1] == f"restore llama/med a {AT_ONCE}"


async def test_saves_cut_off_by_a_crash_are_all_executed_again(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    held = [backend.hold(f"save llama/med {slot}") for slot in range(3)]
    held[1].end.set()
    async with running():
        await link.send(*(command("save", 9, slot + 1, slot=slot, name="a") for slot in range(3)))
        await link.answer(9, 2)
        await held[0].begun.wait()
        await held[2].begun.wait()
    held[0].end.set()
    held[2].end.set()
    async with running():
        assert [(await link.answer(9, n)).outcome for n in (1, 3)] == ["ok", "ok"]
    assert sorted(backend.calls) == [f"save llama/med {slot}" for slot in (0, 0, 1, 2, 2)]


async def test_a_save_sent_twice_with_another_behind_it_is_executed_once(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    save = command("save", 9, 1, slot=0, name="a")
    async with running():
        await link.send(save, save, command("save", 9, 2, slot=1, name="b"))
        await link.answer(9, 1, count=2)
        await link.answer(9, 2)
    assert backend.calls == ["save llama/med 0", "save llama/med 1"]


class Disk:
    """Stands in for `os.fdatasync`: `syncing` is set when the agent waits for it, it ends with `synced`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.syncing, self._synced = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, _fd: int) -> None:
        self.count += 1
        self._loop.call_soon_threadsafe(self.syncing.set)
        assert self._synced.wait(10)

    def synced(self) -> None:
        self._synced.set()


async def test_marks_are_on_the_disk_before_the_verbs_begin_with_one_sync_for_those_side_by_side(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    async with running():
        await link.send(command("save", 9, 1, slot=0, name="a"), command("save", 9, 2, slot=1, name="b"))
        await disk.syncing.wait()
        assert backend.calls == []
        disk.synced()
        await link.answer(9, 1)
        await link.answer(9, 2)
    assert disk.count == 1


async def test_a_verb_without_effects_runs_while_its_mark_is_written_and_is_answered_after_it(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, drain = Disk(monkeypatch), backend.hold("drain llama/med")
    async with running():
        await link.send(command("drain", 9, 1))
        await disk.syncing.wait()
        await drain.begun.wait()
        drain.end.set()
        answered = asyncio.create_task(link.answer(9, 1))
        await asyncio.wait({answered}, timeout=0.05)
        assert not answered.done()
        disk.synced()
        assert (await answered).outcome == "ok"
