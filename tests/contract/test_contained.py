"""A llama-server that lives in a container, plain and as a router: started on demand, seen and ended like any other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from swapper.errors import BackendError
from tests.contract.saving import LONG
from tests.contract.talk import Talk
from tests.support.contained import contain, image
from tests.support.dockerd import Dockerd
from tests.support.plain import PlainServer
from tests.support.router import RealRouter
from workers.backend import SaveArgs, TenantState
from workers.control.docker import DockerControl
from workers.control.engine import Engine
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer


@pytest.fixture(scope="module")
def llama(engine: Dockerd) -> Dockerd:
    image(engine)
    return engine


@pytest.fixture
def mine(llama: Dockerd) -> Iterator[Dockerd]:
    yield llama
    for one in llama.api.containers(all=True):
        llama.api.remove_container(one["Id"], force=True)


@pytest.fixture
async def plain(mine: Dockerd, tmp_path: Path, models: dict[str, Path]) -> AsyncIterator[tuple[LlamaServer, Talk]]:
    server = PlainServer(tmp_path / "plain", models["alpha"])
    contain(mine, "chat", server.command, models["alpha"].parent, server.slot_dir)
    control = DockerControl("chat", "chat", Engine(mine.url))
    state = tmp_path / "state"
    backend = LlamaServer(server.url, tenant="chat", control=control, state_dir=state, slot_dir=server.slot_dir)
    async with Talk(server.url) as talk:
        yield backend, talk
    await backend.close()
    await control.close()


async def test_its_container_runs_from_its_load_to_its_release_and_its_conversation_comes_back(
    plain: tuple[LlamaServer, Talk], mine: Dockerd
) -> None:
    backend, talk = plain
    await backend.start()
    assert (await backend.observe(), mine.state("chat")["Status"]) == ({"chat": TenantState.UNLOADED}, "created")
    await backend.load("chat")
    assert await backend.observe() == {"chat": TenantState.LOADED}
    await talk.say("chat", LONG, slot=1)
    assert 1 in [use.slot for use in (await backend.quiesce("chat")).slots]
    saved = await backend.save("chat", SaveArgs(1, "kept.kv"))
    await backend.release("chat", limit_ms=10_000)
    assert (await backend.observe(), mine.state("chat")["ExitCode"]) == ({"chat": TenantState.UNLOADED}, 0)
    loaded = await backend.load("chat")
    assert [(one.snapshot, one.refused) for one in loaded.snapshots] == [("kept.kv", None)]
    assert (await backend.restore("chat", "kept.kv", 0)).tokens == saved.tokens
    assert (await talk.say("chat", LONG))["timings"]["cache_n"] > 0.9 * (saved.tokens - 8)


async def test_one_that_cannot_load_says_why_by_its_containers_log(
    mine: Dockerd, tmp_path: Path, models: dict[str, Path]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(models["alpha"].read_bytes()[:1000])
    server = PlainServer(tmp_path / "plain", broken)
    contain(mine, "chat", server.command, tmp_path)
    control = DockerControl("chat", "chat", Engine(mine.url))
    backend = LlamaServer(server.url, tenant="chat", control=control, state_dir=tmp_path / "state")
    with pytest.raises(
        BackendError, match=r"llama-server ended before chat was loaded \(exit status 1\): .*broken.gguf"
    ):
        await backend.load("chat")
    assert await backend.observe() == {"chat": TenantState.FAILED}
    await backend.close()
    await control.close()


async def test_a_routers_container_is_started_and_its_models_come_and_go_in_it(
    mine: Dockerd, tmp_path: Path, models: dict[str, Path]
) -> None:
    router = RealRouter(tmp_path / "router", {"alpha": models["alpha"]}, ctx=8192, defaults={"threads": "1"})
    contain(mine, "llama", router.command, models["alpha"].parent, router.folder)
    control = DockerControl("llama", "llama", Engine(mine.url))
    tenants = {"llama/alpha": "alpha"}
    backend = LlamaRouter(
        router.url, tenants=tenants, control=control, state_dir=tmp_path / "state", slot_dir=router.slot_dir
    )
    assert await backend.observe() == {"llama/alpha": TenantState.STOPPED}
    await backend.start()
    while await backend.observe() == {"llama/alpha": TenantState.STOPPED}:
        pass
    await backend.load("llama/alpha")
    assert await backend.observe() == {"llama/alpha": TenantState.LOADED}
    await backend.release("llama/alpha", limit_ms=10_000)
    assert await backend.observe() == {"llama/alpha": TenantState.UNLOADED}
    assert mine.state("llama")["Running"] is True
    await backend.close()
    await control.close()
