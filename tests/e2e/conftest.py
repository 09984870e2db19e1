"""The serves that tests share: one of a whole file, where starting one for each would take longer, and one by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from swapper.demo.models import make_models
from tests.support.matrix import Held, with_its_own_router
from tests.support.router import RealRouter
from tests.support.server import KINDS, Server, serving


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One that started its router itself."""
    with with_its_own_router(tmp_path_factory.mktemp("living")) as server:
        yield server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind."""
    return make_models(tmp_path_factory.mktemp("models"), list(KINDS))


@pytest.fixture
def serve(tmp_path: Path, models: dict[str, Path]) -> Iterator[Callable[..., Server]]:
    """Starts one over a router whose only model is the resident."""
    with ExitStack() as stack:

        def serve(model: str, *, unified: bool = False, slots: int = 2, snapshots: str = "{}") -> Server:
            # With one cache for all slots `ctx` is the whole of it.
            defaults = {"kv-unified": str(unified).lower(), "slot-prompt-similarity": "0.5"}
            router = RealRouter(
                tmp_path / "router", {model: models[model]}, parallel=slots, ctx=12_288 * slots, defaults=defaults
            )
            traits = {model: "{vram: 8GiB, default: true}"}
            server = Server(tmp_path / "swapper", router, traits, snapshots=snapshots)
            return stack.enter_context(serving(server))

        yield serve
