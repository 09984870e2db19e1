"""The store on a Redis or Valkey server, through redis.asyncio: connections, streams, errors.

Invariant: nothing is sent twice (no silent retries: a commit that landed and was sent again would read as a
conflict), and whatever goes wrong with the server becomes StoreDown with a sentence. Calls share a pool with a
timeout; blocking reads have connections of their own, without one, bounded from outside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self, cast

import redis.asyncio as aioredis
from redis import exceptions as rex
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from swapper.core.orders import Report
from swapper.core.types import Lease, Swap
from swapper.errors import ConfigError, StoreDown
from swapper.store import codec
from swapper.store.functions import LIBRARY, Functions, Reply, library_source
from swapper.store.protocol import Inputs, StoredCommand, StoredEvent

CALL_TIMEOUT_S = 5.0
"""How long a call may take before the store counts as down."""
_MARGIN_S = 5.0
_CALLS, _READS = 16, 10_000
_READ_COUNT = 500
_SCHEMES = ("redis://", "rediss://", "unix://")
_TROUBLE = {
    "LOADING": "it is still reading its data from disk",
    "READONLY": "it is a read-only replica",
    "OOM": "it is out of memory (raise maxmemory, keep noeviction)",
    "MISCONF": "it cannot write its data to disk",
    "BUSY": "a script keeps it busy",
    "MASTERDOWN": "it is a replica without its master",
    "CLUSTERDOWN": "its cluster is down",
    "NOREPLICAS": "too few of its replicas are reachable",
    "TRYAGAIN": "its cluster is moving our keys",
    "UNBLOCKED": "it became a replica while we were waiting",
    "NOAUTH": "it asks for a password",
    "WRONGPASS": "it refuses our password",
    "NOPERM": "our user may not do this there",
}
_OPERATIONS = {"finish": "end", "list": "leases"}
"""Functions of the library that are called otherwise in the store's protocol."""
Entry = tuple[str, Mapping[str, str]]


class Client(Protocol):
    """The little of redis.asyncio.Redis that is used; fakeredis' FakeAsyncRedis has it too."""

    async def execute_command(self, *args: str | int) -> Reply:
        """Send one command and return its answer."""
        ...

    async def aclose(self) -> None:
        """Drop the connections."""
        ...


def _to_nobody(_operation: str, _seconds: float) -> None:
    """Nothing is measured."""


