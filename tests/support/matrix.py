"""What the kill matrix shares: a serve that stops where the test says, a client that never gives up, and the promise.

Invariant: a wait here ends on what it waits for, and fails with what was there instead once its limit has passed.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from types import TracebackType
from typing import TypeVar, cast
from uuid import uuid4

import psutil

from swapper.store import embedded
from tests.support.router import RealRouter
from tests.support.server import Json, Server

ROOT = Path(__file__).parents[2]
STORY = "once upon a time there was a card that changed hands; " * 12
BACK_S = 30.0
"""Within so many seconds of the last fault, or of the last lease's end, the declared residents are back."""

T = TypeVar("T")


def eventually(look: Callable[[], T | None], what: str, limit_s: float = BACK_S) -> T:
    """What `look` finds, once it finds something; a server that is away just now finds nothing."""
    deadline, said = time.monotonic() + limit_s, "nothing yet"
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except (OSError, urllib.error.HTTPError) as error:
            said = str(error)
        time.sleep(0.01)
    raise AssertionError(f"not within {limit_s:g} s: {what} ({said})")


def ends(process: psutil.Process) -> None:
    """Kill a process and see it gone (a zombie that init or its parent has not yet reaped is gone)."""
    gone = os.pidfd_open(process.pid)
    try:
        process.kill()
        waiting = select.poll()
        waiting.register(gone, select.POLLIN)
        assert waiting.poll(BACK_S * 1000), f"process {process.pid} did not end"
    finally:
        os.close(gone)


class Held(Server):
    """A serve that stops itself at the points it is told (tests/support/held.py)."""

    def __init__(self, folder: Path, router: RealRouter, models: Mapping[str, str], **options: object) -> None:
        super().__init__(folder, router, models, **options)  # pyright: ignore[reportArgumentType]
        self.program = ("-m", "tests.support.held", str(folder))
        self.env = {"PYTHONPATH": str(ROOT)}

    def hold_at(self, *patterns: str) -> None:
        """From now on it stops at these points, and at no others."""
        fresh = self.folder / "hold.new"
        fresh.write_text("\n".join(patterns))
        fresh.replace(self.folder / "hold")

    def held(self, limit_s: float = BACK_S) -> str:
        """The point it has stopped at, once it has."""
        self._stops(limit_s)
        return (self.folder / "points").read_text().splitlines()[-1]

    def _stops(self, limit_s: float = BACK_S) -> None:
        """Returns once it stopped since that was last asked: the kernel tells each stop once, however short the run.

        It tells that to who waits for it without a limit, so a thread does; one that is left over takes nothing away.
        """
        told: Queue[int] = Queue()

        def wait() -> None:
            with suppress(ChildProcessError):
                seen = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                told.put(seen.si_code if seen else 0)

        Thread(target=wait, daemon=True).start()
        try:
            code = told.get(timeout=limit_s)
        except Empty:
            raise AssertionError(f"not within {limit_s:g} s: the server stops where it was told to") from None
        assert code == os.CLD_STOPPED, f"the server ended before it came there:\n{self.log_path.read_text()}"
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)

    def go_on(self) -> None:
        """Let it run on from where it stopped."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM, also to one that stands at a point; the exit status."""
        self.hold_at()
        if self.running:
            self.go_on()
        return super().stop()

    def freeze(self) -> None:
        """Stop it wherever it is, as a debugger or a full disk queue would."""
        os.kill(self.pid, signal.SIGSTOP)
        self._stops()

    def store(self) -> psutil.Process:
        """The process of its embedded store."""
        found = eventually(lambda: embedded.running(self.state_dir), "the store runs")
        return psutil.Process(found.pid)

    def kill_store(self) -> None:
        """Kill its store as the kernel would, and wait until it is gone."""
        ends(self.store())

    def try_get(self, path: str) -> Json | None:
        """GET; None while the server cannot answer."""
        try:
            return self.get(path)
        except (OSError, urllib.error.HTTPError):
            return None


@contextmanager
def with_its_own_router(folder: Path) -> Generator[Held]:
    """A serve that started its router itself, with the one model `alpha`; both are stopped at the end."""
    server = Held.of_alpha(folder, owned=True)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        asyncio.run(server.stop_router())


@contextmanager
def in_turn(living: Held, leaves: Callable[[Held], None] | None = None) -> Generator[Held]:
    """One test of those that share a serve: its resident has the story before it and after it, and no lease is left.

    `leaves`: what else must be so after it, instead of the story being warm.
    """
    living.hold_at()
    back(living, "llama/alpha")
    living.chat("alpha", STORY)
    yield living
    (leaves or warm)(living)
    assert all(lease["ended_at"] for lease in accounted(living))


