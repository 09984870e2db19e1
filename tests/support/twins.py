"""A serve over one model, and a twin of its llama-server without swapper, asked the same things.

Invariant: both routers have the same preset, so that what they answer, and how long they take, may be compared within
one run; the twin is never unloaded.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tests.support.matrix import back, eventually
from tests.support.router import RealRouter
from tests.support.server import Json, Server

ROLES = ("user", "assistant")
Content = str | list[Json]


@dataclass(frozen=True, slots=True)
class Turn:
    """One streamed answer: milliseconds to its first text, tokens of the prompt that were there and that were read."""

    first_ms: float
    cache_n: int
    prompt_n: int
    text: str


def chat(model: str, messages: Sequence[Content], max_tokens: int, **more: object) -> Json:
    """The body of a chat call; the messages alternate between user and assistant."""
    talk = [{"role": ROLES[i % 2], "content": content} for i, content in enumerate(messages)]
    return {"model": model, "messages": talk, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more}


def ask(url: str, body: Mapping[str, object]) -> Turn:
    """Send a streaming chat call and read it to its end."""
    start = time.perf_counter()
    first_ms, text, timings = 0.0, "", dict[str, int]()
    with post(f"{url}/v1/chat/completions", body) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if piece and not text:
                first_ms = (time.perf_counter() - start) * 1000
            text += piece
            timings = chunk.get("timings") or timings
    return Turn(first_ms, timings["cache_n"], timings["prompt_n"], text)


def post(url: str, body: Mapping[str, object]):  # noqa: ANN201  # urllib names no type for its answers
    """POST JSON; the open answer."""
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300)


class Twins:
    """`server`: the serve; `twin`: the other router."""

    def __init__(self, model: str, server: Server, twin: RealRouter) -> None:
        self.model = model
        self.server = server
        self.twin = twin

    def handover(self) -> None:
        """A job takes the card and gives it back; the resident serves again."""
        self.take_and_give()
        back(self.server, f"llama/{self.model}")

    def take_and_give(self) -> None:
        """The same, and returns as soon as the card was given back."""
        lease = self.server.lease("job", wait=120)
        assert lease["state"] == "granted", lease
        self.server.release(lease)

    def came_back(self) -> list[Json]:
        """The conversations of the last swap back, once each of them is in a slot, on disk, or told cold."""

        def look() -> list[Json] | None:
            swap = next(swap for swap in self.server.swaps() if swap["to"])
            found = cast("list[Json]", swap["conversations"])
            waiting = [c for c in found if c["strategy"] == "replay" and not (c["restored"] or c["result"])]
            return found if found and not waiting else None

        return eventually(look, "every conversation is back or told cold", 120)

    def say(self, messages: Sequence[Content], max_tokens: int = 8) -> Turn:
        """Through swapper."""
        return ask(self.server.url, chat(self.model, messages, max_tokens))

    def warm_path(self, messages: Sequence[Content], max_tokens: int = 8) -> Turn:
        """The same at the twin, which never was unloaded."""
        return ask(self.twin.url, chat(self.model, messages, max_tokens))

    def read_again(self, messages: Sequence[Content], max_tokens: int = 8) -> Turn:
        """The same at the twin, which is told to use nothing that it has."""
        return ask(self.twin.url, chat(self.model, messages, max_tokens, cache_prompt=False))


def load(router: RealRouter, model: str) -> None:
    """Have a router load a model; returns once it has."""
    with post(f"{router.url}/models/load", {"model": model}):
        pass
    eventually(lambda: status(router, model) == "loaded", f"{model} is loaded")


def status(router: RealRouter, model: str) -> str:
    """What the router says of a model."""
    with urllib.request.urlopen(f"{router.url}/models", timeout=20) as answer:
        return next(m["status"]["value"] for m in json.load(answer)["data"] if m["id"] == model)


@contextmanager
def twins(
    folder: Path,
    model: str,
    file: Path,
    *,
    parallel: int = 2,
    ctx: int = 16_384,
    settings: Mapping[str, str] | None = None,
    snapshots: str = "{}",
) -> Generator[Twins]:
    """Start them; `settings`: further ones of the preset, `snapshots`: as in the configuration."""
    preset = {"threads": "1", **(settings or {})}  # two would spin against each other, and against what else runs
    ours, other = (
        RealRouter(folder / name, {model: file}, parallel=parallel, ctx=ctx, defaults=preset)
        for name in ("router", "twin")
    )
    server = Server(folder / "swapper", ours, {model: "{vram: 8GiB, default: true}"}, snapshots=snapshots)
    try:
        ours.start()
        other.start()
        server.start()
        load(other, model)
        back(server, f"llama/{model}")
        yield Twins(model, server, other)
    finally:
        server.stop()
        ours.stop()
        other.stop()
