"""`GET /api/events`: the event log as server-sent events, resumable.

Invariant: a client that comes back with Last-Event-ID loses nothing that is still retained; pages are read from the
store, and between them the stream sleeps on the process's one tail, so a slow reader holds up nobody.
"""

from __future__ import annotations

import asyncio
import json
import re

from aiohttp import web

from swapper.api.bodies import bad_value
from swapper.api.context import ApiContext
from swapper.api.views import card_json, conversation_json, lease_json, swap_json
from swapper.core.byhand import QUEUED
from swapper.errors import StoreDown
from swapper.store import codec
from swapper.store.protocol import StoredEvent

_PAGE = 500
OLDEST = "X-Swapper-Oldest"
_LIKE = "1764460800000-0"
_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


class EventRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`."""
        return [web.get("/api/events", self.events)]

    async def events(self, request: web.Request) -> web.StreamResponse:
        """From Last-Event-ID (or `?since=`, `0` = the oldest retained) on, else from now; `?follow=0` ends there.

        Where the log does not go back to that event any more, the header X-Swapper-Oldest names the first that it has.
        """
        since = request.headers.get("Last-Event-ID") or request.query.get("since")
        if since is not None and not _is_id(since):
            said = f"{since!r} is not the id of an event, like {_LIKE}; 0 is all that is kept"
            raise bad_value("Last-Event-ID", said)
        follow = request.query.get("follow", "1") != "0"
        response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        if request.method == "HEAD":
            return response  # the headers are all of it
        with self._ctx.tail.watch_all() as more:
            if since is None:
                since = await self._ctx.tail.end() if follow else "0"
            if (oldest := await self._oldest_after(since)) is not None:
                response.headers[OLDEST] = oldest
            await response.prepare(request)
            try:
                await self._stream(response, since, more, follow=follow)
            except (StoreDown, ConnectionResetError):
                return response  # the client resumes with the last id it saw
            await response.write_eof()
        return response

    async def _oldest_after(self, since: str) -> str | None:
        """The first event that is kept, where it is a later one than `since`; None for `0`, which asks for that one."""
        if _place(since) == (0, 0):
            return None
        try:
            first = await self._ctx.store.events(after="0", limit=1, block_ms=0)
        except StoreDown:
            return None  # who only reads on from the last event that was seen need not wait for the store
        return first[0].id if first and _place(first[0].id) > _place(since) else None

    async def _stream(self, response: web.StreamResponse, since: str, more: asyncio.Event, *, follow: bool) -> None:
        await response.write(b": swapper events\n\n")
        while True:
            more.clear()
            seen = self._ctx.tail.after(since) if follow else None
            page = seen if seen is not None else await self._ctx.store.events(after=since, limit=_PAGE, block_ms=0)
            if page:
                since = page[-1].id
                await response.write(b"".join(frame(event) for event in page))
            if seen is None and page:
                continue  # there may be more
            if not follow or self._ctx.tail.closed:
                return
            try:
                async with asyncio.timeout(self._ctx.keepalive_s):
                    await more.wait()
            except TimeoutError:
                await response.write(b": keepalive\n\n")


def _is_id(text: str) -> bool:
    """`MS` or `MS-N`, each of 64 bits: the store takes nothing larger."""
    return _ID.fullmatch(text) is not None and all(int(part) < 1 << 64 for part in text.split("-"))


def _place(event: str) -> tuple[int, int]:
    ms, _, n = event.partition("-")
    return int(ms), int(n or 0)


def frame(event: StoredEvent) -> bytes:
    """One event on the wire; `data` is one line of JSON, with the field names of the other routes."""
    return f"id: {event.id}\nevent: {event.type}\ndata: {_after_image(event)}\n\n".encode()


def _after_image(event: StoredEvent) -> str:
    match event.type:
        case "lease":
            lease = codec.lease_of(event)
            body = lease_json(lease, position=None, explain=lease.explain)
        case "swap":
            swap = codec.swap_of(event)
            body = {**swap_json(swap), "state": swap.outcome or swap.stage}
            if event.version == 0:  # asked for by hand, and not begun
                body |= {"state": QUEUED, "stage": None}
        case "card":
            card = codec.card_of(event)
            image = card_json(card, reading={}, capacity_mib=None, total_mib=None)
            body = {"id": card.name, "state": card.phase, **image}
        case "conversation":
            talk = codec.conversation_of(event)
            body = {"id": talk.snapshot, "state": codec.conversation_state(talk), **conversation_json(talk)}
        case _:
            return event.data.replace("\r", " ").replace("\n", " ")
    return json.dumps({**body, "version": event.version}, ensure_ascii=False)
