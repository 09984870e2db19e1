"""By hand on a real llama-server: an unload lets calls end and keeps conversations, and what waits survives a kill."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from swapper.demo.models import make_models
from tests.support.router import RealRouter
from tests.support.server import Json, Server, serving

STORY = "once upon a time there was a card that changed hands; " * 12
LONG = 400
"""Tokens: some seconds of med."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    router = RealRouter(
        tmp_path / "router", make_models(tmp_path / "models", ["med"]), ctx=8192, defaults={"threads": "1"}
    )
    with serving(Server(tmp_path / "swapper", router, {"med": "{vram: 8GiB, default: true}"})) as server:
        yield server


def stream(server: Server, tokens: int) -> Iterator[str]:
    """The data lines of a streamed chat."""
    talk = [{"role": "user", "content": STORY}]
    body = {"model": "med", "messages": talk, "max_tokens": tokens, "stream": True, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()


def card(server: Server) -> Json:
    return cast("list[Json]", server.get("/api/status")["cards"])[0]


def spoken(chunk: str) -> str:
    choices = cast("list[Json]", json.loads(chunk).get("choices"))
    return str(cast("Json", choices[0]["delta"]).get("content") or "") if choices else ""


def test_an_unload_waits_for_a_stream_and_the_next_call_is_warm_and_brings_the_model_back(server: Server) -> None:
    lines = stream(server, LONG)
    heard = [next(lines)]
    with ThreadPoolExecutor(1) as hand:
        unloading = hand.submit(server.post, "/api/models/unload/med", {})
        server.until(lambda _: [one for one in [card(server)] if one["phase"] == "drain"])
        heard += list(lines)
        assert unloading.result(60) == {"text": "OK"}
    assert heard[-1] == "[DONE]"
    assert card(server)["residents"] == []
    (swap,) = server.swaps()[:1]
    assert (swap["cause"], swap["outcome"], swap["from"], swap["forced"]) == ("manual", "done", ["llama/med"], False)
    assert [talk["saved"] for talk in cast("list[Json]", swap["conversations"])] == [True]
    answer = "".join(map(spoken, heard[:-1]))
    again = server.chat("med", STORY, answer, "and then?")
    assert cast("dict[str, int]", again["timings"])["cache_n"] > len(STORY)
    assert card(server)["residents"] == ["llama/med"]


def test_a_stream_that_goes_on_beyond_its_drain_is_ended_with_the_reason(server: Server) -> None:
    lines = stream(server, 10 * LONG)
    heard = [next(lines)]
    command = [sys.executable, "-m", "swapper", "unload", "med", "--drain", "0", "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.startswith("gpu0: llama/med out in")) == (0, True), done
    heard += list(lines)
    assert heard[-1] == "[DONE]"
    assert "drain limit" in heard[-2]
    assert server.swaps()[0]["forced"] is True


def test_a_load_that_waits_for_a_lease_is_carried_out_once_though_swapper_was_killed(server: Server) -> None:
    server.chat("med", STORY)
    lease = server.lease("encode", wait=30)
    server.post("/api/models/med/unload?wait=30", {})  # who is owed to the card comes back by hand alone
    asked = server.post("/api/models/med/load", {})
    assert "held by" in str(asked["explain"])
    server.kill()
    server.start(until="/health")
    (waiting,) = cast("list[Json]", card(server)["by_hand"])
    assert waiting["swap_id"] == asked["swap_id"]
    server.release(lease)
    ended = server.get(f"/api/swaps/{asked['swap_id']}?wait=30")
    assert (ended["outcome"], ended["cause"], ended["to"]) == ("done", "manual", ["llama/med"])
    assert [talk["restored"] for talk in cast("list[Json]", ended["conversations"])] == [True]
    assert len([swap for swap in server.swaps() if swap["to"] == ["llama/med"] and swap["cause"] == "manual"]) == 1
    assert card(server)["by_hand"] == []


def test_by_force_a_command_loses_the_card_and_ends(server: Server) -> None:
    swapper = [sys.executable, "-m", "swapper"]
    where = ["--url", server.url]
    command = [*swapper, "run", *where, "--card", "gpu0", "--grace", "5s", "--", "sleep", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        server.until(lambda _: [one for one in [card(server)] if one["phase"] == "hold"])
        forced = [*swapper, "vacate", "gpu0", "--force", *where]
        done = subprocess.run(forced, capture_output=True, text=True, timeout=100, check=False)
        assert running.wait(60) == 70
    assert (done.returncode, done.stdout) == (0, "gpu0 is proved free\n"), done
    (lease,) = cast("list[Json]", server.get("/api/leases")["items"])
    assert (lease["state"], "was vacated by force" in str(lease["reason"])) == ("revoked", True)
    assert card(server)["residents"] == []
    server.chat("med", STORY)


def test_a_vacated_card_stays_empty_over_a_restart_until_it_is_called_for(server: Server) -> None:
    server.chat("med", STORY)
    assert server.post("/api/cards/gpu0/vacate?wait=30", {})["outcome"] == "done"
    assert server.stop() == 0
    server.start(until="/health")
    server.until(lambda status: [one for one in cast("list[Json]", status["tenants"]) if one["state"] == "unloaded"])
    assert card(server)["residents"] == []
    answer = server.chat("med", STORY)
    assert cast("dict[str, int]", answer["timings"])["cache_n"] >= len(STORY)
