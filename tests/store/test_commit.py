"""`commit`: compare-and-set on cards and gates, guards on leases, all or nothing, and what it leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from swapper.core.commit import LIFE, Alert, Commit, Committed, Conflict, LeaseChange
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.orders import Command
from swapper.core.types import Card, Failure, Fault, Gate, Hold, LeaseState, Step, StepOutcome, StepRecord, Swap
from swapper.store.protocol import Store
from tests.store.acts import GRANTED, NOW, QUEUED, ask, card_of, draw, fold, grant, prepare, request, state, unmoved

ORDER = Command("agent:main", "gpu0", "llama/med", 2**53 + 1, 3, "save", {"slot": 1, "name": "a.bin"})
SWAP = Swap(
    "sw1",
    "gpu0",
    "lease a",
    2**53 + 1,
    ("llama/med",),
    (),
    Step.SAVE,
    NOW,
    NOW + 1,
    lease="a",
    grants=True,
    next_n=4,
    pending=(ORDER,),
    steps=(StepRecord(Step.DRAIN, "llama/med", NOW, 5, 4.5, StepOutcome.DONE, "idle"),),
    conversations=(Conversation("llama/med", 1, "a.bin", 4000, 123_456_789, saved=True, result=ProofResult.WARM),),
)
FULL_CARD = Card(
    "gpu0",
    residents=("llama/med",),
    return_to=(),
    holds=(Hold("a", "encode", 4096, 77),),
    swap=SWAP,
    fault=Fault("held by x", 100, NOW),
    failed={"llama/big": Failure("no such file", 2, NOW + 5)},
)


async def test_cards_and_swaps_come_back_as_they_were_written(store: Store) -> None:
    assert await store.commit(Commit(cards=(FULL_CARD,), swaps=(SWAP,)), now_ms=NOW) == Committed()
    assert await card_of(store) == replace(FULL_CARD, version=1)
    assert await store.swap("sw1") == SWAP
    assert await store.swap("sw2") is None


async def test_a_card_that_moved_on_is_a_conflict(store: Store) -> None:
    assert await store.commit(Commit(cards=(Card("gpu0"),)), now_ms=NOW) == Committed()
    assert await store.commit(Commit(cards=(Card("gpu0"),)), now_ms=NOW) == Conflict("card gpu0")
    assert await store.commit(Commit(cards=(Card("gpu0", version=2),)), now_ms=NOW) == Conflict("card gpu0")
    assert (await card_of(store)).version == 1


async def test_a_commit_that_conflicts_writes_nothing_at_all(store: Store) -> None:
    await ask(store, "a")
    await ask(store, "b")
    await store.end("b", None, now_ms=NOW)
    before = (await store.read(now_ms=NOW), await store.events(after="0", limit=100, block_ms=0))
    changes = tuple(LeaseChange(name, QUEUED, LeaseState.PREPARING) for name in ("a", "b"))
    everything = Commit(
        cards=(FULL_CARD,), leases=changes, swaps=(SWAP,), gates={"m": Gate(1, True)}, commands=(ORDER,)
    )
    assert await store.commit(everything, now_ms=NOW) == Conflict("lease b")
    assert (await store.read(now_ms=NOW), await store.events(after="0", limit=100, block_ms=0)) == before
    assert await store.outbox("agent:main", after="0", block_ms=0) == ()
    assert await store.swap("sw1") is None


async def test_a_mistake_writes_nothing_either(store: Store) -> None:
    await ask(store, "a")
    wrong = Commit(cards=(FULL_CARD,), leases=(LeaseChange("a", QUEUED, LeaseState.REVOKED),))
    with pytest.raises(ValueError, match="cannot go from queued to revoked"):
        await store.commit(wrong, now_ms=NOW)
    assert (await store.read(now_ms=NOW)).cards == {}


async def test_of_many_who_grant_at_once_one_succeeds(store: Store) -> None:
    for number in range(8):
        await ask(store, f"a{number}")
    card = await card_of(store)

    async def attempt(number: int) -> Committed | Conflict:
        token = await draw(store)
        held = replace(card, holds=(Hold(f"a{number}", "", None, None),))
        change = LeaseChange(f"a{number}", QUEUED, LeaseState.GRANTED, token=token, card="gpu0")
        return await store.commit(Commit(cards=(held,), leases=(change,)), now_ms=NOW)

    answers = await asyncio.gather(*map(attempt, range(8)))
    assert sorted(map(str, answers)) == sorted([str(Committed())] + 7 * [str(Conflict("card gpu0"))])
    granted = [lease for lease in (await store.read(now_ms=NOW)).leases.values() if lease.state is LeaseState.GRANTED]
    assert len(granted) == 1


async def test_a_lease_is_granted_once_even_through_two_cards(store: Store) -> None:
    await ask(store, "a", request(card=None))
    token = await draw(store)
    change = LeaseChange("a", QUEUED, LeaseState.GRANTED, token=token)
    assert await store.commit(Commit(cards=(Card("gpu0"),), leases=(change,)), now_ms=NOW) == Committed()
    assert await store.commit(Commit(cards=(Card("gpu1"),), leases=(change,)), now_ms=NOW) == Conflict("lease a")
    assert "gpu1" not in (await store.read(now_ms=NOW)).cards


async def test_a_change_of_words_keeps_the_state(store: Store) -> None:
    await ask(store, "a")
    await grant(store, "a")
    before = await store.lease("a")
    assert before is not None
    told = LeaseChange("a", GRANTED, explain='granted "at once" / ünder way')
    assert await store.commit(Commit(leases=(told,)), now_ms=NOW) == Committed()
    assert await store.lease("a") == replace(before, explain='granted "at once" / ünder way')


async def test_a_commit_that_names_a_thing_twice_is_refused(store: Store) -> None:
    change = LeaseChange("a", QUEUED, LeaseState.CANCELLED)
    for twice in (Commit(cards=(Card("c"), Card("c"))), Commit(leases=(change, change)), Commit(swaps=(SWAP, SWAP))):
        with pytest.raises(ValueError, match="twice"):
            await store.commit(twice, now_ms=NOW)


@pytest.mark.parametrize("before", sorted(LIFE))
async def test_a_lease_takes_the_steps_of_its_life_and_no_others(store: Store, before: LeaseState) -> None:
    for after in LeaseState:
        name = f"{before}-{after}"
        await ask(store, name)
        token = await draw(store)
        for state_ in dict.fromkeys((LeaseState.QUEUED, before)):
            change = LeaseChange(name, frozenset(LeaseState), state_, token=token)
            assert await store.commit(Commit(leases=(change,)), now_ms=NOW) == Committed()
        step = store.commit(Commit(leases=(LeaseChange(name, frozenset({before}), after, reason="so"),)), now_ms=NOW)
        if after is before or after in LIFE[before]:
            assert await step == Committed()
            assert await state(store, name) is after
        else:
            with pytest.raises(ValueError, match=f"cannot go from {before} to {after}"):
                await step


async def test_a_commit_whose_tokens_do_not_rise_is_refused(store: Store) -> None:
    before = (await store.read(now_ms=NOW)).next_token
    for tokens in ((before + 4, before), (before, before)):
        with pytest.raises(ValueError, match="do not rise"):
            await store.commit(Commit(tokens=tokens), now_ms=NOW)
    assert (await store.read(now_ms=NOW)).next_token == before


async def test_a_text_that_utf_8_cannot_say_is_told_with_a_mark_in_its_place(store: Store) -> None:
    await store.commit(Commit(alerts=(Alert("gpu0", "held by r\udcfcbe", {"names": ["\udcff"]}),)), now_ms=NOW)
    (event,) = await store.events(after="0", limit=9, block_ms=0)
    assert "held by r?be" in event.data


async def test_a_gates_epoch_only_rises(store: Store) -> None:
    async def set_gate(epoch: int, *, is_open: bool) -> Committed | Conflict:
        return await store.commit(Commit(gates={"m": Gate(epoch, is_open)}), now_ms=NOW)

    assert await set_gate(2, is_open=False) == Committed()
    assert await set_gate(2, is_open=False) == Committed()
    assert await set_gate(2, is_open=True) == Conflict("gate m")
    assert await set_gate(1, is_open=True) == Conflict("gate m")
    assert await set_gate(10, is_open=True) == Committed()
    assert (await store.read(now_ms=NOW)).gates == {"m": Gate(10, True)}


async def test_commands_travel_with_the_commit_and_keep_every_digit(store: Store) -> None:
    other = replace(ORDER, executor="gateway:g1", verb="close", args={"epoch": 4})
    await store.commit(Commit(commands=(ORDER, other)), now_ms=NOW)
    (mine,) = await store.outbox("agent:main", after="0", block_ms=0)
    (theirs,) = await store.outbox("gateway:g1", after="0", block_ms=0)
    assert (mine.command, theirs.command) == (ORDER, other)
    assert mine.command.token == 9_007_199_254_740_993


async def test_swaps_are_kept_newest_first_for_each_card(store: Store) -> None:
    for number in range(4):
        swap = replace(SWAP, id=f"sw{number}", card=f"gpu{number % 2}")
        await store.commit(Commit(swaps=(swap,)), now_ms=NOW)
    await store.commit(Commit(swaps=(replace(SWAP, id="sw0", outcome="done"),)), now_ms=NOW)
    assert [swap.id for swap in await store.swaps(limit=10)] == ["sw3", "sw2", "sw1", "sw0"]
    assert [swap.id for swap in await store.swaps(limit=1, card="gpu0")] == ["sw2"]
    assert [swap.outcome for swap in await store.swaps(limit=10, card="gpu0")] == [None, "done"]


async def test_every_write_is_an_event_with_its_after_image(store: Store) -> None:
    await store.commit(
        Commit(
            cards=(FULL_CARD,),
            swaps=(SWAP,),
            gates={"llama/med": Gate(7, False)},
            conversations=SWAP.conversations,
            alerts=(Alert("gpu0", 'somebody "keeps" it', {"pid": 5}),),
        ),
        now_ms=NOW,
    )
    events = await store.events(after="0", limit=100, block_ms=0)
    assert [(event.type, event.subject, event.version) for event in events] == [
        ("card", "gpu0", 1),
        ("swap", "sw1", 1),
        ("tenant", "llama/med", 7),
        ("conversation", "a.bin", 0),
        ("alert", "gpu0", 0),
    ]
    images = [msgspec.json.decode(event.data, type=dict[str, object]) for event in events]
    assert [image["id"] for image in images] == [event.subject for event in events]
    assert '"state":"save"' in events[0].data
    assert images[2]["state"] == "closed"
    assert '"state":"warm"' in events[3].data


async def test_folding_the_log_gives_the_state(store: Store) -> None:
    for name in ("a", "b", "c", "d"):
        await ask(store, name, request(deadline_ms=NOW + 50))
    await prepare(store, "a", NOW + 1)
    token = await grant(store, "a", NOW + 2)
    await store.heartbeat("a", token, progress=0.5, now_ms=NOW + 3)
    late = LeaseChange("b", QUEUED, LeaseState.EXPIRED, "its deadline passed")
    await store.commit(Commit(leases=(late,), swaps=(SWAP,)), now_ms=NOW + 60)
    await store.end("c", None, now_ms=NOW + 61)
    await store.end("a", token, now_ms=NOW + 62)
    await store.commit(Commit(swaps=(replace(SWAP, outcome="done"),)), now_ms=NOW + 63)

    folded = fold(await store.events(after="0", limit=1_000, block_ms=0))
    for name in ("a", "b", "c", "d"):
        lease = await store.lease(name)
        assert lease is not None
        assert folded.leases[name] == unmoved(lease)
    assert folded.cards == (await store.read(now_ms=NOW)).cards
    assert folded.swaps["sw1"] == await store.swap("sw1")
    for versions in folded.versions.values():
        assert versions == list(range(1, len(versions) + 1))


async def test_heartbeats_are_silent(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    before = await store.events(after="0", limit=100, block_ms=0)
    await store.heartbeat("a", token, now_ms=NOW + 1)
    assert await store.events(after="0", limit=100, block_ms=0) == before
    assert await state(store, "a") is LeaseState.GRANTED
