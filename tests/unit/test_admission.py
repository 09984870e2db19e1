"""Admission without HTTP: who runs, who waits, in which order, and what the store would be told."""

from __future__ import annotations

import asyncio

import pytest

from swapper.core.types import Gate, WorkClass
from swapper.gateway.admission import Admission, Call
from swapper.gateway.turns import CallState, Full, Turn
from tests.unit.gateway_doubles import ALPHA, Clock

BETA = "llama/beta"


def admission(clock: Clock | None = None, *, max_waiting: int = 10, limit: int | None = None) -> Admission:
    made = Admission(
        "g1", clock=clock or Clock(), max_waiting=max_waiting, concurrency={} if limit is None else {ALPHA: limit}
    )
    made.renew(100_000)
    return made


def admit(gates: Admission, klass: WorkClass = WorkClass.NORMAL, tenant: str = ALPHA) -> Call:
    call = gates.admit(tenant, klass, "ann", 60_000)
    assert isinstance(call, Call)
    return call


def test_an_open_gate_admits_at_once_without_an_event_loop() -> None:
    gates = admission()
    gates.open(ALPHA, 1)
    assert admit(gates).state is CallState.RUNNING
    assert gates.in_flight(ALPHA) == 1


def test_a_tenant_never_heard_of_waits_and_is_demand() -> None:
    gates = admission()
    call = admit(gates)
    assert call.state is CallState.WAITING
    (demand,) = gates.demand()
    assert (demand.tenant, demand.klass, demand.waiting, demand.running) == (ALPHA, WorkClass.NORMAL, 1, 0)


def test_the_oldest_arrival_is_told_in_the_stores_time() -> None:
    clock = Clock()
    gates = admission(clock)
    gates.epoch_offset_ms = 1_000_000
    admit(gates)
    clock.now_ms += 500
    admit(gates)
    assert gates.demand()[0].oldest_ms == 1_001_000


async def test_an_opening_gate_admits_by_class_and_then_by_arrival() -> None:
    gates = admission(limit=1)
    order: list[str] = []
    calls = {
        name: admit(gates, klass)
        for name, klass in {
            "batch": WorkClass.BATCH,
            "normal 1": WorkClass.NORMAL,
            "interactive": WorkClass.INTERACTIVE,
            "normal 2": WorkClass.NORMAL,
        }.items()
    }

    async def run(name: str, call: Call) -> None:
        assert await call.turn() is Turn.RUN
        order.append(name)
        call.finish()

    tasks = [asyncio.create_task(run(name, call)) for name, call in calls.items()]
    gates.open(ALPHA, 1, "sw_1")
    await asyncio.gather(*tasks)
    assert order == ["interactive", "normal 1", "normal 2", "batch"]
    assert calls["batch"].swap == "sw_1"


def test_a_closed_gate_tells_what_is_in_flight_and_holds_who_comes_later() -> None:
    gates = admission()
    gates.open(ALPHA, 1)
    first = admit(gates)
    assert gates.close(ALPHA, 2) == 1
    assert admit(gates).state is CallState.WAITING
    assert first.state is CallState.RUNNING


def test_an_older_epoch_changes_nothing() -> None:
    gates = admission()
    gates.open(ALPHA, 5)
    gates.close(ALPHA, 4)
    assert gates.gate(ALPHA) == Gate(5, open=True)
    gates.close(ALPHA, 6)
    assert not gates.open(ALPHA, 5)
    assert gates.gate(ALPHA) == Gate(6, open=False)


async def test_drained_returns_when_the_last_call_has_finished() -> None:
    gates = admission()
    gates.open(ALPHA, 1)
    first, second = admit(gates), admit(gates)
    gates.close(ALPHA, 2)
    drained = asyncio.create_task(gates.drained(ALPHA))
    first.finish()
    await asyncio.sleep(0)
    assert not drained.done()
    second.finish()
    await drained


def test_a_waiting_call_that_leaves_is_no_demand_any_more() -> None:
    gates = admission()
    changes: list[int] = []
    gates.on_change = lambda: changes.append(gates.waiting)
    call = admit(gates)
    call.finish()
    call.finish()
    assert gates.demand() == ()
    assert changes == [1, 0]


