"""Where the models of a router listen themselves, so that a call that is given up is given up by the server too.

Seen on llama-server b10434: a router reads nothing from its client until the child's first byte, so a plain call whose
client left is generated to its end, and a prompt is read to its end. A child looks for its client once a second.

Invariant: an address is used only where the router has no models limit (such a router counts the calls that go through
it, and unloads a model that looks idle to it), only after the process behind it has said that it is that model, for one
epoch of the gate, and while that very process runs: whoever calls asks so before the call and again with the answer's
first bytes, so that they are its own. Any doubt, and a process that cannot be seen from here, means the router, which
is right but deaf. What stays: a child that somebody else unloads closes its port a moment before it ends, and another
model's child that got the same port in that moment would be taken for it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import aiohttp
import msgspec
from yarl import URL

from workers.llama.child import find_child

if TYPE_CHECKING:
    from swapper.gateway.context import Target

LOOK_S = 2.0
"""How long a look may take."""
AGAIN_S = 5.0
"""How long it is believed that there is nobody to be called."""
_HERE = frozenset({"127.0.0.1", "localhost", "::1"})
_RUNNING = frozenset({"loaded", "sleeping"})


class Process(Protocol):
    """A process of this machine, never mistaken for a later one of the same number."""

    def alive(self) -> bool:
        """False once it has ended."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A model's own server: its base URL and the process that holds that port as long as it lives."""

    url: str
    process: Process


class _Status(msgspec.Struct):
    value: str
    args: list[str] = []


class _Model(msgspec.Struct):
    id: str
    status: _Status
    aliases: list[str] = []

    def port(self) -> str | None:
        """The last `--port` of its command line, while it runs."""
        args = self.status.args
        ports = [value for name, value in itertools.pairwise(args) if name == "--port"]
        return ports[-1] if ports and self.status.value in _RUNNING else None


class _Models(msgspec.Struct):
    data: list[_Model]


class _RouterProps(msgspec.Struct):
    max_instances: int


class _Props(msgspec.Struct):
    model_alias: str


_models = msgspec.json.Decoder(_Models)
_router_props = msgspec.json.Decoder(_RouterProps)
_props = msgspec.json.Decoder(_Props)


class _Look:
    """One look for a tenant's child, shared by all who want to know; `found` and `until` once it is over."""

    __slots__ = ("epoch", "found", "task", "until")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.found: Child | None = None
        self.until: float | None = None
        self.task: asyncio.Task[None] | None = None


class Children:
    """What this gateway process found out, by tenant.

    `find` names the process of a model (its id) on a port; it may block. `clock` gives seconds.
    """

    __slots__ = ("_clock", "_find", "_looks", "_session")

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        find: Callable[[str, str], Process | None] = find_child,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._find = find
        self._clock = clock
        self._looks: dict[str, _Look] = {}

    async def locate(self, target: Target, epoch: int) -> Child | None:
        """The tenant's own process while its gate has this `epoch`; None: only the router will do.

        Children listen on the loopback address: those of a router on another host are never found.
        """
        if not target.router or URL(target.url).host not in _HERE:
            return None
        look = self._looks.get(target.tenant)
        if look is None or look.epoch != epoch or self._over(look):
            look = self._looks[target.tenant] = _Look(epoch)
            look.task = asyncio.create_task(self._look(target, look))
        if look.until is None and look.task is not None:
            await asyncio.shield(look.task)  # others wait for it too
        return look.found

    def forget(self, tenant: str, child: Child) -> None:
        """It did not answer as it should: look again before the next call, unless somebody did already."""
        look = self._looks.get(tenant)
        if look is not None and look.found is child:
            del self._looks[tenant]

    def _over(self, look: _Look) -> bool:
        if look.found is not None:
            return not look.found.process.alive()
        if look.until is None:
            return look.task is not None and look.task.done()  # it was cancelled, or failed over a bug
        return self._clock() >= look.until

    async def _look(self, target: Target, look: _Look) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                look.found = await self._ask(target)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            look.found = None
        look.until = self._clock() + AGAIN_S

    async def _ask(self, target: Target) -> Child | None:
        models = _models.decode(await self._read(target.url + "/models", target.auth())).data
        model = next((one for one in models if target.model in (one.id, *one.aliases)), None)
        port = None if model is None else model.port()
        if model is None or port is None:
            return None
        if _router_props.decode(await self._read(target.url + "/props", target.auth())).max_instances != 0:
            return None
        url = f"http://127.0.0.1:{port}"
        process = await asyncio.to_thread(self._find, model.id, port)
        if process is None:
            return None
        props = _props.decode(await self._read(url + "/props", {}))  # no key of the router's: children need none
        return Child(url, process) if props.model_alias == model.id and process.alive() else None

    async def _read(self, url: str, headers: dict[str, str]) -> bytes:
        if self._session.closed:
            raise aiohttp.ClientConnectionError("the gateway stops")
        headers = {**headers, "Connection": "close"}
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            answer.raise_for_status()
            return await answer.read()
