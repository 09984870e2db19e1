"""Backend of one llama-server in router mode: many models, one front door, slots that are saved and restored.

Invariant: the model is named in every request, nothing here loads or wakes one except `load`, and a verb ends on
what `/models` and the processes show, not on a 200. Closing the clients' connections before a release is the gateway's
work: with one open, llama-server kills its child only after its own `stop-timeout`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused, BackendStalled
from workers.backend import Loaded, Owners, Quiesced, Restored, Room, SaveArgs, Saved, TenantState
from workers.control import refreshed
from workers.control.port import taken
from workers.llama.answer import answer_over, smallest_answer
from workers.llama.child import find_child, gone
from workers.llama.conversations import Conversations, Keeping
from workers.llama.events import RouterEvents
from workers.llama.http import Model, RouterHttp
from workers.llama.hung import HUNG_S, ROUTER_HUNG_S, Silence, Vitals
from workers.llama.known import Known, state_of
from workers.llama.lifecycle import ORPHAN_S, Control, Lifecycle, Limits
from workers.llama.roster import Roster
from workers.llama.shelf import FolderShelf
from workers.llama.slots import Keep
from workers.llama.told import Told

_START_POLL_S = 0.05
_HUNG_STOP_MS = 2_000
STOP_S = 15.0
"""What is taken back ends by itself within this; a router's own limit for it is 10 s by default."""
_STANDING = frozenset({TenantState.LOADED, TenantState.SLEEPING})


