"""What the agent reports unasked: fresh, in order, and only when it is news; servers that fall silent are started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from swapper.core.orders import Report
from swapper.errors import BackendError
from tests.unit.agent_doubles import MemoryLink, RecordingBackend, Running, ScriptedProbe, at_work, command
from workers import observe, watch
from workers.backend import TenantState


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend("llama/med")


@pytest.fixture
def other() -> RecordingBackend:
    return RecordingBackend("other/x")


@pytest.fixture
def probe() -> ScriptedProbe:
    return ScriptedProbe(500)


@pytest.fixture
def running(
    tmp_path: Path, link: MemoryLink, backend: RecordingBackend, other: RecordingBackend, probe: ScriptedProbe
) -> Running:
    probes = {"gpu0": probe, "gpu1": ScriptedProbe(700)}
    return lambda: at_work(tmp_path / "marks", link, {"llama": backend, "other": other}, probes)


async def test_the_first_report_has_every_tenant_and_every_card(link: MemoryLink, running: Running) -> None:
    async with running():
        first = await link.volunteered("observed")
    assert (first.executor, first.token, first.n, first.outcome) == ("agent:main", 0, 0, "ok")
    assert first.data["tenants"] == {"llama/med": "unloaded", "other/x": "unloaded"}
    cards = cast("dict[str, dict[str, object]]", first.data["cards"])
    sizes = {card: [reading[f"{kind}_mib"] for kind in ("total", "used", "free")] for card, reading in cards.items()}
    assert sizes == {"gpu0": [24_000, 23_500, 500], "gpu1": [24_000, 23_300, 700]}
    assert [reading["holders"] for reading in cards.values()] == [[], []]


async def test_a_change_is_reported_and_a_hint_without_a_change_is_not(
    link: MemoryLink, backend: RecordingBackend, other: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.volunteered("observed")
        other.change.set()
        backend.states["llama/med"] = TenantState.LOADING
        backend.change.set()
        second = await link.volunteered("observed", count=2)
    assert second.data["tenants"] == {"llama/med": "loading", "other/x": "unloaded"}
    assert len([r for r in link.reports if r.verb == "observed"]) == 2


async def test_what_a_load_changed_is_reported_before_its_answer(link: MemoryLink, running: Running) -> None:
    async with running():
        await link.send(command("load", 9, 1))
        await link.answer(9, 1)
    answered = next(i for i, report in enumerate(link.reports) if report.token == 9)
    shown = [report for report in link.reports[:answered] if report.verb == "observed"][-1]
    assert shown.data["tenants"] == {"llama/med": "loaded", "other/x": "unloaded"}
    assert shown.data["marks"] == {"gpu0": (9, 1), "gpu1": (0, 0)}


async def test_the_steps_of_our_own_verb_are_no_news_and_its_end_is(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 60.0)
    load = backend.hold("load llama/med")
    async with running() as agent:
        await link.volunteered("observed")
        await link.send(command("load", 9, 1))
        await load.begun.wait()
        backend.states["llama/med"] = TenantState.LOADING
        backend.change.set()
        await backend.heard.wait()
        for _ in range(2):
            await agent.watch.look("other")
        load.end.set()
        await link.answer(9, 1)
        backend.states["llama/med"] = TenantState.FAILED
        backend.change.set()
        await link.until(lambda reports: seen(reports)[-1:] == ["failed"])
    assert seen(link.reports) == ["unloaded", "loaded", "failed"]


def seen(reports: list[Report]) -> list[str]:
    tenants = [report.data["tenants"] for report in reports if report.verb == "observed"]
    return [states["llama/med"] for states in tenants if isinstance(states, dict)]


async def test_a_hung_server_is_unreachable_and_holds_nobody_up(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "OBSERVE_S", 0.01)
    backend.hung = True
    async with running():
        first = await link.volunteered("observed")
        assert first.data["tenants"] == {"llama/med": "unreachable", "other/x": "unloaded"}
        await link.send(command("load", 9, 1, tenant="other/x", card="gpu1"))
        assert (await link.answer(9, 1)).outcome == "ok"


async def test_a_tenant_that_is_not_configured_is_reported_and_counts_on_the_card_of_its_server(
    link: MemoryLink, backend: RecordingBackend, probe: ScriptedProbe, running: Running
) -> None:
    backend.states["llama/old"] = TenantState.LOADED
    async with running():
        first = await link.volunteered("observed")
    assert first.data["tenants"] == {"llama/med": "unloaded", "other/x": "unloaded", "llama/old": "loaded"}
    assert probe.asked[0] == ({"llama/med": TenantState.UNLOADED, "llama/old": TenantState.LOADED}, ())


async def test_a_tenant_that_is_not_configured_can_be_sent_away_and_its_end_is_reported(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    backend.states["llama/old"] = TenantState.LOADED
    old = "llama/old"
    async with running():
        await link.send(command("drain", 9, 1, tenant=old))
        assert (await link.answer(9, 1)).outcome == "ok"
        await link.send(command("release", 9, 2, tenant=old, limit_ms=5))
        assert (await link.answer(9, 2)).outcome == "ok"
        await link.send(command("load", 9, 3, tenant=old))
        assert (await link.answer(9, 3)).detail == "llama/old is not configured on this host"
    assert backend.calls == ["drain llama/old", "release llama/old 5"]
    shown = [report for report in link.reports if report.verb == "observed"][-1].data["tenants"]
    assert shown == {"llama/med": "unloaded", "other/x": "unloaded", "llama/old": "unloaded"}


async def test_what_a_hung_server_had_that_is_not_configured_stays_on_its_card(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "OBSERVE_S", 0.01)
    backend.states |= {"llama/old": TenantState.LOADED, "llama/older": TenantState.UNLOADED}
    async with running() as agent:
        await link.volunteered("observed")
        backend.hung = True
        await agent.watch.look("llama")
    shown = [report for report in link.reports if report.verb == "observed"][-1].data["tenants"]
    assert shown == {"llama/med": "unreachable", "llama/old": "unreachable", "other/x": "unloaded"}


async def test_a_silent_server_is_started_again(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "START_PAUSE_S", (0.0, 0.0))
    async with running():
        await link.volunteered("observed")
        await backend.started.wait()
        backend.started.clear()
        backend.states["llama/med"] = TenantState.UNREACHABLE
        backend.change.set()
        await backend.started.wait()


async def test_a_server_that_does_not_start_is_tried_again_and_the_agent_works_on(
    link: MemoryLink, backend: RecordingBackend, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "START_PAUSE_S", (0.0, 0.0))
    backend.errors["start"] = BackendError("no such file: llama-server")
    backend.states["llama/med"] = TenantState.UNREACHABLE
    async with running():
        for _ in range(3):
            await backend.started.wait()
            backend.started.clear()
        await link.send(command("load", 9, 1, tenant="other/x", card="gpu1"))
        assert (await link.answer(9, 1)).outcome == "ok"


async def test_of_two_looks_at_a_server_the_later_one_stands(
    link: MemoryLink, backend: RecordingBackend, running: Running
) -> None:
    async with running() as agent:
        await link.volunteered("observed")
        backend.hung = True
        slow = asyncio.create_task(agent.watch.look("llama"))
        await backend.observing.wait()
        backend.hung = False
        backend.states["llama/med"] = TenantState.LOADED
        await agent.watch.look("llama")
        backend.stale = {"llama/med": TenantState.UNLOADED}
        backend.wake.set()
        await slow
        assert [r for r in link.reports if r.verb == "observed"][-1].data["tenants"] == {
            "llama/med": "loaded",
            "other/x": "unloaded",
        }


async def test_after_an_outage_all_is_told_again_though_nothing_changed(
    link: MemoryLink, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator may have been away just then, and a call that failed may have arrived or not."""
    monkeypatch.setattr(watch, "REPEAT_S", 3600.0)
    async with running():
        first = await link.volunteered("observed")
        await link.switch(down=True)
        await link.switch(down=False)
        again = await link.volunteered("observed", count=2)
    assert again.data == first.data
    verbs = [report.verb for report in link.reports]
    assert verbs == ["hello", "observed", "hello", "observed"]


async def test_a_card_that_cannot_be_read_is_told_with_the_reason_and_no_older_reading_stands(
    link: MemoryLink, probe: ScriptedProbe, backend: RecordingBackend, running: Running
) -> None:
    async with running():
        await link.volunteered("observed")
        probe.unread = "the driver is gone; load it"
        backend.change.set()
        second = await link.volunteered("observed", count=2)
    cards = cast("dict[str, dict[str, object]]", second.data["cards"])
    assert cards["gpu0"] == {"unread": "the driver is gone; load it"}
    assert cards["gpu1"]["free_mib"] == 700
