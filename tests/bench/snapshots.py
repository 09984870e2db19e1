"""Whether conversations come back, of every kind of model, and what that saves; each figure beside the same re-read.

Four parts, all on the real server, swapper's own and a twin without swapper asked the same within one run:

- `table`: kind x strategy x what the next turn does -> tokens reused, and the first token beside the twin's, which is
  told to use nothing that it has. A row without a strategy in brackets is what `auto` chose.
- `headline`: one conversation of `med`: from the release to the first token beside a bare script's (load, restore, one
  token), and the next turn's first token once it is restored beside the re-read one; paired rounds.
- `five`: five conversations on two slots, each slot with cells of its own and all in one cache.
- `text`: conversations whose greedy text after a handover is the text without one.

Run: `python -m tests.bench.snapshots [table] [headline] [five] [text] [--tokens N] [--rounds N] [--conversations N]
[--json]`; without a part, all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from swapper.demo.models import make_models
from tests.bench.kinds import KINDS, TURNS, Kind, Story, common, random_text
from tests.support.matrix import back
from tests.support.router import RealRouter
from tests.support.sametext import differing
from tests.support.twins import Json, Turn, Twins, ask, chat, load, post, status, twins

ANSWER = 8
"""Tokens of each measured answer."""
CTX_BESIDE = 1024
"""Tokens of a slot beyond the conversation itself."""


# ---- the table


def table(folder: Path, tokens: int) -> Iterator[Json]:
    """Five conversations, each in a slot of its own; one handover; then each goes on in its way."""
    for kind in KINDS:
        file, settings = kind.files(folder / kind.name)
        for strategy in kind.strategies:
            place = folder / f"{kind.name}-{strategy}"
            slots = len(TURNS)
            with twins(
                place,
                kind.model,
                file,
                parallel=slots,
                ctx=slots * (tokens + CTX_BESIDE),
                settings=settings,
                snapshots=f"{{strategy: {strategy}}}",
            ) as pair:
                yield from _rows(pair, kind, strategy, tokens)


def _rows(pair: Twins, kind: Kind, strategy: str, tokens: int) -> Iterator[Json]:
    stories = {turn: Story(seed, tokens, kind) for seed, turn in enumerate(TURNS)}
    for story in stories.values():
        story.begin(pair)
    pair.handover()
    told = pair.came_back()
    chosen = {str(c["strategy"]) for c in told}
    name = f"{kind.name} {'/'.join(sorted(chosen))}" if strategy == "auto" else f"{kind.name} ({strategy})"
    for turn, story in stories.items():
        messages = TURNS[turn](story)
        shared = common(story.read(), messages)
        ours, again = pair.say(messages, ANSWER), pair.read_again(messages, ANSWER)
        yield {
            "row": f"{name}: {turn}",
            "prompt": ours.cache_n + ours.prompt_n,
            "shared": shared,
            "cache_n": ours.cache_n,
            "reuse": round(ours.cache_n / shared, 3),
            **_beside([ours], [again]),
        }


def _beside(ours: list[Turn], again: list[Turn]) -> Json:
    own, base = (statistics.median(turn.first_ms for turn in turns) for turns in (ours, again))
    return {"first_ms": round(own, 1), "reread_ms": round(base, 1), "ratio": round(base / own, 1)}


# ---- the headline


class Bare:
    """A script without a scheduler, on a router of its own: load, restore, one token."""

    def __init__(self, router: RealRouter, model: str) -> None:
        self._router = router
        self._model = model
        self._number = 0

    def leave(self) -> None:
        """Save both slots and unload."""
        self._number += 1
        for slot in range(2):
            self._slot(slot, "save")
        with self._events() as events:
            with post(f"{self._router.url}/models/unload", {"model": self._model}):
                pass
            self._until(events, "unloaded")

    def come_back(self, body: Json) -> float:
        """Milliseconds from the load to the first token of the next turn."""
        start = time.perf_counter()
        with self._events() as events:
            with post(f"{self._router.url}/models/load", {"model": self._model}):
                pass
            self._until(events, "loaded")
        for slot in range(2):
            self._slot(slot, "restore")
        before = (time.perf_counter() - start) * 1000
        return before + ask(self._router.url, body).first_ms

    def _slot(self, slot: int, action: str) -> None:
        body = {"model": self._model, "filename": f"bare-{self._number}-{slot}.kv"}
        with post(f"{self._router.url}/slots/{slot}?action={action}", body) as answer:
            answer.read()

    def _events(self):  # noqa: ANN202  # urllib names no type for its answers
        return urllib.request.urlopen(f"{self._router.url}/models/sse", timeout=120)

    def _until(self, events: Iterator[bytes], wanted: str) -> None:
        if status(self._router, self._model) == wanted:
            return
        for line in events:
            if line.startswith(b"data:") and json.loads(line[5:])["data"].get("status") == wanted:
                return
        raise AssertionError("the router's event stream ended")


def headline(folder: Path, tokens: int, rounds: int) -> Iterator[Json]:
    """Each round: the bare script's way and swapper's, one after the other, and the re-read."""
    model = "med"
    file = make_models(folder, [model])[model]
    with twins(folder / "headline", model, file, ctx=2 * (tokens + CTX_BESIDE)) as pair:
        script = Bare(pair.twin, model)
        beside = RealRouter(folder / "beside", {model: file}, ctx=2 * (tokens + CTX_BESIDE), defaults={"threads": "1"})
        try:
            beside.start()
            load(beside, model)
            story = [random_text(0, tokens)]
            for say in (pair.say, pair.warm_path):
                say(story, ANSWER)
            released, bare, next_turn, again = _headline_rounds(pair, script, beside, story, rounds)
        finally:
            beside.stop()
    ratios = [own / base for own, base in zip(released, bare, strict=True)]
    yield {
        "row": f"{model}, {tokens} tokens: from the release to the first token, beside a bare script",
        "ms_p50": round(statistics.median(released), 1),
        "bare_ms_p50": round(statistics.median(bare), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "rounds": rounds,
    }
    yield {
        "row": f"{model}, {tokens} tokens: the next turn's first token once restored, beside the re-read one",
        **_beside(next_turn, again),
        "cache_n": min(turn.cache_n for turn in next_turn),
        "rounds": rounds,
    }


def _headline_rounds(
    pair: Twins, script: Bare, beside: RealRouter, story: list[str], rounds: int
) -> tuple[list[float], list[float], list[Turn], list[Turn]]:
    released, bare, next_turn, again = list[float](), list[float](), list[Turn](), list[Turn]()
    for number in range(-1, rounds):
        body = chat(pair.model, [*story, "an answer", f"and then? {number}"], ANSWER)
        script.leave()
        theirs = script.come_back(body)
        lease = pair.server.lease("job", wait=120)
        start = time.perf_counter()
        pair.server.release(lease)
        before = (time.perf_counter() - start) * 1000
        ours = before + ask(pair.server.url, body).first_ms
        back(pair.server, f"llama/{pair.model}")
        pair.handover()
        follows = [*story, "an answer", f"and then? {number}!"]
        if number < 0:  # the first round warms the page cache
            pair.say(follows, ANSWER)
            continue
        released.append(ours)
        bare.append(theirs)
        next_turn.append(pair.say(follows, ANSWER))
        again.append(ask(beside.url, chat(pair.model, follows, ANSWER, cache_prompt=False)))
    return released, bare, next_turn, again


# ---- five on two


def five(folder: Path, tokens: int) -> Iterator[Json]:
    """Five conversations, two slots: how many come back warm."""
    models = make_models(folder, ["alpha", "lfm"])
    for model, file in models.items():
        for unified in (False, True):
            settings = {"kv-unified": str(unified).lower()}
            place = folder / f"five-{model}-{unified}"
            with twins(place, model, file, ctx=8 * (tokens + CTX_BESIDE), settings=settings) as pair:
                stories = [[random_text(seed, tokens)] for seed in range(5)]
                said = [pair.say(story, ANSWER).text for story in stories]
                pair.handover()
                told = pair.came_back()
                order = (4, 2, 0, 1, 3)
                turns = [pair.say([*stories[k], said[k].strip()[:-1], "and then?"], ANSWER) for k in order]
                again = [pair.read_again([*stories[k], said[k].strip()[:-1], "and then?"], ANSWER) for k in order]
            yield {
                "row": f"{model}, five on two slots, {'one cache' if unified else 'cells of their own'}",
                "warm": sum(turn.cache_n >= 0.95 * tokens for turn in turns),
                "of": 5,
                "saved": sum(bool(c["saved"]) for c in told),
                **_beside(turns, again),
            }


# ---- the same text


def text(folder: Path, count: int) -> Iterator[Json]:
    """Random conversations beside their twins."""
    for model, file in make_models(folder, ["alpha", "lfm"]).items():
        found = differing(folder / f"text-{model}", model, file, count, seed=100)
        yield {
            "row": f"{model}: greedy text after a handover beside the text without one",
            "same": found.compared - len(found.different),
            "of": found.compared,
            "warm": found.compared - len(found.cold),
            "ratio": round(1 - len(found.different) / found.compared, 3),
            "differing_seeds": [seed for seed, _, _ in found.different],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="table, headline, five, text; all where none is named")
    parser.add_argument("--tokens", type=int, default=2000, help="of each conversation; the headline has twice as many")
    parser.add_argument("--rounds", type=int, default=5, help="of the headline")
    parser.add_argument("--conversations", type=int, default=50, help="of each kind, whose text is compared")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parts = {
            "table": lambda: table(folder, args.tokens),
            "headline": lambda: headline(folder, 2 * args.tokens, args.rounds),
            "five": lambda: five(folder, args.tokens),
            "text": lambda: text(folder, args.conversations),
        }
        rows: list[Json] = []
        for name in cast("list[str]", args.parts) or parts:
            for row in parts[name]():
                rows.append(row)
                if not args.json:
                    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.json:
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
        print(json.dumps({"bench": "snapshots", "machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
