"""`swapper check` and what starts and stops a server: is it there, and what is to be done where it is not?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper.cli.check import examine
from swapper.config import loads
from tests.support.dockerd import Dockerd
from tests.support.fake_systemctl import install

TENANT = "cards: {gpu0: {probe: declared, vram: 24GiB}}\ntenants:\n  ml: {kind: none, card: gpu0, vram: 4GiB, %s}\n"


@pytest.fixture
def docker(engine: Dockerd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dockerd]:
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    yield engine
    for one in engine.api.containers(all=True):
        engine.api.remove_container(one["Id"], force=True)


async def said(tenant: str, tmp_path: Path) -> list[tuple[bool, str]]:
    environ = {"HOME": str(tmp_path), "SWAPPER__STATE_DIR": str(tmp_path)}
    config = loads(TENANT % tenant, folder=tmp_path, environ=environ)
    return [(one.error, one.text) for one in await examine(config, environ)]


async def test_a_container_that_is_there_is_nothing_to_say_and_one_that_is_not_is_an_error(
    docker: Dockerd, tmp_path: Path
) -> None:
    text = "tenants.ml: there is no container ml: create it (docker create), or correct container:"
    assert await said("control: docker, container: ml", tmp_path) == [(True, text)]
    docker.create("ml")
    assert await said("control: docker, container: ml", tmp_path) == []


async def test_one_that_comes_back_by_itself_is_a_warning(docker: Dockerd, tmp_path: Path) -> None:
    docker.create("ml", restart="always")
    [(error, text)] = await said("control: docker, container: ml", tmp_path)
    assert not error
    assert "comes back by itself when the engine begins anew: swapper stops it again, and restart: unless" in text
    assert await said("control: docker, container: ml, evict: never", tmp_path) == []


async def test_an_engine_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    [(error, text)] = await said("control: docker, container: ml", tmp_path)
    assert error
    assert text.startswith("tenants.ml: the Docker engine does not answer: start it (systemctl start docker), or set")


async def test_a_unit_that_its_manager_does_not_know_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{install(tmp_path)}:{os.environ['PATH']}")
    [(error, text)] = await said("control: systemd, unit: ml", tmp_path)
    assert (error, text) == (True, "tenants.ml: systemd knows no unit ml.service: correct unit:, or write user: true")
