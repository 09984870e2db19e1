"""The machine's memory is a second resource: no load and no sleep takes it below the floor, and who may not is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swapper.config import Config
from swapper.config.load import load
from swapper.demo.models import make_models
from swapper.errors import BackendRefused
from swapper.estimates import rams, sleeping_mib, too_large
from tests.support import fake_kinds
from tests.unit.agent_doubles import RecordingBackend, ScriptedProbe, command
from tests.unit.test_agent_vacate import sight_of
from tests.unit.test_kinds_whole import LIMITS, running
from workers import hostram
from workers.backend import TenantState, Unread
from workers.client import ServerClient
from workers.control.attach import AttachControl
from workers.hostram import HostRam, available, in_memory
from workers.openai import OpenAiServer
from workers.verbs import Verbs
from workers.vllm import Vllm
from workers.vram.unified import HostMemory

GIB = 1024


def proc(root: Path, *, free_mib: int, cgroup: str = "/a/b", mounts: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    text = f"MemTotal: {32 * GIB * 1024} kB\nMemAvailable: {free_mib * 1024} kB\n"
    (root / "proc/meminfo").write_text(text.replace(": ", ":       "))
    (root / "proc/self/cgroup").write_text(f"4:memory:/old\n0::{cgroup}\n")
    (root / "proc/self/mountinfo").write_text(mounts)
    return root / "proc"


def limit(folder: Path, limit_mib: int | None, current_mib: int, inactive_mib: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit_mib is None else f"{limit_mib << 20}\n")
    (folder / "memory.current").write_text(f"{current_mib << 20}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_mib << 20}\nactive_file 7\n")


def test_without_a_limit_it_is_what_the_kernel_says_can_be_had(tmp_path: Path) -> None:
    limit(tmp_path / "cg/a/b", None, 100)
    assert available(proc(tmp_path, free_mib=9_000), tmp_path / "cg") == HostMemory(32 * GIB, 9_000)


@pytest.mark.parametrize(("of", "expected"), [("a/b", 3_500), ("a", 3_500)])
def test_the_limit_of_our_cgroup_or_of_one_it_is_in_counts_where_that_leaves_less(
    tmp_path: Path, of: str, expected: int
) -> None:
    limit(tmp_path / "cg" / of, 8_000, 5_000, inactive_mib=500)
    assert available(proc(tmp_path, free_mib=9_000), tmp_path / "cg") == HostMemory(8_000, expected)


def test_a_limit_that_leaves_more_than_there_is_gives_no_more(tmp_path: Path) -> None:
    limit(tmp_path / "cg/a/b", 30_000, 1_000)
    assert available(proc(tmp_path, free_mib=9_000), tmp_path / "cg") == HostMemory(30_000, 9_000)


def test_a_folder_of_a_tmpfs_is_told_from_one_on_a_disk_by_the_mount_it_is_in(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    mounts = f"1 0 0:1 / / rw - ext4 /dev/x rw\n2 1 0:2 / {root}/ram rw shared:1 - tmpfs none rw\n"
    at = proc(tmp_path, free_mib=1, mounts=mounts)
    assert in_memory(root / "ram/slots", at)
    assert not in_memory(root / "ramp", at)
    assert not in_memory(root, at)


async def test_what_would_go_below_the_floor_is_refused_with_what_it_takes_what_there_is_and_what_to_do() -> None:
    ram = HostRam({"big": 6_000}, floor_mib=1_024, memory=lambda: HostMemory(16_000, 7_023), wait_s=0.0)
    with pytest.raises(BackendRefused) as refused:
        async with ram.room("big"):
            pytest.fail("it was let in")
    assert str(refused.value) == (
        "loading big takes 6,000 MiB of the machine's memory, 7,023 MiB of it can be had and 1,024 MiB have to stay "
        "(policy.ram_floor): end what else uses it, or lower ram where that is too much"
    )
    unread = HostRam({"big": 6_000}, memory=lambda: Unread("no /proc"), wait_s=0.0)
    with pytest.raises(BackendRefused, match="is not known: no /proc"):
        async with unread.room("big"):
            pytest.fail("it was let in")


async def test_what_fits_exactly_what_takes_none_and_what_is_there_already_come_in() -> None:
    ram = HostRam({"big": 6_000, "tiny": 63}, floor_mib=1_024, memory=lambda: HostMemory(16_000, 7_024), wait_s=0.0)
    async with ram.room("big"):
        pass
    full = HostRam({"big": 6_000, "tiny": 63}, memory=lambda: HostMemory(16_000, 0), wait_s=0.0)
    async with full.room("tiny"), full.room("other"), full.room("big", there=True):
        pass


async def test_it_is_waited_for_what_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostram, "LOOK_S", 0.0)
    free = [0, 0, 9_000]
    ram = HostRam({"big": 6_000}, memory=lambda: HostMemory(16_000, free.pop(0)), wait_s=60.0)
    async with ram.room("big"):
        assert free == []


async def test_no_two_loads_count_on_the_same_memory() -> None:
    ram = HostRam({"a": 6_000, "b": 6_000}, memory=lambda: HostMemory(16_000, 9_000))
    inside = asyncio.Event()

    async def second() -> None:
        async with ram.room("b"):
            inside.set()

    async with ram.room("a"):
        task = asyncio.create_task(second())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not inside.is_set()
    await task
    assert inside.is_set()


async def test_a_load_that_the_machine_has_no_memory_for_is_not_begun_and_says_so() -> None:
    backend = RecordingBackend()
    ram = HostRam({"llama/med": 6_000}, memory=lambda: HostMemory(16_000, 5_000), wait_s=0.0)
    verbs = Verbs({"llama": backend}, sight_of(ScriptedProbe(), backend), ram)
    seen = await verbs.run(command("load", 9, 1))
    assert (seen.ok, backend.calls) == (False, [])
    assert seen.detail is not None
    assert seen.detail.startswith("loading llama/med takes 6,000 MiB of the machine's memory")
    assert not seen.data  # no card ran out of memory, and nobody has to leave one for it
    backend.states["llama/med"] = TenantState.LOADED
    assert (await verbs.run(command("load", 9, 2))).ok


async def test_a_server_whose_sleep_the_machine_has_no_memory_for_is_not_put_to_sleep(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    http = ServerClient(fake.url, "vLLM", read_s=LIMITS.read_s)
    full = HostRam({}, memory=lambda: HostMemory(16_000, 5_000))
    backend = OpenAiServer(
        http,
        tenant="s",
        models=["m"],
        control=AttachControl("s"),
        ours=False,
        engine=Vllm(http, 1, tmp_path),
        rests=True,
        no_room=lambda: full.short(6_000, "putting s to sleep"),
        limits=LIMITS,
    )
    async with running(fake, backend):
        with pytest.raises(BackendRefused, match="putting s to sleep takes 6,000 MiB of the machine's memory"):
            await backend.release("s", limit_ms=60_000)
        assert fake.posts() == []
        assert await backend.observe() == {"s": TenantState.LOADED}


def configured(folder: Path, model: str) -> Config:
    path = folder / "swapper.yaml"
    (folder / "presets.ini").write_text(f"[all]\nmodel = {model}\n[half]\nmodel = {model}\nn-gpu-layers = 0\n")
    path.write_text(
        f"""
