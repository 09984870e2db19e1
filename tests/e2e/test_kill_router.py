"""The router dies, or the model's process in it, at every verb: before it, in the middle of it, and after it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from typing import cast

import pytest

from tests.support.matrix import (
    BACK_S,
    STORY,
    Client,
    Held,
    back,
    cache_n,
    child_of,
    ends,
    granted,
    in_turn,
    router_of,
    sent_to,
    suspended,
)
from tests.support.server import Json


@pytest.fixture
def server(living: Held) -> Iterator[Held]:
    with in_turn(living, leaves=serves) as server:
        yield server


def serves(server: Held) -> None:
    """The resident is back, warm or cold."""
    back(server, "llama/alpha")
    assert server.chat("alpha", STORY)["choices"]


def told_cold(server: Held, lease: Json) -> Json | None:
    """What the swaps of this handover say of a conversation that did not come back warm."""
    for swap in (swap for swap in server.swaps() if swap["lease"] == lease["id"]):
        for talk in cast("list[Json]", swap["conversations"]):
            if talk["result"] == "cold":
                assert talk["reason"]
                return talk
    return None


OUT = ("drain", "save", "release")
BESIDE = [f"before {verb}" for verb in (*OUT, "load", "restore")] + ["after save", "after load"]


@pytest.mark.parametrize("victim", ["router", "child"])
@pytest.mark.parametrize("point", BESIDE)
def test_killed_beside_a_verb_the_lease_is_served_and_the_residents_come_back(
    server: Held, victim: str, point: str
) -> None:
    with Client(server) as client:
        asked = stopped_at(server, client, point)
        router = router_of(server)
        if victim == "router":
            ends(router)
        elif router.children():
            ends(child_of(router))
        server.hold_at()
        server.go_on()
        lease = comes_back(server, client, asked)
        if point in ("before drain", "before save"):
            assert told_cold(server, lease), "its conversation was in that process alone"
        else:
            assert cache_n(server.chat("alpha", STORY)) >= len(STORY), "it was saved before"


@pytest.mark.parametrize("victim", ["router", "child"])
@pytest.mark.parametrize("verb", ["save", "load", "restore"])
def test_killed_in_the_middle_of_a_verb_the_lease_is_served_and_the_residents_come_back(
    server: Held, victim: str, verb: str
) -> None:
    """The model's process is stopped first, so that the verb is under way for certain when it or its router dies."""
    with Client(server) as client:
        asked = stopped_at(server, client, f"before {verb}")
        router = router_of(server)
        server.hold_at()
        if verb == "load":
            server.go_on()
        with suspended(child_of(router)) as child:
            if verb == "load":
                assert loading(server), "it had not loaded yet"
            else:
                server.go_on()
                sent_to(child)
            if victim == "router":
                ends(router)
            ends(child)  # also then: stopped as it is it cannot end by itself when its router is gone
        lease = comes_back(server, client, asked)
        assert cache_n(server.chat("alpha", STORY)) >= len(STORY) or told_cold(server, lease)


def stopped_at(server: Held, client: Client, point: str) -> Future[Json]:
    """A handover that stands at the point; on the way back its lease is granted and given back already."""
    out = point.endswith(OUT)
    server.hold_at(*([point] if out else []))
    asked = client.lease(point)
    if not out:
        lease = granted(asked)
        server.hold_at(point)
        client.release(lease)
    assert server.held() == point
    return asked


def comes_back(server: Held, client: Client, asked: Future[Json]) -> Json:
    """The lease, which is granted, or failed for a stated reason; then the card is as declared."""
    lease = asked.result(BACK_S)
    assert lease["state"] == "granted" or (lease["state"], bool(lease["reason"])) == ("failed", True), lease
    if lease["state"] == "granted":
        client.release(lease).result(BACK_S)
    back(server, "llama/alpha")
    return lease


def loading(server: Held) -> bool:
    with urllib.request.urlopen(f"{server.router.url}/models", timeout=20) as answer:
        (model,) = json.loads(answer.read())["data"]
    return model["status"]["value"] == "loading"
