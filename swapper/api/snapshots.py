"""The snapshot routes: which conversations are saved, what is known of each, and deleting them.

Invariant: the manifests in the slot folders are the truth, read anew for each answer; what a running swap or a card
that waits for its residents still needs is deleted only by force. The work on disk is the shelves' own.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web

from swapper.api import bodies
from swapper.api.bodies import PurgeBody, bad_value
from swapper.api.context import ApiContext
from swapper.api.problem import Problem
from swapper.api.views import Json, snapshot_json
from swapper.core.types import World
from swapper.errors import BackendError
from swapper.snapshots.conversation import Place
from swapper.snapshots.copies import newer
from swapper.snapshots.manifest import Manifest
from swapper.snapshots.shelf import Shelf

_CURSOR = re.compile(r"[0-9]{1,16}:[0-9]{1,16}:[^/:]{1,255}")
_Key = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class _Found:
    """A snapshot and whose shelf it lies on."""

    manifest: Manifest
    shelf: Shelf

    @property
    def key(self) -> _Key:
        """Its place: the last used first."""
        return self.manifest.last_ms, self.manifest.saved_ms, self.manifest.snapshot


class SnapshotRoutes:
    """Handlers over one context."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def table(self) -> list[web.RouteDef]:
        """Route definitions, for `app.add_routes`."""
        return [
            web.get("/api/snapshots", self.index),
            web.delete("/api/snapshots", self.purge),
            web.post("/api/snapshots/prune", self.prune),
            web.get("/api/snapshots/{id}", self.show),
            web.delete("/api/snapshots/{id}", self.remove),
        ]

    async def index(self, request: web.Request) -> web.Response:
        """`GET /api/snapshots?model=&newest=&limit=&cursor=`: a page, the last used first.

        With `newest=1` only the newest one of each conversation.
        """
        query = request.query
        limit = bodies.whole_number(query, "limit", low=1, high=1000) or 100
        after = _after(query.get("cursor"))
        wanted = await self._wanted(query.get("model"))
        older = newer(one.manifest for one in wanted)
        if _is_set(request, "newest"):
            wanted = [one for one in wanted if one.manifest.snapshot not in older]
        found = [one for one in wanted if after is None or one.key < after]
        page, rest = found[:limit], found[limit:]
        cursor = ":".join(map(str, page[-1].key)) if rest else None
        return web.json_response({"items": await self._views(page, older), "next_cursor": cursor})

    async def show(self, request: web.Request) -> web.Response:
        """`GET /api/snapshots/{id}`."""
        there = await self._all()
        one = _named(there, request.match_info["id"])
        (view,) = await self._views([one], newer(other.manifest for other in there))
        return web.json_response(view)

    async def remove(self, request: web.Request) -> web.Response:
        """`DELETE /api/snapshots/{id}[?force=1]`: 200 with what it was; 409 while it is needed."""
        there = await self._all()
        found = _named(there, request.match_info["id"])
        (view,) = await self._views([found], newer(other.manifest for other in there))
        why = (await self._needed()).get(found.manifest.snapshot)
        if why is not None and not _is_set(request, "force"):
            raise Problem(409, "snapshot-in-use", f"{found.manifest.snapshot} is in use: {why}. ?force=1 deletes it.")
        await self._delete([found])
        return web.json_response(view)

    async def purge(self, request: web.Request) -> web.Response:
        """`DELETE /api/snapshots?model=[&force=1]`: all of a model, or with the body `{"all": true}` all there are.

        `kept` names those that are needed still. The last requests of the conversations, in memory or on disk, go as
        well. Without either nothing is deleted: 422.
        """
        model = request.query.get("model")
        if model is None and not (request.body_exists and (await bodies.read_body(request, PurgeBody)).all):
            said = 'say which: ?model=NAME deletes what is saved of one model, the body {"all": true} everything'
            raise bad_value("all", said)
        found = await self._wanted(model)
        needed = dict[str, str]() if _is_set(request, "force") else await self._needed()
        gone = [one for one in found if one.manifest.snapshot not in needed]
        await self._delete(gone)
        for tenant in set(self._ctx.names.values()) if model is None else {self._ctx.names.get(model, model)}:
            self._ctx.drop_requests(tenant)
        kept = [one.manifest.snapshot for one in found if one.manifest.snapshot in needed]
        body: Json = {
            "items": [_line(one.manifest, "deleted") for one in gone],
            "kept": [{"id": name, "why": needed[name]} for name in kept],
            "bytes": sum(one.manifest.bytes for one in gone),
        }
        return web.json_response(body)

    async def prune(self, _request: web.Request) -> web.Response:
        """`POST /api/snapshots/prune`: apply age and budget now, and say what went and why."""
        try:
            gone = [one for shelf in self._ctx.shelves.values() for one in await shelf.prune()]
        except BackendError as error:
            raise _unusable(error) from error
        for one in gone:
            self._forget(one.manifest, f"its snapshot is gone: {one.why}")
        items = [_line(one.manifest, one.why) for one in gone]
        return web.json_response({"items": items, "bytes": sum(one.manifest.bytes for one in gone)})

    async def _all(self) -> list[_Found]:
        """Every snapshot once, the last used first; where two servers share a folder, on the shelf of its own."""
        shelves = self._ctx.shelves
        try:
            read = await asyncio.gather(*(shelf.manifests() for shelf in shelves.values()))
        except BackendError as error:
            raise _unusable(error) from error
        found: list[_Found] = []
        for (server, shelf), manifests in zip(shelves.items(), read, strict=True):
            mine = [other for other, theirs in shelves.items() if theirs.folder == shelf.folder]
            for manifest in manifests:
                owner = manifest.tenant.partition("/")[0]
                if server == (owner if owner in mine else mine[0]):
                    found.append(_Found(manifest, shelf))
        return sorted(found, key=lambda one: one.key, reverse=True)

    async def _wanted(self, model: str | None) -> list[_Found]:
        """Those of a model, by any of its names, also of one that is configured no more. Raises Problem 404."""
        found = await self._all()
        if model is None:
            return found
        tenant = self._ctx.names.get(model, model)
        mine = [one for one in found if one.manifest.tenant == tenant]
        if not mine and tenant not in self._ctx.spec.tenants:
            known = sorted({*self._ctx.names, *(one.manifest.tenant for one in found)})
            near = difflib.get_close_matches(model[:100], known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise Problem(404, "no-such-model", f"There is no model {model!r}, and nothing is saved of it.{hint}")
        return mine

    async def _views(self, found: Iterable[_Found], older: Mapping[str, str]) -> list[Json]:
        """Each as JSON, judged by its shelf, in the same order. `older`: those of which there is a newer one."""
        found = list(found)
        by_shelf: dict[int, tuple[Shelf, list[Manifest]]] = {}
        for one in found:
            by_shelf.setdefault(id(one.shelf), (one.shelf, []))[1].append(one.manifest)
        try:
            judged = await asyncio.gather(*(shelf.judged(manifests) for shelf, manifests in by_shelf.values()))
        except BackendError as error:
            raise _unusable(error) from error
        views = {one.manifest.snapshot: one for some in judged for one in some}
        names = [one.manifest.snapshot for one in found]
        return [snapshot_json(views[name], newer=older.get(name)) for name in names]

    async def _delete(self, found: Iterable[_Found]) -> None:
        try:
            for one in found:
                await one.shelf.remove([one.manifest.snapshot])
                self._forget(one.manifest, "its snapshot was deleted")
        except BackendError as error:
            raise _unusable(error) from error

    def _forget(self, manifest: Manifest, why: str) -> None:
        """No call is to wait for what is not there any more."""
        for talk in self._ctx.index.conversations(manifest.tenant):
            if talk.place is Place.DISK and talk.snapshot == manifest.snapshot:
                self._ctx.index.lost(manifest.tenant, talk.id, why)

    async def _needed(self) -> Mapping[str, str]:
        return needed(await self._ctx.store.read())


def needed(world: World) -> Mapping[str, str]:
    """Snapshot -> why it must not go: a swap is at it, or its model's residents are still to come back."""
    found: dict[str, str] = {}
    for card in world.cards.values():
        for talk in card.saved:
            found[talk.snapshot] = f"it comes back with {talk.tenant}, which has left {card.name} for a while"
        if card.swap is not None:
            for talk in card.swap.conversations:
                found[talk.snapshot] = f"the swap {card.swap.id} on {card.name} is at it"
    return found


def _line(manifest: Manifest, why: str) -> Json:
    return {"id": manifest.snapshot, "model": manifest.tenant, "bytes": manifest.bytes, "why": why}


def _named(found: Iterable[_Found], name: str) -> _Found:
    """Raises Problem 404."""
    one = next((one for one in found if one.manifest.snapshot == name), None)
    if one is None:
        raise Problem(404, "no-such-snapshot", f"There is no snapshot {name!r}.")
    return one


def _is_set(request: web.Request, name: str) -> bool:
    return request.query.get(name, "0") not in ("0", "")


def _after(cursor: str | None) -> _Key | None:
    if cursor is None:
        return None
    if _CURSOR.fullmatch(cursor) is None:
        raise bad_value("cursor", f"{cursor!r} is not a next_cursor that was given")
    used, saved, name = cursor.split(":")
    return int(used), int(saved), name


def _unusable(error: BackendError) -> Problem:
    return Problem(503, "slot-folder", f"{error}.", retry_after_s=5)
