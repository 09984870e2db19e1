"""Backend of a ComfyUI: on the card from its load until it has freed what it loaded, idle or at work.

Invariant: a release is over when the VRAM is seen to be free, and only where nobody can see that, when ComfyUI was
idle and asked to free it: its answer to /free says nothing. What keeps its VRAM all the same, where nobody can see that
by its own word, is restarted by its control, and so is what was to become idle and answered nobody to the end of that
time. Nothing else ends a prompt.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from workers.backend import Loaded, Owners, Quiesced, TenantState
from workers.comfyui.http import ComfyHttp
from workers.comfyui.marker import Marker
from workers.control import Phase, Seen, Watched
from workers.control.pulse import Pulse
from workers.patience import Patience, Signs, signs_of
from workers.talkless import Talkless

log = structlog.stdlib.get_logger(__name__)

_TAIL = 5
_POLL_S = 0.1
_AGAIN_S = 5.0
_EXIT_WRITTEN_S = 1.0
_HUNG_S = 60.0
"""Its HTTP answers at whatever work, if late: one that has answered nobody for so long hangs."""
_GONE = frozenset({Phase.GONE, Phase.MISSING})


@dataclass(frozen=True, slots=True)
class Limits:
    """`idle_mib`: what a ComfyUI that has loaded nothing keeps, its CUDA context; `cached_mib`: PyTorch's share of it.

    Seconds: `load_s` for a start until it answers, `settle_s` for VRAM that no longer falls after /free, `trust_s` for
    the same where nobody can see it and ComfyUI's own number has to do.
    """

    idle_mib: int = 1024
    cached_mib: int = 256
    load_s: float = 600.0
    settle_s: float = 5.0
    trust_s: float = 3.0


class ComfyUI(Talkless):
    """Implements `workers.backend.Backend` for one ComfyUI and its only tenant.

    `held_mib` tells what the tenant's processes have of the card, None while that cannot be known; without it nobody
    knows. `ours`: `control` starts and stops it. `marker`: the file that remembers that it was loaded.
    """

    def __init__(
        self,
        url: str,
        *,
        tenant: str,
        control: Watched,
        ours: bool = True,
        marker: Path,
        grace_ms: int = 30_000,
        held_mib: Callable[[], Awaitable[int | None]] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._http = ComfyHttp(url)
        self._tenant = tenant
        self._control = control
        self._ours = ours
        self._grace_ms = grace_ms
        self._held = held_mib
        self._limits = limits or Limits()
        self._marker = Marker(marker)
        self._client = f"swapper-{uuid.uuid4().hex}"
        self._pulse = Pulse()
        self._seen = Seen(Phase.UNREACHABLE)
        self._stopping = False
        self._untold: str | None = None

    async def start(self) -> None:
        """Nothing: it is started by a load only."""

    async def close(self) -> None:
        """Drop the connections; it stays as it is. The control is its maker's to close."""
        await self._http.close()

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        """Asked before each request that changes something, and before its process is started or ended."""
        self._http.fence = fence

    def processes(self) -> Owners:
        """Its processes and containers, as last seen."""
        seen = self._seen
        return Owners(dict.fromkeys(seen.pids, self._tenant), dict.fromkeys(seen.containers, self._tenant))

    # ---- looking

    async def observe(self) -> Mapping[str, TenantState]:
        """Loaded: at work, or since its load or a prompt nothing was freed. See TenantState."""
        self._seen = seen = await self._control.look()
        if seen.phase in _GONE:
            return {self._tenant: self._ended()}
        try:
            if await self._http.remaining() > 0:  # whoever posted it: until the next /free it has what that took
                await self._tried(self._note(seen.run, loaded=True))
            elif self._marker.loaded(seen.run) is None:
                await self._tried(self._note(seen.run, loaded=await self._holds()))
        except BackendGone:
            if not self._ours:
                await self._tried(self._forget())
            return {self._tenant: self._silent(seen)}
        except BackendError:
            return {self._tenant: TenantState.UNREACHABLE}
        return {self._tenant: TenantState.LOADED if self._marker.loaded(seen.run) else TenantState.UNLOADED}

    async def _note(self, run: str, *, loaded: bool) -> None:
        await asyncio.to_thread(self._marker.note, run, loaded=loaded)

    async def _forget(self) -> None:
        await asyncio.to_thread(self._marker.forget)

    async def _tried(self, noting: Awaitable[None]) -> str | None:
        """A sentence where it is remembered in this process alone, in the log, too, the first time."""
        try:
            await noting
        except BackendError as error:
            said = f"{error}; after a restart swapper may not know whether {self._tenant} has what it loaded"
            if said != self._untold:
                log.warning("what a ComfyUI has is written nowhere", tenant=self._tenant, error=said)
            self._untold = said
            return said
        self._untold = None
        return None

    def _ended(self) -> TenantState:
        ended = self._control.exit_status()
        crashed = ended is not None and not ended.clean and not self._stopping
        return TenantState.FAILED if crashed and self._marker.last else TenantState.UNLOADED

    def _silent(self, seen: Seen) -> TenantState:
        """Nobody listens there: of one that we start, its process has not come so far."""
        if not self._ours:
            return TenantState.STOPPED
        return TenantState.LOADING if seen.phase in (Phase.STARTING, Phase.UP) else TenantState.UNREACHABLE

    async def _holds(self) -> bool:
        """Whether one that we know nothing of has more than an idle one: by its processes, else by its word."""
        held = None if self._held is None else await self._held()
        if held is not None:
            return held > self._limits.idle_mib
        said = await self._http.torch_mib()
        return said is not None and said > self._limits.cached_mib

    async def changes(self) -> AsyncIterator[None]:
        """One item at once, then one for each change of its queue, and of its process as far as its control tells."""
        beats = [asyncio.create_task(self._beat(self._http.statuses(self._client)))]
        beats.append(asyncio.create_task(self._beat(self._control.changes())))
        try:
            async for _ in self._pulse.beats():
                yield None
                if any(beat.done() for beat in beats):
                    return  # it is gone; who asks comes again
        finally:
            for beat in beats:
                beat.cancel()
            await asyncio.gather(*beats, return_exceptions=True)

    async def _beat(self, words: AsyncIterator[object]) -> None:
        try:
            async for _ in words:
                self._pulse.beat()
        except BackendError:
            return
        finally:
            self._pulse.beat()

    # ---- the verbs

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Wait until nothing runs or waits in its queue, or its process is gone; one that hangs is ended for that."""
        self._check(tenant)
        left = None if limit_ms is None else limit_ms / 1000
        remaining, loop = None, asyncio.get_running_loop()
        heard_at = loop.time()
        try:
            async with asyncio.timeout(left):
                while True:
                    if (await self._control.look()).phase in _GONE:
                        return Quiesced(gone=True)
                    try:
                        remaining, heard_at = await self._http.remaining(), loop.time()
                        if not remaining:
                            return Quiesced()
                    except BackendGone:
                        if not self._ours:
                            return Quiesced(gone=True)
                    except BackendDown:
                        pass  # no answer is no end
                    await self._until_changed()
        except TimeoutError:
            if self._ours and (remaining is None or loop.time() - heard_at >= _HUNG_S):
                await self._restart()
                return Quiesced(gone=True)
            if remaining is None:
                raise BackendError(
                    f"{self._tenant} has not answered for {left:g} s, so nobody knows whether it is at work; see its "
                    "log, and restart it where it hangs"
                ) from None
            prompts = f"{remaining} prompt{'s' * (remaining != 1)}"
            raise BackendError(
                f"{self._tenant} still has {prompts} in its queue; end them in its UI (Interrupt, Clear) at {self._url}"
            ) from None

    async def _until_changed(self) -> None:
        """The next word of its queue, or a while where it tells none."""
        client = f"{self._client}-{uuid.uuid4().hex[:8]}"
        with suppress(TimeoutError, BackendError):
            async with asyncio.timeout(_AGAIN_S), aclosing(self._http.statuses(client)) as statuses:
                async for remaining in statuses:
                    if remaining == 0:
                        return
        await asyncio.sleep(_POLL_S)

    async def end_hung(self) -> str | None:
        """Nothing: a long node keeps its queue, not its HTTP, and no sign tells one that hangs from one at work."""
        return None

    async def load(self, tenant: str) -> Loaded:
        """Start it where it does not run; returns once it answers. Its models are loaded by its prompts."""
        self._check(tenant)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._http.fence()
        try:
            await self._control.ensure()
            patience = Patience(self._tenant, self._signs, blind_s=self._limits.load_s)
            await patience.over(self._until(self._answers))
            self._seen = await self._control.look()
            await self._note(self._seen.run, loaded=True)
        except BackendError:
            await self._take_back()
            raise
        return Loaded(backend_ms=(loop.time() - began) * 1000)

    async def _take_back(self) -> None:
        """What does not come to answer does not stay: nobody would end it, and the next load would find it as it is."""
        if not self._ours or (await self._control.look()).phase in _GONE:
            return
        with suppress(BackendError):
            await self._http.fence()
            await self._control.stop(self._grace_ms)
            await self._forget()

    async def _signs(self) -> Signs:
        return await signs_of(self._control.log_path(), self._seen.pids)

    async def _answers(self) -> bool:
        self._seen = seen = await self._control.look()
        if seen.phase in _GONE:
            raise BackendError(await self._why_not(seen))
        try:
            await self._http.stats()
        except BackendGone:
            if not self._ours:
                raise BackendGone(
                    f"nobody is at {self._url}, and {self._tenant} is not swapper's to start: start it, or give it a "
                    "control"
                ) from None
            return False
        except BackendRefused as refused:
            if (refused.status or 0) >= 500:
                return False
            raise
        except BackendDown:
            return False
        return True

    async def _why_not(self, seen: Seen) -> str:
        with suppress(TimeoutError):  # whoever waits for the process writes it down a moment later
            async with asyncio.timeout(_EXIT_WRITTEN_S if self._ours else 0):
                await self._until(self._exit_is_known)
        ended = self._control.exit_status()
        how = f" ({ended})" if ended is not None else ""
        said = "; ".join(line.strip() for line in await asyncio.to_thread(self._control.log_tail, _TAIL) or ())
        path = self._control.log_path()
        where = f" (log: {path})" if path else ""
        return f"{self._tenant} ended before it answered{how}: {said or seen.why or 'it said nothing'}{where}"

    async def _exit_is_known(self) -> bool:
        return await asyncio.to_thread(self._control.exit_status) is not None

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        """Have it free all, and restart it where that did not help; a sentence where it was restarted."""
        self._check(tenant)
        if (await self._control.look()).phase in _GONE:
            return await self._tried(self._forget())
        try:
            await self.quiesce(tenant, limit_ms=limit_ms)
            await self._http.free()
        except BackendGone:
            return await self._tried(self._forget())
        kept = await self._settled()
        if kept is None and self._ours:  # nobody sees it: what it says against itself is no lie
            kept = await self._says()
        note = None if kept is None or kept <= self._limits.idle_mib else await self._restarted(kept)
        self._seen = await self._control.look()
        untold = await self._tried(self._note(self._seen.run, loaded=False))
        self._pulse.beat()
        return "; ".join(filter(None, (note, untold))) or None

    async def _settled(self) -> int | None:
        """MiB once they are few enough, or no longer fall; None where nobody can tell: then ComfyUI is believed."""
        loop = asyncio.get_running_loop()
        lowest, fell_at = None, loop.time()
        while (held := None if self._held is None else await self._held()) is not None:
            if held <= self._limits.idle_mib:
                return held
            if lowest is None or held < lowest:
                lowest, fell_at = held, loop.time()
            if loop.time() - fell_at >= self._limits.settle_s:
                return held
            await asyncio.sleep(_POLL_S)
        with suppress(TimeoutError, BackendError):  # it says more than it should, or nothing: the card's proof decides
            async with asyncio.timeout(self._limits.trust_s):
                await self._until(self._says_little)
        return None

    async def _says(self) -> int | None:
        with suppress(BackendError):
            return await self._http.torch_mib()
        return None

    async def _says_little(self) -> bool:
        return (await self._http.torch_mib() or 0) <= self._limits.cached_mib

    async def _until(self, done: Callable[[], Awaitable[bool]]) -> None:
        """Look until it is; what tells no changes has to be asked."""
        while True:
            if await done():
                return
            await asyncio.sleep(_POLL_S)

    async def _restarted(self, kept: int) -> str:
        """End it and start it anew: what /free leaves, only the end of its process gives back."""
        said = f"{self._tenant} kept {kept} MiB of VRAM after /free"
        if not self._ours:
            raise BackendRefused(
                f"{said}, and is attached: restart it where it was started, or give it a control (docker, command or "
                "systemd) so that swapper can"
            )
        await self._restart()
        left = await self._settled()
        if left is not None and left > self._limits.idle_mib:
            raise BackendError(
                f"{said}, and {left} MiB after a restart: something else of it holds them; see which process in "
                "swapper status"
            )
        return f"{said}: restarted"

    async def _restart(self) -> None:
        await self._http.fence()
        self._stopping = True
        try:
            await self._control.restart(self._grace_ms)
        finally:
            self._stopping = False

    @property
    def _url(self) -> str:
        return self._http.url

    def _check(self, tenant: str) -> None:
        if tenant != self._tenant:
            raise BackendRefused(f"{tenant!r} is no tenant here, {self._tenant} is")
