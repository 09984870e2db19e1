"""Before a server is started anew it is told which saved conversations it will refuse: in `check`, and by serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swapper.app import control_of, running
from swapper.config import Config, load
from swapper.foresee import before_start, losses
from swapper.snapshots.manifest import Fingerprint, GgufIdentity, Manifest
from tests.unit.test_cli import swapper
from workers.llama import foreseen
from workers.llama.slots import SlotFolder

CLASSIC = "version: 10434 (7e4c0a9)"
MIB = 1 << 20
PRESET = "[*]\nparallel = 2\nctx-size = 8192\nkv-unified = false\n[qwen]\nmodel = /models/qwen.gguf\n"


def program(folder: Path, said: str = CLASSIC, *, name: str = "llama-server", status: int = 0) -> Path:
    """A program that tells its version as llama-server does, and else leaves a trace and stays."""
    path = folder / name
    path.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo '{said}' >&2; exit {status}; fi
echo "$@" > {folder}/started; exec sleep 1000
""")
    path.chmod(0o700)
    return path


def config(folder: Path, *, start: str = "./llama-server", strategy: str = "auto") -> Config:
    (folder / "slots").mkdir(exist_ok=True)
    (folder / "presets.ini").write_text(PRESET)
    path = folder / "swapper.yaml"
    path.write_text(f"""
listen: 127.0.0.1:0
state_dir: state
cards: {{gpu0: {{vram: 24GiB}}}}
tenants:
  llama:
    kind: llama-router
    control: command
    command: [{start}, --models-preset, presets.ini, --port, "9"]
    card: gpu0
    url: http://127.0.0.1:9
    slot_dir: slots
    snapshots: {{strategy: {strategy}}}
    models: {{qwen: {{vram: 6GiB}}}}
""")
    return load(path, {})


def save(
    config: Config, tokens: int, mib: int, *, tenant: str = "llama/qwen", head: str = "", build: str = "b10434-7e4c0a9"
) -> None:
    """A snapshot as llama-server would have left it under the preset."""
    folder = SlotFolder(config.folder / "slots")
    name = f"{len(folder.manifests())}.kv"
    with (folder.path / name).open("wb") as file:
        file.truncate(mib * MIB)
    fingerprint = Fingerprint("qwen", GgufIdentity("/models/qwen.gguf", "abc", 5, 5), build, 4096, 2, False)
    manifest = Manifest(name, tenant, fingerprint, 0, tokens, mib * MIB, 1, boot=folder.boot, id=head)
    folder.write(manifest)


def told(config: Config) -> list[str]:
    return [str(loss) for loss in losses(config, "llama", {})]


def test_another_build_is_told_with_what_is_lost_by_it(tmp_path: Path) -> None:
    program(tmp_path, "version: 10500 (abcdef1)")
    server = config(tmp_path)
    for tokens, mib in ((4_000, 1_000), (1_000, 50), (3_000, 1_100)):
        save(server, tokens, mib)
    assert told(server) == [
        "3 conversations of llama/qwen (8,000 tokens, 2.1 GiB) will not come back after the restart: "
        "saved under another llama-server build (b10434-7e4c0a9, now b10500-abcdef1)"
    ]


def test_a_conversation_that_was_saved_twice_is_one(tmp_path: Path) -> None:
    program(tmp_path, "version: 10500 (abcdef1)")
    server = config(tmp_path)
    for tokens in (4_000, 3_000):
        save(server, tokens, 1, head="a")
    assert [text.partition(" (")[0] for text in told(server)] == ["1 conversation of llama/qwen"]


def test_older_copies_of_a_conversation_are_none_of_their_own(tmp_path: Path) -> None:
    program(tmp_path, "version: 10500 (abcdef1)")
    server = config(tmp_path)
    folder = SlotFolder(server.folder / "slots")
    for turn in range(1, 14):
        save(server, 4_000 + turn, 1)
        (last,) = [m for m in folder.manifests() if m.tokens == 4_000 + turn]
        links = tuple(f"{n}" for n in range(2 * turn))[-8:]
        folder.write(replace(last, id=links[-1], links=links, saved_ms=turn))
    assert [text.partition(" will")[0] for text in told(server)] == [
        "1 conversation of llama/qwen (4,013 tokens, 1 MiB)"
    ]