class LlamaRouter:
    """Implements `workers.backend.Backend` for one router.

    `tenants` maps tenant ids to the router's model names; `server` is the part of those ids before the model, needed
    where there are none (`roster`); `strategy` is `auto` or the one way to keep conversations; for `slot_dir`,
    `path_map` and `state_dir` see `Keeping`.
    """

    def __init__(
        self,
        url: str,
        *,
        tenants: Mapping[str, str],
        server: str | None = None,
        state_dir: Path,
        slot_dir: Path | None = None,
        api_key: str | None = None,
        control: Control | None = None,
        path_map: Mapping[str, str] | None = None,
        folder: Path | None = None,
        keep: Keep | None = None,
        strategy: str = "auto",
        limits: Limits | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._http = RouterHttp(url, api_key)
        self._events = RouterEvents(self._http)
        self._roster = Roster(self._http.url, tenants, server)
        self._control = control
        self._limits = limits or Limits()
        self._known = Known(self._http, self._events)
        self._lifecycle = Lifecycle(self._http, self._events, self._known, control, self._limits)
        how = Keeping(state_dir, slot_dir, strategy, keep or Keep(), dict(path_map or {}), now_ms, folder)
        self._talks = Conversations(
            self._http, self._known, lambda model: find_child(model.id, model.run), how, self._limits
        )
        self._front, self._vitals = Silence(), Vitals()
        self._told = Told()
        self._released: set[str] = set()
        self._cut_at = float("-inf")

    async def start(self) -> None:
        """Start or adopt the router where we control it, and listen to its events.

        Raises BackendRefused where somebody else listens at its address: ours would end at once, and his be steered.
        """
        if self._control is not None:
            await refreshed(self._control)
            await self._refuse_foreign()
            await self._control.ensure()
        self._events.open()

    async def _refuse_foreign(self) -> None:
        if self._is_foreign() and (who := await asyncio.to_thread(taken, self._http.url)) is not None:
            text = f"{who}, and the router of {self._roster.server} cannot listen there: end that process"
            raise BackendRefused(f"{text}, or give the router another port")

    def _is_foreign(self) -> bool:
        """Whether whoever answers at the address is not ours, though it should be."""
        return self._control is not None and self._control.alive() is False

    async def close(self) -> None:
        """Finish the digests under way, then drop the connections."""
        await self._talks.close()
        await self._events.close()
        await self._http.close()

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        """See `RouterHttp.fence`."""
        self._http.fence = fence

    def changes(self) -> AsyncIterator[None]:
        """One item once connected to the router's events, then one for each change or burst of them."""
        return self._events.pulses()

    async def observe(self) -> Mapping[str, TenantState]:
        """State of everybody by GET /models alone (`/slots` and `/metrics` would wake a sleeping model)."""
        self._front.looked()
        await refreshed(self._control)
        try:
            models = await self._http.models()
        except BackendGone:
            self._front.heard()
            return self._roster.unseen(self._left_behind)
        except BackendError:
            return self._roster.unseen(lambda _: TenantState.UNREACHABLE)
        self._front.heard()
        if self._is_foreign():
            return self._roster.unseen(lambda _: TenantState.UNREACHABLE)
        self._known.compare(models)
        self._told.models(self._roster.tenants, models)
        loaded = [model for model in models.values() if state_of(model) in _STANDING and model.id == model.name]
        self._vitals.forget(but={model.id for model in loaded})
        await asyncio.gather(*map(self._look_at, loaded))
        return self._roster.seen(models, self._state)

    def processes(self) -> Owners:
        """Its models' processes, each its tenant's; whatever else its own process started is the server's."""
        pid = self._control.pid() if self._control is not None else None
        own = {} if pid is None else {pid: self._roster.server}
        return Owners(own | {child.pid: self._roster.whose(name) for name, child in self._vitals.living().items()})

    def contexts(self) -> Mapping[str, Mapping[str, int]]:
        """See `workers.backend.Sized`."""
        return self._told.contexts

    def inputs(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """See `workers.backend.Sensing`."""
        return self._told.inputs

    async def files(self, tenant: str) -> tuple[Path, ...]:
        """What a tenant reads to load; none where the router cannot be asked."""
        with suppress(BackendError):
            model = (await self._http.models()).get(self._roster.known(tenant))
            return self._talks.files(model) if model is not None else ()
        return ()

    async def _look_at(self, model: Model) -> None:
        """At its process, which is missed as well when its router dies."""
        run = await self._talks.run(model)
        if run.child is not None:
            await self._vitals.look(model.id, run.child, f"http://127.0.0.1:{model.run}")

    async def end_hung(self) -> str | None:
        """A router that hangs is started anew, a model's process is ended, which its router then tells."""
        pid = self._control.pid() if self._control is not None else None
        if self._control is None or pid is None:
            return None
        if self._front.lasts(ROUTER_HUNG_S):
            await self._http.fence()
            await self._control.restart(_HUNG_STOP_MS)
            self._front.heard()
            who = f"the router at {self._http.url} (process {pid})"
            return f"{who} lived and did not answer for {ROUTER_HUNG_S:g} s: started anew"
        ours = [(name, child) for name, child in self._vitals.hung().items() if child.below(pid)]
        for _, child in ours:
            await self._http.fence()
            child.kill()
        named = ", ".join(f"{name} (process {child.pid})" for name, child in ours)
        return f"{named} lived and answered nothing for {HUNG_S:g} s: ended, to be loaded anew" if ours else None

    def _left_behind(self, name: str) -> TenantState:
        """Without its router a model's process ends within about 1.5 s; until then it may hold VRAM."""
        run = self._talks.last_run(name)
        alive = run is not None and run.child is not None and run.child.alive()
        return TenantState.UNREACHABLE if alive else TenantState.STOPPED

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Wait until the server's counters show nothing running and nothing deferred, or until it is not loaded."""
        name = self._roster.known(tenant)
        return await self._talks.quiesced(name, limit_ms, configured=self._roster.has(tenant))

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """See `Conversations.save`."""
        return await self._talks.save(tenant, self._roster.configured(tenant), args)

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        """See `Conversations.restore`."""
        return await self._talks.restore(tenant, self._roster.configured(tenant), snapshot, slot, room)

    def shelf(self) -> FolderShelf | None:
        """See `Conversations.shelf`."""
        return self._talks.shelf(lambda t: self._roster.configured(t) if self._roster.has(t) else None)

    async def release(self, tenant: str, *, limit_ms: int) -> None:
        """Unload, and return when /models says so and the child is gone; after `limit_ms` the child is killed."""
        name = self._roster.known(tenant)
        try:
            model = self._known.loaded(name) or await self._known.look(name)
        except BackendDown:
            await self._router_is_gone(name, limit_ms / 1000)
            model = None
        if model is not None and state_of(model).holds_vram:
            await self._lifecycle.unload(name, (await self._talks.run(model)).child, limit_ms / 1000)
        elif (run := self._talks.last_run(name)) is not None and run.child is not None:
            await self._lifecycle.ended(name, run.child, limit_ms / 1000)
        self._released.add(name)
        self._known.forget(name)
        self._talks.released(tenant, name)

    async def _router_is_gone(self, name: str, limit_s: float) -> None:
        """A router that does not answer takes its children along; believed only of a child we know."""
        run = self._talks.last_run(name)
        if run is None or run.child is None or not await gone(run.child, timeout_s=limit_s):
            raise BackendDown(f"{self._http.url} does not answer, and whether {name} still runs cannot be seen")

    async def load(self, tenant: str) -> Loaded:
        """Load, wait for `loaded`, and take the smallest real answer (not on a model that was already loaded)."""
        name = self._roster.configured(tenant)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._refuse_foreign()
        await self._talks.read_ahead(tenant)
        try:
            model, fresh = await self._brought(name)
        except BackendStalled:
            await self._take_back(name)
            raise
        try:
            answers = self._lifecycle.patience(name, answers=True)
            loaded = await answers.over(self._talks.readied(tenant, model, fresh=fresh))
        except BackendError:
            if fresh:  # it listens and does not answer: left there, it would be taken for one that does
                await self._take_back(name)
            raise
        self._released.discard(name)
        return replace(loaded, backend_ms=(loop.time() - began) * 1000)

    async def _take_back(self, name: str) -> None:
        """What does not come up does not stay: the next load would only find it as it is."""
        with suppress(BackendError):
            model = await self._known.look(name)
            if model is not None:
                await self._lifecycle.unload(name, (await self._talks.run(model)).child, STOP_S)

    async def _once_up(self, name: str) -> Model | None:
        """Ask for the load; a router that is being started (again) gets its time to come up first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.start_s
        while True:
            await asyncio.sleep(max(0.0, self._cut_at + ORPHAN_S - loop.time()))
            try:
                return await self._lifecycle.load(name)
            except BackendGone:
                if loop.time() >= deadline:
                    raise
            except BackendDown:
                self._cut_at = loop.time()  # the router may have died over it, and not yet what it began
                raise
            if self._control is not None:
                await self._control.ensure()
            await asyncio.sleep(_START_POLL_S)

    async def _brought(self, name: str) -> tuple[Model, bool]:
        """Have the model loaded; False: it was already, and answers: a call might push a conversation out of it."""
        try:
            model = await self._once_up(name)
        except BackendRefused as refused:
            if refused.status == 404 and name not in (names := await self._http.models()):
                sentence = f"the router at {self._http.url} has no model {name!r}; it has: {', '.join(names)}"
                raise BackendRefused(sentence) from refused
            raise
        if model is not None:
            return model, True
        model = await self._known.look(name)
        if model is not None and state_of(model) is TenantState.LOADED:
            return model, not await answer_over(self._http, model.id, self._limits.answer_s)
        if model is not None and state_of(model) is TenantState.SLEEPING:  # the answer wakes it, with empty slots
            await self._lifecycle.patience(name, answers=True).over(smallest_answer(self._http, model))
        return await self._lifecycle.loaded(name), True

    def _state(self, model: Model | None) -> TenantState:
        """As `state_of`, but what we released ourselves is not failed, even if its process had to be killed.

        A router that is there again at once knows nothing of the processes that the one before it left behind.
        """
        state = state_of(model)
        if model is not None and self._vitals.silent(model.id):
            return TenantState.UNREACHABLE
        if model is not None and not state.holds_vram and self._left_behind(model.name) is TenantState.UNREACHABLE:
            return TenantState.UNREACHABLE
        ours = model is not None and state is TenantState.FAILED and model.name in self._released
        return TenantState.UNLOADED if ours else state
