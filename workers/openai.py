"""Backend of a server that is its own tenant: any one with OpenAI's routes, and what vLLM and SGLang add to that.

Invariant: a process of ours is started by `load` only, and a release ends when nobody answers at its address, or when
the server says that it rests, whatever it answered before. It is put to rest only with no call in flight by its own
count: vLLM and SGLang may crash over one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from workers.backend import Loaded, Quiesced, TenantState
from workers.client import NO_LIMIT_S, ServerClient, decoded
from workers.control import Control
from workers.kind import HUNG_STOP_MS, Kind, Limits
from workers.llama.hung import ROUTER_HUNG_S
from workers.llama.why import reasons
from workers.smallest import smallest_call

_LOG_LINES = 400
_LISTS_NOTHING = frozenset({404, 405, 501})
_LOADING = 503


class _Models(msgspec.Struct):
    class Entry(msgspec.Struct):
        """vLLM and SGLang say `max_model_len`, others one of the other two, if any."""

        id: str
        max_model_len: object = None
        context_length: object = None
        context_window: object = None

    data: list[Entry]


class Engine(Protocol):
    """What a server can tell and do beyond OpenAI's routes. Raises BackendError."""

    async def in_flight(self) -> int | None:
        """Calls that run or wait at the server; None: it does not tell."""
        ...

    async def resting(self) -> bool:
        """Whether it has given its VRAM back and keeps running. Asking wakes nothing."""
        ...

    def torn(self) -> bool:
        """Whether it may have some of its VRAM though it says that it rests: a wake-up was cut off."""
        ...

    def ended(self) -> None:
        """Nobody listens at its address any more: what was true of its process is so no longer."""
        ...

    async def rest(self, limit_s: float) -> None:
        """Give the VRAM back; returns once the server says so. Only with no call in flight."""
        ...

    async def wake(self, limit_s: float) -> None:
        """Take it again, weights included; returns once the server says so."""
        ...


