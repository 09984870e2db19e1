"""A real llama-server with one model, and a serve over it: started and stopped by the product's own control.

Invariant: whoever made one ends it with `stop`; nothing runs before somebody starts it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from swapper.demo.server import find_llama_server
from tests.support.matrix import back
from tests.support.router import RealRouter, free_port
from tests.support.server import Server
from workers.control.command import CommandControl

GRACE_MS = 2_000
"""With a call in flight it does not end by itself."""


class PlainServer:
    """One server over one model file, in a folder of its own. `arguments`: further ones for its command line."""

    def __init__(
        self, folder: Path, model: Path, *, parallel: int = 2, ctx: int = 8192, arguments: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.slot_dir = folder / "slots"
        self.slot_dir.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.command = [
            *find_llama_server().command,
            *("-m", str(model), "-c", str(ctx), "-np", str(parallel), "-t", "1"),
            *("--device", "none", "-ngl", "0", "-no-kvu", "--no-cache-idle-slots", "-sps", "0.5"),
            *("--skip-chat-parsing", "--metrics", "--slot-save-path", str(self.slot_dir)),
            *("--host", "127.0.0.1", "--port", str(self.port), *arguments),
        ]

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def control(self, command: Sequence[str] | None = None) -> CommandControl:
        """As each new process of the product would make it: it adopts what runs. `command`: another one."""
        folder = self.folder / "process"
        return CommandControl("plain", command or self.command, folder, cwd=self.folder, grace_ms=GRACE_MS)

    def log_tail(self, n: int = 30) -> list[str]:
        """The last `n` lines of its log, oldest first."""
        return self.control().log_tail(n) or []

    def stop(self) -> None:
        """End it, and throw away its slot files. Safe to repeat."""
        asyncio.run(self.control().stop())
        shutil.rmtree(self.slot_dir, ignore_errors=True)
        self.slot_dir.mkdir(parents=True, exist_ok=True)


class PlainServe(Server):
    """`swapper serve` over one llama-server that it starts itself, without any router: the tenant `chat`."""

    def __init__(self, folder: Path, plain: PlainServer) -> None:
        super().__init__(folder, RealRouter(folder / "no-router", {}), {}, slot_dir=plain.slot_dir)
        self.config.write_text(
            f"""
listen: 127.0.0.1:{self.port}
state_dir: {self.state_dir}
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  chat:
    kind: llama-server
    control: command
    command: {json.dumps(plain.command)}
    card: gpu0
    url: {plain.url}
    slot_dir: {plain.slot_dir}
    models: {{alpha: {{vram: 8GiB, aliases: [gpt-4o], default: true}}}}
"""
        )
        self.control = CommandControl("chat", plain.command, self.state_dir / "servers" / "chat")

    def process(self) -> psutil.Process:
        """The llama-server's, which must run."""
        pid = self.control.pid()
        assert pid is not None, "the llama-server runs"
        return psutil.Process(pid)


@contextmanager
def with_its_own_server(
    folder: Path, model: Path, *, program: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> Generator[PlainServe]:
    """One whose model is loaded; both are stopped at the end. `program`: another one than the shipped one."""
    server = PlainServe(folder / "swapper", PlainServer(folder / "plain", model))
    server.program, server.env = program or server.program, env or {}
    try:
        server.start()
        back(server, "chat")
        yield server
    finally:
        server.stop()
        asyncio.run(server.control.stop())
