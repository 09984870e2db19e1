"""swapper is killed with -9 at every step of a handover, out and back: the next one on the folder finishes it.

A life is one handover. The serve of that life is stopped at its n-th point, killed there, and started again; the
next life goes one point further, until a handover has no more points. The real router is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.support.matrix import BACK_S, STORY, Client, Held, accounted, back, cache_n, granted
from tests.support.server import serving

EFFECTS = {"out": ("save", "release"), "back": ("load", "restore")}
"""The verbs that change something. The others only wait: to die in them is to die between two commits."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Held]:
    with serving(Held.of_alpha(tmp_path)) as server:
        yield server


@pytest.mark.timeout(300)  # some twenty lives: half a minute, and four times that on a starved machine
@pytest.mark.parametrize("direction", ["out", "back"])
def test_killed_at_any_step_of_a_handover_the_card_comes_back_and_the_conversation_is_warm(
    server: Held, direction: str
) -> None:
    back(server, "llama/alpha")
    server.chat("alpha", STORY)
    effects = [f"{when} {verb}" for verb in EFFECTS[direction] for when in ("before", "after")]
    steps = ("before commit [!p]*", "after commit [!p]*", *effects)  # a proof comes whenever an answer does
    killed: list[str] = []
    tokens: list[int] = []
    with Client(server) as client:
        while not killed or killed[-1] not in ("after commit grant", "after commit end"):
            told = f"life {len(killed)}"
            if direction == "out":
                server.hold_at(*steps)
                asked = client.lease(told)
                killed.append(kill_at(server, len(killed)))
                lease = granted(asked)
                released = client.release(lease)
            else:
                lease = granted(client.lease(told))
                server.hold_at(*steps)
                released = client.release(lease)
                killed.append(kill_at(server, len(killed)))
            assert released.result(BACK_S)["state"] == "released"
            back(server, "llama/alpha")
            assert cache_n(server.chat("alpha", STORY)) >= len(STORY), f"cold after a kill {killed[-1]}"
            tokens.append(cast("int", lease["token"]))
    assert tokens == sorted(set(tokens)), "each token is higher than all before"
    assert {lease["state"] for lease in accounted(server)} == {"released"}
    assert set(effects) < set(killed), killed


def kill_at(server: Held, n: int) -> str:
    """Kill the server at the n-th point from here (from 0) and start it again."""
    for _ in range(n):
        server.held()
        server.go_on()
    point = server.held()
    server.kill()
    server.hold_at()
    server.start()
    return point
