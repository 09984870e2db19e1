"""A whole serve on a measured card: who takes what is not theirs is named, told and acted on; needs are learned."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from swapper.demo.models import make_models
from tests.support.matrix import back
from tests.support.nvml import FakeNvml, Gpu, Process
from tests.support.plain import PlainServe, PlainServer
from tests.support.server import Json
from tests.support.told import Told, told

SOON_S = 15.0
"""Two looks, the turn after them, and a slow machine."""


class Watched(PlainServe):
    """Over one llama-server, on a GPU of 24 GiB that is measured; `vram`: what its need is written as."""

    def __init__(self, folder: Path, plain: PlainServer, whom: Told, vram: str, traits: str = "") -> None:
        super().__init__(folder, plain)
        self.nvml = FakeNvml(folder, Gpu("GPU-1b0c", total_mib=24_576))
        self.env = {**self.nvml.env, "WHOM": f"ntfy://127.0.0.1:{whom.port}/gpu"}
        text = self.config.read_text().replace("{probe: declared, vram: 24GiB}", "{probe: nvml, reserve: 512MiB}")
        text = text.replace("vram: 8GiB, ", f"{vram}{traits}")
        self.config.write_text(text + "notify: [{url_env: WHOM}]\n")

    def holds(self, **mib: int) -> None:
        """What its llama-server holds, and who is foreign (`pid_N`), from now on."""
        sizes = {self.process().pid if name == "chat" else int(name[4:]): size for name, size in mib.items()}
        gpu = self.nvml.gpus[0]
        gpu.used_mib = sum(sizes.values())
        gpu.processes = [Process(pid, size) for pid, size in sizes.items()]
        self.nvml.tell()

    def tenant(self) -> Json:
        return cast("list[Json]", self.get("/api/status")["tenants"])[0]

    def heard(self, word: str) -> list[str]:
        return [text for text in self.alerts() if word in text]


@pytest.fixture
def whom() -> Iterator[Told]:
    with told() as found:
        yield found


@pytest.fixture
def server(tmp_path: Path, whom: Told, request: pytest.FixtureRequest) -> Iterator[Watched]:
    plain = PlainServer(tmp_path / "plain", make_models(tmp_path, ["alpha"])["alpha"])
    vram, traits = cast("tuple[str, str]", getattr(request, "param", ("vram: 8GiB, ", "")))
    server = Watched(tmp_path / "swapper", plain, whom, vram, traits)
    try:
        server.start()
        back(server, "chat")
        yield server
    finally:
        server.stop()
        asyncio.run(server.control.stop())


@pytest.fixture
def library() -> Iterator[subprocess.Popen[bytes]]:
    """A process of nobody's."""
    found = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        yield found
    finally:
        assert found.stdin is not None
        found.stdin.close()
        found.wait(10)


def test_who_is_foreign_while_a_swap_waits_is_named_to_the_lease_and_told(
    server: Watched, whom: Told, library: subprocess.Popen[bytes]
) -> None:
    server.holds(chat=6000)
    server.until(lambda status: [t for t in cast("list[Json]", status["tenants"]) if t["used_mib"] == 6000])
    asked = server.lease("encode")
    server.until(lambda _: [] if server.control.pid() is not None else [{}])
    began = time.monotonic()
    server.holds(**{f"pid_{library.pid}": 10_700})
    named = f"pid {library.pid} (cat)"
    server.until(lambda status: [{}] if named in str(status["problems"]) else [], limit_s=SOON_S)
    came = whom.next()
    assert time.monotonic() - began < SOON_S
    assert came["title"] == "VRAM of gpu0 is taken by others"
    (said,) = server.heard("neither a tenant's nor a lease's")
    assert said == came["message"]
    assert f"{named} holds 10,700 MiB of gpu0 since " in said
    assert "no lease can have the whole card" in said
    lease = server.get(f"/api/leases/{asked['id']}")
    assert lease["state"] == "preparing"
    assert f"beside {named}, which holds 10,700 MiB and is foreign" in str(lease["explain"])
    (card,) = cast("list[Json]", server.get("/api/status")["cards"])
    assert [one["pid"] for one in cast("list[Json]", card["foreign"])] == [library.pid]
    server.holds()
    granted = server.get(f"/api/leases/{asked['id']}?wait=20")
    assert granted["state"] == "granted"
    assert whom.next()["title"] == "VRAM of gpu0 is taken by others no more"
    server.release(granted)
    back(server, "chat")
    assert len(server.heard(named)) == 2


def test_a_tenant_that_grows_is_told_of_once_and_once_when_it_shrinks_and_serves_all_the_while(
    server: Watched, whom: Told
) -> None:
    server.holds(chat=8000)
    server.until(lambda status: [t for t in cast("list[Json]", status["tenants"]) if t["used_mib"] == 8000])
    pid = server.process().pid
    began = time.monotonic()
    server.holds(chat=12_000)
    came = whom.next()
    assert time.monotonic() - began < SOON_S
    assert came["title"] == "chat takes more of gpu0 than its need"
    assert "chat takes 12,000 MiB of gpu0 since " in str(came["message"])
    assert server.tenant()["over_need"] is not None
    assert server.chat("chat", "A word, please.")["choices"]
    server.holds(chat=8100)
    assert whom.next()["title"] == "chat keeps to its need again"
    server.until(lambda status: [t for t in cast("list[Json]", status["tenants"]) if t["over_need"] is None])
    assert len(server.heard("chat takes")) == 1
    assert len(server.heard("keeps to its need")) == 1
    assert server.process().pid == pid


@pytest.mark.parametrize("server", [("vram: 8GiB, ", "on_over: restart, ")], indirect=True)
def test_one_that_is_to_be_restarted_comes_back_with_its_conversation(server: Watched, whom: Told) -> None:
    server.chat("chat", "Once there was a fox. " * 20)
    old = server.process().pid
    server.holds(chat=12_000)
    assert whom.next()["title"] == "chat takes more of gpu0 than its need"
    server.until(lambda _: [] if server.control.pid() == old else [{}])
    server.holds()
    back(server, "chat")
    (swap,) = [found for found in server.swaps() if found["cause"] == "watchdog"]
    assert swap["outcome"] == "done"
    assert [(talk["saved"], talk["restored"]) for talk in cast("list[Json]", swap["conversations"])] == [(True, True)]
    assert server.process().pid != old


@pytest.mark.parametrize("server", [("", "")], indirect=True)
def test_what_nobody_wrote_is_estimated_and_then_measured_and_known_after_a_restart(server: Watched) -> None:
    before = server.tenant()
    assert before["need_from"] == "estimated"
    assert isinstance(before["need_mib"], int)
    assert 512 <= before["need_mib"] < 2048
    server.holds(chat=5000)
    (seen,) = server.until(lambda status: [t for t in cast("list[Json]", status["tenants"]) if t["need_mib"] == 5056])
    assert seen["need_from"] == "measured"
    server.stop()
    server.start()
    (again,) = server.until(lambda status: [t for t in cast("list[Json]", status["tenants"]) if t["need_mib"] == 5056])
    assert again["need_from"] == "measured"
