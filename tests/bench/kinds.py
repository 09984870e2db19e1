"""The kinds of model whose conversations the snapshot bench follows, and what the next turn of one may do.

Invariant: a story and its next turns follow from its seed, its length and what the model answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from swapper.demo.models import SHAPES, make_models
from tests.support.projector import PICTURE_TOKENS, make_projector, picture
from tests.support.twins import ROLES, Content, Json, Twins

THOUGHT = 120
"""Tokens of the answer that is shortened later, as where a model's reasoning is stripped."""
KEPT = 24
"""So many of them stay."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`strategies`: `auto`, and those that are forced for comparison. `drafter`, `projector`: what is beside it."""

    name: str
    model: str
    strategies: Sequence[str]
    drafter: bool = False
    projector: bool = False
    shown: bool = False

    def files(self, folder: Path) -> tuple[Path, Mapping[str, str]]:
        """Write its files; the model's, and the settings of its preset."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"slot-prompt-similarity": "0.1"}  # llama-server's own
        if self.drafter:  # shallower than its model, else the same: some of what it drafts is taken
            drafter = make_models(folder / "drafter", [self.model], layers=1)[self.model]
            settings |= {"model-draft": str(drafter), "spec-type": "draft-simple", "threads-draft": "1"}
        if self.projector:
            projector = make_projector(folder / "mmproj.gguf", SHAPES[self.model].width)
            settings |= {"mmproj": str(projector), "no-mmproj-offload": "true"}
        return make_models(folder, [self.model])[self.model], settings


KINDS = (
    Kind("dense", "alpha", ("auto", "replay")),
    Kind("hybrid", "lfm", ("auto", "slots", "replay")),
    Kind("sliding window", "gemma", ("auto", "slots")),
    Kind("dense with a drafter", "alpha", ("auto",), drafter=True),
    Kind("dense with a projector", "alpha", ("auto",), projector=True),
    Kind("dense that was shown a picture", "alpha", ("auto",), projector=True, shown=True),
)


class Story:
    """One conversation: two questions, a short answer and a long one; `messages` are all of it."""

    def __init__(self, seed: int, tokens: int, kind: Kind) -> None:
        first = random_text(seed, tokens * 3 // 4 - 8 * seed)  # two of one length cannot be told apart by it
        self.second = random_text(seed + 1000, tokens // 4 - THOUGHT)
        image: Json = {"type": "image_url", "image_url": {"url": picture(seed + 7)}}
        self.messages: list[Content] = [[image, {"type": "text", "text": first}] if kind.shown else first]

    def begin(self, pair: Twins) -> None:
        """Play it through swapper."""
        self.messages.append(pair.say(self.messages, KEPT).text)
        self.messages.append(self.second)
        self.messages.append(pair.say(self.messages, THOUGHT).text)

    def read(self) -> str:
        """What its slot holds at the end of it."""
        return rendered(self.messages[:-1]) + str(self.messages[-1])[:-1]


def _extends(story: Story) -> list[Content]:
    return [*story.messages, "and then?"]


def _stripped(story: Story) -> list[Content]:
    return [*story.messages[:-1], str(story.messages[-1])[-KEPT:], "and then?"]


def _edited(story: Story) -> list[Content]:
    half = len(story.second) // 2
    return [*story.messages[:2], story.second[:half] + random_text(99, len(story.second) - half)]


def _branch(story: Story) -> list[Content]:
    first = story.messages[0]
    if isinstance(first, str):
        changed: Content = first[: len(first) // 2] + random_text(98, len(first) - len(first) // 2)
    else:
        words = str(first[1]["text"])
        changed = [first[0], {"type": "text", "text": words[: len(words) // 2] + random_text(98, len(words) // 2)}]
    return [changed, *story.messages[1:3]]


def _same(story: Story) -> list[Content]:
    return story.messages[:3]


TURNS: Mapping[str, Callable[[Story], list[Content]]] = {
    "next turn extends": _extends,
    "reasoning stripped": _stripped,
    "last message edited": _edited,
    "branch": _branch,
    "same prompt again": _same,
}


def common(read: str, messages: Sequence[Content]) -> int:
    """Tokens that a prompt has in common with what was read, the begin token among them."""
    prompt = rendered(messages)
    pairs = zip(read, prompt, strict=False)
    return 1 + next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(read), len(prompt)))


def rendered(messages: Sequence[Content]) -> str:
    """The prompt as the models' template makes it, one character a token; a picture is so many characters."""
    turns = (f"<|{ROLES[i % 2]}|>{_text(content)}\n" for i, content in enumerate(messages))
    return "".join(turns) + "<|assistant|>"


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    pieces = ("\0" * PICTURE_TOKENS if part["type"] == "image_url" else cast("str", part["text"]) for part in content)
    return "".join(pieces)


def random_text(seed: int, size: int) -> str:
    """Text of so many tokens, the same for the same seed."""
    return "".join(random.Random(seed).choices("abcdefgh ijklmnop", k=size))
