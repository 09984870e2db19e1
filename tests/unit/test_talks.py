"""The conversations of a gateway process: told, recalled, brought back from disk for their call, replayed when idle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from swapper.core.keeping import RECALL
from swapper.core.orders import Command, Report
from swapper.core.steps import PLACED
from swapper.gateway.bring import BRING_S
from swapper.snapshots.conversation import Kept, Place
from tests.unit.gateway_doubles import ALPHA, Served, Stream, answer, event, serve

HI = [{"role": "user", "content": "hi"}]
TURN_2 = [*HI, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "and?"}]


BACK = {"snapshot": "a.kv", "ok": True, "slot": 1, "tokens": 2_000}


def body(messages: list[dict[str, str]], **more: object) -> dict[str, object]:
    return {"model": "alpha", "messages": messages, **more}


def figures(cache_n: int, prompt_n: int, predicted_n: int = 5, **more: object) -> dict[str, object]:
    timings = {"cache_n": cache_n, "prompt_n": prompt_n, "predicted_n": predicted_n}
    return {"timings": timings, **more}


def command(verb: str, n: int, args: Mapping[str, Any], token: int = 7) -> Command:
    return Command("gateway:g1", "gpu0", ALPHA, token, n, verb, dict(args))


async def say(gateway: Served, verb: str, n: int, token: int = 7, **args: object) -> Report:
    """Command the gateway; its answer."""
    await gateway.link.send(command(verb, n, args, token))
    while (report := await gateway.link.reports.get()).verb != verb:
        pass
    return report


async def talked(gateway: Served, messages: list[dict[str, str]] = HI, left: int = 2_000) -> str:
    """One answered call; the id of its conversation."""
    gateway.upstream.scripts = [answer(figures(0, left - 4))]
    await gateway.call(body(messages))
    await gateway.admission.drained(ALPHA)  # the client may be answered before that is noted
    return gateway.member.talks.index.talks(ALPHA)[0].id


async def test_a_gate_that_shuts_tells_the_conversations_believed_in_the_server_and_no_text_of_them() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        report = await say(gateway, "close", 1, epoch=2)
        (told,) = report.data["talks"]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        assert (told["id"], told["tokens"], told["recallable"]) == (name, 2_000, True)
        assert "hi" not in json.dumps(report.data)


async def test_a_recall_sends_the_last_request_again_with_nothing_to_generate_and_says_which_slot_has_it() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        gateway.upstream.scripts = [answer(figures(1_995, 1, __verbose={"id_slot": 3}))]
        report = await say(gateway, RECALL, 1, conversation=name, limit_ms=5_000)
        assert report.data == {"slot": 3, "tokens": 1_996, "cache_n": 1_995, "prompt_n": 1}
        sent = json.loads(gateway.upstream.seen[-1].body)
        assert (sent["messages"], sent["max_tokens"], sent["stream"]) == (HI, 0, False)
        assert sent["add_generation_prompt"] is False


async def test_a_recall_that_the_server_does_not_answer_in_time_is_given_up_and_its_conversation_is_cold() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        gateway.upstream.scripts = [Stream()]
        report = await say(gateway, RECALL, 1, conversation=name, limit_ms=50)
        assert report.outcome == "failed"
        assert "not in the server's cache any more" in str(report.detail)
        assert gateway.member.talks.index.talks(ALPHA) == ()


@pytest.mark.parametrize(
    ("error", "named"),
    [
        ({"type": "invalid_request_error", "code": 400, "message": "my secret"}, " (invalid_request_error, 400)"),
        ({"type": "he said: my secret", "message": "my secret"}, ""),
        ("my secret", ""),
    ],
)
async def test_of_a_refusal_only_its_kind_is_told_since_its_message_may_quote_the_conversation(
    error: object, named: str
) -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        gateway.upstream.scripts = [answer({"error": error}, status=400)]
        report = await say(gateway, RECALL, 1, conversation=name, limit_ms=5_000)
        assert report.detail == f"the server refused it: HTTP 400{named}"


async def test_under_strict_privacy_no_text_is_kept() -> None:
    async with serve(private=frozenset({ALPHA})) as gateway:
        name = await talked(gateway)
        report = await say(gateway, RECALL, 1, conversation=name, limit_ms=5_000)
        assert report.outcome == "failed"
        assert not gateway.member.talks.index.talks(ALPHA)[0].recallable


async def on_disk(gateway: Served) -> str:
    """A conversation that was unloaded with its model, which serves again now."""
    name = await talked(gateway)
    await say(gateway, "close", 1, epoch=2)
    kept = [{"snapshot": "a.kv", "id": name, "links": [name], "tokens": 2_000}]
    await say(gateway, "open", 2, epoch=3, swap="sw_1", loaded=True, unproved=[], kept=kept)
    return name


async def wanted(gateway: Served) -> Report:
    while (report := await gateway.link.reports.get()).verb != "wanted":
        pass
    return report


async def test_a_call_whose_conversation_lies_on_disk_waits_until_it_is_back_and_its_answer_proves_it() -> None:
    async with serve() as gateway:
        name = await on_disk(gateway)
        sent = len(gateway.upstream.seen)
        gateway.upstream.scripts = [answer(figures(1_990, 30, id_slot=1))]
        call = asyncio.create_task(gateway.call(body(TURN_2)))
        report = await wanted(gateway)
        assert (report.card, report.data["snapshot"], report.data["id"]) == ("gpu0", "a.kv", name)
        assert len(gateway.upstream.seen) == sent
        await gateway.link.send(
            command("placed", 0, {"snapshot": "a.kv", "ok": True, "slot": 1, "tokens": 2_000}, token=0)
        )
        assert (await call).status == 200
        await gateway.member.talks.idle()
        proof = gateway.link.reports.get_nowait()
        assert (proof.verb, proof.data["result"], proof.data["continued"]) == ("proof", "warm", True)


async def test_one_that_cannot_be_brought_is_read_by_the_server_and_said_to_be_cold() -> None:
    async with serve() as gateway:
        name = await on_disk(gateway)
        gateway.upstream.scripts = [answer(figures(0, 2_020))]
        call = asyncio.create_task(gateway.call(body(TURN_2)))
        await wanted(gateway)
        gone = {"snapshot": "a.kv", "ok": False, "detail": "its file is gone"}
        await gateway.link.send(command("placed", 0, gone, token=0))
        assert (await call).status == 200
        counts = gateway.member.talks.index.counts(ALPHA)
        assert {str(why): tokens for why, tokens in counts.reread.items()} == {"swapped cold": 1_996}
        assert name not in {talk.id for talk in gateway.member.talks.index.talks(ALPHA)}


async def test_two_calls_of_one_conversation_have_it_brought_once() -> None:
    async with serve() as gateway:
        await on_disk(gateway)
        gateway.upstream.scripts = [answer(figures(1_990, 30))]
        calls = [asyncio.create_task(gateway.call(body(TURN_2))) for _ in range(2)]
        await wanted(gateway)
        await gateway.waiting(0)
        await gateway.link.send(
            command("placed", 0, {"snapshot": "a.kv", "ok": True, "slot": 1, "tokens": 2_000}, token=0)
        )
        assert [(await call).status for call in calls] == [200, 200]
        left = [gateway.link.reports.get_nowait().verb for _ in range(gateway.link.reports.qsize())]
        assert "wanted" not in left


async def test_what_was_not_saved_is_cold_once_the_model_was_loaded_anew() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        await say(gateway, "close", 1, epoch=2)
        await say(gateway, "open", 2, epoch=3, swap="sw_1", loaded=True, unproved=[], kept=[])
        talk = gateway.member.talks.index.conversation(ALPHA, name)
        assert talk is not None
        assert talk.place is Place.COLD


async def test_a_gate_that_opens_again_without_a_load_forgets_nothing() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        await say(gateway, "close", 1, epoch=2)
        await say(gateway, "open", 2, epoch=3, swap="sw_1", loaded=False, unproved=[], kept=[])
        assert [talk.id for talk in gateway.member.talks.index.talks(ALPHA)] == [name]


async def replaying(gateway: Served) -> tuple[str, Stream]:
    """A model that cannot be restored was loaded, and its conversation is being read again; the server's answer."""
    name = await talked(gateway)
    await say(gateway, "close", 1, epoch=2)
    reading = Stream()
    gateway.upstream.scripts = [reading, answer(figures(1_990, 6, __verbose={"id_slot": 0}))]
    seen = len(gateway.upstream.seen)
    again = [{"snapshot": f"replay:{name}", "id": name, "tokens": 2_000}]
    await say(gateway, "open", 2, epoch=3, swap="sw_1", loaded=True, unproved=[], kept=[], recall=again)
    while len(gateway.upstream.seen) == seen:
        await gateway.upstream.arrived.get()
    return name, reading


