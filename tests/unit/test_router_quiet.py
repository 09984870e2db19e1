"""Waiting for a model to be idle ends when it says so, when it is gone, or at the limit with what still runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from swapper.errors import BackendDown, BackendError
from workers.backend import Quiesced, SlotUse
from workers.llama.router import LlamaRouter

MED = "llama/med"


class FakeRouter:
    """One model `med` whose child answers nothing for the first `silent` requests; `working` slots stay at work."""

    def __init__(self) -> None:
        self.status = "loaded"
        self.after = "loaded"
        self.silent = 0
        self.working: set[int] = set()
        self.deferred = 0
        self.down = False
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        if self.down:
            _hang_up(request)
        return web.json_response({"data": [{"id": "med", "status": {"value": self.status, "args": []}}]})

    async def slots(self, request: web.Request) -> web.Response:
        if self.silent:
            self.silent -= 1
            self.status = self.after
            _hang_up(request)
        slots = [{"id": i, "n_ctx": 64, "is_processing": i in self.working, "n_prompt_tokens": 9} for i in range(2)]
        return web.json_response(slots)

    async def metrics(self, _request: web.Request) -> web.Response:
        counters = {"requests_processing": len(self.working), "requests_deferred": self.deferred}
        return web.Response(text="".join(f"llamacpp:{name} {value}\n" for name, value in counters.items()))


def _hang_up(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.close()


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    fake, app = FakeRouter(), web.Application()
    app.router.add_get("/models", fake.models)
    app.router.add_get("/slots", fake.slots)
    app.router.add_get("/metrics", fake.metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def backend(router: FakeRouter, tmp_path: Path) -> AsyncIterator[LlamaRouter]:
    backend = LlamaRouter(router.url, tenants={MED: "med"}, state_dir=tmp_path)
    yield backend
    await backend.close()


async def test_a_child_that_is_too_busy_to_answer_is_looked_at_again(backend: LlamaRouter, router: FakeRouter) -> None:
    router.silent = 6  # each look asks three times
    assert await backend.quiesce(MED) == Quiesced((SlotUse(0, 9), SlotUse(1, 9)))
    assert router.silent == 0


async def test_a_model_that_went_while_it_was_looked_at_holds_nothing(backend: LlamaRouter, router: FakeRouter) -> None:
    router.silent, router.after = 100, "unloaded"
    assert await backend.quiesce(MED) == Quiesced(gone=True)


async def test_a_router_that_does_not_answer_either_is_an_error(backend: LlamaRouter, router: FakeRouter) -> None:
    router.down = True
    with pytest.raises(BackendDown, match="/models does not answer"):
        await backend.quiesce(MED)


async def test_at_its_limit_it_says_what_still_runs(backend: LlamaRouter, router: FakeRouter) -> None:
    router.working, router.deferred = {1}, 2
    sentence = "med is not idle after 0.3 s: slots at work: 1; calls running: 1, waiting: 2"
    with pytest.raises(BackendError, match=sentence):
        await backend.quiesce(MED, limit_ms=300)


async def test_at_its_limit_it_says_that_nobody_answered(backend: LlamaRouter, router: FakeRouter) -> None:
    router.silent = 1_000_000
    with pytest.raises(BackendError, match=r"med is not idle after 0.5 s: .*/slots does not answer"):
        await backend.quiesce(MED, limit_ms=500)
