"""The verbs of an agent: what each command asks of a backend, and the data of its answer.

Invariant: an expected failure (BackendError, SaveUnsupported, arguments nobody understands) is an outcome with one
sentence; anything else is raised for the supervisor. It knows backends and probes, and nothing of order or the store.

Data of the answers: drain `slots: [{slot, tokens}], strategies, fingerprint`, or `gone: true`; save `snapshot, slot,
tokens, bytes` (tokens 0: an empty slot, nothing kept), or failed with `unsupported: true`, or with `busy: true` where a
call goes first; load `n_slots, n_ctx_slot, n_ctx_shared, snapshots: [SnapshotInfo], strategies, fingerprint`; restore
`slot, tokens, displaced` (what made room for it, or null), or `leaves: {slot, tokens, id}` where nothing was done since
this would have to make room and that was to be told first; vacate `free_mib`, failed also `holders: [str]`,
`lingering: [[pid, start]]`, the processes of holders that left and live on, and `unread`, why, where the memory could
not be read; release nothing.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import msgspec

from swapper.core.orders import Command, Report
from swapper.core.types import Step
from swapper.errors import BackendBusy, BackendError, BackendRefused
from workers.backend import (
    Backend,
    Loaded,
    Quiesced,
    Room,
    SaveArgs,
    SaveUnsupported,
    SlotUse,
    Talk,
    WouldPushOut,
)
from workers.hostram import HostRam
from workers.observe import Sight
from workers.vacate import Remaining, VacateArgs, nothing, vacate

ArgsT = TypeVar("ArgsT")

_SENDING_AWAY = frozenset({str(Step.DRAIN), str(Step.RELEASE)})
"""What may be asked of a tenant that runs on one of our servers and is not configured."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verb came to. `backend_ms` is the server's own time where it told one."""

    ok: bool
    detail: str | None = None
    backend_ms: float | None = None
    data: Mapping[str, object] = field(default_factory=dict[str, object])


_OUT_OF_MEMORY = re.compile(
    r"out of (?:device )?memory|OutOfDeviceMemory|failed to allocate|unable to allocate|allocation failed"
    r"|cannot allocate memory|does not fit|not enough memory",
    re.IGNORECASE,
)
"""How servers say that their model found no room; in llama.cpp's backends, PyTorch, Ollama, vLLM."""


class _Drain(msgspec.Struct, frozen=True):
    limit_ms: int | None = None


class _Save(msgspec.Struct, frozen=True):
    slot: int
    name: str
    conversation: Talk | None = None
    strategy: str = "slots"
    replaces: str | None = None
    holds: int | None = None


class _Release(msgspec.Struct, frozen=True):
    limit_ms: int


class _Restore(msgspec.Struct, frozen=True):
    snapshot: str
    slot: int
    displaced: str = ""
    talks: tuple[Talk, ...] = ()
    tells: bool = False
    takes: SlotUse | None = None
    strategy: str = "slots"

    def room(self, token: int) -> Room | None:
        """For a restore beside the calls; None: into the slot that is named."""
        name = self.displaced
        return Room(name, self.talks, token, self.tells, self.takes, self.strategy) if name else None


class Verbs:
    """Runs one command against the backends and probes of a host."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        sight: Sight,
        ram: HostRam | None = None,
        remaining: Remaining = nothing,
    ) -> None:
        self._backends = backends
        self._sight = sight
        self._ram = ram or HostRam({})
        self._remaining = remaining
        self._on_tenant: Mapping[str, Callable[[Backend, str, Command], Awaitable[Outcome]]] = {
            Step.DRAIN: _drain,
            Step.SAVE: _save,
            Step.RELEASE: _release,
            Step.LOAD: self._load,
            Step.RESTORE: _restore,
        }

    async def run(self, command: Command) -> Outcome:
        """Carry the command out; see the module text for the data."""
        try:
            if command.verb == Step.VACATE:
                return await self._vacate(command)
            verb = self._on_tenant.get(command.verb)
            if verb is None:
                return Outcome(False, f"this agent has no verb {command.verb!r}; is it older than its coordinator?")
            backend, tenant = self._backend(command)
            return await verb(backend, tenant, command)
        except BackendError as error:
            return Outcome(False, str(error))

    def _backend(self, command: Command) -> tuple[Backend, str]:
        server = self._sight.server_of(command.tenant or "")
        may = command.tenant in self._sight.tenants or command.verb in _SENDING_AWAY
        if server is None or command.tenant is None or not may:
            raise BackendRefused(f"{command.tenant} is not configured on this host")
        return self._backends[server], command.tenant

    async def _load(self, backend: Backend, tenant: str, _command: Command) -> Outcome:
        """Only where the machine's memory has room for it; one that is there has taken its own already."""
        asked = self._ram.asks(tenant)
        there = asked and (await self._sight.server(self._sight.tenants[tenant].server))[tenant].holds_vram
        async with self._ram.room(tenant, there=there):
            try:
                return _loaded(await backend.load(tenant))
            except BackendError as error:
                out = {"out_of_memory": True} if _OUT_OF_MEMORY.search(str(error)) else {}
                return Outcome(False, str(error), data=out)

    async def _vacate(self, command: Command) -> Outcome:
        if command.card not in self._sight.cards:
            raise BackendRefused(f"card {command.card} is not configured on this host")
        args = _args(command, VacateArgs)
        seen = await vacate(self._sight, command.card, args, self._remaining)
        if seen.free:
            return Outcome(True, data={"free_mib": seen.free_mib})
        stay = [[holder.pid, holder.started] for holder in self._sight.lingering(command.card)]
        data = {"free_mib": seen.free_mib, "holders": list(seen.holders), **({"lingering": stay} if stay else {})}
        if seen.unread is not None:
            data |= {"unread": seen.unread}
            return Outcome(False, f"the VRAM of {command.card} cannot be read: {seen.unread}", data=data)
        names = ", ".join(seen.holders) or "nobody we can name"
        text = f"{seen.free_mib} of {args.need_mib} MiB free after {args.limit_ms / 1000:g} s; held by {names}"
        return Outcome(False, text, data=data)


