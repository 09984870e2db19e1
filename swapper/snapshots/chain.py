"""The digest chain of a request: one link for each message (or KiB of text), each over the one before it.

Invariant: equal prompts give equal chains, and two chains share a link only where everything before it is the same.
What llama-server leaves out of the prompt is left out here (seen in its source: keys of a message that it does not
read, `cache_control`, a client's stamp in the system prompt), and system messages that lead belong to the seed, so that
chats that share no more than them share no link. Pure: nothing of a message is decoded but which keys it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import Raw
from xxhash import xxh3_128, xxh3_128_digest

BLOCK_BYTES = 1024
"""How much of a text prompt, as it stands in the JSON, one link covers; the last one covers what is left."""
LINK_BYTES = 16
MESSAGES = 10_000
"""A chat of more has no chain, a message of more blocks is taken as it stands: it would take too long of the loop."""
_CHAT, _ANTHROPIC, _TEXT = b"chat", b"anthropic", b"text"
_KINDS = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/messages": _ANTHROPIC,
    "/v1/completions": _TEXT,
    "/completions": _TEXT,
    "/completion": _TEXT,
}
_NOTHING = Raw(b"")
_NULL, _TEXT_BLOCK, _SYSTEM = Raw(b"null"), Raw(b'"text"'), (Raw(b'"system"'), Raw(b'"developer"'))
_END = b"\x1f"
"""After each part; no JSON has it."""
_NO_TOKENS = (b'"', b"[", b"{")
_STAMP = re.compile(rb'^("x-anthropic-billing-header:[^"]*?cch=)[^;"]{5};')
"""Newer servers blank this stamp, which one client changes with every request."""


class Message(msgspec.Struct, gc=False):
    """What llama-server reads of a message, each as its bytes."""

    role: Raw = _NOTHING
    content: Raw = _NOTHING
    reasoning_content: Raw = _NOTHING
    tool_calls: Raw = _NOTHING
    tool_call_id: Raw = _NOTHING
    name: Raw = _NOTHING


class _Block(msgspec.Struct, gc=False, rename={"kind": "type"}):
    """One block of a message's content, of any API. `cache_control` is not among them: clients move it every turn."""

    kind: Raw = _NOTHING
    text: Raw = _NOTHING
    thinking: Raw = _NOTHING
    id: Raw = _NOTHING
    name: Raw = _NOTHING
    input: Raw = _NOTHING
    tool_use_id: Raw = _NOTHING
    content: Raw = _NOTHING
    source: Raw = _NOTHING
    image_url: Raw = _NOTHING
    input_audio: Raw = _NOTHING
    input_video: Raw = _NOTHING
    data: Raw = _NOTHING
    refusal: Raw = _NOTHING


class Prompt(msgspec.Struct):
    """What of a body decides its prompt; views of the body's bytes, so keep it no longer than the body.

    `tool_choice`, `response_format` and grammars are not here: they shape the answer, and the prompt of few templates.
    """

    messages: list[Message] | None = None
    prompt: Raw = _NOTHING
    system: Raw = _NOTHING
    tools: Raw = _NOTHING
    chat_template_kwargs: Raw = _NOTHING
    reasoning_effort: Raw = _NOTHING
    thinking: Raw = _NOTHING
    lora: Raw = _NOTHING


@dataclass(frozen=True, slots=True)
class Chain:
    """The links of one request, oldest first, never none; `sizes`: bytes of the prompt up to and with each.

    `is_text`: it is one text. `text` is the whole of that (a view of the body), for as long as the body is kept: the
    end of a shorter one lies within one of its blocks.
    """

    seed: bytes
    links: tuple[bytes, ...]
    sizes: tuple[int, ...]
    is_text: bool = False
    text: memoryview | None = field(default=None, repr=False, compare=False)

    @property
    def id(self) -> str:
        """The last link, 32 hex characters: the name of the conversation as it stands."""
        return self.links[-1].hex()

    @property
    def root(self) -> bytes:
        """What every chain that shares anything with this one has, too, but for texts shorter than a block."""
        return self.seed if self.is_text and self.sizes[-1] < BLOCK_BYTES else self.links[0]

    @property
    def copied(self) -> int:
        """Bytes of the text that are no view of the body's, but a copy."""
        return len(self.text) if self.text is not None and isinstance(self.text.obj, bytes) else 0

    def without_text(self) -> Chain:
        """The same, and nothing of the body with it: `ends` and `end_at` know nothing any more."""
        return self if self.text is None else replace(self, text=None)

    def ends(self, block: int) -> frozenset[bytes]:
        """The last links of all texts that end within this block and are a beginning of this text. ~0.3 ms."""
        if self.text is None:
            return frozenset()
        return frozenset(_ends(self._before(block), self.text[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]))

    def end_at(self, size: int) -> bytes | None:
        """The last link of the text that the first `size` bytes (at least one) of this one are. ~1 µs."""
        if self.text is None or size > len(self.text):
            return None
        block = (size - 1) // BLOCK_BYTES
        return xxh3_128_digest(b"".join((self._before(block), self.text[block * BLOCK_BYTES : size])))

    def _before(self, block: int) -> bytes:
        return self.links[block - 1] if block else self.seed


