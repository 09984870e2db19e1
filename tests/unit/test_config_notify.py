"""Whom to tell: apprise URLs, or where they are found; what is wrong is said by its place, and no address with it.

And `swapper check`, which says what apprise makes of them, and sends a test message when it is asked to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from swapper.config import Config, loads
from swapper.errors import ConfigError
from tests.support.told import Told, told
from tests.unit.test_cli import swapper

BASE = """\
state_dir: state
cards: {gpu0: {vram: 24GiB}}
"""
SECRET = "hunter2"


def parsed(
    notify: str, environ: dict[str, str] | None = None, folder: Path = Path("/x"), *, judge: bool = True
) -> Config:
    return loads(f"{BASE}notify: {notify}\n", folder=folder, environ=environ or {}, judge=judge)


def problems(notify: str, environ: dict[str, str] | None = None, folder: Path = Path("/x")) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(notify, environ, folder)
    return caught.value.problems


def test_addresses_are_written_plainly_or_named(tmp_path: Path) -> None:
    (tmp_path / "mail.url").write_text("mailto://ann:pw@mail.lan\n")
    config = parsed(
        "[ntfy://ntfy.lan/gpu, {url: json://h/x}, {url_env: N}, {url_file: mail.url}]",
        {"N": "tgram://t/c"},
        tmp_path,
    )
    assert [(one.name, one.url, one.in_file) for one in config.recipients] == [
        ("notify.0 (ntfy)", "ntfy://ntfy.lan/gpu", True),
        ("notify.1 (json)", "json://h/x", True),
        ("notify.2 (tgram)", "tgram://t/c", False),
        ("notify.3 (mailto)", "mailto://ann:pw@mail.lan", False),
    ]


@pytest.mark.parametrize("one", ["ntfy://h/t", "{url_env: N}"])
def test_one_needs_no_list(one: str) -> None:
    assert [found.url for found in parsed(one, {"N": "ntfy://h/t"}).recipients] == ["ntfy://h/t"]


def test_nobody_is_told_by_default() -> None:
    assert parsed("[]").recipients == ()


def test_an_address_may_come_from_the_environment_whole() -> None:
    url = f"ntfy://ann:{SECRET}@ntfy.lan/gpu"
    config = loads(BASE, folder=Path("/x"), environ={"SWAPPER__NOTIFY__0": url})
    assert [one.url for one in config.recipients] == [url]


@pytest.mark.parametrize(
    ("notify", "said"),
    [
        (
            f"['ntfy://ann:{SECRET}@h/t']",
            "swapper.yaml:3: notify.0: a password does not belong in the file; write {url_env: NAME} or "
            "{url_file: PATH}",
        ),
        ("[{url_env: ABSENT}]", "swapper.yaml:3: notify.0.url_env: the environment variable ABSENT is not set"),
        ("[{url_file: no}]", "swapper.yaml:3: notify.0.url_file: /x/no cannot be read: No such file or directory"),
        ("['']", "swapper.yaml:3: notify.0: is empty; write an apprise URL, like ntfy://ntfy.lan/gpu"),
        (
            "[{}]",
            "swapper.yaml:3: notify.0: needs one of url, url_env and url_file: an apprise URL, or where it is found",
        ),
        (
            f"[{{url: 'json://{SECRET}', url_env: N}}]",
            "swapper.yaml:3: notify.0: needs one of url, url_env and url_file: an apprise URL, or where it is found",
        ),
        (
            f"['json://{SECRET}', 'json://{SECRET}']",
            "swapper.yaml:3: notify.1: is the address of another one, which would be told twice; remove it",
        ),
        (
            f"[{{ulr: 'json://{SECRET}'}}]",
            "swapper.yaml:3: notify.0.ulr: unknown key; did you mean url?",
        ),
        (f"[['ntfy://{SECRET}']]", "swapper.yaml:3: notify.0: must be a section with keys"),
        ("[true]", "swapper.yaml:3: notify.0.url: must be text (put it in quotes), not True"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_by_its_place_and_without_the_address(notify: str, said: str) -> None:
    found = problems(notify, {"N": "json://h"})
    assert found == [said]


def test_a_file_with_nothing_in_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("\n")
    assert problems("[{url_file: url}]", folder=tmp_path) == [
        f"swapper.yaml:3: notify.0.url_file: {tmp_path}/url is empty"
    ]


def test_who_only_looks_for_a_serve_needs_none_of_them() -> None:
    assert parsed("[{url_env: ABSENT}]", judge=False).recipients == ()


def test_no_address_is_in_what_a_configuration_shows_of_itself() -> None:
    assert SECRET not in repr(parsed(f"['json://h/{SECRET}']"))


@pytest.fixture
def server() -> Iterator[Told]:
    with told() as server:
        yield server


async def check(folder: Path, notify: str, *options: str, env: dict[str, str] | None = None) -> Result:
    path = folder / "swapper.yaml"
    path.write_text(f"{BASE}notify: {notify}\n")
    return await swapper("check", "-c", str(path), *options, env=env)


async def test_check_says_what_apprise_does_not_understand_and_sends_nothing(tmp_path: Path, server: Told) -> None:
    result = await check(tmp_path, f"['json://127.0.0.1:{server.port}/x', 'pigeon://{SECRET}/x']")
    assert result.exit_code == 1
    assert "error: notify.1 (pigeon): is not understood by apprise" in result.output
    assert "1 error, 0 warnings" in result.output
    assert SECRET not in result.output
    assert server.rest() == []


async def test_check_warns_of_a_secret_that_stands_in_the_file_and_not_of_one_that_is_named(tmp_path: Path) -> None:
    url = f"discord://4174216298/{SECRET}JHMHI8qBe7bk2ZwO5U711"
    written = await check(tmp_path, f"['{url}']")
    assert "warning: notify.0 (discord): the address holds a secret" in written.output
    assert SECRET not in written.output
    named = await check(tmp_path, "[{url_env: WHOM}]", env={"WHOM": url})
    assert "notify" not in named.output
    assert (written.exit_code, named.exit_code) == (0, 0)


async def test_check_sends_a_test_message_when_it_is_asked_to(tmp_path: Path, server: Told) -> None:
    result = await check(tmp_path, f"['json://127.0.0.1:{server.port}/x']", "--notify")
    assert result.exit_code == 0, result.output
    assert "1 test message sent" in result.output
    assert server.next()["title"] == "swapper: a test"


async def test_check_says_which_test_message_was_not_sent_and_why(tmp_path: Path, server: Told) -> None:
    server.status = 403
    result = await check(tmp_path, f"['json://127.0.0.1:{server.port}/{SECRET}']", "--notify", "--json")
    assert result.exit_code == 1
    (one,) = json.loads(result.stdout)["problems"]
    assert one["level"] == "error"
    assert one["text"].startswith("notify.0 (json): the test message was not sent: Failed to send JSON POST")
    assert "error=403; correct the address, or start that server" in one["text"]
    assert SECRET not in result.output


async def test_check_says_when_there_is_nobody_to_send_a_test_message_to(tmp_path: Path) -> None:
    result = await check(tmp_path, "[]", "--notify")
    assert result.exit_code == 1
    assert "error: notify: nobody is to be told" in result.output