def left_behind(vacated: Report | None) -> tuple[tuple[int, int | None], ...]:
    """(pid, start) of those who were there still when a card's last proof failed, as its answer has them."""
    told = () if vacated is None else vacated.data.get("lingering", ())
    return msgspec.convert(told, tuple[tuple[int, int | None], ...])


def _args(command: Command, shape: type[ArgsT]) -> ArgsT:
    try:
        return msgspec.convert(dict(command.args), shape)
    except msgspec.ValidationError as error:
        raise BackendRefused(f"{command.verb}: cannot use the arguments: {error}") from error


async def _drain(backend: Backend, tenant: str, command: Command) -> Outcome:
    quiesced = await backend.quiesce(tenant, limit_ms=_args(command, _Drain).limit_ms)
    data: dict[str, object] = {"slots": [_use(use) for use in quiesced.slots], **_ways(quiesced)}
    if quiesced.costs is not None:
        data["costs"] = asdict(quiesced.costs)
    return Outcome(True, data=data | ({"gone": True} if quiesced.gone else {}))


def _use(use: SlotUse) -> dict[str, object]:
    return {"slot": use.slot, "tokens": use.tokens, **({"gone_on": True} if use.gone_on else {})}


def _ways(seen: Quiesced | Loaded) -> dict[str, object]:
    return {"strategies": list(seen.strategies), "fingerprint": seen.fingerprint}


async def _save(backend: Backend, tenant: str, command: Command) -> Outcome:
    args = _args(command, _Save)
    asked = SaveArgs(args.slot, args.name, args.conversation, args.strategy, command.token, args.replaces, args.holds)
    try:
        saved = await backend.save(tenant, asked)
    except SaveUnsupported as error:
        sentence = str(error) or f"the server of {tenant} cannot save slots"
        return Outcome(False, sentence, data={"unsupported": True})
    except BackendBusy as error:
        return Outcome(False, str(error), data={"busy": True})
    data = {"snapshot": saved.snapshot, "slot": saved.slot, "tokens": saved.tokens, "bytes": saved.bytes}
    return Outcome(True, backend_ms=saved.backend_ms, data=data)


async def _release(backend: Backend, tenant: str, command: Command) -> Outcome:
    said = await backend.release(tenant, limit_ms=_args(command, _Release).limit_ms)
    return Outcome(True, said)


def _loaded(loaded: Loaded) -> Outcome:
    data = {
        "n_slots": loaded.n_slots,
        "n_ctx_slot": loaded.n_ctx_slot,
        "n_ctx_shared": loaded.n_ctx_shared,
        "snapshots": [asdict(snapshot) for snapshot in loaded.snapshots],
        **_ways(loaded),
    }
    return Outcome(True, backend_ms=loaded.backend_ms, data=data)


async def _restore(backend: Backend, tenant: str, command: Command) -> Outcome:
    args = _args(command, _Restore)
    try:
        restored = await backend.restore(tenant, args.snapshot, args.slot, args.room(command.token))
    except BackendBusy as busy:
        return Outcome(False, str(busy), data={"busy": True})
    except WouldPushOut as would:
        return Outcome(True, data={"leaves": {**_use(would.use), "id": would.id}})
    displaced = asdict(restored.displaced) if restored.displaced is not None else None
    data = {"slot": restored.slot, "tokens": restored.tokens, "displaced": displaced}
    return Outcome(True, backend_ms=restored.backend_ms, data=data)
