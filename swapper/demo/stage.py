"""The demo's stage: a folder that vanishes, tiny models, a configuration, and the real product running on it.

Invariant: whatever happens, on leaving the block no process it started lives and no file it wrote is left; when it is
killed, the guard of its folder sees to that. It forces the CPU (`device = none`, no GPU layers), so that a newcomer's
real card is never touched.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swapper.app import Running, control_of, running
from swapper.config import Config, loads
from swapper.demo.folder import SERVER, STATE, STOP_MS, clear_dead, vanishing_folder
from swapper.demo.models import SHAPES, make_models, write_preset
from swapper.demo.server import LlamaServer, find_llama_server

MODEL = "med"
CARD = "gpu0"
CONTEXT = 16_384
PORTABLE_LAYERS = 3
"""Of med's eight, where llama-server reads at less than half its speed: the demo takes under a minute there too."""
PORTABLE_SETTINGS = {"flash-attn": "off", "threads": "1", "threads-batch": "2"}
"""What is fastest there for a few tokens behind a long context, also when other programs want the processor."""

_T = TypeVar("_T")

_CONFIG = """\
listen: 127.0.0.1:{listen}
state_dir: {state}
cards:
  {card}: {{probe: declared, vram: 24GiB}}
tenants:
  {server}:
    kind: llama-router
    control: command
    command: {command}
    card: {card}
    url: http://127.0.0.1:{port}
    preset: presets.ini
    slot_dir: slots
    models:
      {model}: {{vram: 20GiB, default: true}}
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """What the show plays on. `router` is llama-server's own address, for the comparison without swapper."""

    folder: Path
    llama: LlamaServer
    router: str
    config: Config

    @asynccontextmanager
    async def swapper(self) -> AsyncGenerator[Running]:
        """The real product on this stage; when it ends, llama-server and its model stay as they are.

        Raises SwapperError out of the block when a part of it fails meanwhile.
        A Ctrl-C while it starts or stops takes effect afterwards: half a start would leave processes behind.
        """
        async with AsyncExitStack() as stack:
            product = AsyncExitStack()
            stack.push_async_callback(lambda: _to_the_end(product.aclose()))
            server = await _to_the_end(product.enter_async_context(running(self.config)))
            async with server.unless_failed():
                yield server


@asynccontextmanager
async def stage(say: Callable[[str], None]) -> AsyncGenerator[Stage]:
    """Set it up, and take it down again. Raises SwapperError where the wheel does not run."""
    llama = find_llama_server()
    for said in await clear_dead():
        say(said)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(vanishing_folder())
        port = _free_port()
        path = furnish(folder, llama, port, say)
        config = _loaded(path)
        control = control_of(SERVER, config.tenants[SERVER], config)
        stack.push_async_callback(lambda: _to_the_end(control.stop(STOP_MS)))
        say(f"starting the store, llama-server ({llama.version}, router mode) and swapper")
        yield Stage(folder, llama, f"http://127.0.0.1:{port}", config)


async def _to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work` to its end, also when cancelled meanwhile; the cancellation then comes after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # looked at: the cancellation says enough
        raise


def furnish(folder: Path, llama: LlamaServer, port: int, say: Callable[[str], None], *, listen: int = 0) -> Path:
    """Put a tiny model, its preset, a slot folder and a configuration into the folder (absolute); returns the last.

    `port` is for llama-server, `listen` for swapper, where 0 lets the system choose.
    """
    layers = PORTABLE_LAYERS if llama.portable else SHAPES[MODEL].layers
    say(f"making a tiny model of {layers} layers (random weights: it answers gibberish, but it computes for real)")
    models = make_models(folder, [MODEL], layers=layers)
    settings = PORTABLE_SETTINGS if llama.portable else {}
    write_preset(folder / "presets.ini", models, parallel=2, ctx=CONTEXT, defaults=settings)
    (folder / "slots").mkdir(exist_ok=True)
    command = json.dumps([*_without_settings(), *router_command(folder, llama, port)])
    names = {"card": CARD, "model": MODEL, "state": STATE, "server": SERVER}
    path = folder / "swapper.yaml"
    path.write_text(_CONFIG.format(listen=listen, port=port, command=command, **names))
    return path


def router_command(folder: Path, llama: LlamaServer, port: int) -> list[str]:
    """How the llama-server of a furnished folder is started, as a router that leaves all decisions to swapper."""
    return [
        *llama.command,
        *("--models-preset", str(folder / "presets.ini")),
        "--no-models-autoload",
        *("--models-max", "0"),
        "--metrics",
        *("--slot-save-path", str(folder / "slots")),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def _loaded(path: Path) -> Config:
    """The configuration as it stands there, whatever the caller's shell sets for another one."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SWAPPER__")}
    return loads(path.read_text(), folder=path.parent, environ=environ, name="swapper.yaml", path=path)


def _without_settings() -> list[str]:
    """llama-server reads LLAMA_ARG_* as arguments: those of the caller's shell are for another server."""
    theirs = [name for name in os.environ if name.startswith("LLAMA_ARG_")]
    return ["env", *(f"--unset={name}" for name in theirs)] if theirs else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
