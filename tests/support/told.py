"""A notification server on a loopback port: keeps what it is sent, as ntfy and any `json://` server would take it."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue
from threading import Event, Thread
from typing import cast

Json = dict[str, object]


class Told:
    """`status`: what it answers. `silent`: while this is set it takes a message in and answers nothing."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.status = 200
        self.silent = Event()
        self.closing = Event()
        self.headers: list[dict[str, str]] = []
        self._came: Queue[Json] = Queue()

    def take(self, headers: dict[str, str], body: bytes) -> None:
        self.headers.append(headers)
        self._came.put(cast("Json", json.loads(body)))

    def next(self, limit_s: float = 20.0) -> Json:
        """The next message, once it is there."""
        try:
            return self._came.get(timeout=limit_s)
        except Empty:
            raise AssertionError(f"nothing was told within {limit_s:g} s") from None

    def rest(self) -> list[Json]:
        """What else is there by now."""
        found: list[Json] = []
        while True:
            try:
                found.append(self._came.get_nowait())
            except Empty:
                return found


@contextmanager
def told(port: int = 0) -> Generator[Told]:
    """One that listens until the block ends, on a free port if none is given."""
    holder: list[Told] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            mine = holder[0]
            mine.take(dict(self.headers), self.rfile.read(int(self.headers.get("Content-Length", "0"))))
            while mine.silent.is_set():
                if mine.closing.wait(0.05):
                    return
            self.send_response(mine.status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    holder.append(Told(server.server_port))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield holder[0]
    finally:
        holder[0].closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
