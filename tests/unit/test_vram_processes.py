"""What is known of a process that holds VRAM, by /proc; and the probe of machines that share their memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.proc import Proc
from workers.backend import Held, Owners, Reading, TenantState, Unread
from workers.control.launcher import stat_of
from workers.vram.bounded import Bounded
from workers.vram.processes import containers_of, held_by, line_of, words
from workers.vram.unified import Unified

OUTER, INNER = "0f" * 32, "e7" * 32
NOBODY = Owners()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


@pytest.mark.parametrize(
    "cgroup",
    [
        f"12:memory:/docker/{INNER}\n1:name=systemd:/docker/{INNER}",
        f"0::/system.slice/docker-{INNER}.scope",
        f"0::/../docker-{INNER}.scope",
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a_2b.slice/cri-containerd-{INNER}.scope",
        f"11:cpu:/kubepods/burstable/pod1a-2b/{INNER}",
        f"0::/system.slice/containerd.service/kubepods-pod1a.slice:cri-containerd:{INNER}",
        f"0::/kubepods.slice/kubepods-pod1a.slice/crio-{INNER}.scope/container",
        f"0::/machine.slice/libpod-{INNER}.scope/container",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{INNER}.scope/container",
        f"0::/system.slice/nerdctl-{INNER}.scope",
        f"7:devices:/default/{INNER}",
    ],
)
def test_a_container_is_known_by_its_id_whatever_started_it(proc: Proc, cgroup: str) -> None:
    proc.add(9, "python", cgroup=cgroup)
    assert containers_of(9, proc.root) == (INNER,)


@pytest.mark.parametrize(
    "cgroup",
    ["0::/", "0::/user.slice/session-2.scope", f"0::/machine.slice/libpod-conmon-{INNER}.scope", "garbage", ""],
)
def test_who_is_in_no_container_is_in_none(proc: Proc, cgroup: str) -> None:
    proc.add(9, "conmon", cgroup=cgroup)
    assert containers_of(9, proc.root) == ()


def test_a_container_in_a_container_belongs_to_whoever_is_nearest(proc: Proc) -> None:
    proc.add(9, "python", cgroup=f"0::/docker/{OUTER}/docker/{INNER}")
    outer = Owners(containers={OUTER[:12]: "runner"})
    both = Owners(containers={OUTER: "runner", INNER: "comfyui"})
    assert [held_by({9: 1}, owners, proc.root)[0].owner for owners in (outer, both)] == ["runner", "comfyui"]


def test_too_short_an_id_names_no_container(proc: Proc) -> None:
    proc.add(9, "python", cgroup=f"0::/docker/{INNER}")
    assert held_by({9: 1}, Owners(containers={INNER[:11]: "comfyui"}), proc.root)[0].owner is None


def test_a_process_is_its_nearest_known_parent_s(proc: Proc) -> None:
    proc.add(1, "init", parent=0, started=1)
    proc.add(50, "llama-server", started=500)
    proc.add(51, "llama (x) R 1", parent=50, started=510)
    proc.add(52, "worker", parent=51, started=520)
    (held,) = held_by({52: 100}, Owners({50: "llama", 51: "llama/med"}), proc.root)
    assert (held.owner, held.line) == ("llama/med", ((52, 520), (51, 510), (50, 500), (1, 1)))


def test_a_process_that_cannot_be_seen_from_here_is_told_by_its_pid(proc: Proc) -> None:
    assert held_by({4_711: None}, NOBODY, proc.root) == (Held(4_711, None),)
    assert held_by({4_711: 5}, Owners({4_711: "llama"}), proc.root) == (Held(4_711, 5, owner="llama"),)
    assert words(held_by({4_711: None}, NOBODY, proc.root)) == ("pid 4711",)


def test_a_tenant_of_many_processes_is_named_once(proc: Proc) -> None:
    owners = Owners({50: "llama/med", 51: "llama/med"})
    assert words(held_by({50: 1, 51: 1}, owners, proc.root)) == ("llama/med",)


def test_a_real_process_is_known_by_name_start_and_parents() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (held,) = held_by({child.pid: 1}, Owners({os.getpid(): "tests"}))
        stat = stat_of(child.pid)
        child.communicate(b"\n")
    assert stat is not None
    assert held.line[:2] == ((child.pid, stat[3]), line_of(os.getpid())[0])
    assert (held.owner, held.name is not None) == ("tests", True)


async def test_a_machine_s_shared_memory_is_free_as_far_as_it_is_available(proc: Proc) -> None:
    probe = Unified(proc.root)
    proc.meminfo(total_mib=64_000, available_mib=40_000)
    found = await probe.read({"llama/med": TenantState.LOADED, "b": TenantState.UNLOADED}, (os.getpid(),), NOBODY)
    assert isinstance(found, Reading)
    assert (found.total_mib, found.used_mib, found.free_mib, found.pool) == (64_000, 24_000, 40_000, "host")
    assert found.holders[0] == "llama/med"
    assert found.holders[1].startswith(f"pid {os.getpid()} (")
    proc.meminfo(total_mib=64_000, available_mib=50_000)
    later = await probe.read({}, (), NOBODY)
    assert isinstance(later, Reading)
    assert later.free_mib == 50_000


@pytest.mark.parametrize("text", [None, "", "MemTotal:  5 kB\n", "MemAvailable: 5 kB\n"])
async def test_memory_that_nobody_tells_is_an_error(proc: Proc, text: str | None) -> None:
    if text is not None:
        (proc.root / "meminfo").write_text(text)
    assert isinstance(await Unified(proc.root).read({}, (), NOBODY), Unread)


async def test_looks_at_one_driver_come_one_after_the_other() -> None:
    at_once: list[int] = []
    running: set[int] = set()

    def look(which: int) -> int:
        running.add(which)
        at_once.append(len(running))
        running.discard(which)
        return which

    bounded = Bounded[int]("the driver", 60.0)
    found = await asyncio.gather(*(bounded.call(lambda which=which: look(which)) for which in range(5)))
    assert (found, max(at_once)) == ([0, 1, 2, 3, 4], 1)


async def test_a_look_that_hangs_is_told_at_once_to_the_next_and_over_when_it_comes_back() -> None:
    bounded, release = Bounded[bool]("the driver", 0.05), threading.Event()
    assert isinstance(await bounded.call(release.wait), Unread)
    loop = asyncio.get_running_loop()
    asked = loop.time()
    assert isinstance(await bounded.call(release.wait), Unread)
    assert loop.time() - asked < 0.04
    release.set()
    while isinstance(found := await bounded.call(lambda: True), Unread):
        pass
    assert found is True


async def test_whoever_stops_waiting_leaves_the_look_to_the_others() -> None:
    bounded, release = Bounded[bool]("the driver", 60.0), threading.Event()
    first = asyncio.create_task(bounded.call(release.wait))
    await asyncio.sleep(0)
    second = asyncio.create_task(bounded.call(lambda: True))
    await asyncio.sleep(0)
    first.cancel()
    release.set()
    assert await second is True


async def test_a_bug_in_a_look_is_raised_to_who_asked_and_the_next_look_is_made() -> None:
    bounded = Bounded[int]("the driver", 60.0)
    with pytest.raises(ZeroDivisionError):
        await bounded.call(lambda: 1 // 0)
    assert await bounded.call(lambda: 1) == 1
