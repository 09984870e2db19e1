"""WebSockets to a model's own server: what passes, what of it is work, and who closes them when the card is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import WSCloseCode, WSMsgType, web

from swapper.core.types import WorkClass
from swapper.gateway.admission import Admission, Call
from swapper.gateway.context import Limits
from swapper.gateway.origins import Origins
from swapper.gateway.work import Sockets
from tests.support.virtual_time import virtual
from tests.unit.gateway_doubles import ALPHA, CHAT, Served, plain, serve

PATH = "/upstream/alpha/ws?clientId=tab"


class Room:
    """A server that says hello, echoes, and tells what the test has it tell."""

    def __init__(self) -> None:
        self.sockets: list[web.WebSocketResponse] = []
        self.heard: asyncio.Queue[object] = asyncio.Queue()
        self.ended: asyncio.Queue[int | None] = asyncio.Queue()
        self.seen: list[web.Request] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        socket = web.WebSocketResponse(protocols=["realtime"])
        await socket.prepare(request)
        self.sockets.append(socket)
        await socket.send_str("hello")
        async for message in socket:
            self.heard.put_nowait(message.data)
            if message.type is WSMsgType.TEXT:
                await socket.send_str(f"you said {message.data}")
            else:
                await socket.send_bytes(message.data)
        self.ended.put_nowait(socket.close_code)
        return socket


@asynccontextmanager
async def room(
    *, opened: bool = True, quiet_s: float = 30, pages: Origins | None = None, limits: Limits | None = None
) -> AsyncGenerator[tuple[Served, Room]]:
    async with serve(opened=opened, pages=pages, limits=limits) as served:
        server = Room()
        served.upstream.scripts = [server]
        served.ctx.sockets.quiet_s = quiet_s
        yield served, server


@asynccontextmanager
async def connect(
    served: Served,
    path: str = PATH,
    *,
    headers: Mapping[str, str] | None = None,
    protocols: Sequence[str] = (),
    autoping: bool = True,
) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
    opening = served.client.ws_connect(served.url + path, headers=headers, protocols=protocols, autoping=autoping)
    async with opening as socket:
        yield socket


async def refused(served: Served, path: str = PATH, headers: Mapping[str, str] | None = None) -> tuple[int, str | None]:
    """The status and Retry-After of a handshake that comes to nothing."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as error:
        async with asyncio.timeout(10):
            await served.client.ws_connect(served.url + path, headers=headers)
    return error.value.status, None if error.value.headers is None else error.value.headers.get("Retry-After")


async def opening(served: Served) -> aiohttp.ClientWebSocketResponse:
    return await served.client.ws_connect(served.url + PATH)


async def hear(socket: aiohttp.ClientWebSocketResponse) -> object:
    async with asyncio.timeout(10):
        return (await socket.receive()).data


async def closed(socket: aiohttp.ClientWebSocketResponse) -> tuple[int, str]:
    """The code and the words it was closed with."""
    async with asyncio.timeout(10):
        message = await socket.receive()
        while message.type not in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING):
            message = await socket.receive()
        assert message.type is WSMsgType.CLOSE
        return message.data, str(message.extra)


# ---- what passes


async def test_text_and_bytes_pass_both_ways_with_path_query_and_subprotocol() -> None:
    async with room() as (served, server), connect(served, protocols=["other", "realtime"]) as socket:
        assert await hear(socket) == "hello"
        assert socket.protocol == "realtime"
        await socket.send_str("grüße")
        assert await hear(socket) == "you said grüße"
        await socket.send_bytes(b"\x00\xff")
        assert await hear(socket) == b"\x00\xff"
        [request] = server.seen
        assert (request.path, dict(request.query)) == (
            "/ws",
            {"clientId": "tab", "model": "alpha", "autoload": "false"},
        )
        assert request.headers["Authorization"] == "Bearer server-key"


@pytest.mark.parametrize("code", [1000, 4242])
async def test_either_side_s_end_is_the_other_s_with_its_code(code: int) -> None:
    async with room() as (served, server):
        async with connect(served) as socket:
            await hear(socket)
            await server.sockets[0].close(code=code)
            assert (await closed(socket))[0] == code
        async with connect(served) as socket:
            await hear(socket)
            server.ended = asyncio.Queue()
            await socket.close(code=code)
            async with asyncio.timeout(10):
                assert await server.ended.get() == code


