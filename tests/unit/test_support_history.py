"""The judge of histories finds what it is meant to find: one made-up bad history for each of its rules."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.support import history
from tests.support.history import Call, Event, Json


def lease(key: str, state: str = "released", token: int | None = 1, at: float = 10, **more: object) -> Json:
    """A lease as answered; it expires 10 s after its grant."""
    return {
        "id": f"ls_{key}",
        "label": key,
        "state": state,
        "token": token,
        "reason": None if state in ("queued", "granted") else "because",
        "granted_at": iso(at) if token else None,
        "expires_at": iso(at + 10) if token else None,
        **more,
    }


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def call(verb: str, key: str, at: float, answer: Json | None = None) -> Call:
    """It takes a second."""
    return Call(1, verb, key, at, at + 1, "unknown" if answer is None else "ok", answer)


GOOD = [
    call("create", "a", 8, lease("a", "granted", 1, 9)),
    call("release", "a", 11, lease("a", at=9)),
    call("create", "b", 9, lease("b", "queued", None)),
    call("look", "b", 11, lease("b", "granted", 2, 12)),
    call("release", "b", 14),
    call("release", "b", 16, lease("b", token=2, at=12)),
    call("create", "c", 15),
    call("create", "c", 17, lease("c", "granted", 3, 17)),
    call("heartbeat", "c", 20, {**lease("c", "granted", 3, 17), "expires_at": iso(33)}),
    call("look", "d", 33, lease("d", "granted", 4, 33)),
    call("create", "d", 18, lease("d", "queued", None)),
]
END = [lease("a", at=9), lease("b", token=2, at=12), lease("c", "expired", 3, 17), lease("d", "expired", 4, 33)]


def image(lease: Json, version: int, **more: object) -> Event:
    return Event("lease", {**lease, "version": version, **more})


LOG = [image(lease("a", "granted", 1, 9), 3), image(END[0], 4), image(END[1], 7), image(END[2], 5), image(END[3], 4)]
STORED = [Event("lease", one) for one in END]


def test_a_good_history_is_let_pass() -> None:
    assert history.judge(GOOD, END, LOG, STORED) == []


def test_two_who_believe_they_hold_the_card() -> None:
    early = call("look", "d", 20, lease("d", "granted", 4, 20))
    assert history.overlaps([*GOOD, early]) == ["c and d were believed held at the same time"]


def test_a_belief_ends_with_the_time_that_was_told_or_with_the_release() -> None:
    assert [(b.key, b.since, b.until) for b in history.believed(GOOD[:5])] == [("a", 9, 11), ("b", 12, 14)]
    silent = [call("create", "a", 8, lease("a", "granted", 1, 9)), call("look", "a", 30, lease("a", "granted", 1, 9))]
    assert [(b.since, b.until) for b in history.believed(silent)] == [(9, 19)]


def test_a_token_that_is_not_higher_than_the_one_before() -> None:
    assert history.tokens_fall([], [lease("a", token=5, at=1), lease("b", token=5, at=2)])


def test_a_token_that_falls_in_the_eyes_of_the_clients_alone() -> None:
    later = call("create", "b", 20, lease("b", "granted", 4, 20))
    assert history.tokens_fall([call("create", "a", 8, lease("a", "granted", 5, 9)), later], [])


def test_a_lease_with_two_tokens() -> None:
    again = call("look", "a", 9, lease("a", "granted", 2, 9))
    assert history.tokens_fall([GOOD[0], again], [])


def test_an_acknowledged_lease_that_is_lost() -> None:
    assert history.creates_lost_or_doubled(GOOD, END[1:]) == ["a was told ls_a, which is not there"]


def test_one_key_that_got_two_leases() -> None:
    other = {**lease("a"), "id": "ls_other"}
    assert history.creates_lost_or_doubled([*GOOD, call("create", "a", 9, other)], [*END, other]) == [
        "a was told several leases: ['ls_a', 'ls_other']",
        "a has 2 leases",
    ]


def test_an_unknown_create_that_was_obeyed_twice() -> None:
    assert history.creates_lost_or_doubled([call("create", "c", 9)], [END[2], END[2]]) == ["c has 2 leases"]


def test_a_lease_that_nobody_asked_for() -> None:
    assert history.creates_lost_or_doubled([], END[:1]) == ["a has a lease, and never asked"]


def test_a_release_that_is_undone() -> None:
    assert history.ends_undone(GOOD, [{**END[0], "state": "granted"}, *END[1:]])
    again = call("look", "a", 13, lease("a", "granted", 1, 9))
    assert history.ends_undone([*GOOD, again], END) == ["a was released, and granted afterwards"]


def test_an_answer_that_was_under_way_before_the_end_undoes_nothing() -> None:
    slow = Call(1, "look", "a", 10, 15, "ok", lease("a", "granted", 1, 9))
    assert history.ends_undone([*GOOD, slow], END) == []


def test_a_release_that_was_answered_and_is_no_end() -> None:
    assert history.ends_undone([call("release", "a", 9, lease("a", "granted"))], []) == [
        "the release of a was answered with granted"
    ]


def test_a_lease_that_does_not_end_or_has_no_reason() -> None:
    assert history.without_an_end([lease("a", "granted", reason="x")], []) == ["a is granted in the end"]
    assert history.without_an_end([lease("a", reason=None)], []) == ["a is released without a reason"]


def test_a_lease_that_ends_twice() -> None:
    assert history.without_an_end(END, [*LOG, LOG[1]]) == ["ls_a ended more than once: ['released', 'released']"]


def test_a_log_that_does_not_give_what_is_stored() -> None:
    assert history.log_differs(LOG, [Event("lease", {**END[0], "token": 9})]) == [
        "lease ls_a: token is 9, 1 by the log"
    ]


def test_a_log_with_a_hole() -> None:
    assert history.log_differs([LOG[0], image(END[0], 5)], []) == ["lease ls_a: version 5 follows 3"]


def test_what_the_log_no_longer_holds_is_not_asked_of_it() -> None:
    assert history.log_differs([], STORED) == []