async def test_a_replay_gives_way_to_a_call_of_another_conversation_and_is_begun_again_when_it_is_answered() -> None:
    async with serve() as gateway:
        name, _ = await replaying(gateway)
        gateway.upstream.scripts = [answer(figures(0, 9, __verbose={"id_slot": 1}))]
        other = await gateway.call(body([{"role": "user", "content": "something else"}]))
        assert other.status == 200
        await asyncio.wait_for(gateway.upstream.left.wait(), 5)
        while (report := await gateway.link.reports.get()).verb != "recalled":
            pass
        assert (report.outcome, report.data["snapshot"]) == ("ok", f"replay:{name}")


async def test_a_call_of_the_very_conversation_waits_for_its_replay() -> None:
    async with serve() as gateway:
        name, reading = await replaying(gateway)
        sent = len(gateway.upstream.seen)
        call = asyncio.create_task(gateway.call(body(TURN_2)))
        await gateway.link.beaten(lambda demand: any(record.running for record in demand))
        assert len(gateway.upstream.seen) == sent
        gateway.upstream.scripts = [answer(figures(1_996, 20))]
        reading.put(json.dumps(figures(0, 1_996, __verbose={"id_slot": 0})).encode(), None)
        assert (await call).status == 200
        while (report := await gateway.link.reports.get()).verb != "recalled":
            pass
        assert (report.outcome, report.data["snapshot"]) == ("ok", f"replay:{name}")
        assert len(gateway.upstream.seen) == sent + 1
        assert not gateway.upstream.left.is_set()


