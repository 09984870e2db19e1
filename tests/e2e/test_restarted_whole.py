"""A restart of swapper costs no conversation that lies whole in the server's slots, and none that is on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import cast

import pytest

from tests.e2e.test_conversations import cache_n, handover, prompt_n, said, text
from tests.support.server import Json, Server


class Talks:
    """Four conversations of one model, all of one length, that go on turn by turn."""

    def __init__(self, server: Server, model: str) -> None:
        self.server = server
        self.model = model
        self.said = {name: [f"{name}: {text(ord(name))}"] for name in "ABCD"}
        self.last: dict[str, Json] = {}
        self.told: list[str] = []

    def go_on(self, names: str) -> None:
        """One turn of each."""
        for name in names:
            talk = self.said[name]
            if name in self.last:
                talk += [said(self.last[name]).strip()[:-1], f"and then, after {len(talk)}? {text(len(talk), 300)}"]
            self.last[name] = self.server.chat(self.model, *talk)

    def cold(self, names: str) -> list[str]:
        """One turn of each; those of which more was read than what is new."""
        before = {name: prompt_n(self.last[name]) for name in names}
        found: list[str] = []
        for name in names:
            self.go_on(name)
            answer = self.last[name]
            self.told.append(f"{name}: {cache_n(answer)} of {before[name]}")
            if cache_n(answer) < before[name] - 20:
                found.append(self.told[-1])
        return found


def where(server: Server) -> dict[str, int]:
    """How many conversations the status says are in the server and on disk."""
    (tenant,) = cast("list[Json]", server.get("/api/status")["tenants"])
    places = cast("dict[str, int]", tenant["places"])
    return {place: places[place] for place in ("server", "disk")}


def started(swap: Json) -> float:
    """In seconds since the epoch."""
    return datetime.fromisoformat(str(swap["started_at"])).timestamp()


def serves(status: Json) -> bool:
    return [card["phase"] for card in cast("list[Json]", status["cards"])] == ["steady"]


def restart(server: Server, how: str) -> None:
    getattr(server, how)()
    server.start()


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize(
    ("model", "snapshots"),
    [("alpha", "{bodies: memory}"), ("alpha", "{bodies: disk}"), ("alpha", "{privacy: strict}"),
     ("lfm", "{bodies: disk}")],
    ids=["alpha-memory", "alpha-disk", "alpha-strict", "lfm-disk"],
)  # fmt: skip
def test_what_lies_in_the_slots_and_what_is_on_disk_all_goes_on_after_two_restarts(
    serve: Callable[..., Server], model: str, snapshots: str, how: str
) -> None:
    server = serve(model, snapshots=snapshots)
    talks = Talks(server, model)
    talks.go_on("ABCD")
    handover(server)
    talks.go_on("ABCD")
    talks.go_on("CD")
    restart(server, how)
    assert talks.cold("CD") == [], talks.told
    places = where(server)
    restart(server, how)
    assert where(server) == places
    assert talks.cold("ABCD") == [], talks.told


@pytest.mark.parametrize("model", ["alpha", "lfm"])
def test_what_came_back_as_it_was_before_its_last_turns_and_made_room_unused_comes_back_once_more(
    serve: Callable[..., Server], model: str
) -> None:
    """The router is killed, so that what was said since the handover is lost; what was saved there is not."""
    server = serve(model, snapshots="{bodies: disk}")
    talks = Talks(server, model)
    talks.go_on("ABCD")
    handover(server)
    saved = {name: prompt_n(talks.last[name]) for name in "ABCD"}
    talks.go_on("CDCD")
    killed = time.time()
    server.router.kill()
    server.router.start()
    server.until(
        lambda status: [one for one in server.swaps() if one["to"] and started(one) > killed and serves(status)]
    )
    talks.go_on("ABCD")
    assert {name: cache_n(talks.last[name]) >= saved[name] - 20 for name in "ABCD"} == dict.fromkeys("ABCD", True), {
        name: (cache_n(talks.last[name]), saved[name]) for name in "ABCD"
    }
