"""A turn is one decision: what falls together is written together, in the meaning of one thing after the other."""

from __future__ import annotations

from dataclasses import replace

from swapper.core import machine
from swapper.core.apply import apply
from swapper.core.commit import Commit, LeaseChange
from swapper.core.orders import Command, Report, answer_to
from swapper.core.turn import Seen, card_of, decide
from swapper.core.types import Card, Fault, LeaseState, World
from tests.support.play import GIB, MED, SAVED, SLOTS, Play, granted, spec, tenant

SEEN = Seen(hosts={"main"})


def turned(play: Play, *answers: Report, seen: Seen = SEEN) -> Commit | None:
    """One turn on the world of the play, applied to it."""
    commit = decide(play.world, play.spec, seen, answers, lambda: "sw_next").commit
    if commit is not None:
        play.apply(commit)
    return commit


def saving() -> Play:
    """Two slots are being saved for lease `a`."""
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="save", drain={"slots": SLOTS})
    return play


def saved(command: Command) -> Report:
    return answer_to(command, "ok", data=SAVED)


def test_answers_that_come_together_are_one_commit_at_the_version_that_was_read() -> None:
    play = saving()
    version = play.card.version
    commit = turned(play, *map(saved, play.swap.pending))
    assert commit is not None
    assert [card.version for card in commit.cards] == [version]
    assert [order.verb for order in commit.commands] == ["release"]
    assert [talk.saved for swap in commit.swaps for talk in swap.conversations] == [True, True]


def test_the_joined_commit_leaves_the_world_that_one_after_the_other_leaves() -> None:
    together, apart = saving(), saving()
    answers = tuple(map(saved, together.swap.pending))
    turned(together, *answers)
    for answer in answers:
        turned(apart, answer)
    assert replace(together.card, version=0) == replace(apart.card, version=0)
    assert together.world.leases == apart.world.leases


def test_an_answer_taken_before_changes_nothing() -> None:
    play = saving()
    answers = tuple(map(saved, play.swap.pending))
    turned(play, *answers)
    assert turned(play, *answers) is None


def test_a_lease_that_ends_and_the_swap_back_are_one_commit_with_the_token_in_it() -> None:
    play = granted(default=True)
    before = play.world.token
    play.end("a")
    commit = turned(play)
    assert commit is not None
    assert [card.swap.cause for card in commit.cards if card.swap] == ["lease a"]
    assert commit.tokens == (play.swap.token,)
    assert play.swap.token > before
    assert play.world.token == play.swap.token


def test_a_lease_that_would_change_twice_is_left_for_the_next_turn() -> None:
    first, then = (Commit(leases=(change,)) for change in _two_changes())
    assert first.then(then) is None


def _two_changes() -> tuple[LeaseChange, LeaseChange]:
    queued, preparing = frozenset({LeaseState.QUEUED}), frozenset({LeaseState.PREPARING})
    return (
        LeaseChange("a", queued, LeaseState.PREPARING),
        LeaseChange("a", preparing, LeaseState.GRANTED, token=9),
    )


def test_a_turn_that_was_cut_short_says_so_and_no_other() -> None:
    """A lease that is granted by an answer, and may not be held at all, would change twice."""
    play = Play(spec(tenant("med")))
    play.enqueue("a", max_hold_ms=0)
    started = decide(play.world, play.spec, SEEN, (), lambda: "sw_a")
    assert (started.commit is not None, started.more) == (True, False)
    turned(play)
    proved = answer_to(play.pending("vacate"), "ok")
    granted = decide(play.world, play.spec, SEEN, (proved,), lambda: "sw_b")
    assert granted.commit is not None
    assert ([change.state for change in granted.commit.leases], granted.more) == ([LeaseState.GRANTED], True)
    play.apply(granted.commit)
    revoked = decide(play.world, play.spec, SEEN, (proved,), lambda: "sw_c")
    assert revoked.commit is not None
    assert ([change.state for change in revoked.commit.leases], revoked.more) == ([LeaseState.REVOKED], False)
    play.apply(revoked.commit)
    assert decide(play.world, play.spec, SEEN, (proved,), lambda: "sw_d").commit is None


def test_two_cards_start_in_one_commit_with_tokens_that_rise() -> None:
    one = spec(tenant("med"))
    cards = {**one.cards, "gpu1": replace(one.cards["gpu0"], name="gpu1")}
    play = Play(replace(one, cards=cards))
    play.enqueue("a", card="gpu0")
    play.enqueue("b", card="gpu1")
    commit = decide(play.world, play.spec, SEEN, (), lambda: "sw_next").commit
    assert commit is not None
    assert sorted(card.name for card in commit.cards) == ["gpu0", "gpu1"]
    assert commit.tokens == (play.world.next_token, play.world.next_token + 1)
    assert apply(play.world, commit).token == commit.tokens[-1]


def test_nothing_starts_beside_an_agent_that_is_not_known_to_be_there() -> None:
    play = Play(spec(tenant("med")))
    play.enqueue("a")
    assert turned(play, seen=Seen()) is None
    assert turned(play) is not None


def test_what_was_seen_before_the_newest_command_was_carried_out_does_not_end_a_fault() -> None:
    play = Play(spec(tenant("med")))
    fault = Fault("held by encode (pid 9)", 8 * GIB, 0, retry_ms=play.world.now_ms + 60_000)
    play.world = replace(play.world, cards={"gpu0": replace(play.card, fault=fault, ordered=(9, 4))})
    before = Seen({"main"}, {}, {"gpu0": {"free_mib": 24 * GIB}}, {"gpu0": (9, 3)})
    assert turned(play, seen=before) is None
    turned(play, seen=replace(before, carried_out={"gpu0": (9, 4)}))
    assert play.card.fault is None


def test_a_world_without_the_card_has_an_empty_one() -> None:
    assert card_of(World(0, {}, {}), "gpu0") == Card("gpu0")


def test_the_newest_order_that_changes_what_is_seen_is_on_the_card_and_no_other() -> None:
    play = saving()
    assert play.card.ordered == (0, 0)
    play.run(until="release", save=SAVED)
    order = play.pending("release")
    assert play.card.ordered == (order.token, order.n)
    play.run(until="vacate")
    assert play.card.ordered == (order.token, order.n + 1)


def test_an_agent_that_lost_its_marks_is_believed_again_once_it_said_hello() -> None:
    play = granted()
    token = play.card.ordered[0]
    assert machine.on_hello(play.world, play.spec, "main", token) is None
    assert machine.on_hello(play.world, play.spec, "elsewhere", 0) is None
    commit = machine.on_hello(play.world, play.spec, "main", token - 1)
    assert commit is not None
    play.apply(commit)
    assert play.card.ordered == (token - 1, 0)
