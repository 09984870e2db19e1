"""Who tells goes on where the last came to: through deaths, two at once, servers that fail, a store that is away.

In virtual time, on the store in memory.
"""

from __future__ import annotations

import asyncio

import pytest

from swapper.core.commit import Commit
from swapper.notify.book import BURST_MS, QUIET_MS
from swapper.notify.notifier import AGAIN_S, CLAIM_MS, EXECUTOR
from swapper.store.memory import MemoryStore
from tests.support.virtual_time import virtual
from tests.unit.notify_doubles import FAULT, FREE, MAIL, NTFY, Rig, killed, not_loaded, now_ms

SOON_S = BURST_MS / 1000 + 1.0


@virtual
async def test_what_is_logged_is_told_and_what_was_before_the_first_start_is_not() -> None:
    rig = Rig()
    await rig.raised(not_loaded("llama/old"))
    await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S)
    assert rig.post.bodies() == [FAULT.text]


@virtual
async def test_what_was_logged_while_nobody_ran_is_told_at_the_next_start() -> None:
    rig = Rig()
    await killed(await rig.start())
    await rig.raised(FAULT)
    await rig.start()
    await asyncio.sleep(SOON_S)
    assert rig.post.bodies() == [FAULT.text]


@virtual
async def test_what_was_told_is_not_told_again_after_a_restart() -> None:
    rig = Rig()
    first = await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S)
    await killed(first)
    await rig.start()
    await asyncio.sleep(60)
    assert rig.post.bodies() == [FAULT.text]


@virtual
async def test_nor_is_the_same_told_in_its_quiet_time_because_of_a_restart() -> None:
    rig = Rig()
    for _ in range(10):
        running = await rig.start()
        await rig.raised(FAULT)
        await asyncio.sleep(SOON_S)
        await killed(running)
    assert rig.post.bodies() == [FAULT.text]
    await rig.start()
    await asyncio.sleep(QUIET_MS / 1000 + SOON_S)
    assert rig.post.bodies()[1].startswith(f"{FAULT.text} (and 8 more like it)")


@pytest.mark.parametrize("after_s", [0.0, 1.0, BURST_MS / 1000 + 0.1])
def test_who_dies_between_the_event_and_the_end_of_the_sending_has_told_it_at_least_after_its_restart(
    after_s: float,
) -> None:
    @virtual
    async def play() -> None:
        rig = Rig()
        first = await rig.start()
        await rig.raised(FAULT)
        await asyncio.sleep(after_s)
        await killed(first)
        assert not rig.post.sent
        await rig.start()
        await asyncio.sleep(SOON_S)
        assert rig.post.bodies() == [FAULT.text]

    play()


@virtual
async def test_who_dies_between_a_sending_and_its_note_tells_it_twice_rather_than_never() -> None:
    rig = Rig()
    first = await rig.start()
    await rig.raised(FAULT)
    await rig.post.began.wait()
    rig.store.down()
    await asyncio.sleep(SOON_S)
    assert rig.post.bodies() == [FAULT.text]
    await killed(first)
    rig.store.up()
    await rig.start()
    await asyncio.sleep(SOON_S)
    assert rig.post.bodies() == [FAULT.text] * 2


@virtual
async def test_of_two_on_one_store_one_tells_and_the_other_goes_on_where_it_came_to() -> None:
    rig = Rig()
    first = await rig.start("a")
    await rig.start("b")
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S)
    assert rig.post.bodies() == [FAULT.text]
    await killed(first)
    await rig.raised(not_loaded("llama/a"))
    await asyncio.sleep(CLAIM_MS / 1000 + SOON_S)
    assert len(rig.post.bodies()) == 2
    assert "llama/a could not be loaded" in rig.post.bodies()[1]


@virtual
async def test_one_that_lost_its_claim_tells_no_more() -> None:
    rig = Rig()
    await rig.start("a")
    await asyncio.sleep(0.1)
    rig.store.down()
    await asyncio.sleep(2 * CLAIM_MS / 1000)
    rig.store.up()
    await rig.store.claim(EXECUTOR, "b", who="another", ttl_ms=CLAIM_MS)
    await rig.raised(FAULT)
    for _ in range(10):
        await asyncio.sleep(CLAIM_MS / 2000)
        await rig.store.claim(EXECUTOR, "b", who="another", ttl_ms=CLAIM_MS)
    assert not rig.post.sent


