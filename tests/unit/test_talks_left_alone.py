"""What a gateway leaves alone: conversations that are of no use to a call, or went on, or stand nobody knows where."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from swapper.core.conversations import WORTH_TOKENS
from swapper.core.keeping import RECALL
from swapper.gateway import talks as room
from swapper.gateway.context import Target
from swapper.gateway.proof import SlotLine
from tests.unit.gateway_doubles import ALPHA, Served, answer, serve
from tests.unit.test_talks import HI, TURN_2, body, command, figures, replaying, say, talked, wanted

Messages = list[dict[str, str]]
EDITED: Messages = [*TURN_2[:2], {"role": "user", "content": "or rather?"}]
BRANCHED: Messages = [*HI, {"role": "assistant", "content": "hm"}, {"role": "user", "content": "and?"}]


async def on_disk(gateway: Served, messages: Messages, tokens: int) -> None:
    name = await talked(gateway, messages, tokens)
    await say(gateway, "close", 1, epoch=2)
    kept = [{"snapshot": "a.kv", "id": name, "links": [name], "tokens": tokens}]
    await say(gateway, "open", 2, epoch=3, swap="sw_1", loaded=True, unproved=[], kept=kept)
    gateway.upstream.scripts = [answer(figures(0, 9))]


def verbs(gateway: Served) -> list[str]:
    return [gateway.link.reports.get_nowait().verb for _ in range(gateway.link.reports.qsize())]


@pytest.mark.parametrize(
    ("known", "tokens", "asked"),
    [
        pytest.param(TURN_2, WORTH_TOKENS - 1, TURN_2, id="it is read faster than it is brought"),
        pytest.param(TURN_2, 2_000, BRANCHED, id="little of it is in the call"),
    ],
)
async def test_what_is_of_no_use_to_a_call_is_not_brought(known: Messages, tokens: int, asked: Messages) -> None:
    async with serve() as gateway:
        await on_disk(gateway, known, tokens)
        assert (await gateway.call(body(asked))).status == 200
        assert "wanted" not in verbs(gateway)


@pytest.mark.parametrize(
    ("known", "tokens", "asked"),
    [
        pytest.param(TURN_2, WORTH_TOKENS, TURN_2, id="it is just long enough"),
        pytest.param(TURN_2, 2_000, EDITED, id="all but its last message is in the call"),
    ],
)
async def test_what_is_of_use_is_brought(known: Messages, tokens: int, asked: Messages) -> None:
    async with serve() as gateway:
        await on_disk(gateway, known, tokens)
        call = asyncio.create_task(gateway.call(body(asked)))
        assert (await wanted(gateway)).data["snapshot"] == "a.kv"
        gone = {"snapshot": "a.kv", "ok": False, "detail": "its file is gone"}
        await gateway.link.send(command("placed", 0, gone, token=0))
        assert (await call).status == 200


async def test_a_gate_that_shuts_ends_the_replay_that_runs() -> None:
    async with serve() as gateway:
        name, _ = await replaying(gateway)
        await gateway.link.send(command("close", 3, {"epoch": 4}))
        await asyncio.wait_for(gateway.upstream.left.wait(), 5)
        while (report := await gateway.link.reports.get()).verb != "recalled":
            pass
        assert (report.outcome, report.data["snapshot"]) == ("failed", f"replay:{name}")


async def test_one_that_was_asked_for_since_it_came_back_is_not_sent_again_to_prove_it() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        await say(gateway, "close", 1, epoch=2)
        gateway.upstream.scripts = [answer(figures(1_995, 1, __verbose={"id_slot": 3}))]
        await say(gateway, RECALL, 2, conversation=name, limit_ms=5_000)
        call = asyncio.create_task(gateway.call(body(HI)))
        await gateway.waiting(1)
        sent = len(gateway.upstream.seen)
        gateway.upstream.scripts = [answer({"without": "figures"})]
        back = [{"snapshot": "a.kv", "slot": 0, "tokens": 1_996, "id": name, "links": [name], "strategy": "slots"}]
        await gateway.link.send(command("open", 3, {"epoch": 3, "swap": "sw_1", "loaded": True, "unproved": back}))
        assert (await call).status == 200
        for replays in [task for task in asyncio.all_tasks() if task.get_name() == f"replays of {ALPHA}"]:
            await replays
        assert len(gateway.upstream.seen) == sent + 1


async def test_while_it_is_not_known_which_slot_answered_no_equally_long_one_is_said_to_stand_in_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, may_tell = asyncio.Event(), asyncio.Event()

    async def slowly(_target: Target, _session: object) -> list[SlotLine]:
        looking.set()
        await may_tell.wait()
        return []

    monkeypatch.setattr(room, "read_slots", slowly)
    async with serve() as gateway:
        talks = gateway.member.talks

        def slots() -> Mapping[object, Any]:
            return {talk["tokens"]: talk["slot"] for talk in talks.told(ALPHA)}

        for number, left in enumerate((2_000, 3_000)):
            gateway.upstream.scripts = [answer(figures(0, left - 4, id_slot=number))]
            await gateway.call(body([{"role": "user", "content": f"conversation {number}"}]))
            await gateway.admission.drained(ALPHA)
        assert slots() == {2_000: 0, 3_000: 1}
        await talked(gateway, [{"role": "user", "content": "something else"}], left=2_000)
        await looking.wait()
        assert slots() == {2_000: None, 3_000: 1}
        may_tell.set()
        await talks.idle()
