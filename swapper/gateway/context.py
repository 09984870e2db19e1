"""What the gateway's handlers are wired with: where models live, the limits, and the parts they share.

Invariant: values only; what changes here is the count of buffered bytes, whose turn it is to spend the processor on a
large body, and what is known of the routers' children.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapper.gateway.child import Children
from swapper.gateway.filters import Filter
from swapper.gateway.links import Links
from swapper.gateway.listed import ModelInfo
from swapper.gateway.work import Sockets

if TYPE_CHECKING:
    import aiohttp

    from swapper.gateway.admission import Admission
    from swapper.gateway.member import Member
    from swapper.gateway.talks import Talks


INFLATED_AT_ONCE = 2
"""So many threads undo compressed bodies, a piece of one body at a time: the others, and the disk's, stay free."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tenant's calls go: the server's base `url`, the name it knows the model by, its api key.

    `router`: a llama-server router, told with each request never to load a model by itself. `slots`: a llama-server,
    whose conversations are followed. `several`: the server has other tenants' models as well, and loads what is named.
    `others`: names that mean another model of the same server, as it calls that.
    """

    tenant: str
    url: str
    model: str
    api_key: str | None = None
    router: bool = True
    slots: bool = True
    several: bool = True
    others: Mapping[str, str] = field(default_factory=dict[str, str])

    def called(self, name: str) -> str:
        """What the server calls the model that a client calls `name`."""
        return self.others.get(name, self.model)

    def auth(self) -> dict[str, str]:
        """The headers that let us in."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True, slots=True)
class Limits:
    """`gateway` of the configuration: ms and bytes. `retry_ms` bounds the tries before the first byte.

    `body_pause_ms` bounds how long no byte of an unfinished body comes: it holds its share of the budget meanwhile.
    """

    max_wait_ms: int = 600_000
    keepalive_ms: int = 10_000
    keepalive_comments: bool = False
    body_limit: int = 64 << 20
    body_budget: int = 512 << 20
    retry_ms: int = 30_000
    body_pause_ms: int = 60_000


class Budget:
    """Bytes of bodies held for calls that have no answer yet or only its beginning, all together at most `limit`."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Reserve `size` bytes; False when they do not fit (nothing is reserved then)."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Return what was taken."""
        self.used -= size


class Held:
    """A body and its share of the budget, until the answer begins, or has passed where the body is kept for that."""

    __slots__ = ("_budget", "body", "size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = 0
        self.body = b""

    def add(self, size: int) -> bool:
        """Take `size` more bytes of the budget; False when it is spent."""
        if not self._budget.take(size):
            return False
        self.size += size
        return True

    def sent(self, *, wanted: int) -> bool:
        """The body is sent. Whether the call may go on holding `wanted` bytes of it: in half of the budget at most.

        The other half is for calls that wait.
        """
        self.body = b""
        kept = 0 < wanted <= self.size and self._budget.used <= self._budget.limit // 2
        self._budget.give(self.size - (wanted if kept else 0))
        self.size = wanted if kept else 0
        return kept

    def release(self) -> None:
        """The body is needed no more. Safe to repeat."""
        self._budget.give(self.size)
        self.size = 0
        self.body = b""


LEFT = 499
"""The code a call is counted under whose client left before its answer."""


def _to_nobody(_tenant: str, _code: int, _waited_ms: int) -> None:
    """Nothing is counted."""


@dataclass(frozen=True, slots=True)
class Why:
    """What a model is waited for, in a sentence ("": nobody can tell), and ms until it may be there, if known."""

    text: str = ""
    there_in_ms: int | None = None


async def _nobody_says(_tenant: str) -> Why:
    return Why()


@dataclass(slots=True)
class GatewayContext:
    """Everything a handler needs. `names` maps every name a client may use to a tenant id.

    `filters`: what is changed in the bodies of calls, by the name that is called.
    `links` take calls to the servers, `session` what the gateway itself asks them.
    `told` hears of each call's end: the tenant, the HTTP status that went out (LEFT: none did), ms spent waiting.
    `why` tells of a tenant what it is waited for (raises StoreDown).
    `contexts`: tokens a call may have, by tenant and model, as servers tell that while they run; `inputs`: likewise
    what a model takes.
    """

    names: Mapping[str, str]
    targets: Mapping[str, Target]
    models: tuple[ModelInfo, ...]
    limits: Limits
    admission: Admission
    member: Member
    session: aiohttp.ClientSession
    links: Links = field(default_factory=Links)
    told: Callable[[str, int, int], None] = _to_nobody
    why: Callable[[str], Awaitable[Why]] = _nobody_says
    contexts: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    inputs: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict[str, Mapping[str, Sequence[str]]])
    filters: Mapping[str, Filter] = field(default_factory=dict[str, Filter])
    budget: Budget = field(init=False)
    inflating: asyncio.Semaphore = field(init=False)
    parsing: asyncio.Semaphore = field(init=False)
    children: Children = field(init=False)
    sockets: Sockets = field(init=False)

    @property
    def talks(self) -> Talks:
        """The conversations of this process."""
        return self.member.talks

    def __post_init__(self) -> None:
        """One budget and the same turns for all calls, one memory of where they go."""
        self.budget = Budget(self.limits.body_budget)
        self.inflating = asyncio.Semaphore(INFLATED_AT_ONCE)
        self.parsing = asyncio.Semaphore(1)
        self.children = Children(self.session)
        self.sockets = Sockets(self.admission)
        self.member.talks.attach(self)
