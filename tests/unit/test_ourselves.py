"""Whose a process is: serve, its store and its servers with all around and below them are ours, others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import psutil
import pytest

from swapper.app import running
from swapper.config import load
from swapper.ourselves import Ourselves
from swapper.store import embedded
from workers.control.command import CommandControl

CONFIG = """
listen: 127.0.0.1:0
state_dir: state
cards: {gpu0: {probe: declared, vram: 24GiB}}
tenants: {}
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[CommandControl]:
    """A shell that stands around another process, as one stands around a server."""
    control = CommandControl("llama", ["sh", "-c", "sleep 1000; exit 1"], tmp_path)
    await control.ensure()
    yield control
    await control.stop(0)


def test_serve_itself_and_its_store_are_ours() -> None:
    ours = Ourselves(store=os.getppid)
    assert ours.whose(os.getpid()) == "swapper serve itself"
    assert ours.whose(os.getppid()) == "swapper's own store"
    assert Ourselves().whose(os.getppid()) is None


async def test_a_server_its_launcher_and_what_runs_below_it_are_ours(server: CommandControl) -> None:
    ours = Ourselves(servers={"llama": server.pid, "other": lambda: None})
    pid = server.pid()
    assert pid is not None
    process = psutil.Process(pid)
    while not (below := process.children()):
        assert process.is_running()
    for one in (pid, process.ppid(), below[0].pid):
        assert ours.whose(one) == "a process of the server llama, which swapper runs"
    assert process.ppid() != os.getpid()


def test_what_others_run_below_the_process_that_serves_is_theirs() -> None:
    with subprocess.Popen(["sleep", "1000"]) as job:
        assert Ourselves(store=lambda: None, servers={"llama": lambda: None}).whose(job.pid) is None
        job.kill()
        job.wait()
        assert Ourselves().whose(job.pid) is None


LISTENING = """
import socket, subprocess, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin)
    print(server.getsockname()[1], child.pid, flush=True)
    child.wait()
"""


def test_who_listens_at_the_address_of_a_server_is_that_server_with_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port, child = map(int, server.stdout.readline().split())
        there = Ourselves(urls={"llama": f"http://127.0.0.1:{port}"})
        elsewhere = Ourselves(urls={"llama": f"http://10.0.0.1:{port}"})
        for pid in (server.pid, child):
            assert there.whose(pid) == "a process of the server llama, which swapper loads and unloads"
            assert elsewhere.whose(pid) is None
        server.communicate(b"\n")


async def test_a_lease_that_names_serve_or_its_store_as_its_holder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "swapper.yaml"
    path.write_text(CONFIG)
    config = load(path, {})
    async with running(config) as serve, aiohttp.ClientSession(serve.url) as http:
        store = embedded.running(config.state_dir)
        assert store is not None
        for pid, who in ((os.getpid(), "swapper serve itself"), (store.pid, "swapper's own store")):
            async with http.post("/api/leases", json={"holder_pid": pid}) as answer:
                assert answer.status == 422
                assert f"{pid} is {who}" in (await answer.json())["detail"]
