"""Which processes are ours: a lease that named one as its holder would keep its card for as long as it serves.

Invariant: looks at processes and their sockets, touches none. What cannot be seen from here (another user's sockets, a
server in a container) is nobody's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

_HERE = frozenset({"127.0.0.1", "localhost", "::1"})

Pid = Callable[[], int | None]
"""The process of something while it lives."""


@dataclass(frozen=True, slots=True)
class Ourselves:
    """`store` is the embedded store, `servers` those we start, by name; `urls` where each server listens."""

    store: Pid = lambda: None
    servers: Mapping[str, Pid] = field(default_factory=dict[str, Pid])
    urls: Mapping[str, str] = field(default_factory=dict[str, str])

    def whose(self, pid: int) -> str | None:
        """What of ours the process is, in words; None for somebody else's. Blocking, some ms."""
        if pid == os.getpid():
            return "swapper serve itself"
        if pid == self.store():
            return "swapper's own store"
        try:
            line = [psutil.Process(pid), *psutil.Process(pid).parents()]
        except psutil.Error:
            return None
        for name, server in self.servers.items():
            if (ours := server()) is not None and _of(ours, pid, line):
                return f"a process of the server {name}, which swapper runs"
        for name, port in self._ports().items():
            if any(_listens(process, port) for process in line):
                return f"a process of the server {name}, which swapper loads and unloads"
        return None

    def _ports(self) -> Mapping[str, int]:
        parts = {name: urlsplit(url) for name, url in self.urls.items()}
        return {name: part.port or 80 for name, part in parts.items() if part.hostname in _HERE}


def _of(ours: int, pid: int, line: list[psutil.Process]) -> bool:
    """Whether it is the process, one below it, or the launcher around it, which leads their session."""
    if any(process.pid == ours for process in line):
        return True
    try:
        return os.getsid(pid) == os.getsid(ours)
    except ProcessLookupError:
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        sockets = process.net_connections("tcp")
    except (psutil.Error, OSError):
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port for one in sockets)
