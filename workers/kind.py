"""What all kinds of servers without slots have in common: their control, their fence, the hints of change.

Invariant: nothing of a conversation is kept here: a save and a restore say so. A server that should be ours and is
somebody else's is neither used nor ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from workers.backend import Owners, Quiesced, Restored, Room, SaveArgs, Saved, SaveUnsupported
from workers.client import READ_S, ServerClient
from workers.control import Control, Watched, launcher
from workers.control.port import listener, taken
from workers.llama.hung import ROUTER_HUNG_S, Silence
from workers.patience import STALL_S, Patience, Signs, signs_of

T = TypeVar("T")

HUNG_STOP_MS = 2_000
LISTENER_S = 10.0
"""Who listens at the address of an attached server is looked for at most this often, until somebody does."""
BRISK_S = 1.0
"""So long a wait is looked at every `poll_s`, from then on five times as seldom."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without any sign of progress after which a verb gives up.

    `load_s`: where no process can be seen, else `stall_s`; `start_s`: nobody listens although the server was started;
    `settle_s`: what was asked for and is not seen yet; `read_s`: an answer that costs the server nothing.
    """

    load_s: float = 600.0
    stall_s: float = STALL_S
    answer_s: float = 120.0
    start_s: float = 30.0
    settle_s: float = 10.0
    read_s: float = READ_S
    poll_s: float = 0.05


class Kind:
    """The part of a backend that is the same for all of them.

    `ours`: `control` starts and stops the server, which is called `name` in the configuration.
    """

    def __init__(
        self, http: ServerClient, control: Control, *, name: str, ours: bool, limits: Limits | None = None
    ) -> None:
        self._http = http
        self._name = name
        self._control = control
        self._ours = ours
        self._limits = limits or Limits()
        self._silence = Silence()
        self._loads = 0
        self._said_loading = 0
        self._moved = asyncio.Event()
        self._owned = Owners()
        self._run: str | None = None
        self._contexts: dict[str, dict[str, int]] = {}
        self._listener: psutil.Process | None = None
        self._listener_at = float("-inf")

    @property
    def _who(self) -> str:
        return f"{self._http.who} at {self._http.url}"

    async def close(self) -> None:
        """Drop the connections; the server stays as it is."""
        await self._http.close()

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        """See `ServerClient.fence`; asked before a process is started or ended, too."""
        self._http.fence = fence

    async def changes(self) -> AsyncIterator[None]:
        """One item at once, then one for each load and release, or what the control tells: the servers tell none."""
        if isinstance(self._control, Watched):
            async for _ in self._control.changes():
                yield None
        while True:
            moved = self._moved
            yield None
            await moved.wait()

    def _pulse(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """Raises SaveUnsupported: there are no slots."""
        del args
        raise SaveUnsupported(f"{self._who} keeps no conversations of {tenant}")

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        """Raises BackendRefused: there are no slots."""
        del slot, room
        raise BackendRefused(f"{self._who} has no slots: {snapshot} cannot come back into {tenant}")

    async def _refuse_foreign(self) -> None:
        """Raises BackendRefused where somebody else listens at the address of a server that is to be ours."""
        await self._look_at_control()
        if self._is_foreign() and (who := await asyncio.to_thread(taken, self._http.url)) is not None:
            text = f"{who}, and the {self._http.who} that swapper starts cannot listen there: end that process"
            raise BackendRefused(f"{text}, or give it another port")

    def processes(self) -> Owners:
        """What the control runs, else who listens at its address, with all below it, as last seen."""
        return self._owned

    def contexts(self) -> Mapping[str, Mapping[str, int]]:
        """See `workers.backend.Sized`."""
        return self._contexts

    def _tells(self, tenant: str, model: str, tokens: object) -> None:
        """The server told how many tokens a call of a model may have; 0, or no number, tells nothing."""
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
            self._contexts.setdefault(tenant, {})[model] = tokens

    def run(self) -> str | None:
        """Tells this run of its process from every other one, as last seen; None where none can be seen from here."""
        return self._run

    async def _look_at_control(self) -> None:
        """Have the control look anew; what it runs is this server's."""
        if isinstance(self._control, Watched):
            seen = await self._control.look()
            self._run = f"run {seen.run}" if seen.run else None
            self._owned = Owners(dict.fromkeys(seen.pids, self._name), dict.fromkeys(seen.containers, self._name))
        elif self._ours:
            pid = self._control.pid()
            self._run = _started(pid)
            self._owned = Owners({} if pid is None else {pid: self._name})
        else:
            await self._look_who_listens()

    async def _look_who_listens(self) -> None:
        now = asyncio.get_running_loop().time()
        ended = self._listener is not None and not self._listener.is_running()
        if ended or (self._listener is None and now - self._listener_at >= LISTENER_S):
            self._listener_at = now
            self._listener = await asyncio.to_thread(_listening, self._http.url)
        self._run = _started(None if self._listener is None else self._listener.pid)
        self._owned = Owners({} if self._listener is None else {self._listener.pid: self._name})

    def _notes(self) -> str | None:
        """What was remarkable about the last stop by the control."""
        return self._control.notes() if isinstance(self._control, Watched) else None

    def _is_foreign(self) -> bool:
        """Whether whoever answers at the address is not ours, though it should be."""
        return self._ours and self._control.alive() is False

    def _patience(self, *, blind_s: float, answers: bool = False) -> Patience:
        """With a load, or with a first answer, by its log and by what its processes do."""

        async def signs() -> Signs:
            return await signs_of(self._control.log_path(), tuple(self._owned.pids), self._said_loading)

        return Patience(self._who, signs, blind_s=blind_s, stall_s=self._limits.stall_s, answers=answers)

    async def _answered(self, call: Coroutine[None, None, T], *, blind_s: float) -> T:
        """One call that may load, for as long as something moves; it has no limit of its own."""
        return await self._patience(blind_s=blind_s, answers=True).over(call)

    def _hangs(self) -> bool:
        """Whether a server that is ours was asked for long, lives, loads nothing for us, and answered nothing."""
        hangs = self._ours and self._control.alive() is True and self._silence.lasts(ROUTER_HUNG_S)
        return hangs and not self._loads

    @contextmanager
    def _loading(self) -> Generator[None]:
        """While within it a server may be silent; its `load_s` ends that."""
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1
            self._silence.heard()

    async def _drained(self, tenant: str, limit_ms: int | None, count: Callable[[], Awaitable[int | None]]) -> Quiesced:
        """Wait until `count` is 0 (None: nobody can know). After `limit_ms` a BackendError says what still runs.

        No answer proves nothing: who computes may be silent. `gone`: nobody listens any more.
        """
        last: int | None = None
        try:
            async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
                async for _ in self.looks():
                    try:
                        last = await count()
                    except BackendGone:
                        return Quiesced(gone=True)
                    except BackendDown:
                        continue
                    if not last:
                        return Quiesced()
        except TimeoutError:
            pass
        said = "it has not answered" if last is None else f"calls running or waiting at the server: {last}"
        raise BackendError(f"{tenant} is not idle after {(limit_ms or 0) / 1000:g} s: {said}")

    async def looks(self) -> AsyncIterator[float]:
        """Seconds since the first look, for each look of a wait; whoever waits ends it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            waited = loop.time() - began
            yield waited
            await asyncio.sleep(self._limits.poll_s if waited < BRISK_S else 5 * self._limits.poll_s)


def _started(pid: int | None) -> str | None:
    stat = None if pid is None else launcher.stat_of(pid)
    return None if stat is None else f"pid {pid} {stat[3]}"


def _listening(url: str) -> psutil.Process | None:
    pid = listener(url)
    with suppress(psutil.Error):
        return psutil.Process(pid) if pid is not None else None
    return None
