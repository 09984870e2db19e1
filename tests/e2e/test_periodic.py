"""With `every` a crash of the model's process costs no more than what was said since the last save by the clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.matrix import ends, eventually
from tests.support.router import RealRouter
from tests.support.server import Json, Server, serving

EVERY = "{every: 10s}"
STORY = "".join(random.Random(7).choices("abcdefgh ijklmnop", k=1500))
OTHER = "".join(random.Random(8).choices("abcdefgh ijklmnop", k=1300))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), ["alpha", "lfm"])


@pytest.fixture(params=["alpha", "lfm"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(model: str, tmp_path: Path, models: dict[str, Path]) -> Iterator[Server]:
    router = RealRouter(tmp_path / "router", {model: models[model]}, defaults={"slot-prompt-similarity": "0.5"})
    with serving(Server(tmp_path / "swapper", router, {model: "{vram: 8GiB, default: true}"}, snapshots=EVERY)) as it:
        it.until(lambda status: [t for t in cast("list[Json]", status["tenants"]) if t["open"]])
        yield it


def on_disk(server: Server) -> list[Json]:
    return cast("list[Json]", server.get("/api/snapshots")["items"])


def at_rest(server: Server) -> bool:
    (card,) = cast("list[Json]", server.get("/api/status")["cards"])
    return card["phase"] == "steady"


def saved(server: Server, *tokens: int) -> list[Json]:
    """The snapshots, once there is one for each number of tokens, with its template and answer, and no other."""

    def found() -> list[Json] | None:
        there = sorted(on_disk(server), key=lambda one: cast("int", one["tokens"]))
        more = [cast("int", one["tokens"]) - least for one, least in zip(there, tokens, strict=False)]
        enough = len(there) == len(tokens) and all(0 <= n <= 100 for n in more)
        return there if enough and at_rest(server) and kept(there) else None

    def kept(there: list[Json]) -> bool:
        """A save is thrown away where a call came before it was over."""
        return {one["id"] for one in there} == {one["id"] for one in on_disk(server)}

    return eventually(found, f"{tokens} tokens are saved, by the clock")


def cache_n(answer: Json) -> int:
    return cast("dict[str, int]", answer["timings"])["cache_n"]


def said(answer: Json) -> str:
    return cast("list[dict[str, dict[str, str]]]", answer["choices"])[0]["message"]["content"]


def crash(server: Server) -> None:
    """The model's process dies; the resident is back."""
    (child,) = psutil.Process(server.router.pid).children()
    before = server.swaps()[0]["id"]
    ends(child)
    server.until(lambda _: [swap for swap in server.swaps()[:1] if swap["id"] != before and swap["outcome"]])


def test_after_a_crash_the_next_turn_is_warm_from_the_last_save_by_the_clock(server: Server, model: str) -> None:
    first = said(server.chat(model, STORY))
    (one,) = saved(server, 1500)
    second = said(server.chat(model, STORY, first, OTHER))
    (two,) = saved(server, 2800)  # it took the place of the first
    assert two["id"] != one["id"]
    assert two["strategy"] == {"alpha": "slots", "lfm": "rewind"}[model]
    crash(server)
    (back,) = cast("list[Json]", server.swaps()[0]["conversations"])
    assert (back["snapshot"], back["restored"]) == (two["id"], True)
    answer = server.chat(model, STORY, first, OTHER, second.strip()[:-1], "and then?")
    assert cache_n(answer) >= 0.95 * 2800
    server.until(lambda _: [t for t in cast("list[Json]", server.swaps()[0]["conversations"]) if t["result"] == "warm"])


def test_what_was_saved_by_the_clock_goes_on_in_its_slot_and_what_was_not_used_is_saved_once(
    server: Server, model: str
) -> None:
    first = said(server.chat(model, STORY))
    server.chat(model, OTHER)
    other, story = (one["id"] for one in saved(server, 1300, 1500))
    answer = server.chat(model, STORY, first, "and then?")
    assert cache_n(answer) >= 0.95 * 1500

    def renewed() -> list[Json] | None:
        there = on_disk(server)
        return None if story in [one["id"] for one in there] else there

    there = eventually(renewed, "the one that was used is saved again")
    assert other in [one["id"] for one in there]
    assert len(there) == 2
