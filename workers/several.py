"""The part that Ollama and llama-swap share: one server that loads and unloads many models by name.

Invariant: a verb ends on what the server says it runs, not on the answer to what was asked of it; nothing is loaded but
by `load`. That the VRAM is back is for the card's probe to say.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from workers.backend import Loaded, Quiesced, TenantState
from workers.client import ServerClient
from workers.control import Control
from workers.kind import HUNG_STOP_MS, Kind, Limits
from workers.llama.hung import ROUTER_HUNG_S
from workers.lodgers import Lodgers

AGAIN_S = 1.0
"""After so long an unload that shows nothing is asked for again: a call may have taken it back meanwhile."""


class Several(Kind, ABC):
    """See the module text. `tenants` maps ids to the server's names of its models, `keys` to keys of their own."""

    def __init__(
        self,
        http: ServerClient,
        *,
        server: str,
        tenants: Mapping[str, str],
        control: Control,
        ours: bool = True,
        keys: Mapping[str, str] | None = None,
        same: Callable[[str], str] = str,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(http, control, name=server, ours=ours, limits=limits)
        self._lodgers = Lodgers(self._who, server, tenants, same)
        self._keys = {tenants[tenant]: key for tenant, key in (keys or {}).items()}

    # ---- what each of them does in its own way

    @abstractmethod
    async def _running(self) -> Mapping[str, TenantState]:
        """What it runs, by its own names."""

    async def _in_flight(self, name: str) -> int | None:
        """Calls of a model that run or wait at the server; None: it does not tell."""
        del name
        return None

    @abstractmethod
    async def _unload(self, name: str, limit_s: float) -> None:
        """Ask for the unload of a model that runs."""

    @abstractmethod
    async def _bring(self, name: str, *, runs: bool) -> None:
        """Have the model loaded; it has computed, unless it `runs` already. An unknown one is refused in words."""

    async def _ended(self, name: str) -> None:
        """The server says that it runs a model no more: wait for the end of its process, where that can be seen."""

    # ---- the verbs

    async def start(self) -> None:
        """Start or adopt the server where we control it. Raises BackendRefused where somebody else listens there."""
        if self._ours:
            await self._refuse_foreign()
            await self._control.ensure()

    async def observe(self) -> Mapping[str, TenantState]:
        """State of everybody by what the server says it runs; asking wakes and loads nothing."""
        self._silence.looked()
        try:
            running = await self._running()
        except BackendDown as down:
            if not isinstance(down, BackendGone):
                return self._lodgers.unseen(TenantState.UNREACHABLE)
            self._silence.heard()
            return self._lodgers.unseen(TenantState.STOPPED)
        except BackendError:
            self._silence.heard()
            return self._lodgers.unseen(TenantState.UNREACHABLE)
        self._silence.heard()
        await self._look_at_control()
        if self._is_foreign():
            return self._lodgers.unseen(TenantState.UNREACHABLE)
        return self._lodgers.seen(running)

    async def end_hung(self) -> str | None:
        """A server of ours that lives and answers nothing is started anew."""
        if not self._hangs():
            return None
        await self._http.fence()
        await self._control.restart(HUNG_STOP_MS)
        self._silence.heard()
        return f"{self._who} lived and did not answer for {ROUTER_HUNG_S:g} s: started anew"

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Wait until the server says nothing runs in the model, where it tells; `gone` where it is not loaded."""
        name = self._lodgers.known(tenant)
        if await self._state(name) is TenantState.UNLOADED:
            return Quiesced(gone=True)
        return await self._drained(tenant, limit_ms, lambda: self._in_flight(name))

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        """Unload; returns when the server runs it no more. What it is stuck on after `limit_ms` ends by a restart."""
        said = None
        name = self._lodgers.known(tenant)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_ms / 1000
        if not await self._gone_by(name, deadline):
            if not self._ours:
                text = f"{self._who} still has {name} loaded {limit_ms / 1000:g} s after its unload"
                raise BackendError(f"{text}: restart it there (swapper does not control it)")
            await self._http.fence()
            await self._control.restart()
            if not await self._gone_by(name, loop.time() + self._limits.start_s):
                raise BackendError(f"{self._who} was started anew and has {name} loaded again: somebody else calls it")
            said = (
                f"{name} was still loaded {limit_ms / 1000:g} s after its unload, so that its server was started anew"
            )
        else:
            await self._ended(name)
        self._pulse()
        return said

    async def _gone_by(self, name: str, deadline: float) -> bool:
        """Once the time is up, it is asked for with calls in it, too, and has a little more."""
        loop = asyncio.get_running_loop()
        asked, pressed = float("-inf"), False
        async for _ in self.looks():
            left = deadline - loop.time()
            try:
                if not (await self._state(name)).holds_vram:
                    return True
                if left <= 0 and not pressed:
                    pressed, asked, deadline = True, loop.time(), loop.time() + self._limits.settle_s
                    await self._unload(name, self._limits.settle_s)
                elif loop.time() - asked >= AGAIN_S and not await self._in_flight(name):
                    asked = loop.time()
                    await self._unload(name, max(left, self._limits.poll_s))
            except BackendError as error:
                if isinstance(error, BackendRefused) and (error.status or 500) < 500:
                    raise
                if not self._ours and loop.time() >= deadline:
                    raise BackendDown(f"{error}, and whether {name} is still loaded cannot be seen") from error
                if loop.time() >= deadline:
                    return False
            if loop.time() >= deadline and pressed:
                return False
        raise AssertionError("unreachable: the looks do not end")

    async def _state(self, name: str) -> TenantState:
        """UNLOADED also where no server runs."""
        try:
            return self._lodgers.state(name, await self._running())
        except BackendGone:
            return TenantState.UNLOADED

    async def load(self, tenant: str) -> Loaded:
        """Have it loaded; returns when it answered its smallest real call and the server says that it runs."""
        name = self._lodgers.configured(tenant)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._up()
        runs = await self._state(name) is TenantState.LOADED
        try:
            with self._loading():
                await self._bring(name, runs=runs)
            await self._there(name)
        except BackendError:
            if not runs:  # what is loaded and answers nothing must not be taken for one that does
                with suppress(BackendError):
                    await self._unload(name, self._limits.settle_s)
            raise
        finally:
            self._pulse()
        return Loaded(backend_ms=(loop.time() - began) * 1000)

    async def _there(self, name: str) -> None:
        async for waited in self.looks():
            running = await self._running()
            if self._lodgers.state(name, running) is TenantState.LOADED:
                return
            if waited >= self._limits.settle_s:
                text = f"{self._who} answered for {name} and does not say that it runs it"
                raise BackendError(f"{text}; it runs: {', '.join(running) or 'nothing'} (is {name} an alias there?)")

    async def _up(self) -> None:
        """A server that is ours gets its time to come up."""
        await self._refuse_foreign()
        if self._ours:
            await self._http.fence()
            await self._control.ensure()
        async for waited in self.looks():
            try:
                await self._running()
            except BackendGone as gone:
                if not self._ours:
                    raise BackendGone(f"{gone}: start it there (swapper does not control it)") from gone
                if waited >= self._limits.start_s:
                    raise
            else:
                return

    def _unknown(self, name: str, names: list[str], mend: str) -> BackendRefused:
        has = ", ".join(sorted(names)) or "none"
        return BackendRefused(f"{self._who} has no model {name!r}; it has: {has}; {mend}", 404)
