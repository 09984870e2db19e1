"""Saved conversations over HTTP: listed, judged, deleted, and not while they are needed."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from swapper.core.commit import Commit, Committed
from swapper.core.conversations import Conversation
from swapper.core.types import Card, Step, Swap
from swapper.snapshots.conversation import Kept, Place
from swapper.snapshots.manifest import Fingerprint, GgufIdentity, Manifest
from tests.support.api import Served, key, served
from tests.unit.index_doubles import answer
from workers.llama.keeping import Keeper
from workers.llama.shelf import FolderShelf
from workers.llama.slots import Keep, SlotFolder

NOW = Fingerprint("med", GgufIdentity("/m/med.gguf", "abc", 10, 5), "b1", 4096, 2, False)
LATER = Fingerprint("med", GgufIdentity("/m/med.gguf", "abc", 10, 5), "b2", 4096, 2, False)
CLOCK_MS = 100 * 3_600_000


def talk(name: str) -> str:
    """The id of the conversation that a snapshot of this name is of."""
    return name.encode().hex().ljust(32, "0")


class Saved:
    """A slot folder as a server's backend has it; `running` is what the model runs with."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.running: Fingerprint | None = None
        self.folder = SlotFolder(path)
        self.keep = Keep(age_ms=24 * 3_600_000)
        self.shelf = FolderShelf(Keeper(self.folder, self.keep, lambda: CLOCK_MS), self._now)

    async def _now(self, tenant: str) -> Fingerprint | None:
        return self.running if tenant == "llama/med" else None

    def save(
        self,
        name: str,
        *,
        tenant: str = "llama/med",
        hours_ago: int = 1,
        used_ms: int = 0,
        links: tuple[str, ...] | None = None,
    ) -> None:
        """`links` of its conversation, the last is its id; without, it is of one of its own."""
        (self.folder.path / name).write_bytes(bytes(100))
        saved_ms = CLOCK_MS - hours_ago * 3_600_000
        boot = self.folder.boot
        links = (talk(name),) if links is None else links
        manifest = Manifest(
            name, tenant, NOW, 0, 50, 100, saved_ms, boot=boot, id=links[-1] if links else "", links=links,
            used_ms=used_ms, restored_ms=saved_ms,
        )  # fmt: skip
        self.folder.seal(manifest)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "slots")


@pytest.fixture
async def api(saved: Saved) -> AsyncGenerator[Served]:
    async with served() as running:
        running.ctx.shelves = {"llama": saved.shelf}
        yield running


@pytest.fixture
async def http(api: Served) -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(api.url) as session:
        yield session


async def listed(http: aiohttp.ClientSession, query: str = "") -> list[str]:
    async with http.get(f"/api/snapshots{query}") as got:
        assert got.status == 200, await got.text()
        return [item["id"] for item in (await got.json())["items"]]


async def test_snapshots_are_listed_the_last_used_first_with_what_their_manifests_say(
    saved: Saved, http: aiohttp.ClientSession
) -> None:
    saved.save("old.kv", hours_ago=3, used_ms=CLOCK_MS)
    saved.save("new.kv", hours_ago=1)
    assert await listed(http) == ["old.kv", "new.kv"]
    async with http.get("/api/snapshots/new.kv") as got:
        one = await got.json()
    assert (one["model"], one["tokens"], one["bytes"], one["strategy"], one["build"]) == (
        "llama/med", 50, 100, "slots", "b1",
    )  # fmt: skip
    assert one["conversation"] == talk("new.kv")
    assert one["saved_at"] == "1970-01-05T03:00:00.000Z"
    assert (one["used_at"], one["fingerprint"]["n_parallel"]) == (None, 2)
    async with http.get("/api/snapshots/none.kv") as got:
        assert (got.status, (await got.json())["detail"]) == (404, "There is no snapshot 'none.kv'.")


