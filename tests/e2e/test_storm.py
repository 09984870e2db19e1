"""Everything at once: two hundred clients, three models of which two fit, leases that come and go, hang-ups anywhere.

What is right was computed before, by the server itself: greedy text of dense models, which these give alike in any
company.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from swapper.store import embedded
from tests.support.leaks import footprint, grown
from tests.support.matrix import BACK_S, eventually
from tests.support.router import RealRouter
from tests.support.server import Json, Server
from tests.support.storm import PATIENCE_S, STREAMS, Ask, Storm, Tally, asks, margin, probes, said, streamed
from tests.support.wire import request, wire
from workers.control.command import CommandControl

CLIENTS = 200
EACH = int(os.environ.get("SWAPPER_STORM_CALLS", "6"))
THINGS = 8
CLOSE = 0.01
STORY = "the story of the storm " * 20
PARTS = 5
MIB = 1 << 20
REFUSED = frozenset({"gpu_busy", "load_timeout", "upstream_failed"})
"""What a call may be told while a router that died comes back."""
POLICY = """
policy: {patience: {interactive: 1s, normal: 1s}, overhead: 0.5, idle_restore: 1s}
gateway: {max_wait: 100s, keepalive: 1s}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Of alpha, beta and med two fit; med embeds."""
    models = make_models(tmp_path / "models", ["alpha", "beta", "med"], layers=2)
    overrides = {"med": {"embeddings": "true", "pooling": "mean"}}
    router = RealRouter(tmp_path / "router", models, parallel=4, ctx=4 * 2048, overrides=overrides)
    traits = {name: f"{{vram: 10GiB, default: {str(name != 'med').lower()}}}" for name in models}
    server = Server(tmp_path / "swapper", router, traits, owned=True)
    server.config.write_text(server.config.read_text() + POLICY)
    try:
        server.start()
        home(server)
        yield server
    finally:
        server.stop()
        asyncio.run(server.stop_router())


def home(server: Server) -> None:
    """The card is as it was declared to be."""

    def back() -> bool:
        card = server.get("/api/cards/gpu0")
        return card["phase"] == "steady" and set(cast("list[str]", card["residents"])) == {"llama/alpha", "llama/beta"}

    eventually(lambda: back() or None, "the defaults are back", BACK_S)


def pool(server: Server) -> list[Ask]:
    """All calls of the storm, with what the router answers to them now."""
    found = [ask for model in ("alpha", "beta") for number in clear(server, model) for ask in asks(model, number)]
    embeds = [Ask("embedding", "/v1/embeddings", {"model": "med", "input": f"number {n}"}) for n in range(THINGS)]
    answered = [ask.wanting(said(ask.kind, post(server.url, ask))) for ask in (*found, *embeds)]
    return [*answered, *(ask.streamed() for ask in answered if ask.kind in STREAMS)]


def clear(server: Server, model: str) -> list[int]:
    """Things of which no word is a close choice: rounding, which other calls in the same batch change, tips none."""
    numbers = (n for n in range(200) if all(margin(p.kind, post(server.url, p)) > CLOSE for p in probes(model, n)))
    return list(islice(numbers, THINGS))


def post(url: str, ask: Ask) -> bytes:
    headers = {"Content-Type": "application/json"}
    made = urllib.request.Request(url + ask.path, json.dumps(ask.body).encode(), headers)
    with urllib.request.urlopen(made, timeout=60) as answer:
        return answer.read()


def handover(server: Server, part: int) -> None:
    """A lease comes and goes."""
    lease = server.lease(f"part {part}", wait=60)
    assert lease["state"] == "granted", lease
    server.get("/api/status")
    server.release(lease)


def idle(server: Server) -> bool:
    """No call is anywhere: not here, not at the router."""
    lines = str(server.get("/metrics")["text"]).splitlines()
    here = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("swapper_inflight{"))
    busy = 0
    for model in ("alpha", "beta"):
        with urllib.request.urlopen(f"{server.router.url}/slots?model={model}&autoload=false", timeout=20) as answer:
            busy += sum(bool(slot["is_processing"]) for slot in json.loads(answer.read()))
    return here == 0 and busy == 0


def story(server: Server, *messages: str) -> int:
    """A long conversation's next turn: how many of its tokens were still there."""
    answer = server.chat("alpha", STORY, *messages)
    return cast("int", cast("Json", answer["timings"])["cache_n"])


