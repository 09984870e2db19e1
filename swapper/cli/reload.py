"""A model's way into a new process and out of it, under a lease of the whole card: by its router, or as its own server.

Invariant: `load` starts from a model that is not there and ends with one that answers, with empty slots; `unload` ends
once it is gone. What was not started here is neither used nor ended. What starts and stops a plain server is swapper's
own control (of a process, over the record that serve keeps of it): whatever is left behind serve finds and takes over.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import psutil

from swapper.backends import backend_of
from swapper.config import Config
from swapper.config.schema import SnapshotsEntry, TenantEntry
from swapper.controls import control_of
from swapper.errors import BackendRefused, ConfigError, SwapperError
from swapper.gateway.context import Target
from swapper.statefolder import serving_pid
from workers.control import Control, Phase, Watched
from workers.control.process import WatchedProcess
from workers.llama.http import Model, RouterHttp

LOAD_S = 1800.0
UNLOAD_S = 60.0
_POLL_S = 0.05


class Reload(Protocol):
    """See the module text; whoever made one closes it."""

    async def load(self) -> None:
        """Raises SwapperError where it does not come up; what began to come then may still be there."""
        ...

    async def unload(self) -> None:
        """Safe to repeat, also after a load that failed or was cancelled. Raises SwapperError where it does not go."""
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...


class ByRouter:
    """A model of a router, which gives it a process for each load."""

    def __init__(self, target: Target) -> None:
        self._model = target.model
        self._http = RouterHttp(target.url, target.api_key)

    async def load(self) -> None:
        """See `Reload`."""
        await self._http.load(self._model)
        async with limited(LOAD_S, f"{self._model} was not loaded"):
            while (status := (await self._found()).status).value != "loaded":
                if status.failed:
                    raise SwapperError(f"llama-server could not load {self._model}; its log says why")
                await asyncio.sleep(_POLL_S)

    async def unload(self) -> None:
        """See `Reload`."""
        if (await self._found()).status.value == "unloaded":
            return
        with suppress(BackendRefused):  # gone meanwhile
            await self._http.unload(self._model)
        async with limited(UNLOAD_S, f"{self._model} was not unloaded"):
            while True:
                if (await self._found()).status.value == "unloaded":
                    return
                await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """See `Reload`."""
        await self._http.close()

    async def _found(self) -> Model:
        models = await self._http.models()
        if self._model not in models:
            raise SwapperError(f"the router at {self._http.url} has no model {self._model!r}")
        return models[self._model]


class ByControl:
    """A plain llama-server, started and ended by its control as serve does it; a process with serve's own environment.

    Raises ConfigError where that cannot be done from here.
    """

    def __init__(self, name: str, entry: TenantEntry, config: Config) -> None:
        self._name = name
        control = _control(name, entry, config)
        self._control = control if isinstance(control, Watched) else WatchedProcess(control)
        keeps_nothing = entry.model_copy(update={"snapshots": SnapshotsEntry(strategy="off")})
        self._server = backend_of(name, keeps_nothing, config, control)
        self._ordered = False
        self._ours = ""

    async def load(self) -> None:
        """See `Reload`."""
        self._ordered = True
        await self._server.load(self._name)
        self._ordered, self._ours = False, (await self._control.look()).run

    async def unload(self) -> None:
        """See `Reload`. What a load that was cut off left, whichever it is, was ordered here."""
        seen = await self._control.look()
        if seen.phase is Phase.UNREACHABLE:
            raise SwapperError(f"whether the server of {self._name} runs is not known: {seen.why}")
        if seen.run not in ("", self._ours) and not self._ordered:
            who = f" (process {seen.pids[0]})" if seen.pids else ""
            said = f"the server of {self._name}{who} runs though its card is lent to this test"
            raise SwapperError(f"{said}, which did not start it: let it leave the card, and test again")
        await self._server.release(self._name, limit_ms=round(UNLOAD_S * 1000))
        self._ordered = False

    async def close(self) -> None:
        """See `Reload`."""
        await self._server.close()
        await self._control.close()


def _control(name: str, entry: TenantEntry, config: Config) -> Control:
    if entry.control == "attach":
        said = "control attach cannot be tested: the test starts and ends the server, and swapper does not control it"
        raise ConfigError([f"tenants.{name}: {said}"])
    if entry.control != "command":
        return control_of(name, entry, config)
    pid = serving_pid(config.state_dir)
    if pid is None:
        here = f"no swapper serve runs on this machine with state_dir {config.state_dir}"
        raise ConfigError([f"tenants.{name}: {here}: test a {entry.kind} where the serve runs that starts it"])
    try:
        serve = psutil.Process(pid)
        if serve.uids().real != os.getuid():
            whose = f"swapper serve (process {pid}) runs as the user {serve.username()}"
            raise ConfigError([f"tenants.{name}: {whose}, and so must the test, which starts and ends its server"])
        env = serve.environ()
    except psutil.Error as error:
        raise ConfigError(
            [f"tenants.{name}: swapper serve cannot be looked at ({error}): is it being stopped?"]
        ) from error
    return control_of(name, entry, config, env)


@asynccontextmanager
async def limited(limit_s: float, what: str) -> AsyncGenerator[None]:
    """Raises SwapperError where the block takes longer: `what`, with the limit."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise SwapperError(f"{what} within {limit_s:g} s") from None
