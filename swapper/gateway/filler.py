"""What each API's streams look like beside the answer: keepalives, the task that sends them, and a late error.

Keepalives are data that keeps a client's timers quiet while its call waits. Invariant: no byte before the first one is
due, so that until then an error keeps its status; after `stop` nothing more is written. Comments instead of data only
where configured (some gateways cut streams without data).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

import msgspec
from aiohttp import web

Filler = Callable[[str], bytes]
"""Model name -> one SSE event that adds nothing to an answer."""

STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _choice(kind: str, model: str, prefix: str, choice: dict[str, object]) -> bytes:
    choices = [{"index": 0, **choice, "finish_reason": None}]
    head = {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
    return _event({**head, "choices": choices})


def chat(model: str) -> bytes:
    """A chat chunk with an empty delta."""
    return _choice("chat.completion.chunk", model, "chatcmpl", {"delta": {}})


def text(model: str) -> bytes:
    """A completion chunk with empty text."""
    return _choice("text_completion", model, "cmpl", {"text": "", "logprobs": None})


def completion(model: str) -> bytes:
    """llama-server's own `/completion`."""
    return _event({"content": "", "stop": False})


def ping(model: str) -> bytes:
    """Anthropic's own."""
    return b'event: ping\ndata: {"type": "ping"}\n\n'


def comment(model: str) -> bytes:
    """An SSE comment: clients ignore it, and so do their timers."""
    return b": waiting\n\n"


def in_progress(model: str) -> bytes:
    """OpenAI's `/v1/responses`: it was taken and goes on; the server's own events begin with their own first."""
    response: dict[str, object] = {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "output": (),
    }
    value: dict[str, object] = {"type": "response.in_progress", "sequence_number": 0, "response": response}
    return b": waiting\nevent: response.in_progress\n" + _event(value)


def _error(error: bytes) -> bytes:
    return b'data: {"error":' + error + b"}\n\ndata: [DONE]\n\n"


def _error_event(error: bytes) -> bytes:
    return b'event: error\ndata: {"type":"error","error":' + error + b"}\n\n"


@dataclass(frozen=True, slots=True)
class Api:
    """An API's keepalive, and what makes an error object's JSON the last thing in a stream whose 200 is out."""

    keepalive: Filler
    error: Callable[[bytes], bytes] = _error


CHAT, TEXT, COMPLETION, RESPONSES = Api(chat), Api(text), Api(completion), Api(in_progress)
MESSAGES = Api(ping, _error_event)
PLAIN = Api(comment)
"""Streams of a shape that is not known here."""


class Keepalive:
    """Sends `filler` every `every_s` seconds once the first is due, in a task of its own."""

    __slots__ = ("_every_s", "_filler", "_model", "_request", "_stopped", "_task", "_timer", "response")

    def __init__(self, request: web.Request, filler: Filler, model: str, every_s: float) -> None:
        self._request = request
        self._filler = filler
        self._model = model
        self._every_s = every_s
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.response: web.StreamResponse | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(every_s, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        data = self._filler(self._model)  # one id for the whole wait
        try:
            await response.prepare(self._request)
            self.response = response
            while not self._stopped.is_set():
                await response.write(data)
                try:
                    async with asyncio.timeout(self._every_s):
                        await self._stopped.wait()
                except TimeoutError:
                    continue
        except ConnectionError:
            return  # the client left: its handler is being cancelled

    async def stop(self) -> web.StreamResponse | None:
        """End it; the response it began, if it did. Safe to repeat."""
        self._timer.cancel()
        self._stopped.set()
        if self._task is not None:
            await asyncio.wait((self._task,))
        return self.response

    def abandon(self) -> None:
        """End it without waiting: the handler is being cancelled."""
        self._timer.cancel()
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()
