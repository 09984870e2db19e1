"""Calls by model name through a real gateway: what passes, what is refused, what waits, what is listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from swapper.core.types import Failure, Step, Swap
from swapper.gateway.context import Limits
from tests.unit.gateway_doubles import (
    ALPHA,
    CHAT,
    STREAM,
    Stream,
    answer,
    event,
    events_of,
    keyed,
    serve,
)

# ---- passing through


async def test_status_headers_and_body_pass_untouched() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [answer({"weird": [1, 2]}, status=418)]
        got = await gateway.call(CHAT)
        assert (got.status, got.body) == (418, b'{"weird": [1, 2]}')
        assert got.headers["X-Swapper-Wait-Ms"] == "0"
        assert "X-Swapper-Swap" not in got.headers
        assert gateway.admission.in_flight(ALPHA) == 0


async def test_the_router_may_not_load_and_never_sees_the_clients_key() -> None:
    async with serve() as gateway:
        headers = {"Authorization": "Bearer ann", "X-Api-Key": "ann", "X-Swapper-Class": "batch", "X-Other": "1"}
        await gateway.call(CHAT, headers=headers)
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
        stream = Stream().put(event("1"))
        gateway.upstream.scripts = [stream]
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
                done, _ = await asyncio.wait((write,), timeout=0.5)
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


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_413(declared: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 2000

    async with serve(limits=Limits(body_limit=1000)) as gateway:
        data = b"x" * 2000 if declared else chunks()
        async with gateway.client.post(gateway.url + "/completion", data=data) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "body_too_large"


async def test_the_bodies_of_all_waiting_calls_share_one_budget() -> None:
    async with serve(opened=False, limits=Limits(body_budget=300)) as gateway:
        big = {**CHAT, "padding": "x" * 150}
        first = asyncio.create_task(gateway.call(big))
        await gateway.waiting()
        got = await gateway.call(big)
        assert (got.status, got.error()["code"], got.headers["Retry-After"]) == (429, "body_budget", "5")
        gateway.admission.open(ALPHA, 2)
        assert (await first).status == 200
        assert (await gateway.call(big)).status == 200


async def test_a_full_queue_is_429() -> None:
    async with serve(opened=False, max_waiting=1) as gateway:
        first = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        got = await gateway.call(CHAT)
        assert (got.status, got.error()["code"]) == (429, "queue_full")
        gateway.admission.open(ALPHA, 2)
        assert (await first).status == 200


@pytest.mark.parametrize(("klass", "status"), [("urgent", 400), ("interactive", 403), ("batch", 200)])
async def test_the_class_of_a_call_is_known_and_allowed(klass: str, status: int) -> None:
    key = keyed(owner="ann", default_class="normal", classes=frozenset({"batch"}))
    async with serve(middleware=key) as gateway:
        assert (await gateway.call(CHAT, headers={"X-Swapper-Class": klass})).status == status


async def test_the_keys_default_class_counts_without_a_header() -> None:
    async with serve(opened=False, middleware=keyed(owner="ann", default_class="batch")) as gateway:
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        assert gateway.admission.demand()[0].klass == "batch"
        gateway.admission.open(ALPHA, 2)
        assert (await call).status == 200


# ---- waiting


async def test_a_call_waits_for_the_gate_and_says_how_long_and_why() -> None:
    async with serve(opened=False) as gateway:
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        assert gateway.upstream.seen == []
        gateway.admission.open(ALPHA, 2, "sw_7")
        got = await call
        assert (got.status, got.headers["X-Swapper-Swap"]) == (200, "sw_7")
        assert int(got.headers["X-Swapper-Wait-Ms"]) >= 0


async def test_a_wait_that_is_too_long_is_503_with_retry_after() -> None:
    async with serve(opened=False, limits=Limits(max_wait_ms=30)) as gateway:
        got = await gateway.call(CHAT)
        assert (got.status, got.error()["code"], got.headers["Retry-After"]) == (503, "gpu_busy", "30")
        assert gateway.admission.demand() == ()


async def test_a_wait_that_ends_while_the_model_loads_is_504() -> None:
    async with serve(opened=False, limits=Limits(max_wait_ms=300)) as gateway:
        gateway.link.swap = Swap("sw_1", "gpu0", "model alpha", 5, (), (ALPHA,), Step.LOAD, 0, 0)
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        await gateway.link.tell_cards()
        got = await call
        assert (got.status, got.error()["code"]) == (504, "load_timeout")


async def test_a_failed_load_answers_every_waiter_with_the_servers_words() -> None:
    async with serve(opened=False) as gateway:
        calls = [asyncio.create_task(gateway.call(CHAT)) for _ in range(2)]
        await gateway.waiting(2)
        gateway.link.failed[ALPHA] = Failure("tensor data is not within the file bounds", 1, 0)
        await gateway.link.tell_cards()
        for got in await asyncio.gather(*calls):
            assert (got.status, got.error()["code"]) == (502, "upstream_failed")
            assert "tensor data is not within the file bounds" in got.error()["message"]


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


async def test_a_slow_prompt_is_kept_alive_too() -> None:
    async with serve(limits=Limits(keepalive_ms=20)) as gateway:
        release = asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            await release.wait()
            return await Stream().put(event('"real"'), None)(request)

        gateway.upstream.scripts = [slow]
        async with gateway.post(STREAM) as response:
            await response.content.readuntil(b"\n\n")
            release.set()
            assert events_of(await response.read())[-1] == "real"


async def test_a_plain_call_gets_no_byte_before_its_answer() -> None:
    async with serve(opened=False, limits=Limits(keepalive_ms=1, max_wait_ms=60)) as gateway:
        assert (await gateway.call(CHAT)).status == 503


async def test_an_error_after_the_200_becomes_an_event_and_done() -> None:
    async with serve(opened=False, limits=Limits(keepalive_ms=10, max_wait_ms=100)) as gateway:
        got = await gateway.call(STREAM)
        assert got.status == 200
        *_, error, done = events_of(got.body)
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


async def test_a_name_longer_than_any_model_has_is_refused_without_comparing_it() -> None:
    async with serve() as gateway, gateway.post({"model": "a" * 100_000}) as response:
        assert response.status == 404
        assert "so long a name" in await response.text()
