"""`systemctl` and `journalctl` without a systemd: what the control asks of them, on real processes.

    UNITS=FOLDER python -m tests.support.fake_systemctl VERB [OPTIONS] UNIT

Invariant: it answers as the real one does, in words and status: properties come in the manager's own order, `show` of
an unknown unit succeeds, a `stop` waits for the end and succeeds also where TimeoutStopSec made it a KILL, `start`
waits for the start alone (of one that is being stopped, for that end first), and what is denied or unknown is said on
stderr, after warnings. A unit is FOLDER/UNIT.json: `command`, and what is to go wrong: `denied`, `masked`, `result`;
`restart_s` is Restart=always with its RestartSec, `stop_timeout_s` TimeoutStopSec, `changed` that its file was changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn, cast

from workers.control import launcher

_US = "tests.support.fake_systemctl"
_ORDER = (
    *("MainPID", "Result", "ExecMainCode", "ExecMainStatus", "LoadState", "ActiveState", "SubState", "InvocationID"),
    "NeedDaemonReload",
)


def install(folder: Path) -> Path:
    """Write the two programs into FOLDER/bin, for PATH, over the units of FOLDER/units."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (folder / "units").mkdir()
    for name in ("systemctl", "journalctl"):
        program = programs / name
        root = Path(__file__).parents[2]
        where = f"UNITS={folder}/units PYTHONPATH={root}"
        program.write_text(f'#!/bin/sh\n{where} exec {sys.executable} -m {_US} {name} "$@"\n')
        program.chmod(0o755)
    return programs


def main(name: str, arguments: list[str]) -> int:
    units = Path(os.environ["UNITS"])
    if (units / "hangs").exists():
        signal.pause()
    if (units / "no-manager").exists():
        return _fail("System has not been booted with systemd as init system (PID 1). Can't operate.", 1)
    words = [word for word in arguments if not word.startswith("-")]
    if name == "journalctl":
        return _journal(units, words[-1], arguments)
    verb, unit = words[0], Unit(units, words[1])
    if verb == "show":
        wanted = next(word for word in arguments if word.startswith("--property=")).split("=")[1].split(",")
        shown = unit.shown()
        print("\n".join(f"{key}={shown[key]}" for key in _ORDER if key in wanted))
        return 0
    if unit.about is None:
        return _fail(
            f"Failed to {verb} {unit.name}: Unit {unit.name} not {'found' if verb == 'start' else 'loaded'}.", 5
        )
    if unit.about.get("denied"):
        return _fail(f"Failed to {verb} {unit.name}: Interactive authentication required.\nSee system logs.", 4)
    if unit.about.get("changed"):
        said = f"Warning: The unit file, source configuration file or drop-ins of {unit.name} changed on disk."
        print(f"{said} Run 'systemctl daemon-reload' to reload units.", file=sys.stderr)
    if unit.about.get("masked") and verb == "start":
        return _fail(f"Failed to start {unit.name}: Unit {unit.name} is masked.", 1)
    if verb == "start":
        return unit.start()
    return unit.kill(signal.SIGKILL) if verb == "kill" else unit.stop()


