"""Whose conversation something is, judged by the words in it: what the clients said, what a file and a slot hold.

Invariant: it knows the clients' words and what is physically there, and nothing of what swapper believes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from swapper.core.conversations import Conversation, Strategy
from swapper.snapshots.chain import Prompt, chain_of
from tests.support.fake_slots import BOS

_SAID = re.compile(r"this is (talk \d+ with \w+):")
_prompt = msgspec.json.Decoder(Prompt)
_FILES = frozenset({Strategy.SLOTS, Strategy.REWIND})


def opening(talk: int, model: str) -> str:
    """What a client says over and over at the beginning of a talk, so that its words tell whose they are."""
    return f"this is talk {talk} with {model}: "


def whose(tokens: Sequence[int]) -> str:
    """The talk whose words these tokens are, empty where they are nobody's."""
    said = _SAID.search("".join(chr(token) for token in tokens if token != BOS))
    return said[1] if said is not None else ""


class Heads:
    """The talk behind each head of a chain, as its client asked it."""

    def __init__(self) -> None:
        self._talks: dict[str, str] = {}

    def asked(self, path: str, body: bytes, talk: int, model: str) -> None:
        """A client sends this."""
        chain = chain_of(path, _prompt.decode(body))
        if chain is not None:
            self._talks[chain.id] = f"talk {talk} with {model}"

    def strangers(self, head: str, talk: str) -> bool:
        """Whether what is under this head is known to be another talk's."""
        mine = self._talks.get(head)
        return mine is not None and talk not in ("", mine)

    def wrongly_saved(self, lines: Sequence[Conversation], read: Callable[[str], str | None]) -> str | None:
        """What is said to be saved and is not, or is another's. `read`: the talk in a file; None: there is no file."""
        for talk in lines:
            if not talk.saved or talk.strategy not in _FILES:
                continue
            found = read(talk.snapshot)
            if found is None:
                return f"{talk.snapshot} is said to be saved, and there is no such file"
            if self.strangers(talk.head, found):
                return f"{talk.snapshot} is said to be {self._talks[talk.head]}, and in it is {found}"
        return None

    @property
    def known(self) -> Mapping[str, str]:
        """Head -> talk."""
        return self._talks