async def test_a_server_that_dies_is_the_client_s_going_away() -> None:
    async with room() as (served, server), connect(served) as socket:
        await hear(socket)
        transport = server.seen[0].transport
        assert transport is not None
        transport.abort()
        assert (await closed(socket))[0] == WSCloseCode.GOING_AWAY


async def test_a_message_beyond_the_limit_of_a_body_ends_the_socket_and_is_not_held() -> None:
    async with room(limits=Limits(body_limit=1000)) as (served, server), connect(served) as socket:
        await hear(socket)
        await socket.send_bytes(b"x" * 1001)
        assert (await closed(socket))[0] == WSCloseCode.MESSAGE_TOO_BIG
        assert server.heard.empty()
        async with connect(served) as other:
            await hear(other)
            await server.sockets[-1].send_bytes(b"x" * 1001)
            assert (await closed(other))[0] == WSCloseCode.MESSAGE_TOO_BIG


async def test_what_the_server_refuses_is_refused_and_one_that_speaks_no_websocket_is_told() -> None:
    async with room() as (served, _):
        for script, status in ((plain("no", 404), 404), (plain("fine", 200), 502)):
            served.upstream.scripts = [script]
            assert (await refused(served))[0] == status
        assert (await refused(served, "/upstream/nobody/ws"))[0] == 404
        assert served.admission.in_flight(ALPHA) == 0


