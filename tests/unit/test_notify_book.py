"""How often the same is told, what is folded into one message, and that nothing of it is left out without a count."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swapper.notify import book as books
from swapper.notify.book import BURST_MS, CAP, HOUR_MS, LINES, QUIET_MS, STALE_MS, UNSENT, WAITING, Book, Message
from swapper.notify.worth import Notice, Severity

T = 1_800_000_000_000


def notice(at_ms: int, about: str = "", text: str = "x", *, over: bool = False, kind: str = "fault") -> Notice:
    severity = Severity.SUCCESS if over else Severity.FAILURE
    return Notice(kind, "gpu0", about, f"{kind} {about}".strip(), text, severity, at_ms, over)


class Played:
    """A book, and the messages it made, each with its moment."""

    def __init__(self) -> None:
        self.book = Book()
        self.messages: list[tuple[int, Message]] = []
        self.now = T

    def hear(self, *notices: Notice) -> None:
        for one in notices:
            self.until(one.at_ms)
            self.book = books.hear(self.book, one, one.at_ms)

    def until(self, ms: int) -> None:
        """Let everything due before that happen when it is due."""
        while (due := books.due_ms(self.book, self.now)) is not None and due <= ms:
            self.now = max(self.now, due)
            before = self.book
            self.book, message = books.turn(self.book, self.now)
            if message is not None:
                self.messages.append((self.now - T, message))
            assert message is not None or self.book != before, "due and nothing done: it would spin"
        self.now = ms

    @property
    def bodies(self) -> list[str]:
        return [message.body for _, message in self.messages]


def test_one_thing_is_one_message_with_its_own_title() -> None:
    played = Played()
    played.hear(notice(T, text="held by blender"))
    played.until(T + 10_000)
    assert played.messages == [(BURST_MS, Message("fault", "held by blender", Severity.FAILURE, T))]


def test_the_same_is_told_again_only_after_a_while_and_then_with_the_number_of_what_came_meanwhile() -> None:
    played = Played()
    played.hear(*(notice(T + n * 60_000, text=f"number {n}") for n in range(5)))
    played.until(T + HOUR_MS)
    moments = [ms for ms, _ in played.messages]
    assert moments == [BURST_MS, QUIET_MS + BURST_MS]
    assert played.bodies[0] == "number 0"
    assert played.bodies[1].startswith("number 4 (and 3 more like it)")


def test_what_came_once_more_is_told_without_a_number() -> None:
    played = Played()
    played.hear(notice(T), notice(T + 60_000, text="again"))
    played.until(T + HOUR_MS)
    assert played.bodies[1].startswith("again (2027-")


def test_after_a_while_without_it_the_same_is_told_at_once() -> None:
    played = Played()
    played.hear(notice(T), notice(T + QUIET_MS + 1))
    played.until(T + HOUR_MS)
    assert [ms for ms, _ in played.messages] == [BURST_MS, QUIET_MS + 1 + BURST_MS]


def test_the_end_of_it_is_told_at_once() -> None:
    played = Played()
    played.hear(notice(T), notice(T + 60_000, over=True, text="free again"))
    played.until(T + HOUR_MS)
    assert [(ms, message.body) for ms, message in played.messages] == [
        (BURST_MS, "x"),
        (60_000 + BURST_MS, "free again"),
    ]


def test_a_card_that_flaps_for_an_hour_is_told_of_a_few_times_and_the_last_word_is_how_it_stands() -> None:
    played = Played()
    for n in range(600):
        played.hear(notice(T + n * 6_000, over=n % 2 == 1, text="free" if n % 2 else "fault"))
    played.until(T + 2 * HOUR_MS)
    assert 3 <= len(played.messages) <= 8
    assert played.bodies[-1].startswith("free")


def test_a_burst_is_one_message_under_the_worst_title() -> None:
    played = Played()
    mild = replace(notice(T, "a", "mild"), severity=Severity.INFO)
    played.hear(mild, notice(T + 100, "b", "bad"), notice(T + 200, "c", "as bad"))
    played.until(T + HOUR_MS)
    ((_, message),) = played.messages
    assert message.title == "fault b, and 2 more"
    assert message.body == "- mild\n- bad\n- as bad"
    assert message.severity is Severity.FAILURE


def test_the_same_sentence_of_several_is_one_line() -> None:
    played = Played()
    played.hear(*(notice(T + n, str(n), "the store was put back") for n in range(3)))
    played.until(T + HOUR_MS)
    assert played.bodies == ["the store was put back"]


def test_a_large_burst_is_cut_and_counted() -> None:
    played = Played()
    played.hear(*(notice(T + n, f"t{n}", f"line {n}") for n in range(WAITING + 30)))
    played.until(T + 60_000)
    ((_, message),) = played.messages
    lines = message.body.splitlines()
    assert len(lines) == LINES + 1
    assert lines[-1] == f"- and {WAITING + 30 - LINES} more (swapper events)"


def test_there_are_only_so_many_messages_an_hour_and_the_rest_comes_as_one() -> None:
    played = Played()
    played.hear(*(notice(T + n * 10_000, f"t{n}", f"line {n}") for n in range(CAP + 8)))
    played.until(T + HOUR_MS - 1)
    assert len(played.messages) == CAP
    played.until(T + HOUR_MS + 10_000)
    assert len(played.messages) == CAP + 1
    assert len(played.bodies[-1].splitlines()) == 8


def test_what_is_told_late_says_when_it_was() -> None:
    book = books.hear(Book(), notice(T), T + 3 * HOUR_MS)
    _, message = books.turn(book, T + 3 * HOUR_MS + BURST_MS)
    assert message is not None
    assert message.body == "x (2027-01-15 08:00 UTC)"


def test_what_is_older_than_a_day_is_told_no_more() -> None:
    assert books.hear(Book(), notice(T), T + STALE_MS + 1) == Book()


def test_a_clock_that_was_stepped_back_keeps_nothing_quiet_for_longer() -> None:
    played = Played()
    played.hear(notice(T + 10 * HOUR_MS))
    played.until(T + 10 * HOUR_MS + 5_000)
    played.now = T
    played.hear(notice(T, text="again"))
    played.until(T + QUIET_MS + BURST_MS)
    assert played.bodies[1].startswith("again")


def test_a_kept_book_goes_on_as_it_was() -> None:
    played = Played()
    played.hear(notice(T), notice(T + 10), notice(T + 20, "b"))
    book = books.post(played.book, Message("t", "b", Severity.INFO, T), ["one"])
    assert books.read(books.written(book)) == book
    assert books.read("") is None
    assert books.read('{"at": 5}') is None


def test_of_too_many_unsent_messages_the_oldest_become_one() -> None:
    book = Book()
    for n in range(UNSENT + 2):
        book = books.post(book, Message(f"t{n}", f"b{n}", Severity.INFO, T + n), ["one"])
    assert len(book.unsent["one"]) == UNSENT
    assert all(f"b{n}" in book.unsent["one"][0].body for n in range(3))


def test_several_unsent_messages_are_sent_as_one_under_the_worst_title() -> None:
    messages = (Message("a", "aa", Severity.INFO, T), Message("b", "bb", Severity.FAILURE, T + 1))
    one = books.merged(messages)
    assert (one.title, one.severity, one.at_ms) == ("b, and 1 earlier or later", Severity.FAILURE, T)
    assert "aa" in one.body
    assert "bb" in one.body


@given(st.lists(st.tuples(st.integers(0, 20 * 60_000), st.integers(0, 30), st.booleans()), min_size=1, max_size=60))
def test_everything_is_told_or_counted_within_the_limits(steps: list[tuple[int, int, bool]]) -> None:
    """Also the quietest thing is told within a quiet time and the wait for room in the hour."""
    played, now = Played(), T
    for n, (pause, who, over) in enumerate(steps):
        now += pause
        played.hear(notice(now, f"t{who}", f"t{who}: {n};", over=over))
    played.until(now + QUIET_MS + 2 * HOUR_MS)
    assert books.due_ms(played.book, played.now) is None, "nothing waits"
    last = {who: n for n, (_, who, _) in enumerate(steps)}
    moments = [ms for ms, _ in played.messages]
    assert all(b - a >= HOUR_MS for a, b in zip(moments, moments[CAP:], strict=False))
    shown = " ".join(played.bodies)
    cut = any("more (swapper events)" in body for body in played.bodies)
    assert cut or all(f"t{who}: {n};" in shown for who, n in last.items()), "of each thing the last word is told"