async def test_a_slot_is_believed_no_more_once_an_equally_long_answer_came_from_nobody_knows_where() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [answer(figures(0, 1_996, id_slot=0))]
        await gateway.call(body(HI))
        first = gateway.member.talks.index.talks(ALPHA)[0]
        assert first.slot == 0
        gateway.upstream.slots = [{"id": 0, "is_processing": True}]
        await talked(gateway, [{"role": "user", "content": "something else"}])
        await gateway.member.talks.idle()
        assert {talk.slot for talk in gateway.member.talks.index.talks(ALPHA)} == {None}


async def test_a_gate_that_shuts_while_an_answer_is_looked_at_is_drained_only_once_that_has_proved_what_it_can() -> (
    None
):
    async with serve() as gateway:
        back = [{"snapshot": "a.kv", "slot": 1, "tokens": 2_000}]
        await say(gateway, "open", 1, epoch=2, swap="sw_1", loaded=True, unproved=back)
        gateway.upstream.slots = [{"id": 1, "is_processing": False, "id_task": 9, "n_prompt_tokens": 2_014}]
        gateway.upstream.scripts = [answer(figures(1_990, 20))]
        await gateway.call(body(TURN_2))
        report = await say(gateway, "close", 2, epoch=3)
        assert report.data == {"in_flight": 1}
        await gateway.link.send(command("drain", 3, {"epoch": 3}))
        verbs = [(await gateway.link.reports.get()).verb for _ in range(2)]
        assert verbs == ["proof", "drain"]


async def test_a_conversation_whose_client_left_in_the_midst_of_the_answer_is_known_all_the_same() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event('{"choices":[]}'))]
        async with gateway.post(body(HI, stream=True)) as response:
            await response.content.readany()
        await gateway.upstream.left.wait()
        await gateway.link.beaten(lambda demand: not demand)
        (talk,) = gateway.member.talks.index.talks(ALPHA)
        assert (talk.tokens, talk.recallable) == (0, True)


