"""The real server and the ways to talk to it that the contract tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from swapper.demo.models import make_models
from tests.contract.talk import Talk
from tests.support.router import RealRouter
from workers.llama.router import LlamaRouter

MODELS = ("alpha", "beta", "gemma", "lfm")


ONE_THREAD = {"threads": "1"}  # two would spin against whatever else runs here


@dataclass(frozen=True)
class World:
    """The router most tests share, with every model unloaded at first, and its slot folder."""

    router: RealRouter
    slots: Path


class OurLog:
    """The `Control` of a server that the tests started: its log is ours, its life is theirs."""

    def __init__(self, router: RealRouter) -> None:
        self.log_tail = router.log_tail

    async def ensure(self) -> None: ...

    async def restart(self) -> None: ...


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), MODELS)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("router")
    broken = folder / "broken.gguf"
    broken.write_bytes(models["alpha"].read_bytes()[:100_000])
    kinds = {
        "vectors": {"embeddings": "true"},
        "hasty": {"stop-timeout": "1"},
        "sleepy": {"sleep-idle-seconds": "1"},
    }
    every = {**models, "broken": broken, **dict.fromkeys(kinds, models["alpha"])}
    router = RealRouter(folder, every, ctx=8192, defaults=ONE_THREAD, overrides=kinds)
    try:
        yield World(router.start(), router.slot_dir)
    finally:
        router.stop()


@pytest.fixture(scope="session")
def bare_router(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[RealRouter]:
    """A router without --slot-save-path and without --metrics."""
    folder = tmp_path_factory.mktemp("bare")
    router = RealRouter(folder, {"alpha": models["alpha"]}, ctx=8192, defaults=ONE_THREAD, bare=True)
    try:
        yield router.start()
    finally:
        router.stop()


@pytest.fixture
async def talk(world: World) -> AsyncIterator[Talk]:
    async with Talk(world.router.url) as talk:
        yield talk


@pytest.fixture
async def bare(bare_router: RealRouter) -> AsyncIterator[Talk]:
    async with Talk(bare_router.url) as talk:
        yield talk


@pytest.fixture
async def backend(world: World, tmp_path: Path) -> AsyncIterator[LlamaRouter]:
    names = [*MODELS, "broken", "vectors", "hasty", "sleepy", "absent"]
    backend = LlamaRouter(
        world.router.url,
        tenants={f"llama/{name}": name for name in names},
        state_dir=tmp_path / "state",
        slot_dir=world.slots,
        control=OurLog(world.router),
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()
