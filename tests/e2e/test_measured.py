"""A whole serve on a card that is measured: it gives the card on when the driver says so, and not before."""

from __future__ import annotations

import asyncio
import os
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from swapper.demo.models import make_models
from tests.support import nvml
from tests.support.matrix import back
from tests.support.nvml import FakeNvml, Gpu, Process
from tests.support.plain import PlainServe, PlainServer
from tests.support.server import Json

GPU = "GPU-1b0c"


class Measured(PlainServe):
    """Over one llama-server, on the GPU that `gpu` is; how much that has nobody configured."""

    def __init__(self, folder: Path, plain: PlainServer) -> None:
        super().__init__(folder, plain)
        self.nvml = FakeNvml(folder, Gpu(GPU, total_mib=24_576, reserved_mib=300))
        self.env = self.nvml.env
        text = self.config.read_text().replace("{probe: declared, vram: 24GiB}", "{probe: nvml, reserve: 512MiB}")
        self.config.write_text(text)

    def holds(self, *processes: Process, used_mib: int) -> None:
        """What the driver says from now on."""
        gpu = self.nvml.gpus[0]
        gpu.used_mib, gpu.processes = used_mib, list(processes)
        self.nvml.tell()

    def card(self) -> Json:
        return cast("list[Json]", self.get("/api/status")["cards"])[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Measured]:
    plain = PlainServer(tmp_path / "plain", make_models(tmp_path, ["alpha"])["alpha"])
    server = Measured(tmp_path / "swapper", plain)
    try:
        server.start()
        back(server, "chat")
        yield server
    finally:
        server.nvml.hang, server.nvml.driver = False, 0
        server.nvml.tell()
        server.stop()
        asyncio.run(server.control.stop())


def holders(status: Json) -> list[Json]:
    return cast("list[Json]", cast("list[Json]", status["cards"])[0]["holders"])


def lease(status: Json, state: str) -> list[Json]:
    return [one for one in cast("list[Json]", status["leases"]) if one["state"] == state]


def test_a_lease_waits_for_memory_that_comes_back_late_and_names_who_keeps_it(server: Measured) -> None:
    pid = server.process().pid
    server.holds(Process(pid, 6_000), used_mib=6_000)
    (seen,) = server.until(holders)
    traits = {"name": "chat", "pid": pid, "mib": 6_000, "tenant": "chat", "lease": None, "foreign": False}
    assert {key: seen[key] for key in traits} == traits
    assert server.card()["capacity_mib"] == 24_576 - 512
    asked = server.lease("encode")
    server.until(lambda _: [] if server.control.pid() is not None else [{}])  # its process is gone, its memory is not
    server.holds(Process(os.getpid(), 400), used_mib=4_000)
    server.until(lambda status: [one for one in holders(status) if one["foreign"] and one["pid"] == os.getpid()])
    assert server.get(f"/api/leases/{asked['id']}?wait=1")["state"] == "preparing"
    server.holds(used_mib=0)
    (granted,) = server.until(lambda status: lease(status, "granted"))
    assert granted["env"] == {"CUDA_VISIBLE_DEVICES": GPU, "HIP_VISIBLE_DEVICES": None}
    server.release(granted)
    back(server, "chat")


def test_a_driver_that_goes_is_told_and_believed_in_nothing_until_it_is_back(server: Measured) -> None:
    server.nvml.driver = nvml.NOT_LOADED
    server.nvml.tell()
    server.until(lambda status: [{}] if "the VRAM of gpu0 cannot be read" in str(status["problems"]) else [])
    card = server.card()
    assert cast("Json", card["vram"])["free_mib"] is None
    assert "is not loaded; load it" in str(cast("Json", card["probe"])["unread"])
    asked = server.lease("encode")
    server.until(lambda _: [] if server.control.pid() is not None else [{}])
    assert server.get(f"/api/leases/{asked['id']}?wait=1")["state"] == "preparing"
    server.nvml.driver, server.nvml.boot = 0, 2
    server.nvml.tell()
    (granted,) = server.until(lambda status: lease(status, "granted"))
    assert granted["id"] == asked["id"]


def test_a_driver_that_hangs_keeps_nobody_from_an_answer(server: Measured) -> None:
    server.nvml.hang = True
    server.nvml.tell()
    assert server.chat("chat", "A word, please.")["choices"]
    server.until(lambda status: [{}] if "has not answered for" in str(status["problems"]) else [])
    assert server.chat("chat", "Another one.")["choices"]
    with pytest.raises(urllib.error.HTTPError):
        server.get("/ready")
    assert server.stop() == 0
