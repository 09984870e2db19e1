"""What a fake model answers: completions and chat, whole or as a stream, embeddings, rankings, and its slots' actions.

Invariant: a slot is taken for exactly as long as a call works in it, and left however the call ends; every answer
tells, as the real one does, how many tokens of the prompt needed not be read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from tests.support.fake_child import ChildGone, FakeChild
from tests.support.fake_faults import Kind, Verb
from tests.support.fake_slots import Aborted, Slot, Unfit, decode, encode, name_refused, next_character, tokens_of
from tests.support.fake_wire import LOST, SSE_TYPE, Answer, Json, Stream, event, refused, said

BUILD = "b1-7e4c0a9"
_TEMPLATE = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}<|assistant|>"
_ANY_SEED = 4_294_967_295
_NO_FOLDER = "This server does not support slots action. Start it with `--slot-save-path`"
_UNFIT = "Unable to restore slot: No available space in KV cache or invalid slot save file"


async def act(child: FakeChild, verb: Verb, slot_id: str, name: object) -> Answer:
    """Save, restore or erase a slot; waits until it is free. Raises ChildGone."""
    folder = child.house.slot_dir
    if folder is None:
        return refused(501, _NO_FOLDER)
    if not slot_id.isdigit():
        return refused(400, "Invalid slot ID")
    if verb is not Verb.ERASE:
        if not isinstance(name, str):
            return refused(500, "[json.exception.out_of_range.403] key 'filename' not found")
        if name_refused(name):
            return refused(400, "Invalid filename")
    await child.awake()
    slot = await child.slot_for(int(slot_id), [])
    try:
        await child.beat(child.house.pace.action_s)
        told: Json = {"id_slot": int(slot_id)}
        if verb is Verb.ERASE:
            told["n_erased"] = len(slot.tokens)
            slot.empty()
            return said(told)
        told["filename"] = name
        return (_save if verb is Verb.SAVE else _restore)(child, slot, told)
    finally:
        child.leave(slot)


def _save(child: FakeChild, slot: Slot, told: Json) -> Answer:
    assert child.house.slot_dir is not None
    data = encode(child.model, slot.tokens)
    dies, short = child.strikes(Verb.SAVE, Kind.CHILD_DIES), child.strikes(Verb.SAVE, Kind.SHORT_FILE)
    written = data[: len(data) // 2] if dies else data[: len(data) - short.short] if short else data
    try:
        (child.house.slot_dir / told["filename"]).write_bytes(written)  # in place: what was there is lost
    except OSError:
        return refused(500, "Unable to save slot")
    if dies:
        child.abort()
    timings = {"save_ms": child.house.pace.action_s * 1000}
    return said(told | {"n_saved": len(slot.tokens), "n_written": len(data), "timings": timings})


def _restore(child: FakeChild, slot: Slot, told: Json) -> Answer:
    assert child.house.slot_dir is not None
    slot.empty()
    if child.strikes(Verb.RESTORE, Kind.CHILD_DIES):
        child.abort()
    try:
        slot.tokens, read = decode(child.model, child.house.slot_dir / told["filename"])
    except Unfit:
        return refused(400, _UNFIT)
    except Aborted:
        child.abort()
    slot.restored = bool(slot.tokens)
    slot.worthless = child.strikes(Verb.RESTORE, Kind.NO_REUSE) is not None
    timings = {"restore_ms": child.house.pace.action_s * 1000}
    return said(told | {"n_restored": len(slot.tokens), "n_read": read, "timings": timings})


async def slots(child: FakeChild) -> Answer:
    """What each slot shows. Wakes a sleeper."""
    await child.awake()
    return said([slot.shown(child.model.n_ctx_slot) for slot in child.slots])


async def metrics(child: FakeChild) -> Answer:
    """What runs and what waits. Wakes a sleeper."""
    if not child.house.metrics:
        return refused(501, "This server does not support metrics endpoint. Start it with `--metrics`")
    await child.awake()
    counters = {"requests_processing": child.processing, "requests_deferred": child.deferred}
    text = "".join(f"# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value}\n" for name, value in counters.items())
    return Answer(200, text.encode(), {"Content-Type": "text/plain; version=0.0.4"})


async def props(child: FakeChild) -> Answer:
    """What the child says of itself. Wakes nobody."""
    model = child.model
    asleep = child.value == "sleeping"
    told = {"default_generation_settings": {"n_ctx": model.n_ctx_slot}, "total_slots": model.parallel}
    told |= {"model_alias": model.name, "model_path": model.path, "chat_template": _TEMPLATE}
    return said(told | {"build_info": BUILD, "is_sleeping": asleep})


@dataclass(slots=True)
class _Call:
    """One prompt and what becomes of it. `limit` is what the caller said, negative for as much as fits."""

    child: FakeChild
    text: str
    body: Json
    limit: int
    chat: bool
    slot: int = -1
    cached: int = 0
    pieces: list[str] = field(default_factory=list[str])

    @property
    def prompt(self) -> list[int]:
        return tokens_of(self.text)

    async def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Read the prompt, say one token after the other, and leave the slot as the real one does."""
        child, prompt = self.child, self.prompt
        await child.awake()
        slot = await child.slot_for(_number(self.body.get("id_slot"), -1), prompt)
        try:
            self.slot = slot.id
            self.cached = 0 if self.body.get("cache_prompt") is False else slot.reusable(prompt, child.model.attention)
            slot.ran, slot.task, slot.params = True, child.next_task(), self._params()
            slot.empty()
            slot.tokens = list(prompt)
            await child.beat(child.house.pace.prompt_token_s * (len(prompt) - self.cached))
            await self._speak(slot, tell)
        finally:
            slot.last_used = child.last_used = asyncio.get_running_loop().time()
            child.leave(slot)

    async def _speak(self, slot: Slot, tell: Callable[[str], None]) -> None:
        room = self.child.model.n_ctx_slot - len(slot.tokens)
        count = room if self.limit < 0 else min(max(1, self.limit), room)  # one is said even when none is wanted
        for nth in range(count):
            await self.child.beat(self.child.house.pace.token_s)
            slot.tokens.extend(map(ord, self.pieces[-1:]))  # the newest one is never in the slot yet
            self.pieces.append(next_character(slot.tokens))
            tell(self.pieces[-1])
            if nth == 0 and self.child.strikes(Verb.ANSWER, Kind.CHILD_DIES):
                self.child.abort()

    def _params(self) -> Json:
        known = {"seed": self.body.get("seed", _ANY_SEED), "temperature": self.body.get("temperature", 0.8)}
        return known | {"max_tokens": self.limit, "n_predict": self.limit, "stream": self.streams}

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True

    @property
    def timings(self) -> Json:
        pace, read = self.child.house.pace, len(self.prompt) - self.cached
        return {
            "cache_n": self.cached,
            "prompt_n": read,
            "prompt_ms": read * pace.prompt_token_s * 1000,
            "predicted_n": len(self.pieces),
            "predicted_ms": len(self.pieces) * pace.token_s * 1000,
        }

    @property
    def usage(self) -> Json:
        prompt, said_ = len(self.prompt), len(self.pieces)
        cached = {"cached_tokens": self.cached}
        counts = {"completion_tokens": said_, "prompt_tokens": prompt, "total_tokens": prompt + said_}
        return counts | {"prompt_tokens_details": cached}

    def last(self) -> Json:
        """The whole answer of /completion; of a stream the last event, which holds no text."""
        return {
            "index": 0,
            "content": "" if self.streams else "".join(self.pieces),
            "tokens": [],
            "id_slot": self.slot,
            "stop": True,
            "model": self.child.model.name,
            "tokens_predicted": len(self.pieces),
            "tokens_evaluated": len(self.prompt),
            "prompt": "<s>" + self.text,
            "truncated": False,
            "stop_type": "limit",
            "tokens_cached": len(self.prompt) + len(self.pieces) - 1,
            "timings": self.timings,
        }

    def envelope(self, **more: object) -> Json:
        """What every chat answer and chunk has around it."""
        kind = "chat.completion.chunk" if self.streams else "chat.completion"
        name = f"chatcmpl-{id(self):x}"
        return {
            "created": 0,
            "id": name,
            "model": self.child.model.name,
            "system_fingerprint": BUILD,
            "object": kind,
        } | more

    def whole(self) -> Answer:
        """The answer in one piece."""
        if not self.chat:
            return said(self.last())
        message = {"role": "assistant", "content": "".join(self.pieces)}
        choice = {"finish_reason": "length", "index": 0, "message": message}
        verbose = {"__verbose": self.last()} if self.body.get("verbose") is True else {}
        return said(self.envelope(choices=[choice], usage=self.usage, timings=self.timings, **verbose))

    def piece(self, text: str) -> bytes:
        """One token in a stream."""
        if self.chat:
            return self._chunk({"content": text})
        said_ = {"tokens_predicted": len(self.pieces), "tokens_evaluated": len(self.prompt)}
        return event({"index": 0, "content": text, "tokens": [ord(text)], "stop": False, "id_slot": -1, **said_})

    def opening(self) -> bytes:
        """What a stream begins with, before any token."""
        return self._chunk({"role": "assistant", "content": None}) if self.chat else b""

    def closing(self) -> bytes:
        """What a stream ends with."""
        if not self.chat:
            return event(self.last())
        options = self.body.get("stream_options")
        if isinstance(options, dict) and cast("Json", options).get("include_usage") is True:
            counted = event(self.envelope(choices=[], usage=self.usage, timings=self.timings))
            return self._chunk({}, finish="length") + counted + b"data: [DONE]\n\n"
        return self._chunk({}, finish="length", timings=self.timings) + b"data: [DONE]\n\n"

    def _chunk(self, delta: Json, finish: str | None = None, **more: object) -> bytes:
        choice = {"finish_reason": finish, "index": 0, "delta": delta}
        return event(self.envelope(choices=[choice], **more))


