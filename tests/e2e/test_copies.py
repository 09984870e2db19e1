"""More conversations than slots, on a real llama-server: the files they leave, and that none loses its last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest

from tests.e2e.test_conversations import all_are, cache_n, handed_on, handover, results, said, text
from tests.support.server import Json, Server

MANY = 4


def files(server: Server) -> list[str]:
    return sorted(path.name for path in server.slot_dir.glob("*.kv"))


def settled(server: Server, count: int, *, limit_s: float = 15) -> list[str]:
    """The files, once there are so few: the older copy goes when the newer one is on the disk."""
    deadline = time.monotonic() + limit_s
    while len(files(server)) > count and time.monotonic() < deadline:
        time.sleep(0.05)
    return files(server)


@pytest.mark.parametrize("model", ["alpha", "lfm"])
def test_turn_by_turn_there_is_one_file_a_conversation(serve: Callable[..., Server], model: str) -> None:
    server = serve(model)
    talks = [[text(seed)] for seed in range(MANY)]
    answers = [server.chat(model, *talk) for talk in talks]
    handover(server)
    for turn in range(5):
        for nth, talk in enumerate(talks):
            talk += [handed_on(said(answers[nth])), f"and then, {turn}?"]
            answers[nth] = server.chat(model, *talk)
            assert cache_n(answers[nth]) > 1000
    left = settled(server, MANY)
    assert len(left) <= MANY, left
    lines = server.until(lambda _: all_are(results(server), "result", "warm", MANY))
    assert len({line["snapshot"] for line in lines}) == MANY
    places = cast("dict[str, int]", cast("list[Json]", server.get("/api/status")["tenants"])[0]["places"])
    assert sum(places.values()) == MANY, places


def test_what_stays_on_disk_over_more_swaps_is_not_taken_by_the_budget(serve: Callable[..., Server]) -> None:
    server = serve("lfm", snapshots="{required: true, budget: 64KiB}")
    talks = [[text(seed)] for seed in range(MANY)]
    answers = [server.chat("lfm", *talk) for talk in talks]
    handover(server)
    for turn in range(2):
        for nth in (2, 3):
            talks[nth] += [handed_on(said(answers[nth])), f"and then, {turn}?"]
            answers[nth] = server.chat("lfm", *talks[nth])
        handover(server)
    for nth, talk in enumerate(talks):
        again = server.chat("lfm", *talk, handed_on(said(answers[nth])), "and at last?")
        assert cache_n(again) > 1000, (nth, server.log_path.read_text()[-3000:])


def test_where_conversations_are_required_more_texts_than_slots_hold_the_card(serve: Callable[..., Server]) -> None:
    server = serve("gemma", snapshots="{required: true}")
    for seed in range(2):
        server.chat("gemma", text(seed))
    handover(server)
    server.until(lambda _: all_are(results(server), "restored", True, 2))
    server.chat("gemma", text(2))
    lease = server.lease("job", wait=60)
    assert lease["state"] == "failed"
    assert "there are 3 for 2: raise parallel" in str(lease["reason"])
