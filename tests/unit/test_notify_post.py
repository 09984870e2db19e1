"""Sending by the real apprise, to a server on a loopback port: what arrives, what failed and why, and no secret."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import psutil
import pytest

from swapper.config.recipients import Recipient
from swapper.notify import post, speaker
from swapper.notify.book import Message
from swapper.notify.worth import Severity
from tests.support.router import free_port
from tests.support.told import Told, told

SAID = Message("gpu0 is at fault", "held by pid 7 (<b>blender</b> & *more*)", Severity.FAILURE, 0)


@pytest.fixture
def server() -> Iterator[Told]:
    with told() as server:
        yield server


def to(server: Told, scheme: str, rest: str) -> Recipient:
    return Recipient("notify.0", f"{scheme}://{rest.format(f'127.0.0.1:{server.port}')}")


async def test_a_json_server_gets_title_text_and_severity_as_they_are(server: Told) -> None:
    assert await post.send(to(server, "json", "{}/gpu"), SAID) is None
    came = server.next()
    assert (came["title"], came["message"], came["type"]) == (SAID.title, SAID.body, "failure")


async def test_an_ntfy_server_gets_title_and_text_in_the_topic(server: Told) -> None:
    assert await post.send(to(server, "ntfy", "ann:secret@{}/gpu"), SAID) is None
    came = server.next()
    assert (came["topic"], came["title"], came["message"]) == ("gpu", SAID.title, SAID.body)
    assert server.headers[0]["Authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    ("scheme", "rest"),
    [
        ("ntfy", "ann:hunter2@{}/topicsecret"),
        ("json", "ann:hunter2@{}/pathsecret?+X-Token=headersecret&-key=payloadsecret&:a=%73pelled"),
    ],
)
async def test_a_refusal_is_told_with_its_status_and_without_a_part_of_the_address(
    server: Told, scheme: str, rest: str
) -> None:
    server.status = 403
    why = await post.send(to(server, scheme, rest), SAID)
    assert why is not None
    assert "error=403" in why
    assert not [part for part in ("ann", "hunter2", "secret", "127.0.0.1", "pelled") if part in why]


async def test_that_nobody_listens_is_told_without_a_part_of_the_address() -> None:
    why = await post.send(Recipient("notify.0", f"ntfy://ann:hunter2@127.0.0.1:{free_port()}/topicsecret"), SAID)
    assert why is not None
    assert "Connection error" in why
    assert not [part for part in ("ann", "hunter2", "secret", "127.0.0.1") if part in why]


async def test_who_does_not_answer_is_given_up_in_time_and_leaves_no_process(server: Told) -> None:
    server.silent.set()
    began = time.monotonic()
    patient = to(server, "json", "{}/x?rto=60")
    assert await post.send(patient, SAID, limit_s=2.0) == "it did not answer within 2 s"
    assert time.monotonic() - began < 8
    assert not speakers()


async def test_whoever_stops_waiting_leaves_no_process(server: Told) -> None:
    server.silent.set()
    sending = asyncio.create_task(post.send(to(server, "json", "{}/x?rto=60"), SAID))
    await asyncio.to_thread(server.next)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert not speakers()


def speakers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if speaker.__file__ in child.cmdline()]


@pytest.mark.parametrize("url", ["ntfy://ntfy.lan/gpu", "mailto://ann:pw@mail.lan", "json://127.0.0.1/x"])
async def test_an_address_that_apprise_understands_has_no_problem(url: str) -> None:
    assert (await post.look(Recipient("notify.0", url))).problem is None


@pytest.mark.parametrize("url", ["pigeon://loft/hunter2", "hunter2", "tgram://hunter2", "ntfy:/ntfy.lan/hunter2"])
async def test_an_address_that_it_does_not_is_told_without_a_part_of_it(url: str) -> None:
    problem = (await post.look(Recipient("notify.0", url))).problem
    assert problem is not None
    assert "https://github.com/caronc/apprise/wiki" in problem
    assert "hunter2" not in problem
    assert "loft" not in problem


async def test_what_apprise_would_hide_is_a_secret() -> None:
    assert (await post.look(Recipient("notify.0", "ntfy://ann:pw@ntfy.lan/gpu"))).secret
    assert (await post.look(Recipient("notify.0", "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js"))).secret
    assert not (await post.look(Recipient("notify.0", "ntfy://ntfy.lan/gpu"))).secret


async def test_a_process_that_cannot_be_started_is_why_nothing_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post.sys, "executable", "/nonexistent/python")
    why = await post.send(Recipient("notify.0", "json://127.0.0.1/x"), SAID)
    assert why == "the process that sends it cannot be started: No such file or directory"


def test_neither_address_nor_secret_is_in_the_words_for_a_recipient() -> None:
    one = Recipient("notify.0", "ntfy://ann:hunter2@ntfy.lan/gpu")
    assert one.name == "notify.0 (ntfy)"
    assert not [part for part in ("hunter2", "lan", "gpu") if part in f"{one} {one!r} {one.name} {one.id}"]
