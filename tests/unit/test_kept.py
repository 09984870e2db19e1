"""The keeper of the embedded store: how it starts it again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from swapper.store import embedded, kept
from swapper.store.embedded import Embedded
from swapper.store.kept import Kept


async def test_a_store_that_ends_as_soon_as_it_was_started_again_is_given_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, begun, done = Kept(tmp_path), asyncio.Semaphore(0), asyncio.Event()
    first, start = await keeper.start(), keeper.start

    async def noted() -> Embedded:
        begun.release()
        server = await start()
        done.set()
        return server

    monkeypatch.setattr(kept, "RETRY_S", 3600)
    monkeypatch.setattr(keeper, "start", noted)
    keeping = asyncio.create_task(keeper.keep())
    psutil.Process(first.pid).kill()
    await done.wait()
    assert await embedded.stop(tmp_path), "it was started again"
    await begun.acquire()
    for _ in range(100):
        await asyncio.sleep(0)
    assert begun.locked(), "and not a second time yet"
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await keeper.stop()
