"""What stands around the calls, on a real router: filters, the list of models, pages, a `ttl` while all is watched."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from swapper.demo.models import make_models
from tests.support.router import RealRouter
from tests.support.server import Server, serving

WATCHED = (
    *("/health", "/ready", "/metrics", "/api/status", "/v1/models", "/v1/models/alpha", "/running"),
    *("/props?model=alpha", "/slots?model=alpha", "/upstream/alpha/health", "/upstream/alpha/slots"),
)


@contextmanager
def serve(folder: Path, traits: str) -> Generator[Server]:
    router = RealRouter(folder / "router", make_models(folder / "models", ["alpha"]))
    with serving(Server(folder / "swapper", router, {"alpha": traits})) as server:
        yield server


def status(server: Server, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> int:
    try:
        asked = urllib.request.Request(server.url + path, headers=dict(headers or {}), method=method)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


class Watcher:
    """Asks how everything is, again and again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._rounds = 0
        self._round = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def rounds(self, count: int) -> None:
        """Until so many more are over."""
        with self._round:
            wanted = self._rounds + count
            assert self._round.wait_for(lambda: self._rounds >= wanted, timeout=60)

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            for path in WATCHED:
                status(self._server, path)
            with self._round:
                self._rounds += 1
                self._round.notify_all()


def test_a_model_that_is_watched_all_the_time_leaves_after_its_ttl_and_comes_back_for_a_call_only(
    tmp_path: Path,
) -> None:
    with serve(tmp_path, "{vram: 8GiB, default: true, ttl: 3s}") as server, Watcher(server) as watcher:
        server.chat("alpha", "hello")
        assert status(server, "/props?model=alpha") == 200
        swap = server.next_swap(lambda swap: (swap["cause"], swap["outcome"]) == ("ttl", "done"))
        assert swap["to"] == []
        watcher.rounds(3)
        assert status(server, "/props?model=alpha") == 503
        assert server.get("/running") == {"running": []}
        assert server.swaps()[0]["id"] == swap["id"]
        server.chat("alpha", "hello", "you", "again")
        assert status(server, "/props?model=alpha") == 200


def test_what_calls_are_given_what_is_listed_and_which_pages_may_call(tmp_path: Path) -> None:
    traits = (
        "{vram: 8GiB, default: true, name: First, filters: {set: {max_tokens: 2}, by_name: {short: {max_tokens: 1}}}}"
    )
    with serve(tmp_path, traits) as server:
        for name, tokens in (("alpha", 2), ("short", 1)):
            usage = cast("dict[str, int]", server.chat(name, "hello there")["usage"])
            assert usage["completion_tokens"] == tokens
        line: Any = server.get("/v1/models/short")
        assert (line["id"], line["name"], line["aliases"]) == ("short", "First", ["short"])
        assert (line["context_length"], line["status"]) == (8192, {"value": "loaded"})
        assert line["architecture"]["modality"] == "text->text"
        evil, near = {"Origin": "https://evil.example"}, {"Origin": "http://localhost:3000"}
        asks = {"Access-Control-Request-Method": "POST"}
        assert status(server, "/v1/chat/completions", "OPTIONS", evil | asks) == 403
        assert status(server, "/v1/chat/completions", "OPTIONS", near | asks) == 204
        assert status(server, "/v1/models", headers=evil) == 403
        assert status(server, "/api/status", "OPTIONS", near | asks) == 405
