"""What `deploy/` says of containers fits the product: image, Compose file, store; nothing that needs a registry."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML

from presets import RouterOptions, effective, losses, parse
from swapper.cli.serve import serve
from swapper.cli.stop import stop
from swapper.config import Config, load
from swapper.config.advice import advise
from swapper.config.units import duration_ms
from swapper.core.types import LeaseRequest
from swapper.store.redis import RedisStore
from tests.support.valkey import valkey
from tests.unit.test_packaging import files_of_the_tree

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
Service = Mapping[str, Any]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, in order, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for line in text.splitlines() if line for name, _, rest in [line.partition(" ")]]


def only(name: str) -> str:
    [rest] = [rest for found, rest in instructions() if found == name]
    return rest


def services() -> Mapping[str, Service]:
    loaded: Any = YAML(typ="safe").load((COMPOSE / "compose.yaml").read_text())  # pyright: ignore[reportUnknownMemberType]
    return cast("Mapping[str, Service]", loaded["services"])


def mounts(service: Service) -> dict[str, str]:
    """Path in the container -> what is there."""
    parts = [str(one).removesuffix(":ro").rpartition(":") for one in service["volumes"]]
    return {inside: source for source, _, inside in parts}


def configured() -> Config:
    """The configuration beside the Compose file, with its preset where it lies here."""
    environ = {"HOME": "/", "SWAPPER__TENANTS__LLAMA__PRESET": str(COMPOSE / "presets.ini")}
    return load(COMPOSE / "swapper.yaml", environ)


def seconds(text: str) -> float:
    return duration_ms(text) / 1000


def test_the_image_starts_serve_as_the_command_reads_it() -> None:
    program, name, *arguments = json.loads(only("ENTRYPOINT")) + json.loads(only("CMD"))
    assert (program, name) == ("swapper", "serve")
    assert serve.make_context(name, arguments).params["path"] == Path("/etc/swapper/swapper.yaml")


def test_the_image_runs_as_nobody_special_in_a_folder_of_its_own() -> None:
    user = only("USER").partition(":")[0]
    made = next(rest for name, rest in instructions() if name == "RUN" and "useradd" in rest)
    assert f"--uid {user} " in made
    assert user != "0"
    assert f"-o swapper -g swapper -m 700 {configured().state_dir}" in made


def test_the_wheel_that_the_image_builds_holds_the_whole_tree(tmp_path: Path) -> None:
    """From what is copied into it alone, and what is copied is let through to the builder."""
    let_through = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    copied = [rest.split() for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    for *sources, target in copied:
        for source in sources:
            assert f"!{source}" in let_through
            into = tmp_path / "src" / target / (source if target == "./" else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, into)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    made = [*pip, "--wheel-dir", str(tmp_path / "dist"), str(tmp_path / "src")]
    subprocess.run(made, cwd=tmp_path, check=True, timeout=100)
    [built] = (tmp_path / "dist").glob("gpu_swapper-*.whl")
    with zipfile.ZipFile(built) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_tree()


def test_the_composed_configuration_is_accepted_and_loses_no_conversation() -> None:
    config = configured()
    assert config.notices == ()
    assert [str(one) for one in advise(config, {})] == []


def test_every_container_it_names_is_a_service_that_no_engine_brings_back_unasked() -> None:
    project = YAML(typ="safe").load((COMPOSE / "compose.yaml").read_text())["name"]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    by_name = {f"{project}/{name}": one for name, one in services().items()}
    by_name |= {str(one["container_name"]): one for one in services().values() if "container_name" in one}
    for name, entry in configured().document.tenants.items():
        assert entry.control == "docker"
        assert by_name[entry.container or ""]["restart"] in ("no", "unless-stopped"), name


def test_the_router_in_it_is_started_so_that_swapper_decides_and_conversations_can_be_saved() -> None:
    llama = services()["llama"]
    options = effective(parse((COMPOSE / "presets.ini").read_text()), "qwen3-14b", llama["command"], {})
    assert losses(options, RouterOptions.from_args(["llama-server", *llama["command"]], {})) == []


def test_what_swapper_and_the_router_share_lies_at_the_same_place_and_is_one_users() -> None:
    ours, theirs = services()["swapper"], services()["llama"]
    config = configured()
    for path in (str(config.document.tenants["llama"].slot_dir), "/models", "/etc/llama/presets.ini"):
        assert mounts(ours)[path] == mounts(theirs)[path]
    assert theirs["user"] == only("USER")
    assert {str(config.state_dir), "/var/run/docker.sock", "/etc/swapper/swapper.yaml"} <= set(mounts(ours))


def test_nothing_in_it_is_open_to_other_machines() -> None:
    published = [port for one in services().values() for port in one.get("ports", ())]
    assert published
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []
    command = services()["llama"]["command"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert configured().listen[0] == "127.0.0.1"


def test_the_engine_waits_longer_for_swapper_than_stop_does() -> None:
    waits = stop.make_context("stop", []).params["timeout"]
    assert seconds(services()["swapper"]["stop_grace_period"]) > waits


def test_a_container_is_given_no_less_time_to_end_than_its_tenant() -> None:
    for name in configured().document.tenants:
        assert seconds(services()[name]["stop_grace_period"]) >= 30


def test_the_files_it_mounts_are_there() -> None:
    absent = [
        source
        for one in services().values()
        for source in mounts(one).values()
        if source.startswith((".", "..")) and not (COMPOSE / source).exists()
    ]
    assert absent == []


async def test_what_was_acknowledged_by_a_store_with_its_settings_outlives_a_kill(tmp_path: Path) -> None:
    async with valkey(tmp_path) as (process, url):
        store = await RedisStore.open(url)
        await store.enqueue(LeaseRequest("ann", card="gpu0"), lease_id="ls_1", max_queue=5)
        process.kill()
        await process.wait()
        await store.close()
    async with valkey(tmp_path) as (_, url):
        store = await RedisStore.open(url)
        kept = await store.lease("ls_1")
        await store.close()
    assert kept is not None


async def test_its_store_writes_to_the_disk_before_it_answers_and_throws_nothing_away(tmp_path: Path) -> None:
    import redis.asyncio

    async with valkey(tmp_path) as (_, url), redis.asyncio.from_url(url, decode_responses=True) as client:  # pyright: ignore[reportUnknownMemberType]
        wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
        said = [await client.config_get(name) for name in wanted]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    assert said == [{name: value} for name, value in wanted.items()]


def test_the_store_that_is_composed_is_the_one_that_is_configured() -> None:
    settings = dict(
        line.split(None, 1) for line in (DEPLOY / "valkey.conf").read_text().splitlines() if line[:1].isalpha()
    )
    store, ours = services()["valkey"], services()["swapper"]
    assert mounts(store)[settings["dir"]] == mounts(ours)["/store"]
    assert settings["unixsocket"] == f"{settings['dir']}/valkey.sock"
    assert configured().document.redis == "unix:///store/valkey.sock"
    assert shlex.join(store["command"]) == "valkey-server /etc/valkey.conf"
    assert mounts(store)["/etc/valkey.conf"] == "../valkey.conf"
