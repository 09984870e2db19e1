"""Control `systemd`: a unit is started and stopped through `systemctl`, of the system's manager or of the user's own.

Invariant: a unit counts as gone only when its manager shows it inactive or failed; one that is being stopped, or that
its manager starts again in a moment, is there. A manager that does not answer says nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path

from swapper.errors import BackendDown, BackendError, BackendRefused
from workers.control import GRACE_MS, ExitStatus, Phase, Seen, launcher
from workers.control.pulse import Pulse
from workers.vram.holders import Holder

ANSWER_S = 4.0
"""A manager that is silent so long does not answer."""
START_S = 120.0
"""A unit's own start may take so long (`Type=notify` says when it is ready; 90 s is systemd's own limit)."""
_KILL_S = 15.0
_LOG_S = 3.0
_SHOWN = (
    *("LoadState", "ActiveState", "SubState", "MainPID", "Result", "ExecMainCode", "ExecMainStatus", "InvocationID"),
    "NeedDaemonReload",
)
_KILLED = frozenset({"2", "3"})
"""CLD_KILLED and CLD_DUMPED of waitid(2): ExecMainStatus is a signal then."""
_TIMED_OUT = "timeout"
_WARNING = "Warning:"
"""Such lines come before the reason, as where a unit's file was changed."""
_DENIED = ("authentication required", "Access denied", "Permission denied")
_NO_MANAGER = ("Failed to connect to bus", "not been booted with systemd")