async def answer(child: FakeChild, path: str, body: Json, *, direct: bool = False) -> Answer:
    """Answer one of a model's own endpoints. Raises ChildGone when the model ends before a first byte.

    `direct`: asked of the child itself, which stops once its client left; a router sees that only while it streams.
    """
    match path.removeprefix("/v1"):
        case "/chat/completions":
            limit = _number(body.get("max_tokens"), -1)
            call = _Call(child, templated(body), body, limit, chat=True)
        case "/completion" | "/completions":
            limit = _number(body.get("n_predict", body.get("max_tokens")), -1)
            call = _Call(child, str(body.get("prompt", "")), body, limit, chat=False)
        case "/apply-template":
            return said({"prompt": templated(body)})
        case _:
            return await _scored(child, path, body, direct=direct)
    needed, there = len(call.prompt), child.model.n_ctx_slot
    if needed >= there:
        text = f"request ({needed} tokens) exceeds the available context size ({there} tokens), try increasing it"
        return refused(400, text, type="exceed_context_size_error", n_prompt_tokens=needed, n_ctx=there)
    if call.streams:
        return await _streamed(child, call, direct=direct)
    await child.serve(call.run(), kept=not direct)
    return call.whole()


async def _streamed(child: FakeChild, call: _Call, *, direct: bool) -> Answer:
    """The head of the answer comes with the first token."""
    begun = asyncio.Event()

    def tell(text: str) -> None:
        if not begun.is_set():
            begun.set()
            stream.put(call.opening())
        stream.put(call.piece(text))

    async def pump() -> None:
        try:
            await child.serve(call.run(tell))
            stream.put(call.closing())
        except ChildGone:
            if direct:
                stream.drop()
            stream.put(LOST.encode())
        stream.end()

    work = asyncio.create_task(pump())
    stream = Stream(work.cancel)
    ready = asyncio.create_task(begun.wait())
    work.add_done_callback(lambda _: ready.cancel())
    try:
        await asyncio.wait({work, ready}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        stream.shut() if direct else ready.add_done_callback(lambda _: stream.shut())
        raise
    if not begun.is_set():
        raise ChildGone
    return Answer(200, stream, SSE_TYPE)


async def _scored(child: FakeChild, path: str, body: Json, *, direct: bool) -> Answer:
    """Embeddings and rankings: they take a slot for a moment and leave their prompt in it."""
    text = str(body.get("content", body.get("input", body.get("query", ""))))
    await child.serve(_Call(child, text, body, 0, chat=False).run(), kept=not direct)
    vector = [float(ord(character)) for character in text] or [0.0]
    match path:
        case "/embedding" | "/embeddings":
            return said([{"index": 0, "embedding": [vector]}])
        case "/v1/embeddings":
            return said({"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector}]})
        case _:
            count = len(cast("Sequence[object]", body.get("documents", [])))
            return said({"object": "list", "results": [{"index": n, "relevance_score": 0.0} for n in range(count)]})


def templated(body: Mapping[str, object]) -> str:
    """The prompt that the messages of a chat become."""
    messages = cast("Sequence[Mapping[str, object]]", body.get("messages", []))
    text = "".join(f"<|{message.get('role')}|>{_content(message)}\n" for message in messages)
    return text + ("" if body.get("add_generation_prompt") is False else "<|assistant|>")


def _content(message: Mapping[str, object]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(cast("Json", part).get("text", "")) for part in cast("list[object]", content))
    return str(content or "")


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
