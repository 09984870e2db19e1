"""Backend of kind `none`: a tenant that is only started and stopped, through its control.

Invariant: it is there from the moment something of it runs until nothing does, whatever an answer said. One that is
never evicted is started where it does not run, and nothing here stops it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swapper.errors import BackendError, BackendRefused, BackendStalled
from workers.backend import Loaded, Owners, Quiesced, TenantState
from workers.control import Phase, Seen, Watched
from workers.control.launcher import boot_id
from workers.patience import Patience, Signs, signs_of
from workers.talkless import Talkless

READY_S = 600.0
"""What is not up has failed once nothing of it has moved for so long."""
TURNING = 2
"""So many times as long it may only compute or write its log: many wait in a loop for what never comes."""
STOPPED_S = 15.0
"""What was stopped may be seen there so much longer."""
_TAIL = 5

_STATES = {
    Phase.MISSING: TenantState.STOPPED,
    Phase.STARTING: TenantState.LOADING,
    Phase.UP: TenantState.LOADED,
    Phase.STUCK: TenantState.UNREACHABLE,
    Phase.STOPPING: TenantState.UNREACHABLE,
    Phase.UNREACHABLE: TenantState.UNREACHABLE,
}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds a start may take without progress, and in which what was stopped must be gone."""

    ready_s: float = READY_S
    stopped_s: float = STOPPED_S


