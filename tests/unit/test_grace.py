"""A tenant's grace is that of whatever stops it: of every kind, under every control."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from swapper.backends import backend_of
from swapper.config import Config, loads
from swapper.controls import control_of
from swapper.errors import BackendError
from tests.contract.controls import until
from workers.control import Phase, Watched
from workers.control.command import CommandControl
from workers.control.process import WatchedProcess

CONFIG = """
state_dir: state
cards: {gpu0: {vram: 24GiB}}
tenants:
  it: {card: gpu0, grace: 7s, %s}
"""
HTTP = "url: 'http://127.0.0.1:9', models: {m: {vram: 1GiB}}"
KINDS = {
    "none": "kind: none, vram: 1GiB",
    "comfyui": "kind: comfyui, url: 'http://127.0.0.1:9', gate: '127.0.0.1:9871', vram: 1GiB",
    "llama-server": f"kind: llama-server, snapshots: {{strategy: 'off'}}, {HTTP}",
    "openai": f"kind: openai, {HTTP}",
    "vllm": f"kind: vllm, {HTTP}",
    "vllm that sleeps": f"kind: vllm, sleep: 1, {HTTP}",
    "sglang": f"kind: sglang, {HTTP}",
    "sglang that sleeps": f"kind: sglang, sleep: 1, {HTTP}",
}
CONTROLS = {
    "command": "command: [sleep, '1000']",
    "docker": "container: it",
    "kubernetes": "deployment: it",
    "systemd": "unit: it",
}


def configured(folder: Path, tenant: str) -> Config:
    return loads(CONFIG % tenant, folder=folder, environ={"HOME": str(folder)})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_release_waits_for_the_tenants_own_grace(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graces: list[int] = []
    end = CommandControl._stop  # pyright: ignore[reportPrivateUsage]

    async def ending(control: CommandControl, grace_ms: int) -> None:
        graces.append(grace_ms)
        await end(control, grace_ms)

    config = configured(tmp_path, f"control: command, {CONTROLS['command']}, {KINDS[kind]}")
    control = control_of("it", config.tenants["it"], config)
    await control.ensure()
    backend = backend_of("it", config.tenants["it"], config, control)
    monkeypatch.setattr(CommandControl, "_stop", ending)
    with suppress(BackendError):  # nobody listens at its address
        await backend.release("it", limit_ms=600)
    assert graces[:1] == [7_000]
    await backend.close()
    await control.stop(0)


@pytest.mark.parametrize("name", CONTROLS)
def test_each_control_is_given_it(name: str, tmp_path: Path) -> None:
    config = configured(tmp_path, f"control: {name}, {CONTROLS[name]}, {KINDS['none']}")
    control = control_of("it", config.tenants["it"], config)
    assert cast("object", vars(control)["_grace_ms"]) == 7_000


async def test_an_order_without_a_grace_takes_the_controls_own(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    deaf = "trap '' TERM; echo up > up; while :; do sleep 0.05; done"
    bare = CommandControl("it", ["sh", "-c", deaf], tmp_path / "it", cwd=tmp_path, grace_ms=50)
    control: Watched = WatchedProcess(bare)
    await control.ensure()
    await until(control, Phase.UP)
    await asyncio.to_thread((tmp_path / "up").read_text)
    began = time.monotonic()
    await control.restart()
    assert time.monotonic() - began < 5, "and not the ten seconds of one that was given none"
    await asyncio.to_thread((tmp_path / "up").read_text)
    await control.stop()
    assert str(control.exit_status()) == "ended by SIGKILL"


def test_where_nothing_is_stopped_a_grace_is_noticed(tmp_path: Path) -> None:
    said = "tenants.it.grace: is read, but with control: attach swapper stops nothing; leave it out"
    for control, noticed in (("attach", True), (f"docker, {CONTROLS['docker']}", False)):
        notices = configured(tmp_path, f"control: {control}, {KINDS['openai']}").notices
        assert any(one.endswith(said) for one in notices) is noticed
