"""Backend of one llama-server in router mode: many models, one front door, slots that are saved and restored.

Invariant: the model is named in every request, nothing here loads or wakes one except `load`, and a verb ends on
what `/models`, `/slots` or the slot folder shows, not on a 200. Closing the clients' connections before a release is
the gateway's work: with one open, llama-server kills its child only after its own `stop-timeout`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from swapper.errors import BackendDown, BackendError, BackendRefused
from swapper.snapshots.manifest import Fingerprint, Manifest, name_problem
from workers.backend import (
    Loaded,
    Quiesced,
    Restored,
    SaveArgs,
    Saved,
    SaveUnsupported,
    SlotUse,
    SnapshotInfo,
    TenantState,
)
from workers.llama.answer import smallest_answer
from workers.llama.child import Child, find_child, gone
from workers.llama.events import RouterEvents
from workers.llama.fingerprint import Args, Fingerprints
from workers.llama.gguf import GgufIdentities
from workers.llama.http import Model, RouterHttp, SavedSlot, Slot
from workers.llama.slots import Keep, SlotFolder

T = TypeVar("T")

_POLL_S = 0.02
_QUIESCE_S = 0.01
_AFTER_KILL_S = 15.0
_LOG_LINES = 12
_READ_AHEAD = 8
_log = structlog.stdlib.get_logger("workers.llama")


class Control(Protocol):
    """What starts and stops the router's process, where we own it."""

    async def ensure(self) -> None:
        """Adopt or start the process."""
        ...

    def log_tail(self, n: int) -> list[str] | None:
        """The last `n` lines of its log; None where the log is not ours."""
        ...

    async def restart(self) -> None:
        """End the process and start it again."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without any sign of progress after which a verb gives up (`admit_s`: the router keeps saying `limit`)."""

    load_s: float = 600.0
    save_s: float = 120.0
    restore_s: float = 300.0
    answer_s: float = 120.0
    admit_s: float = 60.0


@dataclass(slots=True)
class _Run:
    """What we know of the child that runs on `port`, from having loaded it ourselves."""

    port: str
    restored: set[int] = field(default_factory=set[int])