def test_the_store_is_told_when_a_class_begins_or_ends_to_wait_and_not_for_each_call() -> None:
    gates = admission()
    told: list[int] = []
    gates.on_change = lambda: told.append(gates.waiting)
    batch = [admit(gates, WorkClass.BATCH) for _ in range(3)]
    assert told == [1]
    urgent = admit(gates, WorkClass.INTERACTIVE)
    assert told == [1, 4]
    for call in (*batch, urgent):
        call.finish()
    assert told == [1, 4, 1, 0]


def test_a_lapsed_membership_counts_as_a_shut_gate_until_it_is_renewed() -> None:
    clock = Clock()
    gates = admission(clock)
    gates.open(ALPHA, 1)
    clock.now_ms = 100_000
    call = admit(gates)
    assert call.state is CallState.WAITING
    gates.renew(200_000)
    assert call.state is CallState.RUNNING


def test_too_many_waiting_calls_are_turned_away() -> None:
    gates = admission(max_waiting=1)
    admit(gates)
    assert gates.admit(ALPHA, WorkClass.NORMAL, "ann", 1) == Full(1)


def test_concurrency_bounds_who_runs_of_one_model_only() -> None:
    gates = admission(limit=2)
    gates.open(ALPHA, 1)
    gates.open(BETA, 1)
    first, second, third = admit(gates), admit(gates), admit(gates)
    assert third.state is CallState.WAITING
    assert admit(gates, tenant=BETA).state is CallState.RUNNING
    first.finish()
    assert (second.state, third.state) == (CallState.RUNNING, CallState.RUNNING)


def test_a_cut_counts_started_calls_as_ended_and_the_others_as_requeued() -> None:
    gates = admission()
    gates.open(ALPHA, 1)
    started, fresh = admit(gates), admit(gates)
    started.first_byte()
    cut: list[Call] = []
    for call in (started, fresh):
        call.on_cut = lambda call=call: cut.append(call)
    gates.close(ALPHA, 2)
    outcome = gates.cut(ALPHA, "the drain limit")
    assert (outcome.ended, outcome.requeued) == (1, 1)
    assert set(cut) == {started, fresh}
    assert started.cut_reason == "the drain limit"
    assert gates.cut(ALPHA, "again").ended == 0


def test_a_requeued_call_keeps_its_place_in_the_queue() -> None:
    gates = admission(limit=1)
    gates.open(ALPHA, 1)
    early = admit(gates)
    gates.close(ALPHA, 2)
    late = admit(gates)
    early.requeue()
    gates.open(ALPHA, 3)
    assert (early.state, late.state) == (CallState.RUNNING, CallState.WAITING)


def test_a_parked_call_is_demand_but_is_passed_over_until_its_pause_ends() -> None:
    gates = admission()
    gates.open(ALPHA, 1)
    call = admit(gates)
    call.requeue(parked=True)
    assert gates.demand()[0].waiting == 1
    assert call.state is CallState.PARKED
    call.unpark()
    assert call.state is CallState.RUNNING


async def test_a_failed_load_answers_every_waiting_call_with_the_words_given() -> None:
    gates = admission()
    calls = [admit(gates), admit(gates)]
    turns = [asyncio.create_task(call.turn()) for call in calls]
    await asyncio.sleep(0)
    assert gates.fail(ALPHA, "tensor data is not within the file bounds") == 2
    assert [await turn for turn in turns] == [Turn.FAILED, Turn.FAILED]
    assert calls[0].error == "tensor data is not within the file bounds"
    assert gates.waiting == 0


async def test_a_call_waits_no_longer_than_it_may_over_all_its_waits() -> None:
    clock = Clock()
    gates = admission(clock)
    gates.open(ALPHA, 1)
    call = gates.admit(ALPHA, WorkClass.NORMAL, "ann", 1_000)
    assert isinstance(call, Call)
    gates.close(ALPHA, 2)
    for _ in range(2):
        call.requeue()
        clock.now_ms += 400
        gates.open(ALPHA, gates.gate(ALPHA).epoch + 1)
        gates.close(ALPHA, gates.gate(ALPHA).epoch + 1)
    assert call.waited_ms == 800
    call.requeue()
    clock.now_ms += 200
    assert await call.turn() is Turn.TIMED_OUT


@pytest.mark.parametrize("opened", [True, False])
def test_gates_read_from_the_store_are_taken_over(opened: bool) -> None:
    gates = admission()
    gates.apply({ALPHA: Gate(7, open=opened)})
    assert gates.gate(ALPHA) == Gate(7, open=opened)
