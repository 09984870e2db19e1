"""A ComfyUI that lives in a container of a real engine: started by its load, restarted where /free gives nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import aiohttp
import pytest

from tests.support.comfyprocess import ROOT, ComfyProcess, prompt
from tests.support.dockerd import Dockerd
from workers.backend import TenantState
from workers.comfyui.server import ComfyUI, Limits
from workers.control.docker import DockerControl
from workers.control.engine import Engine

ME = "comfyui"
SYSTEM = tuple(place for place in ("/lib", "/lib64", "/usr") if Path(place).exists())
PYTHON = tuple({sys.prefix, sys.base_prefix, str(Path(aiohttp.__file__).parents[1])})


@pytest.fixture
async def contained(mine: Dockerd, tmp_path: Path) -> AsyncIterator[tuple[ComfyUI, ComfyProcess]]:
    """Made, and not started. What it has in VRAM is told for as long as its container runs."""
    comfy = ComfyProcess(tmp_path / "comfy")
    places = [f"{place}:{place}:ro" for place in (*SYSTEM, *PYTHON, str(ROOT))]
    mine.create(
        ME,
        comfy.command,
        network_mode="host",
        environment={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        binds=[*places, f"{comfy.folder}:{comfy.folder}"],
    )

    async def held() -> int:
        seen, told = mine.state(ME), comfy.folder / "vram"
        began = datetime.fromisoformat(f"{seen['StartedAt'][:23]}+00:00").timestamp()
        return comfy.told_mib() if seen["Running"] and told.exists() and told.stat().st_mtime > began else 0

    control = DockerControl(ME, ME, Engine(mine.url))
    limits = Limits(settle_s=0.3)
    backend = ComfyUI(
        comfy.url, tenant=ME, control=control, marker=tmp_path / "marker", grace_ms=1_000, held_mib=held, limits=limits
    )
    yield backend, comfy
    await backend.close()
    await control.close()


async def test_it_runs_from_its_load_on_and_is_restarted_where_its_vram_stays(
    contained: tuple[ComfyUI, ComfyProcess], mine: Dockerd
) -> None:
    backend, comfy = contained
    assert await backend.observe() == {ME: TenantState.UNLOADED}
    await backend.load(ME)
    assert await backend.observe() == {ME: TenantState.LOADED}
    assert list(backend.processes().containers.values()) == [ME]
    await asyncio.to_thread(comfy.post, "/prompt", prompt())
    await asyncio.to_thread(comfy.until, lambda state: state["done"])
    assert await backend.release(ME, limit_ms=5_000) is None
    started = mine.state(ME)["StartedAt"]
    await backend.load(ME)
    assert mine.state(ME)["StartedAt"] == started, "it ran on"
    await asyncio.to_thread(comfy.post, "/prompt", prompt())
    await asyncio.to_thread(comfy.until, lambda state: len(state["done"]) == 2)
    comfy.tell(keeps_mib=9_000)
    assert await backend.release(ME, limit_ms=5_000) == "comfyui kept 9000 MiB of VRAM after /free: restarted"
    assert (mine.state(ME)["Running"], mine.state(ME)["StartedAt"] != started) == (True, True)
    await asyncio.to_thread(comfy.wait_ready)
    assert await backend.observe() == {ME: TenantState.UNLOADED}


async def test_one_whose_container_is_killed_is_seen_to_be_gone_and_loaded_again(
    contained: tuple[ComfyUI, ComfyProcess], mine: Dockerd
) -> None:
    backend, comfy = contained
    await backend.load(ME)
    mine.api.kill(ME)
    assert not (await backend.observe())[ME].holds_vram
    await backend.load(ME)
    assert await backend.observe() == {ME: TenantState.LOADED}
    assert comfy.state()["done"] == []
