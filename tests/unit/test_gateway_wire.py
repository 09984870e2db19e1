"""The bare connections of the gateway: what is answered on them, what is given to aiohttp, and who is closed when."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock

import pytest

from swapper.gateway import wire as wire_room
from swapper.gateway.context import Limits
from tests.support.wire import Wire, request, settled, wire
from tests.unit.gateway_doubles import CHAT, Served, Stream, answer, event, serve

BODY = json.dumps(CHAT).encode()
CALL = request(BODY)
LISTED = request(b"", "/v1/models", method="GET")


def judged(served: Served) -> int:
    """How many connections are the gateway's own."""
    assert served.door is not None
    return len(served.door.wires)


async def test_calls_on_one_connection_are_answered_one_after_the_other_in_their_order() -> None:
    async with serve() as served, wire(served.url) as client:
        served.upstream.scripts = [answer({"n": n}) for n in range(3)]
        await client.send(CALL * 3)
        assert [json.loads((await client.answer()).body) for _ in range(3)] == [{"n": n} for n in range(3)]
        assert [seen.body for seen in served.upstream.seen] == [BODY] * 3
        assert judged(served) == 1


async def test_a_connection_that_asks_something_else_is_aiohttps_from_there_on_and_calls_on_it_are_answered() -> None:
    async with serve() as served, wire(served.url) as client:
        await client.send(CALL + LISTED + CALL)
        for _ in range(2):
            assert (await client.answer()).status == 200
        assert judged(served) == 0
        got = await client.answer()
        assert (got.status, json.loads(got.body)) == (200, {"ok": True})
        assert len(served.upstream.seen) == 2


async def test_who_says_that_no_request_follows_is_answered_and_closed() -> None:
    async with serve() as served, wire(served.url) as client:
        got = await client.call(request(BODY, "/v1/chat/completions", "Connection: close") + CALL)
        assert (got.status, got.one("Connection")) == (200, "close")
        assert await client.ended() == b""
        assert len(served.upstream.seen) == 1


async def test_a_body_that_is_over_the_budget_is_refused_and_the_next_call_on_the_connection_served() -> None:
    async with serve(limits=Limits(body_budget=1000)) as served, wire(served.url) as client:
        large = request(json.dumps({**CHAT, "padding": "x" * 300_000}).encode())
        got = await client.call(large)
        assert (got.status, got.error()["code"]) == (429, "body_budget")
        assert (await client.call(CALL)).status == 200
        assert served.ctx.budget.used == 0


async def test_a_body_of_which_no_more_comes_is_refused_in_words_and_its_share_of_the_budget_let_go() -> None:
    async with serve(limits=Limits(body_pause_ms=20)) as served, wire(served.url) as client:
        got = await client.call(CALL[:-5])
        assert (got.status, got.error()["code"], got.one("Connection")) == (408, "body_stopped", "close")
        assert await client.ended() == b""
        assert served.ctx.budget.used == 0


async def test_a_head_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_room, "HEAD_S", 0.02)
    monkeypatch.setattr(wire_room, "SWEEP_S", 0.01)
    async with serve() as served, wire(served.url) as client:
        await client.send(CALL[:40])
        assert await client.ended() == b""
        assert judged(served) == 0


async def test_of_the_next_requests_only_so_much_is_read_while_one_is_answered() -> None:
    async with serve() as served, wire(served.url) as client:
        served.upstream.scripts = [stream := Stream("application/json"), answer({})]
        size = 20 << 20
        sending = asyncio.create_task(client.send(CALL + request(b"[" + b" " * size + b"]")))
        await served.upstream.arrived.get()
        done, _ = await asyncio.wait([sending], timeout=0.2)
        assert not done
        stream.put(b"{}", None)
        assert (await client.answer()).body == b"{}"
        await sending
        assert (await client.answer()).status == 400


async def test_who_leaves_in_the_middle_of_a_body_holds_nothing() -> None:
    async with serve() as served:
        async with wire(served.url) as client:
            await client.send(request(BODY)[:-3])
            await settled(lambda: served.ctx.budget.used)
            assert served.ctx.budget.used > 0
        await settled(lambda: served.ctx.budget.used)
        assert served.ctx.budget.used == 0
        assert judged(served) == 0


async def test_a_fault_of_ours_is_an_answer_and_after_the_answers_beginning_a_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: object) -> None:
        raise KeyError("a fault")

    async def fails_late(_ctx: object, _head: object, _held: object, door: wire_room.Wire) -> None:
        door.begin(200, "OK", [(b"Content-Length", b"10")], bounded=True)
        door.write(b"half")
        raise KeyError("a fault")

    async with serve() as served:
        monkeypatch.setattr(wire_room, "_answered", fails)
        async with wire(served.url) as client:
            got = await client.call(CALL)
            assert (got.status, got.error()["code"]) == (500, "internal")
            monkeypatch.setattr(wire_room, "_answered", fails_late)
            assert not (await client.call(CALL)).complete


async def test_a_stop_closes_who_idles_lets_calls_end_and_ends_those_that_take_too_long() -> None:
    async with serve() as served, wire(served.url) as idle, wire(served.url) as soon, wire(served.url) as late:
        door = served.door
        assert door is not None
        assert (await idle.call(CALL)).status == 200
        first, second = Stream(), Stream()
        served.upstream.scripts = [first, second]
        for client, stream in ((soon, first), (late, second)):
            await client.send(request(json.dumps({**CHAT, "stream": True}).encode()))
            stream.put(event("1"))
            await begun(client)
        closing = asyncio.create_task(door.close(0.2))
        assert await idle.ended() == b""
        first.put(event("[DONE]"), None)
        assert (await soon.ended()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"DONE" not in await late.ended()
        await closing
        await served.upstream.left.wait()


async def test_a_client_that_leaves_before_its_call_has_begun_to_run_holds_nothing() -> None:
    async with serve() as served:
        assert served.door is not None
        made, transport = served.door(), _transport()
        made.connection_made(transport)
        made.data_received(CALL)
        assert served.ctx.budget.used == len(BODY)
        made.connection_lost(None)
        await settled(lambda: served.ctx.budget.used)
        assert served.ctx.budget.used == 0
        assert served.upstream.seen == []


async def test_the_last_answer_waits_so_long_to_be_read_and_no_longer() -> None:
    async with serve() as served:
        assert served.door is not None
        made, transport = served.door(), _transport()
        made.connection_made(transport)
        transport.is_closing.return_value = True
        since = asyncio.get_running_loop().time()
        made.look(since + wire_room.CLOSING_S - 1)
        transport.abort.assert_not_called()
        made.look(since + wire_room.CLOSING_S + 1)
        transport.abort.assert_called_once()
        made.connection_lost(None)


async def test_a_key_stands_in_nothing_that_is_remembered_of_a_head() -> None:
    async with serve() as served, wire(served.url) as client:
        head = ("Authorization: Bearer hunter2", "X-Api-Key: hunter3", "X-Other: kept")
        assert (await client.call(request(BODY, "/v1/chat/completions", *head))).status == 200
        assert served.door is not None
        said = repr(vars(served.door.heads))
        assert "kept" in said
        assert "hunter" not in said


def _transport() -> Mock:
    transport = Mock()
    transport.is_closing.return_value = False
    return transport


async def begun(client: Wire) -> None:
    said = b""
    while event("1") not in said:
        said += await client.some()
