"""Chains and answers for tests of the conversation index: a chat is a string, one message a letter."""

from __future__ import annotations

import json

from swapper.gateway.parse import Ask, parse_body
from swapper.snapshots.chain import Chain, chain_of
from swapper.snapshots.conversation import Request, Talk
from swapper.snapshots.index import Index
from swapper.snapshots.reread import Account

TENANT, OTHER = "llama/alpha", "llama/beta"
CHAT, TEXT = "/v1/chat/completions", "/completion"
PER_MESSAGE = 1_000
"""Tokens a message is said to have."""


def body(letters: str, system: str = "Be terse.") -> bytes:
    lines = [{"role": ("user", "assistant")[n % 2], "content": letter * 500} for n, letter in enumerate(letters)]
    return json.dumps({"model": "alpha", "messages": [{"role": "system", "content": system}, *lines]}).encode()


def chat(letters: str, system: str = "Be terse.") -> Chain:
    return made(CHAT, body(letters, system))


def text(prompt: str) -> Chain:
    return made(TEXT, json.dumps({"model": "alpha", "prompt": prompt}).encode())


def made(path: str, raw: bytes) -> Chain:
    ask = parse_body(raw)
    assert isinstance(ask, Ask)
    assert ask.fields is not None
    chain = chain_of(path, ask.fields)
    assert chain is not None
    return chain


def answer(
    index: Index, letters: str, cached: int = 0, *, at: int = 0, tenant: str = TENANT, slot: int | None = None
) -> Account:
    """A chat is answered of whose tokens `cached` were reused; each message has PER_MESSAGE."""
    read = PER_MESSAGE * len(letters) - cached
    request = Request(CHAT, body(letters))
    return index.answered(tenant, chat(letters), request, cached, read, 100, slot, at)


def ids(talks: tuple[Talk, ...]) -> list[str]:
    return [talk.id for talk in talks]
