"""What the gateway's bench compares: nginx and swapper before the same servers, each a process of its own.

Invariant: every proxy is pinned to one core, and what makes and answers the load to the other; nginx has one worker and
keeps its connections to the servers open, as swapper does. Needs nginx (Debian: nginx-light).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.router import free_port

PROXY_CORE, LOAD_CORE = 0, 1
ANSWER = {
    "id": "chatcmpl-0123456789",
    "object": "chat.completion",
    "created": 1700000000,
    "model": "alpha",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "so be it"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}
_NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 0; client_body_buffer_size 4m; keepalive_requests 100000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {servers}
}}
"""
_ANSWERS = """
  server {{ listen 127.0.0.1:{port} backlog=4096; default_type application/json;
    location = /v1/models {{ return 200 '{{"object":"list","data":[{{"id":"alpha","object":"model"}}]}}'; }}
    location = /props {{ return 200 '{{"total_slots":4,"default_generation_settings":{{"n_ctx":4096}}}}'; }}
    location = /slots {{ return 200 '[]'; }}
    location / {{ return 200 '{answer}'; }} }}
"""
_PROXY = """
  upstream up{port} {{ server 127.0.0.1:{to}; keepalive 128; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://up{port}; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; proxy_read_timeout 1h; }} }}
"""
_SWAPPER = """
listen: 127.0.0.1:{port}
state_dir: {folder}/state
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  plain: {{kind: openai, control: attach, card: gpu0, url: "http://127.0.0.1:{to}", evict: never,
           models: {{alpha: {{vram: 1GiB}}}}}}
"""
_INDEXED = """
listen: 127.0.0.1:{port}
state_dir: {folder}/state
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
tenants:
  plain: {{kind: llama-server, control: attach, card: gpu0, url: "http://127.0.0.1:{to}", evict: never,
           snapshots: {{strategy: "off"}}, models: {{alpha: {{vram: 1GiB}}}}}}
"""
READY_S = 30.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """Somebody on `port`; `pid` is the process whose processor time counts, None where nobody is between."""

    name: str
    port: int
    pid: int | None = None

    def cpu_s(self) -> float:
        """Processor time so far, seconds."""
        if self.pid is None:
            return 0.0
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def rss_bytes(self) -> int:
        """Resident memory."""
        return 0 if self.pid is None else psutil.Process(self.pid).memory_info().rss


@dataclass(frozen=True, slots=True)
class Stand:
    """`short`: who answers with one small body; `paced`: with event streams; each direct, nginx, swapper.

    `indexed`: swapper before a llama-server, whose conversations it follows.
    """

    short: Sequence[Proxy]
    paced: Sequence[Proxy]
    indexed: Proxy


@contextmanager
def stand(folder: Path) -> Generator[Stand]:
    """All of it, started and stopped."""
    answers, paced, nginx_short, nginx_paced = (free_port() for _ in range(4))
    with ExitStack() as stack:
        said = json.dumps(ANSWER, separators=(",", ":"))
        _nginx(stack, folder / "answers", _ANSWERS.format(port=answers, answer=said), answers, LOAD_CORE)
        _started(stack, [sys.executable, "-m", "tests.bench.paced", str(paced)], LOAD_CORE, folder / "paced.log")
        _answers(paced, "/v1/models", folder / "paced.log")
        servers = _PROXY.format(port=nginx_short, to=answers) + _PROXY.format(port=nginx_paced, to=paced)
        nginx = _nginx(stack, folder / "nginx", servers, nginx_short, PROXY_CORE)
        short, stream, indexed = (
            _swapper(stack, folder / name, config, to)
            for name, config, to in (
                ("short", _SWAPPER, answers),
                ("stream", _SWAPPER, paced),
                ("indexed", _INDEXED, answers),
            )
        )
        yield Stand(
            (Proxy("direct", answers), Proxy("nginx", nginx_short, nginx), short),
            (Proxy("direct", paced), Proxy("nginx", nginx_paced, nginx), stream),
            Proxy("swapper with its index", indexed.port, indexed.pid),
        )


def _nginx(stack: ExitStack, folder: Path, servers: str, port: int, core: int) -> int:
    """The pid of its worker."""
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, servers=servers))
    command = ["nginx", "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    master = _started(stack, command, core, folder / "log")
    _answers(port, "/v1/models", folder / "log")
    return psutil.Process(master).children()[0].pid


def _swapper(stack: ExitStack, folder: Path, config: str, to: int) -> Proxy:
    folder.mkdir()
    port = free_port()
    (folder / "swapper.yaml").write_text(config.format(port=port, folder=folder, to=to))
    command = [sys.executable, "-m", "swapper", "serve", "-c", str(folder / "swapper.yaml")]
    pid = _started(stack, command, PROXY_CORE, folder / "log")
    _answers(port, "/ready?model=alpha", folder / "log")
    return Proxy("swapper", port, pid)


def _started(stack: ExitStack, command: Sequence[str], core: int, log: Path) -> int:
    with log.open("wb") as out:
        child = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=out, stderr=out, env=_environment())

    def stop() -> None:
        child.terminate()
        child.wait()

    stack.callback(stop)
    return child.pid


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SWAPPER_")}


def _answers(port: int, path: str, log: Path) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until:
                print(log.read_text(errors="replace"), file=sys.stderr)
                raise
            time.sleep(0.05)
