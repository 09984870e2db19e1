"""What hangs: a process that lives, is asked, and gives no sign of life; nobody else is taken for one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from swapper.errors import BackendRefused
from tests.support.virtual_time import virtual
from workers.backend import TenantState
from workers.control import ExitStatus
from workers.llama import hung
from workers.llama.child import Child
from workers.llama.hung import HUNG_S, ROUTER_HUNG_S, SILENT_S, Silence, Vitals
from workers.llama.router import LlamaRouter

MODEL = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
print("up", flush=True)
server.serve_forever()
"""


PATIENCE_S = 30.0
"""Whoever lives may take so long for an answer, on a machine that is busy."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hung, "_ASK_S", PATIENCE_S)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on those who are asked do not answer."""
    monkeypatch.setattr(hung, "_ASK_S", 0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def model(port: int) -> Generator[subprocess.Popen[bytes]]:
    """A process that looks like a router's child and answers."""
    process = subprocess.Popen(
        [sys.executable, "-c", MODEL, "--alias", "med", "--port", str(port)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    with process:
        try:
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@virtual
async def test_silence_lasts_by_the_clock_and_by_the_number_of_looks() -> None:
    """Two looks with a long stop of ours between them prove nothing."""
    silence = Silence()
    silence.looked()
    await asyncio.sleep(10 * HUNG_S)
    silence.looked()
    assert not silence.lasts(HUNG_S)
    silence.looked()
    silence.looked()
    assert silence.lasts(HUNG_S)
    silence.heard()
    assert not silence.lasts(0)


class Looking:
    """A Vitals whose clock the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process: Child, url: str) -> None:
        self.now = 0.0
        monkeypatch.setattr(hung, "_now", lambda: self.now)
        self.vitals = Vitals()
        self._of = ("med", process, url)

    async def look_for(self, seconds: float) -> None:
        for _ in range(int(seconds / 2) + 1):
            await self.vitals.look(*self._of)
            self.now += 2.0


async def test_a_stopped_process_is_silent_and_then_hung_and_an_idle_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with model(port) as process:
        child = Child.of(process.pid)
        assert child is not None
        looking = Looking(monkeypatch, child, f"http://127.0.0.1:{port}")
        await looking.look_for(2 * HUNG_S)
        assert not looking.vitals.silent("med")
        stop(process)
        quick(monkeypatch)
        await looking.look_for(SILENT_S + 2)
        assert looking.vitals.silent("med")
        assert looking.vitals.hung() == {}
        await looking.look_for(HUNG_S)
        assert looking.vitals.hung() == {"med": child}
        process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(hung, "_ASK_S", PATIENCE_S)
        await looking.look_for(2)
        assert not looking.vitals.silent("med")


async def test_one_that_uses_cpu_time_is_at_work_though_it_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt keeps a model from answering for the whole batch."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        spent = iter(range(1000))

        def spend(_child: Child) -> int:
            return next(spent)

        def rest(_child: Child) -> int:
            return 7

        monkeypatch.setattr(Child, "ticks", spend)
        child = Child.of(os.getpid())
        assert child is not None
        looking = Looking(monkeypatch, child, f"http://127.0.0.1:{deaf.getsockname()[1]}")
        await looking.look_for(3 * HUNG_S)
        assert not looking.vitals.silent("med")
        monkeypatch.setattr(Child, "ticks", rest)
        quick(monkeypatch)
        await looking.look_for(HUNG_S + 4)
        assert looking.vitals.hung() == {"med": child}
        looking.vitals.forget(but=set())
        assert looking.vitals.hung() == {}


class Controlled:
    """A control whose process is this one, or nobody's."""

    def __init__(self, pid: int | None, *, dead: bool = False) -> None:
        self._pid = pid
        self._dead = dead
        self.restarts = 0
        self.ensured = 0

    async def ensure(self) -> None:
        self.ensured += 1

    async def stop(self, grace_ms: int | None = None) -> None: ...
    async def restart(self, grace_ms: int | None = None) -> None:
        del grace_ms
        self.restarts += 1

    def alive(self) -> bool | None:
        return False if self._dead else None if self._pid is None else True

    def pid(self) -> int | None:
        return self._pid

    def exit_status(self) -> ExitStatus | None: ...
    def log_tail(self, n: int) -> list[str] | None: ...
    def log_path(self) -> Path | None: ...


class Front:
    """A router that lists one loaded model, or hangs."""

    def __init__(self, child_port: int) -> None:
        self.child_port = child_port
        self.hangs = False
        self.over = asyncio.Event()
        self.url = ""

    async def models(self, _request: web.Request) -> web.Response:
        if self.hangs:
            await self.over.wait()
        status = {"value": "loaded", "args": ["--port", str(self.child_port)]}
        return web.json_response({"data": [{"id": "med", "status": status}]})


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    fake, app = Front(free_port()), web.Application()
    app.router.add_get("/models", fake.models)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    yield fake
    fake.over.set()
    await runner.cleanup()


@asynccontextmanager
async def backend(front: Front, control: Controlled, folder: Path) -> AsyncGenerator[LlamaRouter]:
    made = LlamaRouter(front.url, tenants={"llama/med": "med"}, state_dir=folder, control=control)
    try:
        yield made
    finally:
        await made.close()


async def looked_at(
    one: LlamaRouter, step: Callable[[], None], seconds: float, patience_s: float = PATIENCE_S
) -> TenantState:
    seen: TenantState | None = None
    for _ in range(int(seconds / 2) + 1):
        try:
            async with asyncio.timeout(patience_s):
                seen = (await one.observe())["llama/med"]
        except TimeoutError:
            seen = TenantState.UNREACHABLE
        step()
    assert seen is not None
    return seen


@pytest.mark.parametrize("router", ["ours", "not ours", "another's child"])
async def test_a_models_process_that_hangs_is_told_and_ended_where_it_is_ours(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: str
) -> None:
    """Ours is what our router started: this test stands for it, and the model is its child, or it is the model's."""
    now = [0.0]
    monkeypatch.setattr(hung, "_now", lambda: now[0])

    def step() -> None:
        now[0] += 2.0

    with model(front.child_port) as process:
        control = Controlled({"ours": os.getpid(), "not ours": None, "another's child": process.pid}[router])
        async with backend(front, control, tmp_path) as one:
            assert await looked_at(one, step, HUNG_S) is TenantState.LOADED
            stop(process)
            quick(monkeypatch)
            assert await looked_at(one, step, SILENT_S + 4) is TenantState.UNREACHABLE
            assert await one.end_hung() is None
            await looked_at(one, step, HUNG_S + 4)
            said = await one.end_hung()
            if router == "ours":
                what = "lived and answered nothing for 20 s: ended, to be loaded anew"
                assert said == f"med (process {process.pid}) {what}"
                assert process.wait(10) == -signal.SIGKILL
            else:
                assert said is None
                assert process.poll() is None
    assert control.restarts == 0


@pytest.mark.parametrize("ours", [True, False])
async def test_a_router_that_hangs_is_started_anew_where_it_is_ours(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(hung, "_now", lambda: now[0])

    def step() -> None:
        now[0] += 5.0

    control = Controlled(os.getpid() if ours else None)
    async with backend(front, control, tmp_path) as one:
        await looked_at(one, step, 2 * ROUTER_HUNG_S)
        front.hangs = True
        assert await looked_at(one, step, 8, patience_s=0.5) is TenantState.UNREACHABLE
        assert await one.end_hung() is None
        await looked_at(one, step, 8, patience_s=0.5)
        said = await one.end_hung()
        who = f"the router at {front.url} (process {os.getpid()})"
        assert said == (f"{who} lived and did not answer for 30 s: started anew" if ours else None)
        assert control.restarts == ours
        assert await one.end_hung() is None


async def test_a_port_that_somebody_else_has_is_told_with_his_name_and_he_is_not_steered(
    front: Front, tmp_path: Path
) -> None:
    control = Controlled(None, dead=True)
    async with backend(front, control, tmp_path) as one:
        port, name = front.url.rpartition(":")[2], psutil.Process().name()
        said = rf"^port {port} is taken by process {os.getpid()} \({re.escape(name)}\), and the router of llama cannot"
        for verb in (one.start(), one.load("llama/med")):
            with pytest.raises(BackendRefused, match=said):
                await verb
        assert await one.observe() == {"llama/med": TenantState.UNREACHABLE}
        assert control.ensured == 0
        front.url = f"http://127.0.0.1:{free_port()}"
    async with backend(front, control, tmp_path) as one:
        await one.start()
    assert control.ensured == 1


async def test_a_router_that_is_not_ours_to_start_is_steered_whoever_it_is(front: Front, tmp_path: Path) -> None:
    async with backend(front, Controlled(None), tmp_path) as one:
        await one.start()
        assert await one.observe() == {"llama/med": TenantState.LOADED}
