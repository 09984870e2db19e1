"""Who we are to a Kubernetes API: a token that stands in the kubeconfig, in a file, or that a program of it gives.

Invariant: a file is read for each request, since a pod's is replaced while it runs; a program is run once, and again
when what it gave expires or was refused. Nothing of its arguments and output is told, which may hold secrets.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from swapper.errors import BackendRefused

_EXEC_S = 20.0
_EARLY_S = 10.0
"""A token is replaced so long before it expires, so that none expires on its way."""


@dataclass(frozen=True, slots=True)
class _Given:
    """`expires_s`: since the epoch, None where the program does not say."""

    token: str = field(repr=False)
    expires_s: float | None


class Tokens:
    """The token of now. `command` is the `exec` of a kubeconfig's user, `file` its `tokenFile`."""

    def __init__(
        self,
        token: str | None,
        file: Path | None,
        command: Mapping[str, Any] | None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._token = token
        self._file = file
        self._command = command
        self._now_s = now_s
        self._given: _Given | None = None
        self._asking = asyncio.Lock()

    async def current(self) -> str | None:
        """None: there is none. Raises BackendRefused where it cannot be had."""
        if self._file is not None:
            try:
                return self._file.read_text().strip()
            except OSError as error:
                raise BackendRefused(f"{self._file} cannot be read: {error.strerror}") from error
        if self._command is None:
            return self._token
        async with self._asking:
            if self._given is None or self._expired(self._given):
                self._given = await asyncio.to_thread(_run, self._command)
            return self._given.token

    def refused(self, token: str | None) -> bool:
        """The API knows it no more (401); True where another try may have another one."""
        if self._given is not None and self._given.token == token:
            self._given = None
        return self._command is not None

    def _expired(self, given: _Given) -> bool:
        return given.expires_s is not None and self._now_s() >= given.expires_s - _EARLY_S


def _run(command: Mapping[str, Any]) -> _Given:
    """Of a credential plugin. Source: client.authentication.k8s.io ExecCredential."""
    argv = [str(command.get("command")), *map(str, cast("Sequence[object]", command.get("args") or ()))]
    variables = cast("Sequence[Mapping[str, Any]]", command.get("env") or ())
    extra = {str(one["name"]): str(one["value"]) for one in variables}
    try:
        told = subprocess.run(argv, capture_output=True, env={**os.environ, **extra}, timeout=_EXEC_S, check=True)
        status = cast("dict[str, Any]", json.loads(told.stdout))["status"]
        until = status.get("expirationTimestamp")
        expires_s = None if until is None else datetime.fromisoformat(str(until)).timestamp()
        if not status.get("token"):
            raise KeyError("token")
        return _Given(str(status["token"]), expires_s)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = _why_none(error)
        raise BackendRefused(f"{argv[0]}, which the kubeconfig names for the token, fails: {why}") from None


def _why_none(error: Exception) -> str:
    match error:
        case subprocess.CalledProcessError():
            return f"it ended with {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"no answer in {_EXEC_S:g} s"
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return "it tells no token"
