"""A client leaves while the model it called is loaded: the load is stopped, and who had to leave is back, warm."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.matrix import STORY, back, cache_n, eventually, suspended
from tests.support.router import RealRouter
from tests.support.server import Json, Server, serving

MODELS = ("alpha", "beta")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models = make_models(tmp_path / "models", MODELS)
    router = RealRouter(tmp_path / "router", models)
    traits = {"alpha": "{vram: 16GiB, default: true}", "beta": "{vram: 16GiB}"}
    with serving(Server(tmp_path / "swapper", router, traits)) as server:
        back(server, "llama/alpha")
        yield server


def called(server: Server, model: str) -> socket.socket:
    """A client that asks for a model and waits."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": STORY}], "max_tokens": 4}).encode()
    line = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return line


def process_of(server: Server, model: str) -> psutil.Process | None:
    """Its process, also before it has loaded."""
    for child in psutil.Process(server.router.pid).children():
        with suppress(psutil.Error):
            if model in child.cmdline():
                return child
    return None


def test_a_load_that_its_only_client_left_is_stopped_and_the_resident_comes_back_warm(server: Server) -> None:
    server.chat("alpha", STORY)
    client = called(server, "beta")
    with suspended(eventually(lambda: process_of(server, "beta"), "it is being loaded")) as beta:
        client.close()
        swap = server.next_swap(lambda one: one["cause"] == "model llama/beta" and one["outcome"] is not None)
        assert (swap["outcome"], swap["reason"]) == ("compensated", "nobody waits for llama/beta any more")
        assert not beta.is_running()
    steps = [(step["step"], step["tenant"]) for step in cast("list[Json]", swap["steps"])]
    assert ("release", "llama/beta") in steps
    back(server, "llama/alpha")
    assert cache_n(server.chat("alpha", STORY)) >= len(STORY)


def test_a_client_that_left_while_it_waited_for_a_lease_causes_no_swap(server: Server) -> None:
    lease = server.lease("render", wait=30)
    client = called(server, "beta")
    eventually(lambda: waiting(server) == ["llama/beta"], "it waits")
    client.close()
    eventually(lambda: not waiting(server), "it is gone")
    server.release(lease)
    back(server, "llama/alpha")
    assert [swap["cause"] for swap in server.swaps() if "beta" in str(swap["cause"])] == []


def waiting(server: Server) -> list[str]:
    """The tenants that calls wait for."""
    status = server.get("/api/status")
    return [str(one["tenant"]) for one in cast("list[Json]", status["demand"]) if one["waiting"]]
