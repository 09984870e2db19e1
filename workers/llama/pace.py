"""How fast a server reads, saves and restores, as it was measured: whether a snapshot pays.

Invariant: nothing is said before enough tokens were measured both ways, and what was measured long ago counts no more:
a disk may have been busy that day. Pure; time is an argument.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from swapper.core.conversations import Costs

_ENOUGH = 2_000
"""So many tokens at least, of small ones the answer's way takes most of the time."""
_FRESH_MS = 24 * 3_600_000


@dataclass(slots=True)
class _Work:
    """Tokens and the ms they took; older work counts half of what came after it."""

    tokens: float = 0.0
    ms: float = 0.0
    at_ms: int = 0

    def add(self, tokens: int, ms: float, now_ms: int) -> None:
        self.tokens, self.ms, self.at_ms = self.tokens / 2 + tokens, self.ms / 2 + ms, now_ms

    def per_1000(self, now_ms: int) -> float | None:
        known = self.tokens >= _ENOUGH and now_ms - self.at_ms < _FRESH_MS
        return self.ms * 1000 / self.tokens if known else None


class Paces:
    """Of each model of one server, by the name it is called by."""

    def __init__(self) -> None:
        self._saved: defaultdict[str, _Work] = defaultdict(_Work)
        self._restored: defaultdict[str, _Work] = defaultdict(_Work)

    def saved(self, name: str, tokens: int, ms: float, now_ms: int) -> None:
        """A save of so many tokens took so long."""
        self._saved[name].add(tokens, ms, now_ms)

    def restored(self, name: str, tokens: int, ms: float, now_ms: int) -> None:
        """A restore did."""
        self._restored[name].add(tokens, ms, now_ms)

    def costs(self, name: str, prompt_tokens: int, prompt_s: float, now_ms: int) -> Costs | None:
        """Beside what the model's own counters say of the prompts it read; None while too little was measured.

        Where nothing was restored yet, that is taken to take as long as a save.
        """
        save = self._saved[name].per_1000(now_ms)
        if save is None or prompt_tokens < _ENOUGH:
            return None
        restore = self._restored[name].per_1000(now_ms)
        return Costs(prompt_s * 1_000_000 / prompt_tokens, save + (save if restore is None else restore))
