"""Whose the processes of a llama-server are, on a real one: what a driver names by pid is known by its tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.contract.conftest import World
from tests.contract.talk import Talk
from tests.support.plain import PlainServer
from workers.backend import Owners, Processes
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer
from workers.vram.processes import held_by, line_of


async def test_a_model_s_process_is_its_tenant_s_from_the_look_that_saw_it_until_it_ends(
    real_world: World, real_talk: Talk, tmp_path: Path
) -> None:
    backend = LlamaRouter(real_world.router.url, tenants={"llama/alpha": "alpha"}, state_dir=tmp_path)
    assert isinstance(backend, Processes)
    for model in ("alpha", "beta"):
        await real_talk.reload(model)
    await backend.observe()
    whose = {tenant: pid for pid, tenant in backend.processes().pids.items()}
    assert {"llama/alpha", "llama/beta"} <= whose.keys()
    held = held_by({pid: 100 for pid in whose.values()}, backend.processes())
    assert {one.owner for one in held} == whose.keys()
    for model in ("alpha", "beta"):
        await real_talk.unload(model)
        assert whose[f"llama/{model}"] not in backend.processes().pids
    await backend.close()


async def test_a_plain_server_s_process_and_all_below_it_are_its_tenant_s(
    models: dict[str, Path], tmp_path: Path
) -> None:
    server = PlainServer(tmp_path / "plain", models["alpha"])
    control = server.control(["sh", "-c", f"{' '.join(server.command)}; true"])
    backend = LlamaServer(server.url, tenant="chat", control=control, state_dir=tmp_path / "state")
    try:
        await backend.load("chat")
        await backend.observe()
        shell = control.pid()
        assert shell is not None
        owners = backend.processes()
        (below,) = owners.pids.keys() - {shell}
        assert owners == Owners({shell: "chat", below: "chat"})
        assert [pid for pid, _ in line_of(below)][:2] == [below, shell]
        await backend.release("chat", limit_ms=10_000)
        assert backend.processes() == Owners()
    finally:
        await backend.close()
        await asyncio.to_thread(server.stop)