class RedisStore(Functions):
    """A Store (store/protocol.py) over two clients: one for calls, one for blocking reads.

    Both decode responses to str. `prefix` holds every key; keep its hash tag. Use `open`; the constructor is for
    clients made elsewhere, and then `load` must be awaited once. `took` hears of each round trip, failed ones
    included: the operation by its name in the protocol, and seconds with the wait for a connection. Reads that wait
    for news are not told of: how long they take says nothing of the server.
    """

    def __init__(self, calls: Client, reads: Client, *, prefix: str = "{swapper}", where: str = "redis") -> None:
        self._calls = calls
        self._reads = reads
        self._prefix = prefix
        self._where = where
        self._turns = asyncio.Semaphore(_CALLS)
        self.took: Callable[[str, float], None] = _to_nobody

    @classmethod
    async def open(cls, url: str, *, prefix: str = "{swapper}") -> Self:
        """Connect, refuse servers older than 7.0, load the library.

        `url` is redis://, rediss:// or unix://. Raises ConfigError (a bad URL, an old server), StoreDown.
        """
        if not url.startswith(_SCHEMES):
            raise ConfigError([f"redis: {without_secret(url)!r} is not a redis://, rediss:// or unix:// address"])
        try:
            calls = _client(url, _CALLS)
            reads = _client(url, _READS)
        except ValueError as error:
            raise ConfigError([f"redis: {without_secret(url)!r}: {error}"]) from error
        store = cls(calls, reads, prefix=prefix, where=without_secret(url))
        try:
            await store.refuse_old()
            await store.load()
        except BaseException:
            await store.close()
            raise
        return store

    async def refuse_old(self) -> None:
        """Raise ConfigError when the server is older than 7.0, which has no functions."""
        info = await self._do("load", "INFO", "server")
        version = str(_info(info).get("redis_version", "0"))
        if int(version.split(".")[0]) < 7:
            raise ConfigError(
                [f"redis: the server at {self._where} is version {version}; swapper needs Redis 7.0 or Valkey 7.2"]
            )

    async def load(self) -> None:
        """Put the library on the server, unless this very text is there already."""
        source = library_source()
        listed = await self._do("load", "FUNCTION", "LIST", "LIBRARYNAME", LIBRARY, "WITHCODE")
        if source not in _flatten(listed):
            await self._do("load", "FUNCTION", "LOAD", "REPLACE", source)

    async def close(self) -> None:
        """Drop the connections."""
        await self._calls.aclose()
        await self._reads.aclose()

    async def _call(self, name: str, *args: str) -> Reply:
        operation = _OPERATIONS.get(name, name)
        command = ("FCALL", f"{LIBRARY}_{name}", 1, self._prefix, *args)
        try:
            return await self._do(operation, *command)
        except rex.ResponseError as error:
            text = str(error)
            if "SWAPPER " in text:
                raise ValueError(text.partition("SWAPPER ")[2]) from error
            if "unction not found" not in text:
                raise
        # The server lost the library (flushed, or replaced by an empty one): nothing ran, so asking again is safe.
        await self.load()
        return await self._do(operation, *command)

    async def _do(self, operation: str, *command: str | int) -> Reply:
        began = time.perf_counter()
        try:
            with _as_store_down(self._where):
                # The pool is unfair and raises when it is empty; the semaphore lets callers in by arrival.
                # The time limit is ours: redis-py's own uses asyncio.wait_for, which swallows a cancellation on 3.11.
                async with self._turns, asyncio.timeout(CALL_TIMEOUT_S):
                    return await self._calls.execute_command(*command)
        finally:
            self.took(operation, time.perf_counter() - began)

    async def lease(self, lease_id: str) -> Lease | None:
        """One lease, final ones included while they are retained."""
        flat = await self._do("lease", "HGETALL", self._key("lease", lease_id))
        return codec.lease(flat) if flat else None

    async def position(self, lease_id: str) -> int | None:
        """1 for the head of the queue in (class rank, seq) order; None when it does not wait."""
        rank = await self._do("position", "ZRANK", self._key("queue"), lease_id)
        return None if rank is None else int(rank) + 1

    async def swap(self, swap_id: str) -> Swap | None:
        """One swap, running or retained."""
        text = await self._do("swap", "HGET", self._key("swap", swap_id), "doc")
        return codec.swap(text) if text else None

    async def noted(self, executor: str) -> str | None:
        """What was noted last of an executor; None where nothing was."""
        return await self._do("noted", "HGET", self._key("agent", executor), "note")

    async def report(self, *reports: Report) -> None:
        """Tell the coordinator, in this order, in one write."""
        await self._tell("report", "r", codec.encode(reports))

    async def wake(self) -> None:
        """Make the coordinator look again."""
        await self._tell("wake", "w", "1")

    async def _tell(self, operation: str, field: str, value: str) -> None:
        await self._do(operation, "XADD", self._key("inputs"), "MAXLEN", "~", "10000", "*", field, value)

    async def outbox(self, executor: str, *, after: str, block_ms: int) -> tuple[StoredCommand, ...]:
        """Commands for one executor after the id given, at most 500; `0` = from the start of what is retained.

        An id that the stream never reached is of a store that lost it since (an older copy, whose clock may lie behind
        the newest id): what was read says nothing then, and all that is retained is given.
        """
        key = self._key("out", executor)
        entries = await self._stream("outbox", key, after, block_ms, _READ_COUNT)
        if not entries and _id(await self._tail("outbox", key)) < _id(after):
            entries = await self._stream("outbox", key, "0", 0, _READ_COUNT)
        return tuple(StoredCommand(at, codec.command(fields["c"])) for at, fields in entries)

    async def inputs(self, *, after: str, block_ms: int) -> Inputs:
        """Reports and wake-ups after the id given, at most 500; `$` = from now on."""
        key = self._key("inputs")
        last = await self._tail("inputs", key) if after == "$" else after
        entries = await self._stream("inputs", key, last, block_ms, _READ_COUNT)
        reports = tuple(report for _, fields in entries if "r" in fields for report in codec.reports(fields["r"]))
        return Inputs(entries[-1][0] if entries else last, reports, any("w" in fields for _, fields in entries))

    async def events(self, *, after: str, limit: int, block_ms: int) -> tuple[StoredEvent, ...]:
        """The log after the id given; `0` = from the oldest retained, `$` = only what is new."""
        entries = await self._stream("events", self._key("events"), after, block_ms, limit)
        return tuple(StoredEvent(at, fields["t"], fields["s"], int(fields["v"]), fields["d"]) for at, fields in entries)

    async def _tail(self, operation: str, key: str) -> str:
        newest = _entries(await self._do(operation, "XREVRANGE", key, "+", "-", "COUNT", 1))
        return newest[0][0] if newest else "0-0"

    async def _stream(self, operation: str, key: str, after: str, block_ms: int, count: int) -> list[Entry]:
        if block_ms <= 0:
            return _one_stream(await self._do(operation, "XREAD", "COUNT", count, "STREAMS", key, after))
        with _as_store_down(self._where):
            async with asyncio.timeout(block_ms / 1000 + _MARGIN_S):
                answer = await self._reads.execute_command(
                    "XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", key, after
                )
        return _one_stream(answer)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))


