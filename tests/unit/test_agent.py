"""The agent executes in order, each command once and for all, and its next run goes on where this one was cut off."""

from __future__ import annotations

from typing import Any

from tests.unit.agent_doubles import MemoryLink, RecordingBackend, Running, command
from workers.backend import Room, SaveArgs, SlotUse, Talk, WouldPushOut

WAYS = {"strategies": ["slots", "replay"], "fingerprint": "f1"}


async def test_each_verb_becomes_its_backend_call_and_its_data(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.send(
            command("drain", 7, 1),
            command("save", 7, 2, slot=1, name="a.bin"),
            command("release", 7, 3, limit_ms=500),
            command("load", 7, 4),
            command("restore", 7, 5, snapshot="a.bin", slot=0),
        )
        # The drain is overtaken, being sent together with what should have waited for it.
        assert (await link.answer(7, 1)).outcome == "refused"
        saved = await link.answer(7, 2)
        assert saved.outcome == "ok"
        assert saved.backend_ms == 1.5
        assert saved.data == {"snapshot": "a.bin", "slot": 1, "tokens": 100, "bytes": 2048}
        assert (await link.answer(7, 3)).data == {}
        assert (await link.answer(7, 4)).data == {
            "n_slots": 2,
            "n_ctx_slot": 4096,
            "n_ctx_shared": None,
            "snapshots": [],
            **WAYS,
        }
        assert (await link.answer(7, 5)).data == {"slot": 0, "tokens": 100, "displaced": None}
        await link.send(command("drain", 7, 6))
        assert (await link.answer(7, 6)).data == {"slots": [{"slot": 0, "tokens": 100}], **WAYS}
    assert backend.calls == [
        "save llama/med 1",
        "release llama/med 500",
        "load llama/med",
        "restore llama/med a.bin 0",
        "drain llama/med",
    ]


async def test_a_lane_is_worked_off_in_token_order_whatever_the_order_of_arrival(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.send(command("load", 9, 4), command("release", 9, 3, limit_ms=60_000))
        await link.answer(9, 4)
    assert backend.calls == ["release llama/med 60000", "load llama/med"]


async def test_lanes_of_different_tenants_run_side_by_side(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    slow = backend.hold("load llama/med")
    async with running():
        await link.send(command("load", 9, 1), command("load", 9, 2, tenant="llama/big"))
        await slow.begun.wait()
        assert (await link.answer(9, 2)).outcome == "ok"
        slow.end.set()
        assert (await link.answer(9, 1)).outcome == "ok"


async def test_an_equal_command_is_answered_from_the_record(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.send(command("load", 9, 1))
        first = await link.answer(9, 1)
        await link.send(command("load", 9, 1))
        assert await link.answer(9, 1, count=2) == first
    assert backend.calls == ["load llama/med"]


async def test_an_equal_command_sent_again_while_it_runs_is_executed_once_and_answered_twice(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    slow = backend.hold("load llama/med")
    async with running():
        await link.send(command("load", 9, 1))
        await slow.begun.wait()
        await link.send(command("load", 9, 1))
        slow.end.set()
        await link.answer(9, 1, count=2)
    assert backend.calls == ["load llama/med"]


async def test_a_command_older_than_the_mark_is_refused(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.send(command("load", 9, 5))
        await link.answer(9, 5)
        await link.send(command("release", 9, 4, limit_ms=60_000))
        assert (await link.answer(9, 4)).outcome == "refused"
        await link.send(command("release", 8, 9, limit_ms=60_000))
        assert (await link.answer(8, 9)).detail == "overtaken by command 5 of token 9"
    assert backend.calls == ["load llama/med"]


async def test_the_mark_outlives_the_agent(link: MemoryLink, backend: RecordingBackend, running: Running) -> None:
    async with running():
        await link.send(command("load", 9, 5))
        await link.answer(9, 5)
    async with running():
        await link.send(command("release", 8, 1, limit_ms=60_000))
        assert (await link.answer(8, 1)).outcome == "refused"
        assert (await link.volunteered("hello", count=2)).data == {"mark": 9}
    assert backend.calls == ["load llama/med"]


async def test_a_newer_command_ends_a_drain_that_waits(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    waiting = backend.hold("drain llama/med")
    async with running():
        await link.send(command("drain", 9, 1))
        await waiting.begun.wait()
        await link.send(command("load", 9, 2))
        assert (await link.answer(9, 1)).outcome == "refused"
        assert (await link.answer(9, 2)).outcome == "ok"
        await link.send(command("drain", 9, 1))
        assert (await link.answer(9, 1, count=2)).outcome == "refused"
    assert backend.cancelled == ["drain llama/med"]
    assert backend.calls == ["drain llama/med", "load llama/med"]


async def test_an_older_command_does_not_end_a_drain(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    waiting = backend.hold("drain llama/med")
    async with running():
        await link.send(command("drain", 9, 2))
        await waiting.begun.wait()
        await link.send(command("load", 8, 1))
        waiting.end.set()
        assert (await link.answer(9, 2)).outcome == "ok"
        assert (await link.answer(8, 1)).outcome == "refused"


async def test_a_newer_command_waits_for_a_verb_that_acts(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    slow = backend.hold("save llama/med 0")
    async with running():
        await link.send(command("save", 9, 1, slot=0, name="a.bin"))
        await slow.begun.wait()
        await link.send(command("load", 10, 1))
        slow.end.set()
        assert (await link.answer(9, 1)).outcome == "ok"
        assert (await link.answer(10, 1)).outcome == "ok"
    assert backend.cancelled == []


async def test_of_what_piled_up_only_the_newest_token_is_executed(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    await link.send(command("load", 8, 1), command("release", 9, 1, limit_ms=60_000), command("load", 9, 2))
    async with running():
        assert (await link.answer(9, 2)).outcome == "ok"
        assert (await link.answer(8, 1)).outcome == "refused"
    assert backend.calls == ["release llama/med 60000", "load llama/med"]


async def test_a_command_cut_off_by_a_crash_is_executed_again(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    interrupted = backend.hold("load llama/med")
    async with running():
        await link.send(command("load", 9, 1))
        await interrupted.begun.wait()
    assert [report for report in link.reports if report.token == 9] == []
    interrupted.end.set()
    async with running():
        assert (await link.answer(9, 1)).outcome == "ok"
    assert backend.calls == ["load llama/med", "load llama/med"]


async def test_the_outbox_is_read_on_from_the_first_entry_without_an_answer(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    slow = backend.hold("load llama/med")
    async with running():
        await link.send(command("load", 9, 1, tenant="llama/big"), command("load", 9, 2))
        await link.answer(9, 1)
        await slow.begun.wait()
        await link.send(command("release", 9, 3, tenant="llama/big", limit_ms=60_000))
        await link.answer(9, 3)
    slow.end.set()
    link.reads.clear()
    async with running():
        await link.answer(9, 2)
    assert link.reads[0] == "1"
    assert backend.calls.count("release llama/big 60000") == 1


async def test_a_drain_has_the_limit_it_is_given_or_none(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.send(command("drain", 9, 1, limit_ms=500))
        await link.answer(9, 1)
        await link.send(command("drain", 9, 2))
        await link.answer(9, 2)
    assert backend.calls == ["drain llama/med 500", "drain llama/med"]


async def test_a_save_is_told_the_token_it_belongs_to(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.send(command("save", 9, 1, slot=0, name="a.bin"))
        await link.answer(9, 1)
    assert backend.saves == [SaveArgs(0, "a.bin", token=9)]


async def test_a_save_is_told_whose_conversation_it_is_and_how_it_was_made_ready(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    talk = {"id": "ab", "links": ["aa", "ab"], "used_ms": 5, "recallable": True}
    async with running():
        await link.send(command("save", 9, 1, slot=0, name="a.bin", conversation=talk, strategy="rewind"))
        await link.answer(9, 1)
    assert backend.saves == [SaveArgs(0, "a.bin", Talk("ab", ("aa", "ab"), used_ms=5), "rewind", 9)]


async def test_a_restore_is_told_how_room_may_be_made_and_tells_what_made_it(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    talk = {"id": "ab", "links": ["ab"], "tokens": 50, "used_ms": 5, "recallable": True}
    async with running():
        await link.send(command("restore", 9, 1, snapshot="a.bin", slot=-1, displaced="b.bin", talks=[talk]))
        report = await link.answer(9, 1)
    assert backend.rooms == [Room("b.bin", (Talk("ab", ("ab",), 50, 5),), token=9)]
    left = {"snapshot": "b.bin", "tokens": 50, "bytes": 1024, "id": "ab", "links": (), "used_ms": 0}
    assert report.data == {"slot": 1, "tokens": 100, "displaced": left}


async def test_a_restore_that_is_to_tell_first_who_would_make_room_tells_it_and_is_told_who_may(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    there = {"slot": 1, "tokens": 50}
    talk = {"id": "ab", "tokens": 50}
    ordered: dict[str, Any] = {"snapshot": "a.bin", "slot": -1, "displaced": "b.bin", "talks": [talk], "tells": True}
    backend.errors["restore llama/med a.bin -1"] = WouldPushOut(SlotUse(1, 50), "ab")
    async with running():
        await link.send(command("restore", 9, 1, **ordered))
        report = await link.answer(9, 1)
        assert (report.outcome, report.data) == ("ok", {"leaves": {**there, "id": "ab"}})
        del backend.errors["restore llama/med a.bin -1"]
        await link.send(command("restore", 9, 2, **ordered, takes=there, strategy="rewind"))
        assert (await link.answer(9, 2)).data["slot"] == 1
    assert backend.rooms[1] == Room(
        "b.bin", (Talk("ab", (), 50),), 9, tells=True, takes=SlotUse(1, 50), strategy="rewind"
    )


async def test_a_newer_vacate_ends_the_one_that_waits(link: MemoryLink, running: Running) -> None:
    hour = 3_600_000
    async with running():
        await link.send(command("vacate", 9, 1, tenant=None, need_mib=99_000, limit_ms=hour))
        await link.send(command("vacate", 10, 1, tenant=None, need_mib=1, limit_ms=hour))
        assert (await link.answer(10, 1)).data == {"free_mib": 24_000}
        refused = await link.answer(9, 1)
    assert (refused.outcome, refused.data) == ("refused", {"mark": 10})