def router(server: Server) -> list[int]:
    """The processes of the models, and of the router that swapper started."""
    pid = CommandControl("llama", server.router.command, server.state_dir / "servers" / "llama").pid()
    assert pid is not None
    return [*(child.pid for child in psutil.Process(pid).children()), pid]


async def dies_over_a_stream(server: Server) -> None:
    """Kill the router and its models while one of them is in the middle of a long answer."""
    body = {"model": "alpha", "prompt": "go on", "n_predict": 4000, "stream": True, "temperature": 0}
    async with wire(server.url) as client:
        client.patience_s = PATIENCE_S
        await client.send(request(json.dumps(body).encode(), "/completion"))
        begun = await client.some()
        while begun.count(b"data: ") < 20:
            begun += await client.some()
        for process in router(server):
            os.kill(process, signal.SIGKILL)
        got = await client.answer(before=begun)
    seen = streamed("content", got.body)
    assert (got.complete, seen.ended, seen.code) == (True, False, "upstream_failed")


def rage(server: Server, calls: list[Ask], *, dies: int | None = None) -> Tally:
    storm = Storm(server.url, calls, clients=CLIENTS, each=EACH, seed=7, parts=PARTS)

    async def beside(part: int) -> None:
        if part == dies:
            await storm.more(40)  # the models are at work
            await dies_over_a_stream(server)
        elif part:
            await asyncio.to_thread(handover, server, part)

    return asyncio.run(storm.rage(beside))


@pytest.mark.timeout(300)
def test_in_a_storm_every_call_ends_right_and_afterwards_all_is_as_before(server: Server) -> None:
    calls = pool(server)
    home(server)
    choices = cast("list[Json]", server.chat("alpha", STORY)["choices"])
    told = str(cast("Json", choices[0]["message"])["content"])
    process, store = psutil.Process(server.pid), embedded.running(server.state_dir)
    assert store is not None
    before = footprint(process, psutil.Process(store.pid), server.state_dir, server.router.slot_dir)
    tally = rage(server, calls)
    assert tally.wrong == []
    assert set(tally.ends) == {"right", "left"}, tally.ends
    assert tally.calls == CLIENTS * EACH
    eventually(lambda: idle(server) or None, "no call is left")
    home(server)
    assert story(server, told, "and then?") > 400
    after = footprint(process, psutil.Process(store.pid), server.state_dir, server.router.slot_dir)
    allowed = {"fds": 8, "connections": 8, "threads": 8, "store_fds": 8, "rss": 48 * MIB, "store_rss": 48 * MIB}
    rest = dict.fromkeys(("state_files", "state_bytes", "slot_files", "slot_bytes"), 1 << 30)
    assert grown(before, after, allowed | rest) == []
    assert "Traceback" not in server.log_path.read_text()


@pytest.mark.timeout(300)
def test_in_a_storm_whose_router_is_killed_every_call_ends_right_or_with_a_reason(server: Server) -> None:
    calls = pool(server)
    home(server)
    tally = rage(server, calls, dies=1)
    assert tally.wrong == []
    assert set(tally.ends) <= {"right", "left", "broken", *REFUSED}, tally.ends
    assert tally.ends["right"] > CLIENTS * EACH // 2
    eventually(lambda: idle(server) or None, "no call is left")
    home(server)
    handover(server, PARTS)
    assert "Traceback" not in server.log_path.read_text()
