"""Who hangs up gives the model back: a lease does not wait for an answer that nobody reads."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from swapper.demo.models import make_models
from tests.support.router import RealRouter
from tests.support.server import Json, Server, serving

LONG = 3500
"""Tokens: many seconds of med."""
LOOKS, PAUSE_S = 300, 0.05
"""How often it is looked whether the call is at work: each look is a task of the server's beside it."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models = make_models(tmp_path / "models", ["med"])
    router = RealRouter(tmp_path / "router", models, parallel=1, ctx=4096, defaults={"threads": "1"})
    with serving(Server(tmp_path / "swapper", router, {"med": "{vram: 8GiB, default: true}"})) as server:
        yield server


def working(server: Server) -> bool:
    with urllib.request.urlopen(server.router.url + "/slots?model=med", timeout=20) as answer:
        return bool(json.loads(answer.read())[0]["is_processing"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_lease_does_not_wait_for_an_answer_nobody_reads(server: Server, stream: bool) -> None:
    server.chat("med", "hello")
    body = {"model": "med", "messages": [{"role": "user", "content": "go on"}], "max_tokens": LONG, "stream": stream}
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        client.sendall(head.encode() + raw)
        client.settimeout(PAUSE_S)
        for _ in range(LOOKS):
            if working(server):
                break
            with contextlib.suppress(TimeoutError):
                head = client.recv(1000)
                assert stream, f"it was answered before it was seen at work: {head!r}"
                break
        else:
            pytest.fail("it was never seen at work")
    lease = server.lease("encode", wait=60)
    assert lease["state"] == "granted"
    swap = server.get(f"/api/swaps/{lease['swap_id']}")
    saved = [c for c in cast("list[Json]", swap["conversations"]) if c["saved"]]
    assert saved
    assert all(cast("int", talk["tokens"]) < LONG for talk in saved), saved
    server.release(lease)
