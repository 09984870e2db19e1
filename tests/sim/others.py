"""The shipped backends of other kinds on the servers of this world, and what stands there for sockets and processes.

Invariant: each is made as `swapper.backends` makes it; shorter limits are all that differs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn, cast
from unittest.mock import Mock

import aiohttp
import pytest

from tests.sim.box import Box, BoxControl
from tests.sim.process import HOME, Process, RouterWire
from tests.sim.servers import ComfyBox, ServerBox, runners
from tests.support.fake_router import FakeRouter
from tests.support.fake_session import FakeResponse, FakeSession
from tests.support.fake_wire import NobodyThere
from workers.backend import Backend
from workers.client import ServerClient
from workers.comfyui.http import ComfyHttp
from workers.comfyui.server import ComfyUI
from workers.comfyui.server import Limits as ComfyLimits
from workers.kind import Limits
from workers.ollama import Ollama
from workers.onoff import OnOff, Times
from workers.openai import OpenAiServer
from workers.vllm import Vllm

if TYPE_CHECKING:
    from tests.sim.world import World

TIMES = Times(ready_s=6, stopped_s=4)
LIMITS = Limits(load_s=6, answer_s=6, start_s=4, settle_s=4, read_s=2)
COMFY = ComfyLimits(idle_mib=200, cached_mib=100, load_s=6, settle_s=2, trust_s=1)
GRACE_MS = 1000


class Session(FakeSession):
    """As an `aiohttp.ClientSession`: nobody there is told as that tells it."""

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, object] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,  # noqa: ASYNC109  # aiohttp's own name
        **_: object,
    ) -> AsyncGenerator[FakeResponse]:
        """One request."""
        try:
            async with super().request(method, url, params=params, json=json, timeout=timeout) as response:
                yield response
        except NobodyThere as nobody:
            raise aiohttp.ClientConnectorError(Mock(), ConnectionRefusedError(str(nobody))) from nobody

    def ws_connect(self, *_: object, **__: object) -> NoReturn:
        """Its websocket says nothing here: it is asked."""
        raise aiohttp.ClientConnectionError("no websocket")


def session_of(process: Process, world: World) -> Session:
    """What the backends of a process talk to."""
    wires = {box.url: RouterWire(process, cast("FakeRouter", box)) for box in world.servers}
    return Session(cast("Mapping[str, FakeRouter]", wires))


def backend_of(process: Process, world: World, box: Box) -> Backend:
    """The one of its kind."""
    name, control = box.plan.name, BoxControl(process, box)
    if not isinstance(box, ServerBox):
        return OnOff(name, control, grace_ms=GRACE_MS, away=world.folder / f"{name}.away", times=TIMES)
    if box.plan.kind == "ollama":
        tenants = {f"{name}/{model}": model for model, _ in box.plan.models}
        return Ollama(box.url, server=name, tenants=tenants, control=control, limits=LIMITS)
    if box.plan.kind == "vllm":
        http = ServerClient(box.url, "vLLM", read_s=LIMITS.read_s)
        engine = Vllm(http, box.plan.level, world.folder / name)
        return OpenAiServer(http, tenant=name, models=[name], control=control, engine=engine, rests=True, limits=LIMITS)

    async def held_mib() -> int | None:
        await process.cross()
        return box.held_mib if world.plan.measured and isinstance(box, ComfyBox) else None

    marker = world.folder / f"{name}.loaded"
    return ComfyUI(
        box.url, tenant=name, control=control, marker=marker, grace_ms=GRACE_MS, held_mib=held_mib, limits=COMFY
    )


def doubled(patch: pytest.MonkeyPatch, world: World) -> None:
    """Their clients talk to the servers of this world, and find their processes among them."""

    def opened(_: object) -> Session:
        home = HOME.get()
        assert home is not None
        return world.talks[home.name]

    def nobody(_: str) -> None:
        """No process of this machine is at such an address."""

    patch.setattr(ServerClient, "_opened", opened)
    patch.setattr(ComfyHttp, "_session", opened)
    patch.setattr("workers.ollama.runners", runners(world.servers))
    patch.setattr("workers.kind.taken", nobody)
