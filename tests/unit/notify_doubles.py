"""Alerts as they stand in the log, and a post that keeps what it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swapper.config.recipients import Recipient
from swapper.core.commit import Alert, AlertKind, Commit
from swapper.notify.book import Message
from swapper.notify.notifier import Notifier
from swapper.store.memory import MemoryStore
from tests.support.virtual_time import VirtualLoop

BEGAN_MS = 1_800_000_000_000

NTFY = Recipient("notify.0", "ntfy://ntfy.lan/gpu")
MAIL = Recipient("notify.1", "mailto://ann:pw@mail.lan")

FAULT = Alert("gpu0", "card gpu0: 1 MiB free of the 9 needed; held by pid 7 (blender)", kind=AlertKind.FAULT)
FREE = Alert("gpu0", "card gpu0 is free again", kind=AlertKind.FAULT, over=True)


def not_loaded(tenant: str, why: str = "out of memory") -> Alert:
    text = f"{tenant} could not be loaded: {why}"
    return Alert("gpu0", text, {"tenant": tenant}, AlertKind.NOT_LOADED)


def now_ms() -> int:
    """The loop's clock as the time of day."""
    return BEGAN_MS + round(asyncio.get_running_loop().time() * 1000)


class Post:
    """`fails`: why nothing can be sent to a recipient just now. `hangs`: who never answers."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.tried: list[str] = []
        self.fails: dict[str, str] = {}
        self.hangs: set[str] = set()
        self.before: Callable[[], None] = lambda: None
        self.began = asyncio.Event()

    async def send(self, recipient: Recipient, message: Message) -> str | None:
        self.before()
        self.began.set()
        self.tried.append(recipient.place)
        if recipient.place in self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.2)
        if (why := self.fails.get(recipient.place)) is None:
            self.sent.append((recipient.place, message))
        return why

    def bodies(self, place: str = "notify.0") -> list[str]:
        return [message.body for to, message in self.sent if to == place]


class Rig:
    """A store, a post, and notifiers on them that can be killed."""

    def __init__(self, *recipients: Recipient) -> None:
        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
        self.store = MemoryStore(now_ms)
        self.post = Post()
        self.recipients = recipients or (NTFY,)

    async def raised(self, *alerts: Alert) -> None:
        await self.store.commit(Commit(alerts=alerts))

    async def start(self, owner: str = "a") -> asyncio.Task[None]:
        """One that has begun, and runs."""
        notifier = Notifier(self.store, self.recipients, owner, self.post.send, now_ms)
        await notifier.begin()
        return asyncio.create_task(notifier.run())


async def killed(task: asyncio.Task[None]) -> None:
    """Nothing of it goes on; what it has in the store stays."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
