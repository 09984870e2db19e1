"""Commands of the configuration around a load and a release of any backend.

Invariant: a hook is a program and its arguments, run without a shell, and it is over, or has been killed with all it
started, before anything goes on. A `before` that fails under `on_failure: fail` lets nothing happen; an `after` that
fails is told, for what it followed has happened. What was not loaded or released is followed by no `after`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import structlog

from swapper.errors import BackendError, BackendRefused
from workers.backend import (
    Backend,
    Filed,
    Loaded,
    Owners,
    Quiesced,
    Restored,
    Room,
    SaveArgs,
    Saved,
    Sensing,
    Sized,
    TenantState,
)
from workers.control.launcher import stat_of

_SHOWN = 300
_KEPT_BYTES = 64 << 10
_POLL_S = 0.02
_LOOKS = 100

log = structlog.stdlib.get_logger(__name__)

Argv = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The commands, in order. `timeout_ms` is for each; `fails`: one that fails makes the verb fail."""

    before_load: tuple[Argv, ...] = ()
    after_load: tuple[Argv, ...] = ()
    before_release: tuple[Argv, ...] = ()
    after_release: tuple[Argv, ...] = ()
    timeout_ms: int = 60_000
    fails: bool = True

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.before_load or self.after_load or self.before_release or self.after_release)


class Hooked:
    """The backend `inner` with `hooks` around load and release; `folder` is where the commands run."""

    def __init__(self, inner: Backend, hooks: Hooks, folder: Path) -> None:
        self._inner = inner
        self._hooks = hooks
        self._folder = folder
        self._fence: Callable[[], Awaitable[None]] | None = None

    # ---- what has hooks

    async def load(self, tenant: str) -> Loaded:
        """As the backend's. Raises BackendError where a hook fails and that counts; the tenant is released again."""
        await self._run("before_load", self._hooks.before_load, tenant)
        loaded = await self._inner.load(tenant)
        try:
            await self._run("after_load", self._hooks.after_load, tenant)
        except BackendError:
            with suppress(BackendError):  # a load that failed leaves nothing behind
                await self._inner.release(tenant, limit_ms=self._hooks.timeout_ms)
            raise
        return loaded

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        """As the backend's. An `after_release` that fails is told with it: the tenant is gone all the same."""
        await self._run("before_release", self._hooks.before_release, tenant)
        said = await self._inner.release(tenant, limit_ms=limit_ms)
        try:
            await self._run("after_release", self._hooks.after_release, tenant)
        except BackendError as error:
            return f"{said}; {error}" if said else str(error)
        return said

    async def _run(self, which: str, commands: Sequence[Argv], tenant: str) -> None:
        for argv in commands:
            if self._fence is not None:
                await self._fence()
            failed = await _failure(argv, self._folder, which, tenant, self._hooks.timeout_ms / 1000)
            if failed is None:
                continue
            text = f"hook {which} of {tenant}: {argv[0]} {failed}"
            if self._hooks.fails:
                raise BackendRefused(text)
            log.warning("a hook failed and is ignored", tenant=tenant, error=text)

    # ---- what has none

    async def start(self) -> None:
        """As the backend's."""
        await self._inner.start()

    async def observe(self) -> Mapping[str, TenantState]:
        """As the backend's."""
        return await self._inner.observe()

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """As the backend's."""
        return await self._inner.quiesce(tenant, limit_ms=limit_ms)

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """As the backend's."""
        return await self._inner.save(tenant, args)

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        """As the backend's."""
        return await self._inner.restore(tenant, snapshot, slot, room)

    async def end_hung(self) -> str | None:
        """As the backend's."""
        return await self._inner.end_hung()

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        """As the backend's; asked before each hook, too."""
        self._fence = fence
        self._inner.fenced(fence)

    def changes(self) -> AsyncIterator[None]:
        """As the backend's."""
        return self._inner.changes()

    async def close(self) -> None:
        """As the backend's."""
        await self._inner.close()

    def shelf(self) -> object | None:
        """The backend's snapshots, where it keeps any."""
        found = getattr(self._inner, "shelf", None)
        return found() if found is not None else None

    def processes(self) -> Owners:
        """The backend's processes, where it knows them."""
        found = getattr(self._inner, "processes", None)
        return found() if found is not None else Owners()

    def contexts(self) -> Mapping[str, Mapping[str, int]]:
        """What the backend's server told of them, where it does."""
        return self._inner.contexts() if isinstance(self._inner, Sized) else {}

    def inputs(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """What the backend's server told its models take, where it does."""
        return self._inner.inputs() if isinstance(self._inner, Sensing) else {}

    async def files(self, tenant: str) -> tuple[Path, ...]:
        """The files that the backend's tenant loads, where it knows them."""
        return await self._inner.files(tenant) if isinstance(self._inner, Filed) else ()


async def _failure(argv: Argv, folder: Path, which: str, tenant: str, limit_s: float) -> str | None:
    """Run one command; why it failed, in words, None where it did not."""
    env = {**os.environ, "SWAPPER_TENANT": tenant, "SWAPPER_HOOK": which}
    with _Words() as words:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=folder,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=words.theirs,
                stderr=words.theirs,
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot be started: {error.strerror or error}"
        words.listen()
        status: int | None = None
        gone = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    status = await process.wait()
        finally:
            gone = await _ended(process)
        if status is None:
            how = f"was killed after {limit_s:g} s" if gone else f"did not end in {limit_s:g} s and cannot be killed"
            return f"{how}{words}"
        return None if status == 0 else f"ended with status {status}{words}"


async def _ended(process: asyncio.subprocess.Process) -> bool:
    """Kill it with what it started and left behind, and see them gone; False where they are not (another user's)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    await process.wait()
    for _ in range(_LOOKS):
        if not await asyncio.to_thread(_lives, process.pid):
            return True
        await asyncio.sleep(_POLL_S)
    return False


def _lives(group: int) -> bool:
    """Whether any of a process group lives; what nobody waits for stays a zombie."""
    stats = (stat_of(pid) for pid in psutil.pids())
    return any(stat is not None and stat[1] == group and stat[0] not in "ZX" for stat in stats)


class _Words:
    """The end of what a command says; it never waits for us to read. Not asyncio's pipe, whose end `wait` awaits."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        self._said = bytearray()
        os.set_blocking(self._ours, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        if self.theirs >= 0:
            os.close(self.theirs)

    def listen(self) -> None:
        """It was started: its end of the pipe is its own."""
        os.close(self.theirs)
        self.theirs = -1
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _read(self) -> bool:
        with suppress(BlockingIOError):
            chunk = os.read(self._ours, _KEPT_BYTES)
            self._said += chunk
            del self._said[:-_KEPT_BYTES]
            if not chunk:
                asyncio.get_running_loop().remove_reader(self._ours)
            return bool(chunk)
        return False

    def __str__(self) -> str:
        while self._read():
            pass
        lines = [line.strip() for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:_SHOWN]}" if lines else ""
