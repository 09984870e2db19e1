"""What the conversation index costs a call: the digest chain beside parsing alone, and finding one among 1,000.

Each row is a body of 2 MB: parsed for its model alone (`bare`), parsed for its chain too, and the chain itself; the
ratio is all that against the bare parse, best of each within one run. The last rows find the continuation of one
conversation among 1,000, beside parsing its body: chats of 200 messages that begin alike, texts shorter than a block,
texts that share their first block, and texts of which only a manifest tells.
Run: `python -m tests.bench.index [--repeat 30] [--json]`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from swapper.gateway.parse import Ask, parse_body
from swapper.snapshots.chain import BLOCK_BYTES, Chain, chain_of
from swapper.snapshots.conversation import Kept, Relation
from swapper.snapshots.index import Index, Limits

BODY_BYTES = 2_000_000
CONVERSATIONS, MESSAGES = 1_000, 200
CHAT, ANTHROPIC, TEXT = "/v1/chat/completions", "/v1/messages", "/completion"
WORDS = ("story", "alpha", '"quoted"', "line\n", "über", "f(x) {}", "longer-than-most-words")
Json = dict[str, object]


class Bare(msgspec.Struct):
    """What a call needs without an index."""

    model: str | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of body."""

    name: str
    path: str
    body: bytes


def prose(size: int, dice: random.Random) -> str:
    words: list[str] = []
    while size > 0:
        words.append(dice.choice(WORDS))
        size -= len(words[-1]) + 1
    return " ".join(words)


def chat(count: int, dice: random.Random, *, blocks: bool = False) -> Json:
    texts = [prose(BODY_BYTES // count, dice) for _ in range(count)]
    contents: list[object] = [[{"type": "text", "text": text}] for text in texts] if blocks else [*texts]
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": one} for n, one in enumerate(contents)]}


def cases() -> list[Case]:
    dice = random.Random(1)

    def made(name: str, path: str, body: Json) -> Case:
        return Case(name, path, json.dumps({"model": "alpha", "stream": True, **body}).encode())

    return [
        made("chat, 500 messages", CHAT, chat(500, dice)),
        made("chat, 5,000 messages", CHAT, chat(5_000, dice)),
        made("messages of blocks, 500", ANTHROPIC, chat(500, dice, blocks=True)),
        made("text", TEXT, {"prompt": prose(BODY_BYTES, dice)}),
        made("tokens", TEXT, {"prompt": [dice.randrange(150_000) for _ in range(BODY_BYTES // 8)]}),
    ]


def best_ms(act: Callable[[], object], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return best * 1000


def chained(case: Case) -> Chain:
    ask = parse_body(case.body)
    assert isinstance(ask, Ask)
    assert ask.fields is not None
    chain = chain_of(case.path, ask.fields)
    assert chain is not None
    return chain


def bare(body: bytes, decoder: msgspec.json.Decoder[Bare]) -> Bare:
    """As a call was parsed before there was an index."""
    if not body.isascii():
        body.decode()
    return decoder.decode(body)


def row(case: Case, repeat: int) -> Json:
    decoder = msgspec.json.Decoder(Bare)
    ask = parse_body(case.body)
    assert isinstance(ask, Ask)
    fields = ask.fields
    assert fields is not None
    alone = best_ms(lambda: bare(case.body, decoder), repeat)
    parsed = best_ms(lambda: parse_body(case.body), repeat)
    chain = best_ms(lambda: chain_of(case.path, fields), repeat)
    size = len(case.body)
    return {
        "row": case.name,
        "bytes": size,
        "links": len(chained(case).links),
        "bare_ms": round(alone, 3),
        "parse_ms": round(parsed, 3),
        "chain_ms": round(chain, 3),
        "chain_mb_s": round(size / chain / 1000),
        "ratio": round((parsed + chain) / alone, 2),
    }


def finding(repeat: int) -> Json:
    """All begin with the same 100 messages, so that every one has to be compared."""
    index = Index(Limits(CONVERSATIONS))
    same = [{"role": "user", "content": f"message {n}"} for n in range(MESSAGES // 2)]

    def case(number: int, more: int = 0) -> Case:
        own = [{"role": "user", "content": f"{number}: {n}"} for n in range(MESSAGES // 2 + more)]
        return Case("find", CHAT, json.dumps({"model": "alpha", "messages": same + own}).encode())

    for number in range(CONVERSATIONS):
        index.answered("llama/alpha", chained(case(number)), None, 0, 100, 1, None, number)
    turn = case(CONVERSATIONS // 2, more=2)
    chain = chained(turn)
    assert index.find("llama/alpha", chain).links == MESSAGES
    found, parsed = best_ms(lambda: index.find("llama/alpha", chain), repeat), best_ms(lambda: chained(turn), repeat)
    return {
        "row": f"find among {CONVERSATIONS:,} that begin alike",
        "find_ms": round(found, 3),
        "parse_and_chain_ms": round(parsed, 3),
        "ratio": round(found / parsed, 2),
    }


def short_text(number: int) -> str:
    return f"{number}: what is it"


def branching_text(number: int) -> str:
    return "s" * BLOCK_BYTES + short_text(number)


def finding_text(row: str, prompt: Callable[[int], str], repeat: int, *, told: bool = False) -> Json:
    """One of many texts goes on by a page; `told`: they were saved by an earlier process."""
    index = Index(Limits(CONVERSATIONS))

    def of(text: str) -> Chain:
        return chained(Case("find", TEXT, json.dumps({"model": "alpha", "prompt": text}).encode()))

    chains = [of(prompt(number)) for number in range(CONVERSATIONS)]
    if told:
        links = [tuple(link.hex() for link in chain.links) for chain in chains]
        index.kept("llama/alpha", [Kept(f"{n}.kv", one[-1], one, 100, n) for n, one in enumerate(links)])
    else:
        for number, chain in enumerate(chains):
            index.answered("llama/alpha", chain, None, 0, 100, 1, None, number)
    turn = of(prompt(CONVERSATIONS // 2) + " and on" * 300)
    assert index.find("llama/alpha", turn).relation is Relation.EXTENDS
    return {"row": row, "find_ms": round(best_ms(lambda: index.find("llama/alpha", turn), repeat), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    many = f"find among {CONVERSATIONS:,}"
    rows = [*(row(case, args.repeat) for case in cases()), finding(args.repeat)]
    rows += [
        finding_text(f"{many} texts shorter than a block", short_text, args.repeat),
        finding_text(f"{many} texts that share their first block", branching_text, args.repeat),
        finding_text(f"{many} short texts that a manifest tells of", short_text, args.repeat, told=True),
        finding_text(f"{many} texts that a manifest tells of", branching_text, args.repeat, told=True),
    ]
    if args.json:
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
        print(json.dumps({"bench": "index", "machine": machine, "rows": rows}))
        return
    for line in rows:
        print("  ".join(f"{key}={value}" for key, value in line.items()))


if __name__ == "__main__":
    main()
