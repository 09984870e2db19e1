"""`swapper serve` that stops itself (SIGSTOP) at its seams, so that a test may kill there and knows where it was.

    python -m tests.support.held FOLDER serve -c swapper.yaml

The shipped program; only these calls are wrapped: every commit, every verb an agent carries out, the request for a
save, when all that comes before it is done, and what a gateway does about a conversation: `before recall` (its request
is sent again), `before replay`, `before placed` (the word that one came back from disk), and `after` each. The lines of
FOLDER/hold are the points it stops at (patterns, `*` is any text): `before commit close`, `after commit grant`,
`before save`, `asking save` ... Where it stopped stands in the last line of FOLDER/points. Without that file it stops
nowhere. `unheard commit ...` is a commit that landed and whose answer is then lost.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from swapper.core.commit import Commit, Committed, Conflict
from swapper.core.orders import Command
from swapper.core.types import LeaseState
from swapper.errors import StoreDown
from swapper.gateway.talks import Talks
from swapper.store.redis import RedisStore
from workers.llama.http import RouterHttp, SavedSlot
from workers.verbs import Outcome, Verbs

T = TypeVar("T")


def named(commit: Commit) -> str:
    """What a commit is about, in one word: the step its swap then stands at, `grant`, `end`, or what else it is."""
    if any(change.state is LeaseState.GRANTED for change in commit.leases):
        return "grant"
    if commit.conversations and not commit.commands:
        return "proof"
    stages = [card.swap.stage for card in commit.cards if card.swap is not None]
    if stages:
        return str(stages[0])
    return "end" if commit.swaps else "other"


class _Holds:
    def __init__(self, folder: Path) -> None:
        self._patterns = folder / "hold"
        self._points = folder / "points"

    def at(self, point: str) -> bool:
        """Stop here if the test wants it, until SIGCONT; False where it does not."""
        try:
            patterns = self._patterns.read_text().splitlines()
        except FileNotFoundError:
            return False
        wanted = any(fnmatchcase(point, pattern) for pattern in patterns)
        if wanted:
            with self._points.open("a") as points:
                points.write(f"{point}\n")
            os.kill(os.getpid(), signal.SIGSTOP)
        return wanted


def _wrap(holds: _Holds) -> None:
    write: Callable[..., Awaitable[Committed | Conflict]] = RedisStore.commit
    run = Verbs.run
    save = RouterHttp.save

    async def held_commit(self: RedisStore, commit: Commit, *, now_ms: int | None = None) -> Committed | Conflict:
        name = named(commit)
        holds.at(f"before commit {name}")
        answer = await write(self, commit, now_ms=now_ms)
        if holds.at(f"unheard commit {name}"):
            raise StoreDown("the connection broke before the answer came")
        holds.at(f"after commit {name}")
        return answer

    async def held_run(self: Verbs, command: Command) -> Outcome:
        holds.at(f"before {command.verb}")
        outcome = await run(self, command)
        holds.at(f"after {command.verb}")
        return outcome

    async def held_save(self: RouterHttp, model: str, slot: int, name: str) -> SavedSlot:
        holds.at("asking save")
        return await save(self, model, slot, name)

    recall, replay, placed = Talks.recall, Talks._replay, Talks.placed  # pyright: ignore[reportPrivateUsage]

    async def held_recall(self: Talks, command: Command) -> tuple[Mapping[str, object] | None, str | None]:
        holds.at("before recall")
        found = await recall(self, command)
        holds.at("after recall")
        return found

    async def held_replay(self: Talks, tenant: str, snapshot: str, name: str) -> None:
        holds.at("before replay")
        await replay(self, tenant, snapshot, name)
        holds.at("after replay")

    def held_placed(self: Talks, tenant: str, args: Mapping[str, object]) -> None:
        holds.at("before placed")
        placed(self, tenant, args)
        holds.at("after placed")

    RedisStore.commit = held_commit
    RouterHttp.save = held_save
    Verbs.run = held_run
    Talks.recall, Talks._replay, Talks.placed = held_recall, held_replay, held_placed  # pyright: ignore[reportPrivateUsage]


if __name__ == "__main__":
    folder = sys.argv.pop(1)
    _wrap(_Holds(Path(folder)))
    from swapper.__main__ import main

    main()
