"""A server that cannot be started is its own tenants' trouble: serve runs, says so once, and tries again."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swapper.app import Running, running
from swapper.config import load
from swapper.core.commit import AlertKind
from swapper.core.troubles import line, not_started
from tests.support.api import SPEC
from workers import watch

CONFIG = """
listen: 127.0.0.1:0
state_dir: state
cards: {{gpu0: {{vram: 24GiB}}, gpu1: {{vram: 24GiB}}}}
tenants:
{tenants}
"""
ROUTER = "{{kind: llama-router, control: command, command: [./llama-server], card: gpu1"
ON_OFF = "{{kind: none, card: gpu1, vram: 1GiB, evict: never"
BROKEN = {
    "unknown": ROUTER + ", slot_dir: nowhere/slots, models: {{a: {{vram: 1GiB}}}}, url: 'http://127.0.0.1:{0}'}}",
    "taken": ROUTER + ", slot_dir: slots, models: {{b: {{vram: 1GiB}}}}, url: 'http://127.0.0.1:{taken}'}}",
    "unread": ROUTER + ", slot_dir: a-file, models: {{c: {{vram: 1GiB}}}}, url: 'http://127.0.0.1:{1}'}}",
    "engine": ON_OFF + ", control: docker, container: x}}",
    "cluster": ON_OFF + ", control: kubernetes, deployment: x}}",
    "unit": ON_OFF + ", control: systemd, unit: x}}",
    "program": ON_OFF + ", control: command, command: [./no]}}",
    "ollama": "{{kind: ollama, control: command, command: [./no], card: gpu1, url: 'http://127.0.0.1:{2}', "
    "models: {{d: {{vram: 1GiB}}}}}}",
}
SAID = {
    "unknown": "unknown cannot be started: No such file or directory: ./llama-server",
    "taken": "is taken by process",
    "unread": "record.json cannot be read: Is a directory",
    "engine": "the Docker engine does not answer",
    "cluster": "none cannot be read as a kubeconfig",
    "unit": "there is no systemctl here",
    "program": "program cannot be started: No such file or directory: ./no",
    "ollama": "ollama cannot be started: No such file or directory: ./no",
}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        spare = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in spare]


@asynccontextmanager
async def serving(folder: Path, tenants: dict[str, str]) -> AsyncGenerator[tuple[Running, aiohttp.ClientSession]]:
    path = folder / "swapper.yaml"
    path.write_text(CONFIG.format(tenants="\n".join(f"  {name}: {entry}" for name, entry in tenants.items())))
    async with running(load(path, {})) as server, aiohttp.ClientSession(server.url) as session:
        yield server, session


async def status(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/api/status") as answer:
        return await answer.json()


async def alerts(session: aiohttp.ClientSession) -> AsyncIterator[dict[str, Any]]:
    """Each that tells of a start, as it comes: `tenant`, `text`, `over`."""
    async with session.get("/api/events", params={"since": "0"}, headers={"Last-Event-ID": "0-0"}) as events:
        async for line in events.content:
            if line.startswith(b"data:") and b'"not_started"' in line:
                told = json.loads(line.removeprefix(b"data:"))
                yield {"over": False, **told, **told.get("data", {})}


async def test_whatever_is_wrong_with_some_servers_serve_runs_and_each_of_them_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "state/servers/unread/record.json").mkdir(parents=True)
    (tmp_path / "a-file").touch()
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as stranger:
        taken = stranger.sockets[0].getsockname()[1]
        tenants = {name: entry.format(*free_ports(3), taken=taken) for name, entry in BROKEN.items()}
        async with serving(tmp_path, tenants) as (_, session):
            told = set[str]()
            async for alert in alerts(session):
                told.add(alert["tenant"])
                if told == BROKEN.keys():
                    break
            async with session.post("/api/leases?wait=10", json={"card": "gpu0"}) as answer:
                assert (await answer.json())["state"] == "granted", "everybody else's cards are as ever"
            seen = await status(session)
    for one in seen["tenants"]:
        assert SAID[one["id"].partition("/")[0]] in one["failure"], one
    for server, why in SAID.items():
        assert any(f"the server of {server} does not start: " in said and why in said for said in seen["problems"])


async def test_a_server_that_does_not_start_is_tried_again_and_told_once_when_it_begins_and_once_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "START_PAUSE_S", (0.05, 0.05))
    [port] = free_ports(1)
    router = ROUTER + ", slot_dir: slots, models: {{a: {{vram: 1GiB}}}}, url: 'http://127.0.0.1:{0}'}}"
    async with serving(tmp_path, {"llama": router.format(port)}) as (server, session):
        told: list[dict[str, Any]] = []
        async for alert in alerts(session):
            told.append(alert)
            if alert["over"]:
                break
            program = tmp_path / "llama-server"
            program.write_text("#!/bin/sh\nexec sleep 1000\n")
            program.chmod(0o755)
        assert [(one["tenant"], one["text"]) for one in told] == [
            ("llama", line("llama", "llama cannot be started: No such file or directory: ./llama-server")),
            ("llama", "the server of llama was started"),
        ]
        seen = await status(session)
        assert seen["tenants"][0]["failure"] is None
        assert not any("does not start" in said for said in seen["problems"])
        await server.controls["llama"].stop(0)


def test_a_trouble_is_told_on_the_cards_of_its_server_when_it_begins_changes_or_is_over() -> None:
    why, another = {"llama": "no such file"}, {"llama": "no room"}
    for before, now, said in (
        ({}, why, [line("llama", "no such file")]),
        (why, why, []),
        (why, another, [line("llama", "no room")]),
        (another, {}, ["the server of llama was started"]),
        ({}, {"nobody": "has no tenant"}, []),
    ):
        told = list(not_started(SPEC, before, now))
        assert [one.text for one in told] == said
        assert {(one.card, one.kind) for one in told} <= {("gpu0", AlertKind.NOT_STARTED)}
        assert [one.over for one in told] == [not now] * len(said)
