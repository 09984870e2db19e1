"""`vacate` says a card is free only when the probe shows it and every departed holder is seen gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict

import pytest

from swapper.core.types import Departed
from tests.unit.agent_doubles import Place, RecordingBackend, ScriptedProbe, command
from workers import vacate as vacate_module
from workers.backend import Held, Owners, TenantState
from workers.control.launcher import stat_of
from workers.observe import Sight
from workers.vacate import Holding, Left, VacateArgs, Vacated, vacate
from workers.verbs import Outcome, Verbs
from workers.vram.declared import Declared


def sight_of(probe: ScriptedProbe, backend: RecordingBackend | None = None) -> Sight:
    return Sight({"llama": backend or RecordingBackend()}, {"llama/med": Place("gpu0", "llama")}, {"gpu0": probe})


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its input is closed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def left(pid: int | None = None, free_ms: int = 0, started: int | None = None) -> tuple[Left, ...]:
    return (Left("ls_1", "encode", pid, free_ms, started),)


async def test_a_card_that_is_free_is_free_at_the_first_look() -> None:
    probe = ScriptedProbe(20_000)
    assert await vacate(sight_of(probe), "gpu0", VacateArgs(20_000, 0)) == Vacated(True, 20_000, ())
    assert probe.looks == 1


async def test_it_looks_until_the_probe_shows_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacate_module, "POLL_S", 0.0)
    probe = ScriptedProbe(0, 100, 19_999, 20_000)
    assert await vacate(sight_of(probe), "gpu0", VacateArgs(20_000, 60_000)) == Vacated(True, 20_000, ())
    assert probe.looks == 4


async def test_a_card_is_not_free_while_something_of_ours_runs_under_a_lease_that_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vacate_module, "POLL_S", 0.0)
    asked, looks = list[tuple[str, tuple[str, ...]]](), iter([("pid 7 (job jb_1)",), ("pid 7 (job jb_1)",), ()])

    def remaining(card: str, stays: Collection[str]) -> Sequence[str]:
        asked.append((card, tuple(stays)))
        return next(looks)

    args = VacateArgs(20_000, 0, stays=("ls_2",))
    held = await vacate(sight_of(ScriptedProbe(20_000)), "gpu0", args, remaining)
    assert held == Vacated(False, 20_000, ("pid 7 (job jb_1)",))
    later = VacateArgs(20_000, 60_000, stays=("ls_2",))
    assert (await vacate(sight_of(ScriptedProbe(20_000)), "gpu0", later, remaining)).free
    assert asked == [("gpu0", ("ls_2",))] * 3


async def test_the_probe_is_shown_what_the_backend_sees_now() -> None:
    backend, probe = RecordingBackend(), ScriptedProbe()
    backend.states["llama/med"] = TenantState.LOADING
    await vacate(sight_of(probe, backend), "gpu0", VacateArgs(1, 0))
    assert probe.asked == [({"llama/med": TenantState.LOADING}, ())]


async def test_a_card_is_not_free_while_a_tenant_that_is_not_configured_runs_on_it() -> None:
    backend = RecordingBackend()
    backend.states["llama/old"] = TenantState.SLEEPING
    places = {"llama/med": Place("gpu0", "llama")}
    sight = Sight({"llama": backend}, places, {"gpu0": Declared(24_000, 0, {"llama/med": 8_000})})
    assert await vacate(sight, "gpu0", VacateArgs(1, 0)) == Vacated(False, 0, ("llama/old",))
    backend.states["llama/old"] = TenantState.UNLOADED
    assert (await vacate(sight, "gpu0", VacateArgs(24_000, 0))).free


async def test_what_an_arriving_tenant_that_is_there_already_uses_is_free_for_it() -> None:
    backend = RecordingBackend("llama/med", "llama/big")
    backend.states["llama/med"] = TenantState.LOADED
    places = {tenant: Place("gpu0", "llama") for tenant in backend.tenants}
    needs = {"llama/med": 20_000, "llama/big": 8_000}
    sight = Sight({"llama": backend}, places, {"gpu0": Declared(24_000, 0, needs)})
    assert not (await vacate(sight, "gpu0", VacateArgs(20_000, 0))).free
    assert (await vacate(sight, "gpu0", VacateArgs(20_000, 0, arriving=("llama/med",)))).free
    backend.states["llama/big"] = TenantState.LOADED
    stays = await vacate(sight, "gpu0", VacateArgs(20_000, 0, arriving=("llama/med",)))
    assert stays == Vacated(False, 16_000, ("llama/big",))


async def test_a_server_without_a_configured_tenant_may_hold_vram_on_any_card() -> None:
    backend = RecordingBackend("llama/old")
    backend.states["llama/old"] = TenantState.LOADED
    cards = {name: Declared(24_000, 0, {}) for name in ("gpu0", "gpu1")}
    sight = Sight({"llama": backend}, {}, cards)
    for card in cards:
        assert (await vacate(sight, card, VacateArgs(1, 0))).holders == ("llama/old",)


async def test_it_waits_for_the_holder_s_process_and_wakes_when_that_ends(
    holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacate_module, "POLL_S", 3_600.0)
    probe = ScriptedProbe()
    waiting = asyncio.create_task(vacate(sight_of(probe), "gpu0", VacateArgs(1, 60_000, left(holder.pid))))
    await probe.looked.wait()
    assert probe.asked[0][1] == (holder.pid,)
    assert not waiting.done()
    assert holder.stdin is not None
    holder.stdin.close()
    assert await waiting == Vacated(True, 24_000, ())


async def test_every_reading_counts_the_holder_while_it_is_waited_for_and_after_it_stayed(
    holder: subprocess.Popen[bytes],
) -> None:
    probe = ScriptedProbe()
    sight = sight_of(probe)
    waiting = asyncio.create_task(vacate(sight, "gpu0", VacateArgs(1, 60_000, left(holder.pid))))
    await probe.looked.wait()
    await sight.reading("gpu0", {})
    assert probe.asked[-1] == ({}, (holder.pid,))
    waiting.cancel()
    await asyncio.wait({waiting})
    assert not (await vacate(sight, "gpu0", VacateArgs(1, 0, left(holder.pid)))).free
    await sight.reading("gpu0", {})
    assert probe.asked[-1] == ({}, (holder.pid,))


async def test_a_process_that_is_long_gone_is_not_waited_for(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    seen = await vacate(sight_of(ScriptedProbe()), "gpu0", VacateArgs(1, 0, left(holder.pid)))
    assert seen.free


async def test_a_process_that_took_the_holder_s_pid_later_is_not_the_holder(holder: subprocess.Popen[bytes]) -> None:
    stat = stat_of(holder.pid)
    assert stat is not None
    later = await vacate(sight_of(ScriptedProbe()), "gpu0", VacateArgs(1, 0, left(holder.pid, started=stat[3] - 1)))
    itself = await vacate(sight_of(ScriptedProbe()), "gpu0", VacateArgs(1, 0, left(holder.pid, started=stat[3])))
    assert (later.free, itself.free) == (True, False)


async def test_the_verb_takes_the_start_of_a_departed_holder_where_it_is_told(
    holder: subprocess.Popen[bytes],
) -> None:
    verbs = Verbs({"llama": RecordingBackend()}, sight_of(ScriptedProbe()))
    departed = asdict(Departed("ls_1", "encode", holder.pid, 0, started=1))
    assert (await verbs.run(command("vacate", 9, 1, tenant=None, need_mib=1, limit_ms=0, departed=[departed]))).ok


async def test_a_holder_without_a_process_counts_as_gone_at_its_moment_on_the_store_s_clock() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    store_now = 5_000_000
    args = VacateArgs(1, 60_000, left(free_ms=store_now + 60), now_ms=store_now)
    assert (await vacate(sight_of(ScriptedProbe()), "gpu0", args)).free
    assert loop.time() - began >= 0.06


async def test_when_the_limit_passes_it_names_who_is_left(holder: subprocess.Popen[bytes]) -> None:
    sight = sight_of(ScriptedProbe(300))
    departed = (*left(holder.pid), Left("ls_2", "render", None, 9_000))
    seen = await vacate(sight, "gpu0", VacateArgs(1, 0, departed, now_ms=0))
    assert seen == Vacated(False, 300, (f"pid {holder.pid} (test)", "render"))


async def test_a_holder_that_would_not_go_is_in_every_reading_until_it_does(holder: subprocess.Popen[bytes]) -> None:
    probe = ScriptedProbe()
    sight = sight_of(probe)
    await vacate(sight, "gpu0", VacateArgs(1, 0, left(holder.pid)))
    await sight.reading("gpu0", {})
    holder.kill()
    holder.wait()
    await sight.reading("gpu0", {})
    assert [pids for _, pids in probe.asked[-2:]] == [(holder.pid,), ()]


async def test_it_can_be_ended_at_any_moment_and_leaves_nothing_open(holder: subprocess.Popen[bytes]) -> None:
    probe = ScriptedProbe()
    before = len(os.listdir("/proc/self/fd"))
    waiting = asyncio.create_task(vacate(sight_of(probe), "gpu0", VacateArgs(1, 60_000, left(holder.pid))))
    await probe.looked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_verb_answers_with_the_free_mib_or_with_a_sentence_and_the_holders() -> None:
    verbs = Verbs({"llama": RecordingBackend()}, sight_of(ScriptedProbe(300)))
    free = await verbs.run(command("vacate", 9, 1, tenant=None, need_mib=300, limit_ms=0, departed=[]))
    assert free == Outcome(True, data={"free_mib": 300})
    render = [asdict(Departed("ls_2", "render", None, 9_000))]
    held = await verbs.run(command("vacate", 9, 1, tenant=None, need_mib=301, limit_ms=0, departed=render, now_ms=0))
    assert held == Outcome(
        False,
        "300 of 301 MiB free after 0 s; held by render",
        data={"free_mib": 300, "holders": ["render"]},
    )


async def test_memory_that_cannot_be_read_is_never_free_and_free_once_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = ScriptedProbe(24_000)
    sight, verbs = sight_of(probe), Verbs({"llama": RecordingBackend()}, sight_of(probe))
    probe.unread = "the driver is gone; load it"
    seen = await vacate(sight, "gpu0", VacateArgs(0, 0))
    assert seen == Vacated(False, 0, (), "the driver is gone; load it")
    failed = await verbs.run(command("vacate", 9, 1, tenant=None, need_mib=0, limit_ms=0, departed=[]))
    assert (failed.ok, failed.detail) == (False, "the VRAM of gpu0 cannot be read: the driver is gone; load it")
    assert failed.data["unread"] == "the driver is gone; load it"
    monkeypatch.setattr(vacate_module, "POLL_S", 0.0)
    waiting = asyncio.create_task(vacate(sight, "gpu0", VacateArgs(24_000, 60_000)))
    probe.looked.clear()
    await probe.looked.wait()
    probe.unread = None
    assert (await waiting).free


async def test_what_an_arriving_tenant_is_measured_to_hold_is_free_for_it_and_others_are_named() -> None:
    probe = ScriptedProbe(4_000)
    probe.held = (
        Held(50, 18_000, "llama-server", owner="llama/med"),
        Held(51, None, "llama-server", owner="llama/med"),
        Held(60, 2_000, "blender"),
    )
    come = VacateArgs(22_000, 0, arriving=("llama/med",))
    assert await vacate(sight_of(probe), "gpu0", come) == Vacated(True, 22_000, ())
    more = VacateArgs(22_001, 0, arriving=("llama/med",))
    assert await vacate(sight_of(probe), "gpu0", more) == Vacated(False, 22_000, ("pid 60 (blender)",))
    assert not (await vacate(sight_of(probe), "gpu0", VacateArgs(22_000, 0))).free


async def test_the_probe_is_told_whose_the_processes_of_the_host_are() -> None:
    class Knowing(RecordingBackend):
        def processes(self) -> Owners:
            return Owners({50: "llama/med"}, {"ab" * 32: "llama/big"})

    probe = ScriptedProbe()
    backends = {"llama": Knowing(), "other": RecordingBackend("other/x")}
    await Sight(backends, {}, {"gpu0": probe}).reading("gpu0", {})
    assert probe.owners == Owners({50: "llama/med"}, {"ab" * 32: "llama/big"})


async def test_what_a_lease_that_stays_uses_of_its_promise_is_free_for_it_and_no_more() -> None:
    probe = ScriptedProbe(12_000)
    probe.held = (Held(60, 5_000, "ffmpeg", ((60, 9), (50, 7), (1, 1))),)

    async def free(**holding: object) -> int:
        leases = (Holding(vram_mib=4_000, **holding),)  # pyright: ignore[reportArgumentType]
        return (await vacate(sight_of(probe), "gpu0", VacateArgs(99_999, 0, holding=leases))).free_mib

    assert await free(pid=50, started=7) == 16_000
    assert await free(pid=50) == 16_000
    assert await free(pid=50, started=8) == 12_000
    assert await free(pid=51) == 12_000
    assert await free(tenant="comfyui") == 12_000
    assert await free() == 16_000
    probe.held = (Held(60, 3_000, "python", owner="comfyui"),)
    assert await free(tenant="comfyui") == 15_000
    assert await free() == 12_000


async def test_what_a_departed_holder_still_holds_is_no_part_of_another_lease_s_promise(
    holder: subprocess.Popen[bytes],
) -> None:
    probe = ScriptedProbe(12_000)
    probe.held = (Held(holder.pid, 5_000, "cat", ((holder.pid, 9),)),)
    args = VacateArgs(16_000, 0, left(holder.pid), holding=(Holding(vram_mib=4_000),))
    assert (await vacate(sight_of(probe), "gpu0", args)).free_mib == 12_000


async def test_a_tenant_that_did_not_leave_at_its_release_has_to_be_seen_gone_whatever_is_free() -> None:
    backend, probe = RecordingBackend(), ScriptedProbe(24_000)
    backend.states["llama/med"] = TenantState.LOADED
    args = VacateArgs(20_000, 0, leaving=("llama/med",))
    seen = await vacate(sight_of(probe, backend), "gpu0", args)
    assert (seen.free, seen.free_mib, seen.holders) == (False, 24_000, ("llama/med",))
    backend.states["llama/med"] = TenantState.UNLOADED
    assert (await vacate(sight_of(probe, backend), "gpu0", args)).free