class LlamaRouter:
    """Implements `workers.backend.Backend` for one router.

    `tenants` maps tenant ids to the router's model names; `slot_dir` is its --slot-save-path as this host sees it
    (None: nothing is saved); `path_map` rewrites prefixes of model paths the server names; `state_dir` keeps the
    cache of model identities.
    """

    def __init__(
        self,
        url: str,
        *,
        tenants: Mapping[str, str],
        state_dir: Path,
        slot_dir: Path | None = None,
        api_key: str | None = None,
        control: Control | None = None,
        path_map: Mapping[str, str] | None = None,
        keep: Keep | None = None,
        limits: Limits | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._http = RouterHttp(url, api_key)
        self._events = RouterEvents(self._http)
        self._tenants = dict(tenants)
        self._control = control
        self._folder = SlotFolder(slot_dir) if slot_dir is not None else None
        self._paths = dict(path_map or {})
        self._fingerprints = Fingerprints(self._http, GgufIdentities(state_dir), self._local_path)
        self._keep = keep or Keep()
        self._limits = limits or Limits()
        self._now_ms = now_ms
        self._runs: dict[str, _Run] = {}
        self._released: set[str] = set()
        self._saved: dict[str, set[str]] = {}
        self._lost: dict[str, set[str]] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._checking: dict[str, asyncio.Task[str | None]] = {}

    async def start(self) -> None:
        """Start or adopt the router where we control it, and listen to its events."""
        if self._control is not None:
            await self._control.ensure()
        self._events.open()

    async def close(self) -> None:
        """Finish the digests under way, then drop the connections."""
        await asyncio.gather(*self._settling.values(), *self._checking.values(), return_exceptions=True)
        await self._events.close()
        await self._http.close()

    def changes(self) -> AsyncIterator[None]:
        """One item once connected to the router's events, then one for each change or burst of them."""
        return self._events.pulses()

    async def observe(self) -> Mapping[str, TenantState]:
        """State of every tenant by GET /models alone (`/slots` and `/metrics` would wake a sleeping model)."""
        try:
            models = await self._http.models()
        except BackendError:
            return dict.fromkeys(self._tenants, TenantState.UNREACHABLE)
        return {tenant: self._state(models.get(name)) for tenant, name in self._tenants.items()}

    async def quiesce(self, tenant: str) -> Quiesced:
        """Wait, without limit, until the server's counters show nothing running and nothing deferred."""
        name = self._name(tenant)
        model = (await self._http.models()).get(name)
        if self._state(model) is not TenantState.LOADED or model is None:
            return Quiesced()
        while True:
            slots, counters = await asyncio.gather(self._http.slots(name), self._http.counters(name))
            queued = counters is not None and counters.processing + counters.deferred > 0
            if not queued and not any(slot.is_processing for slot in slots):
                return Quiesced(self._in_use(model, slots))
            await asyncio.sleep(_QUIESCE_S)

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """Save one slot under a fresh name; the manifest is written last, its digest follows in the background."""
        name, folder = self._name(tenant), self._slot_folder()
        problem = name_problem(args.name)
        if problem is not None:
            raise BackendRefused(problem)
        model = await self._loaded(name)
        fingerprint = await self._fingerprint(model)
        if not 0 <= args.slot < fingerprint.n_parallel:
            raise BackendRefused(f"{name} has {fingerprint.n_parallel} slots, there is no slot {args.slot}")
        await asyncio.to_thread(self._make_room, folder)
        self._lost.setdefault(tenant, set()).add(args.name)
        answer = await self._save_slot(name, args, folder)
        size = await asyncio.to_thread(folder.size, args.name)
        if size is None:
            theirs = Args.of(model.status.args).last("--slot-save-path", default="an unknown folder")
            raise BackendError(
                f"llama-server saved {args.name} into {theirs}, but it is not in {folder.path}: "
                "slot_dir must be the server's own folder"
            )
        if answer.n_saved == 0 or size != answer.n_written:
            await asyncio.to_thread(folder.remove, args.name)
            self._lost[tenant].discard(args.name)
            if answer.n_saved == 0:
                return Saved(args.name, args.slot, 0, 0, answer.timings.save_ms)
            raise BackendError(f"{args.name} has {size} bytes on disk, llama-server wrote {answer.n_written}")
        manifest = self._manifest(tenant, args, fingerprint, answer, folder)
        await asyncio.to_thread(folder.seal, manifest)
        self._lost[tenant].discard(args.name)
        self._saved.setdefault(tenant, set()).add(args.name)
        self._settle(folder, manifest)
        return Saved(args.name, args.slot, answer.n_saved, answer.n_written, answer.timings.save_ms)

    async def release(self, tenant: str, *, limit_ms: int) -> None:
        """Unload, and return when /models says so and the child is gone; after `limit_ms` the child is killed."""
        name = self._name(tenant)
        model = (await self._http.models()).get(name)
        if model is not None and self._state(model).holds_vram:
            child = await self._child(model)
            self._events.open()
            try:
                await self._http.unload(name)
            except BackendRefused as refused:
                if "not running" not in str(refused):
                    raise
            await self._until_gone(name, child, limit_ms / 1000)
        self._released.add(name)
        self._runs.pop(name, None)
        if self._folder is not None:
            await asyncio.to_thread(self._tidy, self._folder, tenant)

    async def load(self, tenant: str) -> Loaded:
        """Load, wait for `loaded`, and take the smallest real answer (not on a model that was already loaded)."""
        name = self._name(tenant)
        self._events.open()
        began = time.monotonic()
        models = await self._http.models()
        if name not in models:
            raise BackendRefused(f"the router at {self._http.url} has no model {name!r}; it has: {', '.join(models)}")
        found = self._state(models[name])
        self._check_newest(tenant)
        if not found.holds_vram:
            await self._ask_to_load(name)
        model = models[name] if found is TenantState.LOADED else await self._until_loaded(name)
        if found is not TenantState.LOADED:
            await smallest_answer(self._http, model, self._limits.answer_s)
            model = await self._loaded(name)
            self._runs[name] = _Run(Args.of(model.status.args).last("--port"))
        backend_ms = (time.monotonic() - began) * 1000
        self._released.discard(name)
        fingerprint = await self._fingerprint(model)
        snapshots = await asyncio.to_thread(self._snapshots, tenant, fingerprint)
        return Loaded(fingerprint.n_parallel, fingerprint.n_ctx_slot, snapshots, backend_ms)

    async def restore(self, tenant: str, snapshot: str, slot: int) -> Restored:
        """Put a snapshot into an empty slot, once size, fingerprint and digest are right."""
        name, folder = self._name(tenant), self._slot_folder()
        model = await self._loaded(name)
        fingerprint = await self._fingerprint(model)
        manifest = await asyncio.to_thread(folder.manifest, snapshot)
        if manifest is None or manifest.tenant != tenant:
            raise BackendRefused(f"{snapshot} is no snapshot of {tenant}")
        problem = await asyncio.to_thread(folder.problem, manifest, fingerprint) or await self._damage(folder, manifest)
        if problem is None:
            problem = _unfit(await self._http.slots(name), slot)
        if problem is not None:
            raise BackendRefused(f"{snapshot} was not restored: {problem}")
        answer = await self._patiently(
            self._http.restore(name, slot, snapshot), f"restore of {snapshot}", self._limits.restore_s
        )
        if answer.n_restored != manifest.tokens:
            raise BackendError(f"llama-server restored {answer.n_restored} of {manifest.tokens} tokens of {snapshot}")
        if name in self._runs:
            self._runs[name].restored.add(slot)
        marked = replace(await asyncio.to_thread(folder.manifest, snapshot) or manifest, restored_ms=self._now_ms())
        await asyncio.to_thread(folder.write, marked)
        return Restored(slot, answer.n_restored, answer.timings.restore_ms)

    def supersede(self, tenant: str, keep: set[str]) -> list[str]:
        """Delete older snapshots of the tenant that had been restored, now that `keep` are complete. Blocking."""
        return self._slot_folder().supersede(tenant, keep)

    def _name(self, tenant: str) -> str:
        try:
            return self._tenants[tenant]
        except KeyError:
            raise BackendRefused(f"{tenant!r} is no tenant of the router at {self._http.url}") from None

    def _slot_folder(self) -> SlotFolder:
        if self._folder is None:
            raise SaveUnsupported(f"no slot_dir is configured for the router at {self._http.url}")
        return self._folder

    def _local_path(self, path: str) -> str:
        for theirs in sorted(self._paths, key=len, reverse=True):
            if path == theirs or path.startswith(theirs.rstrip("/") + "/"):
                return self._paths[theirs].rstrip("/") + path[len(theirs.rstrip("/")) :]
        return path

    def _state(self, model: Model | None) -> TenantState:
        if model is None:
            return TenantState.FAILED
        match model.status.value:
            case "loaded":
                return TenantState.LOADED
            case "loading":
                return TenantState.LOADING
            case "sleeping":
                return TenantState.SLEEPING
            case _ if model.status.failed and model.id not in self._released:
                return TenantState.FAILED
            case _:
                return TenantState.UNLOADED

    async def _loaded(self, name: str) -> Model:
        model = (await self._http.models()).get(name)
        if model is None or self._state(model) is not TenantState.LOADED:
            raise BackendRefused(f"{name} is {model.status.value if model else 'unknown to the router'}, not loaded")
        return model

    async def _child(self, model: Model) -> Child | None:
        return await asyncio.to_thread(find_child, model.id, Args.of(model.status.args).last("--port"))

    async def _fingerprint(self, model: Model) -> Fingerprint:
        child = await self._child(model)
        return await self._fingerprints.of(model, child.environ() if child is not None else ())

    def _in_use(self, model: Model, slots: list[Slot]) -> tuple[SlotUse, ...]:
        """Slots that may hold something. One that never ran a task is known empty only in a child we loaded."""
        run = self._runs.get(model.id)
        ours = run is not None and run.port == Args.of(model.status.args).last("--port")
        restored = run.restored if run is not None and ours else set[int]()
        return tuple(
            SlotUse(slot.id, slot.n_prompt_tokens or 0)
            for slot in slots
            if slot.n_prompt_tokens or (slot.n_prompt_tokens is None and (not ours or slot.id in restored))
        )

    async def _save_slot(self, name: str, args: SaveArgs, folder: SlotFolder) -> SavedSlot:
        try:
            return await self._patiently(
                self._http.save(name, args.slot, args.name),
                f"save of slot {args.slot} of {name}",
                self._limits.save_s,
                lambda: folder.size(args.name),
            )
        except BackendRefused as refused:
            if refused.status == 501:
                raise SaveUnsupported(str(refused)) from refused
            raise

    async def _patiently(
        self,
        call: Coroutine[None, None, T],
        what: str,
        limit_s: float,
        progress: Callable[[], object] = lambda: None,
    ) -> T:
        """Await a call as long as `progress` changes; without a change for `limit_s` it is given up."""
        task = asyncio.create_task(call)
        try:
            before: object = None
            while True:
                done, _ = await asyncio.wait({task}, timeout=limit_s)
                if done:
                    return task.result()
                now = await asyncio.to_thread(progress)
                if now == before:
                    raise BackendDown(f"{what}: no answer from llama-server and no progress for {limit_s:.0f} s")
                before = now
        finally:
            task.cancel()

    def _manifest(
        self, tenant: str, args: SaveArgs, fingerprint: Fingerprint, answer: SavedSlot, folder: SlotFolder
    ) -> Manifest:
        token = args.extra.get("token", 0)
        return Manifest(
            snapshot=args.name,
            tenant=tenant,
            fingerprint=fingerprint,
            slot=args.slot,
            tokens=answer.n_saved,
            bytes=answer.n_written,
            saved_ms=self._now_ms(),
            strategy=str(args.extra.get("strategy", "slots")),
            token=token if isinstance(token, int) else 0,
            boot=folder.boot,
        )

    def _make_room(self, folder: SlotFolder) -> None:
        folder.prune(self._keep, self._now_ms())
        folder.check_space(self._keep)

    def _settle(self, folder: SlotFolder, manifest: Manifest) -> None:
        task = asyncio.create_task(asyncio.to_thread(folder.settle, manifest), name=f"digest of {manifest.snapshot}")
        self._settling[manifest.snapshot] = task

        def done(ended: asyncio.Task[None]) -> None:
            self._settling.pop(manifest.snapshot, None)
            if not ended.cancelled() and (error := ended.exception()) is not None:
                _log.warning("no digest", snapshot=manifest.snapshot, error=str(error))

        task.add_done_callback(done)

    def _tidy(self, folder: SlotFolder, tenant: str) -> None:
        lost, saved = self._lost.pop(tenant, set()), self._saved.pop(tenant, set())
        for name in lost:  # saves that failed; the process is gone, so nobody writes them any more
            folder.remove(name)
        gone_now = folder.prune(self._keep, self._now_ms())
        if not lost:
            gone_now += folder.supersede(tenant, saved)
        if gone_now:
            _log.info("snapshots removed", tenant=tenant, snapshots=gone_now)

    async def _until_gone(self, name: str, child: Child | None, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            seq, now = self._events.seq, time.monotonic()
            try:
                model = (await self._http.models()).get(name)
                unloaded = not self._state(model).holds_vram
            except BackendDown:
                unloaded = child is not None  # the router is gone or hung: its child alone decides
            if unloaded and (child is None or await gone(child, timeout_s=_POLL_S)):
                return
            if now > deadline + _AFTER_KILL_S:
                raise BackendError(f"{name} is still there {limit_s + _AFTER_KILL_S:.0f} s after its unload")
            if now > deadline and child is not None:
                await asyncio.to_thread(child.kill)
            await self._events.after(seq, _POLL_S)

    async def _ask_to_load(self, name: str) -> None:
        deadline = time.monotonic() + self._limits.admit_s
        while True:
            try:
                return await self._http.load(name)
            except BackendRefused as refused:
                if "already running" in str(refused):
                    return
                if "limit reached" not in str(refused) or time.monotonic() > deadline:
                    raise
            await self._events.after(self._events.seq, _POLL_S)

    async def _until_loaded(self, name: str) -> Model:
        heard, quiet_since = self._events.seq, time.monotonic()
        while True:
            seq = self._events.seq
            if seq != heard:
                heard, quiet_since = seq, time.monotonic()
            model = (await self._http.models()).get(name)
            if model is None:
                raise BackendError(f"the router dropped {name} from its list while it was loading")
            match model.status.value:
                case "loaded" | "sleeping":
                    return model
                case "loading":
                    if time.monotonic() - quiet_since > self._limits.load_s:
                        raise BackendDown(f"{name} makes no progress in loading for {self._limits.load_s:.0f} s")
                case _:
                    raise BackendError(self._why_not_loaded(model))
            await self._events.after(seq, _POLL_S)

    def _why_not_loaded(self, model: Model) -> str:
        if not model.status.failed:
            return f"{model.id} was unloaded by somebody else while it was loading"
        text = f"llama-server could not load {model.id} (exit code {model.status.exit_code})"
        port = Args.of(model.status.args).last("--port")
        tail = self._control.log_tail(400) if self._control is not None else None
        if tail is None:
            return f"{text}; the reason is in the router's own log, lines that begin with [{port}]"
        mark = f"[{port}]"
        lines = [line.removeprefix(mark).strip() for line in tail if line.startswith(mark)]
        return f"{text}: " + "\n".join(lines[-_LOG_LINES:] or tail[-_LOG_LINES:])

    def _check_newest(self, tenant: str) -> None:
        """Start reading the newest files while the model loads: their digests are then known at the restore."""
        if self._folder is None:
            return
        for manifest in self._folder.manifests(tenant)[:_READ_AHEAD]:
            self._check(self._folder, manifest)

    def _check(self, folder: SlotFolder, manifest: Manifest) -> asyncio.Task[str | None]:
        async def run() -> str | None:
            settling = self._settling.get(manifest.snapshot)
            if settling is not None:
                await asyncio.wait({settling})
            now = await asyncio.to_thread(folder.manifest, manifest.snapshot)
            return await asyncio.to_thread(folder.damage, now or manifest)

        name = manifest.snapshot
        if name not in self._checking:
            task = asyncio.create_task(run(), name=f"check of {name}")
            task.add_done_callback(lambda _: self._checking.pop(name, None))
            self._checking[name] = task
        return self._checking[name]

    async def _damage(self, folder: SlotFolder, manifest: Manifest) -> str | None:
        return await self._check(folder, manifest)

    def _snapshots(self, tenant: str, now: Fingerprint) -> tuple[SnapshotInfo, ...]:
        if self._folder is None:
            return ()
        folder = self._folder
        return tuple(
            SnapshotInfo(m.snapshot, m.slot, m.tokens, m.bytes, m.saved_ms, m.strategy, folder.problem(m, now))
            for m in folder.manifests(tenant)
        )


def _unfit(slots: list[Slot], slot: int) -> str | None:
    """Why nothing should be put into this slot now."""
    if not 0 <= slot < len(slots):
        return f"there is no slot {slot} among {len(slots)}"  # the server would silently wrap it round
    if slots[slot].is_processing:
        return f"slot {slot} is at work for somebody else"
    if slots[slot].n_prompt_tokens:
        return f"slot {slot} was taken: it holds {slots[slot].n_prompt_tokens} tokens already"
    return None
