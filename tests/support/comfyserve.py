"""`swapper serve` over a real llama-server and the ComfyUI of the tests, which it starts itself, behind a gate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from swapper.demo.models import make_models
from tests.support.comfyprocess import ROOT, ComfyProcess, Json, post
from tests.support.matrix import back
from tests.support.router import RealRouter, free_port
from tests.support.server import ALPHA, Server
from workers.control.command import CommandControl

RESIDENT = "llama/alpha"


class ComfyServe(Server):
    """Its resident is alpha; `comfyui` comes with its prompts. `traits`: further keys of the tenant, in YAML."""

    def __init__(self, folder: Path, *, card: str = "{probe: declared, vram: 24GiB}", **traits: str) -> None:
        router = RealRouter(folder / "router", make_models(folder, ["alpha"]))
        super().__init__(folder / "swapper", router, ALPHA)
        self.comfy = ComfyProcess(folder / "comfy")
        self.gate = f"http://127.0.0.1:{free_port()}"
        keys: Mapping[str, str] = {"linger": "1s", "vram": "all", **traits}
        text = self.config.read_text().replace("{probe: declared, vram: 24GiB}", card)
        self.config.write_text(
            f"""{text}
  comfyui:
    kind: comfyui
    control: command
    command: {json.dumps(["env", f"PYTHONPATH={ROOT}", *self.comfy.command])}
    card: gpu0
    url: {self.comfy.url}
    gate: {self.gate.removeprefix("http://")}
"""
            + "".join(f"    {key}: {value}\n" for key, value in keys.items())
        )
        self.clients = ThreadPoolExecutor(16)

    def add(self, yaml: str) -> None:
        """Further sections of the configuration."""
        self.config.write_text(f"{self.config.read_text()}{yaml}\n")

    def prompt(self, body: Json, path: str = "/prompt") -> Future[Json]:
        """A prompt on its way through the gate."""
        return self.clients.submit(post, self.gate + path, body, limit_s=90)

    async def end_comfy(self) -> None:
        """End the one that swapper started, as its own control does."""
        await CommandControl("comfyui", self.comfy.command, self.state_dir / "servers" / "comfyui").stop()


@contextmanager
def comfy_serving(server: ComfyServe) -> Generator[ComfyServe]:
    """Started, its resident at rest; at the end all of it is stopped."""
    try:
        server.router.start()
        server.start()
        back(server, RESIDENT)
        yield server
    finally:
        server.stop()
        server.router.stop()
        asyncio.run(server.end_comfy())
        server.clients.shutdown(cancel_futures=True)
