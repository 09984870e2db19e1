"""What a call waits for breaks under it, on a real router: it is answered, and nobody restarts swapper."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.matrix import STORY, Held, back, ends, eventually, router_of
from tests.support.router import RealRouter
from tests.support.server import Json, Server

ANSWERED_S = 90.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Held]:
    """There is room for one of two; what stands still is given up after two seconds."""
    models = make_models(tmp_path / "models", ["alpha", "beta"])
    router = RealRouter(tmp_path / "router", models)
    traits = {"alpha": "{vram: 16GiB, default: true}", "beta": "{vram: 16GiB}"}
    server = Held(tmp_path / "swapper", router, traits, owned=True)
    server.program = ("-m", "tests.support.impatient")
    try:
        server.start()
        back(server, "llama/alpha")
        yield server
    finally:
        server.stop()
        asyncio.run(server.stop_router())


def process_of(server: Held, model: str) -> psutil.Process:
    """Its process, as soon as there is one."""

    def look() -> psutil.Process | None:
        for process in router_of(server).children():
            with suppress(psutil.Error):
                if model in process.cmdline():
                    return process
        return None

    return eventually(look, f"{model} is being loaded")


def ask(server: Server) -> Json | urllib.error.HTTPError:
    """The answer, or what it was refused with."""
    body = json.dumps({"model": "beta", "messages": [{"role": "user", "content": STORY}], "max_tokens": 4}).encode()
    call = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=ANSWERED_S) as answer:
            return cast("Json", json.loads(answer.read()))
    except urllib.error.HTTPError as refusal:
        return refusal


def hang(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("breaks", ["the router dies", "the router hangs", "its process hangs", "its process dies"])
def test_a_call_is_answered_though_what_it_waits_for_breaks(server: Held, breaks: str) -> None:
    """Or refused in words, and answered when it comes again at the time it was told."""
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(ask, server)
        beta, router = process_of(server, "beta"), router_of(server)
        {
            "the router dies": lambda: ends(router),
            "the router hangs": lambda: hang(router),
            "its process hangs": lambda: hang(beta),
            "its process dies": lambda: ends(beta),
        }[breaks]()
        got = first.result()
    if isinstance(got, urllib.error.HTTPError):
        said = json.loads(got.read())["error"]["message"]
        assert (got.code, "could not be loaded: " in said) == (502, True), said
        assert breaks.startswith("the router"), said
        again = eventually(lambda: served(ask(server)), "it is served", ANSWERED_S)
        got = again
    assert got["choices"]
    back(server, "llama/beta")


def served(got: Json | urllib.error.HTTPError) -> Json | None:
    return None if isinstance(got, urllib.error.HTTPError) else got
