"""A restart of swapper costs no conversation that lies whole in the server's slots, and none that is on disk."""

from __future__ import annotations

from collections.abc import Callable

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
    restart(server, how)
    assert talks.cold("ABCD") == [], talks.told