async def test_a_snapshot_is_judged_by_its_file_and_once_its_model_runs_by_its_build(
    saved: Saved, http: aiohttp.ClientSession
) -> None:
    saved.save("a.kv")

    async def judged() -> tuple[str | None, bool]:
        async with http.get("/api/snapshots/a.kv") as got:
            one = await got.json()
        return one["refused"], one["compared"]

    assert await judged() == (None, False)
    saved.running = NOW
    assert await judged() == (None, True)
    saved.running = LATER
    assert await judged() == ("saved under another llama-server build (b1, now b2)", True)
    os.truncate(saved.folder.path / "a.kv", 99)
    assert (await judged())[0] == "its file has 99 bytes instead of 100"


async def test_pages_go_on_where_the_last_one_ended(saved: Saved, http: aiohttp.ClientSession) -> None:
    for number in range(5):
        saved.save(f"{number}.kv", hours_ago=number // 2)
    seen: list[str] = []
    cursor = ""
    while True:
        async with http.get(f"/api/snapshots?limit=2{cursor}") as got:
            page = await got.json()
        seen += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == ["1.kv", "0.kv", "3.kv", "2.kv", "4.kv"]
    async with http.get("/api/snapshots?cursor=x") as got:
        assert got.status == 422


async def test_a_model_is_asked_for_by_any_name_also_one_that_is_configured_no_more(
    saved: Saved, http: aiohttp.ClientSession
) -> None:
    saved.save("a.kv")
    saved.save("b.kv", tenant="llama/gone")
    for name, found in (("med", ["a.kv"]), ("llama/med", ["a.kv"]), ("llama/gone", ["b.kv"])):
        assert await listed(http, f"?model={name}") == found
    async with http.get("/api/snapshots?model=llama/gon") as got:
        problem = await got.json()
    assert got.status == 404
    assert problem["detail"].endswith("Did you mean llama/gone?")


async def test_two_servers_with_one_folder_tell_of_each_snapshot_once(
    saved: Saved, api: Served, http: aiohttp.ClientSession
) -> None:
    saved.save("a.kv")
    saved.save("b.kv", tenant="gone/x")
    api.ctx.shelves = {"other": saved.shelf, "llama": saved.shelf}
    assert sorted(await listed(http)) == ["a.kv", "b.kv"]


async def test_deleting_takes_the_file_its_manifest_and_its_sidecars(saved: Saved, http: aiohttp.ClientSession) -> None:
    saved.save("a.kv")
    (saved.folder.path / "a.draft").touch()
    async with http.delete("/api/snapshots/a.kv") as got:
        assert (got.status, (await got.json())["id"]) == (200, "a.kv")
    assert list(saved.folder.path.iterdir()) == []
    async with http.delete("/api/snapshots/a.kv") as got:
        assert got.status == 404


async def test_what_a_swap_or_a_return_still_needs_is_deleted_only_by_force(
    saved: Saved, api: Served, http: aiohttp.ClientSession
) -> None:
    for name in ("at-work.kv", "waits.kv", "free.kv"):
        saved.save(name)
    talks = {name: Conversation("llama/med", 0, name, 50, 100, saved=True) for name in ("at-work.kv", "waits.kv")}
    swap = Swap("sw_1", "gpu0", "x", 7, (), ("llama/med",), Step.RESTORE, 1, 1, conversations=(talks["at-work.kv"],))
    card = Card("gpu0", swap=swap, saved=(talks["waits.kv"],))
    assert await api.store.commit(Commit(cards=(card,))) == Committed()
    for name, said in (("at-work.kv", "the swap sw_1 on gpu0 is at it"), ("waits.kv", "it comes back with llama/med")):
        async with http.delete(f"/api/snapshots/{name}") as got:
            assert got.status == 409
            assert said in (await got.json())["detail"]
    async with http.delete("/api/snapshots?model=med") as got:
        purged = await got.json()
    assert [item["id"] for item in purged["items"]] == ["free.kv"]
    assert sorted(item["id"] for item in purged["kept"]) == ["at-work.kv", "waits.kv"]
    async with http.delete("/api/snapshots/waits.kv?force=1") as got:
        assert got.status == 200
    async with http.delete("/api/snapshots?force=1", json={"all": True}) as got:
        assert [item["id"] for item in (await got.json())["items"]] == ["at-work.kv"]
    assert await listed(http) == []


@pytest.mark.parametrize("body", [None, {}, {"all": False}])
async def test_everything_is_deleted_only_where_that_is_said(
    saved: Saved, http: aiohttp.ClientSession, body: dict[str, bool] | None
) -> None:
    saved.save("a.kv")
    async with http.delete("/api/snapshots?force=1", json=body) as got:
        problem = await got.json()
    assert (got.status, problem["errors"][0]["field"]) == (422, "all")
    assert "?model=NAME" in problem["detail"]
    async with http.delete("/api/snapshots", json={"al": True}) as got:
        assert (got.status, "did you mean all" in (await got.json())["detail"]) == (422, True)
    assert await listed(http) == ["a.kv"]
    async with http.delete("/api/snapshots", json={"all": True}) as got:
        assert got.status == 200
    assert await listed(http) == []


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/a.kv"), ("DELETE", "?model=med"), ("POST", "/prune")], ids=["one", "all", "old"]
)
async def test_of_what_was_deleted_nobody_says_that_it_lies_on_disk(
    saved: Saved, api: Served, http: aiohttp.ClientSession, method: str, path: str
) -> None:
    saved.save("a.kv", hours_ago=30)
    answer(api.ctx.index, "ab", tenant="llama/med")
    (talk,) = api.ctx.index.talks("llama/med")
    api.ctx.index.stored("llama/med", Kept("a.kv", talk.id, talk.links, talk.tokens))
    async with http.request(method, f"/api/snapshots{path}") as done:
        assert done.status == 200
    (talk,) = api.ctx.index.conversations("llama/med")
    assert (talk.place, "its snapshot" in talk.reason) == (Place.COLD, True)


