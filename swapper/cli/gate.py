"""A child held at a gate: its pid is known, and named in the lease, before the command it will become may start.

Invariant: the child does nothing but wait until `open` names its environment, then it becomes the command under the
same pid; if this process dies first, the child ends without having started anything. It leads its own process group,
has this process's terminal in the foreground while it runs, and is ended (TERM) when this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from workers.control.launcher import stat_of

NOT_FOUND = 127
NOT_EXECUTABLE = 126
_PR_SET_PDEATHSIG = 1
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class GatedChild:
    """Fork before any thread or event loop is started. `status` is None until the child has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        reading, self._writing = os.pipe()
        self.status: int | None = None
        self._terminal = _foreground_terminal()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _child(reading, self._writing, parent, command)
        os.close(reading)
        with contextlib.suppress(OSError):  # the child may have done it already
            os.setpgid(self.pid, self.pid)

    def open(self, env: Mapping[str, str]) -> None:
        """Let it become the command, with these variables added."""
        if self._terminal is not None:
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._terminal, self.pid)
        writing, self._writing = self._writing, -1
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as pipe:
            json.dump(dict(env), pipe)

    def abandon(self) -> None:
        """Close the gate for good: the child ends without starting the command."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
        if self.status is None or self.left():  # else the number may be another group's by now
            self.signal(signal.SIGKILL)
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)

    def signal(self, number: int) -> None:
        """To the whole group; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def left(self) -> bool:
        """Whether anything of its group lives, also after its own end; zombies do not."""
        stats = (stat_of(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal())
        return any(stat is not None and stat[1] == self.pid and stat[0] not in "ZX" for stat in stats)

    def poll(self) -> bool:
        """True once it has ended. A child stopped by Ctrl-Z is resumed: a lease does not stop for that."""
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):
                self.signal(signal.SIGCONT)
                continue
            self.status = status
        return True

    def exit_status(self) -> int:
        """As a shell says it: the exit status, or 128 + the signal."""
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        """Take the terminal back."""
        if self._terminal is not None:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._terminal, os.getpgrp())


def _foreground_terminal() -> int | None:
    """Standard input, if it is a terminal and ours to give."""
    try:
        return 0 if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp() else None
    except OSError:
        return None


def _child(reading: int, writing: int, parent: int, command: Sequence[str]) -> NoReturn:
    """In the child: wait at the gate, then become the command. Never returns."""
    status = NOT_EXECUTABLE
    try:
        os.setpgid(0, 0)
        _restore_signals()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        if text and os.getppid() == parent:
            os.environ.update(json.loads(text))
            os.execvp(command[0], list(command))
    except FileNotFoundError:
        status = NOT_FOUND
        os.write(2, f"swapper run: {command[0]}: not found\n".encode())
    except OSError as error:
        os.write(2, f"swapper run: {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(status)


def _restore_signals() -> None:
    """What Python changed goes back to the default; what our own caller ignored (nohup) stays ignored."""
    for number in _OURS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
