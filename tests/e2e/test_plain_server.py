"""The card changes hands where the resident is a plain llama-server: its process ends, comes back, and is adopted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.matrix import back
from tests.support.plain import PlainServe, with_its_own_server
from tests.support.server import Json

STORY = "once upon a time there was a card that changed hands; " * 12


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PlainServe]:
    with with_its_own_server(tmp_path, make_models(tmp_path, ["alpha"])["alpha"]) as server:
        yield server


def _cached(answer: Json) -> int:
    return cast("dict[str, int]", answer["timings"])["cache_n"]


def _said(answer: Json) -> str:
    return cast("list[dict[str, dict[str, str]]]", answer["choices"])[0]["message"]["content"]


def test_a_lease_ends_its_process_and_its_conversation_is_back_in_a_new_one(server: PlainServe) -> None:
    first = _said(server.chat("alpha", STORY))
    pid = server.control.pid()
    assert pid is not None
    lease = server.lease("render", wait=30)
    assert lease["state"] == "granted"
    assert not psutil.pid_exists(pid)

    server.release(lease)
    answer = server.chat("gpt-4o", STORY, first, "And then?")
    assert _cached(answer) > 0.9 * len(STORY)
    assert server.control.pid() not in (None, pid)
    (back,) = (swap for swap in server.swaps() if "chat" in cast("list[str]", swap["to"]) and swap["lease"])
    assert [(c["model"], c["restored"]) for c in cast("list[Json]", back["conversations"])] == [("chat", True)]


def test_after_kill_9_of_swapper_it_runs_on_and_is_adopted(server: PlainServe) -> None:
    first = _said(server.chat("chat", STORY))
    pid = server.control.pid()
    server.kill()
    assert server.control.pid() == pid
    server.start()
    back(server, "chat")
    assert server.control.pid() == pid
    assert _cached(server.chat("chat", STORY, first, "And then?")) > 0.9 * len(STORY)
    lease = server.lease("render", wait=30)
    assert lease["state"] == "granted"
    assert server.control.pid() is None


def test_its_names_are_listed_once_with_the_context_of_a_slot(server: PlainServe) -> None:
    models = cast("list[Json]", server.get("/v1/models")["data"])
    assert [(m["id"], m["context_length"]) for m in models] == [("alpha", 4096)]
