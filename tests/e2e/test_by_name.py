"""Two models that take turns on one card by their names: every call, the one that a swap is for included, is warm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from swapper.demo.models import make_models
from tests.bench.kinds import random_text
from tests.support.router import RealRouter
from tests.support.server import Json, Server, serving

MODELS = ("alpha", "lfm")
TALKS = "ABC"
"""One more than there are slots."""
ROUNDS = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models = make_models(tmp_path / "models", MODELS)
    router = RealRouter(tmp_path / "router", models, defaults={"slot-prompt-similarity": "0.5"})
    traits = {"alpha": "{vram: 16GiB, default: true}", "lfm": "{vram: 16GiB}"}
    with serving(Server(tmp_path / "swapper", router, traits)) as server:
        yield server


def say(server: Server, model: str, messages: list[str], text: str) -> tuple[int, int]:
    """Tokens from the slot, and tokens read."""
    messages.append(text)
    answer = server.chat(model, *messages)
    choice = cast("list[Json]", answer["choices"])[0]
    messages.append(cast("str", cast("Json", choice["message"])["content"]))
    timings = cast("dict[str, int]", answer["timings"])
    return timings["cache_n"], timings["prompt_n"]


def test_models_that_take_turns_by_name_keep_more_conversations_than_slots(server: Server) -> None:
    """The one used longest ago is asked for first: it lies on disk, and its call is what the swap is for."""
    talks: dict[tuple[str, str], list[str]] = {}
    for number, model in enumerate(MODELS):
        for count, name in enumerate(TALKS):
            talks[model, name] = []
            say(server, model, talks[model, name], random_text(10 * number + count, 700 + 40 * count))
    read: list[tuple[str, str, int, int]] = []
    for turn in range(ROUNDS):
        for model in MODELS:
            for step in (0, 1):
                name = TALKS[(2 * turn + step) % len(TALKS)]
                read.append((model, name, *say(server, model, talks[model, name], f"and now {turn}?")))
    assert [one for one in read if one[2] < one[3]] == []
    assert len(server.swaps()) >= 2 * ROUNDS - 1
