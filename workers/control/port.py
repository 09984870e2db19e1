"""Who listens at a port of this machine: a server that we start there could not, and would end at once.

Invariant: looks at sockets and processes and touches none. What cannot be seen from here is nobody's.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import psutil

_HERE = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"})  # compared with, not bound to


def taken(url: str) -> str | None:
    """Who keeps a server of ours from listening at `url`, in words; None where nobody does. Blocking, some ms."""
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port or 80
    if host not in _HERE or not _answers(host, port):
        return None
    return f"port {port} is taken by {_listener(port)}"


def listener(url: str) -> int | None:
    """The process of this machine that listens at `url`; None where that is none, or cannot be seen. Blocking."""
    parts = urlsplit(url)
    return _pid(parts.port or 80) if parts.hostname in _HERE else None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def _pid(port: int) -> int | None:
    try:
        sockets = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    pids = {one.pid for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port}
    return min((pid for pid in pids if pid is not None), default=None)


def _listener(port: int) -> str:
    pid = _pid(port)
    if pid is None:
        return "another process"
    try:
        return f"process {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"process {pid}"
