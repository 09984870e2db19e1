"""The real server, the fake one, and the ways to talk to them that the contract tests share.

What is asked of `world`, `bare_router` or `another` is asked of both; what holds for processes alone, of `real_talk`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from swapper.demo.models import make_models
from tests.contract.controls import Docker
from tests.contract.talk import Talk
from tests.support.dockerd import Dockerd, needed
from tests.support.fake_server import FakeServer, fake_processes
from tests.support.plain import PlainServer
from tests.support.router import RealRouter
from workers.backend import Backend
from workers.control.docker import DockerControl
from workers.control.engine import Engine
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer

MODELS = ("alpha", "beta", "gemma", "lfm")


ONE_THREAD = {"threads": "1"}  # two would spin against whatever else runs here


Router = RealRouter | FakeServer
BOTH = ("real", "fake")


@dataclass(frozen=True)
class World:
    """The server most tests share, with every model unloaded at first, and its slot folder."""

    router: Router | PlainServer
    slots: Path


class OurLog:
    """The `Control` of a server that the tests started: its log is ours, its life is theirs."""

    def __init__(self, router: Router | PlainServer) -> None:
        self.log_tail = router.log_tail
        self._folder = router.slot_dir.parent

    async def ensure(self) -> None: ...

    def alive(self) -> None: ...

    def pid(self) -> None: ...

    def log_path(self) -> Path:
        return self._folder / "llama-server.log"

    async def restart(self, grace_ms: int | None = None) -> None: ...


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), MODELS)


def _kind(name: str) -> type[Router]:
    return RealRouter if name == "real" else FakeServer


@contextmanager
def _world(name: str, tmp: pytest.TempPathFactory, models: dict[str, Path]) -> Generator[World]:
    folder = tmp.mktemp(f"router-{name}")
    broken = folder / "broken.gguf"
    broken.write_bytes(models["alpha"].read_bytes()[:100_000])
    kinds = {
        "vectors": {"embeddings": "true"},
        "hasty": {"stop-timeout": "1"},
        "sleepy": {"sleep-idle-seconds": "1"},
    }
    every = {**models, "broken": broken, **dict.fromkeys(kinds, models["alpha"])}
    router = _kind(name)(folder, every, ctx=8192, defaults=ONE_THREAD, overrides=kinds)
    try:
        yield World(router.start(), router.slot_dir)
    finally:
        router.stop()


@contextmanager
def _bare(name: str, tmp: pytest.TempPathFactory, models: dict[str, Path]) -> Generator[Router]:
    router = _kind(name)(
        tmp.mktemp(f"bare-{name}"), {"alpha": models["alpha"]}, ctx=8192, defaults=ONE_THREAD, bare=True
    )
    try:
        yield router.start()
    finally:
        router.stop()


@pytest.fixture(scope="session")
def real_world(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[World]:
    with _world("real", tmp_path_factory, models) as world:
        yield world


@pytest.fixture(scope="session")
def fake_world(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[World]:
    with _world("fake", tmp_path_factory, models) as world:
        yield world


@pytest.fixture(params=BOTH)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The shared router: each test runs on the real one and on the fake."""
    with fake_processes() if request.param == "fake" else nullcontext():
        yield request.getfixturevalue(f"{request.param}_world")


@pytest.fixture(scope="session")
def plain_world(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[World]:
    server = PlainServer(tmp_path_factory.mktemp("plain"), models["alpha"])
    try:
        yield World(server, server.slot_dir)
    finally:
        server.stop()


@pytest.fixture(params=(*BOTH, "plain"))
def either_kind(request: pytest.FixtureRequest) -> Iterator[World]:
    """For tests of `llama/alpha` alone: a router, real and fake, and a server with that one model."""
    with fake_processes() if request.param == "fake" else nullcontext():
        yield request.getfixturevalue(f"{request.param}_world")


@pytest.fixture(scope="session")
def real_bare(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Router]:
    with _bare("real", tmp_path_factory, models) as router:
        yield router


@pytest.fixture(scope="session")
def fake_bare(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Router]:
    with _bare("fake", tmp_path_factory, models) as router:
        yield router


@pytest.fixture(params=BOTH)
def bare_router(request: pytest.FixtureRequest) -> Router:
    """A router without --slot-save-path and without --metrics."""
    return request.getfixturevalue(f"{request.param}_bare")


@pytest.fixture(params=BOTH)
def another(request: pytest.FixtureRequest) -> type[Router]:
    """For a test that starts a router of its own."""
    return _kind(request.param)


@pytest.fixture
async def talk(world: World) -> AsyncIterator[Talk]:
    async with Talk(world.router.url) as talk:
        yield talk


@pytest.fixture
async def real_talk(real_world: World) -> AsyncIterator[Talk]:
    """Of the real server alone: what is asked of processes."""
    async with Talk(real_world.router.url) as talk:
        yield talk


@pytest.fixture
async def bare(bare_router: Router) -> AsyncIterator[Talk]:
    async with Talk(bare_router.url) as talk:
        yield talk


def backend_of(world: World, state: Path) -> LlamaServer | LlamaRouter:
    """One that was not started yet and knows nothing of what others did."""
    names = [*MODELS, "broken", "vectors", "hasty", "sleepy", "absent"]
    server = world.router
    if isinstance(server, PlainServer):
        control = server.control()
        return LlamaServer(server.url, tenant="llama/alpha", control=control, state_dir=state, slot_dir=world.slots)
    return LlamaRouter(
        server.url,
        tenants={f"llama/{name}": name for name in names},
        state_dir=state,
        slot_dir=world.slots,
        control=OurLog(server),
    )


@pytest.fixture
async def backend(world: World, tmp_path: Path) -> AsyncIterator[Backend]:
    backend = backend_of(world, tmp_path / "state")
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[Dockerd]:
    """A Docker engine with busybox; each test has containers of its own."""
    yield from _engine()


def _engine() -> Iterator[Dockerd]:
    needed()
    engine = Dockerd()
    try:
        engine.start().busybox()
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def mine(engine: Dockerd) -> Iterator[Dockerd]:
    """The shared engine; the containers of the test are removed at its end."""
    yield engine
    for one in engine.api.containers(all=True):
        engine.api.remove_container(one["Id"], force=True)


@pytest.fixture
def own() -> Iterator[Dockerd]:
    """An engine that the test may kill."""
    yield from _engine()


@pytest.fixture
async def docker() -> AsyncIterator[Docker]:
    """Makes controls of an engine's containers, and closes them at the end."""
    all_made: list[DockerControl] = []

    def one(engine: Dockerd, container: str = "it") -> DockerControl:
        all_made.append(DockerControl("tenant", container, Engine(engine.url)))
        return all_made[-1]

    yield one
    for control in all_made:
        await control.close()
