"""A load that fails on a real router: all who wait hear its own words and when the next try is; then it rests."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.matrix import STORY, Held, back, cache_n, ends, eventually, router_of
from tests.support.router import RealRouter

FITS_NOBODY = 200_000_000
"""Tokens of context that no machine has the memory for."""
LLAMAS = ("(exit code 1): ", "log: ")
"""What is said beside llama-server's own words."""


@dataclass(frozen=True)
class Answer:
    """How a call was refused."""

    status: int
    retry_s: int
    text: str
    took_s: float


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One that loads, three that do not, and one that would; there is room for one of them."""
    folder = tmp_path_factory.mktemp("failed")
    found = make_models(folder, ["alpha", "beta"])
    cut = folder / "cut.gguf"
    cut.write_bytes(found["alpha"].read_bytes()[:100_000])
    models = {**found, "cut": cut, "wrong": found["alpha"], "huge": found["alpha"], "gone": folder / "no-such.gguf"}
    overrides = {"wrong": {"ctx-size": "abc"}, "huge": {"ctx-size": str(FITS_NOBODY)}}
    router = RealRouter(folder / "router", models, overrides=overrides)
    traits = {name: "{vram: 16GiB}" for name in models} | {"alpha": "{vram: 16GiB, default: true}"}
    server = Held(folder / "swapper", router, traits, owned=True)
    try:
        server.start()
        back(server, "llama/alpha")
        yield server
    finally:
        server.stop()
        asyncio.run(server.stop_router())


def refused(server: Held, model: str) -> Answer:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    asked = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    began = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(asked, timeout=60)
    text = json.loads(error.value.read())["error"]["message"]
    return Answer(error.value.code, int(error.value.headers["Retry-After"]), text, time.monotonic() - began)


def all_hear(server: Held, model: str) -> Answer:
    """What two who waited are told; whoever comes later hears the same at once."""
    with ThreadPoolExecutor(2) as clients:
        first, second = clients.map(refused, (server, server), (model, model))
    later = refused(server, model)
    for one in (first, second, later):
        assert (one.status, one.text.split("; next try")[0]) == (502, first.text.split("; next try")[0])
        assert f"; next try in {one.retry_s} s" in one.text
        assert 0 < one.retry_s <= 31
    assert later.took_s < 1
    assert later.retry_s <= first.retry_s
    return first


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param("cut", ("not within the file bounds", *LLAMAS), id="a file that was cut"),
        pytest.param("gone", ("No such file or directory", *LLAMAS), id="a file that is not there"),
        pytest.param("wrong", ("--ctx-size", *LLAMAS), id="a preset that cannot be read"),
        pytest.param("huge", ("of the machine's memory",), id="more memory than there is"),
    ],
)
def test_all_who_wait_hear_the_servers_own_words_and_the_resident_comes_back(
    server: Held, model: str, words: tuple[str, ...]
) -> None:
    server.chat("alpha", STORY)
    said = all_hear(server, model)
    assert [word for word in words if word not in said.text] == [], said.text
    back(server, "llama/alpha")
    assert cache_n(server.chat("alpha", STORY)) >= len(STORY)


def test_one_that_is_killed_while_it_loads_is_tried_once_more_and_then_serves(server: Held) -> None:
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(server.chat, "beta", STORY)
        ends(eventually(lambda: child(server, "beta"), "it is being loaded"))
        assert answer.result()["choices"]


def child(server: Held, model: str) -> psutil.Process | None:
    for process in router_of(server).children():
        with suppress(psutil.Error):
            if model in process.cmdline():
                return process
    return None
