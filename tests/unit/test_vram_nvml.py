"""The nvml probe on the real nvidia-ml-py, over a library of our own that lies as the driver does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import nvml
from tests.support.nvml import FakeNvml, Gpu, Process
from tests.support.proc import Proc
from workers.backend import Owners, Reading, Unread
from workers.vram.nvml import LIBRARY, Nvml

NOBODY = Owners()
GIB = 1024


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml(tmp_path, Gpu("GPU-aaaa"), library=library)
    monkeypatch.setenv("NVML_STATE", str(fake.state))
    fake.here()
    yield fake
    fake.hang = False
    fake.tell()
    LIBRARY.close()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


async def read(probe: Nvml, owners: Owners = NOBODY) -> Reading:
    found = await probe.read({}, (), owners)
    assert isinstance(found, Reading), found
    return found


async def unread(probe: Nvml) -> str:
    found = await probe.read({}, (), NOBODY)
    assert isinstance(found, Unread), found
    return found.why


async def test_what_the_driver_keeps_is_neither_used_nor_free(fake: FakeNvml) -> None:
    fake.gpus[0] = Gpu("GPU-aaaa", used_mib=6_000, reserved_mib=400)
    fake.tell()
    found = await read(Nvml())
    assert (found.total_mib, found.used_mib, found.free_mib, found.reserved_mib) == (24_576, 6_000, 18_176, 400)
    assert found.pool == "vram"


async def test_an_older_driver_counts_what_it_keeps_as_used(fake: FakeNvml) -> None:
    fake.gpus[0] = Gpu("GPU-aaaa", used_mib=6_000, reserved_mib=400, memory=nvml.V1_ONLY)
    fake.tell()
    found = await read(Nvml())
    assert (found.used_mib, found.free_mib, found.reserved_mib) == (6_400, 18_176, 0)


async def test_memory_that_comes_back_late_is_free_once_the_driver_says_so(fake: FakeNvml) -> None:
    probe = Nvml(["0"])
    seen: list[tuple[int, int]] = []
    for used, left in ((20_000, [Process(1, 20_000)]), (20_000, []), (9_000, []), (0, [])):
        fake.gpus[0].used_mib, fake.gpus[0].processes = used, left
        fake.tell()
        found = await read(probe)
        seen.append((found.free_mib, len(found.held)))
    assert seen == [(4_576, 1), (4_576, 0), (15_576, 0), (24_576, 0)]


async def test_a_process_that_computes_and_draws_counts_once_and_one_of_unknown_size_is_told(
    fake: FakeNvml, proc: Proc
) -> None:
    proc.add(70, "blender")
    proc.add(71, "Xorg")
    fake.gpus[0].processes = [
        Process(70, 2_000),
        Process(70, 2_000, "graphics"),
        Process(71, None, "graphics"),
        Process(72, 300),
    ]
    fake.tell()
    found = await read(Nvml(proc=proc.root))
    assert [(one.pid, one.mib, one.name) for one in found.held] == [
        (70, 2_000, "blender"),
        (71, None, "Xorg"),
        (72, 300, None),
    ]
    assert found.holders == ("pid 70 (blender)", "pid 71 (Xorg)", "pid 72")


async def test_a_child_of_a_server_s_process_is_its_tenant_s_and_a_stranger_in_a_container_is_named_by_it(
    fake: FakeNvml, proc: Proc
) -> None:
    box = "ab" * 32
    proc.add(50, "llama-server")
    proc.add(51, "llama-server", parent=50)
    proc.add(60, "python", cgroup=f"0::/system.slice/docker-{box}.scope")
    fake.gpus[0].processes = [Process(51, 8_000), Process(60, 500)]
    fake.tell()
    found = await read(Nvml(proc=proc.root), Owners({50: "llama/med"}))
    assert found.holders == ("llama/med", f"pid 60 (python in container {box[:12]})")
    assert [one.owner for one in found.held] == ["llama/med", None]
    assert [pid for pid, _ in found.held[0].line] == [51, 50]


async def test_several_gpus_of_one_card_are_added_and_a_process_on_both_counts_its_sum(fake: FakeNvml) -> None:
    fake.gpus = [
        Gpu("GPU-aaaa", 24_000, 3_000, processes=[Process(7, 1_000), Process(8, 10)]),
        Gpu("GPU-bbbb", 16_000, 2_000, processes=[Process(7, 500), Process(8, None)]),
        Gpu("GPU-cccc", 8_000, 8_000),
    ]
    fake.tell()
    found = await read(Nvml(["0", "GPU-bbbb"]))
    assert (found.total_mib, found.used_mib, found.free_mib) == (40_000, 5_000, 35_000)
    assert [(one.pid, one.mib) for one in found.held] == [(7, 1_500), (8, None)]
    assert found.env == {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}


@pytest.mark.parametrize("lie", [nvml.NOT_SUPPORTED, nvml.TOLD_AS_NOTHING])
async def test_a_gpu_on_the_machine_s_memory_tells_that_and_its_own_processes(
    fake: FakeNvml, proc: Proc, lie: int
) -> None:
    proc.meminfo(total_mib=120_000, available_mib=100_000)
    fake.gpus[0].memory, fake.gpus[0].processes = lie, [Process(7, 16_000)]
    fake.tell()
    found = await read(Nvml(proc=proc.root))
    assert (found.total_mib, found.used_mib, found.free_mib) == (120_000, 20_000, 100_000)
    assert (found.pool, [one.mib for one in found.held]) == ("host", [16_000])


async def test_no_machine_s_memory_is_added_to_a_gpu_s_own(fake: FakeNvml) -> None:
    fake.gpus = [Gpu("GPU-aaaa"), Gpu("GPU-bbbb", memory=nvml.NOT_SUPPORTED)]
    fake.tell()
    assert "make them two cards" in await unread(Nvml(["0", "1"]))


async def test_where_no_process_is_told_the_memory_is_and_a_note_says_what_is_missing(fake: FakeNvml) -> None:
    fake.gpus[0].used_mib, fake.gpus[0].listing = 5_000, nvml.NO_PERMISSION
    fake.tell()
    found = await read(Nvml())
    assert (found.used_mib, found.held) == (5_000, ())
    assert found.note == "the driver does not tell which processes use the GPU, so holders are missing here"


async def test_a_driver_that_goes_is_an_error_and_is_asked_anew_once_it_is_back(fake: FakeNvml) -> None:
    probe, other = Nvml(), Nvml(["GPU-aaaa"])
    assert [(await read(one)).free_mib for one in (probe, other)] == [24_576, 24_576]
    fake.driver = nvml.NOT_LOADED
    fake.tell()
    assert "is not loaded; load it" in await unread(probe)
    fake.driver, fake.boot, fake.gpus[0].used_mib = 0, 2, 100
    fake.tell()
    assert [(await read(one)).free_mib for one in (probe, other)] == [24_476, 24_476]


async def test_a_session_that_a_reloaded_driver_forgot_is_begun_anew(fake: FakeNvml) -> None:
    probe = Nvml()
    await read(probe)
    fake.boot = 2
    fake.tell()
    assert "see what nvidia-smi says" in await unread(probe)
    await read(probe)


@pytest.mark.parametrize(
    ("driver", "said"),
    [(nvml.MISMATCH, "was updated while in use"), (nvml.NO_LIBRARY, "libnvidia-ml.so.1 is not here")],
)
async def test_what_is_wrong_with_the_driver_is_said_with_what_to_do(fake: FakeNvml, driver: int, said: str) -> None:
    fake.driver = driver
    fake.tell()
    assert said in await unread(Nvml())


async def test_a_gpu_that_fell_off_takes_its_card_with_it_and_no_other(fake: FakeNvml) -> None:
    fake.gpus = [Gpu("GPU-aaaa"), Gpu("GPU-bbbb")]
    fake.tell()
    both, first = Nvml(["0", "1"]), Nvml(["0"])
    await read(both)
    fake.gpus[1].error = nvml.LOST
    fake.tell()
    assert (await unread(both)).startswith("GPU 1 has fallen off the bus; ")
    assert (await read(first)).free_mib == 24_576


async def test_another_gpu_at_the_same_index_is_not_taken_for_it(fake: FakeNvml) -> None:
    fake.gpus = [Gpu("GPU-aaaa", used_mib=20_000), Gpu("GPU-bbbb")]
    fake.tell()
    probe = Nvml(["0"])
    await read(probe)
    del fake.gpus[0]
    fake.boot = 2
    fake.tell()
    await unread(probe)
    assert "GPU 0 is GPU-bbbb now and was GPU-aaaa" in await unread(probe)


async def test_which_gpus_there_are_is_said_to_who_names_none_or_a_wrong_one(fake: FakeNvml) -> None:
    fake.gpus = [Gpu("GPU-aaaa", name="RTX A"), Gpu("GPU-bbbb", name="RTX B")]
    fake.tell()
    there = "0: RTX A, GPU-aaaa; 1: RTX B, GPU-bbbb"
    assert await unread(Nvml()) == f"there are 2 GPUs; say which one the card is, like index: 0 ({there})"
    assert await unread(Nvml(["2"])) == f"there is no GPU 2 here; there is {there}"
    assert await unread(Nvml(["GPU-none"])) == f"there is no GPU GPU-none here; there is {there}"
    assert "name the same GPU twice" in await unread(Nvml(["0", "GPU-aaaa"]))


async def test_a_driver_that_hangs_is_an_error_for_every_card_and_reads_again_when_it_answers(fake: FakeNvml) -> None:
    probe, other = Nvml(limit_s=0.05), Nvml(["0"], limit_s=0.05)
    fake.hang = True
    fake.tell()
    for one in (probe, other, probe):
        assert (await unread(one)).startswith("the NVIDIA driver has not answered for ")
    fake.hang = False
    fake.tell()
    patient = Nvml(limit_s=60.0)
    assert (await read(patient)).free_mib == 24_576


READ_ONCE = """
import asyncio, json
from workers.backend import Owners, Unread
from workers.vram.nvml import Nvml
found = asyncio.run(Nvml(limit_s=LIMIT).read({}, (), Owners()))
print(json.dumps(found.why if isinstance(found, Unread) else [found.total_mib, found.free_mib]))
"""


def in_a_process(env: dict[str, str], limit_s: float = 60.0) -> object:
    command = [sys.executable, "-c", READ_ONCE.replace("LIMIT", str(limit_s))]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_a_process_finds_the_library_by_its_name(library: Path, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, Gpu("GPU-aaaa", used_mib=576), library=library)
    assert in_a_process(dict(fake.env)) == [24_576, 24_000]


def test_a_machine_without_the_driver_s_library_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    said = in_a_process({"LD_LIBRARY_PATH": str(tmp_path)})
    assert said == "libnvidia-ml.so.1 is not here; install the NVIDIA driver, or start the container with its GPUs"


def test_a_driver_that_hangs_does_not_keep_the_process_from_ending(library: Path, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, Gpu("GPU-aaaa"), library=library)
    fake.hang = True
    fake.tell()
    assert "has not answered" in str(in_a_process(dict(fake.env), limit_s=0.05))


async def test_while_the_driver_hangs_no_further_thread_waits_for_it(fake: FakeNvml) -> None:
    import threading

    probe = Nvml(limit_s=0.05)
    fake.hang = True
    fake.tell()
    await unread(probe)
    before = threading.active_count()
    await asyncio.gather(*(unread(probe) for _ in range(5)))
    assert threading.active_count() == before
