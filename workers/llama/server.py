"""Backend of a plain llama-server: one model, its own process, started and stopped instead of loaded and unloaded.

Invariant: its process is its tenant: nothing here starts one except `load`, and a release ends when all of it is gone
and nobody answers at its address. Closing the clients' connections before a release is the gateway's work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from swapper.errors import BackendError, BackendGone, BackendRefused, BackendStalled
from workers.backend import Loaded, Owners, Quiesced, Restored, Room, SaveArgs, Saved, TenantState
from workers.control import Control, ExitStatus, Watched, refreshed
from workers.llama.answer import answer_over, smallest_answer
from workers.llama.child import Child, gone
from workers.llama.conversations import Conversations, Keeping
from workers.llama.http import Model, ServerHttp
from workers.llama.hung import HUNG_S, Vitals
from workers.llama.known import state_of
from workers.llama.lifecycle import Limits
from workers.llama.shelf import FolderShelf
from workers.llama.slots import Keep
from workers.llama.standing import Standing
from workers.llama.told import Told
from workers.llama.why import reasons
from workers.patience import Patience, Signs, log_size, signs_of

_POLL_S = 0.02
_LOG_BYTES = 256 << 10
_LOG_LINES = 1000
_HUNG_STOP_MS = 2_000
_EXIT_WRITTEN_S = 1.0


class LlamaServer:
    """Implements `workers.backend.Backend` for one server and its only tenant, whose model is called `model`.

    `command` is what starts it, for arguments where its process cannot be seen; `ours`: `control` starts and stops
    it. For `strategy`, `slot_dir`, `path_map` and `state_dir` see `LlamaRouter`.
    """

    def __init__(
        self,
        url: str,
        *,
        tenant: str,
        model: str | None = None,
        control: Control,
        ours: bool = True,
        state_dir: Path,
        command: Sequence[str] = (),
        slot_dir: Path | None = None,
        api_key: str | None = None,
        path_map: Mapping[str, str] | None = None,
        folder: Path | None = None,
        keep: Keep | None = None,
        strategy: str = "auto",
        limits: Limits | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._http = ServerHttp(url, api_key)
        self._tenant = tenant
        self._model = model or tenant
        self._control = control
        self._ours = ours
        self._limits = limits or Limits()
        self._standing = Standing(self._http, tenant, control.pid, command)
        how = Keeping(state_dir, slot_dir, strategy, keep or Keep(), dict(path_map or {}), now_ms, folder)
        self._talks = Conversations(self._http, self._standing, self._standing.serving, how, self._limits)
        self._vitals = Vitals()
        self._told = Told()
        self._moved = asyncio.Event()
        self._stopped = False

    async def start(self) -> None:
        """Nothing: a server that runs is adopted, and one that does not is started by a load only."""

    async def close(self) -> None:
        """Finish the digests under way, then drop the connections; the server stays as it is."""
        await self._talks.close()
        await self._http.close()

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        """See `RouterHttp.fence`; asked before the process is started or ended, too."""
        self._http.fence = fence

    async def changes(self) -> AsyncIterator[None]:
        """One item at once, then one for each start, stop or end of the process."""
        while True:
            process, moved = await asyncio.to_thread(self._standing.process), self._moved
            yield None  # what happens while it is looked at counts as well
            await self._turn(process, moved)

    async def _turn(self, process: Child | None, moved: asyncio.Event) -> None:
        waits: list[asyncio.Task[object]] = [asyncio.create_task(moved.wait())]
        if process is not None:
            waits.append(asyncio.create_task(gone(process, timeout_s=float("inf"))))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _pulse(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def observe(self) -> Mapping[str, TenantState]:
        """Its state by its process and GET /props (`/slots` and `/metrics` would wake a sleeping model)."""
        await refreshed(self._control)
        server = await asyncio.to_thread(self._standing.server)
        if server is not None:
            await self._vitals.look(self._tenant, server, self._http.url)
        if self._vitals.silent(self._tenant):
            return {self._tenant: TenantState.UNREACHABLE}
        try:
            model = await self._standing.look(self._tenant)
        except BackendError:
            return {self._tenant: TenantState.UNREACHABLE}
        if model is None:  # a router answers in its place: whatever that has is there
            return {self._tenant: TenantState.UNREACHABLE}
        if self._standing.props is not None:
            self._told.props(self._tenant, self._model, self._standing.props)
        state = state_of(model)
        if state is TenantState.UNLOADED:
            return {self._tenant: self._ended()}
        return {self._tenant: state}

    def processes(self) -> Owners:
        """Its process, with all below it; where another started it, the one that was seen to serve."""
        pid = self._control.pid()
        own = {} if pid is None else {pid: self._tenant}
        return Owners(own | {child.pid: self._tenant for child in self._vitals.living().values()})

    def contexts(self) -> Mapping[str, Mapping[str, int]]:
        """See `workers.backend.Sized`."""
        return self._told.contexts

    def inputs(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """See `workers.backend.Sensing`."""
        return self._told.inputs

    async def files(self, tenant: str) -> tuple[Path, ...]:
        """What it reads to load, by the command that starts it; none where that is not known."""
        with suppress(BackendError):
            model = await self._standing.look(self._name(tenant))
            return self._talks.files(model) if model is not None else ()
        return ()

    async def end_hung(self) -> str | None:
        """A server that hangs is ended, if it is ours; it is then loaded anew like one that crashed."""
        hung = self._vitals.hung().get(self._tenant)
        if hung is None or not self._ours:
            return None
        await self._http.fence()
        await self._control.stop(_HUNG_STOP_MS)
        self._vitals.forget(but=set())
        who = f"{self._tenant} (process {hung.pid})"
        return f"{who} lived and answered nothing for {HUNG_S:g} s: ended, to be started anew"

    def _ended(self) -> TenantState:
        """Nobody answers."""
        if not self._ours:
            return TenantState.STOPPED
        alive = self._control.alive()
        if alive is not False:  # it is not yet listening; or whoever would know does not answer
            return TenantState.UNREACHABLE if alive is None else TenantState.LOADING
        ended = self._control.exit_status()
        crashed = ended is not None and not ended.clean and not self._stopped
        return TenantState.FAILED if crashed else TenantState.UNLOADED

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Wait until the server's counters show nothing running and nothing deferred, or until it is not loaded."""
        return await self._talks.quiesced(self._name(tenant), limit_ms, configured=True)

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """See `Conversations.save`."""
        return await self._talks.save(tenant, self._name(tenant), args)

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        """See `Conversations.restore`."""
        return await self._talks.restore(tenant, self._name(tenant), snapshot, slot, room)

    def shelf(self) -> FolderShelf | None:
        """See `Conversations.shelf`."""
        return self._talks.shelf(lambda tenant: tenant if tenant == self._tenant else None)

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        """End the process, after its grace by KILL; returns when it is gone and its address is silent."""
        del limit_ms
        name = self._name(tenant)
        await self._http.fence()
        self._stopped = True
        await self._control.stop()
        self._standing.forget(name)
        self._talks.released(tenant, name)
        self._pulse()
        if await self._http.answers():
            raise BackendRefused(self._foreign())
        return self._control.notes() if isinstance(self._control, Watched) else None

    def _foreign(self) -> str:
        return f"a server that swapper did not start is at {self._http.url}: end it where it was started"

    async def load(self, tenant: str) -> Loaded:
        """Start the process, wait for its model, and take the smallest real answer (not of one that already ran)."""
        name = self._name(tenant)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._talks.read_ahead(tenant)
        try:
            model, fresh = await self._brought(name)
        except BackendStalled:
            await self._take_back()
            raise
        try:
            answers = self._patience(name, answers=True)
            loaded = await answers.over(self._talks.readied(tenant, model, fresh=fresh))
        except BackendError:
            if fresh:  # it listens and does not answer: left there, it would be taken for one that does
                await self._take_back()
            raise
        finally:
            self._pulse()
        self._stopped = False
        return replace(loaded, backend_ms=(loop.time() - began) * 1000)

    async def _take_back(self) -> None:
        if self._ours:
            with suppress(BackendError):
                await self._control.stop()

    def _patience(self, name: str, *, answers: bool = False) -> Patience:
        """With its load, or its first answer, by its log and by what its process does."""

        async def signs() -> Signs:
            process = await asyncio.to_thread(self._standing.process)
            return await signs_of(self._control.log_path(), () if process is None else (process.pid,))

        return self._limits.patience(name, signs, answers=answers)

    async def _brought(self, name: str) -> tuple[Model, bool]:
        """Have the model loaded; False: it was already, and answers: a call might push a conversation out of it."""
        before = await self._standing.look(name)
        await refreshed(self._control)
        strange = before is None or (self._ours and not before.run and self._control.alive() is not True)
        if before is None or (strange and state_of(before).holds_vram):
            raise BackendRefused(self._foreign())
        if not self._ours and not state_of(before).holds_vram:
            raise BackendGone(f"nobody is at {self._http.url}, and the server is not swapper's to start")
        began_at = self._log_size()
        await self._http.fence()
        await self._control.ensure()
        model = await self._up(name, began_at)
        if state_of(model) is TenantState.SLEEPING:  # the answer wakes it, with empty slots
            await self._patience(name, answers=True).over(smallest_answer(self._http, model))
            return await self._up(name, began_at), True
        was_there = state_of(before) is TenantState.LOADED and before.run == model.run
        return model, not (was_there and await answer_over(self._http, model.id, self._limits.answer_s))

    async def _up(self, name: str, began_at: int) -> Model:
        """Wait until the model is loaded, as long as there is progress; `began_at` is where its log begins."""
        patience = self._patience(name)
        while True:
            if self._ours and self._control.alive() is False:
                await refreshed(self._control)
                if self._control.alive() is False:
                    raise BackendError(await self._why_not(began_at))
            model = await self._standing.look(name)
            if model is not None and state_of(model) in (TenantState.LOADED, TenantState.SLEEPING):
                return model
            await patience.look()
            await asyncio.sleep(_POLL_S)

    def _log_size(self) -> int:
        return log_size(self._control.log_path())

    async def _why_not(self, began_at: int) -> str:
        path = self._control.log_path()
        how = await self._exit_status() or "nobody saw how"
        text = f"llama-server ended before {self._tenant} was loaded ({how})"
        if path is None:
            said = await asyncio.to_thread(self._control.log_tail, _LOG_LINES)
            return f"{text}: {'; '.join(reasons(said, None)) or 'it said nothing'}" if said is not None else text
        size = self._log_size()
        try:
            with path.open("rb") as log:  # a log that is smaller than it was has been begun anew
                log.seek(max(began_at if began_at <= size else 0, size - _LOG_BYTES))
                tail = log.read(_LOG_BYTES).decode(errors="replace").splitlines()
        except OSError:
            tail = []
        return f"{text}: {'; '.join(reasons(tail, None)) or 'it said nothing'} (log: {path})"

    async def _exit_status(self) -> ExitStatus | None:
        """How it ended; whoever waits for the process writes it down a moment later."""
        for _ in range(round(_EXIT_WRITTEN_S / _POLL_S)):
            if (status := self._control.exit_status()) is not None:
                return status
            await asyncio.sleep(_POLL_S)
        return None

    def _name(self, tenant: str) -> str:
        if tenant != self._tenant:
            raise BackendRefused(f"{tenant!r} is no tenant of the llama-server at {self._http.url}, {self._tenant} is")
        return tenant
