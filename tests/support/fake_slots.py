"""Slots of a fake model: what they hold, what `/slots` shows of them, and the files they are saved to.

Invariant: as on the real server a file says nothing of the model it came from but its shape, has no checksum, and is
overwritten in place; a file short by less than the state of one token is not refused but ends the process.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.support.fake_wire import Json

BOS = 1
_HEAD = struct.Struct("<4sIIII")
_MAGIC, _VERSION = b"qsgg", 2
_LAST_TOKEN = 0x110000
_UNSAFE = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')


class Attention(StrEnum):
    """What a restored conversation is worth: all of it, nothing, or all of it if it only goes on."""

    DENSE = "dense"
    WINDOW = "window"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class FakeModel:
    """One model of the preset. `n_ctx` is that of all slots together, `shape` what a slot file has in common.

    `cached`: so many conversations fit its RAM cache.
    """

    name: str
    path: str = ""
    aliases: tuple[str, ...] = ()
    parallel: int = 2
    n_ctx: int = 8192
    kv_unified: bool = False
    cached: int = 0
    attention: Attention = Attention.DENSE
    shape: str = "llama"
    state_bytes: int = 64
    similarity: float = 0.5
    broken: bool = False
    load_on_startup: bool = False
    stop_timeout_s: float = 10.0
    sleep_idle_s: float | None = None
    vram_mib: int = 1000
    asleep_mib: int = 600
    args: tuple[str, ...] = ()

    @property
    def n_ctx_slot(self) -> int:
        """Context of one slot, in tokens."""
        return self.n_ctx if self.kv_unified else self.n_ctx // self.parallel

    @property
    def streams(self) -> int:
        """How many caches its slots have between them."""
        return 1 if self.kv_unified else self.parallel


@dataclass(slots=True)
class Slot:
    """One slot. `ran`: a task was in it, so it shows its tokens; `restored`: what it holds came from a file."""

    id: int
    tokens: list[int] = field(default_factory=list[int])
    busy: bool = False
    ran: bool = False
    restored: bool = False
    worthless: bool = False
    last_used: float = -1.0
    task: int = 0
    params: Json = field(default_factory=dict[str, object])

    def empty(self) -> None:
        """Hold nothing."""
        self.tokens, self.restored, self.worthless = [], False, False

    def cache(self, into: list[Slot], room: int) -> None:
        """Leave what it holds in the server's RAM cache, and hold it no longer."""
        if self.tokens and room:
            into.append(Slot(-1, self.tokens, restored=self.restored, worthless=self.worthless))
            del into[:-room]
        self.empty()

    def fetch(self, prompt: list[int], cache: list[Slot]) -> None:
        """Take from the RAM cache what is more like the prompt than what it holds."""
        best = max(cache, key=lambda one: one.common(prompt), default=None)
        if best is not None and best.common(prompt) > self.common(prompt):
            cache.remove(best)
            self.tokens, self.restored, self.worthless = best.tokens, best.restored, best.worthless

    def common(self, prompt: list[int]) -> int:
        """How many tokens at the beginning are the same."""
        for nth, (ours, theirs) in enumerate(zip(self.tokens, prompt, strict=False)):
            if ours != theirs:
                return nth
        return min(len(self.tokens), len(prompt))

    def reusable(self, prompt: list[int], attention: Attention) -> int:
        """How many tokens need not be read again; the last one of a prompt always is."""
        common = self.common(prompt)
        if self.worthless or (self.restored and attention is Attention.WINDOW):
            return 0
        if self.restored and attention is Attention.HYBRID and not len(prompt) > common == len(self.tokens):
            return 0
        return min(common, len(prompt) - 1)

    def shown(self, n_ctx: int) -> Json:
        """As `/slots` shows it."""
        always: Json = {"id": self.id, "n_ctx": n_ctx, "speculative": False, "is_processing": self.busy}
        if not self.ran:
            return always
        return always | {
            "id_task": self.task,
            "n_prompt_tokens": len(self.tokens),
            "n_prompt_tokens_processed": 0,
            "n_prompt_tokens_cache": 0,
            "params": self.params,
            "next_token": [{"has_next_token": self.busy, "has_new_line": False, "n_remain": -1, "n_decoded": 0}],
        }


def tokens_of(text: str) -> list[int]:
    """One token a character, behind the beginning of the text."""
    return [BOS, *map(ord, text)]


def next_character(tokens: list[int]) -> str:
    """What such a model says next: printable, and it hangs on everything before."""
    return chr(0x21 + zlib.crc32(struct.pack(f"<{len(tokens)}I", *tokens)) % 94)


def name_refused(name: str) -> bool:
    """Whether the server takes this for no file name."""
    plain = not _UNSAFE.search(name) and ".." not in name and name not in ("", ".")
    return not plain or len(name.encode()) > 255 or name != name.strip(" ") or name.endswith(".")


def encode(model: FakeModel, tokens: list[int]) -> bytes:
    """A slot file: 40 bytes of head (36 with one cache for all), the tokens, and as much state as they have."""
    shape = zlib.crc32(model.shape.encode())
    head = _HEAD.pack(_MAGIC, _VERSION, len(tokens), model.streams, shape).ljust(36 if model.kv_unified else 40, b"\0")
    ids = struct.pack(f"<{len(tokens)}I", *tokens)
    return head + ids + (ids[-4:] * model.state_bytes)[: model.state_bytes] * len(tokens)


class Unfit(Exception):
    """The file is refused, and the slot is empty now."""


class Aborted(Exception):
    """The file ends the whole process."""


def decode(model: FakeModel, path: Path) -> tuple[list[int], int]:
    """Tokens and bytes of a slot file. Raises Unfit or Aborted."""
    try:
        data = path.read_bytes()
        magic, version, count, streams, shape = _HEAD.unpack_from(data)
    except (OSError, struct.error):
        raise Unfit from None
    start = 36 if model.kv_unified else 40
    ours = (_MAGIC, _VERSION, model.streams, zlib.crc32(model.shape.encode()))
    missing = start + count * (4 + model.state_bytes) - len(data)
    if (magic, version, streams, shape) != ours or missing >= max(1, model.state_bytes):
        raise Unfit
    if missing > 0:
        raise Aborted
    tokens = list(struct.unpack_from(f"<{count}I", data, start))
    if any(token >= _LAST_TOKEN for token in tokens) or count > model.n_ctx_slot:
        raise Unfit
    return tokens, start + count * (4 + model.state_bytes)
