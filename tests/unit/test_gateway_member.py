"""A gateway process as the coordinator sees it: joining, obeying, reporting, outages, and proofs in the background."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from swapper.core.orders import Command, Report
from swapper.core.types import Failure, Gate, WorkClass
from swapper.gateway.admission import Admission, Call
from swapper.gateway.member import Member
from swapper.gateway.turns import CallState
from tests.unit.gateway_doubles import (
    ALPHA,
    CHAT,
    STREAM,
    Clock,
    Served,
    Stream,
    answer,
    event,
    serve,
)
from tests.unit.gateway_link import FakeLink, command


async def told(gateway: Served, order: Command) -> Report:
    await gateway.link.send(order)
    return await gateway.link.reports.get()


async def test_a_call_before_a_close_is_counted_and_one_after_it_waits() -> None:
    async with serve() as gateway:
        stream = Stream().put(event("1"))
        gateway.upstream.scripts = [stream, answer({"late": True})]
        running = asyncio.create_task(gateway.call(STREAM))
        await gateway.upstream.arrived.get()
        report = await told(gateway, command("close", 10, 1, epoch=2))
        assert (report.outcome, report.data, report.token, report.n) == ("ok", {"in_flight": 1}, 10, 1)
        late = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()

        await gateway.link.send(command("drain", 10, 2, epoch=2))
        report = await told(gateway, command("close", 10, 3, epoch=2))
        assert (report.verb, report.n) == ("close", 3), "the drain is not answered while a call is in flight"
        stream.put(None)
        await running
        report = await gateway.link.reports.get()
        assert (report.verb, report.outcome, report.n) == ("drain", "ok", 2)

        report = await told(gateway, command("open", 10, 4, epoch=3, swap="sw_1", unproved=[]))
        assert report.outcome == "ok"
        assert (await late).headers["X-Swapper-Swap"] == "sw_1"


async def test_a_cut_is_answered_when_the_sockets_are_closed_even_while_a_drain_is_pending() -> None:
    async with serve() as gateway:
        gateway.upstream.scripts = [Stream().put(event("1"))]
        async with gateway.post(STREAM) as running:
            await running.content.readany()
            await told(gateway, command("close", 10, 1, epoch=2))
            await gateway.link.send(command("drain", 10, 2, epoch=2))
            await gateway.link.send(command("cut", 10, 3, epoch=2, reason="the drain limit"))
            reports = {report.verb: report for report in [await gateway.link.reports.get() for _ in range(2)]}
            assert reports["cut"].data == {"ended": 1, "requeued": 0}
            assert reports["drain"].outcome == "ok"
            await gateway.upstream.left.wait()
            assert b"the drain limit" in await running.read()


async def test_a_repeated_command_is_answered_from_the_record_and_an_older_one_refused() -> None:
    async with serve() as gateway:
        first = await told(gateway, command("close", 10, 1, epoch=2))
        await told(gateway, command("open", 10, 2, epoch=3, swap=None, unproved=[]))
        again = await told(gateway, command("close", 10, 1, epoch=2))
        assert again == first
        assert gateway.admission.gate(ALPHA).open
        old = await told(gateway, command("close", 9, 7, epoch=99))
        assert old.outcome == "refused"
        assert gateway.admission.gate(ALPHA) == Gate(3, open=True)


async def test_a_number_given_out_twice_is_no_repeated_command() -> None:
    """By a store that was rolled back: an answer to the one says nothing of the other."""
    async with serve() as gateway:
        await told(gateway, command("open", 10, 2, epoch=3, swap=None, unproved=[]))
        assert (await told(gateway, command("drain", 10, 2, epoch=3))).outcome == "refused"
        assert gateway.admission.gate(ALPHA).open


@pytest.mark.parametrize("verb", ["close", "open"])
async def test_an_epoch_older_than_the_gates_own_is_refused_with_that_epoch(verb: str) -> None:
    async with serve() as gateway:
        await told(gateway, command("open", 10, 1, epoch=7, swap="sw_1", unproved=UNPROVED))
        report = await told(gateway, command(verb, 11, 1, epoch=6, swap="sw_2", unproved=[]))
        assert (report.outcome, report.data) == ("refused", {"epoch": 7})
        assert gateway.admission.gate(ALPHA) == Gate(7, open=True)
        gateway.upstream.scripts = [answer({"id_slot": 0, "timings": {"cache_n": 2990, "prompt_n": 30}})]
        await gateway.call(CHAT, path="/completion")
        assert (await gateway.link.reports.get()).data["swap"] == "sw_1", "what is to be proved was not forgotten"


async def test_a_word_outside_a_swap_is_heeded_without_an_answer() -> None:
    async with serve() as gateway:
        await gateway.link.send(command("close", 0, 0, epoch=2))
        await gateway.link.send(command("open", 0, 0, epoch=3, swap=None, unproved=[]))
        report = await told(gateway, command("close", 10, 1, epoch=4))
        assert report.token == 10
        assert gateway.link.reports.empty()


async def test_an_order_nobody_knows_is_answered_with_a_sentence() -> None:
    async with serve() as gateway:
        report = await told(gateway, command("dance", 10, 1, epoch=2))
        assert report.outcome == "failed"
        assert report.detail is not None
        assert "dance" in report.detail
        report = await told(gateway, command("close", 10, 2))
        assert report.outcome == "failed"


async def test_a_member_that_leaves_says_so() -> None:
    async with serve() as gateway:
        link = gateway.link
    assert link.left == ["g1"]


async def test_a_stale_drain_is_dropped_when_the_gate_opens_again() -> None:
    async with serve() as gateway:
        stream = Stream().put(event("1"))
        gateway.upstream.scripts = [stream]
        running = asyncio.create_task(gateway.call(STREAM))
        await gateway.upstream.arrived.get()
        await told(gateway, command("close", 10, 1, epoch=2))
        await gateway.link.send(command("drain", 10, 2, epoch=2))
        report = await told(gateway, command("open", 10, 3, epoch=3, swap=None, unproved=[]))
        assert report.verb == "open"
        stream.put(None)
        await running
        await gateway.admission.drained(ALPHA)
        report = await told(gateway, command("close", 11, 1, epoch=4))
        assert report.verb == "close"


# ---- outages


def quiet(*, alone: bool = False) -> tuple[Clock, FakeLink, Admission, Member]:
    clock, link = Clock(), FakeLink()
    link.gates[ALPHA] = Gate(1, open=True)
    admission = Admission("g1", clock=clock)
    return clock, link, admission, Member(link, admission, alone=alone, beat_ms=5)


def call_of(admission: Admission) -> Call:
    call = admission.admit(ALPHA, WorkClass.NORMAL, "ann", 60_000)
    assert isinstance(call, Call)
    return call


async def test_nothing_is_admitted_before_the_store_was_heard() -> None:
    _, link, admission, member = quiet()
    link.down = True
    joining = asyncio.create_task(member.start())
    call = call_of(admission)
    await link.refused.wait()
    assert call.state is CallState.WAITING
    link.down = False
    await joining
    assert call.state is CallState.RUNNING
    await member.close()


async def test_after_a_lapse_the_gates_are_read_anew_before_anything_is_admitted() -> None:
    clock, link, admission, member = quiet()
    await member.start()
    assert call_of(admission).state is CallState.RUNNING
    link.down = True
    clock.now_ms += 20_000
    late = call_of(admission)
    assert late.state is CallState.WAITING
    link.gates[ALPHA] = Gate(2, open=False)
    link.down = False
    await link.beaten(lambda demand: any(record.waiting for record in demand))
    await link.next_beat()  # the one before was handled in full
    assert admission.fresh
    assert late.state is CallState.WAITING
    assert admission.gate(ALPHA) == Gate(2, open=False)
    await member.close()


@pytest.mark.parametrize(("passed_ms", "open_"), [(9_000, True), (11_000, False)])
async def test_a_gate_that_was_opened_by_whoever_did_not_know_yet_of_the_join_is_seen_soon(
    passed_ms: int, *, open_: bool
) -> None:
    """The commit was decided on a view from before, and so told nobody here; later on each is told of all."""
    clock, link, admission, member = quiet()
    link.gates[ALPHA] = Gate(1, open=False)
    await member.start()
    call = call_of(admission)
    link.gates[ALPHA] = Gate(2, open=True)
    clock.now_ms += passed_ms
    admission.renew(clock.now_ms + 10_000)
    await link.next_beat()
    await link.next_beat()
    assert (call.state is CallState.RUNNING) is open_
    await member.close()


async def test_a_store_that_comes_back_as_an_older_copy_is_told_of_the_epochs_it_lost() -> None:
    async with serve() as gateway:
        await told(gateway, command("close", 10, 1, epoch=7))
        gateway.link.down = True
        gateway.admission.on_change()
        await gateway.link.refused.wait()
        gateway.link.gates = {ALPHA: Gate(3, open=True)}
        gateway.link.down = False
        report = await gateway.link.reports.get()
        assert (report.verb, report.tenant, report.token, report.data) == ("ahead", ALPHA, 0, {"epoch": 7})
        assert gateway.admission.gate(ALPHA) == Gate(7, open=False)


async def test_alone_with_the_coordinator_an_outage_of_the_store_stops_no_resident() -> None:
    clock, link, admission, member = quiet(alone=True)
    await member.start()
    link.down = True
    for _ in range(4):
        link.refused.clear()
        await link.refused.wait()
        clock.now_ms += 4_000
    assert call_of(admission).state is CallState.RUNNING
    link.down = False
    await member.close()


async def test_a_report_is_delivered_once_the_store_is_back() -> None:
    async with serve() as gateway:
        link = gateway.link
        link.reports_down = True
        await link.send(command("close", 10, 1, epoch=2))
        await link.refused.wait()
        link.reports_down = False
        assert (await link.reports.get()).verb == "close"


async def test_a_member_whose_store_is_down_still_leaves() -> None:
    _, link, _, member = quiet()
    await member.start()
    link.down = True
    await member.close()
    assert link.left == []


async def test_after_an_outage_gates_that_shut_meanwhile_are_obeyed_even_when_alone() -> None:
    _, link, admission, member = quiet(alone=True)
    await member.start()
    link.down = True
    await link.refused.wait()
    link.gates[ALPHA] = Gate(2, open=False)
    link.down = False
    await link.next_beat()
    await link.next_beat()
    assert admission.gate(ALPHA) == Gate(2, open=False)
    await member.close()


@pytest.mark.parametrize("now_open", [True, False])
async def test_a_membership_that_the_store_had_ended_means_that_gates_may_have_moved_untold(now_open: bool) -> None:
    """Its clock was stepped: by ours nothing lapsed, yet no command came while a swap shut or opened the gate."""
    _, link, admission, member = quiet(alone=True)
    await member.start()
    link.gates[ALPHA] = Gate(2, open=now_open)
    link.member = False
    await link.next_beat()
    await link.next_beat()
    assert admission.gate(ALPHA) == Gate(2, open=now_open)
    await member.close()


async def test_a_member_that_breaks_stops_being_one_and_says_why() -> None:
    _, link, admission, member = quiet()
    await member.start()
    link.broken = True
    await link.send(command("close", 10, 1, epoch=2))
    await member.ended.wait()
    assert member.problem is not None
    assert "_obey" in member.problem
    assert admission.gate(ALPHA).open
    await member.close()


# ---- failed loads


async def test_only_a_new_failure_answers_the_calls_that_wait() -> None:
    async with serve(opened=False) as gateway:
        link = gateway.link
        link.failed[ALPHA] = Failure("no such file", 1, 5_000)
        await link.tell_cards()
        await link.looked()
        call = asyncio.create_task(gateway.call(CHAT))
        await gateway.waiting()
        await link.tell_cards()
        await link.looked()
        assert gateway.admission.waiting == 1
        link.failed[ALPHA] = replace(link.failed[ALPHA], count=2)
        await link.tell_cards()
        assert (await call).status == 502


# ---- proofs


UNPROVED = [{"snapshot": "a.bin", "slot": 0, "tokens": 3000}, {"snapshot": "b.bin", "slot": 1, "tokens": 4000}]


def finished(cache_n: int, prompt_n: int) -> list[bytes | Exception | None]:
    last: dict[str, object] = {
        "choices": [{"delta": {}, "finish_reason": "stop"}],
        "timings": {"cache_n": cache_n, "prompt_n": prompt_n, "predicted_n": 4},
    }
    return [event("{}"), event(json.dumps(last)), event("[DONE]"), None]


def slot(number: int, task: int, cache_n: int, prompt_n: int) -> dict[str, object]:
    tokens = {"n_prompt_tokens": cache_n + prompt_n + 3, "n_prompt_tokens_processed": 0, "n_prompt_tokens_cache": 0}
    return {"id": number, "id_task": task, "is_processing": False, **tokens}


async def restored(gateway: Served) -> None:
    await told(gateway, command("open", 10, 1, epoch=2, swap="sw_1", unproved=UNPROVED))


async def test_a_streamed_answer_proves_the_conversation_of_its_slot() -> None:
    async with serve(opened=False) as gateway:
        await restored(gateway)
        gateway.upstream.slots = [{"id": 0, "is_processing": False}, slot(1, 12, 3990, 50)]
        gateway.upstream.scripts = [Stream().put(*finished(3990, 50))]
        await gateway.call(STREAM)
        report = await gateway.link.reports.get()
        assert (report.verb, report.tenant, report.card, report.token) == ("proof", ALPHA, "gpu0", 0)
        assert report.data == {
            "swap": "sw_1",
            "snapshot": "b.bin",
            "slot": 1,
            "result": "warm",
            "cache_n": 3990,
            "reason": None,
            "tokens": 4000,
            "made_room": True,
            "continued": False,
        }
        assert gateway.upstream.slot_queries == [{"model": "alpha", "autoload": "false"}]


async def test_an_answer_that_names_its_slot_needs_no_question() -> None:
    async with serve(opened=False) as gateway:
        await restored(gateway)
        gateway.upstream.scripts = [answer({"id_slot": 0, "timings": {"cache_n": 0, "prompt_n": 3020}})]
        await gateway.call(CHAT, path="/completion")
        report = await gateway.link.reports.get()
        assert (report.data["snapshot"], report.data["result"]) == ("a.bin", "cold")
        assert "read again" in str(report.data["reason"])
        assert gateway.upstream.slot_queries == []


async def test_what_cannot_be_told_apart_stays_unproved_until_it_can() -> None:
    async with serve(opened=False) as gateway:
        await restored(gateway)
        gateway.upstream.slots = [slot(0, 11, 2990, 30), slot(1, 12, 2990, 30), {"id": 2, "is_processing": True}]
        gateway.upstream.scripts = [Stream().put(*finished(2990, 30)), Stream().put(*finished(3030, 20))]
        await gateway.call(STREAM)
        await gateway.member.talks.idle()
        assert gateway.link.reports.empty()
        gateway.upstream.slots = [slot(0, 15, 3030, 20), slot(1, 12, 2990, 30)]
        await gateway.call(STREAM)
        report = await gateway.link.reports.get()
        assert (report.data["snapshot"], report.data["result"]) == ("a.bin", "warm")


async def test_while_nothing_is_to_be_proved_one_look_tells_the_slot_and_nothing_is_said() -> None:
    async with serve(opened=False) as gateway:
        await restored(gateway)
        await told(gateway, command("close", 11, 1, epoch=3))
        await told(gateway, command("open", 11, 2, epoch=4, swap="sw_2", loaded=True, unproved=[]))
        gateway.upstream.scripts = [Stream().put(*finished(3990, 50))]
        gateway.upstream.slots = [slot(0, 9, 50, 20), slot(1, 10, 3990, 50)]
        await gateway.call(STREAM)
        await gateway.member.talks.idle()
        assert len(gateway.upstream.slot_queries) == 1
        assert [talk.slot for talk in gateway.member.talks.index.talks(ALPHA)] == [1]
        assert gateway.link.reports.empty()


async def test_a_call_for_a_model_that_rests_after_a_failed_load_is_told_at_once() -> None:
    async with serve(opened=False) as gateway:
        gateway.link.failed[ALPHA] = Failure("bad magic", 1, int(time.time() * 1000) + 60_000)
        await gateway.link.tell_cards()
        await gateway.link.looked()
        async with gateway.post(CHAT) as response:
            assert response.status == 502
            assert "bad magic" in await response.text()