async def test_pruning_says_what_went_and_why(saved: Saved, http: aiohttp.ClientSession) -> None:
    saved.save("old.kv", hours_ago=30)
    saved.save("new.kv", hours_ago=1)
    async with http.post("/api/snapshots/prune") as got:
        assert await got.json() == {
            "items": [{"id": "old.kv", "model": "llama/med", "bytes": 100, "why": "older than 24 h"}],
            "bytes": 100,
        }
    assert await listed(http) == ["new.kv"]


async def test_any_key_may_look_and_only_admin_deletes(saved: Saved) -> None:
    saved.save("a.kv")
    async with (
        served((key("ann", "leases"),)) as api,
        aiohttp.ClientSession(api.url, headers={"x-api-key": "ann-secret"}) as http,
    ):
        api.ctx.shelves = {"llama": saved.shelf}
        assert await listed(http) == ["a.kv"]
        for method, path in (("DELETE", "/a.kv"), ("DELETE", ""), ("POST", "/prune")):
            async with http.request(method, f"/api/snapshots{path}") as got:
                assert got.status == 403
    assert saved.folder.size("a.kv") == 100


async def test_a_folder_that_cannot_be_read_is_said_to_be(
    saved: Saved, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_tenant: str | None = None) -> list[Manifest]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saved.folder, "manifests", broken)
    async with http.get("/api/snapshots") as got:
        assert got.status == 503
        assert f"{saved.folder.path} cannot be used: Input/output error" in (await got.json())["detail"]


async def test_a_purge_forgets_the_texts_of_the_conversations_as_well(
    saved: Saved, api: Served, http: aiohttp.ClientSession
) -> None:
    dropped: list[str] = []
    api.ctx.drop_requests = dropped.append
    saved.save("a.kv")
    async with http.delete("/api/snapshots?model=med") as got:
        assert got.status == 200
    assert dropped == ["llama/med"]
