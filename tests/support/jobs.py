"""A healthy job: a real command under a real `swapper run`, which holds the card and beats until the test ends it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from typing import cast

from tests.support.matrix import BACK_S, ROOT, eventually
from tests.support.server import Json, Server


class Job:
    """`swapper run -- cat`: it ends, with status 0, when its input does. `lease` is the one it holds."""

    def __init__(self, server: Server, ttl_s: int) -> None:
        program = [sys.executable, "-m", "swapper", "run", "--url", server.url, "--ttl", f"{ttl_s}s", "--label", "job"]
        self._server = server
        self._process = subprocess.Popen([*program, "--", "cat"], stdin=subprocess.PIPE, cwd=ROOT)
        self.lease = eventually(self._holding, "the job holds the card")

    def expiry(self) -> datetime:
        """When its lease ends without a further beat."""
        return datetime.fromisoformat(str(self._server.get(f"/api/leases/{self.lease}")["expires_at"]))

    def state(self) -> str:
        """The state of its lease."""
        return str(self._server.get(f"/api/leases/{self.lease}")["state"])

    def lives(self) -> bool:
        """Whether the command runs, and holds."""
        return self._process.poll() is None and self.state() == "granted"

    def end(self) -> int:
        """End its input; the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(BACK_S)

    def _holding(self) -> str | None:
        leases = cast("list[Json]", self._server.get("/api/leases?state=granted")["items"])
        return next((str(lease["id"]) for lease in leases if lease["label"] == "job"), None)


@contextmanager
def job(server: Server, *, ttl_s: int = 5) -> Generator[Job]:
    """A job that has the card; ended at the end, and its status must be 0."""
    made = Job(server, ttl_s)
    status = None
    try:
        yield made
    finally:
        status = made.end()
    assert status == 0, "the command was ended"
    assert made.state() == "released"
