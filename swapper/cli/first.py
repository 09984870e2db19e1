"""Serve as the first process of a container (pid 1): whom nobody waits for becomes its child, and is waited for here.

Invariant: where this process is no pid 1 nothing happens. Else serve goes on in a child, and what stays here only
passes signals on (a pid 1 is not ended by one that it does not handle), reaps whatever is handed to it, and ends as
serve ended; the kernel then ends all that is left in the container.
"""

from __future__ import annotations

import os
import signal

_FIRST = 1
_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_HEARD = (*_PASSED, signal.SIGCHLD)


def stand_first() -> None:
    """Returns in who is to serve. Forks where this is pid 1, so call it before any thread is started."""
    if os.getpid() != _FIRST:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    serving = os.fork()
    if serving == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        return
    code = _mind(serving)
    os._exit(code if code >= 0 else 128 - code)


def _mind(serving: int) -> int:
    """The exit code of `serving` (negative: the signal that ended it), once it has ended."""
    while True:
        number = signal.sigwait(_HEARD)
        if number != signal.SIGCHLD:
            os.kill(serving, number)
            continue
        while True:  # one SIGCHLD may stand for several
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == serving:
                return os.waitstatus_to_exitcode(status)
            if ended == 0:
                break
