"""A thing that an engine runs on a card, as a container would be, and the control by which an agent has it started.

Invariant: it holds its VRAM from its start to its end, whoever started it; an order is taken at once and done later, or
never, and each lie is told when it is. The engine may be away: then nobody can ask or order anything, and it runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from swapper.errors import BackendDown
from tests.sim.physical import WatchedVram
from tests.sim.plan import BoxPlan
from tests.sim.process import Process
from workers.control import ExitStatus, Phase, Seen
from workers.control.pulse import Pulse

KILLED = 137
_STEP_S = 0.05
_GRACE_MS = 1000
_PORTS = ("none", "vllm", "ollama", "comfyui")


@dataclass(slots=True)
class Lies:
    """What it will not do though it says so: so many starts, so many stops. `sticks`: its VRAM stays when it ends.

    `hangs`: what is started next never comes up.
    """

    starts: int = 0
    stops: int = 0
    sticks: bool = False
    hangs: int = 0


@dataclass(slots=True)
class Prompts:
    """Seconds each of those that wait takes, in their order. `changed` is set whenever one comes."""

    waiting: list[float] = field(default_factory=list[float])
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Box:
    """See the module text. `away`: the engine does not answer. `brought_back`: the engine itself began it anew."""

    plan: BoxPlan
    card: str
    vram: WatchedVram
    say: Callable[[str], None]
    total_mib: int
    phase: Phase = Phase.GONE
    run: int = 0
    away: bool = False
    brought_back: bool = False
    exit: ExitStatus | None = None
    lies: Lies = field(default_factory=Lies)
    pulses: list[Pulse] = field(default_factory=list[Pulse])

    @property
    def holder(self) -> str:
        """Its name among those who hold VRAM, of this run."""
        return f"{self.plan.name} run {self.run}"

    @property
    def url(self) -> str:
        """Where its server listens, if it has one."""
        number = int(self.card.removeprefix("gpu"))
        return f"http://127.0.0.1:{6001 + 10 * number + _PORTS.index(self.plan.kind)}"

    @property
    def there(self) -> bool:
        """Whether anything of it runs."""
        return self.phase is not Phase.GONE

    def seen(self) -> Seen:
        """What its engine tells."""
        if self.away:
            return Seen(Phase.UNREACHABLE, "the engine does not answer")
        run = str(self.run) if self.there else ""
        return Seen(self.phase, run=run, came_back=self.brought_back and self.there)

    def start(self, *, by: str = "") -> None:
        """Begin a run, `by` somebody else where that is said; where there is no room it ends at once."""
        if self.there:
            return
        if not by and self.lies.starts:
            self.lies.starts -= 1
            self.say(f"    the start of {self.plan.name} is taken, and not done")
            return
        self.run += 1
        self.say(f"    {self.plan.name} starts{f' by {by}' if by else ''}")
        self.brought_back = by == "its engine"
        if by and self.vram.used_mib + self.needs_mib > self.total_mib:
            self._ended(1)
            return
        self.phase, self.exit = Phase.STARTING, None
        self.begun(by=by)
        if self.lies.hangs:
            self.lies.hangs -= 1
            self.say(f"    {self.plan.name} will never be up")
        else:
            asyncio.get_running_loop().call_later(self.plan.start_s, self._up, self.run)
        self.beat()

    @property
    def needs_mib(self) -> int:
        """What it holds from its start."""
        return self.plan.need_mib

    @property
    def holds(self) -> bool:
        """Whether it has anything of the card."""
        return self.there

    def begun(self, *, by: str) -> None:
        """Its process has begun, `by` somebody else where that is said."""
        (self.vram.intrude if by else self.vram.take)(self.holder, self.needs_mib)

    def over(self) -> None:
        """Its process has ended."""
        self.vram.let_go(self.holder)

    async def render(self, seconds: float) -> None:
        """Work on something for so long; it lasts on where who asked for it dies."""
        await asyncio.sleep(seconds)

    def stop(self) -> None:
        """End it a moment later."""
        if self.lies.stops and self.there:
            self.lies.stops -= 1
            self.say(f"    the stop of {self.plan.name} is taken, and not done")
        elif self.there:
            self.phase = Phase.STOPPING
            asyncio.get_running_loop().call_later(self.plan.stop_s, self.end, 0, self.run)
            self.beat()

    def end(self, code: int, run: int | None = None) -> None:
        """It ends, if it is still this run."""
        if not self.there or run not in (None, self.run):
            return
        if self.lies.sticks and self.holder in self.vram.held:
            self.say(f"    {self.plan.name} ends and its VRAM stays held")
            self.vram.stick(self.holder)
        self.over()
        self._ended(code)

    def _ended(self, code: int) -> None:
        self.say(f"    {self.plan.name} ends ({code})")
        self.phase, self.exit = Phase.GONE, ExitStatus(code, None, 0)
        self.beat()

    def grow(self, mib: int) -> None:
        """Hold so much more than it needs, from now on; 0: no more than that."""
        if self.there and self.holder in self.vram.held:
            self.vram.intrude(self.holder, self.plan.need_mib + mib)

    def beat(self) -> None:
        """Whoever listens to the engine is told."""
        for pulse in self.pulses:
            pulse.beat()

    def _up(self, run: int) -> None:
        if self.phase is Phase.STARTING and self.run == run:
            self.phase = Phase.UP
            self.beat()


class BoxControl:
    """Implements `workers.control.Watched` for a process of ours."""

    def __init__(self, process: Process, box: Box) -> None:
        self._process = process
        self._box = box
        self._seen = Seen(Phase.UNREACHABLE)
        self._exit: ExitStatus | None = None
        self._pulse = Pulse()
        box.pulses.append(self._pulse)
        process.on_death.append(lambda: box.pulses.remove(self._pulse))

    async def _order(self, order: Callable[[], None]) -> None:
        await self._process.cross()
        if self._box.away:
            raise BackendDown("the engine does not answer")
        order()
        await self._process.cross()

    async def ensure(self) -> None:
        """Start it, if it does not run."""
        await self._order(self._box.start)

    async def stop(self, grace_ms: int | None = None) -> None:
        """Have it stopped."""
        del grace_ms
        await self._order(self._box.stop)

    async def restart(self, grace_ms: int | None = None) -> None:
        """End it, by KILL after the grace, and start it."""
        await self.stop(grace_ms)
        run, left_s = self._box.run, (grace_ms or _GRACE_MS) / 1000
        while self._box.there and self._box.run == run and left_s > 0:
            await asyncio.sleep(_STEP_S)
            left_s -= _STEP_S
        await self._order(lambda: self._box.end(KILLED, run))
        await self.ensure()

    async def look(self) -> Seen:
        """Ask the engine."""
        await self._process.cross()
        self._seen, self._exit = self._box.seen(), self._box.exit
        await self._process.cross()
        return self._seen

    def changes(self) -> AsyncIterator[None]:
        """What the engine tells of."""
        return self._pulse.beats()

    def notes(self) -> str | None:
        """Nothing of note."""
        return None

    async def close(self) -> None:
        """Nothing is held."""

    def alive(self) -> bool | None:
        """As last seen."""
        return None if self._seen.phase is Phase.UNREACHABLE else self._seen.phase is not Phase.GONE

    def pid(self) -> int | None:
        """It is no process of this machine."""
        return None

    def exit_status(self) -> ExitStatus | None:
        """How its last run ended, as last seen."""
        return self._exit if self._seen.phase is Phase.GONE else None

    def log_tail(self, n: int) -> list[str] | None:
        """It says nothing."""
        del n
        return None

    def log_path(self) -> None:
        """There is no file."""
