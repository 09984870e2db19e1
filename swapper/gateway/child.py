"""Where the models of a router listen themselves, so that a call that is given up is given up by the server too.

Seen on llama-server b10434: a router reads nothing from its client until the child's first byte, so a plain call whose
client left is generated to its end, and a prompt is read to its end. A child looks for its client once a second.

Invariant: an address is used only after the process behind it has said that it is that model, and for one epoch of the
gate only, since a port may be another model's after a load. Any doubt means the router, which is right but deaf.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from yarl import URL

if TYPE_CHECKING:
    from swapper.gateway.context import Target

LOOK_S = 2.0
_HERE = frozenset({"127.0.0.1", "localhost", "::1"})
_RUNNING = frozenset({"loaded", "sleeping"})


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


class _Props(msgspec.Struct):
    model_alias: str


_models = msgspec.json.Decoder(_Models)
_props = msgspec.json.Decoder(_Props)


class Children:
    """What this gateway process found out, by tenant."""

    __slots__ = ("_found", "_session")

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._found: dict[str, tuple[int, str | None]] = {}

    async def locate(self, target: Target, epoch: int) -> str | None:
        """The base URL of the tenant's own process while its gate has this `epoch`; None: only the router will do.

        Children listen on the loopback address: those of a router on another host are never found.
        """
        if not target.router or URL(target.url).host not in _HERE:
            return None
        found = self._found.get(target.tenant)
        if found is None or found[0] != epoch:
            found = self._found[target.tenant] = (epoch, await self._find(target))
        return found[1]

    def forget(self, tenant: str) -> None:
        """It did not answer there: look again before the next call."""
        self._found.pop(tenant, None)

    async def _find(self, target: Target) -> str | None:
        try:
            async with asyncio.timeout(LOOK_S):
                models = _models.decode(await self._read(target.url + "/models", target.auth())).data
                model = next((one for one in models if target.model in (one.id, *one.aliases)), None)
                port = None if model is None else model.port()
                if model is None or port is None:
                    return None
                url = f"http://127.0.0.1:{port}"
                props = _props.decode(await self._read(url + "/props", {}))  # no key for whom we do not know yet
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None
        return url if props.model_alias == model.id else None

    async def _read(self, url: str, headers: dict[str, str]) -> bytes:
        headers = {**headers, "Connection": "close"}
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            answer.raise_for_status()
            return await answer.read()
