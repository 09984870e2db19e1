"""A real llama-server in router mode on tiny models: started, watched through its own log, stopped by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from swapper.demo.server import find_llama_server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RealRouter:
    """One router process. It is also the `Control` a backend gets: its log is ours."""

    def __init__(self, preset: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self._ready = threading.Event()
        command = [
            *find_llama_server().command,
            "--models-preset",
            str(preset),
            "--no-models-autoload",
            "--models-max",
            "0",
        ]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.lines.append(line)
            if "listening on http" in line or "router server is listening" in line:
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> RealRouter:
        assert self._ready.wait(20), "\n".join(self.lines[-20:])
        assert self._process.poll() is None, "\n".join(self.lines[-20:])
        return self

    def wait_end(self) -> int:
        """Exit status of a router that refuses to start."""
        status = self._process.wait(20)
        self._reader.join(5)
        return status

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    async def ensure(self) -> None: ...

    async def restart(self) -> None: ...

    def log_tail(self, n: int) -> list[str]:
        return self.lines[-n:]


def preset(path: Path, models: Sequence[tuple[str, Path, dict[str, str]]], **common: str) -> Path:
    """Two slots of 4,096 tokens each, on the CPU, unless said otherwise."""
    settings = {
        "device": "none",
        "n-gpu-layers": "0",
        "threads": "1",  # two would spin against whatever else runs here
        "ctx-size": "8192",
        "parallel": "2",
        "kv-unified": "false",
        "cache-idle-slots": "false",
        "skip-chat-parsing": "true",
        **{key.replace("_", "-"): value for key, value in common.items()},
    }
    lines = ["[*]", *(f"{key} = {value}" for key, value in settings.items())]
    for name, model, own in models:
        lines += [f"[{name}]", f"model = {model}", *(f"{key} = {value}" for key, value in own.items())]
    path.write_text("\n".join(lines) + "\n")
    return path
