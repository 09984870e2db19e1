"""Random conversations that go on after a handover, each beside its twin that goes on without one.

Invariant: a twin's slot went through the same batches, so that a different word can only come from the way through the
disk. A dense model's slot is saved as it is; a hybrid's conversation is taken back to the end of its last request
first, so its twin is, too, by the same request, without unload and restore.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass, field
from pathlib import Path

from swapper.gateway.recall import recall_body
from swapper.snapshots.conversation import Request
from tests.support.twins import Content, Twins, chat, post, twins

SLOTS = 8
_PATH = "/v1/chat/completions"
_SIMILAR = {"slot-prompt-similarity": "0.1"}
"""llama-server's own: a next turn longer than the conversation is still taken for one of it."""
_LETTERS = string.ascii_letters + string.digits + " .,;:!?'()-"


@dataclass(slots=True)
class Found:
    """`different`: (seed, the text after the handover, the twin's); `cold`: seeds of those that were read again.

    Warm is one of which everything up to its last question, template and all, was not read again.
    """

    compared: int = 0
    different: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])
    cold: list[int] = field(default_factory=list[int])


class _Story:
    """One conversation, random in length, words and number of turns."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.messages: list[Content] = []
        self._random = random.Random(seed)
        self.turns = self._random.randint(1, 3)

    def ask(self) -> None:
        """The user's next message."""
        self.messages.append("".join(self._random.choices(_LETTERS, k=self._random.randint(150, 500))))

    def limit(self) -> int:
        """How long the next answer may be, in tokens."""
        return self._random.randint(4, 40)


def differing(folder: Path, model: str, file: Path, count: int, *, seed: int) -> Found:
    """Play `count` conversations, as many at a time as there are slots; a handover comes before the last turns."""
    found = Found()
    with twins(folder, model, file, parallel=SLOTS, ctx=SLOTS * 2048, settings=_SIMILAR) as pair:
        for first in range(0, count, SLOTS):
            stories = [_Story(seed + k) for k in range(first, min(first + SLOTS, count))]
            for story in stories:
                for _ in range(story.turns):
                    _turn(pair, story)
            if pair.model == "lfm":
                for story in sorted(stories, key=lambda s: -s.seed):
                    _rewind(pair, story.messages[:-1])
            pair.handover()
            for story in stories:
                _compare(pair, story, found)
    return found


def _turn(pair: Twins, story: _Story) -> None:
    """Both are asked the same; what ours said goes on in both."""
    story.ask()
    limit = story.limit()
    ours, other = pair.say(story.messages, limit), pair.warm_path(story.messages, limit)
    assert ours.text == other.text, "the twins differed before any handover"
    story.messages.append(ours.text)


def _rewind(pair: Twins, messages: list[Content]) -> None:
    """What swapper does before it saves a conversation of a hybrid model, done to the twin's."""
    body = json.dumps(chat(pair.model, messages, 8)).encode()
    with post(pair.twin.url + _PATH, json.loads(recall_body(Request(_PATH, body), pair.model))) as answer:
        answer.read()


def _compare(pair: Twins, story: _Story, found: Found) -> None:
    asked = sum(len(str(message)) for message in story.messages[:-1])
    story.ask()
    ours, other = pair.say(story.messages, 24), pair.warm_path(story.messages, 24)
    found.compared += 1
    if ours.text != other.text:
        found.different.append((story.seed, ours.text, other.text))
    if ours.cache_n < asked:
        found.cold.append(story.seed)
