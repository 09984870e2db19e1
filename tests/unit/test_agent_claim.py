"""One agent a host: it obeys only while the claim is surely its own, and nothing that was ordered before it had it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swapper.errors import BackendRefused, ConfigError
from swapper.store.memory import MemoryStore
from swapper.store.protocol import Held
from tests.store.acts import NOW, draw
from tests.support.virtual_time import virtual
from tests.unit.agent_doubles import EXECUTOR, MemoryLink, Place, RecordingBackend, ScriptedProbe, command
from workers.agent import Agent
from workers.claim import BEAT_S, OBEYED, TTL_MS, Claim, ClaimLost
from workers.llama.http import RouterHttp
from workers.marks import Marks

TTL_S = TTL_MS / 1000
OTHER = Held("swapper, process 7 on box", NOW, TTL_MS)


def memory_store() -> MemoryStore:
    loop = asyncio.get_running_loop()
    return MemoryStore(lambda: NOW + int(loop.time() * 1000))


def claim(store: MemoryStore, folder: Path) -> Claim:
    """The claim of an agent with a folder of its own."""
    return Claim(store, EXECUTOR, Marks.open(folder / "marks"))


@asynccontextmanager
async def kept(one: Claim) -> AsyncGenerator[asyncio.Task[None]]:
    """Taken and renewed, as an agent that lives does."""
    await one.take()
    keeping = asyncio.create_task(one.keep())
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@virtual
async def test_a_second_agent_is_refused_in_one_sentence_once_the_first_is_heard(tmp_path: Path) -> None:
    store, loop = memory_store(), asyncio.get_running_loop()
    async with kept(claim(store, tmp_path / "a")) as first:
        await asyncio.sleep(3 * TTL_S)
        began = loop.time()
        with pytest.raises(ConfigError) as refused:
            await claim(store, tmp_path / "b").take()
        assert loop.time() - began < 2 * BEAT_S
        assert not first.done()
    [said] = refused.value.problems
    assert said.startswith("host main: another agent obeys for it in this store (swapper, process ")
    assert "stop that one" in said


@virtual
async def test_one_that_is_heard_no_more_is_followed_once_its_claim_has_ended(tmp_path: Path) -> None:
    store, loop = memory_store(), asyncio.get_running_loop()
    await claim(store, tmp_path / "dead").take()
    await claim(store, tmp_path / "next").take()
    assert TTL_S <= loop.time() < TTL_S + 1


@virtual
async def test_one_that_stopped_is_followed_at_once(tmp_path: Path) -> None:
    store = memory_store()
    first = claim(store, tmp_path / "first")
    await first.take()
    await first.give_up()
    assert not first.surely_ours
    await claim(store, tmp_path / "next").take()
    assert asyncio.get_running_loop().time() == 0


@virtual
async def test_after_a_kill_the_next_run_on_the_same_marks_has_it_at_once_and_what_was_ordered_stays_its_own(
    tmp_path: Path,
) -> None:
    store = memory_store()
    marks = Marks.open(tmp_path / "marks")
    await Claim(store, EXECUTOR, marks).take()
    await draw(store, now_ms=None)
    marks.close()
    again = Marks.open(tmp_path / "marks")
    await Claim(store, EXECUTOR, again).take()
    assert (asyncio.get_running_loop().time(), again.floor) == (0, 0)


def test_marks_that_were_lost_or_copied_are_anothers(tmp_path: Path) -> None:
    def owner(folder: Path) -> str:
        marks = Marks.open(folder / "marks")
        marks.close()
        return marks.owner

    mine = owner(tmp_path / "a")
    assert owner(tmp_path / "a") == mine
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert owner(tmp_path / "copy") != mine
    (tmp_path / "a" / "marks").unlink()
    assert owner(tmp_path / "a") != mine


@virtual
async def test_one_that_was_stopped_for_too_long_goes_on_if_nobody_came(tmp_path: Path) -> None:
    store = memory_store()
    slow = claim(store, tmp_path / "slow")
    await slow.take()
    await asyncio.sleep(10 * TTL_S)
    await slow.sure()
    assert slow.surely_ours


@virtual
async def test_one_that_was_stopped_until_another_came_lets_nothing_through_any_more(tmp_path: Path) -> None:
    store = memory_store()
    slow, other = claim(store, tmp_path / "slow"), claim(store, tmp_path / "other")
    await slow.take()
    await asyncio.sleep(TTL_S)
    await other.take()
    through = asyncio.create_task(slow.fence())
    with pytest.raises(ClaimLost, match=r"^host main: another agent .* this one, .* stops$"):
        await slow.keep()
    await other.give_up()
    await asyncio.sleep(10 * TTL_S)
    assert not through.done()
    through.cancel()


@virtual
async def test_without_the_store_it_lets_through_for_less_than_another_may_have_to_wait(tmp_path: Path) -> None:
    store = memory_store()
    cut_off = claim(store, tmp_path / "one")
    async with kept(cut_off):
        await asyncio.sleep(3 * TTL_S + 0.01)
        store.down()
        began = asyncio.get_running_loop().time()
        while cut_off.surely_ours:
            await cut_off.fence()
            await asyncio.sleep(0.1)
        assert TTL_S - BEAT_S <= asyncio.get_running_loop().time() - began <= TTL_S + 0.1
        waiting = asyncio.create_task(cut_off.fence())
        await asyncio.sleep(TTL_S)
        assert not waiting.done()
        store.up()
        await waiting


@virtual
async def test_a_verb_in_progress_goes_no_further_once_another_was_the_agent_in_between(tmp_path: Path) -> None:
    store = memory_store()
    slow, other = claim(store, tmp_path / "slow"), claim(store, tmp_path / "other")
    await slow.take()
    OBEYED.set(await draw(store, now_ms=None))
    await slow.fence()
    await asyncio.sleep(TTL_S)
    await other.take()
    await other.give_up()
    with pytest.raises(BackendRefused, match="another was the agent of this host meanwhile"):
        await slow.fence()
    OBEYED.set(await draw(store, now_ms=None))
    await slow.fence()


@asynccontextmanager
async def working(folder: Path, link: MemoryLink, backend: RecordingBackend) -> AsyncGenerator[asyncio.Task[None]]:
    marks = Marks.open(folder / "marks")
    place = {"llama/med": Place("gpu0", "llama")}
    agent = Agent("main", link, {"llama": backend}, place, {"gpu0": ScriptedProbe()}, marks)
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        await agent.close()
        await asyncio.gather(task, return_exceptions=True)
        marks.close()


@virtual
async def test_what_was_ordered_before_it_had_the_host_is_refused_so_that_it_is_ordered_anew(tmp_path: Path) -> None:
    link, backend = MemoryLink(), RecordingBackend()
    link.floor = 9
    async with working(tmp_path, link, backend):
        await link.send(command("load", 8, 1), command("load", 9, 2), command("vacate", 9, 3, tenant=None))
        older, last = await link.answer(8, 1), await link.answer(9, 2)
        assert (older.outcome, older.data, last.outcome, last.data) == ("refused", {"mark": 9}, "refused", {})
        assert last.detail == "ordered before this agent had the host, of which token 9 was the last"
        assert (await link.answer(9, 3)).outcome == "refused"
        await link.send(command("release", 10, 1, limit_ms=5))
        assert (await link.answer(10, 1)).outcome == "ok"
    assert backend.calls == ["release llama/med 5"]


@virtual
async def test_all_that_was_ordered_before_counts_as_over_in_what_it_sees(tmp_path: Path) -> None:
    marks = Marks.open(tmp_path / "marks")
    marks.begin(command("load", 7, 3))
    marks.raise_floor(9)
    assert (9, 1_000_000) < marks.carried_out("gpu0") < (10, 1)
    marks.close()


@virtual
async def test_an_agent_whose_host_is_anothers_carries_out_nothing_and_ends_with_a_sentence(tmp_path: Path) -> None:
    link, backend = MemoryLink(), RecordingBackend()
    async with working(tmp_path, link, backend) as agent:
        await link.volunteered("hello")
        link.claimed_by = OTHER
        await asyncio.sleep(0)
        with pytest.raises(ClaimLost, match=r"process 7 on box"):
            await agent
        await link.send(command("load", 9, 1))
    assert backend.calls == []


@virtual
async def test_a_command_that_waited_for_too_long_is_not_carried_out_before_the_host_is_known_to_be_its_own(
    tmp_path: Path,
) -> None:
    link, backend = MemoryLink(), RecordingBackend()
    held = backend.hold("release llama/med 5")
    async with working(tmp_path, link, backend) as agent:
        await link.send(command("release", 9, 1, limit_ms=5), command("load", 9, 2))
        await held.begun.wait()
        await link.switch(down=True)
        await asyncio.sleep(TTL_S)
        held.end.set()
        await asyncio.sleep(TTL_S)
        assert backend.calls == ["release llama/med 5"]
        link.claimed_by = OTHER
        await link.switch(down=False)
        with pytest.raises(ClaimLost):
            await agent
    assert backend.calls == ["release llama/med 5"]


@virtual
async def test_nothing_is_sent_to_a_server_before_the_fence_lets_it_through() -> None:
    asked: list[str] = []
    http = RouterHttp("http://127.0.0.1:9")

    async def fence() -> None:
        asked.append("fence")
        raise BackendRefused("no")

    http.fence = fence
    for effect in (
        http.load("m"),
        http.unload("m"),
        http.save("m", 0, "f"),
        http.restore("m", 0, "f"),
        http.erase("m", 0),
    ):
        with pytest.raises(BackendRefused, match=r"^no$"):
            await effect
    assert asked == ["fence"] * 5
    await http.close()