class SystemdControl:
    """The unit of the server `name`. `user`: it is one of the user's own manager (`systemctl --user`)."""

    def __init__(self, name: str, unit: str, *, user: bool = False, grace_ms: int = GRACE_MS) -> None:
        self._name = name
        self._grace_ms = grace_ms
        self._unit = unit if "." in unit else f"{unit}.service"
        self._scope = ("--user",) if user else ()
        self._pulse = Pulse()
        self._acting = asyncio.Lock()
        self._last: Mapping[str, str] | None = None
        self._process: tuple[int, int] | None = None
        self._note: str | None = None

    # What changes something.

    async def ensure(self) -> None:
        """Start the unit where it does not run. Raises BackendError."""
        async with self._acting:
            shown = await self._known()
            if _phase(shown) in (Phase.GONE, Phase.STOPPING):  # its start comes after the end that somebody ordered
                await self._order("start", START_S)
            await self._show()
        self._pulse.beat()

    async def stop(self, grace_ms: int | None = None) -> None:
        """Stop it as its unit says, after its grace by KILL to all of it; returns once it is inactive or failed."""
        async with self._acting:
            self._note = None
            if _phase(await self._show()) not in (Phase.GONE, Phase.MISSING):
                await self._stop((self._grace_ms if grace_ms is None else grace_ms) / 1000)
            shown = await self._show()
            if _phase(shown) not in (Phase.GONE, Phase.MISSING):
                raise BackendError(
                    f"{self._unit} was stopped and is {_words(shown)}; see systemctl status {self._unit}"
                )
        self._pulse.beat()

    async def _stop(self, grace_s: float) -> None:
        try:
            await self._order("stop", grace_s)
        except _Silent:
            pass
        else:
            if (await self._show())["Result"] == _TIMED_OUT:
                self._note = f"{self._unit} did not end in its own TimeoutStopSec, and its manager killed it"
            return
        await self._order("kill", ANSWER_S, "--signal=KILL")
        self._note = f"{self._unit} did not end in {grace_s:g} s and was killed"
        try:
            await self._order("stop", _KILL_S)
        except _Silent:
            raise BackendError(f"{self._unit} is there {_KILL_S:g} s after KILL; it hangs in the kernel") from None

    async def restart(self, grace_ms: int | None = None) -> None:
        """Stop it and start it again."""
        await self.stop(grace_ms)
        await self.ensure()

    # What only looks.

    async def look(self) -> Seen:
        """Ask the manager now."""
        try:
            shown = await self._show()
        except BackendDown as down:
            return Seen(Phase.UNREACHABLE, str(down))
        except BackendError as error:
            return Seen(Phase.MISSING, str(error))
        phase = _phase(shown)
        if phase is Phase.MISSING:
            return Seen(phase, self._missing(shown))
        if phase is Phase.GONE:
            result = shown["Result"]
            return Seen(phase, "" if result in ("success", "") else f"{self._unit} failed ({result})")
        why = "" if phase is Phase.UP else f"{self._unit} is {_words(shown)}"
        pids = () if self._process is None else (self._process[0],)
        return Seen(phase, why, shown["InvocationID"], pids)

    async def changes(self) -> AsyncIterator[None]:
        """One item at once, then one whenever what its manager shows is another than before.

        Starts and stops by us, and the end of its main process, are seen at once; what else its manager does, by a look
        every `_LOOK_S`.
        """
        told: object = None
        while True:
            turn, shown = self._pulse.next(), "its manager does not answer"
            with suppress(BackendError):
                shown = await self._show()
            pid = self.pid()
            holder = Holder(pid) if pid is not None else None
            try:
                if holder is not None:
                    holder.wake_on_exit(turn)
                if told != (seen := (shown, self._process)):
                    told = seen
                    yield None
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await turn.wait()
                if holder is not None and not holder.alive:
                    self._pulse.beat()
            finally:
                if holder is not None:
                    holder.close()

    def notes(self) -> str | None:
        """Whether the last stop was by KILL."""
        return self._note

    async def close(self) -> None:
        """Nothing is held."""

    def alive(self) -> bool | None:
        """Whether it runs: by its main process where it has one, else as last seen; None before the first look."""
        if self._last is None:
            return None
        if self._process is not None:
            return launcher.lives(*self._process)
        return _phase(self._last) not in (Phase.GONE, Phase.MISSING)

    def pid(self) -> int | None:
        """Its main process while that lives."""
        process = self._process
        return process[0] if process is not None and launcher.lives(*process) else None

    def exit_status(self) -> ExitStatus | None:
        """How its main process ended, as last seen."""
        shown = self._last
        if shown is None or _phase(shown) is not Phase.GONE or shown["ExecMainCode"] in ("", "0"):
            return None
        status = int(shown["ExecMainStatus"] or 0)
        return ExitStatus(None, status, 0) if shown["ExecMainCode"] in _KILLED else ExitStatus(status, None, 0)

    def log_tail(self, n: int) -> list[str] | None:
        """The last lines of its last run in the journal. Blocking; None where that cannot be read."""
        run = (self._last or {}).get("InvocationID")
        which = f"_SYSTEMD_INVOCATION_ID={run}" if run else f"_SYSTEMD_UNIT={self._unit}"
        command = ["journalctl", *self._scope, "--no-pager", "--output=cat", f"--lines={n}", which]
        try:
            told = subprocess.run(command, capture_output=True, timeout=_LOG_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return told.stdout.decode(errors="replace").splitlines()[-n:] if told.returncode == 0 else None

    def log_path(self) -> Path | None:
        """Its log is the journal."""
        return None

    async def problems(self) -> list[str]:
        """What would keep it from being started and stopped, each with how it is mended."""
        try:
            shown = await self._known()
        except BackendError as error:
            return [str(error)]
        reload = f"systemctl {' '.join((*self._scope, 'daemon-reload'))}"
        said = f"the file of {self._unit} was changed, and systemd goes by what it was before: {reload}"
        return [said] if shown["NeedDaemonReload"] == "yes" else []

    # The manager.

    async def _known(self) -> Mapping[str, str]:
        shown = await self._show()
        if _phase(shown) is Phase.MISSING:
            raise BackendRefused(self._missing(shown))
        return shown

    async def _show(self) -> Mapping[str, str]:
        """Raises BackendDown, BackendRefused."""
        try:
            told = await self._systemctl(ANSWER_S, "show", f"--property={','.join(_SHOWN)}", self._unit)
        except BackendError:
            self._last, self._process = None, None
            raise
        shown = dict.fromkeys(_SHOWN, "") | dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        pid = int(shown["MainPID"] or 0)
        stat = launcher.stat_of(pid) if pid else None
        self._last, self._process = shown, None if stat is None else (pid, stat[3])
        return shown

    async def _order(self, verb: str, limit_s: float, *options: str) -> None:
        await self._systemctl(limit_s, verb, *options, self._unit)

    async def _systemctl(self, limit_s: float, *words: str) -> str:
        command = ("systemctl", *self._scope, "--no-ask-password", "--no-pager", *words)
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            asked = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=pipe)
        except FileNotFoundError:
            raise BackendRefused("there is no systemctl here: use control: command, docker or attach") from None
        try:
            async with asyncio.timeout(limit_s):
                told, said = await asked.communicate()
        except TimeoutError:
            raise _Silent(f"systemctl {words[0]} {self._unit} has no answer in {limit_s:g} s") from None
        finally:
            if asked.returncode is None:
                asked.kill()
                await asked.communicate()
        if asked.returncode:
            raise self._refused(words[0], said.decode(errors="replace").strip())
        return told.decode(errors="replace")

    def _refused(self, verb: str, said: str) -> BackendError:
        lines = [line for line in said.splitlines() if not line.startswith(_WARNING)]
        first = lines[0] if lines else "it says nothing"
        if any(word in said for word in _NO_MANAGER):
            who = "the user's systemd" if self._scope else "systemd"
            return BackendDown(f"{who} does not answer ({first}): run swapper where it runs, or use another control")
        if any(word in said for word in _DENIED):
            mend = "a polkit rule for org.freedesktop.systemd1.manage-units lets its user do it, or use user: true"
            return BackendRefused(f"swapper may not {verb} {self._unit}: {mend}")
        return BackendRefused(f"systemctl {verb} {self._unit}: {first}")

    def _missing(self, shown: Mapping[str, str]) -> str:
        whose = "the user's systemd" if self._scope else "systemd"
        if shown["LoadState"] == "masked":
            return f"{self._unit} is masked: systemctl unmask {self._unit}"
        if shown["LoadState"] == "not-found":
            return f"{whose} knows no unit {self._unit}: correct unit:, or write user: {str(not self._scope).lower()}"
        return f"{self._unit} cannot be loaded ({shown['LoadState']}): systemctl status {self._unit} says why"


_LOOK_S = 2.0
"""What somebody else does tells itself to nobody here; a `changes` looks so often.

The manager would tell it over D-Bus (PropertiesChanged of the unit, after Subscribe). That is not used: whether the
path of a unit stays, and what is told between two attempts of Restart=always or after a re-exec of the manager, would
be believed here and not seen. A look is one `systemctl show`, some ms of the manager's time.
"""


class _Silent(BackendDown):
    """No answer in time."""


def _phase(shown: Mapping[str, str]) -> Phase:
    match shown["ActiveState"]:
        case "active" | "reloading" | "refreshing":
            return Phase.UP
        case "activating":
            return Phase.STARTING
        case "deactivating":
            return Phase.STOPPING
        case _:
            return Phase.GONE if shown["LoadState"] == "loaded" else Phase.MISSING


def _words(shown: Mapping[str, str]) -> str:
    return f"{shown['ActiveState']} ({shown['SubState']})"
