"""swapper is killed with -9 while conversations are recalled, saved, restored on demand or replayed.

Three conversations on the two slots of a hybrid model, two on a sliding-window one: after each kill every one of them
is warm, or comes back from disk when it is asked for, or is stated to be cold with the reason. The texts are lost with
the process, unless `snapshots: {bodies: disk}`.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Thread
from typing import cast

import pytest

from swapper.demo.models import make_models
from tests.e2e.test_conversations import handed_on, said, text
from tests.support.matrix import BACK_S, Client, Held, back, cache_n, eventually, granted
from tests.support.router import RealRouter
from tests.support.server import Json, serving

SIZE = 600
_seeds = count(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), ["lfm", "gemma"])


@pytest.fixture(scope="module", params=["memory", "disk"])
def bodies(request: pytest.FixtureRequest) -> str:
    return cast("str", request.param)


@contextmanager
def living(folder: Path, models: dict[str, Path], model: str, bodies: str) -> Generator[Held]:
    defaults = {"kv-unified": "false", "slot-prompt-similarity": "0.5"}
    router = RealRouter(folder / "router", {model: models[model]}, ctx=8_192, defaults=defaults)
    traits = {model: "{vram: 8GiB, default: true}"}
    with serving(Held(folder / "swapper", router, traits, snapshots=f"{{bodies: {bodies}}}")) as server:
        yield server


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], bodies: str) -> Iterator[Held]:
    with living(tmp_path_factory.mktemp("hybrid"), models, "lfm", bodies) as server:
        yield server


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], bodies: str) -> Iterator[Held]:
    with living(tmp_path_factory.mktemp("window"), models, "gemma", bodies) as server:
        yield server


class Talks:
    """Conversations of one model, each of a length of its own, and what became of them."""

    def __init__(self, server: Held, model: str, many: int) -> None:
        server.hold_at()
        back(server, f"llama/{model}")
        self.server, self.model = server, model
        self.texts = [text(seed, SIZE + 20 * nth) for nth, seed in zip(range(many), _seeds, strict=False)]
        self.answers = [said(server.chat(model, words)) for words in self.texts]
        if "bodies: disk" in server.config.read_text():
            kept = server.state_dir / "requests"
            eventually(lambda: len(list(kept.glob("*.request"))) >= many, "the requests are on disk")

    def go_on(self, nth: int) -> Json:
        """The next turn."""
        return self.server.chat(self.model, self.texts[nth], handed_on(self.answers[nth]), "and then?")

    def accounted(self) -> int:
        """How many are warm; there is a line with a reason for each of the others."""
        cold = [nth for nth in reversed(range(len(self.texts))) if cache_n(self.go_on(nth)) < 0.95 * SIZE]
        if cold:
            eventually(lambda: len(told_cold(self.server)) >= len(cold), f"{len(cold)} are stated to be cold")
        return len(self.texts) - len(cold)


def told_cold(server: Held) -> list[Json]:
    """The lines of the last handover that say of a conversation that it is cold, each with the reason."""
    out = next(swap for swap in server.swaps() if swap["from"])
    swaps = [swap for swap in server.swaps() if swap["lease"] == out["lease"]]
    talks = [talk for swap in swaps for talk in cast("list[Json]", swap["conversations"])]
    assert all(talk["reason"] for talk in talks if talk["result"] == "cold")
    return [talk for talk in talks if talk["result"] == "cold"]


def killed_at(server: Held, point: str) -> None:
    assert server.held() == point
    server.kill()
    server.hold_at()
    server.start()


@pytest.mark.parametrize("point", ["before recall", "after recall"])
def test_killed_while_conversations_are_recalled_and_saved_each_is_warm_or_stated_cold(
    hybrid: Held, bodies: str, point: str
) -> None:
    talks = Talks(hybrid, "lfm", 3)
    with Client(hybrid) as client:
        hybrid.hold_at(point)
        asked = client.lease(point)
        killed_at(hybrid, point)
        client.release(granted(asked)).result(BACK_S)
    back(hybrid, "llama/lfm")
    warm = talks.accounted()
    assert warm == 3 or bodies == "memory", "without its text a conversation is saved as it lies"


@pytest.mark.parametrize("point", ["before restore", "before placed"])
def test_killed_while_one_comes_back_from_disk_for_its_call_each_is_warm_or_stated_cold(
    hybrid: Held, point: str
) -> None:
    talks = Talks(hybrid, "lfm", 3)
    with Client(hybrid) as client:
        client.release(granted(client.lease(point))).result(BACK_S)
    back(hybrid, "llama/lfm")
    hybrid.hold_at(point)
    call = Thread(target=broken_off, args=(lambda: talks.go_on(0),))
    call.start()
    killed_at(hybrid, point)
    call.join()
    back(hybrid, "llama/lfm")
    assert talks.accounted() == 3


@pytest.mark.parametrize("bodies", ["disk"], indirect=True)
@pytest.mark.parametrize("point", ["before recall", "after recall"])
def test_killed_while_one_is_rewound_to_make_room_for_another_all_are_warm(hybrid: Held, point: str) -> None:
    talks = Talks(hybrid, "lfm", 3)
    with Client(hybrid) as client:
        client.release(granted(client.lease(point))).result(BACK_S)
    back(hybrid, "llama/lfm")
    for nth in (2, 1):
        talks.go_on(nth)
    hybrid.hold_at(point)
    call = Thread(target=broken_off, args=(lambda: talks.go_on(0),))
    call.start()
    killed_at(hybrid, point)
    call.join()
    back(hybrid, "llama/lfm")
    assert talks.accounted() == 3


@pytest.mark.parametrize("point", ["before replay", "after replay"])
def test_killed_while_a_conversation_is_replayed_each_is_warm_or_stated_cold(
    window: Held, bodies: str, point: str
) -> None:
    talks = Talks(window, "gemma", 2)
    with Client(window) as client:
        lease = granted(client.lease(point))
        window.hold_at(point)
        client.release(lease).result(BACK_S)
        killed_at(window, point)
    back(window, "llama/gemma")
    assert talks.accounted() == 2 or bodies == "memory"


def broken_off(call: Callable[[], Json]) -> None:
    """A call whose server dies under it."""
    with pytest.raises((OSError, urllib.error.HTTPError)):
        call()
