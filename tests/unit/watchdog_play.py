"""A measured card to be watched in virtual time: readings are written by hand, the shipped core says what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swapper.core import watchdog
from swapper.core.commit import Alert
from swapper.core.spec import Spec
from swapper.core.watchdog import SETTLE_MS, Watch
from tests.support.play import Play

Held = dict[str, object]


def held(pid: int, mib: int | None, owner: str | None = None, name: str | None = "python", **more: object) -> Held:
    """A process as a report carries it, which started at 7; `line`: what it descends from."""
    line = more.pop("line", [[pid, 7], [1, 1]])
    return {"pid": pid, "mib": mib, "name": name, "line": line, "containers": [], "owner": owner, **more}


class Watched(Play):
    """A `Play` with the watch over its card; `told` are the alerts, in order."""

    def __init__(self, of: Spec, *residents: str) -> None:
        super().__init__(of, *residents)
        self.watch = Watch()
        self.told: list[Alert] = []
        self.configured = of

    def see(self, *processes: Held, states: Mapping[str, str] | None = None, **reading: object) -> list[Alert]:
        """One reading, as it was told just now; what is said for it."""
        known = dict.fromkeys(self.card.residents, "loaded") if states is None else states
        said = {"pool": "vram", "note": None, "held": list(processes), **reading}
        self.watch = watchdog.look(self.watch, self.spec, "gpu0", said, known, self.world.now_ms)
        return self.follow()

    def unread(self) -> list[Alert]:
        """The probe could not be read."""
        self.watch = watchdog.look(self.watch, self.spec, "gpu0", {"unread": "no driver"}, {}, self.world.now_ms)
        return self.follow()

    def follow(self) -> list[Alert]:
        """The card's record follows what was seen; until nothing more is to be done."""
        before = len(self.told)
        while commit := watchdog.due(self.world, self.spec, self.card, self.watch):
            self.told += commit.alerts
            self.apply(commit)
        self.spec = self.configured.needing(self.world.cards)
        return self.told[before:]

    def settle(self, ms: int = SETTLE_MS) -> list[Alert]:
        """Time passes, and all stays as it was seen."""
        self.pass_time(ms)
        return self.follow()

    def reserve(self, mib: int) -> None:
        """Set aside so much of the card."""
        cards = {"gpu0": replace(self.spec.cards["gpu0"], reserve_mib=mib)}
        self.configured = self.spec = replace(self.spec, cards=cards)
