"""A real llama-server in router mode for the tests: started on a free port, in a folder of its own.

Invariant: whoever starts one stops it; `RUNNING` holds those that live, so that a failed test can show their logs
and the leak check knows them. What stays behind after `stop` is the log.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from swapper.demo.models import write_preset
from swapper.demo.server import find_llama_server

_START_SECONDS = 20.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.01


def free_port() -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RealRouter:
    """One llama-server router over generated models; `start` and `stop` may alternate, the port stays.

    folder: its own folder; made if it is missing. models: model name -> GGUF. parallel, ctx, defaults, overrides: as
    in `write_preset`. arguments: further ones for the router's command line. bare: without slot folder and counters.
    """

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Path],
        *,
        parallel: int = 2,
        ctx: int = 16_384,
        defaults: Mapping[str, str] | None = None,
        overrides: Mapping[str, Mapping[str, str]] | None = None,
        arguments: Sequence[str] = (),
        bare: bool = False,
    ) -> None:
        self.folder = folder
        self.slot_dir = folder / "slots"
        self.log_path = folder / "llama-server.log"
        self.preset = folder / "presets.ini"
        self.port = free_port()
        self.slot_dir.mkdir(parents=True, exist_ok=True)
        write_preset(self.preset, models, parallel=parallel, ctx=ctx, defaults=defaults, overrides=overrides)
        kept = () if bare else ("--metrics", "--slot-save-path", str(self.slot_dir))
        self._arguments = [*kept, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command line; for a test that lets the product start the server itself."""
        return [
            *find_llama_server().command,
            *("--models-preset", str(self.preset)),
            "--no-models-autoload",
            *("--models-max", "0"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *self._arguments,
        ]

    @property
    def pid(self) -> int:
        """Process id of the router; its children are the models. AssertionError when it does not run."""
        assert self._process is not None, "the router was not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True from `start` until the process has ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> RealRouter:
        """Start it and return itself once it answers. RuntimeError with its last lines when it ends instead."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")},
            )
        RUNNING.append(self)
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("\n".join(["llama-server did not come up:", *self.log_tail()]))
            time.sleep(_POLL_SECONDS)
        return self

    def stop(self) -> None:
        """End it as an operator would (SIGTERM, then SIGKILL), and throw away its slot files. Safe to repeat."""
        if self._process is not None:
            self._end(self._process)
        if self in RUNNING:
            RUNNING.remove(self)
        shutil.rmtree(self.slot_dir, ignore_errors=True)
        self.slot_dir.mkdir(parents=True, exist_ok=True)

    def kill(self) -> None:
        """End the router with SIGKILL, as a crash would, and keep its slot files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
        if self in RUNNING:
            RUNNING.remove(self)

    def log_tail(self, n: int = 30) -> list[str]:
        """Return the last `n` lines of the server's log, oldest first; none if it never started."""
        if not self.log_path.exists():
            return []
        return self.log_path.read_text("utf-8", "replace").splitlines()[-n:]

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS)


RUNNING: list[RealRouter] = []
