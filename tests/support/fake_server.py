"""The fake router on a port, with the surface of `RealRouter`: what the contract tests talk to beside the real one.

Invariant: the router and its HTTP front live in a thread with a loop of its own, so that they outlive the loop of a
test; whoever starts one stops it. A fake child is no process: `fake_processes` lets the product see it as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import gguf
import pytest
from aiohttp import web

from swapper.demo.models import write_preset
from tests.support.fake_child import FakeChild
from tests.support.fake_router import FakeRouter
from tests.support.fake_slots import Attention, FakeModel
from tests.support.fake_wire import Answer, Dropped, NobodyThere
from tests.support.router import free_port
from workers.llama import child as processes
from workers.llama import lifecycle, router

T = TypeVar("T")

_ATTENTION = {"gemma3": Attention.WINDOW, "lfm2": Attention.HYBRID}
_BODY_BYTES = 64 << 20
_ANSWER_S = 20.0


class FakeServer:
    """One fake router over the files of real models; takes what `RealRouter` takes, and is used like it."""

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Path],
        *,
        parallel: int = 2,
        ctx: int = 16_384,
        defaults: Mapping[str, str] | None = None,
        overrides: Mapping[str, Mapping[str, str]] | None = None,
        bare: bool = False,
    ) -> None:
        self.folder = folder
        self.slot_dir = folder / "slots"
        self.preset = folder / "presets.ini"
        self.slot_dir.mkdir(parents=True, exist_ok=True)
        write_preset(self.preset, models, parallel=parallel, ctx=ctx, defaults=defaults, overrides=overrides)
        self.port = free_port()
        common = {"ctx-size": str(ctx), "parallel": str(parallel), **(defaults or {})}
        described = [
            _model(name, path, common | dict((overrides or {}).get(name, {}))) for name, path in models.items()
        ]
        self.router = FakeRouter(described, slot_dir=None if bare else self.slot_dir, metrics=not bare)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """True from `start` until it was ended."""
        return self._thread is not None and self.router.alive

    def start(self) -> FakeServer:
        """Start it and return itself once it answers. RuntimeError with its last lines when it refuses to."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake router", daemon=True)
        self._thread.start()
        RUNNING.append(self)
        try:
            self.inside(self._listen())
        except BaseException:
            self._end()
            raise
        return self

    def stop(self) -> None:
        """End it, and throw away its slot files. Safe to repeat."""
        self._end()
        shutil.rmtree(self.slot_dir, ignore_errors=True)
        self.slot_dir.mkdir(parents=True, exist_ok=True)

    def log_tail(self, n: int = 30) -> list[str]:
        """Return the last `n` lines of its log, oldest first."""
        return list(self.router.log)[-n:]

    def inside(self, work: Coroutine[None, None, T]) -> T:
        """Do this in the router's own loop and wait for it."""
        return self.submit(work).result(_ANSWER_S)

    def submit(self, work: Coroutine[None, None, T]) -> Future[T]:
        """Have this done in the router's own loop."""
        assert self._loop is not None, "the router was not started"
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, act: Callable[[], object]) -> None:
        """Do this in the router's own loop before anything that is asked of it later."""
        assert self._loop is not None, "the router was not started"
        self._loop.call_soon_threadsafe(act)

    async def _listen(self) -> None:
        self.router.start()
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """A client that closes its connection ends its request here: the handler is cancelled."""
        try:
            answer = await self.router.request(
                request.method, request.path, request.query, await request.read(), request.headers
            )
            return await _sent(request, answer)
        except (Dropped, NobodyThere):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    def _end(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self.inside(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None
        RUNNING.remove(self)

    async def _close(self) -> None:
        await self.router.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


async def _sent(request: web.Request, answer: Answer) -> web.StreamResponse:
    if isinstance(answer.body, bytes):
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    try:
        await response.prepare(request)
        async for chunk in answer.body:
            await response.write(chunk)
        await response.write_eof()
    finally:
        await answer.body.aclose()
    return response


def _model(name: str, path: Path, settings: Mapping[str, str]) -> FakeModel:
    """A model as a preset's section describes it, and its file."""
    attention, shape = _file(path)
    seconds = settings.get("sleep-idle-seconds")
    return FakeModel(
        name,
        str(path),
        aliases=tuple(filter(None, settings.get("alias", "").split(","))),
        parallel=int(settings["parallel"]),
        n_ctx=int(settings["ctx-size"]),
        attention=attention,
        shape=shape,
        broken=not shape,
        load_on_startup=settings.get("load-on-startup") == "true",
        stop_timeout_s=float(settings.get("stop-timeout", 10)),
        sleep_idle_s=None if seconds is None else float(seconds),
        args=("--embedding",) if settings.get("embeddings") == "true" else (),
    )


@cache
def _file(path: Path) -> tuple[Attention, str]:
    """The attention of a GGUF and its shape; no shape where it cannot be read as far as it should go."""
    try:
        fields = gguf.GGUFReader(path).fields
    except (OSError, ValueError):
        return Attention.DENSE, ""
    arch = str(fields["general.architecture"].contents())
    sizes = [fields[f"{arch}.{name}"].contents() for name in ("block_count", "embedding_length")]
    return _ATTENTION.get(arch, Attention.DENSE), f"{arch} {sizes}"


@dataclass(frozen=True, slots=True)
class FakeProcess:
    """A fake child as `workers.llama.child.Child` would show its process."""

    server: FakeServer
    child: FakeChild

    @property
    def pid(self) -> int:
        """One that no other child has at the time: no two listen at one port."""
        return int(self.child.port)

    def alive(self) -> bool:
        """False once it ended."""
        return self.child.alive

    def environ(self) -> tuple[str, ...]:
        """Nothing of note."""
        return ()

    async def ended(self) -> None:
        """Wait for its end, in whatever loop."""
        await asyncio.wrap_future(self.server.submit(self.child.ended()))

    def ticks(self) -> int:
        """It is always at work: it ends, and does not hang."""
        return next(_TICKS)

    def kill(self) -> None:
        """End it, if it did not."""
        self.server.soon(lambda: self.child.end(1))


_TICKS = itertools.count()


@contextlib.contextmanager
def fake_processes() -> Generator[None]:
    """The product finds the children of every fake router that runs as if they were processes."""

    def find(model: str, port: str) -> object:
        found = ((server, server.router.child(model, port)) for server in RUNNING)
        seen = [FakeProcess(server, child) for server, child in found if child is not None]
        return seen[0] if seen else processes.find_child(model, port)

    async def gone(child: object, *, timeout_s: float) -> bool:
        if not isinstance(child, FakeProcess):
            return await processes.gone(cast("processes.Child", child), timeout_s=timeout_s)
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(timeout_s):
                await child.ended()
        return not child.alive()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "find_child", cast("Any", find))
        patch.setattr(router, "gone", gone)
        patch.setattr(lifecycle, "gone", gone)
        yield


RUNNING: list[FakeServer] = []
