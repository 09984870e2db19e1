"""A control of processes of this machine, watched: how far its process has come, and when it ends.

Invariant: what it tells is the process itself, looked at anew; it starts and stops only through the control it is
given. Of a process that somebody else starts (`attach`) nothing is known, and it counts as there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from workers.control import Control, ExitStatus, Phase, Seen
from workers.control.attach import AttachControl
from workers.control.pulse import Pulse
from workers.vram.holders import Holder


class WatchedProcess:
    """Implements `Watched` over a `Control` that always knows its process."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._pulse = Pulse()

    async def ensure(self) -> None:
        """See `Control.ensure`."""
        await self._control.ensure()
        self._pulse.beat()

    async def stop(self, grace_ms: int | None = None) -> None:
        """See `Control.stop`."""
        await self._control.stop(grace_ms)
        self._pulse.beat()

    async def restart(self, grace_ms: int | None = None) -> None:
        """See `Control.restart`."""
        await self._control.restart(grace_ms)
        self._pulse.beat()

    async def look(self) -> Seen:
        """Whether the process lives: what nobody asks anything is up once it runs."""
        alive = await asyncio.to_thread(self._control.alive)
        if alive is None:
            somebody_elses = isinstance(self._control, AttachControl)
            return Seen(Phase.UP if somebody_elses else Phase.UNREACHABLE, "nobody here can tell whether it runs")
        pid = await asyncio.to_thread(self._control.pid) if alive else None
        if pid is None:
            return Seen(Phase.GONE)
        return Seen(Phase.UP, run=str(pid), pids=(pid,))

    async def changes(self) -> AsyncIterator[None]:
        """One item at once, then one for each start, stop or end of the process."""
        while True:
            turn = self._pulse.next()
            pid = await asyncio.to_thread(self._control.pid)
            holder = Holder(pid) if pid is not None else None
            try:
                if holder is not None:
                    holder.wake_on_exit(turn)
                yield None
                await turn.wait()
            finally:
                if holder is not None:
                    holder.close()
            if holder is not None and not holder.alive:
                self._pulse.beat()  # whoever else waits waits for another turn by now

    def notes(self) -> str | None:
        """Nothing: whoever survives its grace is killed, as its log may tell."""
        return None

    async def close(self) -> None:
        """Nothing is held."""

    def alive(self) -> bool | None:
        """See `Control.alive`."""
        return self._control.alive()

    def pid(self) -> int | None:
        """See `Control.pid`."""
        return self._control.pid()

    def exit_status(self) -> ExitStatus | None:
        """See `Control.exit_status`."""
        return self._control.exit_status()

    def log_tail(self, n: int) -> list[str] | None:
        """See `Control.log_tail`."""
        return self._control.log_tail(n)

    def log_path(self) -> Path | None:
        """See `Control.log_path`."""
        return self._control.log_path()