def chain_of(path: str, fields: Prompt) -> Chain | None:
    """The chain of a request to this path; None where its prompt is none that the index follows.

    That is every other path, a chat without messages, a batch of prompts, a prompt with media beside it.
    """
    kind = _KINDS.get(path)
    if kind is None:
        return None
    if kind is _TEXT:
        text = _text(fields.prompt)
        return None if text is None else _of_text(_link(kind, [fields.lora])[0], text)
    if not fields.messages or len(fields.messages) > MESSAGES:
        return None
    shape = [fields.tools, fields.chat_template_kwargs, fields.reasoning_effort, fields.thinking, fields.lora]
    return _of_chat(*_link(kind, shape), fields.system if kind is _ANTHROPIC else _NOTHING, fields.messages)


def _of_chat(link: bytes, size: int, system: Raw, messages: list[Message]) -> Chain:
    if system:
        link, more = _link(link, [_unstamped(part) for part in _content(system)])
        size += more
    seed, last = link, len(messages) - 1
    links: list[bytes] = []
    sizes: list[int] = []
    for number, message in enumerate(messages):
        link, more = _link(link, _parts(message))
        size += more
        if not links and number < last and message.role in _SYSTEM:
            seed = link
        else:
            links.append(link)
            sizes.append(size)
    return Chain(seed, tuple(links), tuple(sizes))


def _of_text(seed: bytes, text: memoryview) -> Chain:
    links: list[bytes] = []
    sizes: list[int] = []
    link = seed
    for start in range(0, max(len(text), 1), BLOCK_BYTES):
        block = text[start : start + BLOCK_BYTES]
        link = xxh3_128_digest(b"".join((link, block)))
        links.append(link)
        sizes.append(start + len(block))
    return Chain(seed, tuple(links), tuple(sizes), is_text=True, text=text)


def _ends(before: bytes, block: memoryview) -> Iterator[bytes]:
    state = xxh3_128(before)
    for at in range(len(block)):
        state.update(block[at : at + 1])
        yield state.digest()


def _link(before: bytes, parts: list[Raw]) -> tuple[bytes, int]:
    """The digest over `before` and the parts, and their bytes. Where nothing stands only the place counts."""
    pieces: list[bytes | Raw] = [before]
    size = 0
    for part in parts:
        if part and part != _NULL:  # some clients write every key, some none
            pieces.append(part)
            size += len(part)
        pieces.append(_END)
    return xxh3_128_digest(b"".join(pieces)), size


def _parts(message: Message) -> list[Raw]:
    content = message.content
    head = [message.role, message.reasoning_content, message.tool_calls, message.tool_call_id, message.name]
    return [*head, *_content(content)]


_blocks = msgspec.json.Decoder(list[_Block])


def _content(raw: Raw) -> list[Raw]:
    """The bytes of a content; one block of text is the text itself: a client makes one of it to mark it for caching."""
    if _start(raw) != b"[":
        return [raw]
    try:
        blocks = _blocks.decode(raw)
    except msgspec.DecodeError:
        return [raw]
    if len(blocks) == 1 and blocks[0].kind == _TEXT_BLOCK:
        return [blocks[0].text]
    if len(blocks) > MESSAGES:
        return [raw]
    return [raw for block in blocks for raw in msgspec.structs.astuple(block)]


def _unstamped(raw: Raw) -> Raw:
    if _start(raw, 12) != b'"x-anthropic':
        return raw
    return Raw(_STAMP.sub(rb"\1fffff;", bytes(raw), count=1))


def _text(raw: Raw) -> memoryview | None:
    """The text of a prompt as it stands in the JSON; a list of tokens ends in a comma, so that 12 begins no 123."""
    match _start(raw):
        case b'"':
            return memoryview(raw)[1:-1]
        case b"[":
            tokens = bytes(memoryview(raw)[1:-1]).strip() + b","
            return None if any(mark in tokens for mark in _NO_TOKENS) else memoryview(tokens)
        case _:
            return None


def _start(raw: Raw, size: int = 1) -> bytes:
    return bytes(memoryview(raw)[:size])
