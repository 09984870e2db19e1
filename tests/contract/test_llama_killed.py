"""What a killed swapper leaves in a loaded model, and what the next one makes of it: nobody's and somebody's tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import msgspec
import pytest

from swapper.errors import BackendRefused
from tests.contract.conftest import World
from tests.contract.talk import Talk
from workers.backend import SaveArgs, Saved, SlotUse
from workers.llama.http import RouterHttp, Slot
from workers.llama.router import LlamaRouter

LONG = "Colourless green ideas sleep furiously in the garden. " * 10
_numbers = count(1)


class Killed(BaseException):
    """What ends a swapper here as `kill -9` does: nothing it would still have done is done."""


async def save(backend: LlamaRouter, slot: int = 0) -> Saved:
    return await backend.save("llama/alpha", SaveArgs(slot, f"killed.{next(_numbers)}.kv"))


async def fresh_load(backend: LlamaRouter) -> None:
    await backend.release("llama/alpha", limit_ms=10_000)
    await backend.load("llama/alpha")


@pytest.fixture
async def successor(world: World, tmp_path: Path) -> AsyncIterator[LlamaRouter]:
    """A swapper that was started later and knows only what server and files tell."""
    path = tmp_path / "successor"
    backend = LlamaRouter(world.router.url, tenants={"llama/alpha": "alpha"}, state_dir=path, slot_dir=world.slots)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def killed_before_the_wipe(backend: LlamaRouter, patch: pytest.MonkeyPatch) -> None:
    async def killed(*_: object) -> None:
        raise Killed

    with patch.context() as patched:
        patched.setattr(RouterHttp, "erase", killed)
        with pytest.raises(Killed):
            await fresh_load(backend)


async def test_a_smallest_answer_nobody_wiped_keeps_no_conversation_out_and_is_none_itself(
    backend: LlamaRouter, successor: LlamaRouter, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fresh_load(backend)
    for slot in range(2):
        await talk.say("alpha", f"{slot} " + LONG, slot=slot)
    saved = [await save(backend, slot) for slot in range(2)]
    await killed_before_the_wipe(backend, monkeypatch)
    held = [(await talk.slot("alpha", nth)).get("n_prompt_tokens") for nth in range(2)]
    assert held == [None, 2]
    await successor.load("llama/alpha")
    assert [use.tokens for use in (await successor.quiesce("llama/alpha")).slots] == [0]
    back = [await successor.restore("llama/alpha", s.snapshot, s.slot) for s in saved]
    assert [b.tokens for b in back] == [s.tokens for s in saved]
    assert (await talk.say("alpha", "1 " + LONG))["timings"]["cache_n"] > 400


async def test_a_restore_that_was_not_recorded_is_made_again_in_any_slot(
    backend: LlamaRouter, successor: LlamaRouter, talk: Talk
) -> None:
    await fresh_load(backend)
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend)
    await fresh_load(backend)
    for slot in range(2):
        await backend.restore("llama/alpha", saved.snapshot, slot)
    await successor.load("llama/alpha")
    assert saved.tokens in [use.tokens for use in (await successor.quiesce("llama/alpha")).slots]
    for slot in range(2):
        assert (await successor.restore("llama/alpha", saved.snapshot, slot)).tokens == saved.tokens


async def test_the_shortest_real_conversation_is_kept_even_where_a_smallest_answer_was(
    backend: LlamaRouter, successor: LlamaRouter, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fresh_load(backend)
    await talk.say("alpha", LONG, slot=1)
    saved = await save(backend, 1)
    await killed_before_the_wipe(backend, monkeypatch)
    await talk.say("alpha", ".", slot=1, n=1)
    await successor.load("llama/alpha")
    assert SlotUse(1, 2) in (await successor.quiesce("llama/alpha")).slots
    with pytest.raises(BackendRefused, match="slot 1 was taken: it holds 2 tokens"):
        await successor.restore("llama/alpha", saved.snapshot, 1)


async def test_a_load_of_what_is_loaded_waits_for_a_smallest_answer_that_is_still_being_made(
    backend: LlamaRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fresh_load(backend)
    slots, looks = RouterHttp.slots, count()

    async def at_work_twice(http: RouterHttp, model: str) -> list[Slot]:
        return [msgspec.structs.replace(s, is_processing=next(looks) < 2 * 2) for s in await slots(http, model)]

    monkeypatch.setattr(RouterHttp, "slots", at_work_twice)
    await backend.load("llama/alpha")
    assert next(looks) == 3 * 2
