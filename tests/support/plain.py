"""A real llama-server with one model, started and stopped by the product's own control: what `LlamaServer` is for.

Invariant: whoever made one ends it with `stop`; nothing runs before somebody starts it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from swapper.demo.server import find_llama_server
from tests.support.router import free_port
from workers.control.command import CommandControl


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
        return CommandControl("plain", command or self.command, self.folder / "process", cwd=self.folder)

    def log_tail(self, n: int = 30) -> list[str]:
        """The last `n` lines of its log, oldest first."""
        return self.control().log_tail(n) or []

    def stop(self) -> None:
        """End it, and throw away its slot files. Safe to repeat."""
        asyncio.run(self.control().stop())
        shutil.rmtree(self.slot_dir, ignore_errors=True)
        self.slot_dir.mkdir(parents=True, exist_ok=True)
