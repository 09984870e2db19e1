"""Whether a model's conversations survive an unload on this very server and build, tried out by each strategy.

Invariant: whoever calls has the whole card; the model is loaded and unloaded here only, and is unloaded at the end, as
it was found. Only files of our own names are written, and they are gone afterwards. What is called warm was reused in
the next turn's answer, and that turn repeats only the end of what was said before, as when reasoning is stripped.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import aiohttp

from swapper.cli.reload import Reload, limited
from swapper.client.sse import messages
from swapper.core.conversations import Strategy
from swapper.core.proof import judge
from swapper.errors import BackendError, BackendRefused, SwapperError
from swapper.gateway.context import Target
from swapper.gateway.recall import RecallFailed, recall
from swapper.snapshots.conversation import Request
from workers.llama.http import RouterHttp, SavedSlot, ServerHttp

CHAT = "/v1/chat/completions"
ANSWER_TOKENS = 16
_READ_S = 1800.0
_FILE_S = 600.0
_SAMPLE = 200
_WORDS = (
    *("amber", "bridge", "canyon", "delta", "ember", "forest", "glacier", "harbor", "island", "jungle", "kernel"),
    *("lantern", "meadow", "needle", "orchard", "pebble", "quarry", "river", "summit", "timber", "umbrella", "valley"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What one strategy came to: `result` is `warm`, `cold` or `failed`; times in ms, None where there is none."""

    strategy: str
    result: str
    reason: str | None = None
    tokens: int = 0
    bytes: int = 0
    save_ms: float | None = None
    restore_ms: float | None = None
    cache_n: int | None = None
    prompt_n: int | None = None
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All strategies, beside the same turn read anew: `reread_ttft_ms` for `prompt` tokens."""

    build: str
    prompt: int
    reread_ttft_ms: float
    found: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One streamed answer; the text without what was thought."""

    text: str
    ttft_ms: float
    cache_n: int
    prompt_n: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A slot on disk, or why it is not."""

    name: str
    slot: int
    saved: SavedSlot | None
    why: str | None = None


class Trial:
    """One model. `slot_dir` is its server's folder as seen from here; `say` tells of the progress.

    `reload` unloads and loads it, and is closed at the end.
    """

    def __init__(
        self,
        target: Target,
        slot_dir: Path | None,
        reload: Reload,
        *,
        tokens: int,
        nonce: str,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._reload = reload
        self._slot_dir = slot_dir
        self._tokens = tokens
        self._nonce = nonce
        self._say = say
        self._http = (RouterHttp if target.router else ServerHttp)(target.url, target.api_key)
        self._session: aiohttp.ClientSession | None = None

    async def run(self) -> Report:
        """Try each strategy. Raises SwapperError where not even a plain turn works; leaves nothing behind."""
        async with self._http, aiohttp.ClientSession() as session:
            self._session = session
            try:
                return await self._all()
            finally:
                await asyncio.shield(self._leave())
                await self._reload.close()

    async def _all(self) -> Report:
        await self._fresh("to save a conversation")
        build = (await self._http.props(self._target.model)).build_info
        chain = [_line("user", await self._text())]
        first = await self._ask(chain)
        held = await self._save(Strategy.SLOTS)
        rewound = await self._save(Strategy.REWIND, chain)
        said = first.text.strip()
        answered = said[len(said) // 2 :] or "Noted."
        following = [*chain, _line("assistant", answered), _line("user", "and then?")]
        found = [
            await self._back(Strategy.SLOTS, held, following),
            await self._back(Strategy.REWIND, rewound, following),
            await self._replayed(chain, following),
        ]
        await self._fresh("to read the same turn anew")
        anew = await self._ask(following)
        return Report(build, anew.cache_n + anew.prompt_n, anew.ttft_ms, tuple(found))

    # ---- the strategies

    async def _save(self, strategy: Strategy, rewind_to: list[dict[str, str]] | None = None) -> _Held:
        """Save the slot the last call used; first taken back to the end of that request where one is given."""
        name = f"swapper-test-{self._nonce}-{strategy}.kv"
        try:
            slot = await self._last_slot() if rewind_to is None else await self._recall(rewind_to)
            return _Held(name, slot, await _within(_FILE_S, self._http.save(self._target.model, slot, name)))
        except (BackendError, RecallFailed) as error:
            cannot = isinstance(error, BackendRefused) and error.status == 501
            return _Held(name, -1, None, "the server saves no slots" if cannot else f"not saved: {error}")

    async def _back(self, strategy: Strategy, held: _Held, following: list[dict[str, str]]) -> Found:
        """Unload, load, restore, and go on."""
        saved = held.saved
        if saved is None:
            return Found(strategy, "failed", held.why)
        found = Found(strategy, "failed", None, saved.n_saved, saved.n_written, saved.timings.save_ms)
        if (why := self._damaged(held.name, saved)) is not None:
            return replace(found, reason=why)
        await self._fresh(f"to restore it ({strategy})")
        try:
            back = await _within(_FILE_S, self._http.restore(self._target.model, held.slot, held.name))
        except BackendError as error:
            return replace(found, reason=f"not restored: {error}")
        turn = await self._ask(following)
        return _judged(replace(found, restore_ms=back.timings.restore_ms), turn, back.n_restored)

    async def _replayed(self, chain: list[dict[str, str]], following: list[dict[str, str]]) -> Found:
        await self._fresh("to replay it")
        began = time.perf_counter()
        try:
            await self._recall(chain)
        except RecallFailed as error:
            return Found(Strategy.REPLAY, "failed", f"not replayed: {error}")
        took_ms = (time.perf_counter() - began) * 1000
        turn = await self._ask(following)
        read = turn.cache_n + turn.prompt_n
        return _judged(Found(Strategy.REPLAY, "cold", tokens=read, restore_ms=took_ms), turn, read)

    def _damaged(self, name: str, saved: SavedSlot) -> str | None:
        """A file that is one byte short would end the server's child."""
        if saved.n_saved == 0:
            return "not saved: the slot was empty"
        path = None if self._slot_dir is None else self._slot_dir / name
        if path is None or not path.is_file():
            return (
                f"not to be found in {self._slot_dir}: slot_dir must be the server's --slot-save-path, seen from here"
            )
        size = path.stat().st_size
        return None if size == saved.n_written else f"its file has {size} bytes instead of {saved.n_written}"

    # ---- the server

    async def _fresh(self, why: str) -> None:
        """The model in a new process, with empty slots and an empty cache."""
        await self._reload.unload()
        self._say(f"loading {self._target.model} {why}")
        await self._reload.load()

    async def _leave(self) -> None:
        """As it was found: unloaded, and no file of ours."""
        try:
            await self._reload.unload()
        except SwapperError as error:
            self._say(f"{self._target.model} is still loaded: {error}")
        if self._slot_dir is not None:
            await asyncio.to_thread(_remove, self._slot_dir, f"swapper-test-{self._nonce}-")

    async def _text(self) -> str:
        """As many words as make `tokens`, at most half of a slot."""
        slots = await self._http.slots(self._target.model)
        wanted = min(self._tokens, min(slot.n_ctx for slot in slots) // 2)
        sample = _words(self._nonce, _SAMPLE)
        body = {"model": self._target.model, "content": sample}
        counted = json.loads(await self._http.post("/tokenize", body, limit_s=60.0))
        return _words(self._nonce, max(wanted * _SAMPLE // max(len(counted["tokens"]), 1), 1))

    async def _last_slot(self) -> int:
        slots = await self._http.slots(self._target.model)
        return max(slots, key=lambda slot: -1 if slot.id_task is None else slot.id_task).id

    async def _recall(self, chain: list[dict[str, str]]) -> int:
        """The product's own verb; the slot it stands in then."""
        body = json.dumps({"model": self._target.model, "messages": chain}).encode()
        return (await recall(self._open(), self._target, None, Request(CHAT, body), _READ_S)).slot

    async def _ask(self, chain: list[dict[str, str]]) -> _Turn:
        """One turn, streamed. Raises SwapperError where there is no whole answer."""
        body = {"model": self._target.model, "messages": chain, "stream": True, "temperature": 0}
        reading = _Reading()
        limit = aiohttp.ClientTimeout(total=_READ_S)
        try:
            async with self._open().post(
                self._target.url + CHAT,
                json={**body, "max_tokens": ANSWER_TOKENS},
                params=self._http.harmless(),
                headers=self._target.auth(),
                timeout=limit,
            ) as got:
                if got.status != 200:
                    said = (await got.text())[:300]
                    raise SwapperError(f"{self._target.model} answered no chat (HTTP {got.status}): {said}")
                async for message in messages(got.content):
                    reading.take(message.data)
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise SwapperError(f"the answer of {self._target.model} broke off: {why}") from error
        return reading.turn()

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session


class _Reading:
    """What has arrived of a streamed answer; its clock runs from the start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ttft_ms: float | None = None
        self._text: list[str] = []
        self._timings: dict[str, Any] | None = None

    def take(self, data: str) -> None:
        """One `data:` line; thoughts count as a beginning, too."""
        if data == "[DONE]":
            return
        chunk = cast("dict[str, Any]", json.loads(data))
        if "error" in chunk:
            raise SwapperError(f"the model stopped answering: {chunk['error'].get('message', chunk['error'])}")
        self._timings = chunk.get("timings", self._timings)
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            if self._ttft_ms is None and (delta.get("content") or delta.get("reasoning_content")):
                self._ttft_ms = (time.perf_counter() - self._began) * 1000
            self._text.append(delta.get("content") or "")

    def turn(self) -> _Turn:
        if self._timings is None or self._ttft_ms is None:
            raise SwapperError("the model's answer ended before it was complete")
        return _Turn("".join(self._text), self._ttft_ms, self._timings["cache_n"], self._timings["prompt_n"])


def _judged(found: Found, turn: _Turn, tokens: int) -> Found:
    result, reason = judge(tokens, turn.cache_n, turn.prompt_n)
    return replace(
        found,
        result=result.value,
        reason=reason,
        cache_n=turn.cache_n,
        prompt_n=turn.prompt_n,
        ttft_ms=turn.ttft_ms,
    )


def _line(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _words(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def _remove(folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        if path.name.startswith(prefix) and not path.is_dir():
            path.unlink(missing_ok=True)


async def _within(limit_s: float, work: Awaitable[Any]) -> Any:  # noqa: ANN401
    async with limited(limit_s, "llama-server did not answer"):
        return await work
