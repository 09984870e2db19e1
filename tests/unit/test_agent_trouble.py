"""What the agent says of what failed, and that it goes on: errors, orders it cannot follow, a store that is away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from swapper.core.orders import Report
from swapper.errors import BackendRefused
from tests.unit.agent_doubles import MemoryLink, Place, RecordingBackend, Running, command
from workers import supervise
from workers.agent import Agent
from workers.backend import SaveUnsupported
from workers.marks import Marks

WAYS = {"strategies": ["slots", "replay"], "fingerprint": "f1"}


async def test_a_backend_error_is_a_failure_with_its_sentence(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    backend.errors["load llama/med"] = BackendRefused("the file med.gguf is corrupt", 500)
    async with running():
        await link.send(command("load", 9, 1))
        report = await link.answer(9, 1)
    assert (report.outcome, report.detail) == ("failed", "the file med.gguf is corrupt")


async def test_a_server_that_cannot_save_is_told_apart_from_a_failure(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    backend.errors["save llama/med 0"] = SaveUnsupported()
    async with running():
        await link.send(command("save", 9, 1, slot=0, name="a.bin"))
        report = await link.answer(9, 1)
    assert (report.outcome, report.data) == ("failed", {"unsupported": True})


async def test_an_unexpected_error_is_reported_and_the_lane_goes_on(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(supervise, "log", said)
    backend.errors["load llama/med"] = KeyError("slot")
    async with running():
        await link.send(command("load", 9, 1), command("save", 9, 2, slot=0, name="a.bin"))
        report = await link.answer(9, 1)
        assert (await link.answer(9, 2)).outcome == "ok"
    assert (report.outcome, report.detail) == ("failed", "load llama/med: KeyError: 'slot'")
    assert [(call.method_name, call.kwargs) for call in said.calls] == [("exception", {"what": "load llama/med"})]


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (command("load", 9, 1, tenant="llama/none"), "llama/none is not configured on this host"),
        (command("dance", 9, 1), "this agent has no verb 'dance'; is it older than its coordinator?"),
        (command("vacate", 9, 1, card="gpu7", tenant=None), "card gpu7 is not configured on this host"),
        (
            command("release", 9, 1),
            "release: cannot use the arguments: Object missing required field `limit_ms`",
        ),
        (
            command("save", 9, 1, slot="zero", name="a"),
            "save: cannot use the arguments: Expected `int`, got `str` - at `$.slot`",
        ),
    ],
)
async def test_a_command_nobody_can_follow_is_a_failure_with_a_sentence(
    link: MemoryLink, running: Running, sent: object, sentence: str
) -> None:
    async with running():
        await link.send(sent)  # pyright: ignore[reportArgumentType]
        report = await link.answer(9, 1)
    assert (report.outcome, report.detail) == ("failed", sentence)


async def test_an_answer_is_told_though_what_was_seen_with_it_cannot_be(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running():
        await link.volunteered("observed")
        whole = link.report

        async def report(*reports: Report) -> None:
            if any(one.verb == "observed" for one in reports):
                raise TypeError("no such thing in JSON")
            await whole(*reports)

        monkeypatch.setattr(link, "report", report)
        await link.send(command("load", 9, 1))
        assert (await link.answer(9, 1)).outcome == "ok"


async def test_a_command_whose_answer_could_not_be_told_is_read_again_by_the_next_run(
    link: MemoryLink, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()
    async with running():
        await link.volunteered("observed")
        whole = link.report

        async def report(*reports: Report) -> None:
            if any(one.token for one in reports):
                tried.set()
                raise TypeError("no such thing in JSON")
            await whole(*reports)

        monkeypatch.setattr(link, "report", report)
        await link.send(command("restore", 9, 1, snapshot="a", slot=0))
        await tried.wait()
    monkeypatch.undo()
    async with running():
        assert (await link.answer(9, 1)).outcome == "ok"


async def test_answers_wait_for_a_store_that_is_away(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    slow = backend.hold("load llama/med")
    async with running():
        await link.send(command("load", 9, 1))
        await slow.begun.wait()
        await link.switch(down=True)
        slow.end.set()
        await link.switch(down=False)
        assert (await link.answer(9, 1)).outcome == "ok"
        await link.send(command("release", 9, 2, limit_ms=60_000))
        assert (await link.answer(9, 2)).outcome == "ok"


async def test_the_agent_greets_first_and_again_when_the_store_returns(link: MemoryLink, running: Running) -> None:
    async with running():
        await link.volunteered("observed")
        assert [report.verb for report in link.reports[:2]] == ["hello", "observed"]
        await link.send(command("load", 9, 1))
        await link.answer(9, 1)
        await link.switch(down=True)
        await link.switch(down=False)
        assert (await link.volunteered("hello", count=2)).data == {"mark": 9}


async def test_a_crash_of_its_own_loop_does_not_end_the_agent(
    link: MemoryLink, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(supervise, "log", said)
    link.crash = KeyError("streams")
    async with running():
        await link.send(command("load", 9, 1))
        assert (await link.answer(9, 1)).outcome == "ok"
    assert [call.kwargs for call in said.calls] == [{"what": "read the outbox"}]


async def test_cancelling_the_agent_stops_what_it_does(
    tmp_path: Path, link: MemoryLink, backend: RecordingBackend
) -> None:
    marks = Marks.open(tmp_path / "marks")
    slow = backend.hold("load llama/med")
    agent = Agent("main", link, {"llama": backend}, {"llama/med": Place("gpu0", "llama")}, {}, marks)
    task = asyncio.create_task(agent.run())
    await link.send(command("load", 9, 1))
    await slow.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.cancelled == ["load llama/med"]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    marks.close()
