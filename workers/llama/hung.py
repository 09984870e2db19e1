"""Signs of life of a server's processes: who lives and shows none is found here; ending it is for others.

Invariant: silence alone proves nothing. A model that reads a long prompt answers nobody for the whole batch, and we may
have been stopped ourselves: silent is who was asked at several looks and answered at none, and, of a model, who used no
CPU time between them. Reads /proc and asks `GET /health`, which wakes nobody; changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from workers.llama.child import Child
from workers.llama.http import ServerHttp

SILENT_S = 5.0
"""After so long without a sign of life a model counts as not answering."""
HUNG_S = 20.0
"""After so long a model that is ours is ended: it answers `/health` within ms, at whatever work."""
ROUTER_HUNG_S = 30.0
"""The same for a router, which answers `/models` at whatever work."""
_LOOKS = 4
"""So many looks at least, however long they took: between two of them we may have been stopped."""
_ASK_S = 2.0


@dataclass(slots=True)
class Silence:
    """Since when there was no sign of life, s of the loop's clock, and how often it was looked for."""

    since: float | None = None
    looks: int = 0

    def looked(self) -> None:
        """A look began; `heard` takes it back."""
        self.looks += 1
        if self.since is None:
            self.since = _now()

    def heard(self) -> None:
        """There was one."""
        self.since, self.looks = None, 0

    def lasts(self, limit_s: float, looks: int = _LOOKS) -> bool:
        """Whether there was none for so long, at so many looks."""
        return self.since is not None and self.looks >= looks and _now() - self.since >= limit_s


@dataclass(slots=True)
class _Vital:
    process: Child
    ticks: int
    silence: Silence = field(default_factory=Silence)


class Vitals:
    """The processes of models, by name, as the looks found them."""

    def __init__(self) -> None:
        self._seen: dict[str, _Vital] = {}

    async def look(self, name: str, process: Child, url: str) -> None:
        """Look at the process of a model that is loaded; one that used no CPU time since the last look is asked."""
        ticks, vital = process.ticks(), self._seen.get(name)
        if vital is None or (vital.process, vital.ticks) != (process, ticks):
            self._seen[name] = _Vital(process, ticks)
            return
        async with ServerHttp(url) as server:
            silent = await server.silent(_ASK_S)
        (vital.silence.looked if silent else vital.silence.heard)()

    def forget(self, *, but: set[str]) -> None:
        """All others are not loaded (any more)."""
        self._seen = {name: vital for name, vital in self._seen.items() if name in but}

    def silent(self, name: str) -> bool:
        """Whether it has not answered for a while."""
        vital = self._seen.get(name)
        return vital is not None and vital.silence.lasts(SILENT_S, looks=2)

    def living(self) -> dict[str, Child]:
        """The processes that were there at the last look and still are, by the name of their model."""
        return {name: one.process for name, one in self._seen.items() if one.process.alive()}

    def hung(self) -> dict[str, Child]:
        """Those without a sign of life for as long as nothing alive is."""
        return {name: one.process for name, one in self._seen.items() if one.silence.lasts(HUNG_S)}


def _now() -> float:
    return asyncio.get_running_loop().time()