async def test_who_reads_slowly_holds_back_who_sends() -> None:
    """Of what a server pours in there is never more on the way than the sockets' buffers take."""
    piece, sent, held = b"x" * 65_536, 0, asyncio.Event()

    async def pour(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        try:
            for _ in range(2_000):
                async with asyncio.timeout(0.5):
                    await socket.send_bytes(piece)
                sent += 1
        except TimeoutError:
            held.set()
        return socket

    async with room() as (served, _):
        served.upstream.scripts = [pour]
        async with connect(served) as socket:
            assert len(await socket.receive_bytes()) == len(piece)
            async with asyncio.timeout(10):
                await held.wait()
            assert 1 < sent < 1_000


# ---- what is work


async def test_an_open_socket_is_no_work_and_its_messages_are() -> None:
    async with room() as (served, _), connect(served) as socket:
        await hear(socket)
        assert served.admission.in_flight(ALPHA) == 0
        await socket.send_str("a")
        await hear(socket)
        assert served.admission.in_flight(ALPHA) == 1
    async with asyncio.timeout(10):
        await served.admission.drained(ALPHA)


async def test_what_a_server_tells_unasked_is_no_work() -> None:
    async with room() as (served, server), connect(served) as socket:
        await hear(socket)
        await server.sockets[0].send_str("news")
        assert await hear(socket) == "news"
        assert served.admission.in_flight(ALPHA) == 0


async def test_pings_are_no_work() -> None:
    async with room() as (served, _), connect(served, autoping=False) as socket:
        await hear(socket)
        await socket.ping(b"x")
        assert (await socket.receive()).type is WSMsgType.PONG
        assert served.admission.in_flight(ALPHA) == 0


async def test_when_the_gate_shuts_an_idle_socket_is_closed_with_a_reason_and_holds_nothing_up() -> None:
    async with room() as (served, server), connect(served) as socket:
        await hear(socket)
        assert served.admission.close(ALPHA, 2) == 0
        assert await closed(socket) == (1012, "the model leaves its card")
        async with asyncio.timeout(10):
            assert await server.ended.get() == 1012


async def test_a_socket_at_work_is_waited_for_and_closed_when_its_work_is_over() -> None:
    async with room(quiet_s=1) as (served, _), connect(served) as socket:
        await hear(socket)
        await socket.send_str("a")
        await hear(socket)
        assert served.admission.close(ALPHA, 2) == 1
        assert not socket.closed
        async with asyncio.timeout(10):
            await served.admission.drained(ALPHA)
        assert await closed(socket) == (1012, "the model leaves its card")


async def test_a_drain_that_may_wait_no_longer_ends_a_socket_at_work_with_its_reason() -> None:
    async with room() as (served, _), connect(served) as socket:
        await hear(socket)
        await socket.send_str("a")
        await hear(socket)
        served.admission.close(ALPHA, 2)
        cut = served.admission.cut(ALPHA, "the drain limit is over")
        assert (cut.ended, cut.requeued) == (1, 0)
        assert await closed(socket) == (1012, "the drain limit is over")
        async with asyncio.timeout(10):
            await served.admission.drained(ALPHA)


async def test_a_handshake_waits_for_the_card_like_any_call_and_one_that_is_cut_waits_again() -> None:
    async with room(opened=False) as (served, server):
        task = asyncio.create_task(opening(served))
        await served.waiting()
        entered = asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            entered.set()
            await asyncio.Event().wait()
            return web.Response()

        served.upstream.scripts = [slow]
        served.admission.open(ALPHA, 2)
        await entered.wait()
        served.admission.close(ALPHA, 3)
        assert served.admission.cut(ALPHA, "over").requeued == 1
        async with asyncio.timeout(10):
            await served.admission.drained(ALPHA)
        served.upstream.scripts = [server]
        served.admission.open(ALPHA, 4)
        socket = await task
        assert await hear(socket) == "hello"
        await socket.close()


async def test_who_leaves_during_a_handshake_leaves_nothing_behind() -> None:
    async with room(opened=False) as (served, _):
        task = asyncio.create_task(opening(served))
        await served.waiting()
        task.cancel()
        await served.waiting(0)
        assert served.admission.demand() == ()


async def test_an_open_page_brings_no_model_by_its_socket_and_is_told_so() -> None:
    near = {"Origin": "http://localhost:3000"}
    async with room(opened=False, pages=Origins()) as (served, _):
        assert await refused(served, headers=near) == (503, "5")
        assert served.admission.demand() == ()
        served.admission.open(ALPHA, 2)
        async with connect(served, headers=near) as socket:
            assert await hear(socket) == "hello"


async def test_a_page_from_elsewhere_opens_no_socket() -> None:
    """A browser asks nobody before it opens one."""
    async with room(pages=Origins()) as (served, server):
        assert (await refused(served, headers={"Origin": "https://evil.example"}))[0] == 403
        assert server.seen == []


async def test_while_a_message_waits_for_its_turn_the_client_is_held_back() -> None:
    async with serve(concurrency={ALPHA: 1}) as served:
        server = Room()
        served.upstream.scripts = [server]
        async with connect(served) as socket:
            await hear(socket)
            other = served.admission.admit(ALPHA, WorkClass.INTERACTIVE, "ann", 1000)
            await socket.send_str("a")
            await served.waiting()
            assert server.heard.empty()
            assert isinstance(other, Call)
            other.finish()
            assert await hear(socket) == "you said a"


async def test_when_serving_stops_sockets_are_closed_at_once() -> None:
    async with room() as (served, _), connect(served) as socket:
        await hear(socket)
        await served.ctx.sockets.stop()
        assert await closed(socket) == (WSCloseCode.GOING_AWAY, "swapper stops")


async def test_calls_go_on_beside_sockets() -> None:
    async with room() as (served, server), connect(served) as socket:
        await hear(socket)
        served.upstream.scripts = [plain("{}", 200)]
        assert (await served.call(CHAT)).status == 200
        assert server.ended.empty()


# ---- in virtual time


class Clock:
    def __call__(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)


@virtual
async def test_a_server_that_goes_on_telling_keeps_no_work_going() -> None:
    """As ComfyUI's extensions do that tell the load of the machine every second."""
    admission = Admission("g", clock=Clock())
    admission.renew(10_000_000)
    admission.open(ALPHA, 1)
    sockets = Sockets(admission)
    work = sockets.opened(ALPHA, WorkClass.INTERACTIVE, "ann", 1000)
    loop = asyncio.get_running_loop()
    await work.asked()
    began = loop.time()
    for _ in range(100):
        if admission.in_flight(ALPHA):
            await asyncio.sleep(1)
            await work.answered()
    assert loop.time() - began <= 61
    await work.asked()
    await asyncio.sleep(9)
    assert admission.in_flight(ALPHA) == 1
    await asyncio.sleep(2)
    assert admission.in_flight(ALPHA) == 0
    sockets.closed(work)