class OpenAiServer(Kind):
    """Implements `workers.backend.Backend` for one server and its only tenant.

    `models` are the names it serves, the first for the smallest call; `ours`: `control` starts and stops it. `rests`:
    a release puts it to rest by its `engine` and leaves it running. `no_room` says why what it keeps in the machine's
    memory then cannot be had; None where it can.
    """

    def __init__(
        self,
        http: ServerClient,
        *,
        tenant: str,
        models: Sequence[str],
        control: Control,
        ours: bool = True,
        engine: Engine | None = None,
        rests: bool = False,
        no_room: Callable[[], str | None] = lambda: None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(http, control, name=tenant, ours=ours, limits=limits)
        self._tenant = tenant
        self._models = tuple(models)
        self._engine = engine
        self._rests = rests and engine is not None
        self._no_room = no_room
        self._waking = False
        self._stopped = False

    async def start(self) -> None:
        """Nothing: a server that runs is adopted, and one that does not is started by a load only."""

    # ---- looking

    async def observe(self) -> Mapping[str, TenantState]:
        """Its state by GET /v1/models and, where it can rest, by what it says of that; both wake nothing."""
        return {self._tenant: await self._state()}

    async def _state(self) -> TenantState:
        self._silence.looked()
        await self._look_at_control()
        try:
            await self._listed()
        except BackendGone:
            self._silence.heard()
            if self._engine is not None:
                self._engine.ended()
            return self._ended()
        except BackendError as error:
            if isinstance(error, BackendRefused):
                self._silence.heard()
            if self._is_foreign():  # what stands before it answers for it
                return self._ended()
            loading = isinstance(error, BackendRefused) and error.status == _LOADING
            return TenantState.LOADING if loading else TenantState.UNREACHABLE
        self._silence.heard()
        if self._is_foreign():
            return TenantState.UNREACHABLE
        return await self._up()

    async def _up(self) -> TenantState:
        """It answers: whether it has its VRAM. Of one that woke in part nobody knows how much."""
        if self._waking:
            return TenantState.LOADING
        try:
            resting = self._rests and self._engine is not None and await self._engine.resting()
        except BackendError:
            return TenantState.UNREACHABLE
        if resting and self._engine is not None and self._engine.torn():
            return TenantState.UNREACHABLE
        return TenantState.UNLOADED if resting else TenantState.LOADED

    async def _listed(self) -> list[str] | None:
        """The names it serves; None where it lists none."""
        try:
            data = await self._http.get("/v1/models")
        except BackendRefused as refused:
            if refused.status in _LISTS_NOTHING:
                return None
            raise
        listed = decoded(data, _Models, self._http.who).data
        for one in listed:
            if one.id in self._models:
                told = one.max_model_len or one.context_length or one.context_window
                self._tells(self._tenant, one.id, told)
        return [one.id for one in listed]

    def _ended(self) -> TenantState:
        """Nobody listens: it is away, or its process of ours has not come so far."""
        if not self._ours:
            return TenantState.STOPPED
        if self._control.alive():
            return TenantState.LOADING
        ended = self._control.exit_status()
        crashed = ended is not None and not ended.clean and not self._stopped
        return TenantState.FAILED if crashed else TenantState.UNLOADED

    async def end_hung(self) -> str | None:
        """A vLLM or SGLang of ours that lives and answers nothing is ended; it is then loaded anew.

        Any other server may be silent for as long as it computes. What woke in part is put to rest again, whose ever.
        """
        if self._engine is not None and self._rests and not self._waking and self._engine.torn():
            return await self._rest_again(self._engine)
        if self._engine is None or not self._hangs():
            return None
        await self._http.fence()
        await self._control.stop(HUNG_STOP_MS)
        self._silence.heard()
        return f"{self._who} lived and did not answer for {ROUTER_HUNG_S:g} s: ended, to be started anew"

    async def _rest_again(self, engine: Engine) -> str | None:
        if not await engine.resting() or await engine.in_flight():
            return None
        await self._http.fence()
        await engine.rest(self._limits.settle_s)
        self._pulse()
        return f"{self._who} was woken in part only, and is put to rest again"

    # ---- going

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Wait until the server's own count is nothing, where it has one; `gone` where it does not run or rests."""
        self._check(tenant)
        if await self._state() in (TenantState.UNLOADED, TenantState.STOPPED, TenantState.FAILED):
            return Quiesced(gone=True)
        return await self._drained(tenant, limit_ms, self._count)

    async def _count(self) -> int | None:
        return None if self._engine is None else await self._engine.in_flight()

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        """Put it to rest where it rests, else end it. One of ours that does not rest in time is ended, too.

        Half of the time is for calls that still run.
        """
        self._check(tenant)
        if await self._state() in (TenantState.UNLOADED, TenantState.STOPPED, TenantState.FAILED):
            return None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_ms / 1000
        try:
            if not self._rests or self._engine is None:
                if self._ours:
                    with suppress(BackendError):  # it is ended all the same
                        await self._drained(tenant, limit_ms // 2, self._count)
                await self._end()
                return self._notes()
            try:
                await self._drained(tenant, limit_ms // 2, self._count)
                if (why := self._no_room()) is not None:
                    raise BackendRefused(why)
                await self._http.fence()
                await self._engine.rest(max(deadline - loop.time(), self._limits.poll_s))
            except BackendError as error:
                if not self._ours:
                    raise
                await self._end()
                return f"it was ended, since it could not be put to rest: {error}"
            return None
        finally:
            self._pulse()

    async def _end(self) -> None:
        await self._http.fence()
        self._stopped = True
        await self._control.stop()
        with suppress(BackendDown):
            try:
                await self._listed()
            except BackendRefused:
                return  # what stands before it answers for it
            raise BackendRefused(self._foreign())

    def _foreign(self) -> str:
        return f"a server that swapper did not start is at {self._http.url}: end it where it was started"

    # ---- coming

    async def load(self, tenant: str) -> Loaded:
        """Start it or wake it; returns when it answered its smallest real call (not where it was loaded already)."""
        self._check(tenant)
        loop = asyncio.get_running_loop()
        began = loop.time()
        before = await self._state()
        if before is TenantState.STOPPED:
            raise BackendGone(f"nobody is at {self._http.url}: start it there (swapper does not control it)")
        await self._refuse_foreign()
        if self._ours:
            await self._http.fence()
        self._waking, slept = True, False
        try:
            if self._ours:
                await self._control.ensure()
            with self._loading():
                await self._listening()
            slept = self._rests and self._engine is not None and await self._engine.resting()
            if slept and self._engine is not None:
                await self._http.fence()
                await self._patience(blind_s=self._limits.load_s).over(self._engine.wake(NO_LIMIT_S))
            if slept or before is not TenantState.LOADED:
                call = smallest_call(self._http, self._models[0], NO_LIMIT_S)
                await self._answered(call, blind_s=self._limits.answer_s)
        except BackendError:
            if self._ours and before is not TenantState.LOADED:  # left there, it would be taken for one that answers
                with suppress(BackendError):
                    await self._control.stop()
            elif slept and self._engine is not None:  # awake in part it has VRAM, and says that it sleeps
                with suppress(BackendError):
                    await self._engine.rest(self._limits.settle_s)
            raise
        finally:
            self._waking = False
            self._pulse()
        self._stopped = False
        return Loaded(backend_ms=(loop.time() - began) * 1000)

    async def _listening(self) -> None:
        """Wait until it lists its models, as long as there is progress, and see that ours are among them.

        One that is not ours may say for as long that it loads, and be silent for `start_s`.
        """
        patience = self._patience(blind_s=self._limits.load_s if self._ours else self._limits.start_s)
        async for _ in self.looks():
            await self._look_at_control()
            if self._ours and self._control.alive() is False:
                raise BackendError(await self._why_not())
            try:
                listed = await self._listed()
            except BackendRefused as refused:
                if refused.status != _LOADING:
                    raise
                self._said_loading += not self._ours
            except BackendDown as down:
                if not self._ours and isinstance(down, BackendGone):
                    raise
            else:
                return self._serves(listed)
            await patience.look()
        raise AssertionError("unreachable: the looks do not end")

    def _serves(self, listed: list[str] | None) -> None:
        missing = [] if listed is None else [one for one in self._models if one not in listed]
        if missing and listed is not None:
            text = f"{self._who} has no model {missing[0]!r}; it has: {', '.join(listed) or 'none'}"
            raise BackendRefused(
                f"{text}; write one of these under models of {self._tenant}, or start it with ours", 404
            )

    async def _why_not(self) -> str:
        status = None
        async for waited in self.looks():  # whoever waits for the process writes it down a moment later
            status = self._control.exit_status()
            if status is not None or waited >= 1:
                break
        text = f"the {self._http.who} of {self._tenant} ended before it answered ({status or 'nobody saw how'})"
        tail = await asyncio.to_thread(self._control.log_tail, _LOG_LINES)
        if tail is None:
            return f"{text}; see its log where it runs"
        why = "; ".join(reasons(tail, None)) or "it said nothing"
        return f"{text}: {why} (log: {self._control.log_path()})"

    def _check(self, tenant: str) -> None:
        if tenant != self._tenant:
            raise BackendRefused(f"{tenant!r} is no tenant of {self._who}, {self._tenant} is")