async def test_a_conversation_saved_as_its_prompt_is_proved_as_soon_as_nobody_calls() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        await say(gateway, "close", 1, epoch=2)
        gateway.upstream.scripts = [answer(figures(1_995, 1, __verbose={"id_slot": 3}))]
        await say(gateway, RECALL, 2, conversation=name, limit_ms=5_000)
        back = [{"snapshot": "a.kv", "slot": 0, "tokens": 1_996, "id": name, "links": [name], "strategy": "slots"}]
        gateway.upstream.scripts = [answer(figures(1_995, 1, __verbose={"id_slot": 0}))]
        await gateway.link.send(command("open", 3, {"epoch": 3, "swap": "sw_1", "loaded": True, "unproved": back}))
        while (report := await gateway.link.reports.get()).verb != "proof":
            pass
        assert (report.data["result"], report.data["cache_n"]) == ("warm", 1_995)


async def test_one_that_was_saved_with_its_answer_is_proved_by_its_next_turn_alone() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        await say(gateway, "close", 1, epoch=2)
        seen = len(gateway.upstream.seen)
        back = [{"snapshot": "a.kv", "slot": 0, "tokens": 2_000, "id": name, "links": [name], "strategy": "slots"}]
        await say(gateway, "open", 2, epoch=3, swap="sw_1", loaded=True, unproved=back)
        gateway.upstream.scripts = [answer(figures(1_999, 20))]
        await gateway.call(body(TURN_2))
        assert len(gateway.upstream.seen) == seen + 1


async def test_a_call_that_comes_before_its_conversation_is_replayed_is_not_kept_waiting_for_that() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        await say(gateway, "close", 1, epoch=2)
        held = Stream("application/json")
        gateway.upstream.scripts = [held, answer(figures(0, 2_020))]
        other = asyncio.create_task(gateway.call(body([{"role": "user", "content": "x"}])))
        again = [{"snapshot": f"replay:{name}", "id": name, "tokens": 2_000}]
        await gateway.waiting(1)
        sent = len(gateway.upstream.seen)
        await say(gateway, "open", 2, epoch=3, swap="sw_1", loaded=True, unproved=[], kept=[], recall=again)
        while len(gateway.upstream.seen) == sent:
            await gateway.upstream.arrived.get()
        assert (await gateway.call(body(TURN_2))).status == 200
        held.put(json.dumps(figures(0, 9)).encode(), None)
        await other
        while (report := await gateway.link.reports.get()).verb != "recalled":
            pass
        assert report.outcome == "failed"
        assert "before its turn" in str(report.detail)


async def test_a_call_whose_card_is_wanted_while_its_conversation_is_on_its_way_waits_and_is_not_read_anew() -> None:
    async with serve() as gateway:
        name = await on_disk(gateway)
        sent = len(gateway.upstream.seen)
        call = asyncio.create_task(gateway.call(body(TURN_2)))
        await wanted(gateway)
        await say(gateway, "close", 3, epoch=4)
        away = {"snapshot": "a.kv", "ok": False, "stays": True, "detail": "the card is being handed over"}
        await gateway.link.send(command("placed", 0, away, token=0))
        await gateway.waiting(1)
        assert len(gateway.upstream.seen) == sent
        back = [{"snapshot": "a.kv", "slot": 0, "tokens": 2_000, "id": name, "links": [name]}]
        gateway.upstream.scripts = [answer(figures(1_990, 30))]
        await gateway.link.send(command("open", 4, {"epoch": 5, "swap": "sw_2", "loaded": True, "unproved": back}))
        assert (await call).status == 200


