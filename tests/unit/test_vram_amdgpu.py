"""The amdgpu probe over a tree of files shaped as the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.amd import Amd
from workers.backend import Owners, Reading, Unread
from workers.vram.amdgpu import Amdgpu

NOBODY = Owners()


@pytest.fixture
def amd(tmp_path: Path) -> Amd:
    amd = Amd(tmp_path)
    amd.proc.meminfo(total_mib=64_000, available_mib=50_000)
    return amd


async def read(probe: Amdgpu, owners: Owners = NOBODY) -> Reading:
    found = await probe.read({}, (), owners)
    assert isinstance(found, Reading), found
    return found


async def unread(probe: Amdgpu) -> str:
    found = await probe.read({}, (), NOBODY)
    assert isinstance(found, Unread), found
    return found.why


async def test_a_gpu_with_memory_of_its_own_tells_that_and_no_gtt(amd: Amd) -> None:
    amd.gpu("0000:03:00.0", vram=(24_560, 4_000), gtt=(32_000, 900))
    found = await read(Amdgpu(root=amd.root))
    assert (found.total_mib, found.used_mib, found.free_mib, found.pool) == (24_560, 4_000, 20_560, "vram")


@pytest.mark.parametrize("metrics", [b"\x00\x00\x02\x04", b"\x00\x00\x03\x00", None])
async def test_a_gpu_on_the_machine_s_memory_tells_gtt_and_never_both(amd: Amd, metrics: bytes | None) -> None:
    amd.gpu("0000:c5:00.0", vram=(512, 400), gtt=(48_000, 8_000), metrics=metrics)
    found = await read(Amdgpu(root=amd.root))
    assert (found.total_mib, found.used_mib, found.free_mib, found.pool) == (48_000, 8_000, 40_000, "gtt")


async def test_of_gtt_no_more_is_free_than_the_machine_has(amd: Amd) -> None:
    amd.gpu("0000:c5:00.0", vram=(512, 400), gtt=(48_000, 8_000), metrics=b"\x00\x00\x03\x00")
    amd.proc.meminfo(total_mib=64_000, available_mib=9_000)
    assert (await read(Amdgpu(root=amd.root))).free_mib == 9_000


async def test_a_part_of_the_machine_s_memory_that_is_larger_than_gtt_is_the_pool(amd: Amd) -> None:
    amd.gpu("0000:c5:00.0", vram=(98_304, 100), gtt=(16_000, 10), metrics=b"\x00\x00\x03\x00")
    found = await read(Amdgpu(root=amd.root))
    assert (found.total_mib, found.pool) == (98_304, "vram")


async def test_a_client_counts_once_however_often_it_is_open_and_other_gpus_not_at_all(amd: Amd) -> None:
    amd.gpu("0000:03:00.0", vram=(24_560, 4_000), gtt=(32_000, 900))
    amd.proc.add(20, "blender (gpu)")
    amd.proc.add(21, "blender", parent=20)
    amd.proc.add(30, "bash")
    mine = {"drm_driver": "amdgpu", "drm_pdev": "0000:03:00.0"}
    amd.proc.open(20, 5, "/dev/dri/renderD128", **mine, drm_client_id="7", drm_memory_vram="1048576 KiB")
    amd.proc.open(20, 6, "/dev/dri/renderD128", **mine, drm_client_id="7", drm_memory_vram="1048576 KiB")
    amd.proc.open(20, 7, "/dev/dri/renderD128", **mine, drm_client_id="8", drm_memory_vram="512 MiB")
    amd.proc.open(21, 5, "/dev/dri/renderD128", **mine, drm_client_id="7", drm_memory_vram="1048576 KiB")
    elsewhere = mine | {"drm_pdev": "0000:0a:00.0"}
    amd.proc.open(30, 4, "/dev/dri/renderD129", **elsewhere, drm_client_id="9", drm_memory_vram="4096 KiB")
    found = await read(Amdgpu(root=amd.root), Owners({20: "comfyui"}))
    assert [(one.pid, one.mib, one.owner) for one in found.held] == [(20, 1_536, "comfyui")]
    assert found.note is None


async def test_what_a_process_holds_is_told_of_the_pool_that_counts(amd: Amd) -> None:
    amd.gpu("0000:c5:00.0", vram=(512, 400), gtt=(48_000, 8_000), metrics=b"\x00\x00\x03\x00")
    amd.proc.add(20, "llama-server")
    facts = {"drm_pdev": "0000:c5:00.0", "drm_client_id": "1", "drm_memory_vram": "1024 KiB"}
    amd.proc.open(20, 5, "/dev/dri/renderD128", **facts, drm_memory_gtt="8388608 KiB")
    assert [one.mib for one in (await read(Amdgpu(root=amd.root))).held] == [8_192]


async def test_gpus_are_named_by_place_address_or_id_and_the_one_that_computes_by_hip_s_number(amd: Amd) -> None:
    amd.gpu("0000:03:00.0", vram=(16_000, 0), gtt=(1, 0), card=1, node=2, unique="aa11")
    amd.gpu("0000:0a:00.0", vram=(24_000, 0), gtt=(1, 0), card=0, node=1, unique="bb22")
    totals = {name: (await read(Amdgpu([name], amd.root))).total_mib for name in ("0", "0a:00.0", "0xbb22", "GPU-aa11")}
    assert totals == {"0": 16_000, "0a:00.0": 24_000, "0xbb22": 24_000, "GPU-aa11": 16_000}
    both = await read(Amdgpu(["0", "1"], amd.root))
    assert (both.total_mib, both.env) == (40_000, {"HIP_VISIBLE_DEVICES": "1,0"})


async def test_a_gpu_that_is_lost_is_an_error_and_no_other_takes_its_place(amd: Amd) -> None:
    amd.gpu("0000:03:00.0", vram=(16_000, 15_000), gtt=(1, 0), card=0)
    amd.gpu("0000:0a:00.0", vram=(24_000, 0), gtt=(1, 0), card=1)
    probe = Amdgpu(["0"], amd.root)
    await read(probe)
    amd.lose("card0")
    assert "AMD GPU 0 is 0000:0a:00.0 now and was 0000:03:00.0" in await unread(probe)


async def test_a_driver_that_stops_telling_is_an_error_and_never_free(amd: Amd) -> None:
    amd.gpu("0000:03:00.0", vram=(16_000, 15_000), gtt=(1, 0))
    probe = Amdgpu(root=amd.root)
    await read(probe)
    amd.garble("card0", "mem_info_vram_used")
    assert await unread(probe) == (
        "AMD GPU 0000:03:00.0 does not tell its memory (mem_info_vram_used); look for amdgpu in dmesg"
    )


async def test_which_gpus_there_are_is_said_to_who_names_none_or_a_wrong_one(amd: Amd) -> None:
    assert "there is no GPU of the amdgpu driver here" in await unread(Amdgpu(root=amd.root))
    amd.gpu("0000:03:00.0", vram=(16_000, 0), gtt=(1, 0), card=0)
    amd.gpu("0000:0a:00.0", vram=(24_000, 0), gtt=(1, 0), card=1)
    there = "0: 0000:03:00.0; 1: 0000:0a:00.0"
    assert await unread(Amdgpu(root=amd.root)) == (
        f"there are 2 AMD GPUs; say which one the card is, like index: 0 ({there})"
    )
    assert await unread(Amdgpu(["7"], amd.root)) == f"there is no AMD GPU 7 here; there is {there}"
    assert "name the same GPU twice" in await unread(Amdgpu(["0", "03:00.0"], amd.root))


async def test_a_gpu_of_another_maker_is_no_amd_gpu(amd: Amd) -> None:
    amd.gpu("0000:01:00.0", vram=(24_000, 0), gtt=(1, 0), vendor="0x10de")
    assert "there is no GPU of the amdgpu driver here" in await unread(Amdgpu(root=amd.root))
