"""A card falls into a fault and out of it, and a person is told: by the real apprise, through kills of serve.

The fault: a process keeps the card that its lease named, though the lease was given back.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.notify import speaker
from swapper.notify.notifier import EXECUTOR
from swapper.store import embedded
from swapper.store.redis import RedisStore
from tests.support.matrix import eventually
from tests.support.router import RealRouter, free_port
from tests.support.server import Json, Server
from tests.support.told import Told, told

SECRET = "hunter2"


class Telling(Server):
    """A serve over a card without tenants, which tells somebody."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, RealRouter(folder / "router", {}), {})
        self.program = ("-m", "tests.support.hasty")
        self.env = {"WHOM": url}
        self.config.write_text(
            f"""
listen: 127.0.0.1:{self.port}
state_dir: {self.state_dir}
notify: [{{url_env: WHOM}}]
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
"""
        )

    def phase(self) -> str:
        (card,) = cast("list[Json]", self.get("/api/status")["cards"])
        return str(card["phase"])


@contextmanager
def fault(server: Server) -> Generator[subprocess.Popen[bytes]]:
    """A process that keeps the card after its lease was given back, while somebody waits; it ends with the block."""
    holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        asked = {"card": "gpu0", "label": "render", "ttl_s": 60, "holder_pid": holder.pid}
        lease = server.post("/api/leases?wait=20", asked)
        assert lease["state"] == "granted", lease
        server.release(lease)
        server.lease("next")
        yield holder
    finally:
        end(holder)


def end(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    holder.wait(10)


@pytest.fixture
def whom() -> Iterator[Told]:
    with told() as server:
        yield server


@pytest.fixture
def server(tmp_path: Path, whom: Told) -> Iterator[Telling]:
    server = Telling(tmp_path / "swapper", f"ntfy://ann:{SECRET}@127.0.0.1:{whom.port}/gpu")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def in_fault(server: Telling) -> None:
    eventually(lambda: server.phase() == "fault", "the card is at fault")


def told_until_it_is_free(whom: Told) -> list[str]:
    """The messages up to the one that says so; a start may be the moment at which it is seen."""
    texts = [str(whom.next()["message"])]
    while "gpu0 is free again" not in texts[-1]:
        texts.append(str(whom.next()["message"]))
    return texts


def no_speaker() -> None:
    """Whatever spoke for a serve has ended."""

    def gone() -> bool:
        found = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
        return not any(speaker.__file__ in command for command in found)

    eventually(gone, "the process that sent has ended")


def test_a_fault_and_its_end_are_told_and_no_secret_is_in_the_log(server: Telling, whom: Told) -> None:
    with fault(server) as holder:
        came = whom.next()
        assert (came["topic"], came["title"]) == ("gpu", "gpu0 is at fault")
        assert f"held by pid {holder.pid} (cat)" in str(came["message"])
        assert str(came["message"]) in server.alerts()
        end(holder)
        assert whom.next()["title"] == "gpu0 is free again"
    assert SECRET not in server.log_path.read_text()


def test_killed_between_the_fault_and_the_sending_it_tells_after_its_restart_and_once(
    server: Telling, whom: Told
) -> None:
    with fault(server) as holder:
        in_fault(server)
        server.kill()
        assert whom.rest() == []
        server.start(until="/health")  # a card at fault is not ready
        end(holder)
        texts = told_until_it_is_free(whom)
        assert sum("held by pid" in text for text in texts) == 1


def test_killed_while_it_sends_it_tells_again_rather_than_never(server: Telling, whom: Told) -> None:
    whom.silent.set()
    with fault(server):
        assert whom.next()["title"] == "gpu0 is at fault"
        server.kill()
        whom.silent.clear()
        server.start(until="/health")  # a card at fault is not ready
        assert whom.next()["title"] == "gpu0 is at fault"
    no_speaker()


def test_killed_after_it_told_it_does_not_tell_again(server: Telling, whom: Told) -> None:
    with fault(server) as holder:
        whom.next()
        eventually(lambda: all_sent(server), "it is noted")
        server.kill()
        server.start(until="/health")  # a card at fault is not ready
        end(holder)
        assert not any("held by pid" in text for text in told_until_it_is_free(whom))


def all_sent(server: Server) -> bool:
    """Whether it is noted that nothing waits to be sent."""

    async def noted() -> str:
        found = embedded.running(server.state_dir)
        assert found is not None
        store = await RedisStore.open(found.url)
        try:
            return await store.noted(EXECUTOR) or "{}"
        finally:
            await store.close()

    return json.loads(asyncio.run(noted()))["unsent"] == {}


def test_with_nobody_listening_there_leases_go_on_and_the_failure_is_said_once(tmp_path: Path) -> None:
    port = free_port()
    server = Telling(tmp_path / "swapper", f"ntfy://ann:{SECRET}@127.0.0.1:{port}/gpu")
    server.start()
    try:
        line = "a notification could not be sent"
        with fault(server):
            eventually(lambda: line in server.log_path.read_text(), "the failure is said")
        assert server.lease("later", wait=20)["state"] == "granted"
        with told(port) as whom:
            came = whom.next(30)
            assert came["title"] in ("gpu0 is at fault", "gpu0 is at fault, and 1 earlier or later")
        text = server.log_path.read_text()
        assert text.count(line) == 1
        assert SECRET not in text
        assert "notify.0 (ntfy)" in text
    finally:
        server.stop()