async def test_a_call_of_a_conversation_that_is_being_recalled_waits_for_that() -> None:
    """Its slot is at work, so that the server would read it anew in another."""
    async with serve() as gateway:
        name = await talked(gateway)
        reading = Stream()
        gateway.upstream.scripts = [reading]
        sent = len(gateway.upstream.seen)
        recall = asyncio.create_task(say(gateway, RECALL, 1, conversation=name, limit_ms=60_000, beside=True))
        while len(gateway.upstream.seen) == sent:
            await gateway.upstream.arrived.get()
        call = asyncio.create_task(gateway.call(body(TURN_2)))
        await gateway.link.beaten(lambda demand: any(record.running for record in demand))
        gateway.upstream.scripts = [answer(figures(0, 9))]
        other = await gateway.call(body([{"role": "user", "content": "something else"}]))
        assert other.status == 200
        assert len(gateway.upstream.seen) == sent + 2
        gateway.upstream.scripts = [answer(figures(1_996, 20))]
        reading.put(json.dumps(figures(1_900, 96, __verbose={"id_slot": 0})).encode(), None)
        assert (await recall).outcome == "ok"
        assert (await call).status == 200


async def test_a_call_of_a_conversation_that_makes_room_waits_until_it_has_left_and_has_it_back() -> None:
    """Sent meanwhile it would be read anew, its slot being another's by the time the server looks."""
    async with serve() as gateway:
        name = await talked(gateway)
        gateway.upstream.scripts = [answer(figures(1_900, 96, __verbose={"id_slot": 0}))]
        recalled: dict[str, Any] = {"conversation": name, "limit_ms": 60_000, "beside": True, "for": "b.kv"}
        assert (await say(gateway, RECALL, 1, **recalled)).outcome == "ok"
        sent = len(gateway.upstream.seen)
        gateway.upstream.scripts = [answer(figures(1_996, 20))]
        call = asyncio.create_task(gateway.call(body(TURN_2)))
        await gateway.link.beaten(lambda demand: any(record.running for record in demand))
        kept = [{"snapshot": "a.kv", "id": name, "links": [name], "tokens": 1_996}]
        await say(gateway, PLACED, 2, snapshot="b.kv", ok=True, slot=0, tokens=900, kept=kept)
        assert (await asyncio.wait_for(wanted(gateway), BRING_S / 2)).data["snapshot"] == "a.kv"
        assert len(gateway.upstream.seen) == sent
        await say(gateway, PLACED, 3, snapshot="a.kv", ok=True, slot=0, tokens=1_996)
        assert (await asyncio.wait_for(call, BRING_S / 2)).status == 200


@pytest.mark.parametrize("said", [{"ok": False, "again": True}, {"ok": False, "detail": "why", "stays": True}])
async def test_where_nothing_has_to_make_room_after_all_it_is_sent(said: Mapping[str, Any]) -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        gateway.upstream.scripts = [answer(figures(1_900, 96, __verbose={"id_slot": 0}))]
        recalled: dict[str, Any] = {"conversation": name, "limit_ms": 60_000, "beside": True, "for": "b.kv"}
        await say(gateway, RECALL, 1, **recalled)
        gateway.upstream.scripts = [answer(figures(1_996, 20))]
        call = asyncio.create_task(gateway.call(body(TURN_2)))
        await gateway.link.beaten(lambda demand: any(record.running for record in demand))
        await say(gateway, PLACED, 2, snapshot="b.kv", **said)
        assert (await asyncio.wait_for(call, BRING_S / 2)).status == 200


async def test_what_made_room_as_nobody_s_is_believed_in_the_server_no_more() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        index = gateway.member.talks.index
        index.stands(ALPHA, name, 0)
        index.kept(ALPHA, [Kept("other.kv", "ab" * 16, ("ab" * 16,), 900)])
        nobodys: list[dict[str, object]] = [{"snapshot": "d.kv", "id": "", "links": [], "tokens": 2_000}]
        gateway.member.talks.placed(
            ALPHA, {"snapshot": "other.kv", "ok": True, "slot": 0, "tokens": 900, "kept": nobodys}
        )
        talk = index.conversation(ALPHA, name)
        assert talk is not None
        assert (talk.place, talk.slot) == (Place.COLD, None)
        assert [talk.id for talk in index.talks(ALPHA)] == ["ab" * 16]