def test_of_the_same_build_and_preset_everything_comes_back(tmp_path: Path) -> None:
    program(tmp_path)
    server = config(tmp_path)
    save(server, 4_000, 1)
    assert told(server) == []


def test_a_build_that_names_itself_otherwise_is_not_compared(tmp_path: Path) -> None:
    program(tmp_path)
    server = config(tmp_path)
    save(server, 4_000, 1, build="my own build")
    assert told(server) == []


def test_what_is_refused_already_and_what_is_nobodys_is_not_lost_by_the_restart(tmp_path: Path) -> None:
    program(tmp_path, "version: 10500 (abcdef1)")
    server = config(tmp_path)
    save(server, 4_000, 1, tenant="llama/other")
    save(server, 4_000, 1)
    (tmp_path / "slots" / "1.kv").write_bytes(b"cut")
    assert told(server) == []


def test_where_nothing_is_saved_nothing_is_started(tmp_path: Path) -> None:
    path = program(tmp_path)
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    server = config(tmp_path)
    assert told(server) == []
    save(server, 4_000, 1)
    assert told(config(tmp_path, strategy="off")) == []
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("said", "build"),
    [
        (CLASSIC, "b10434-7e4c0a9"),
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)", "b1-7e4c0a9"),
        ("version: unknown", None),
        ("", None),
    ],
)
def test_a_build_is_read_as_either_way_of_telling_it(tmp_path: Path, said: str, build: str | None) -> None:
    assert foreseen.build_of([str(program(tmp_path, said))], None) == build


def test_the_program_is_found_behind_its_variables_and_in_its_folder(tmp_path: Path) -> None:
    program(tmp_path, name="llama-server-vulkan")
    command = ["env", "LD_PRELOAD=", "./llama-server-vulkan", "-m", "x"]
    assert foreseen.build_of(command, tmp_path) == "b10434-7e4c0a9"


def test_nothing_that_is_called_otherwise_is_ever_run(tmp_path: Path) -> None:
    path = program(tmp_path, name="start.sh")
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    assert foreseen.build_of([str(path)], tmp_path) is None
    assert foreseen.build_of(["env", "A=b"], tmp_path) is None
    assert foreseen.build_of([], tmp_path) is None
    assert not (tmp_path / "ran").exists()


def test_a_program_that_does_not_tell_is_of_no_known_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert foreseen.build_of([str(program(tmp_path, status=1))], None) is None
    assert foreseen.build_of([str(tmp_path / "llama-server-absent")], None) is None
    hangs = program(tmp_path)
    hangs.write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(foreseen, "VERSION_S", 0.05)
    assert foreseen.build_of([str(hangs)], None) is None


async def test_check_warns_and_writes_nothing(tmp_path: Path) -> None:
    program(tmp_path, "version: 10500 (abcdef1)")
    server = config(tmp_path)
    save(server, 4_000, 1)
    result = await swapper("check", "-c", str(server.path), "--json")
    said = [one["text"] for one in json.loads(result.stdout)["problems"] if one["level"] == "warning"]
    (lost,) = [text for text in said if "will not come back" in text]
    assert lost.startswith("1 conversation of llama/qwen (4,000 tokens, 1 MiB) will not come back")
    assert lost.endswith("; to keep them, put that back as it was before you restart the server")
    assert not (tmp_path / "state").exists()


async def test_a_server_that_runs_is_not_about_to_be_started(tmp_path: Path) -> None:
    program(tmp_path, "version: 10500 (abcdef1)")
    server = config(tmp_path)
    save(server, 4_000, 1)
    control = control_of("llama", server.tenants["llama"], server)
    (alert,) = await before_start(server, {"llama": control})
    assert (alert.card, alert.data) == ("gpu0", {"tenant": "llama/qwen"})
    await control.ensure()
    try:
        assert await before_start(server, {"llama": control}) == []
    finally:
        await control.stop(0)


async def test_serve_says_it_before_it_starts_the_server(tmp_path: Path) -> None:
    program(tmp_path, "version: 10500 (abcdef1)")
    server = config(tmp_path)
    save(server, 4_000, 1)
    async with running(server) as serve:
        try:
            events = await serve.store.events(after="0", limit=100, block_ms=0)
            alerts = [json.loads(event.data)["text"] for event in events if event.type == "alert"]
            assert alerts[0].startswith("1 conversation of llama/qwen (4,000 tokens, 1 MiB) will not come back after")
        finally:
            await serve.controls["llama"].stop(0)
