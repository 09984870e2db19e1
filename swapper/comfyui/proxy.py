"""Everything that passes the gate: requests and answers as they are, streamed, and the websocket both ways.

Invariant: a body is never changed and never gathered, but for those of prompts and of what takes them out of the queue.
Host and Origin go on as they came, since ComfyUI compares them to keep strange pages out.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from swapper.comfyui.answers import Refusal, away, bad_class, broke, stopped, too_much
from swapper.comfyui.gate import Gate
from swapper.core.types import WorkClass
from swapper.errors import BackendDown, BackendGone
from swapper.gateway.heads import HOP
from swapper.gateway.parse import parse_class
from swapper.gateway.sockets import HANDSHAKE, accept, join, protocols_of, wants_socket
from swapper.problem import Problem

PROMPTS = frozenset({"/prompt", "/api/prompt"})
QUEUES = frozenset({"/queue", "/api/queue"})
PROMPT_BYTES = 100 << 20
"""ComfyUI's own limit of a body, unless it was started with another."""
BODY_PAUSE_S = 60.0
"""So long no byte of an unfinished prompt may come."""
_AWAY = "ComfyUI is not running now: it is started by the next prompt that is sent here"
_SILENT = "ComfyUI does not answer: swapper status tells how it stands"


class Proxy:
    """The handler of a gate's port; `session` is the one of gateway.session.open_session."""

    def __init__(self, url: str, gate: Gate, session: aiohttp.ClientSession) -> None:
        self._url = URL(url)
        self._gate = gate
        self._session = session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any path, any method."""
        if request.method == "POST" and request.path in PROMPTS:
            return await self._prompt(request)
        if request.method == "POST" and request.path in QUEUES:
            return await self._queue(request)
        if wants_socket(request):
            return await self._websocket(request)
        return await self._pass(request, request.content if request.can_read_body else None)

    # ---- what waits for the lease

    async def _prompt(self, request: web.Request) -> web.StreamResponse:
        klass = parse_class(request.headers.get("X-Swapper-Class"), str(WorkClass.NORMAL), None)
        if isinstance(klass, Problem):
            return bad_class(klass.detail).response()
        if _from_elsewhere(request) and await self._refuses(request):
            return web.Response(status=403)
        raw = await self._body(request)
        if isinstance(raw, Refusal):
            return raw.response()

        async def post() -> tuple[int, bytes, web.Response]:
            return await self._post(request, raw)

        try:
            answer = await self._gate.prompt(raw, klass, post)
        except aiohttp.ClientError as error:
            return broke(str(error)).response()
        return answer.response() if isinstance(answer, Refusal) else answer

    async def _refuses(self, request: web.Request) -> bool:
        """Whether ComfyUI refuses pages from where this one is: asked before they move anybody off the card."""
        names = ("Host", "Origin", "Sec-Fetch-Site")
        headers = {name: value for name in names if (value := request.headers.get(name)) is not None}
        try:
            async with self._session.get(self._target(request), headers=headers) as answer:
                return answer.status == 403
        except (aiohttp.ClientError, OSError):
            return True

    async def _body(self, request: web.Request) -> bytes | Refusal:
        pieces: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(BODY_PAUSE_S):
                    piece = await request.content.readany()
            except TimeoutError:
                return stopped(BODY_PAUSE_S)
            if not piece:
                break
            size += len(piece)
            if size > PROMPT_BYTES:
                return too_much(f"This prompt has more than {PROMPT_BYTES >> 20} MiB.")
            if (full := self._gate.full(size)) is not None:
                return full
            pieces.append(piece)
        return b"".join(pieces)

    async def _post(self, request: web.Request, raw: bytes) -> tuple[int, bytes, web.Response]:
        """Raises BackendGone where nobody is there, BackendDown where it broke off."""
        try:
            data, headers = io.BytesIO(raw), _onward(request)
            async with self._session.post(self._target(request), data=data, headers=headers) as upstream:
                body = await upstream.read()
                headers = _back(upstream.headers)
                return upstream.status, body, web.Response(status=upstream.status, body=body, headers=headers)
        except aiohttp.ClientConnectorError as error:
            raise BackendGone(str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise BackendDown(str(error) or "it broke off") from None

    async def _queue(self, request: web.Request) -> web.StreamResponse:
        """What a client takes out of the queue must not come back out of our hands."""
        raw = await self._body(request)
        if isinstance(raw, Refusal):
            return raw.response()
        answer = await self._pass(request, io.BytesIO(raw))
        try:
            asked: object = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return answer
        told = cast("dict[str, object]", asked) if isinstance(asked, dict) else {}
        if told.get("clear"):
            await self._gate.forget(None)
        ids = told.get("delete")
        if isinstance(ids, list):
            await self._gate.forget([str(one) for one in cast("list[object]", ids)])
        return answer

    # ---- what passes

    async def _pass(self, request: web.Request, body: io.BytesIO | aiohttp.StreamReader | None) -> web.StreamResponse:
        call = self._session.request(
            request.method, self._target(request), data=body, headers=_onward(request), allow_redirects=False
        )
        response: web.StreamResponse | None = None
        try:
            async with call as upstream:
                headers = _back(upstream.headers)
                response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
                await response.prepare(request)
                async for piece in upstream.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError:
            return away(request, _AWAY)
        except (aiohttp.ClientError, OSError):
            if response is None:
                return away(request, _SILENT)
            if request.transport is not None:
                request.transport.abort()  # a clean end would make half an answer look whole
            return response

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        headers, protocols = _onward(request, without=HANDSHAKE), protocols_of(request)
        try:
            upstream = await self._session.ws_connect(
                self._target(request), headers=headers, protocols=protocols, max_msg_size=0, autoclose=False
            )
        except aiohttp.WSServerHandshakeError as error:
            return web.Response(status=error.status)
        except (aiohttp.ClientError, OSError):
            return away(request, _AWAY)
        async with upstream:
            client = await accept(request, upstream)
            await join(client, upstream)
            return client

    def _target(self, request: web.Request) -> URL:
        """The same path and query, to the byte, at ComfyUI."""
        path = request.raw_path
        return URL(f"{self._url.origin()}{self._url.raw_path.rstrip('/')}{path}", encoded=True)


def _from_elsewhere(request: web.Request) -> bool:
    """Whether a browser sends it for a page that is not the gate's own."""
    origin = request.headers.get("Origin")
    strange = origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower()
    return strange or request.headers.get("Sec-Fetch-Site") == "cross-site"


def _onward(request: web.Request, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    named = {one.strip().lower() for one in request.headers.get("Connection", "").split(",")}
    return _without(request.headers, HOP | named | without)


def _back(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return _without(headers, HOP)


def _without(headers: Mapping[str, str], names: frozenset[str] | set[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in names)
