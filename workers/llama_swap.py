"""Backend of a llama-swap: it starts a process for a model's first call, and stops it when told to.

Invariant: nothing but `/running` says what runs. Source: llama-swap at 0bdb3720. Its unload cuts calls in flight with a
clean end, so it is asked for only once its own event stream shows none, or once the time for them is up.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from swapper.errors import BackendError, BackendRefused
from workers.backend import TenantState
from workers.client import NO_LIMIT_S, ServerClient, decoded
from workers.control import Control
from workers.kind import Limits
from workers.several import Several
from workers.smallest import smallest_call

_WHO = "llama-swap"
_EVENT_BYTES = 8 << 20
_STATES = {
    "starting": TenantState.LOADING,
    "ready": TenantState.LOADED,
    "stopping": TenantState.LOADED,  # its process lives
}


class _Running(msgspec.Struct):
    class Entry(msgspec.Struct):
        model: str
        state: str = ""

    running: list[Entry] | None = None


class _Models(msgspec.Struct):
    class Entry(msgspec.Struct):
        id: str

    data: list[Entry]


class _Props(msgspec.Struct):
    class Settings(msgspec.Struct):
        n_ctx: int = 0

    default_generation_settings: Settings


class _Event(msgspec.Struct):
    """`data` is JSON as a string."""

    type: str
    data: str


class _InFlight(msgspec.Struct):
    class Request(msgspec.Struct):
        model: str = ""

    operation: str
    requests: list[Request] = []


class LlamaSwap(Several):
    """Implements `workers.backend.Backend`."""

    def __init__(
        self,
        url: str,
        *,
        server: str,
        tenants: Mapping[str, str],
        control: Control,
        ours: bool = True,
        api_key: str | None = None,
        keys: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        http = ServerClient(url, _WHO, api_key, read_s=(limits or Limits()).read_s)
        super().__init__(http, server=server, tenants=tenants, control=control, ours=ours, keys=keys, limits=limits)

    async def _running(self) -> Mapping[str, TenantState]:
        running = decoded(await self._http.get("/running"), _Running, _WHO).running or ()
        return {one.model: _STATES.get(one.state, TenantState.UNLOADED) for one in running}

    async def _in_flight(self, name: str) -> int | None:
        """By the snapshot that its event stream begins with, behind its logs."""
        try:
            async with self._http.stream("/api/events") as stream:
                rest = b""
                while len(rest) < _EVENT_BYTES and (chunk := await stream.readany()):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if (count := _calls(line, name)) is not None:
                            return count
        except BackendRefused:
            pass  # an older one: nobody can know
        return None

    async def _unload(self, name: str, limit_s: float) -> None:
        path = f"/api/models/unload/{quote(name, safe='/:')}"
        await self._http.post(path, limit_s=limit_s, key=self._keys.get(name))

    async def _bring(self, name: str, *, runs: bool) -> None:
        key = self._keys.get(name)
        try:
            call = self._http.get(f"/upstream/{quote(name, safe='/:')}/health", limit_s=NO_LIMIT_S, key=key)
            await self._patience(blind_s=self._limits.load_s).over(call)
        except BackendRefused as refused:
            if refused.status == 404 and "model not found" in str(refused):
                raise self._unknown(
                    name, await listed(self._http), "correct the name under models, or add it there"
                ) from refused
            if refused.status != 404:  # 404 of the model's own server: it has no such route
                raise BackendRefused(f"{refused} (its log: {self._http.url}/logs)", refused.status) from refused
        if not runs:
            await self._answered(smallest_call(self._http, name, NO_LIMIT_S, key), blind_s=self._limits.answer_s)
        await self._ask_context(name, key)

    async def _ask_context(self, name: str, key: str | None) -> None:
        """Of the model's own server, llama-server's way; asked only of one that was just seen to run."""
        try:
            data = await self._http.get(f"/upstream/{quote(name, safe='/:')}/props", key=key)
            told = decoded(data, _Props, _WHO).default_generation_settings.n_ctx
        except BackendError:
            return
        for tenant, model in self._lodgers.called(name):
            self._tells(tenant, model, told)


async def listed(http: ServerClient) -> list[str]:
    """The models it lists."""
    return [one.id for one in decoded(await http.get("/v1/models"), _Models, _WHO).data]


def _calls(line: bytes, name: str) -> int | None:
    """Calls of a model by the snapshot of those in flight; None where the line is another event."""
    if not line.startswith(b"data:") or b'"inflight"' not in line:
        return None
    try:
        event = msgspec.json.decode(line.removeprefix(b"data:"), type=_Event)
        snapshot = msgspec.json.decode(event.data, type=_InFlight) if event.type == "inflight" else None
    except msgspec.DecodeError:
        return None
    if snapshot is None or snapshot.operation != "snapshot":
        return None
    return sum(one.model == name for one in snapshot.requests)
