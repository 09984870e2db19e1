"""WebSockets passed both ways between a client and a server, message by message.

Invariant: the next message is read once the one before is out, so that who reads slowly holds back who sends; what ends
one side ends the other with the same code; pings are answered on each side, and are no messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import aiohttp
from aiohttp import WSCloseCode, web

HANDSHAKE = frozenset(
    {"sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"}
)
"""Headers of a handshake that each side makes for itself."""
CLOSE_S = 2.0
"""So long a client may take to answer a close."""
_REASON_BYTES = 123
"""As much as a close frame has room for."""
_NEVER_SENT = frozenset({None, 1005, 1006, 1015})
Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse
End = tuple[int, str]
"""A close code, and the reason in words."""


async def _at_once() -> None:
    """Nothing is waited for."""


def wants_socket(request: web.Request) -> bool:
    """Whether this is a handshake; another `Upgrade` is passed over, as HTTP allows."""
    named = {one.strip().lower() for one in request.headers.get("Connection", "").split(",")}
    return request.method == "GET" and "upgrade" in named and request.headers.get("Upgrade", "").lower() == "websocket"


def protocols_of(request: web.Request) -> list[str]:
    """The subprotocols that a client offers."""
    offered = ",".join(request.headers.getall("Sec-WebSocket-Protocol", ()))
    return [one.strip() for one in offered.split(",") if one.strip()]


async def accept(
    request: web.Request, upstream: aiohttp.ClientWebSocketResponse, *, most: int = 0
) -> web.WebSocketResponse:
    """The client's side, with the subprotocol that the server chose; `most`: bytes of one message, 0: any number."""
    chosen = [upstream.protocol] if upstream.protocol else []
    client = web.WebSocketResponse(
        timeout=CLOSE_S, max_msg_size=most, protocols=chosen, compress=False, autoclose=False
    )
    await client.prepare(request)
    return client


async def join(
    client: web.WebSocketResponse,
    upstream: aiohttp.ClientWebSocketResponse,
    *,
    asked: Callable[[], Awaitable[None]] = _at_once,
    answered: Callable[[], Awaitable[None]] = _at_once,
    ends: asyncio.Future[End] | None = None,
) -> None:
    """Until either side, or whoever holds `ends`, ends it; then both are closed, also when this is cancelled.

    `asked` is awaited before a client's message goes on, `answered` before a server's.
    """
    up = asyncio.create_task(_pump(client, upstream, asked))
    down = asyncio.create_task(_pump(upstream, client, answered))
    ways: set[asyncio.Future[None]] = {up, down}
    end: End = (WSCloseCode.GOING_AWAY, "")
    try:
        await asyncio.wait({*ways, *([] if ends is None else [ends])}, return_when=asyncio.FIRST_COMPLETED)
        if ends is not None and ends.done():
            end = ends.result()
        elif up.done() and not down.done():
            end = (_code(client.close_code), "")
        else:
            end = (_code(upstream.close_code), "")
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        code, reason = end
        said = reason.encode()[:_REASON_BYTES].decode(errors="ignore").encode()
        await asyncio.gather(client.close(code=code, message=said), upstream.close(code=code), return_exceptions=True)


async def _pump(source: Socket, sink: Socket, before: Callable[[], Awaitable[None]]) -> None:
    while True:
        message = await source.receive()
        match message.type:
            case aiohttp.WSMsgType.TEXT:
                await before()
                await sink.send_str(cast("str", message.data))
            case aiohttp.WSMsgType.BINARY:
                await before()
                await sink.send_bytes(cast("bytes", message.data))
            case _:
                return


def _code(said: int | None) -> int:
    """What ends the other side; what no frame may carry, or nobody said, is the one side gone."""
    return WSCloseCode.GOING_AWAY if said is None or said in _NEVER_SENT else said
