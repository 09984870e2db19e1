"""The real server and the ways to talk to it that the contract tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from swapper.demo.models import make_models
from tests.contract.server import RealRouter, preset
from tests.contract.talk import Talk
from workers.llama.router import LlamaRouter

MODELS = ("alpha", "beta", "gemma", "lfm")


@dataclass(frozen=True)
class World:
    """The router most tests share, with every model unloaded at first, and its slot folder."""

    router: RealRouter
    slots: Path
    models: dict[str, Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), MODELS)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("router")
    slots = folder / "slots"
    slots.mkdir()
    broken = folder / "broken.gguf"
    broken.write_bytes(models["alpha"].read_bytes()[:100_000])
    entries = [(name, models[name], dict[str, str]()) for name in MODELS]
    entries += [
        ("broken", broken, {}),
        ("vectors", models["alpha"], {"embeddings": "true"}),
        ("hasty", models["alpha"], {"stop-timeout": "1"}),
        ("sleepy", models["alpha"], {"sleep-idle-seconds": "1"}),
    ]
    router = RealRouter(preset(folder / "models.ini", entries), "--metrics", "--slot-save-path", str(slots))
    try:
        yield World(router.wait_ready(), slots, models)
    finally:
        router.stop()


@pytest.fixture(scope="session")
def bare_router(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[RealRouter]:
    """A router without --slot-save-path and without --metrics."""
    folder = tmp_path_factory.mktemp("bare")
    router = RealRouter(preset(folder / "models.ini", [("alpha", models["alpha"], {})]))
    try:
        yield router.wait_ready()
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
        control=world.router,
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()
