"""`swapper check` on servers of other kinds: what would fail is said with how to mend it, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swapper.config import ApiKey
from tests.support import fake_kinds
from tests.support.api import key, served
from tests.support.fake_kind import FakeKind, OpenAi
from tests.support.router import free_port
from tests.unit.test_cli import swapper


@asynccontextmanager
async def up(fake: FakeKind) -> AsyncGenerator[FakeKind]:
    await fake.start()
    try:
        yield fake
    finally:
        await fake.vanish()


async def found(folder: Path, url: str, kind: str, more: str = "evict: never", models: str = "m: {vram: 1GiB}") -> str:
    """What `check` prints of errors and warnings, a line each."""
    path = folder / "swapper.yaml"
    entry = f"{{kind: {kind}, url: {url}, models: {{{models}}}, {more}}}"
    path.write_text(f"state_dir: state\ncards: {{gpu0: {{vram: 24GiB}}}}\ntenants:\n  t: {entry}\n")
    result = await swapper("check", "-c", str(path), "--json")
    problems = json.loads(result.stdout)["problems"]
    assert result.exit_code == (1 if any(one["level"] == "error" for one in problems) else 0)
    return "\n".join(f"{one['level']}: {one['text']}" for one in problems)


FAKES = {
    "ollama": fake_kinds.Ollama,
    "llama-swap": fake_kinds.LlamaSwap,
    "vllm": fake_kinds.Vllm,
    "sglang": fake_kinds.Sglang,
    "openai": OpenAi,
}
every = pytest.mark.parametrize("kind", FAKES)


@every
async def test_of_a_server_that_fits_nothing_is_said_and_nothing_is_asked_of_it_but_to_tell(
    tmp_path: Path, kind: str
) -> None:
    async with up(FAKES[kind]("m")) as fake:
        assert "tenants.t" not in await found(tmp_path, fake.url, kind)
        assert fake.asked
        assert fake.posts() == []


@every
async def test_a_server_that_is_away_is_an_error_unless_swapper_starts_it(tmp_path: Path, kind: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = await found(tmp_path, url, kind)
    assert f"error: tenants.t.url: {url}: nobody listens there; start the server, or correct the address" in said
    assert "tenants.t" not in await found(tmp_path, url, kind, "control: command, command: [sh]")


@every
async def test_a_model_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, kind: str) -> None:
    async with up(FAKES[kind]("m", "n")) as fake:
        said = await found(tmp_path, fake.url, kind, models="absent: {vram: 1GiB}")
    assert "tenants.t.models.absent: " in said
    assert "no such model" in said
    assert "m, n" in said


@every
async def test_another_server_at_the_address_is_told(tmp_path: Path, kind: str) -> None:
    other = OpenAi("m") if kind in ("ollama", "llama-swap") else fake_kinds.Ollama("m")
    async with up(other) as fake:
        said = await found(tmp_path, fake.url, kind)
    assert "is it a server" in said or "lists no models" in said


@every
async def test_a_swapper_at_the_address_is_told(tmp_path: Path, kind: str) -> None:
    keys: tuple[ApiKey, ...] = (key("ann"),)
    async with served(keys=keys) as other:
        said = await found(tmp_path, other.url, kind)
    assert "a swapper answers there" in said


async def test_a_key_that_is_missing_or_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with up(OpenAi("m")) as fake:
        fake.key = "secret"
        assert "it wants a key: name its variable in api_key_env" in await found(tmp_path, fake.url, "openai")
        monkeypatch.setenv("T_KEY", "other")
        said = await found(tmp_path, fake.url, "openai", "evict: never, api_key_env: T_KEY")
        assert "the key in api_key_env is not its" in said
        monkeypatch.setenv("T_KEY", "secret")
        assert "tenants.t" not in await found(tmp_path, fake.url, "openai", "evict: never, api_key_env: T_KEY")


async def test_a_vllm_that_cannot_sleep_is_told_which_flags_it_needs(tmp_path: Path) -> None:
    async with up(fake_kinds.Vllm("m")) as fake:
        said = await found(tmp_path, fake.url, "vllm", "sleep: 1")
        assert "error" not in said
        assert "add it to the reserve of card gpu0" in said
    no = fake_kinds.Vllm("m")
    no.dev = False
    async with up(no) as fake:
        said = await found(tmp_path, fake.url, "vllm", "sleep: 1")
    assert "start it with --enable-sleep-mode and with VLLM_SERVER_DEV_MODE=1 in its environment" in said


async def test_a_vllm_that_would_only_say_that_it_sleeps_is_told(tmp_path: Path) -> None:
    no = fake_kinds.Vllm("m")
    no.sleep_mode = False
    async with up(no) as fake:
        said = await found(tmp_path, fake.url, "vllm", "sleep: 1")
    assert "was started without --enable-sleep-mode, so that it would say it sleeps and free nothing" in said


async def test_a_vllm_that_sleeps_and_that_nobody_would_wake_is_told(tmp_path: Path) -> None:
    server = fake_kinds.Vllm("m")
    async with up(server) as fake:
        server.away = {"weights"}
        assert "sleeps, and nobody would wake it; write sleep: 1" in await found(tmp_path, fake.url, "vllm")


@pytest.mark.parametrize(
    ("saver", "backup", "level", "said"),
    [
        (False, True, 1, "without --enable-memory-saver"),
        (True, False, 1, "without --enable-weights-cpu-backup, so that its weights would be lost"),
        (True, False, 2, None),
    ],
)
async def test_an_sglang_that_would_free_nothing_or_lose_its_weights_is_told(
    tmp_path: Path, saver: bool, backup: bool, level: int, said: str | None
) -> None:
    server = fake_kinds.Sglang("m")
    server.saver, server.backup = saver, backup
    async with up(server) as fake:
        text = await found(tmp_path, fake.url, "sglang", f"sleep: {level}")
    assert ("error" in text) == (said is not None)
    assert (said or "") in text


async def test_a_hook_whose_program_is_not_here_is_told(tmp_path: Path) -> None:
    async with up(OpenAi("m")) as fake:
        said = await found(
            tmp_path, fake.url, "openai", "evict: never, hooks: {after_load: [[sh, -c, x], [no-such, y]]}"
        )
    assert "error: tenants.t.hooks.after_load: no-such is not a program that can be started here" in said
    assert said.count("hooks") == 1
