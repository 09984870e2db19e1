"""What becomes of everything a handler can raise: an answer in the style of its path, and nothing twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request
from structlog.testing import capture_logs

from swapper.api.errors import error_middleware
from swapper.api.problem import Problem

PATHS = ("/api/thing", "/v1/chat/completions", "/completion")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Begins = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@asynccontextmanager
async def front(handler: Handler, begins: Begins | None = None) -> AsyncGenerator[aiohttp.ClientSession]:
    """The supervisor over one handler at every path; `begins` is told of each answer that begins."""
    app = web.Application(middlewares=[error_middleware()])
    if begins is not None:
        app.on_response_prepare.append(begins)
    for path in PATHS:
        app.router.add_get(path, handler)
    async with TestServer(app, host="127.0.0.1") as server, aiohttp.ClientSession(server.make_url("/")) as http:
        yield http


def raises(error: Exception) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise error

    return handler


def said(path: str, answer: aiohttp.ClientResponse, body: bytes) -> str:
    """The sentence of a refusal, whose shape is that of the path."""
    value = json.loads(body)
    if path.startswith("/api/"):
        assert answer.content_type == "application/problem+json"
        assert value["status"] == answer.status
        return value["detail"]
    assert answer.content_type == "application/json"
    assert set(value["error"]) == {"message", "type", "param", "code"}
    return value["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [ValueError("a bug"), TimeoutError(), ConnectionResetError("of something else")])
async def test_a_bug_is_a_500_in_the_style_of_the_path_and_told_in_the_log(path: str, error: Exception) -> None:
    with capture_logs() as logs:
        async with front(raises(error)) as http, http.get(path) as answer:
            sentence = said(path, answer, await answer.read())
    assert answer.status == 500
    (line,) = logs
    assert (line["exc_info"], line["path"], line["log_level"]) == (error, path, "error")
    assert line["request"] in sentence
    assert "a bug" not in sentence


@pytest.mark.parametrize("path", PATHS)
async def test_an_http_error_of_the_framework_keeps_its_status(path: str) -> None:
    error = web.HTTPRequestEntityTooLarge(max_size=1, actual_size=2)
    async with front(raises(error)) as http, http.get(path) as answer:
        assert "exceeded" in said(path, answer, await answer.read())
        assert answer.status == 413


@pytest.mark.parametrize("path", PATHS)
async def test_another_method_is_405_and_says_which_there_are(path: str) -> None:
    async with front(raises(ValueError())) as http, http.delete(path) as answer:
        assert "DELETE is not possible" in said(path, answer, await answer.read())
        assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")


async def test_a_redirect_is_no_error() -> None:
    async with (
        front(raises(web.HTTPFound("/elsewhere"))) as http,
        http.get("/api/thing", allow_redirects=False) as answer,
    ):
        assert (answer.status, answer.headers["Location"]) == (302, "/elsewhere")


@pytest.mark.parametrize("path", PATHS)
async def test_bytes_that_are_no_text_do_not_break_the_refusal(path: str) -> None:
    async with front(raises(Problem(400, "odd", "this \udcff is odd"))) as http, http.get(path) as answer:
        assert said(path, answer, await answer.read()) == "this ? is odd"
        assert answer.status == 400


@pytest.mark.parametrize("error", [ValueError("a bug"), Problem(409, "late", "too late")])
async def test_once_a_byte_is_out_nothing_is_added_and_the_connection_breaks(error: Exception) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise error

    begun: list[web.StreamResponse] = []

    async def count(request: web.Request, response: web.StreamResponse) -> None:
        begun.append(response)

    with capture_logs() as logs:
        async with front(half, count) as http, http.get("/api/thing") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
    assert len(begun) == 1
    assert [line["exc_info"] for line in logs] == ([error] if isinstance(error, ValueError) else [])


async def test_a_client_that_leaves_while_it_is_answered_is_no_error() -> None:
    done = asyncio.Event()

    async def into_nothing(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        asyncio.get_running_loop().call_soon(done.set)
        raise ConnectionResetError

    with capture_logs() as logs:
        async with front(into_nothing) as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get("/api/thing")
            await done.wait()
    assert {line["log_level"] for line in logs} == {"debug"}


async def test_a_cancellation_passes() -> None:
    middleware = error_middleware()

    async def cancelled(request: web.Request) -> web.StreamResponse:
        raise asyncio.CancelledError

    request = make_mocked_request("GET", "/api/thing")
    with pytest.raises(asyncio.CancelledError):
        await middleware(request, cancelled)
