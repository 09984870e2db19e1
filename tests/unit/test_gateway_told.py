"""Each model call is told of once when it is over: its tenant, the status that went out, how long it waited."""

from __future__ import annotations

import asyncio

from swapper.gateway.context import LEFT
from tests.unit.gateway_doubles import ALPHA, CHAT, STREAM, Served, Stream, answer, event, serve


class Told:
    def __init__(self, gateway: Served) -> None:
        self.calls: asyncio.Queue[tuple[str, int, int]] = asyncio.Queue()
        gateway.ctx.told = lambda tenant, code, waited_ms: self.calls.put_nowait((tenant, code, waited_ms))


async def test_an_answer_is_told_with_its_own_status() -> None:
    async with serve() as gateway:
        told = Told(gateway)
        gateway.upstream.scripts = [answer({}, status=418)]
        await gateway.call(CHAT)
        assert await told.calls.get() == (ALPHA, 418, 0)
        assert told.calls.empty()


async def test_a_call_that_waited_is_told_with_its_wait() -> None:
    async with serve(opened=False) as gateway:
        told = Told(gateway)
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        now = gateway.admission.now
        gateway.admission.now = lambda: now() + 1_500
        gateway.admission.open(ALPHA, 2)
        assert (await call).status == 200
        tenant, code, waited_ms = await told.calls.get()
        assert (tenant, code) == (ALPHA, 200)
        assert waited_ms >= 1_500


async def test_one_too_many_is_told_as_refused() -> None:
    async with serve(opened=False, max_waiting=0) as gateway:
        told = Told(gateway)
        assert (await gateway.call(CHAT)).status == 429
        assert await told.calls.get() == (ALPHA, 429, 0)


async def test_a_client_that_leaves_before_its_answer_is_told_as_gone() -> None:
    async with serve(opened=False) as gateway:
        told = Told(gateway)
        call = asyncio.create_task(gateway.call(STREAM))
        await gateway.waiting()
        call.cancel()
        tenant, code, _ = await told.calls.get()
        assert (tenant, code) == (ALPHA, LEFT)


async def test_a_stream_is_told_of_at_its_end() -> None:
    async with serve() as gateway:
        told = Told(gateway)
        stream = Stream().put(event("1"))
        gateway.upstream.scripts = [stream]
        async with gateway.post(STREAM) as response:
            assert await response.content.readany() == event("1")
            assert told.calls.empty()
            stream.put(b"data: [DONE]\n\n", None)
            await response.read()
        assert (await told.calls.get())[1] == 200
