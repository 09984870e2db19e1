"""A slot is saved while calls may come: what one of them changed is not kept, and nobody waits for more than a save."""

from __future__ import annotations

import pytest

from swapper.errors import BackendBusy
from tests.contract.conftest import World
from tests.contract.saving import LONG, fresh, fresh_load
from tests.contract.talk import Talk
from workers.backend import Backend, SaveArgs
from workers.backend import Talk as Conversation
from workers.llama.http import RouterHttp, SavedSlot

ALPHA = "llama/alpha"


@pytest.fixture
def world(either_kind: World) -> World:
    return either_kind


async def said(backend: Backend, talk: Talk) -> SaveArgs:
    """One conversation in a model just loaded; how it is to be saved."""
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    tokens = (await talk.slot("alpha", 0))["n_prompt_tokens"]
    return SaveArgs(0, fresh("alpha"), Conversation("one", ("one",), used_ms=1), holds=tokens)


async def test_what_the_slot_was_said_to_hold_is_saved_and_goes_on_in_the_server(
    backend: Backend, talk: Talk, world: World
) -> None:
    args = await said(backend, talk)
    saved = await backend.save(ALPHA, args)
    assert saved.tokens == args.holds
    assert (world.slots / args.name).exists()
    again = await talk.say("alpha", LONG, slot=0)
    assert again["timings"]["cache_n"] > 0.9 * saved.tokens


async def test_what_it_replaces_goes_while_the_model_serves(backend: Backend, talk: Talk, world: World) -> None:
    first = await said(backend, talk)
    await backend.save(ALPHA, first)
    await talk.say("alpha", LONG + "And on.", slot=0)
    tokens = (await talk.slot("alpha", 0))["n_prompt_tokens"]
    second = SaveArgs(0, fresh("alpha"), Conversation("two", ("one", "two")), replaces=first.name, holds=tokens)
    await backend.save(ALPHA, second)
    await backend.close()  # finishes what goes on in the background
    assert not (world.slots / first.name).exists()
    assert (world.slots / second.name).exists()


async def test_a_slot_that_holds_something_else_by_now_is_not_saved(backend: Backend, talk: Talk, world: World) -> None:
    args = await said(backend, talk)
    await talk.say("alpha", LONG + "And on.", slot=0)
    with pytest.raises(BackendBusy, match="by now"):
        await backend.save(ALPHA, args)
    assert not (world.slots / args.name).exists()


async def test_while_another_slot_is_at_work_none_is_saved(backend: Backend, talk: Talk, world: World) -> None:
    args = await said(backend, talk)
    async with talk.streaming("alpha", 3500):
        with pytest.raises(BackendBusy, match="slots at work"):
            await backend.save(ALPHA, args)
    assert not (world.slots / args.name).exists()


@pytest.mark.parametrize("before", [True, False], ids=["before it was written", "after it was written"])
async def test_one_that_a_call_goes_on_with_meanwhile_is_not_kept(
    backend: Backend, talk: Talk, world: World, monkeypatch: pytest.MonkeyPatch, *, before: bool
) -> None:
    args = await said(backend, talk)
    save = RouterHttp.save

    async def overtaken(http: RouterHttp, model: str, slot: int, name: str) -> SavedSlot:
        if before:
            await talk.say("alpha", LONG + "And on.", slot=0)
        answer = await save(http, model, slot, name)
        if not before:
            await talk.say("alpha", LONG + "And on.", slot=0)
        return answer

    monkeypatch.setattr(RouterHttp, "save", overtaken)
    with pytest.raises(BackendBusy, match="gone on with"):
        await backend.save(ALPHA, args)
    assert not (world.slots / args.name).exists()
