"""What of the log a person is told: with which title, about whom, how badly, and what is nobody's news."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from swapper.core.commit import Alert, AlertKind, Commit
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.jobs import Job, JobState
from swapper.core.types import Card, WorkClass
from swapper.notify.worth import Notice, Severity, worth_telling
from swapper.store import codec
from swapper.store.protocol import StoredEvent
from tests.unit.notify_doubles import FAULT, FREE, not_loaded

AT = 1_800_000_000_123


def told(kind: str, data: str, subject: str = "gpu0") -> Notice | None:
    return worth_telling(StoredEvent(f"{AT}-4", kind, subject, 0, data))


def of(alert: Alert) -> Notice:
    (said,) = codec.said(Commit(alerts=(alert,)))
    notice = told(said["type"], said["doc"])
    assert notice is not None
    return notice


def test_a_fault_is_told_with_its_own_sentence_and_its_time() -> None:
    assert of(FAULT) == Notice("fault", "gpu0", "", "gpu0 is at fault", FAULT.text, Severity.FAILURE, AT)


def test_the_end_of_a_fault_is_told_of_the_same_thing() -> None:
    end = of(FREE)
    assert end.over
    assert end.severity is Severity.SUCCESS
    assert end.title == "gpu0 is free again"
    assert end.key == of(FAULT).key


def test_what_two_tenants_did_are_two_things() -> None:
    assert of(not_loaded("llama/a")).key != of(not_loaded("llama/b")).key
    assert of(not_loaded("llama/a", "why")).key == of(not_loaded("llama/a", "another why")).key


def test_foreign_vram_is_about_who_holds_it() -> None:
    alert = Alert("gpu0", "pid 9 (x) takes 3 GiB", {"holders": ["pid 9 (x)"]}, AlertKind.FOREIGN_VRAM)
    notice = of(alert)
    assert (notice.card, notice.about, notice.severity) == ("gpu0", "pid 9 (x)", Severity.WARNING)


@pytest.mark.parametrize("kind", AlertKind)
@pytest.mark.parametrize("over", [False, True])
def test_every_kind_of_alert_has_a_title_without_holes(kind: AlertKind, *, over: bool) -> None:
    notice = of(Alert("gpu0", "text", {"tenant": "llama/a"}, kind, over))
    assert notice.title
    assert "{" not in notice.title


def test_what_is_raised_for_every_card_is_one_thing() -> None:
    cards = [of(Alert(card, "the store is an older copy", kind=AlertKind.PUT_BACK)) for card in ("gpu0", "gpu1")]
    assert cards[0].key == cards[1].key


def test_an_alert_of_an_older_release_is_told() -> None:
    notice = told("alert", json.dumps({"id": "gpu0", "state": "raised", "card": "gpu0", "text": "x", "data": {}}))
    assert notice is not None
    assert notice.text == "x"


@pytest.mark.parametrize("data", ["", "{}", '{"card":"gpu0","text":"x","data":{},"kind":"of tomorrow"}'])
def test_what_cannot_be_read_is_passed_over(data: str) -> None:
    assert told("alert", data) is None


def conversation(result: ProofResult | None, reason: str | None = None) -> Notice | None:
    talk = Conversation("llama/a", 0, "snap", 4_000, 1, saved=True, result=result, reason=reason)
    (said,) = codec.said(Commit(conversations=(talk,)))
    return told(said["type"], said["doc"], "snap")


def test_a_conversation_that_came_back_cold_is_told_and_a_warm_one_is_not() -> None:
    notice = conversation(ProofResult.COLD, "slot taken")
    assert notice is not None
    assert notice.text == "a conversation of llama/a (4,000 tokens) came back cold: slot taken"
    assert [conversation(result) for result in (None, ProofResult.UNPROVED, ProofResult.WARM)] == [None, None, None]


def test_a_conversation_that_came_back_cold_is_the_same_thing_whichever_event_says_it() -> None:
    notice = conversation(ProofResult.COLD)
    assert notice is not None
    assert notice.key == of(Alert("gpu0", "2 are cold", {"tenant": "llama/a"}, AlertKind.COLD)).key


def test_a_failed_job_and_a_missed_window_are_told_and_their_other_states_are_not() -> None:
    queued = Job("jb_1", "encode", "ann", WorkClass.NORMAL, "main", AT, "ls_1", {}, {})
    failed = told("job", codec.job_text(replace(queued, state=JobState.FAILED, reason="exit status 1")), "jb_1")
    assert failed is not None
    assert (failed.text, failed.about) == ("job jb_1 of encode failed: exit status 1", "encode")
    others = [state for state in JobState if state is not JobState.FAILED]
    assert [told("job", codec.job_text(replace(queued, state=state))) for state in others] == [None] * len(others)
    window = told("window", '{"id":"sunday","state":"missed","explain":"the card was held until 05:10"}', "sunday")
    assert window is not None
    assert window.text == "window sunday was missed: the card was held until 05:10"
    assert told("window", '{"id":"sunday","state":"running"}', "sunday") is None


def test_what_goes_on_every_day_is_nobodys_news() -> None:
    assert told("card", codec.card_text(Card("gpu0"))) is None
    assert told("tenant", "{}") is None


def test_an_alert_in_the_log_says_whether_it_is_raised_or_over() -> None:
    states = [json.loads(codec.said(Commit(alerts=(alert,)))[0]["doc"])["state"] for alert in (FAULT, FREE)]
    assert states == ["raised", "over"]
