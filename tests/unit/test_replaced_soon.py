"""What is saved while its conversation stays in the server replaces the one before soon, and the budget counts it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_router_keeping import MED, digest, save
from workers.llama import keeping
from workers.llama.keeping import Keeper
from workers.llama.slots import Keep, SlotFolder


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


@pytest.fixture
async def keeper(folder: SlotFolder, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(keeping, "SETTLE_S", 0.0)
    keeper = Keeper(folder, Keep(bytes=250), lambda: 1)
    yield keeper
    await keeper.close()


def there(folder: SlotFolder) -> set[str]:
    return {manifest.snapshot for manifest in folder.manifests()}


async def beside(keeper: Keeper, name: str, *, tokens: int = 50, replaces: str | None = None, used_ms: int = 1) -> None:
    manifest = await save(keeper, name, tokens=tokens, restored=replaces)
    keeper.folder.write(replace(manifest, used_ms=used_ms))
    keeper.replace_soon(MED, name)


async def test_it_goes_once_the_new_one_is_on_the_disk_though_the_model_serves_on(
    keeper: Keeper, folder: SlotFolder
) -> None:
    await save(keeper, "came.kv")
    await beside(keeper, "p1.kv", replaces="came.kv")
    await beside(keeper, "p2.kv", tokens=60, replaces="p1.kv")
    await keeper.close()
    assert there(folder) == {"p2.kv"}
    assert digest(folder, "p2.kv") is not None


async def test_one_that_has_fewer_tokens_replaces_nothing_until_it_has_more(keeper: Keeper, folder: SlotFolder) -> None:
    await beside(keeper, "p1.kv", tokens=500)
    await beside(keeper, "p2.kv", replaces="p1.kv")
    await keeper.close()
    assert there(folder) == {"p1.kv", "p2.kv"}
    await beside(keeper, "p3.kv", tokens=510, replaces="p2.kv")
    await keeper.close()
    assert there(folder) == {"p3.kv"}


async def test_nothing_goes_where_the_new_one_does_not_get_to_the_disk(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await beside(keeper, "p1.kv")
    await keeper.close()

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "settle", full)
    await beside(keeper, "p2.kv", tokens=60, replaces="p1.kv")
    await keeper.close()
    assert there(folder) == {"p1.kv", "p2.kv"}


async def test_a_save_that_was_given_up_replaces_nothing(keeper: Keeper, folder: SlotFolder) -> None:
    await beside(keeper, "p1.kv")
    await beside(keeper, "p2.kv", tokens=60, replaces="p1.kv")
    await keeper.drop(MED, "p2.kv")
    await keeper.close()
    assert there(folder) == {"p1.kv"}


async def test_beyond_the_budget_the_chats_used_longest_ago_go_and_never_what_is_nowhere_else(
    keeper: Keeper, folder: SlotFolder
) -> None:
    await save(keeper, "displaced.kv")  # it made room for another, so that it is in no slot
    for nth in (3, 2, 1):
        await beside(keeper, f"p{nth}.kv", used_ms=nth)
        await keeper.close()
    assert there(folder) == {"displaced.kv", "p3.kv"}


async def test_after_a_crash_they_are_the_only_copies(keeper: Keeper, folder: SlotFolder) -> None:
    for nth in (1, 2):
        await beside(keeper, f"p{nth}.kv", used_ms=nth)
        await keeper.close()
    await keeper.read_ahead(MED)
    await beside(keeper, "p3.kv", used_ms=0)
    await keeper.close()
    assert there(folder) == {"p1.kv", "p2.kv"}
