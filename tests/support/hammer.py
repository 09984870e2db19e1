"""Clients that hammer the lease API of a serve that is being killed, and keep what they asked and were answered.

Invariant: a client does what a careful one would: it repeats what it has no answer to (a create with its key), and lets
go of what it holds. Whoever has nothing to do waits for `up`, which whoever does the killing sets.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from typing import cast

import aiohttp

from tests.support.history import Call, Event
from tests.support.server import Json

_PATIENCE_S = 1.5
_WAIT_S = 2
_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, by a clock that nobody steps."""
    return _EPOCH + time.monotonic()


class Book:
    """The history as it grows; `grew` is told of every call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.granted: set[str] = set()
        self.unknown = 0
        self.grew = asyncio.Condition()

    async def note(self, call: Call) -> None:
        """One more call."""
        self.calls.append(call)
        self.unknown += call.outcome == "unknown"
        if call.answer is not None and call.answer["state"] == "granted":
            self.granted.add(call.key)
        async with self.grew:
            self.grew.notify_all()

    async def until(self, *, grants: int = 0, unknown: int = 0) -> None:
        """Wait for so many more leases seen granted, or calls without an answer."""
        grants, unknown = grants and len(self.granted) + grants, unknown and self.unknown + unknown
        async with self.grew:
            await self.grew.wait_for(lambda: len(self.granted) >= grants and self.unknown >= unknown)


class Client:
    """One of those who want the card, with one lease at a time. `up` is set while somebody may answer.

    One that is `careless` forgets its next lease, which then expires.
    """

    def __init__(self, number: int, url: str, book: Book, up: asyncio.Event, seed: int) -> None:
        self._number = number
        self._url = url
        self._book = book
        self._up = up
        self._random = random.Random(f"{seed} {number}")
        self._leases = 0
        self.careless = False
        self.done = asyncio.Event()

    async def run(self, session: aiohttp.ClientSession) -> None:
        """One lease after the other until `done`."""
        while not self.done.is_set():
            self._leases += 1
            await self._live(session, f"c{self._number}-{self._leases}")

    async def _live(self, session: aiohttp.ClientSession, key: str) -> None:
        """A lease from its request to its end, as its client sees it."""
        abandons, self.careless = self.careless, False
        body = {"card": "gpu0", "label": key, "ttl_s": 5 if abandons else 15}
        wait = self._random.choice([0, _WAIT_S])
        lease = await self._ask(session, "create", key, "POST", f"/api/leases?wait={wait}", body)
        path = f"/api/leases/{lease['id']}"
        if lease["state"] == "queued" and self._random.random() < 0.1:
            lease = await self._ask(session, "cancel", key, "DELETE", path)
        while lease["state"] in ("queued", "preparing"):
            lease = await self._ask(session, "look", key, "GET", f"{path}?wait={_WAIT_S}")
        for _ in range(self._random.choice([0, 0, 1, 3])):
            if lease["state"] == "granted":
                beat = {"token": lease["token"]}
                lease = await self._ask(session, "heartbeat", key, "POST", f"{path}/heartbeat", beat)
        if lease["state"] == "granted" and not abandons:
            await self._ask(session, "release", key, "DELETE", f"{path}?token={lease['token']}")
            if self._random.random() < 0.1:
                await self._ask(session, "release", key, "DELETE", f"{path}?token={lease['token']}")

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        verb: str,
        key: str,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
    ) -> Json:
        """Ask until there is an answer; one that refuses (it has ended, it was granted meanwhile) is looked after."""
        while True:
            answer = await self._once(session, verb, key, method, path, body)
            if answer == "refused":
                return await self._ask(session, "look", key, "GET", path.partition("?")[0].removesuffix("/heartbeat"))
            if not isinstance(answer, str):
                return answer
            await self._up.wait()

    async def _once(
        self, session: aiohttp.ClientSession, verb: str, key: str, method: str, path: str, body: object
    ) -> Json | str:
        invoked = now()
        headers = {"Idempotency-Key": key} if verb == "create" else {}
        outcome, lease = "unknown", None
        try:
            async with session.request(method, self._url + path, json=body, headers=headers) as answer:
                text = await answer.text()
                if answer.status < 300:
                    outcome, lease = "ok", cast("Json", json.loads(text))
                elif answer.status < 500:
                    assert verb not in ("create", "look"), f"{verb} of {key}: {text}"
                    outcome = "refused"
        except (aiohttp.ClientError, TimeoutError):
            pass
        await self._book.note(Call(self._number, verb, key, invoked, now(), outcome, lease))
        return lease if lease is not None else outcome


def session() -> aiohttp.ClientSession:
    """A session whose calls are given up soon after a wait would have been over."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_WAIT_S + _PATIENCE_S))


async def events(of: aiohttp.ClientSession, url: str) -> list[Event]:
    """All that the log retains, as `/api/events` tells it."""
    found: list[Event] = []
    async with of.get(f"{url}/api/events?since=0&follow=0") as answer:
        for block in (await answer.text()).split("\n\n"):
            fields: dict[str, str] = {}
            for line in block.splitlines():
                name, _, text = line.partition(": ")
                fields[name] = text
            if "data" in fields:
                found.append(Event(fields["event"], cast("Json", json.loads(fields["data"]))))
    return found


async def stored(of: aiohttp.ClientSession, url: str) -> tuple[list[Json], list[Event]]:
    """Every lease there is; and with them cards and swaps, as events that tell of them would."""
    leases: list[Json] = []
    cursor = ""
    while True:
        page = await _get(of, f"{url}/api/leases?limit=1000{cursor}")
        leases += cast("list[Json]", page["items"])
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    cards = cast("list[Json]", (await _get(of, f"{url}/api/status"))["cards"])
    swaps = cast("list[Json]", (await _get(of, f"{url}/api/swaps?limit=1000"))["items"])
    read = {"capacity_mib", "vram", "holders", "foreign", "probe"}
    images = [
        *(Event("lease", lease) for lease in leases),
        *(Event("swap", swap) for swap in swaps),
        *(Event("card", {k: v for k, v in {**card, "id": card["name"]}.items() if k not in read}) for card in cards),
    ]
    return leases, images


async def _get(of: aiohttp.ClientSession, url: str) -> Json:
    async with of.get(url) as answer:
        assert answer.status == 200, await answer.text()
        return cast("Json", await answer.json())
