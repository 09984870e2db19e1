"""An async client of swapper's HTTP API, used by the command line and by other programs.

Invariant: every method answers with the API's JSON as it is, or raises ApiDown (try again) or ApiRefused (do not).
It keeps no state but its connections. Times in arguments are seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import aiohttp

from swapper.client.sse import messages
from swapper.errors import ApiDown, ApiRefused

Json = dict[str, Any]
SETTLED = frozenset({"granted", "released", "expired", "revoked", "cancelled", "failed"})
_ANSWER_S = 30.0
_CONNECT_S = 5.0
_LONG_POLL_S = 30.0
_SILENCE_S = 45.0
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event log; `data` is the after-image."""

    id: str
    type: str
    data: Json


class SwapperClient:
    """Use as `async with SwapperClient(url, key) as client`."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request_lease(
        self, body: Mapping[str, object], *, wait_s: float | None = None, idempotency_key: str | None = None
    ) -> Json:
        """`POST /api/leases`; with `wait_s` it answers once granted or ended, or after that time."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return await self._call("POST", "/api/leases", body=body, wait_s=wait_s, headers=headers)

    async def lease(self, lease_id: str, *, wait_s: float | None = None) -> Json:
        """One lease; `wait_s` as for `request_lease`."""
        return await self._call("GET", f"/api/leases/{lease_id}", wait_s=wait_s)

    async def leases(self, **query: str | int | None) -> Json:
        """A page of leases: `state`, `card`, `owner`, `limit`, `cursor`."""
        return await self._call("GET", "/api/leases", query=query)

    async def wait(self, lease_id: str, *, limit_s: float | None = None) -> Json:
        """The lease once granted or ended, or as it is after `limit_s`; None waits for ever, also for the server."""
        loop = asyncio.get_running_loop()
        deadline = None if limit_s is None else loop.time() + limit_s
        failures = 0
        while True:
            left = _LONG_POLL_S if deadline is None else max(0.0, min(_LONG_POLL_S, deadline - loop.time()))
            try:
                lease = await self.lease(lease_id, wait_s=left)
                failures = 0
            except ApiDown:
                if deadline is not None and loop.time() >= deadline:
                    raise
                await asyncio.sleep(_retry_s(failures))
                failures += 1
                continue
            if lease["state"] in SETTLED or (deadline is not None and loop.time() >= deadline):
                return lease

    async def heartbeat(self, lease_id: str, token: int, *, progress: float | None = None) -> Json:
        """Keep a granted lease; raises ApiRefused 409 (wrong token) or 410 (ended)."""
        body = {"token": token, "progress": progress}
        return await self._call("POST", f"/api/leases/{lease_id}/heartbeat", body=body)

    async def release(self, lease_id: str, *, token: int | None = None) -> Json:
        """Release a granted lease (its token is needed), or cancel a waiting one; repeating it is harmless."""
        return await self._call("DELETE", f"/api/leases/{lease_id}", query={"token": token})

    async def status(self) -> Json:
        """What is on which card."""
        return await self._call("GET", "/api/status")

    async def swaps(self, *, limit: int = 20, card: str | None = None) -> list[Json]:
        """The newest swaps first."""
        page = await self._call("GET", "/api/swaps", query={"limit": limit, "card": card})
        return cast("list[Json]", page["items"])

    async def swap(self, swap_id: str, *, wait_s: float | None = None) -> Json:
        """One swap with its steps and conversations; with `wait_s` once it has ended, or after that time."""
        return await self._call("GET", f"/api/swaps/{quote(swap_id, safe='')}", wait_s=wait_s)

    async def load(self, model: str, *, wait_s: float | None = None) -> Json:
        """Load a model by hand: the swap it becomes (`swap_id`); with `wait_s` once it has ended, or after that time.

        A `model` is any of its names; `outcome` is None while it has not ended, `explain` says why.
        """
        return await self._call("POST", f"/api/models/{quote(model)}/load", wait_s=wait_s)

    async def unload(self, model: str, *, drain_s: float | None = None, wait_s: float | None = None) -> Json:
        """Unload it, calls in flight having `drain_s` at most; otherwise as `load`. Needs an admin key."""
        query = {"drain": None if drain_s is None else f"{drain_s:.3f}"}
        return await self._call("POST", f"/api/models/{quote(model)}/unload", query=query, wait_s=wait_s)

    async def vacate(self, card: str, *, force: bool = False, wait_s: float | None = None) -> Json:
        """Unload all that is on a card; otherwise as `load`. Needs an admin key."""
        query = {"force": 1 if force else None}
        return await self._call("POST", f"/api/cards/{quote(card, safe='')}/vacate", query=query, wait_s=wait_s)

    async def pin(self, tenant: str, *, wait_s: float | None = None) -> Json:
        """Keep a tenant on its card; otherwise as `load`. Needs an admin key."""
        return await self._call("POST", f"/api/tenants/{quote(tenant)}/pin", wait_s=wait_s)

    async def unpin(self, tenant: str, *, wait_s: float | None = None) -> Json:
        """Let it go again; otherwise as `load`. Needs an admin key."""
        return await self._call("POST", f"/api/tenants/{quote(tenant)}/unpin", wait_s=wait_s)

    async def snapshots(self, **query: str | int | None) -> Json:
        """A page of snapshots, the last used first: `model`, `newest` (1: one a conversation), `limit`, `cursor`."""
        return await self._call("GET", "/api/snapshots", query=query)

    async def snapshot(self, name: str) -> Json:
        """One saved conversation."""
        return await self._call("GET", f"/api/snapshots/{quote(name, safe='')}")

    async def prune_snapshots(self) -> Json:
        """Apply age and budget now: `items` with the reason of each, and their `bytes`. Needs an admin key."""
        return await self._call("POST", "/api/snapshots/prune")

    async def purge_snapshots(self, model: str | None = None, *, force: bool = False) -> Json:
        """Delete all (of a model); `kept` are those still needed, unless `force`. Needs an admin key."""
        which = {"all": True} if model is None else None
        query = {"model": model, "force": 1 if force else None}
        return await self._call("DELETE", "/api/snapshots", query=query, body=which)

    async def submit_job(self, body: Mapping[str, object]) -> Json:
        """`POST /api/jobs`: `recipe`, `params`, `class`."""
        return await self._call("POST", "/api/jobs", body=body)

    async def jobs(self, **query: str | int | None) -> Json:
        """The newest jobs first: `state`, `recipe`, `owner`, `limit`."""
        return await self._call("GET", "/api/jobs", query=query)

    async def job(self, job_id: str, *, wait_s: float | None = None) -> Json:
        """One job; with `wait_s` once it is over, or after that time."""
        return await self._call("GET", f"/api/jobs/{quote(job_id, safe='')}", wait_s=wait_s)

    async def cancel_job(self, job_id: str, *, wait_s: float | None = None) -> Json:
        """Ask it to end; `wait_s` as for `job`."""
        return await self._call("DELETE", f"/api/jobs/{quote(job_id, safe='')}", wait_s=wait_s)

    async def job_log(self, job_id: str, *, follow: bool = False) -> AsyncIterator[bytes]:
        """What it says, piece by piece; followed until it is over."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        url = f"{self.url}/api/jobs/{quote(job_id, safe='')}/log"
        try:
            async with self._open().get(url, params={"follow": "1"} if follow else {}, timeout=timeout) as response:
                if response.status >= 400:
                    raise _failure(response.status, await response.read())
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._down(error) from error

    async def events(
        self, *, since: str | None = None, follow: bool = True, gap: Callable[[str, str], None] | None = None
    ) -> AsyncIterator[Event]:
        """Events after `since` (`0`: all that is retained; None: only new ones). Following, it reconnects itself.

        `gap` is called with the id asked for and that of the first one retained, where the former is older.
        """
        failures = 0
        while True:
            try:
                async for event in self._stream(since, follow=follow, gap=gap):
                    since, failures = event.id, 0
                    yield event
            except ApiDown:
                if not follow or since is None:
                    raise
            if not follow:
                return
            await asyncio.sleep(_retry_s(failures))
            failures += 1

    async def _stream(
        self, since: str | None, *, follow: bool, gap: Callable[[str, str], None] | None
    ) -> AsyncIterator[Event]:
        headers = {"Accept": "text/event-stream"}
        if since is not None:
            headers["Last-Event-ID"] = since
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        query = {} if follow else {"follow": "0"}
        try:
            async with self._open().get(
                self.url + "/api/events", headers=headers, params=query, timeout=timeout
            ) as response:
                if response.status >= 400:
                    raise _failure(response.status, await response.read())
                oldest = response.headers.get("X-Swapper-Oldest")
                if gap is not None and since is not None and oldest is not None:
                    gap(since, oldest)
                async for message in messages(response.content):
                    yield Event(message.id, message.event, json.loads(message.data))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._down(error) from error

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, str | int | None] | None = None,
        wait_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        params = {name: str(value) for name, value in (query or {}).items() if value is not None}
        if wait_s is not None:
            params["wait"] = f"{wait_s:.3f}"
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S + (wait_s or 0.0), sock_connect=_CONNECT_S)
        try:
            async with self._open().request(
                method, self.url + path, json=body, params=params, headers=headers, timeout=timeout
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._down(error) from error
        if response.status >= 400:
            raise _failure(response.status, raw)
        return _parse(raw)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        return self._session

    def _down(self, error: Exception) -> ApiDown:
        why = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientConnectorError):
            why = error.os_error.strerror or why
        return ApiDown(f"swapper does not answer at {self.url} ({why}); is `swapper serve` running there?")


def _parse(raw: bytes) -> Json:
    try:
        found: object = json.loads(raw)
    except ValueError:
        found = None
    return cast("Json", found) if isinstance(found, dict) else {}


def _failure(status: int, raw: bytes) -> ApiDown | ApiRefused:
    problem = _parse(raw)
    text = str(problem.get("detail") or f"swapper answered {status}")
    if status >= 500:
        return ApiDown(text)
    return ApiRefused(text, status, problem)


def _retry_s(failures: int) -> float:
    return _RETRY_S[min(failures, len(_RETRY_S) - 1)]
