"""Conversations come back warm from a handover though swapper was killed and started anew before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_conversations import cache_n, handover, results, said, text
from tests.support.server import Json, Server

ON_DISK = "{bodies: disk}"


def words(seed: int) -> str:
    """Each conversation has a length of its own: a slot that no process remembers is told by its tokens."""
    return text(seed, 1500 + 20 * seed)


def talk_of(server: Server, model: str, seeds: range) -> list[str]:
    return [said(server.chat(model, words(seed))) for seed in seeds]


def go_on(server: Server, model: str, seed: int, answer: str) -> Json:
    """The next turn, with what was said in between a little shorter: reasoning is stripped, say."""
    return server.chat(model, words(seed), answer.strip()[:-1], "and then?")


def killed_and_started(server: Server, *, written: int = 0) -> None:
    """Once so many requests are on disk: a call does not wait for its own."""
    server.until(lambda _: [{}] if len(requests(server)) >= written else [])
    server.kill()
    server.start()


def requests(server: Server) -> list[Path]:
    return list((server.state_dir / "requests").glob("*.request"))


@pytest.mark.parametrize("model", ["alpha", "lfm"])
def test_requests_on_disk_outlive_a_kill_so_that_conversations_beyond_the_slots_are_saved_all_the_same(
    serve: Callable[..., Server], model: str
) -> None:
    server = serve(model, snapshots=ON_DISK)
    first = talk_of(server, model, range(5))
    killed_and_started(server, written=5)
    handover(server)
    for seed in (4, 2, 0, 1, 3):
        answer = go_on(server, model, seed, first[seed])
        assert cache_n(answer) >= 0.95 * 1500, (seed, answer["timings"], server.log_path.read_text()[-2000:])


def test_a_sliding_window_model_is_read_again_from_requests_on_disk(serve: Callable[..., Server]) -> None:
    server = serve("gemma", snapshots=ON_DISK)
    (first,) = talk_of(server, "gemma", range(1))
    killed_and_started(server, written=1)
    handover(server)
    server.until(lambda _: [line for line in results(server) if line["restored"]])
    assert cache_n(go_on(server, "gemma", 0, first)) >= 0.95 * 1500


def test_what_lay_on_disk_when_it_was_killed_comes_back_for_its_call_and_what_was_unproved_is_proved(
    serve: Callable[..., Server],
) -> None:
    server = serve("alpha")
    first = talk_of(server, "alpha", range(5))
    handover(server)
    killed_and_started(server)
    for seed in range(5):
        answer = go_on(server, "alpha", seed, first[seed])
        assert cache_n(answer) >= 0.95 * 1500, (seed, answer["timings"], server.log_path.read_text()[-2000:])
    server.until(lambda _: [c["result"] for c in results(server)] == ["warm"] * 5)  # pyright: ignore[reportArgumentType, reportReturnType]


def test_what_is_kept_on_disk_is_for_us_alone_and_goes_once_it_is_not_to_be_kept_any_more(
    serve: Callable[..., Server],
) -> None:
    server = serve("alpha", snapshots=ON_DISK)
    talk_of(server, "alpha", range(1))
    folder = server.state_dir / "requests"
    server.stop()
    (kept,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)
    assert words(0).encode() in kept.read_bytes()
    server.config.write_text(server.config.read_text().replace("bodies: disk", "bodies: memory"))
    server.start()
    assert list(folder.iterdir()) == []