class OnOff(Talkless):
    """Implements `workers.backend.Backend` for one tenant.

    `grace_ms`: from the order to stop until it is killed. `keep_up`: it is never evicted. `away` is the file that
    remembers a release, so that one which a new boot brought back is stopped again.
    """

    def __init__(
        self,
        tenant: str,
        control: Watched,
        *,
        grace_ms: int,
        keep_up: bool = False,
        away: Path | None = None,
        times: Times | None = None,
    ) -> None:
        self._tenant = tenant
        self._control = control
        self._grace_ms = grace_ms
        self._keep_up = keep_up
        self._times = times or Times()
        self._away = _Away(away)
        self._seen = Seen(Phase.UNREACHABLE)
        self._leaving = False
        self._fence: Callable[[], Awaitable[None]] = _unfenced

    async def start(self) -> None:
        """Start what is never evicted. Anything else is started by a load only."""
        if self._keep_up:
            await self._fence()
            await self._control.ensure()

    async def close(self) -> None:
        """Let go of the control; the tenant stays as it is."""
        await self._control.close()

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        """Asked before each start and stop."""
        self._fence = fence

    def changes(self) -> AsyncIterator[None]:
        """See `Watched.changes`."""
        return self._control.changes()

    def processes(self) -> Owners:
        """Its processes and containers, as last seen."""
        seen = self._seen
        return Owners(dict.fromkeys(seen.pids, self._tenant), dict.fromkeys(seen.containers, self._tenant))

    async def observe(self) -> Mapping[str, TenantState]:
        """What its control sees."""
        self._seen = seen = await self._control.look()
        return {self._tenant: self._ended() if seen.phase is Phase.GONE else _STATES[seen.phase]}

    def _ended(self) -> TenantState:
        ended = self._control.exit_status()
        crashed = ended is not None and not ended.clean and not self._away.known and not self._leaving
        return TenantState.FAILED if crashed else TenantState.UNLOADED

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Nothing is asked of it, so nothing is waited for."""
        del limit_ms
        self._check(tenant)
        return Quiesced(gone=(await self._control.look()).phase in (Phase.GONE, Phase.MISSING))

    async def load(self, tenant: str) -> Loaded:
        """Start it and wait until it is up (a container: healthy, where it has a health check).

        Nothing is started while it cannot be forgotten that it was released: the next boot would have it stopped.
        """
        self._check(tenant)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._fence()
        await asyncio.to_thread(self._away.forget)
        try:
            await self._control.ensure()
            await self._up()
        except BackendError:
            await self._take_back()
            raise
        return Loaded(backend_ms=(loop.time() - began) * 1000)

    async def _up(self) -> None:
        """What waits for something else at its start may be still for as long as one that nobody sees."""
        told, last = 0, Seen(Phase.STARTING)

        async def coming() -> None:
            nonlocal told, last
            async for _ in self._control.changes():
                before, last = last, await self._control.look()
                told += last != before
                if last.phase is Phase.UP:
                    return
                if last.phase not in (Phase.STARTING, Phase.UNREACHABLE):
                    raise BackendError(await self._why_not(last))

        async def signs() -> Signs:
            return await signs_of(self._control.log_path(), last.pids, told)

        ready_s = self._times.ready_s
        try:
            await Patience(self._tenant, signs, blind_s=ready_s, stall_s=ready_s, turning=TURNING).over(coming())
        except BackendStalled as stalled:
            raise BackendStalled(f"{stalled}{': ' if last.why else ''}{last.why}") from stalled

    async def _take_back(self) -> None:
        """What did not come up does not stay: nobody would end it, and the next start would find it as it is."""
        if self._keep_up or (await self._control.look()).phase in (Phase.GONE, Phase.MISSING):
            return
        with suppress(BackendError):
            await self._fence()
            await self._stop()

    async def _why_not(self, seen: Seen) -> str:
        if seen.phase is Phase.STUCK:
            return f"{self._tenant} was started and does not work: {seen.why or 'nobody says why'}"
        ended = self._control.exit_status()
        how = f" ({ended})" if ended is not None else ""
        said = "; ".join(line.strip() for line in await asyncio.to_thread(self._control.log_tail, _TAIL) or ())
        why = said or seen.why or "it said nothing"
        path = self._control.log_path()
        return f"{self._tenant} ended before it was up{how}: {why}" + (f" (log: {path})" if path else "")

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        """Stop it, by KILL after its own grace; returns when nothing of it is there, with what was remarkable."""
        del limit_ms  # its own is written with it
        self._check(tenant)
        if self._keep_up:
            raise BackendRefused(f"{self._tenant} has evict: never, so it is not stopped; remove that to let it leave")
        await self._fence()
        untold = await self._stop()
        return "; ".join(filter(None, (self._control.notes(), untold))) or None

    async def _stop(self) -> str | None:
        """With a sentence where it is gone and that could not be written down."""
        self._leaving = True
        try:
            await self._control.stop(self._grace_ms)
            await self._gone()
            await asyncio.to_thread(self._away.note)
        except Unwritten as error:
            return f"{error}: a reboot that brings {self._tenant} back would not be told from a start by somebody"
        finally:
            self._leaving = False
        return None

    async def _gone(self) -> None:
        last = Seen(Phase.STOPPING)
        try:
            async with asyncio.timeout(self._times.stopped_s):
                async for _ in self._control.changes():
                    last = await self._control.look()
                    if last.phase in (Phase.GONE, Phase.MISSING):
                        return
        except TimeoutError:
            said = last.why or f"it is seen as {last.phase}"
            raise BackendError(f"{self._tenant} was stopped and is still there: {said}") from None

    async def end_hung(self) -> str | None:
        """Stop again what was released and came back without being asked for; tell once of who was started."""
        if self._leaving or self._keep_up or not self._away.known:
            return None
        seen = await self._control.look()
        if self._leaving or not self._away.known or seen.phase not in (Phase.UP, Phase.STARTING, Phase.STUCK):
            return None
        if not seen.came_back and not self._away.other_boot:
            return await self._started_by_others(seen)
        await self._fence()
        await self._stop()
        return f"{self._tenant} came back by itself though its card was given away: stopped again"

    async def _started_by_others(self, seen: Seen) -> str:
        """It is not ours to stop any more, whether that can be written down or not."""
        said = [f"{self._tenant} was started by somebody else", seen.why]
        try:
            await asyncio.to_thread(self._away.forget)
        except Unwritten as error:
            self._away.let_go()
            said.append(f"{error}: swapper says this again after its next start")
        return ": ".join(filter(None, said))

    def _check(self, tenant: str) -> None:
        if tenant != self._tenant:
            raise BackendRefused(f"{tenant!r} is no tenant here, {self._tenant} is")


class Unwritten(BackendError):
    """What was to be remembered stands in no file; what was done, was done."""


class _Away:
    """Whether it was released and not loaded since, and in which boot. In memory alone without a file.

    `note` and `forget` raise Unwritten; what was noted is known here all the same, what could not be forgotten, too.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._boot = _read(path)

    @property
    def known(self) -> bool:
        return self._boot is not None

    @property
    def other_boot(self) -> bool:
        return self._boot not in (None, boot_id())

    def note(self) -> None:
        self._boot = boot_id()
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_text(json.dumps({"boot": self._boot}))
            fresh.replace(self._path)
        except OSError as error:
            raise Unwritten(f"{self._path} cannot be written ({error.strerror})") from error

    def forget(self) -> None:
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise Unwritten(f"{self._path} cannot be removed ({error.strerror})") from error
        self._boot = None

    def let_go(self) -> None:
        """In memory alone."""
        self._boot = None


def _read(path: Path | None) -> str | None:
    try:
        kept: object = json.loads(path.read_text()) if path is not None else None
    except (OSError, ValueError):
        return None
    boot: object = kept.get("boot") if isinstance(kept, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return boot if isinstance(boot, str) else None


async def _unfenced() -> None:
    """Nobody else could do it."""
