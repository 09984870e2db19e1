"""A store in trouble: every failure of the server is StoreDown with a sentence, and nothing is sent twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import psutil
import pytest
import redis.exceptions as rex
from fakeredis import FakeServer

from swapper.errors import ConfigError, StoreDown
from swapper.store import embedded
from swapper.store.embedded import Embedded
from swapper.store.functions import LIBRARY
from swapper.store.redis import Client, RedisStore, without_secret
from tests.store.acts import NOW, ask, draw
from tests.support.api import fake_store


class Scripted:
    """A client that answers what it is told to: an error to raise, or a value."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[object, ...]] = []

    async def execute_command(self, *args: object) -> object:
        self.sent.append(args)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def aclose(self) -> None:
        """Nothing to drop."""


def scripted(*answers: object) -> tuple[RedisStore, Scripted]:
    client = Scripted(*answers)
    return RedisStore(cast("Client", client), cast("Client", client), where="there"), client


@pytest.fixture
async def lone(folder: Path) -> AsyncIterator[tuple[RedisStore, Embedded]]:
    """A store with a server of its own, to be hurt."""
    found = await embedded.start(folder)
    store = await RedisStore.open(found.url)
    yield store, found
    await store.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (rex.ConnectionError("Connection refused"), "the store at there is not reachable: Connection refused"),
        (ConnectionResetError(), "the store at there is not reachable: ConnectionResetError"),
        (rex.TimeoutError("Timeout reading"), "the store at there did not answer in time"),
        (rex.BusyLoadingError("Redis is loading"), "still reading its data"),
        (rex.ReadOnlyError("You can't write"), "read-only replica"),
        (rex.OutOfMemoryError("command not allowed"), "out of memory"),
        (rex.ResponseError("MISCONF Errors writing to the AOF file"), "cannot write its data to disk"),
        (rex.ResponseError("BUSY Redis is busy running a script"), "a script keeps it busy"),
        (
            rex.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
            "became a replica",
        ),
        (rex.AuthenticationError("invalid username-password pair"), "asks for a password|not reachable"),
        (rex.NoPermissionError("this user has no permissions"), "our user may not do this"),
    ],
)
async def test_trouble_is_told_in_a_sentence_and_nothing_is_sent_again(error: Exception, words: str) -> None:
    store, client = scripted(error)
    with pytest.raises(StoreDown, match=words):
        await store.raise_token(1)
    assert len(client.sent) == 1


async def test_a_bug_of_ours_is_not_dressed_up_as_trouble() -> None:
    store, _ = scripted(rex.ResponseError("ERR wrong number of arguments"))
    with pytest.raises(rex.ResponseError):
        await store.raise_token(1)


@pytest.mark.parametrize("shape", ["list", "dict", "nested dict"])
async def test_entries_of_a_stream_are_read_in_every_shape_a_client_gives(shape: str) -> None:
    entries = [("1-0", {"w": "1"}), ("2-0", {"w": "1"})]
    answers = {"list": [["key", entries]], "dict": {"key": entries}, "nested dict": {"key": [entries]}}
    store, _ = scripted(answers[shape])
    assert (await store.inputs(after="0", block_ms=0)).last == "2-0"


async def test_a_killed_server_is_store_down_for_callers_and_for_waiting_readers(
    lone: tuple[RedisStore, Embedded],
) -> None:
    store, found = lone
    waiting = asyncio.create_task(store.inputs(after="0", block_ms=60_000))
    await store.read()
    os.kill(found.pid, signal.SIGKILL)
    with pytest.raises(StoreDown):
        await waiting
    with pytest.raises(StoreDown, match="not reachable"):
        await store.read()


async def test_a_server_that_hangs_is_store_down_within_the_call_timeout(
    lone: tuple[RedisStore, Embedded], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = lone
    monkeypatch.setattr("swapper.store.redis.CALL_TIMEOUT_S", 0.2)
    hasty = await RedisStore.open(found.url)
    os.kill(found.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreDown, match="did not answer in time"):
            await hasty.wake()
    finally:
        os.kill(found.pid, signal.SIGCONT)
    await hasty.wake()
    await hasty.close()


async def test_a_lost_library_is_loaded_again(served: RedisStore) -> None:
    await ask(served, "a")
    await served._do("raw", "FUNCTION", "DELETE", LIBRARY)  # pyright: ignore[reportPrivateUsage]
    assert (await served.read(now_ms=NOW)).queued == 1


async def test_a_read_longer_than_the_call_timeout_is_no_timeout(
    lone: tuple[RedisStore, Embedded], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = lone
    monkeypatch.setattr("swapper.store.redis.CALL_TIMEOUT_S", 0.1)
    hasty = await RedisStore.open(found.url)
    assert await hasty.events(after="0", limit=1, block_ms=400) == ()
    await hasty.close()


async def test_two_prefixes_on_one_server_do_not_meet(lone: tuple[RedisStore, Embedded]) -> None:
    store, found = lone
    other = await RedisStore.open(found.url, prefix="{other}")
    await ask(store, "a")
    assert await other.lease("a") is None
    assert (await other.read()).queued == 0
    await other.close()


async def test_many_callers_at_once_are_all_served(lone: tuple[RedisStore, Embedded]) -> None:
    store, found = lone
    drawn = await asyncio.gather(*(draw(store, None) for _ in range(300)))
    assert len(set(drawn)) == 300
    lines = [line for line in psutil.Process(found.pid).net_connections("unix") if line.raddr or line.laddr]
    assert len(lines) < 60


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", ""])
async def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"not a redis://, rediss:// or unix:// address"):
        await RedisStore.open(url)


async def test_an_old_server_is_refused() -> None:
    store, _ = scripted("# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\n")
    with pytest.raises(ConfigError, match=r"version 6\.2\.14; swapper needs Redis 7\.0"):
        await store.refuse_old()


async def test_nobody_there_is_store_down(tmp_path: Path) -> None:
    with pytest.raises(StoreDown, match="not reachable"):
        await RedisStore.open(f"unix://{tmp_path}/none")


def test_a_password_never_shows() -> None:
    assert without_secret("redis://ann:s3cret@host:6379/2") == "redis://host:6379/2"
    assert without_secret("unix://ann:s3cret@/run/redis.sock") == "unix:///run/redis.sock"
    assert without_secret("redis://host") == "redis://host"


async def test_who_is_cancelled_ends_at_whatever_moment_of_a_call_it_comes() -> None:
    """Also while the connection is made: a serve that is stopped would wait for ever for one that went on."""
    server = FakeServer()
    ended: list[object] = []
    for turns in range(1, 12):
        store = await fake_store(server)

        async def asked(store: RedisStore = store) -> None:
            await store.lease("ls_1")
            await asyncio.Event().wait()

        task = asyncio.create_task(asked())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(5):
            ended += await asyncio.gather(task, return_exceptions=True)
        await store.close()
    assert [type(one) for one in ended] == [asyncio.CancelledError] * 11