state_dir: {folder}/state
cards: {{gpu0: {{vram: 900GiB}}}}
tenants:
  llama: {{kind: llama-router, url: http://127.0.0.1:1, preset: presets.ini, slot_dir: {folder}, models: {{
    all: {{vram: 1GiB}}, half: {{vram: 1GiB}}, said: {{vram: 1GiB, ram: 3GiB}}}}}}
  ollama: {{kind: ollama, url: http://127.0.0.1:2, ram: 2GiB, models: {{x: {{vram: 1GiB}}}}}}
  one: {{kind: vllm, url: http://127.0.0.1:3, sleep: 1, models: {{y: {{vram: 700GiB}}}}}}
  two: {{kind: vllm, url: http://127.0.0.1:4, sleep: 1, ram: 9GiB, models: {{z: {{vram: 20GiB}}}}}}
  three: {{kind: vllm, url: http://127.0.0.1:5, sleep: 2, models: {{w: {{vram: 20GiB}}}}}}
policy: {{ram_floor: 2GiB}}
"""
    )
    return load(path, {})


def test_what_a_tenant_takes_is_written_or_is_what_its_options_keep_off_the_card(tmp_path: Path) -> None:
    model = make_models(tmp_path, ["alpha"])["alpha"]
    read = configured(tmp_path, str(model))
    found = rams(read, {})
    assert set(found) == {"llama/half", "llama/said", "ollama/x"}
    assert (found["llama/said"], found["ollama/x"]) == (3 * GIB, 2 * GIB)
    assert found["llama/half"] >= model.stat().st_size >> 20
    assert {name: sleeping_mib(entry) for name, entry in read.tenants.items() if sleeping_mib(entry)} == {
        "one": 700 * GIB,
        "two": 9 * GIB,
    }
    assert read.policy.ram_floor_mib == 2 * GIB


def test_what_the_machine_can_never_give_is_told_by_check(tmp_path: Path) -> None:
    read = configured(tmp_path, "/models/away.gguf")
    (text,) = too_large(read, {})
    assert text.startswith("one takes 700 GiB of the machine's memory, which has ")
    assert "it would never sleep; write ram: SIZE" in text
