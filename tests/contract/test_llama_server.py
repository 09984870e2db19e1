"""The llama-server backend on a real server with one model: its process is its tenant, and nobody else's is touched."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from swapper.errors import BackendError, BackendRefused
from tests.contract.saving import LONG
from tests.contract.talk import Talk
from tests.support.fake_server import FakeServer
from tests.support.plain import PlainServer
from workers.backend import SaveArgs, SlotUse, TenantState
from workers.control.attach import AttachControl
from workers.llama.server import LlamaServer

CHAT = "chat"
Made = Callable[..., LlamaServer]


@pytest.fixture
async def server(tmp_path: Path, models: dict[str, Path]) -> AsyncIterator[PlainServer]:
    server = PlainServer(tmp_path / "plain", models["alpha"])
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


@pytest.fixture
async def made(server: PlainServer, tmp_path: Path) -> AsyncIterator[Made]:
    """Backends on it, each as a new process of the product would make one."""
    all_made: list[LlamaServer] = []

    def make(command: list[str] | None = None) -> LlamaServer:
        control = server.control(command)
        backend = LlamaServer(
            server.url, tenant=CHAT, control=control, state_dir=tmp_path / "state", slot_dir=server.slot_dir
        )
        all_made.append(backend)
        return backend

    yield make
    for backend in all_made:
        await backend.close()


@pytest.fixture
async def talk(server: PlainServer) -> AsyncIterator[Talk]:
    async with Talk(server.url) as talk:
        yield talk


async def state(backend: LlamaServer) -> TenantState:
    return (await backend.observe())[CHAT]


async def until(backend: LlamaServer, wanted: TenantState) -> None:
    """Look until it is so; each look waits for the server."""
    while await state(backend) is not wanted:
        pass


async def test_nothing_runs_before_a_load_and_nothing_after_a_release(made: Made, server: PlainServer) -> None:
    backend = made()
    await backend.start()
    assert (await state(backend), server.control().pid()) == (TenantState.UNLOADED, None)
    await backend.load(CHAT)
    pid = server.control().pid()
    assert pid is not None
    assert await state(backend) is TenantState.LOADED
    await backend.release(CHAT, limit_ms=10_000)
    assert not psutil.pid_exists(pid)
    assert await state(backend) is TenantState.UNLOADED
    await backend.release(CHAT, limit_ms=10_000)


@pytest.mark.parametrize("alias", [None, "qwen3-32b"])
async def test_its_answers_name_its_alias_whatever_was_asked_for_and_without_one_its_file(
    made: Made, server: PlainServer, models: dict[str, Path], alias: str | None
) -> None:
    backend = made(server.command if alias is None else [*server.command, "--alias", alias])
    await backend.load(CHAT)
    body = {"model": CHAT, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession(server.url) as http, http.post("/v1/chat/completions", json=body) as answer:
        assert (await answer.json())["model"] == (alias or str(models["alpha"]))


async def test_it_is_loading_until_it_answers(made: Made, server: PlainServer) -> None:
    go = server.folder / "go"
    os.mkfifo(go)
    backend = made(["sh", "-c", f"read _ <{shlex.quote(str(go))} && exec {shlex.join(server.command)}"])
    load = asyncio.create_task(backend.load(CHAT))
    await until(backend, TenantState.LOADING)  # its process is there, and nobody answers yet
    assert not load.done()
    await asyncio.to_thread(go.write_text, "now\n")
    seen = {await state(backend)}
    while not load.done():
        seen.add(await state(backend))
    await load
    assert seen <= {TenantState.LOADING, TenantState.LOADED}
    assert await state(backend) is TenantState.LOADED


async def test_whoever_comes_next_adopts_it_with_what_its_slots_hold(
    made: Made, server: PlainServer, talk: Talk
) -> None:
    await made().load(CHAT)
    pid = server.control().pid()
    await talk.say(CHAT, LONG, slot=1)
    tokens = (await talk.slot(CHAT, 1))["n_prompt_tokens"]

    successor = made()
    await successor.start()
    assert await state(successor) is TenantState.LOADED
    await successor.load(CHAT)
    assert server.control().pid() == pid
    assert SlotUse(1, tokens) in (await successor.quiesce(CHAT)).slots
    assert (await successor.save(CHAT, SaveArgs(1, "adopted.kv"))).tokens == tokens
    await successor.release(CHAT, limit_ms=10_000)
    await successor.load(CHAT)
    assert (await successor.restore(CHAT, "adopted.kv", 0)).tokens == tokens
    assert (await talk.say(CHAT, LONG))["timings"]["cache_n"] > 0.9 * (tokens - 8)


async def test_a_server_that_crashed_has_failed_and_that_is_told_at_once(made: Made, server: PlainServer) -> None:
    backend = made()
    await backend.load(CHAT)
    changes = backend.changes()
    await anext(changes)
    turn = asyncio.ensure_future(anext(changes))
    pid = server.control().pid()
    assert pid is not None
    psutil.Process(pid).kill()
    async with asyncio.timeout(10):
        await turn
        await until(backend, TenantState.FAILED)
    assert (await backend.quiesce(CHAT)).gone
    await backend.load(CHAT)
    assert await state(backend) is TenantState.LOADED
    await changes.aclose()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


async def test_a_damaged_model_fails_with_the_servers_own_reason_in_one_line(
    made: Made, server: PlainServer, models: dict[str, Path]
) -> None:
    broken = server.folder / "broken.gguf"
    broken.write_bytes(models["alpha"].read_bytes()[:100_000])
    command = [str(broken) if word == str(models["alpha"]) else word for word in server.command]
    backend = made(command)
    with pytest.raises(BackendError, match=r"ended before chat was loaded \(exit status 1\): .*load") as caught:
        await backend.load(CHAT)
    said = str(caught.value)
    assert "\n" not in said
    assert "is not within the file bounds" in said
    assert f"(log: {server.control().log_path()})" in said
    assert await state(backend) is TenantState.FAILED


async def test_a_reason_is_looked_for_in_what_this_start_said(
    made: Made, server: PlainServer, models: dict[str, Path]
) -> None:
    broken = server.folder / "broken.gguf"
    broken.write_bytes(models["alpha"].read_bytes()[:100_000])
    with pytest.raises(BackendError, match="file bounds"):
        await made([str(broken) if word == str(models["alpha"]) else word for word in server.command]).load(CHAT)
    with pytest.raises(BackendError, match="--no-such-option") as caught:
        await made([*server.command, "--no-such-option"]).load(CHAT)
    assert "file bounds" not in str(caught.value)


async def test_a_server_of_somebody_else_at_the_address_is_neither_used_nor_ended(
    made: Made, server: PlainServer, models: dict[str, Path], tmp_path: Path
) -> None:
    theirs = server.control()
    await theirs.ensure()
    backend = LlamaServer(
        server.url, tenant=CHAT, control=PlainServer(tmp_path / "other", models["alpha"]).control(), state_dir=tmp_path
    )
    try:
        async with asyncio.timeout(20):
            await until(backend, TenantState.LOADED)
        with pytest.raises(BackendRefused, match="a server that swapper did not start is at"):
            await backend.load(CHAT)
        with pytest.raises(BackendRefused, match="a server that swapper did not start is at"):
            await backend.release(CHAT, limit_ms=1000)
        assert theirs.pid() is not None
    finally:
        await backend.close()


async def test_a_router_in_its_place_is_no_state_of_it(tmp_path: Path, models: dict[str, Path]) -> None:
    router = FakeServer(tmp_path, {"alpha": models["alpha"]})
    await asyncio.to_thread(router.start)
    backend = LlamaServer(router.url, tenant=CHAT, control=AttachControl(CHAT), ours=False, state_dir=tmp_path)
    try:
        assert await state(backend) is TenantState.UNREACHABLE
        with pytest.raises(BackendRefused):
            await backend.load(CHAT)
    finally:
        await backend.close()
        await asyncio.to_thread(router.stop)


async def test_an_attached_one_is_used_as_it_is_and_never_ended(
    server: PlainServer, talk: Talk, tmp_path: Path
) -> None:
    attached = LlamaServer(server.url, tenant=CHAT, control=AttachControl(CHAT), ours=False, state_dir=tmp_path)
    try:
        assert await state(attached) is TenantState.STOPPED
        with pytest.raises(BackendError, match="not swapper's to start"):
            await attached.load(CHAT)
        await server.control().ensure()
        async with asyncio.timeout(20):
            await until(attached, TenantState.LOADED)
        assert (await attached.load(CHAT)).n_slots == 2
        with pytest.raises(BackendRefused, match="is attached"):
            await attached.release(CHAT, limit_ms=1000)
    finally:
        await attached.close()


async def test_what_a_shell_around_it_hides_is_still_in_the_fingerprint(
    made: Made, server: PlainServer, tmp_path: Path
) -> None:
    plain = made()
    one = (await plain.load(CHAT)).fingerprint
    await plain.release(CHAT, limit_ms=10_000)
    script = shlex.join(server.command)
    wrapped = made(["sh", "-c", f"{script}; true"])
    assert (await wrapped.load(CHAT)).fingerprint == one
    await wrapped.release(CHAT, limit_ms=10_000)
    other = made(["sh", "-c", f"{script} --rope-freq-base 5000; true"])
    assert (await other.load(CHAT)).fingerprint != one
    await other.release(CHAT, limit_ms=10_000)


async def test_a_snapshot_taken_beside_one_draft_model_does_not_enter_beside_another(
    made: Made, server: PlainServer, talk: Talk, models: dict[str, Path]
) -> None:
    def drafted(by: str) -> LlamaServer:
        return made([*server.command, "-md", str(models[by]), "-devd", "none", "-ngld", "0"])

    first = drafted("beta")
    await first.load(CHAT)
    await talk.say(CHAT, LONG, slot=0)
    saved = await first.save(CHAT, SaveArgs(0, "drafted.kv"))
    await first.release(CHAT, limit_ms=10_000)
    assert [info.refused for info in (await first.load(CHAT)).snapshots] == [None]
    await first.restore(CHAT, "drafted.kv", 1)
    assert (await talk.say(CHAT, LONG))["timings"]["cache_n"] > 0.9 * (saved.tokens - 8)
    await first.release(CHAT, limit_ms=10_000)

    other = drafted("alpha")
    [info] = (await other.load(CHAT)).snapshots
    assert "saved under another draft model" in (info.refused or "")
    with pytest.raises(BackendRefused, match="another draft model"):
        await other.restore(CHAT, "drafted.kv", 0)


async def test_another_tenant_is_none_of_its(made: Made) -> None:
    with pytest.raises(BackendRefused, match="is no tenant of the llama-server"):
        await made().load("chat/alpha")