@virtual
async def test_a_server_that_fails_is_tried_again_later_each_time_until_it_has_got_it() -> None:
    rig = Rig()
    rig.post.fails["notify.0"] = "connection refused"
    await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S + sum(AGAIN_S) + 60)
    assert len(rig.post.tried) == 1 + len(AGAIN_S)
    del rig.post.fails["notify.0"]
    await rig.raised(FREE)
    await asyncio.sleep(AGAIN_S[-1] + SOON_S)
    ((_, message),) = rig.post.sent
    assert FAULT.text in message.body
    assert FREE.text in message.body


@virtual
async def test_what_could_not_be_sent_is_sent_after_a_restart() -> None:
    rig = Rig()
    rig.post.fails["notify.0"] = "connection refused"
    first = await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S)
    await killed(first)
    rig.post.fails.clear()
    await rig.start()
    await asyncio.sleep(SOON_S)
    assert rig.post.bodies() == [FAULT.text]


@virtual
async def test_a_server_that_never_answers_keeps_no_other_waiting() -> None:
    rig = Rig(NTFY, MAIL)
    rig.post.hangs.add("notify.0")
    await rig.start()
    for tenant in ("llama/a", "llama/b", "llama/c"):
        await rig.raised(not_loaded(tenant))
        await asyncio.sleep(SOON_S)
    assert len(rig.post.bodies("notify.1")) == 3
    assert rig.post.tried.count("notify.0") == 1


@virtual
async def test_who_is_no_recipient_any_more_is_sent_nothing_and_who_is_new_hears_what_comes() -> None:
    rig = Rig(NTFY)
    rig.post.fails["notify.0"] = "connection refused"
    first = await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S)
    await killed(first)
    rig.recipients = (MAIL,)
    await rig.start()
    await rig.raised(not_loaded("llama/a"))
    await asyncio.sleep(SOON_S)
    assert len(rig.post.bodies("notify.1")) == 1
    assert "llama/a" in rig.post.bodies("notify.1")[0]
    assert rig.post.tried.count("notify.0") == 1


@virtual
async def test_a_store_that_is_away_loses_nothing_and_tells_nothing_twice() -> None:
    rig = Rig()
    await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(1.0)
    rig.store.down()
    await asyncio.sleep(30)
    assert not rig.post.sent, "nothing is sent that was not noted before"
    rig.store.up()
    await rig.raised(not_loaded("llama/a"))
    await asyncio.sleep(30)
    assert sum(FAULT.text in body for body in rig.post.bodies()) == 1
    assert sum("llama/a" in body for body in rig.post.bodies()) == 1


@virtual
async def test_before_anything_is_sent_it_is_noted() -> None:
    rig = Rig()
    noted: list[bool] = []
    loop = asyncio.get_running_loop()

    def look() -> None:
        asking = loop.create_task(rig.store.noted(EXECUTOR))
        asking.add_done_callback(lambda done: noted.append(FAULT.text in (done.result() or "")))

    rig.post.before = look
    await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S)
    assert noted == [True]
    assert FAULT.text not in str((await rig.store.noted(EXECUTOR) or "").partition('"unsent"')[2])


@virtual
async def test_a_secret_address_is_not_in_the_store() -> None:
    rig = Rig(NTFY, MAIL)
    rig.post.fails = {"notify.0": "no", "notify.1": "no"}
    await rig.start()
    await rig.raised(FAULT)
    await asyncio.sleep(SOON_S)
    noted = await rig.store.noted(EXECUTOR) or ""
    assert FAULT.text in noted
    assert not [part for part in ("ntfy", "mail.lan", "ann", "pw@") if part in noted]


@pytest.mark.parametrize("ahead_s", [-3 * 24 * 3600, 3 * 24 * 3600])
def test_a_store_whose_clock_is_days_off_is_told_of_all_the_same(ahead_s: int) -> None:
    @virtual
    async def play() -> None:
        rig = Rig()
        rig.store = MemoryStore(lambda: now_ms() + ahead_s * 1000)
        await rig.start()
        await asyncio.sleep(6)
        await rig.raised(FAULT)
        await asyncio.sleep(SOON_S)
        assert rig.post.bodies() == [FAULT.text]

    play()


@virtual
async def test_much_that_is_nobodys_news_is_read_through_and_noted_now_and_then() -> None:
    rig = Rig()
    await rig.start()
    before = await rig.store.noted(EXECUTOR)
    for _ in range(40):
        await rig.store.commit(Commit(gates={}))
        await rig.raised(FAULT)
        await asyncio.sleep(5)
    await asyncio.sleep(120)
    assert await rig.store.noted(EXECUTOR) != before
    assert len(rig.post.sent) == 1