class Unit:
    def __init__(self, units: Path, name: str) -> None:
        self.name = name
        self._state = units / f"{name}.state"
        self._log = units / f"{name}.log"
        try:
            self.about: dict[str, Any] | None = json.loads((units / f"{name}.json").read_text())
        except FileNotFoundError:
            self.about = None

    def _kept(self) -> dict[str, Any]:
        try:
            return cast("dict[str, Any]", json.loads(self._state.read_text()))
        except FileNotFoundError:
            return {}

    def _alive(self) -> bool:
        kept = self._kept()
        return bool(kept) and launcher.lives(kept["pid"], kept["started"])

    def _waits(self) -> bool:
        """Between two attempts of Restart=always."""
        kept = self._kept()
        return bool(kept.get("waits")) and launcher.lives(*kept["keeper"])

    def shown(self) -> dict[str, str]:
        nothing = {"MainPID": "0", "Result": "success", "ExecMainCode": "0", "ExecMainStatus": "0", "InvocationID": ""}
        nothing["NeedDaemonReload"] = "yes" if self.about is not None and self.about.get("changed") else "no"
        if self.about is None:
            return nothing | {"LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"}
        if self.about.get("masked"):
            return nothing | {"LoadState": "masked", "ActiveState": "inactive", "SubState": "dead"}
        kept = self._kept()
        shown = nothing | {"LoadState": "loaded", "InvocationID": kept.get("run", "")}
        if self._alive():
            state = ("deactivating", "stop-sigterm") if kept.get("stopping") else ("active", "running")
            return shown | {"MainPID": str(kept["pid"]), "ActiveState": state[0], "SubState": state[1]}
        status = self._status() if kept else None
        if status is None:
            return shown | {"ActiveState": "inactive", "SubState": "dead"}
        code, value = ("2", -status) if status < 0 else ("1", status)
        # TERM and a clean exit are a success to systemd, what else ends a unit is a failure.
        bad = not (status == 0 or (status == -signal.SIGTERM and kept.get("stopping")))
        result = ("signal" if status < 0 else "exit-code") if bad else "success"
        result = "timeout" if kept.get("timed_out") else result
        state = ("failed", "failed") if bad else ("inactive", "dead")
        told = {"Result": result, "ExecMainCode": code, "ExecMainStatus": str(value)}
        if self._waits():
            return shown | told | {"ActiveState": "activating", "SubState": "auto-restart"}
        return shown | told | {"ActiveState": state[0], "SubState": state[1]}

    def _status(self) -> int | None:
        """As its keeper wrote it down, which takes a moment."""
        path = self._state.with_suffix(".status")
        for _ in range(500):
            if path.exists():
                return int(path.read_text())
            time.sleep(0.01)
        return None

    def start(self) -> int:
        assert self.about is not None
        if self.about.get("result"):
            return _fail(f"Job for {self.name} failed because {self.about['result']}.\nSee systemctl status.", 1)
        while self._kept().get("stopping") and (self._alive() or self._waits()):
            time.sleep(0.01)  # its stop goes on first
        if not self._alive() and not self._waits():
            self._state.with_suffix(".status").unlink(missing_ok=True)
            wait_s = str(self.about.get("restart_s", -1))
            keeper = [sys.executable, "-m", _US, "keep", str(self._state), str(self._log), wait_s]
            null = subprocess.DEVNULL
            argv = [*keeper, *self.about["command"]]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=null, start_new_session=True) as kept:
                assert kept.stdout is not None
                kept.stdout.readline()
                kept.returncode = 0  # it outlives us
        return 0

    def stop(self) -> int:
        assert self.about is not None
        deadline = time.monotonic() + self.about.get("stop_timeout_s", 90.0)
        if self._alive() or self._waits():
            _write(self._state, {**self._kept(), "stopping": True})
            self.kill(signal.SIGTERM)
        while self._alive() or self._waits():
            if time.monotonic() > deadline:
                _write(self._state, {**self._kept(), "timed_out": True})
                self.kill(signal.SIGKILL)
            time.sleep(0.01)
        return 0

    def kill(self, number: signal.Signals) -> int:
        if self._alive():
            os.kill(self._kept()["pid"], number)
        return 0


def _write(state: Path, about: dict[str, Any]) -> None:
    fresh = state.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(about))
    fresh.replace(state)


def _keep(state: Path, log: Path, restart_s: float, command: list[str]) -> NoReturn:
    """What a manager does for one process: start it, write down how it ended, start it again where that is wanted."""
    us = launcher.stat_of(os.getpid())
    assert us is not None
    while True:
        with log.open("wb") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        stat = launcher.stat_of(child.pid)
        about = {"pid": child.pid, "started": stat[3] if stat else 0, "run": uuid.uuid4().hex}
        _write(state, {**about, "keeper": (os.getpid(), us[3])})
        with contextlib.suppress(OSError):
            os.write(1, b"begun\n")
        status = child.wait()
        kept = cast("dict[str, Any]", json.loads(state.read_text()))
        if restart_s >= 0 and not kept.get("stopping"):
            _write(state, {**kept, "waits": True})
        fresh = state.with_suffix(".fresh")
        fresh.write_text(str(status))
        fresh.replace(state.with_suffix(".status"))
        until = time.monotonic() + restart_s
        while time.monotonic() < until and not json.loads(state.read_text()).get("stopping"):
            time.sleep(0.01)
        if restart_s < 0 or json.loads(state.read_text()).get("stopping"):
            sys.exit(0)
        state.with_suffix(".status").unlink()


def _journal(units: Path, which: str, arguments: list[str]) -> int:
    lines = next(int(word.split("=")[1]) for word in arguments if word.startswith("--lines="))
    for state in units.glob("*.state"):
        run = cast("dict[str, str]", json.loads(state.read_text()))["run"]
        if which in (f"_SYSTEMD_INVOCATION_ID={run}", f"_SYSTEMD_UNIT={state.stem}"):
            print("\n".join(state.with_suffix(".log").read_text().splitlines()[-lines:]))
    return 0


def _fail(said: str, status: int) -> int:
    print(said, file=sys.stderr)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        _keep(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
    sys.exit(main(sys.argv[1], sys.argv[2:]))
