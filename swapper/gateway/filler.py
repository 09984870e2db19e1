"""What each API's streams look like beside the answer: keepalives, the timer that sends them, and a late error.

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

from swapper.gateway.downstream import Downstream

Filler = Callable[[str], bytes]
"""Model name -> one SSE event that adds nothing to an answer."""

STREAM_HEADERS = (
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-cache"),
    (b"X-Accel-Buffering", b"no"),
)


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


class _Last(msgspec.Struct):
    kind: str | None = msgspec.field(name="type", default=None)
    stop: bool | None = None


_last = msgspec.json.Decoder(_Last)


def _is_done(data: bytes) -> bool:
    return data == b"[DONE]"


def _is_last(data: bytes) -> bool:
    """Of `/completion`, of Anthropic's and of `/v1/responses`."""
    try:
        found = _last.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _is_done(data)
    return found.stop is True or found.kind in _LAST


_LAST = frozenset({"message_stop", "error", "response.completed", "response.incomplete", "response.failed"})


def _any(data: bytes) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Api:
    """An API's keepalive, and what makes an error object's JSON the last thing in a stream whose 200 is out.

    `last`: whether this event's data ends a stream; only that tells a whole one where its end is the connection's.
    """

    keepalive: Filler
    error: Callable[[bytes], bytes] = _error
    last: Callable[[bytes], bool] = _is_done


CHAT, TEXT = Api(chat), Api(text)
COMPLETION, RESPONSES = Api(completion, last=_is_last), Api(in_progress, last=_is_last)
MESSAGES = Api(ping, _error_event, _is_last)
PLAIN = Api(comment, last=_any)
"""Streams of a shape that is not known here."""


class Keepalive:
    """Sends `filler` every `every_s` seconds once the first is due."""

    __slots__ = ("_data", "_down", "_every_s", "_filler", "_loop", "_model", "_timer", "began")

    def __init__(self, down: Downstream, filler: Filler, model: str, every_s: float) -> None:
        self._down = down
        self._filler = filler
        self._model = model
        self._every_s = every_s
        self._data: bytes | None = None
        self.began = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(every_s, self._send)

    def _send(self) -> None:
        if self._data is None:
            self._data = self._filler(self._model)  # one id for the whole wait
            self.began = True
            self._down.begin(200, "OK", [*STREAM_HEADERS], bounded=False)
        self._down.write(self._data)
        self._timer = self._loop.call_later(self._every_s, self._send)

    def stop(self) -> bool:
        """End it; whether it began the answer. Safe to repeat."""
        self._timer.cancel()
        return self.began
