"""Two serves for one host on one store, which share no file: one obeys, and one that was stopped for long is fenced."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper.demo.models import make_models
from swapper.store import embedded
from tests.support.matrix import Held, back
from tests.support.router import RealRouter
from tests.support.server import ALPHA, Server

UNKEPT = "{strategy: off}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The address of a store that is nobody's of the two."""
    yield asyncio.run(embedded.start(tmp_path / "store")).url
    asyncio.run(embedded.stop(tmp_path / "store"))


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RealRouter]:
    router = RealRouter(tmp_path / "router", make_models(tmp_path, ["alpha"]))
    router.start()
    yield router
    router.stop()


def on(server: Server, store: str) -> Server:
    with server.config.open("a") as config:
        config.write(f"redis: {store}\n")
    return server


def state_of(router: RealRouter) -> str:
    with urllib.request.urlopen(f"{router.url}/models", timeout=10) as answer:
        return json.load(answer)["data"][0]["status"]["value"]


def test_the_second_ends_at_once_with_a_sentence_and_the_first_goes_on(
    tmp_path: Path, router: RealRouter, store: str
) -> None:
    first = on(Server(tmp_path / "one", router, ALPHA, snapshots=UNKEPT), store)
    second = on(Server(tmp_path / "two", router, ALPHA, snapshots=UNKEPT), store)
    try:
        first.start()
        back(first, "llama/alpha")
        command = [sys.executable, "-m", "swapper", "serve", "-c", str(second.config)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert ended.returncode == 2
        who = f"host main: another agent obeys for it in this store (swapper, process {first.pid} on "
        assert who in ended.stderr.splitlines()[-1]
        first.release(first.lease("after", wait=30))
        back(first, "llama/alpha")
    finally:
        first.stop()


@pytest.mark.parametrize("verb", ["load", "release"])
def test_a_serve_stopped_amid_a_verb_until_another_took_its_host_does_nothing_any_more(
    tmp_path: Path, router: RealRouter, store: str, verb: str
) -> None:
    """Stopped right before the verb's first request; the other meanwhile brings the model back, or hands it over."""
    first = Held(tmp_path / "one", router, ALPHA, snapshots=UNKEPT)
    on(first, store)
    second = on(Server(tmp_path / "two", router, ALPHA, snapshots=UNKEPT), store)
    try:
        first.start()
        back(first, "llama/alpha")
        if verb == "release":
            first.hold_at("before release")
            lease = first.lease("one")
        else:
            lease = first.lease("one", wait=30)
            first.hold_at("before load")
            first.release(lease)
        first.held()
        second.start()
        if verb == "release":
            second.release(second.get(f"/api/leases/{lease['id']}?wait=60"))
        back(second, "llama/alpha")
        if verb == "load":
            lease = second.lease("two", wait=60)
            assert lease["state"] == "granted"
        before = "loaded" if verb == "release" else "unloaded"
        assert state_of(router) == before
        first.hold_at()
        first.go_on()
        assert first.wait() == 1
        assert "this one, which was not heard for a while, stops" in first.log_path.read_text()
        assert state_of(router) == before
        if verb == "load":
            second.release(lease)
            back(second, "llama/alpha")
    finally:
        first.stop()
        second.stop()
