"""`swapper check` on servers that are there: what is no router, and a model file that is not where the preset says."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from swapper.config import ApiKey
from tests.support.api import key, served
from tests.unit.test_cli import swapper

MODELS = {"data": [{"id": "med", "status": {"value": "unloaded", "args": ["--port", "0"]}}]}


@asynccontextmanager
async def answering(props: dict[str, object]) -> AsyncGenerator[str]:
    """A server that answers /models and /props."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def said(_: web.Request) -> web.Response:
        return web.json_response(props)

    app = web.Application()
    app.add_routes([web.get("/models", models), web.get("/props", said)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def config(folder: Path, url: str, preset: str = "") -> str:
    (folder / "slots").mkdir()
    path = folder / "swapper.yaml"
    path.write_text(
        f"""
state_dir: state
cards: {{gpu0: {{vram: 24GiB}}}}
tenants:
  llama:
    kind: llama-router
    card: gpu0
    url: {url}
    slot_dir: slots
    {f"preset: {preset}" if preset else ""}
    models: {{med: {{vram: 6GiB}}}}
"""
    )
    return str(path)


async def test_a_plain_llama_server_is_told_from_a_router(tmp_path: Path) -> None:
    async with answering({"model_path": "/models/med.gguf"}) as url:
        result = await swapper("check", "-c", config(tmp_path, url))
    assert result.exit_code == 1
    assert "is no router: start it with --models-preset FILE and without -m" in result.stdout
    assert "1 error, 0 warnings" in result.stdout


def plain(folder: Path, url: str) -> str:
    (folder / "slots").mkdir()
    path = folder / "swapper.yaml"
    path.write_text(
        f"""
state_dir: state
cards: {{gpu0: {{vram: 24GiB}}}}
tenants:
  chat:
    kind: llama-server
    control: command
    command: [{sys.executable}, -m, {folder}/absent.gguf, -np, "2", --slot-save-path, {folder}/slots, --metrics]
    card: gpu0
    url: {url}
    slot_dir: slots
    vram: 6GiB
"""
    )
    return str(path)


async def test_a_router_is_told_from_a_plain_llama_server(tmp_path: Path) -> None:
    async with answering({"role": "router", "max_instances": 0}) as url:
        result = await swapper("check", "-c", plain(tmp_path, url))
    assert result.exit_code == 1
    assert f"tenants.chat.url: {url}: this llama-server is a router: write kind: llama-router" in result.stdout


async def test_a_plain_llama_server_is_judged_by_its_command(tmp_path: Path) -> None:
    async with answering({"model_path": "/models/med.gguf"}) as url:
        result = await swapper("check", "-c", plain(tmp_path, url))
    assert f"chat: --model {tmp_path}/absent.gguf: no such file here" in result.stdout
    assert "correct the path in the command" in result.stdout
    assert "router" not in result.stdout
    assert result.exit_code == 0


async def test_a_model_file_that_is_not_there_is_told_before_its_load_fails(tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    (tmp_path / "presets.ini").write_text(f"[med]\nmodel = {absent}\nparallel = 1\n")
    async with answering({"role": "router", "max_instances": 0, "models_autoload": False}) as url:
        result = await swapper("check", "-c", config(tmp_path, url, "presets.ini"))
    assert f"[med] model = {absent}: no such file here" in result.stdout


async def test_a_server_that_wants_a_key_is_told_with_where_to_name_it(tmp_path: Path) -> None:
    async def refused(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "Invalid API Key"}}, status=401)

    app = web.Application()
    app.add_routes([web.get("/models", refused)])
    async with TestServer(app) as server:
        result = await swapper("check", "-c", config(tmp_path, str(server.make_url("")).rstrip("/")))
    assert "/models answered 401, for want of the right key: name the variable that holds" in result.stdout
    assert "api_key_env" in result.stdout


async def test_a_store_that_is_not_there_is_told_with_what_to_do(tmp_path: Path, unused_tcp_port: int) -> None:
    path = Path(config(tmp_path, "http://127.0.0.1:9"))
    path.write_text(f"redis: redis://127.0.0.1:{unused_tcp_port}\n" + path.read_text())
    result = await swapper("check", "-c", str(path))
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("error: redis: ")]
    assert said.endswith("; start it, or correct the address")


@pytest.mark.parametrize("keys", [(), (key("ann", "admin"),)], ids=["without keys", "with keys"])
async def test_a_swapper_at_the_address_of_a_router_is_told_as_such(tmp_path: Path, keys: tuple[ApiKey, ...]) -> None:
    async with served(keys) as api:
        result = await swapper("check", "-c", config(tmp_path, api.url))
    assert result.exit_code == 1
    assert f"error: tenants.llama.url: {api.url}: a swapper answers there and no llama-server" in result.stdout


async def test_what_is_neither_is_told_by_what_it_answered_also_where_swapper_would_start_the_router(
    tmp_path: Path,
) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>It works</html>")

    app = web.Application()
    app.add_routes([web.get("/{any:.*}", page)])
    async with TestServer(app) as server:
        path = config(tmp_path, str(server.make_url("")).rstrip("/"))
        attached = await swapper("check", "-c", path)
        text = Path(path).read_text().replace("kind:", "control: command\n    command: [sh]\n    kind:")
        Path(path).write_text(text)
        started = await swapper("check", "-c", path)
    assert "/models answered 200 and no JSON; is it a llama-server in router mode?" in attached.stdout
    assert "/models answered 200 and no JSON; is it a llama-server in router mode?" in started.stdout
