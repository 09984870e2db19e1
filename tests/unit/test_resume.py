"""What a gateway that was started anew believes of conversations while their models go on serving."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from swapper.core.conversations import Conversation, ProofResult
from swapper.core.types import Step, StepOutcome, StepRecord, Swap
from swapper.gateway.proof import Reuse, finding
from swapper.gateway.resume import resume, stands
from swapper.gateway.talks import Talks
from swapper.snapshots.conversation import Conversation as Known
from swapper.snapshots.conversation import Kept, Links, Place, Request
from swapper.snapshots.index import Index, Limits
from swapper.snapshots.notes import Note
from tests.unit.gateway_doubles import ALPHA, Served, answer, serve
from tests.unit.index_doubles import CHAT, body, chat

LOADED_MS = 1_000
NEW, OLD = chat("ab"), chat("cd")


@pytest.fixture
async def gateway() -> AsyncGenerator[Served]:
    async with serve() as running:
        yield running


@pytest.fixture
def talks(gateway: Served) -> Talks:
    return gateway.member.talks


def remember(index: Index, letters: str, used_ms: int) -> str:
    index.remembered(ALPHA, chat(letters), Request(CHAT, body(letters)), 500, used_ms)
    return chat(letters).id


def line(letters: str, snapshot: str, **more: object) -> Conversation:
    chain = chat(letters)
    talk = Conversation(ALPHA, 0, snapshot, 500, 1, saved=True, head=chain.id, links=(chain.id,))
    return replace(talk, **more)  # pyright: ignore[reportArgumentType]


def back(*lines: Conversation) -> Swap:
    loaded = StepRecord(Step.LOAD, ALPHA, 900, 50, outcome=StepOutcome.DONE)
    return Swap(
        "sw_1", "gpu0", "x", 7, (), (ALPHA,), Step.OPEN, 900, 900,
        steps=(loaded,), conversations=lines, outcome="done", ended_ms=LOADED_MS,
    )  # fmt: skip


def place(talks: Talks, letters: str) -> Place:
    talk = talks.index.conversation(ALPHA, chat(letters).id)
    assert talk is not None
    return talk.place


def test_what_was_used_since_the_model_was_loaded_is_believed_in_it_and_nothing_older(talks: Talks) -> None:
    remember(talks.index, "ab", LOADED_MS - 1)
    remember(talks.index, "cd", LOADED_MS)
    resume(talks, ALPHA, [back()])
    assert (place(talks, "ab"), place(talks, "cd")) == (Place.COLD, Place.SERVER)


def test_of_a_model_that_no_swap_loaded_all_is_believed(talks: Talks) -> None:
    remember(talks.index, "ab", 1)
    resume(talks, ALPHA, [])
    assert place(talks, "ab") is Place.SERVER


def test_a_swap_that_did_not_load_it_tells_nothing(talks: Talks) -> None:
    remember(talks.index, "ab", LOADED_MS)
    away = replace(back(), id="sw_2", from_=(ALPHA,), to=(), steps=(), ended_ms=5_000)
    failed = replace(back(), id="sw_3", ended_ms=5_000, steps=(
        StepRecord(Step.LOAD, ALPHA, 900, 50, outcome=StepOutcome.FAILED),
    ))  # fmt: skip
    resume(talks, ALPHA, [failed, away, back()])
    assert place(talks, "ab") is Place.SERVER


def test_what_stayed_on_disk_is_found_there_and_what_came_back_is_in_its_slot(talks: Talks) -> None:
    remember(talks.index, "ab", 1)
    lines = (
        line("ab", "a.kv", kept=True, slot=-1),
        line("cd", "b.kv", restored=True, result=ProofResult.UNPROVED, slot=1),
    )
    resume(talks, ALPHA, [back(*lines)])
    assert (place(talks, "ab"), place(talks, "cd")) == (Place.DISK, Place.SERVER)
    assert talks.opened_here(ALPHA)


def test_what_came_back_before_it_began_may_lie_in_its_slot_no_more_and_condemns_no_strategy(talks: Talks) -> None:
    """Another may have been brought from disk into that slot, while nobody was there to hear of it."""
    resume(talks, ALPHA, [back(line("cd", "b.kv", restored=True, result=ProofResult.UNPROVED, slot=1))])
    assert proved(talks, "cd", slot=1) == (ProofResult.COLD, False)


def test_neither_does_what_another_has_taken_the_place_of(talks: Talks) -> None:
    came: list[dict[str, object]] = [
        {"snapshot": f"{x}.kv", "slot": n, "tokens": 500, "id": chat(x).id} for n, x in enumerate("ab")
    ]
    talks.opened(ALPHA, "gpu0", "sw_1", {"unproved": came, "loaded": True})
    talks.index.kept(ALPHA, [Kept("c.kv", chat("c").id, (chat("c").id,), 500)])
    talks.placed(ALPHA, {"snapshot": "c.kv", "ok": True, "slot": 1, "tokens": 500})
    assert proved(talks, "b", slot=1) == (ProofResult.COLD, False)
    assert proved(talks, "a", slot=0) == (ProofResult.COLD, True)
    assert proved(talks, "c", slot=1) == (ProofResult.COLD, True)


def proved(talks: Talks, letters: str, *, slot: int) -> tuple[object, object]:
    """What an answer shows that goes on with it and found nothing of it in the slot."""
    ledger = talks._ledgers[ALPHA]  # pyright: ignore[reportPrivateUsage]
    found = finding(ledger, talks.index.find(ALPHA, chat(letters + "z")), Reuse(0, 520, slot), slot)
    assert found is not None
    return found["result"], found["continued"]


def test_when_a_manifest_says_they_were_used_decides_which_of_them_is_the_newest(talks: Talks) -> None:
    lines = (
        line("ab", "a.kv", kept=True, slot=-1, used_ms=30),
        line("cd", "b.kv", restored=True, result=ProofResult.UNPROVED, slot=1, used_ms=20),
        line("ef", "c.kv", restored=True, result=ProofResult.UNPROVED, slot=0, used_ms=25),
    )
    resume(talks, ALPHA, [back(*lines)])
    assert [talk["used_ms"] for talk in talks.told(ALPHA)] == [25, 20]
    assert {talk.used_ms for talk in talks.index.conversations(ALPHA)} == {20, 25, 30}
    talks.index.limits = Limits(conversations=2)
    talks.index.remembered(ALPHA, NEW, Request(CHAT, b"{}"), 1, 40)
    assert {talk.used_ms for talk in talks.index.conversations(ALPHA)} == {40, 25}


def test_what_came_back_from_disk_and_was_seen_warm_is_not_said_to_lie_there(talks: Talks) -> None:
    resume(talks, ALPHA, [back(line("ab", "a.kv", kept=True, restored=True, result=ProofResult.WARM))])
    assert talks.index.conversations(ALPHA) == ()


def test_a_swap_that_has_told_since_is_not_overruled(talks: Talks) -> None:
    talks.opened(ALPHA, "gpu0", "sw_9", {"loaded": True})
    remember(talks.index, "ab", LOADED_MS)
    resume(talks, ALPHA, [back()])
    assert place(talks, "ab") is Place.COLD


async def test_what_a_dead_gateway_was_to_replay_is_taken_over_and_what_a_living_one_has_is_left_to_it() -> None:
    async with serve() as gateway:
        talks = gateway.member.talks
        mine, theirs = (remember(talks.index, letters, 500) for letters in ("abc", "xyz"))
        waiting = [
            line(letters, f"replay:{name}", strategy="replay", gateway=f"gateway:{who}", head=name)
            for letters, name, who in (("abc", mine, "dead"), ("xyz", theirs, "other"))
        ]
        gateway.upstream.scripts = [answer({"timings": {"cache_n": 0, "prompt_n": 500}, "__verbose": {"id_slot": 0}})]
        resume(talks, ALPHA, [back(*waiting)], ["other"])
        while (report := await gateway.link.reports.get()).verb != "recalled":
            pass
        assert (report.outcome, report.data["snapshot"]) == ("ok", f"replay:{mine}")
        assert len(gateway.upstream.seen) == 1


@pytest.mark.parametrize("loaded", [True, False], ids=["its load is on record", "nobody knows of its load"])
def test_what_made_room_since_the_load_is_found_on_disk(talks: Talks, *, loaded: bool) -> None:
    remember(talks.index, "ab", used_ms=LOADED_MS + 5)
    displaced = (line("ab", "a.kv", kept=True), line("cd", "c.kv", kept=True), line("ef", "e.kv", tenant="llama/other"))
    resume(talks, ALPHA, [back()] if loaded else [], displaced=displaced)
    assert {talk.snapshot for talk in talks.index.conversations(ALPHA)} == {"a.kv", "c.kv"}
    assert place(talks, "ab") is place(talks, "cd") is Place.DISK


def test_what_is_told_to_have_made_room_before_the_record_is_read_is_not_forgotten_over_it(talks: Talks) -> None:
    chain = chat("ab")
    kept = [{"snapshot": "a.kv", "id": chain.id, "links": [chain.id], "tokens": 500, "used_ms": 5}]
    talks.placed(ALPHA, {"snapshot": "x.kv", "ok": True, "slot": 0, "tokens": 900, "kept": kept})
    resume(talks, ALPHA, [back()])
    assert place(talks, "ab") is Place.DISK


def note(*told: tuple[str, int, dict[str, object]], load: str = "sw_1") -> Note:
    """Conversations (letters, when they were used, what else is known) as an earlier process noted them."""
    talks = (Known(Links.of(chat(letters)), used_ms, 9, 500, 400, 50, **more) for letters, used_ms, more in told)  # pyright: ignore[reportArgumentType]
    return Note(ALPHA, load, tuple(talks))


def there(talks: Talks) -> dict[str, tuple[Place, int | None, str]]:
    return {talk.id: (talk.place, talk.slot, talk.snapshot) for talk in talks.index.conversations(ALPHA)}


def test_what_was_noted_counts_and_not_what_the_record_knows_of_before(talks: Talks) -> None:
    """They came back, went on and made room for one another since the swap: of that its record has nothing."""
    on_disk: dict[str, object] = {"place": Place.DISK, "snapshot": "a2.kv"}
    talks.index.noted(note(("abc", 1_500, on_disk), ("cde", 1_600, {"slot": 1, "origin": "c.kv"})))
    lines = (line("ab", "a.kv", kept=True), line("cd", "c.kv", kept=True), line("ef", "e.kv", kept=True))
    resume(talks, ALPHA, [back(*lines)])
    assert there(talks) == {
        chat("abc").id: (Place.DISK, None, "a2.kv"),
        chat("cde").id: (Place.SERVER, 1, ""),
    }
    assert talks.opened_here(ALPHA)


def test_what_made_room_after_the_note_was_written_is_on_disk_and_what_went_on_since_is_not(talks: Talks) -> None:
    talks.index.noted(note(("ab", 1_500, {"slot": 0}), ("cde", 1_600, {"slot": 1})))
    displaced = (line("ab", "a.kv", kept=True, used_ms=1_500), line("cd", "c.kv", kept=True, used_ms=1_400))
    resume(talks, ALPHA, [back()], displaced=displaced)
    assert there(talks) == {chat("ab").id: (Place.DISK, None, "a.kv"), chat("cde").id: (Place.SERVER, 1, "")}


def test_what_is_noted_as_unproved_is_proved_by_the_name_that_it_has_now(talks: Talks) -> None:
    came: dict[str, object] = {"slot": 1, "restored": True, "origin": "b.kv"}
    tended: dict[str, object] = {"slot": 0, "restored": True, "origin": "later.kv"}
    talks.index.noted(note(("cde", 1_600, came), ("xyz", 1_700, tended)))
    resume(talks, ALPHA, [back(line("cd", "b.kv", restored=True, result=ProofResult.UNPROVED, slot=1))])
    assert proved(talks, "cde", slot=1) == (ProofResult.COLD, False)
    assert proved(talks, "xyz", slot=0) == (ProofResult.COLD, False)


@pytest.mark.parametrize(
    ("load", "swaps", "holds"),
    [("sw_1", [back()], True), ("sw_0", [back()], False), ("sw_0", [], True), ("", [back()], False)],
    ids=["that load was the last", "another came after it", "none is on record", "none was known then"],
)
def test_a_note_stands_for_the_load_it_was_written_after(load: str, swaps: list[Swap], *, holds: bool) -> None:
    assert stands(swaps, ALPHA, load) is holds


@pytest.mark.parametrize("kept", [True, False], ids=["kept on disk", "restored then"])
def test_without_a_note_what_went_on_since_the_load_is_in_the_server_and_no_older_copy_of_it_is_brought(
    talks: Talks, *, kept: bool
) -> None:
    name = remember(talks.index, "abc", LOADED_MS + 5)
    how = {"kept": True} if kept else {"restored": True, "result": ProofResult.UNPROVED}
    resume(talks, ALPHA, [back(line("ab", "old.kv", tokens=300, **how))])
    assert there(talks) == {name: (Place.SERVER, None, "")}
    assert [talk["tokens"] for talk in talks.told(ALPHA)] == [500]


def test_what_was_asked_the_same_again_since_it_made_room_is_in_the_server(talks: Talks) -> None:
    talks.index.noted(note(("ab", 1_500, {"slot": 0})))
    resume(talks, ALPHA, [back()], displaced=(line("ab", "a.kv", kept=True, used_ms=1_400),))
    assert there(talks) == {chat("ab").id: (Place.SERVER, 0, "")}
