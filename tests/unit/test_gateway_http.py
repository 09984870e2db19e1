"""Calls by model name through a real gateway: what passes, what is refused, what waits, and what breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from swapper.core.types import Failure, Step, Swap
from swapper.gateway.context import Limits
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
    keyed,
    plain,
    serve,
)


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    body: dict[str, Any] = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def waiting(gateway: Served, count: int = 1) -> None:
    """Until so many calls wait, as the store is told."""
    await gateway.link.beaten(lambda demand: sum(record.waiting for record in demand) == count)


def events_of(text: bytes) -> list[Any]:
    data = [line[6:] for line in text.decode().split("\n\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


# ---- passing through


async def test_status_headers_and_body_pass_untouched() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [answer({"weird": [1, 2]}, status=418)]
        async with gateway.post(CHAT) as response:
            assert response.status == 418
            assert await response.read() == b'{"weird": [1, 2]}'
            assert response.headers["X-Swapper-Wait-Ms"] == "0"
            assert "X-Swapper-Swap" not in response.headers
        assert gateway.admission.in_flight(ALPHA) == 0


async def test_the_router_may_not_load_and_never_sees_the_clients_key() -> None:
    async with serve() as gateway:
        headers = {"Authorization": "Bearer ann", "X-Api-Key": "ann", "X-Swapper-Class": "batch", "X-Other": "1"}
        async with gateway.post(CHAT, headers=headers) as response:
            await response.read()
        seen = gateway.upstream.seen[0]
        assert seen.path == "/v1/chat/completions"
        assert seen.query == {"autoload": "false"}
        assert seen.headers["Authorization"] == "Bearer server-key"
        assert seen.headers["X-Other"] == "1"
        assert not {"X-Api-Key", "X-Swapper-Class"} & set(seen.headers)


async def test_the_body_reaches_the_server_byte_for_byte() -> None:
    async with serve() as gateway:
        body = b'{ "model" :"alpha",  "n": 1.0e5, "big": 123456789012345678901234567890 }'
        async with gateway.client.post(gateway.url + "/completion", data=body) as response:
            assert response.status == 200
        assert gateway.upstream.seen[0].body == body


async def test_an_alias_is_rewritten_and_every_other_value_keeps_its_bytes() -> None:
    async with serve() as gateway:
        body = (
            b'{"n":1.0e5,"model":"gpt-4o","prompt":"model: \\"gpt-4o\\" \\u00e9","big":123456789012345678901234567890}'
        )
        async with gateway.client.post(gateway.url + "/completion", data=body) as response:
            assert response.status == 200
        assert gateway.upstream.seen[0].body == body.replace(b'"model":"gpt-4o"', b'"model":"alpha"')


async def test_each_chunk_of_a_stream_reaches_the_client_at_once() -> None:
    async with serve() as gateway:
        stream = Stream()
        gateway.upstream.scripts = [stream]
        stream.put(event("1"))
        async with gateway.post(STREAM) as response:
            assert response.content_type == "text/event-stream"
            assert await response.content.readany() == event("1")
            stream.put(event("2"))
            assert await response.content.readany() == event("2")
            stream.put(b"data: [DO", b"NE]\n\n", None)
            assert await response.read() == b"data: [DONE]\n\n"


async def test_a_client_that_does_not_read_holds_the_server_back() -> None:
    async with serve() as gateway:
        sent = 0
        blocked = asyncio.Event()

        async def flood(request: web.Request) -> web.StreamResponse:
            nonlocal sent
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            while True:
                write = asyncio.ensure_future(response.write(event("x" * 65_536)))
                done, _ = await asyncio.wait((write,), timeout=1)
                if not done:
                    blocked.set()
                await write
                sent += 65_536

        gateway.upstream.scripts = [flood]
        async with gateway.post(STREAM) as response:
            await blocked.wait()
            assert response.status == 200
        assert sent < 64 << 20
        await gateway.upstream.left.wait()


# ---- refusals


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (b"{", 400, "bad_request", "not JSON"),
        (b"\xff", 400, "bad_request", "not JSON"),
        (b"[]", 400, "bad_request", "wrong field"),
        (b'{"model": 3}', 400, "bad_request", "wrong field"),
        (b'{"model": "alpha", "stream": "yes"}', 400, "bad_request", "wrong field"),
        (b'{"messages": [{"content": "\\"model\\": \\"alpha\\""}]}', 400, "model_missing", "names no model"),
        (b'{"model": "alpa"}', 404, "model_not_found", "did you mean alpha?"),
        (b'{"model": "zzzzzz"}', 404, "model_not_found", "/v1/models"),
    ],
)
async def test_a_body_that_cannot_be_served_is_refused_in_words(
    body: bytes, status: int, code: str, words: str
) -> None:
    async with serve() as gateway, gateway.client.post(gateway.url + "/v1/chat/completions", data=body) as response:
        assert response.status == status
        error = await error_of(response)
        assert error["code"] == code
        assert words in error["message"]
        assert gateway.upstream.seen == []
        assert gateway.ctx.budget.used == 0


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_413(declared: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 2000

    async with serve(limits=Limits(body_limit=1000)) as gateway:
        data = b"x" * 2000 if declared else chunks()
        async with gateway.client.post(gateway.url + "/completion", data=data) as response:
            assert response.status == 413
            assert (await error_of(response))["code"] == "body_too_large"


async def test_the_bodies_of_all_waiting_calls_share_one_budget() -> None:
    async with serve(opened=False, limits=Limits(body_budget=300)) as gateway:
        big = {**CHAT, "padding": "x" * 150}
        first = asyncio.create_task(_status(gateway, big))
        await waiting(gateway)
        async with gateway.post(big) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "5"
            assert (await error_of(response))["code"] == "body_budget"
        gateway.admission.open(ALPHA, 2)
        assert await first == 200
        assert await _status(gateway, big) == 200


async def test_a_full_queue_is_429() -> None:
    async with serve(opened=False, max_waiting=1) as gateway:
        first = asyncio.create_task(_status(gateway, CHAT))
        await waiting(gateway)
        async with gateway.post(CHAT) as response:
            assert response.status == 429
            assert (await error_of(response))["code"] == "queue_full"
        gateway.admission.open(ALPHA, 2)
        assert await first == 200


async def _status(gateway: Served, body: object) -> int:
    async with gateway.post(body) as response:
        await response.read()
        return int(response.status)


@pytest.mark.parametrize(("klass", "status"), [("urgent", 400), ("interactive", 403), ("batch", 200)])
async def test_the_class_of_a_call_is_known_and_allowed(klass: str, status: int) -> None:
    key = keyed(owner="ann", default_class="normal", classes=frozenset({"batch"}))
    async with serve(middleware=key) as gateway, gateway.post(CHAT, headers={"X-Swapper-Class": klass}) as response:
        assert response.status == status


async def test_the_keys_default_class_counts_without_a_header() -> None:
    async with serve(opened=False, middleware=keyed(owner="ann", default_class="batch")) as gateway:
        call = asyncio.create_task(_status(gateway, CHAT))
        await waiting(gateway)
        assert gateway.admission.demand()[0].klass == "batch"
        gateway.admission.open(ALPHA, 2)
        assert await call == 200


# ---- waiting


async def test_a_call_waits_for_the_gate_and_says_how_long_and_why() -> None:
    async with serve(opened=False) as gateway:
        call = asyncio.ensure_future(gateway.post(CHAT).__aenter__())
        await waiting(gateway)
        assert gateway.upstream.seen == []
        gateway.admission.open(ALPHA, 2, "sw_7")
        response = await call
        assert response.status == 200
        assert response.headers["X-Swapper-Swap"] == "sw_7"
        assert int(response.headers["X-Swapper-Wait-Ms"]) >= 0
        response.release()


async def test_a_wait_that_is_too_long_is_503_with_retry_after() -> None:
    async with serve(opened=False, limits=Limits(max_wait_ms=30)) as gateway:
        async with gateway.post(CHAT) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "30"
            assert (await error_of(response))["code"] == "gpu_busy"
        assert gateway.admission.demand() == ()


async def test_a_wait_that_ends_while_the_model_loads_is_504() -> None:
    async with serve(opened=False, limits=Limits(max_wait_ms=300)) as gateway:
        gateway.link.swap = Swap("sw_1", "gpu0", "model alpha", 5, (), (ALPHA,), Step.LOAD, 0, 0)
        call = asyncio.ensure_future(gateway.post(CHAT).__aenter__())
        await waiting(gateway)
        await gateway.link.tell_cards()
        response = await call
        assert response.status == 504
        assert (await error_of(response))["code"] == "load_timeout"


async def test_a_failed_load_answers_every_waiter_with_the_servers_words() -> None:
    async with serve(opened=False) as gateway:
        calls = [asyncio.ensure_future(gateway.post(CHAT).__aenter__()) for _ in range(2)]
        await waiting(gateway, 2)
        gateway.link.failed[ALPHA] = Failure("tensor data is not within the file bounds", 1, 0)
        await gateway.link.tell_cards()
        for response in await asyncio.gather(*calls):
            assert response.status == 502
            error = await error_of(response)
            assert error["code"] == "upstream_failed"
            assert "tensor data is not within the file bounds" in error["message"]


# ---- clients that leave


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_client_that_leaves_while_queued_leaves_no_demand(body: dict[str, object]) -> None:
    async with serve(opened=False) as gateway:
        call = asyncio.ensure_future(gateway.post(body).__aenter__())
        await waiting(gateway)
        call.cancel()
        await gateway.link.beaten(lambda demand: demand == ())
        assert gateway.ctx.budget.used == 0
        gateway.admission.open(ALPHA, 2)
        assert gateway.upstream.seen == []


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
        call = asyncio.ensure_future(gateway.post(CHAT).__aenter__())
        await gateway.upstream.arrived.get()
        call.cancel()
        await gateway.upstream.left.wait()
        await gateway.admission.drained(ALPHA)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


# ---- cuts


async def test_a_cut_ends_started_streams_with_words_and_requeues_the_others() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1")), hang, answer({"second": "try"})]
        started = await gateway.post(STREAM).__aenter__()
        await gateway.upstream.arrived.get()
        assert await started.content.readany() == event("1")
        fresh = asyncio.ensure_future(gateway.post(CHAT).__aenter__())
        await gateway.upstream.arrived.get()

        gateway.admission.close(ALPHA, 2)
        cut = gateway.admission.cut(ALPHA, "the drain limit")
        assert (cut.ended, cut.requeued) == (1, 1)
        await gateway.admission.drained(ALPHA)
        error, done = events_of(await started.read())
        assert "the drain limit" in error["error"]["message"]
        assert done == "[DONE]"
        await waiting(gateway)

        gateway.admission.open(ALPHA, 3, "sw_2")
        response = await fresh
        assert await response.json() == {"second": "try"}
        assert len(gateway.upstream.seen) == 3


async def test_a_cut_of_a_plain_answer_under_way_breaks_the_connection() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream("application/json", length=100).put(b'{"half":')]
        async with gateway.post(CHAT) as response:
            assert await response.content.readany() == b'{"half":'
            gateway.admission.cut(ALPHA, "the drain limit")
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await gateway.admission.drained(ALPHA)


# ---- keepalives


@pytest.mark.parametrize(
    ("path", "comments", "expected"),
    [
        ("/v1/chat/completions", False, {"object": "chat.completion.chunk", "delta": {}}),
        ("/v1/completions", False, {"object": "text_completion", "text": ""}),
        ("/completion", False, {"content": "", "stop": False}),
        ("/completion", True, None),
    ],
)
async def test_a_waiting_stream_gets_data_that_adds_nothing(
    path: str, comments: bool, expected: dict[str, object] | None
) -> None:
    limits = Limits(keepalive_ms=20, keepalive_comments=comments)
    async with serve(opened=False, limits=limits) as gateway:
        gateway.upstream.scripts = [Stream().put(event('"real"'), event("[DONE]"), None)]
        async with gateway.post(STREAM, path=path) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            assert "X-Swapper-Wait-Ms" not in response.headers
            first = await response.content.readuntil(b"\n\n")
            gateway.admission.open(ALPHA, 2)
            rest = await response.read()
        if expected is None:
            assert first == b": waiting\n\n"
        else:
            (chunk,) = events_of(first)
            flat: dict[str, object] = {**chunk, **(chunk["choices"][0] if "choices" in chunk else {})}
            assert expected.items() <= flat.items()
        assert events_of(rest)[-2:] == ["real", "[DONE]"]


async def test_a_plain_call_gets_no_byte_before_its_answer() -> None:
    limits = Limits(keepalive_ms=1, max_wait_ms=60)
    async with serve(opened=False, limits=limits) as gateway, gateway.post(CHAT) as response:
        assert response.status == 503


async def test_an_error_after_the_200_becomes_an_event_and_done() -> None:
    limits = Limits(keepalive_ms=10, max_wait_ms=100)
    async with serve(opened=False, limits=limits) as gateway, gateway.post(STREAM) as response:
        assert response.status == 200
        *_, error, done = events_of(await response.read())
        assert error["error"]["code"] == "gpu_busy"
        assert done == "[DONE]"


async def test_the_servers_own_error_after_the_200_becomes_an_event() -> None:
    async with serve(opened=False, limits=Limits(keepalive_ms=10)) as gateway:
        gateway.upstream.scripts = [answer({"error": {"message": "too long", "n_ctx": 2048}}, status=400)]
        async with gateway.post(STREAM) as response:
            await response.content.readuntil(b"\n\n")
            gateway.admission.open(ALPHA, 2)
            *_, error, done = events_of(await response.read())
        assert error == {"error": {"message": "too long", "n_ctx": 2048}}
        assert done == "[DONE]"


# ---- servers that die


async def test_death_mid_stream_becomes_an_error_event_after_the_last_whole_event() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1"), b'data: {"cut', ConnectionError())]
        async with gateway.post(STREAM) as response:
            first, error, done = events_of(await response.read())
        assert (first, done) == (1, "[DONE]")
        assert error["error"]["code"] == "upstream_failed"


async def test_the_routers_own_words_at_the_end_of_a_stream_become_an_error_event() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1"), b"proxy error: Failed to read connection", None)]
        async with gateway.post(STREAM) as response:
            first, error, done = events_of(await response.read())
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
        async with gateway.post(CHAT) as response:
            assert response.status == 200
            assert await response.json() == {"second": "try"}


async def test_a_call_that_found_no_model_is_held_by_a_gate_that_shut_meanwhile() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [
            shut_then(gateway, answer({"error": {"message": "model is not loaded"}}, 400)),
            answer({"second": "try"}),
        ]
        call = asyncio.ensure_future(gateway.post(CHAT).__aenter__())
        await waiting(gateway)
        assert len(gateway.upstream.seen) == 1
        gateway.admission.open(ALPHA, 3)
        assert await (await call).json() == {"second": "try"}


def shut_then(gateway: Served, script: Script) -> Script:
    async def shut(request: web.Request) -> web.StreamResponse:
        gateway.admission.close(ALPHA, 2)
        response: web.StreamResponse = await script(request)
        return response

    return shut


async def test_a_prompt_that_kills_servers_is_not_sent_for_ever() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [die()]
        async with gateway.post(CHAT) as response:
            assert response.status == 502
            assert (await error_of(response))["code"] == "upstream_failed"
        assert len(gateway.upstream.seen) == 3


async def test_a_server_that_refuses_connections_is_tried_for_a_while_and_then_502() -> None:
    async with serve(limits=Limits(retry_ms=0)) as gateway:
        gateway.ctx.targets = {ALPHA: type(gateway.ctx.targets[ALPHA])(ALPHA, "http://127.0.0.1:1", "alpha")}
        async with gateway.post(CHAT) as response:
            assert response.status == 502
            assert (await error_of(response))["code"] == "upstream_failed"
        assert gateway.admission.in_flight(ALPHA) == 0


async def test_an_error_of_the_model_itself_is_not_retried() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [answer({"error": {"message": "exceed_context_size_error"}}, 400)]
        async with gateway.post(CHAT) as response:
            assert response.status == 400
            assert await response.json() == {"error": {"message": "exceed_context_size_error"}}
        assert len(gateway.upstream.seen) == 1


# ---- models


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_models_are_listed_with_their_context_and_whether_they_serve(path: str) -> None:
    async with serve() as gateway:
        async with gateway.client.get(gateway.url + path) as response:
            body = await response.json()
        assert body["object"] == "list"
        (line,) = body["data"]
        assert (line["id"], line["context_length"], line["status"]) == ("alpha", 8192, {"value": "loaded"})
        assert line["aliases"] == ["gpt-4o"]
