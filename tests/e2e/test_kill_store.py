"""The embedded store is killed, full, read-only, cut short, and put back to an older copy under a real serve."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.matrix import (
    BACK_S,
    STORY,
    Client,
    Held,
    accounted,
    eventually,
    granted,
    in_turn,
    status_of,
    token,
    warm,
)
from tests.support.server import Json, serving

COMMITS = ("close", "drain", "save", "release", "vacate", "grant", "load", "restore", "open", "end")


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One beside its router; whatever becomes of its store, each test leaves the card with its resident."""
    with serving(Held.of_alpha(tmp_path_factory.mktemp("living"))) as server:
        yield server


@pytest.fixture
def server(living: Held) -> Iterator[Held]:
    with in_turn(living) as server:
        yield server


def test_killed_at_every_commit_of_a_handover_before_it_landed_and_unheard(server: Held) -> None:
    """One handover, in which every commit meets a dead store twice: unwritten, and written with its answer lost."""
    left = [f"{when} commit {name}" for name in COMMITS for when in ("before", "unheard")]

    def dies_up_to(last: str) -> None:
        while last in left:
            server.hold_at(*left)
            left.remove(server.held())
            server.hold_at(*left)
            server.kill_store()
            server.go_on()
        server.hold_at()

    with Client(server) as client:
        server.hold_at(*left)
        asked = client.lease("job")
        dies_up_to("unheard commit grant")
        lease = granted(asked)
        server.hold_at(*left)
        released = client.release(lease)
        dies_up_to("unheard commit end")
        released.result(BACK_S)
        warm(server)
    assert not left
    assert server.get(f"/api/leases/{lease['id']}")["state"] == "released"


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_store_that_refuses_writes_moves_nothing_and_loses_nothing(server: Held, trouble: str) -> None:
    store = redis.Redis(unix_socket_path=str(server.state_dir / "store" / "socket"))

    def refuse(yes: bool) -> None:
        if trouble == "full":
            store.execute_command("CONFIG", "SET", "maxmemory", "1" if yes else "0")  # pyright: ignore[reportUnknownMemberType]
        else:
            store.execute_command("REPLICAOF", *(("127.0.0.1", "1") if yes else ("NO", "ONE")))  # pyright: ignore[reportUnknownMemberType]

    refuse(True)
    assert server.chat("alpha", STORY)["choices"], "residents keep serving"
    assert status_of(lambda: server.lease("too early")) == 503
    refuse(False)
    with Client(server) as client:
        server.hold_at("before commit release")
        asked = client.lease("job")
        server.held()
        refuse(True)
        server.go_on()
        assert status_of(lambda: server.lease("too early")) == 503
        refuse(False)
        server.hold_at()
        client.release(granted(asked)).result(BACK_S)
        warm(server)
    store.close()
    assert "too early" not in {lease["label"] for lease in accounted(server)}


def copy_of(server: Held, name: str) -> Path:
    """What its store has on disk now."""
    kept = server.folder / name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(server.state_dir / "store" / "appendonlydir", kept)
    return kept


def put_back(server: Held, kept: Path) -> None:
    """The store's data as in the copy; the folder itself stays (the store must be dead)."""
    there = server.state_dir / "store" / "appendonlydir"
    for file in there.iterdir():
        file.unlink()
    for file in kept.iterdir():
        shutil.copy2(file, there / file.name)


def names_the_rollback(server: Held, newest: int) -> bool:
    """An alert says that a token is known that the store had lost: this one, or a swap's after it."""
    known = [re.search(r"older copy .* token (\d+) was given out", text) for text in server.alerts()]
    return any(int(one[1]) >= newest for one in known if one)


def test_a_store_put_back_while_all_is_down_names_the_rollback_and_the_card_is_what_the_agent_sees(
    server: Held,
) -> None:
    before = copy_of(server, "before")
    with Client(server) as client:
        lost = granted(client.lease("lost"))
        server.kill()
        server.kill_store()
        put_back(server, before)
        server.start()
        beat = f"/api/leases/{lost['id']}"
        assert status_of(lambda: server.get(beat)) == 404
        assert status_of(lambda: server.post(f"{beat}/heartbeat", {"token": token(lost)})) == 404
        warm(server)
        assert names_the_rollback(server, token(lost))
        new = granted(client.lease("new"))
        assert token(new) > token(lost)
        client.release(new).result(BACK_S)
        warm(server)


@pytest.mark.parametrize("meanwhile", ["another lease holds the card", "the residents are back"])
@pytest.mark.parametrize("step", ["drain", "save", "vacate"])
def test_a_store_put_back_under_a_living_serve_to_the_middle_of_an_old_swap(
    server: Held, meanwhile: str, step: str
) -> None:
    with Client(server) as client:
        server.hold_at(f"before commit {step}")
        asked = client.lease("old")
        server.held()
        amid = copy_of(server, "amid")
        server.hold_at()
        server.go_on()
        old = granted(asked)
        client.release(old).result(BACK_S)
        warm(server)
        newest = token(old) if meanwhile == "the residents are back" else token(granted(client.lease("lost")))

        server.freeze()
        server.kill_store()
        put_back(server, amid)
        server.go_on()

        again = eventually(lambda: granted_again(server, str(old["id"])), "the old lease goes on to its end")
        assert not loaded(server), "what was proved before the rollback is proved again"
        assert token(again) > newest
        eventually(lambda: names_the_rollback(server, newest), "an alert names the rollback")
        assert status_of(lambda: server.delete(f"/api/leases/{old['id']}?token={old['token']}")) == 409
        client.release(again).result(BACK_S)
        warm(server)


def loaded(server: Held) -> bool:
    """Whether the server itself says so, whatever we think of it."""
    with urllib.request.urlopen(f"{server.router.url}/models", timeout=20) as answer:
        (model,) = json.loads(answer.read())["data"]
    return model["status"]["value"] != "unloaded"


def granted_again(server: Held, lease_id: str) -> Json | None:
    lease = server.get(f"/api/leases/{lease_id}")
    return lease if lease["state"] == "granted" else None


@pytest.mark.parametrize("cut", [1, 300, 3_000])
def test_a_file_cut_short_while_all_is_down_is_read_up_to_the_cut(server: Held, cut: int) -> None:
    with Client(server) as client:
        lease = granted(client.lease("held"))
        server.kill()
        server.kill_store()
        (log,) = (server.state_dir / "store" / "appendonlydir").glob("*.incr.aof")
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size - cut)
        server.start()
        again = eventually(lambda: granted_again(server, str(lease["id"])), "the lease is granted (again)")
        client.release(again).result(BACK_S)
        warm(server)
        later = granted(client.lease("later"))
        assert token(later) > max(token(lease), token(again))
        client.release(later).result(BACK_S)
        warm(server)