class Client:
    """Asks again under the same key until it is answered, as a client does that was promised its lease."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pool = ThreadPoolExecutor(4)
        self._over = False

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._pool.shutdown(wait=False)

    def lease(self, label: str, *, ttl_s: int = 60) -> Future[Json]:
        """A whole lease of the card: done once it is granted or ended."""
        body = json.dumps({"card": "gpu0", "label": label, "ttl_s": ttl_s}).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(uuid4())}

        def ask() -> Json | None:
            request = urllib.request.Request(self._server.url + "/api/leases?wait=5", body, headers, method="POST")
            with urllib.request.urlopen(request, timeout=60) as answer:
                lease = cast("Json", json.loads(answer.read()))
            return None if lease["state"] in ("queued", "preparing") else lease

        return self._pool.submit(self._insist, ask, f"a lease for {label}")

    def release(self, lease: Json) -> Future[Json]:
        """Give it back: done once that was acknowledged."""
        path = f"/api/leases/{lease['id']}?token={lease['token']}"
        return self._pool.submit(self._insist, lambda: self._server.delete(path), "the release")

    def _insist(self, ask: Callable[[], Json | None], what: str) -> Json:
        deadline, said = time.monotonic() + 60, ""
        while not self._over and time.monotonic() < deadline:
            try:
                if (answer := ask()) is not None:
                    return answer
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise
                said = str(error)
            except OSError as error:
                said = str(error)
            time.sleep(0.02)
        raise AssertionError(f"{what} was not answered: {said}")


def back(server: Server, *tenants: str, limit_s: float = BACK_S) -> Json:
    """The card once exactly these tenants live on it, seen loaded, their gates open, and nothing moves."""
    seen: Json = {}

    def look() -> Json | None:
        nonlocal seen
        seen = server.get("/api/status")
        (card,) = cast("list[Json]", seen["cards"])
        there = {t["id"] for t in cast("list[Json]", seen["tenants"]) if t["state"] == "loaded" and t["open"]}
        at_rest = card["phase"] == "steady" and card["residents"] == list(tenants)
        return card if at_rest and there == set(tenants) else None

    try:
        return eventually(look, f"{', '.join(tenants) or 'nobody'} at rest on the card", limit_s)
    except AssertionError as late:
        raise AssertionError(f"{late}; the status is {json.dumps(seen, indent=1)}") from late


def cache_n(answer: Json) -> int:
    """Tokens of the prompt that the server still had."""
    return cast("dict[str, int]", answer["timings"])["cache_n"]


def granted(asked: Future[Json]) -> Json:
    """The lease, which must be granted."""
    lease = asked.result(BACK_S)
    assert lease["state"] == "granted", lease
    return lease


def token(lease: Json) -> int:
    """The lease's fencing token."""
    return cast("int", lease["token"])


def warm(server: Server) -> None:
    """alpha is back, and the conversation of the story was not read again."""
    back(server, "llama/alpha")
    assert cache_n(server.chat("alpha", STORY)) >= len(STORY), "the story was read again"


def status_of(call: Callable[[], object]) -> int:
    """The status of a call that is refused; 200 when it is not."""
    try:
        call()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code
    return 200


def accounted(server: Server) -> list[Json]:
    """All leases, newest first, each in one known state and explained; those that were ended for a reason have one."""
    found = cast("list[Json]", server.get("/api/leases?limit=1000")["items"])
    for lease in found:
        assert lease["state"] in ("queued", "preparing", "granted", "released", "expired", "cancelled", "failed")
        assert lease["explain"], lease
        assert lease["reason"] or lease["state"] not in ("expired", "failed"), lease
    return found


def router_of(server: Held) -> psutil.Process:
    """The router that swapper itself started."""
    record = json.loads((server.state_dir / "servers" / "llama" / "record.json").read_text())
    return psutil.Process(record["pid"])


def child_of(router: psutil.Process) -> psutil.Process:
    """The model's process, once there is one."""
    return eventually(lambda: next(iter(router.children()), None), "the model's process is there")


def sent_to(process: psutil.Process) -> None:
    """Returns once something was sent to the (stopped) process that it has not read; else fails with its sockets."""
    command = process.cmdline()
    port = int(command[command.index("--port") + 1])

    def rows() -> list[list[str]]:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [row for row in lines if int(row[1].split(":")[1], 16) == port]

    try:
        eventually(lambda: any(int(row[4].split(":")[1], 16) for row in rows()), "a request reaches the process")
    except AssertionError as late:
        raise AssertionError(f"{late}; it is {process.status()}, its sockets are {rows()}") from late


@contextmanager
def suspended(process: psutil.Process) -> Generator[psutil.Process]:
    """Stopped within the block; goes on after it, whatever happened (unless it was killed)."""
    process.suspend()
    try:
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, f"process {process.pid} is stopped")
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()
