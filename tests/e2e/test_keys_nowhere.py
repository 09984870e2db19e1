"""Keys are for the door only: by whatever way and to whatever path one is sent, it stands nowhere afterwards.

Not in the log, the events, the store, the state folder, an answer, or what a model's server hears.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swapper.gateway.routes import GET, POST
from tests.support.liedserve import Attacked, attacked
from tests.support.wire import Got, request, wire

RIGHT, ADMIN, WRONG = "right-5f0c61d2a9e84b", "admin-77ab10c3d5e9f2", "wrong-c91b7e3fd80a42"
MORE = """
auth:
  keys:
    - {name: ann, key_env: ANN_KEY, scopes: [models, leases], classes: [normal], default_class: normal}
    - {name: ops, key_env: OPS_KEY, scopes: [admin]}
"""
BODY = b'{"model": "alpha", "prompt": "p", "stream": false}'
PATHS = (
    *(
        ("POST", path, BODY)
        for path in (*POST, "/upstream/alpha/v1/chat/completions", "/upstream/alpha/slots/0", "/v1/x")
    ),
    *(("GET", f"{path}?model=alpha", b"") for path in (*GET, "/upstream/alpha/metrics", "/v1/models", "/nowhere")),
    *(("POST", "/completion", body) for body in (b"no json", b'{"model": "nobody"}', b"")),
    *(
        ("GET", path, b"")
        for path in ("/api/status", "/api/leases", "/api/swaps", "/api/nothing", "/metrics", "/running")
    ),
    *(("GET", path, b"") for path in ("/health", "/ready", "/openapi.json", "/ui/", "/api/windows", "/api/snapshots")),
    ("POST", "/api/leases", b'{"card": "gpu0", "vram": "1GiB", "label": "a lease"}'),
    *(("POST", "/api/leases", body) for body in (b"no json", b'{"vram": "much"}', b'{"class": "batch"}')),
    *(("POST", path, b"{}") for path in ("/api/jobs", "/api/models/alpha/load", "/api/cards/gpu0/vacate")),
    *(("DELETE", path, b"") for path in ("/api/leases/ls_none", "/api/snapshots/none", "/completion")),
)


def ways(secret: str) -> Iterator[str]:
    """Every header a key may come in, and some it may not."""
    pair = base64.b64encode(f"anybody:{secret}".encode()).decode()
    yield from (f"Authorization: Bearer {secret}", f"authorization: bearer  {secret}", f"Authorization: Basic {pair}")
    yield from (f"x-api-key: {secret}", f"X-API-Key: {secret}\r\nAuthorization: Bearer stale", f"api-key: {secret}")
    yield from (f"Authorization: {secret}", f"Authorization: Digest {secret}", f"Authorization: Basic {secret}")
    yield from (f"Proxy-Authorization: Basic {pair}", f"Cookie: key={secret}")


def broken(secret: str) -> Iterator[bytes]:
    """What is no HTTP, or not all of it, with a key in it."""
    head = f"POST /completion HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {secret}"
    yield from (f"{head}\0\r\n\r\n".encode(), f"{head}\r\nContent-Length: x\r\n\r\n".encode(), f"{head}\n\n".encode())
    yield from (f"{head}{'a' * 100_000}\r\n\r\n".encode(), f"POST /{secret}\r\n\r\n".encode(), head.encode())
    yield f"{head}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{secret}".encode()


def forms(secret: str) -> list[bytes]:
    """How it may stand somewhere: as it is, or with a name before it in base64, wherever that begins."""
    coded = [base64.b64encode(b"x" * pad + secret.encode())[4:-4] for pad in range(3)]
    return [secret.encode(), *coded]


def assert_nowhere(where: str, text: bytes) -> None:
    for secret in (RIGHT, ADMIN, WRONG):
        for form in forms(secret):
            assert form not in text, f"{where} holds a key: ...{text[max(text.find(form) - 200, 0) :][:300]!r}"


async def ask(served: Attacked, method: str, path: str, body: bytes, header: str) -> Got:
    return await served.call(request(body, path, header, method=method), method)


async def test_a_key_stands_nowhere_once_it_was_looked_at(tmp_path: Path) -> None:
    env = {"ANN_KEY": RIGHT, "OPS_KEY": ADMIN}
    async with attacked(tmp_path, MORE, env, until="/health") as served:
        answers = dict[str, Got]()
        for secret in (RIGHT, WRONG):
            for header in ways(secret):
                for method, path, body in PATHS:
                    answers[f"{header} {method} {path}"] = await ask(served, method, path, body, header)
            for data in broken(secret):
                async with wire(served.serve.url) as client:
                    with suppress(ConnectionError):
                        await client.send(data)
                        if data.endswith((b"\r\n\r\n", b"\n\n")):
                            assert_nowhere(f"the answer to {data[:80]!r}", await client.ended())
        for asked, got in answers.items():
            assert_nowhere(f"the answer to {asked}", repr(got).encode())
        for method, path, body in PATHS:
            await ask(served, method, path, body, f"Authorization: Bearer {ADMIN}")
        assert any(got.status == 200 for got in answers.values())
        for heard in served.liar.heard:
            assert_nowhere(f"what the server heard of {heard.target}", heard.head + heard.body)
        events = await ask(served, "GET", "/api/events?since=0&follow=0", b"", f"Authorization: Bearer {ADMIN}")
        assert b"a lease" in events.body
        assert_nowhere("the events", events.body)
        status = await ask(served, "GET", "/api/status", b"", f"Authorization: Bearer {ADMIN}")
        assert "ann" in json.dumps(json.loads(status.body))
        assert_nowhere("the status", status.body)
    assert_nowhere("the log", served.serve.log_path.read_bytes())
    files = [path for path in served.serve.state_dir.rglob("*") if path.is_file()]
    assert any("aof" in path.name for path in files), files
    for path in files:
        assert_nowhere(str(path), path.read_bytes())


@pytest.mark.parametrize("secret", [WRONG, RIGHT + "x", RIGHT[:-1], RIGHT.upper(), ""])
async def test_what_is_no_key_gets_nothing_done(tmp_path: Path, secret: str) -> None:
    async with attacked(tmp_path, MORE, {"ANN_KEY": RIGHT, "OPS_KEY": ADMIN}, until="/health") as served:
        before = len(served.liar.heard)
        for header in ways(secret):
            for method, path, body in PATHS:
                got = await ask(served, method, path, body, header)
                assert got.status in (401, 404, 405) or path == "/health", (header, method, path, got)
                if got.status == 401 and method != "HEAD":
                    assert got.one("WWW-Authenticate")
        assert [heard.target for heard in served.liar.heard[before:] if heard.method == "POST"] == []
