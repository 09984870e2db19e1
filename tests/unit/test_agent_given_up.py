"""A load that a newer command takes away again ends at its next look, and its tenant is released at once."""

from __future__ import annotations

import asyncio

import pytest

from swapper.errors import BackendError
from tests.unit.agent_doubles import MemoryLink, RecordingBackend, Running, command
from workers.backend import Loaded
from workers.patience import GIVEN_UP, wanted


class Loads:
    """A load that goes on until it is given up."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def load(self, tenant: str) -> Loaded:
        given_up = GIVEN_UP.get()
        assert given_up is not None
        self.begun.set()
        await given_up.wait()
        wanted(tenant)
        raise AssertionError("unreachable: it was given up")


@pytest.fixture
def loads(backend: RecordingBackend, monkeypatch: pytest.MonkeyPatch) -> Loads:
    found = Loads()
    monkeypatch.setattr(backend, "load", found.load)
    return found


async def test_a_load_under_way_is_given_up_for_the_release_of_its_tenant(
    link: MemoryLink, backend: RecordingBackend, running: Running, loads: Loads
) -> None:
    async with running():
        await link.send(command("load", 9, 1))
        await loads.begun.wait()
        await link.send(command("release", 9, 2, limit_ms=60_000))
        given_up, released = await link.answer(9, 1), await link.answer(9, 2)
    assert (given_up.outcome, released.outcome) == ("failed", "ok")
    assert given_up.detail == "the load of llama/med was given up: nobody waits for it any more"
    assert backend.calls == ["release llama/med 60000"]


async def test_a_load_that_has_not_begun_when_its_release_comes_never_begins(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    before = backend.hold("save llama/med 0")
    async with running():
        await link.send(command("save", 9, 1, slot=0, name="a.bin"))
        await before.begun.wait()
        await link.send(command("load", 9, 2), command("release", 9, 3, limit_ms=60_000))
        before.end.set()
        assert (await link.answer(9, 2)).detail == "overtaken by command 3 of token 9"
        assert (await link.answer(9, 3)).outcome == "ok"
    assert backend.calls == ["save llama/med 0", "release llama/med 60000"]


@pytest.mark.parametrize(
    "newer", [command("load", 9, 2), command("drain", 9, 2), command("release", 9, 2, tenant="llama/big", limit_ms=1)]
)
async def test_nothing_else_gives_a_load_up(
    link: MemoryLink, backend: RecordingBackend, running: Running, newer: object
) -> None:
    slow = backend.hold("load llama/med")
    given_up = list[bool]()
    load = backend.load

    async def loaded(tenant: str) -> Loaded:
        found = await load(tenant)
        event = GIVEN_UP.get()
        given_up.append(event is not None and event.is_set())
        return found

    backend.load = loaded
    async with running():
        await link.send(command("load", 9, 1))
        await slow.begun.wait()
        await link.send(newer, command("load", 9, 1))  # pyright: ignore[reportArgumentType]
        slow.end.set()
        assert (await link.answer(9, 1)).outcome == "ok"
    assert given_up[0] is False


async def test_what_is_said_of_a_load_that_is_given_up_names_it() -> None:
    event = asyncio.Event()
    GIVEN_UP.set(event)
    wanted("m")
    event.set()
    with pytest.raises(BackendError, match="the load of m was given up"):
        wanted("m")
