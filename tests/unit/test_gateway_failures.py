"""Everything that breaks a call: clients that leave, cuts, servers that die or are not there."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from swapper.gateway.context import Limits, Target
from tests.unit.gateway_doubles import (
    ALPHA,
    CHAT,
    STREAM,
    Script,
    Served,
    Stream,
    answer,
    die,
    event,
    events_of,
    plain,
    serve,
)


async def hang(request: web.Request) -> web.StreamResponse:
    """A server that reads the prompt for ever."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


# ---- clients that leave


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_client_that_leaves_while_queued_leaves_no_demand(body: dict[str, object]) -> None:
    async with serve(opened=False) as gateway:
        call = asyncio.create_task(gateway.call(body))
        await gateway.waiting()
        call.cancel()
        await gateway.link.beaten(lambda demand: demand == ())
        assert gateway.ctx.budget.used == 0
        gateway.admission.open(ALPHA, 2)
        assert gateway.upstream.seen == []


async def test_a_client_that_leaves_after_keepalives_leaves_no_demand() -> None:
    async with serve(opened=False, limits=Limits(keepalive_ms=10)) as gateway:
        async with gateway.post(STREAM) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await gateway.link.beaten(lambda demand: demand == ())


async def test_a_client_that_leaves_mid_stream_stops_the_generation() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1"))]
        async with gateway.post(STREAM) as response:
            await response.content.readany()
            response.close()
        await gateway.upstream.left.wait()
        await gateway.admission.drained(ALPHA)


async def test_a_client_that_leaves_before_the_answer_begins_closes_the_upstream_socket() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [hang]
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.upstream.arrived.get()
        call.cancel()
        await gateway.upstream.left.wait()
        await gateway.admission.drained(ALPHA)


# ---- cuts


async def test_a_cut_ends_started_streams_with_words_and_requeues_the_others() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1")), hang, answer({"second": "try"})]
        async with gateway.post(STREAM) as started:
            assert await started.content.readany() == event("1")
            await gateway.upstream.arrived.get()
            fresh = asyncio.create_task(gateway.call(CHAT))
            await gateway.upstream.arrived.get()

            gateway.admission.close(ALPHA, 2)
            cut = gateway.admission.cut(ALPHA, "the drain limit")
            assert (cut.ended, cut.requeued) == (1, 1)
            await gateway.admission.drained(ALPHA)
            error, done = events_of(await started.read())
            assert "the drain limit" in error["error"]["message"]
            assert done == "[DONE]"

        await gateway.waiting()
        gateway.admission.open(ALPHA, 3, "sw_2")
        assert (await fresh).json() == {"second": "try"}
        assert len(gateway.upstream.seen) == 3


async def test_a_requeued_stream_goes_on_being_kept_alive() -> None:
    async with serve(limits=Limits(keepalive_ms=20)) as gateway:
        gateway.upstream.scripts = [hang, Stream().put(event('"real"'), None)]
        async with gateway.post(STREAM) as response:
            await gateway.upstream.arrived.get()
            gateway.admission.close(ALPHA, 2)
            gateway.admission.cut(ALPHA, "the drain limit")
            await gateway.admission.drained(ALPHA)
            await response.content.readuntil(b"\n\n")
            gateway.admission.open(ALPHA, 3)
            assert events_of(await response.read())[-1] == "real"


async def test_a_cut_of_a_plain_answer_under_way_breaks_the_connection() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream("application/json", length=100).put(b'{"half":')]
        async with gateway.post(CHAT) as response:
            assert await response.content.readany() == b'{"half":'
            gateway.admission.cut(ALPHA, "the drain limit")
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await gateway.admission.drained(ALPHA)


# ---- servers that die


async def test_death_mid_stream_becomes_an_error_event_after_the_last_whole_event() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1"), b'data: {"cut', ConnectionError())]
        first, error, done = events_of((await gateway.call(STREAM)).body)
        assert (first, done) == (1, "[DONE]")
        assert error["error"]["code"] == "upstream_failed"


async def test_the_routers_own_words_at_the_end_of_a_stream_become_an_error_event() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1"), b"proxy error: Failed to read connection", None)]
        first, error, done = events_of((await gateway.call(STREAM)).body)
        assert (first, done) == (1, "[DONE]")
        assert "Failed to read connection" in error["error"]["message"]


async def test_death_inside_a_plain_answer_breaks_the_connection() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream("application/json", length=100).put(b'{"half":', ConnectionError())]
        async with gateway.post(CHAT) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


@pytest.mark.parametrize(
    "first",
    [
        plain("proxy error: Could not establish connection", 500),
        answer({"error": {"code": 400, "message": "model is not loaded", "type": "invalid_request_error"}}, 400),
        answer({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, 503),
        die(),
    ],
    ids=["child not listening", "not loaded", "plain server loading", "died before a byte"],
)
async def test_a_call_whose_model_is_not_there_is_sent_again(first: Script) -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [first, answer({"second": "try"})]
        got = await gateway.call(CHAT)
        assert (got.status, got.json()) == (200, {"second": "try"})
        assert [seen.body for seen in gateway.upstream.seen] == [gateway.upstream.seen[0].body] * 2


async def test_a_call_that_found_no_model_is_held_by_a_gate_that_shut_meanwhile() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [
            shut_then(gateway, answer({"error": {"message": "model is not loaded"}}, 400)),
            answer({"second": "try"}),
        ]
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        assert len(gateway.upstream.seen) == 1
        gateway.admission.open(ALPHA, 3)
        assert (await call).json() == {"second": "try"}


def shut_then(gateway: Served, script: Script) -> Script:
    async def shut(request: web.Request) -> web.StreamResponse:
        gateway.admission.close(ALPHA, 2)
        return await script(request)

    return shut


async def test_a_prompt_that_kills_servers_is_not_sent_for_ever() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [die()]
        got = await gateway.call(CHAT)
        assert (got.status, got.error()["code"]) == (502, "upstream_failed")
        assert len(gateway.upstream.seen) == 3


async def test_a_server_that_refuses_connections_is_tried_for_a_while_and_then_502() -> None:
    async with serve(limits=Limits(retry_ms=0)) as gateway:
        gateway.ctx.targets = {ALPHA: Target(ALPHA, "http://127.0.0.1:1", "alpha")}
        got = await gateway.call(CHAT)
        assert (got.status, got.error()["code"]) == (502, "upstream_failed")
        assert gateway.admission.in_flight(ALPHA) == 0


@pytest.mark.parametrize("message", ["exceed_context_size_error", "x" * 20_000])
async def test_an_error_of_the_model_itself_is_passed_on_whole_and_not_retried(message: str) -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [answer({"error": {"message": message}}, 400)]
        got = await gateway.call(CHAT)
        assert (got.status, got.json()) == (400, {"error": {"message": message}})
        assert len(gateway.upstream.seen) == 1
