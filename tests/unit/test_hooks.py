"""Hooks around a load and a release: order, failures, time, and that no shell reads them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from swapper.errors import BackendDown, BackendError, BackendRefused
from workers.backend import Loaded, Owners, Quiesced, Restored, Room, SaveArgs, Saved, TenantState
from workers.hooks import Hooked, Hooks
from workers.pagecache import files_of


class Inner:
    """A backend that writes down what it is asked, where the hooks write, too."""

    def __init__(self, story: Path) -> None:
        self.story = story
        self.fails = False

    def _say(self, word: str) -> None:
        with self.story.open("a") as story:
            story.write(word + "\n")

    async def load(self, tenant: str) -> Loaded:
        self._say(f"load {tenant}")
        if self.fails:
            raise BackendDown("out of memory")
        return Loaded(n_slots=3)

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        self._say(f"release {tenant}")
        if self.fails:
            raise BackendDown("it stays")
        return "it was killed"

    async def start(self) -> None:
        self._say("start")

    async def observe(self) -> Mapping[str, TenantState]:
        return {"s": TenantState.LOADED}

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        return Quiesced(gone=True)

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        return Saved("x", 0, 1, 1, 0.0)

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        return Restored(slot, 7, 0.0)

    async def end_hung(self) -> str | None:
        return "hung"

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        self._say("fenced")

    async def changes(self) -> AsyncIterator[None]:
        yield None

    async def close(self) -> None:
        self._say("close")

    def shelf(self) -> str:
        return "shelf"


@pytest.fixture
def story(tmp_path: Path) -> Path:
    return tmp_path / "story"


def told(story: Path) -> list[str]:
    return story.read_text().split("\n")[:-1] if story.exists() else []


def says(word: str) -> tuple[str, ...]:
    return ("sh", "-c", f'echo "{word} $SWAPPER_HOOK $SWAPPER_TENANT" >> story')


FAILS = ("sh", "-c", "echo the disk is away >&2; exit 3")


async def test_they_run_in_order_around_what_they_are_named_for_and_know_which_and_whose_they_are(story: Path) -> None:
    hooks = Hooks((says("a"), says("b")), (says("c"),), (says("d"),), (says("e"),))
    backend = Hooked(Inner(story), hooks, story.parent)
    assert (await backend.load("s/m")).n_slots == 3
    assert await backend.release("s/m", limit_ms=1) == "it was killed"
    assert told(story) == [
        *("a before_load s/m", "b before_load s/m", "load s/m", "c after_load s/m"),
        *("d before_release s/m", "release s/m", "e after_release s/m"),
    ]


async def test_one_that_fails_before_lets_nothing_happen_and_says_its_last_words(story: Path) -> None:
    backend = Hooked(Inner(story), Hooks((FAILS,), (), (FAILS,)), story.parent)
    with pytest.raises(BackendRefused, match="hook before_load of s/m: sh ended with status 3: the disk is away"):
        await backend.load("s/m")
    with pytest.raises(BackendRefused, match="hook before_release of s/m"):
        await backend.release("s/m", limit_ms=1)
    assert told(story) == []


async def test_one_that_fails_after_a_load_fails_that_and_nothing_stays_loaded(story: Path) -> None:
    backend = Hooked(Inner(story), Hooks(after_load=(FAILS,)), story.parent)
    with pytest.raises(BackendRefused, match="after_load"):
        await backend.load("s/m")
    assert told(story) == ["load s/m", "release s/m"]


async def test_one_that_fails_after_a_release_is_told_with_it(story: Path) -> None:
    backend = Hooked(Inner(story), Hooks(after_release=(FAILS,)), story.parent)
    said = await backend.release("s/m", limit_ms=1)
    assert said == "it was killed; hook after_release of s/m: sh ended with status 3: the disk is away"


async def test_ignored_failures_hold_nothing_up(story: Path) -> None:
    missing = ("/no/such/program",)
    hooks = Hooks((FAILS, missing), (FAILS,), (missing,), (FAILS,), fails=False)
    backend = Hooked(Inner(story), hooks, story.parent)
    await backend.load("s/m")
    assert await backend.release("s/m", limit_ms=1) == "it was killed"
    assert told(story) == ["load s/m", "release s/m"]


async def test_after_what_did_not_happen_comes_no_hook(story: Path) -> None:
    inner = Inner(story)
    inner.fails = True
    backend = Hooked(inner, Hooks(after_load=(says("c"),), after_release=(says("e"),)), story.parent)
    with pytest.raises(BackendError):
        await backend.load("s/m")
    with pytest.raises(BackendError):
        await backend.release("s/m", limit_ms=1)
    assert told(story) == ["load s/m", "release s/m"]


async def test_one_that_takes_too_long_is_killed_with_all_it_started(story: Path) -> None:
    long = ("sh", "-c", "sleep 1000 & echo $! > child; echo waiting; wait")
    backend = Hooked(Inner(story), Hooks((long,), timeout_ms=3_000), story.parent)
    with pytest.raises(BackendRefused, match=r"sh was killed after 3 s: waiting"):
        await backend.load("s/m")
    assert not alive(int((story.parent / "child").read_text()))


async def test_one_of_another_user_that_takes_too_long_is_told_as_what_it_is(
    story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, start = os.killpg, asyncio.create_subprocess_exec
    refused: list[int] = []
    started: list[asyncio.subprocess.Process] = []

    async def starts(*argv: str, **how: Any) -> asyncio.subprocess.Process:  # noqa: ANN401  # noqa: ANN401
        started.append(await start(*argv, **how))
        return started[-1]

    def may_not(group: int, number: int) -> None:
        refused.append(group)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", may_not)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starts)
    backend = Hooked(Inner(story), Hooks((("sleep", "1000"),), timeout_ms=50), story.parent)
    try:
        with pytest.raises(BackendRefused, match=r"sleep did not end in 0\.05 s and cannot be killed"):
            await backend.load("s/m")
    finally:
        for group in refused:
            kill(group, signal.SIGKILL)
        for process in started:
            await process.wait()


async def test_what_one_leaves_in_the_background_ends_with_it(story: Path) -> None:
    leaves = ("sh", "-c", "sleep 1000 & echo $! > child")
    backend = Hooked(Inner(story), Hooks((leaves,), timeout_ms=60_000), story.parent)
    await backend.load("s/m")
    assert not alive(int((story.parent / "child").read_text()))


async def test_no_shell_reads_them(story: Path) -> None:
    backend = Hooked(Inner(story), Hooks((("printf", "%s", "$(touch pwned); a && b"),)), story.parent)
    await backend.load("s/m")
    assert not (story.parent / "pwned").exists()


async def test_much_output_holds_none_up(story: Path) -> None:
    backend = Hooked(Inner(story), Hooks((("head", "-c", "3000000", "/dev/zero"),)), story.parent)
    await backend.load("s/m")
    assert told(story) == ["load s/m"]


async def test_whoever_lost_its_claim_runs_none(story: Path) -> None:
    async def fence() -> None:
        raise BackendDown("another agent has the claim")

    backend = Hooked(Inner(story), Hooks((says("a"),)), story.parent)
    backend.fenced(fence)
    with pytest.raises(BackendDown):
        await backend.load("s/m")
    assert told(story) == ["fenced"]


async def test_everything_else_is_the_backends(story: Path) -> None:
    backend = Hooked(Inner(story), Hooks((says("a"),)), story.parent)
    assert await backend.observe() == {"s": TenantState.LOADED}
    assert (await backend.quiesce("s")).gone
    assert (await backend.save("s", SaveArgs(0, "x"))).snapshot == "x"
    assert (await backend.restore("s", "x", 1)).tokens == 7
    assert await backend.end_hung() == "hung"
    assert [one async for one in backend.changes()] == [None]
    assert backend.shelf() == "shelf"
    assert backend.processes() == Owners()
    assert await backend.files("s") == (), "one that knows no files has none"


async def test_the_files_that_a_tenant_loads_are_the_backends_with_hooks_too(story: Path) -> None:
    class Loads(Inner):
        async def files(self, tenant: str) -> tuple[Path, ...]:
            return (self.story.parent / f"{tenant.partition('/')[2]}.gguf",)

    backend = Hooked(Loads(story), Hooks((says("a"),)), story.parent)
    assert await files_of({"s": backend}, "s/m") == (story.parent / "m.gguf",)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
