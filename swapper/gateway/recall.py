"""A conversation's last request sent once more, so that it stands in a slot again.

This is the one verb behind sweep, rewind and replay.

Invariant: nothing is generated that anybody would see, and the answer tells what it cost: tokens that were there and
tokens that were read. Seen on llama-server b10434: with `max_tokens: 0` one token is computed all the same;
`add_generation_prompt: false` ends the prompt at the last message, where a hybrid model can be continued from; sent
without a slot's number the server finds the conversation in its RAM cache, or in the slot it lies in (a number would
keep it from looking in the cache). `verbose` makes a chat answer name its slot.
"""

from __future__ import annotations

import asyncio
import io
import re
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from swapper.gateway.child import Child
from swapper.gateway.context import Target
from swapper.gateway.proof import read_slots
from swapper.snapshots.conversation import Request

_CHAT = frozenset({"/v1/chat/completions", "/chat/completions", "/v1/messages"})
_NATIVE = frozenset({"/completion", "/completions"})
_SHAPES_THE_ANSWER = (
    "n",
    "n_predict",
    "max_completion_tokens",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "grammar",
)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Recalled:
    """Where it stands now: `tokens` in `slot`, of which `cache_n` were there before and `prompt_n` were read."""

    slot: int
    tokens: int
    cache_n: int
    prompt_n: int


class RecallFailed(Exception):
    """With one sentence why. `evicted`: it was being read anew, and given up: the server had it no more."""

    def __init__(self, why: str, *, evicted: bool = False) -> None:
        super().__init__(why)
        self.evicted = evicted


class _Timings(msgspec.Struct):
    cache_n: int
    prompt_n: int


class _Verbose(msgspec.Struct):
    id_slot: int | None = None


class _Usage(msgspec.Struct):
    """Anthropic's: the tokens read, and beside them those that were there."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    timings: _Timings | None = None
    id_slot: int | None = None
    verbose: _Verbose | None = msgspec.field(name="__verbose", default=None)


class _Error(msgspec.Struct, rename={"kind": "type"}):
    kind: str | int | None = None
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Error


_answer = msgspec.json.Decoder(_Answer)
_refusal = msgspec.json.Decoder(_Refusal)
_KIND = re.compile(r"\w{1,60}", re.ASCII)


def recall_body(request: Request, model: str) -> bytes:
    """The body to send: the request's own, ending with its last message, nothing to be generated."""
    fields = _fields.decode(request.body)
    for name in _SHAPES_THE_ANSWER:
        fields.pop(name, None)
    ours: dict[str, Any] = {"model": model, "stream": False, "max_tokens": 0, "verbose": True}
    if request.path in _CHAT:
        ours["add_generation_prompt"] = False
    if request.path in _NATIVE:
        ours["n_predict"] = 0
    return msgspec.json.encode({**fields, **ours})


async def recall(
    session: aiohttp.ClientSession, target: Target, child: Child | None, request: Request, limit_s: float
) -> Recalled:
    """Send it and say where it stands; raises RecallFailed.

    Where the answer does not name its slot, the one whose task changed is taken: nothing else may run in the model.
    """
    before = {line.id: line.id_task for line in await read_slots(target, session)}
    url = URL((target.url if child is None else child.url) + request.path)
    if target.router and child is None:
        url = url.with_query(autoload="false")
    headers = {"Content-Type": "application/json", **({} if child is not None else target.auth())}
    try:
        async with asyncio.timeout(limit_s):
            status, text = await _post(session, url, recall_body(request, target.model), headers)
    except TimeoutError:
        raise RecallFailed(
            f"it was not in the server's cache any more (not read within {limit_s:g} s)", evicted=True
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise RecallFailed(f"the server broke off over it: {error or type(error).__name__}") from error
    if status != 200:
        raise RecallFailed(f"the server refused it: HTTP {status}{_kind(text)}")
    return await _read(text, target, session, before)


async def _post(session: aiohttp.ClientSession, url: URL, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """However it ends, the connection is closed or back in the pool: who is given up must be seen to have left."""
    upstream = await session.post(url, data=io.BytesIO(body), headers=headers, allow_redirects=False)
    try:
        return upstream.status, await upstream.content.read()
    finally:
        if not upstream.content.at_eof():
            upstream.close()
        upstream.release()


def _kind(text: bytes) -> str:
    """What kind of error the server names, in brackets. Its message is left out: it may quote the conversation."""
    try:
        error = _refusal.decode(text).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    kinds = [str(kind) for kind in (error.kind, error.code) if kind is not None and _KIND.fullmatch(str(kind))]
    return f" ({', '.join(kinds)})" if kinds else ""


async def _read(text: bytes, target: Target, session: aiohttp.ClientSession, before: dict[int, int | None]) -> Recalled:
    try:
        answer = _answer.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecallFailed(f"its answer cannot be read: {error}") from error
    slot = answer.id_slot if answer.verbose is None else answer.verbose.id_slot
    if slot is None:
        lines = await read_slots(target, session)
        changed = [line.id for line in lines if line.id_task != before.get(line.id)]
        if len(changed) != 1:
            raise RecallFailed("the server does not tell which slot took it")
        (slot,) = changed
    cache_n, prompt_n = _figures(answer)
    return Recalled(slot, cache_n + prompt_n, cache_n, prompt_n)


def _figures(answer: _Answer) -> tuple[int, int]:
    if answer.timings is not None:
        return answer.timings.cache_n, answer.timings.prompt_n
    usage = answer.usage or _Usage()
    return usage.cache_read_input_tokens or 0, usage.input_tokens or 0