def _id(text: str) -> tuple[int, int]:
    ms, _, n = text.partition("-")
    return int(ms), int(n or 0)


def without_secret(url: str) -> str:
    """The address without its user and password, fit for a log line."""
    scheme, mark, rest = url.partition("://")
    path_start = rest.find("/") if "/" in rest else len(rest)
    authority, path = rest[:path_start], rest[path_start:]
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{path}"


@contextmanager
def _still_cancelled() -> Generator[None]:
    """Who was cancelled meanwhile ends: redis-py loses a cancellation that comes while a connection is set up."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


@contextmanager
def _as_store_down(where: str) -> Generator[None]:
    try:
        with _still_cancelled():
            yield
    except (TimeoutError, rex.TimeoutError) as error:
        raise StoreDown(f"the store at {where} did not answer in time") from error
    except (rex.ConnectionError, rex.InvalidResponse, rex.ResponseError, OSError) as error:
        text = str(error)
        for code, meaning in _TROUBLE.items():
            if text.startswith(code) or isinstance(error, _CLASSES.get(code, ())):
                raise StoreDown(f"the store at {where} cannot serve us: {meaning} ({text})") from error
        if isinstance(error, rex.ResponseError):
            raise
        raise StoreDown(f"the store at {where} is not reachable: {text or type(error).__name__}") from error


_CLASSES: dict[str, tuple[type[Exception], ...]] = {
    "LOADING": (rex.BusyLoadingError,),
    "READONLY": (rex.ReadOnlyError,),
    "OOM": (rex.OutOfMemoryError,),
    "NOAUTH": (rex.AuthenticationError,),
    "NOPERM": (rex.NoPermissionError,),
    "MASTERDOWN": (rex.MasterDownError,),
    "CLUSTERDOWN": (rex.ClusterDownError,),
    "TRYAGAIN": (rex.TryAgainError,),
}


def _client(url: str, connections: int) -> Client:
    made = cast("Any", aioredis.Redis).from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=CALL_TIMEOUT_S,
        max_connections=connections,
        decode_responses=True,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
    )
    return cast("Client", made)


def _info(answer: Reply) -> Mapping[str, object]:
    if isinstance(answer, Mapping):
        return cast(Mapping[str, object], answer)
    lines = str(answer).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _flatten(answer: Reply) -> list[object]:
    if isinstance(answer, Mapping):
        return _flatten(list(cast(Mapping[object, object], answer).items()))
    if isinstance(answer, list | tuple):
        return [leaf for part in cast(list[object], answer) for leaf in _flatten(part)]
    return [answer]


def _one_stream(answer: Reply) -> list[Entry]:
    """The entries of an XREAD of one stream: redis-py gives a dict (RESP3 shape) or a list of pairs (RESP2)."""
    if not answer:
        return []
    if isinstance(answer, Mapping):
        (found,) = cast(Mapping[str, Any], answer).values()
    else:
        (found,) = (pair[1] for pair in answer)
    if len(found) == 1 and found[0] and not isinstance(found[0][0], str):
        found = found[0]
    return _entries(found)


def _entries(rows: Reply) -> list[Entry]:
    return [(row[0], codec.pairs(row[1])) for row in rows if row[1] is not None]
