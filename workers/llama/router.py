"""Backend of one llama-server in router mode: many models, one front door, slots that are saved and restored.

Invariant: the model is named in every request, nothing here loads or wakes one except `load`, and a verb ends on
what `/models`, `/slots` or the slot folder shows, not on a 200. Closing the clients' connections before a release is
the gateway's work: with one open, llama-server kills its child only after its own `stop-timeout`. Our own smallest
answer is nobody's conversation: what it leaves in a slot is neither saved nor spared, also if another swapper made it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from swapper.snapshots.manifest import MAX_LINKS, Fingerprint, Manifest, name_problem, short_digest
from workers.backend import (
    Loaded,
    Quiesced,
    Restored,
    SaveArgs,
    Saved,
    SaveUnsupported,
    SlotUse,
    SnapshotInfo,
    Talk,
    TenantState,
)
from workers.llama.answer import answer_over, last_was_ours, only_trace, smallest_answer
from workers.llama.child import Child, find_child, gone
from workers.llama.events import RouterEvents
from workers.llama.fingerprint import Args, Fingerprints
from workers.llama.gguf import GgufIdentities
from workers.llama.http import Model, RouterHttp, SavedSlot, Slot
from workers.llama.joined import Joined
from workers.llama.keeping import Keeper
from workers.llama.known import Known, port_of, state_of
from workers.llama.lifecycle import ORPHAN_S, Control, Lifecycle, Limits, patiently
from workers.llama.quiet import idle_slots
from workers.llama.roster import Roster
from workers.llama.slots import Keep, SlotFolder

_START_POLL_S = 0.05


@dataclass(slots=True)
class _Run:
    """What we know of the child on `port`. `ours`: we loaded it, so a slot without a task is empty, unless restored.

    `restored`: the snapshot that came into each slot.
    """

    port: str
    child: Child | None
    environ: tuple[str, ...] = ()
    ours: bool = False
    restored: dict[int, str] = field(default_factory=dict[int, str])


class LlamaRouter:
    """Implements `workers.backend.Backend` for one router.

    `tenants` maps tenant ids to the router's model names; `server` is the part of those ids before the model, needed
    where there are none (`roster`); `slot_dir` is its --slot-save-path as this host sees it (None: nothing is saved);
    `path_map` rewrites prefixes of model paths the server names; `state_dir` keeps the cache of model identities.
    """

    def __init__(
        self,
        url: str,
        *,
        tenants: Mapping[str, str],
        server: str | None = None,
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
        self._roster = Roster(self._http.url, tenants, server)
        self._control = control
        self._limits = limits or Limits()
        self._known = Known(self._http, self._events)
        self._slots = Joined(self._http.slots)
        self._lifecycle = Lifecycle(self._http, self._events, self._known, control, self._limits)
        self._keeper = Keeper(SlotFolder(slot_dir), keep or Keep(), now_ms) if slot_dir is not None else None
        self._strategies = ("slots", "replay") if slot_dir is not None else ()
        self._paths = dict(path_map or {})
        self._fingerprints = Fingerprints(self._http, GgufIdentities(state_dir), self._local_path)
        self._now_ms = now_ms
        self._runs: dict[str, _Run] = {}
        self._released: set[str] = set()
        self._cut_at = float("-inf")

    async def start(self) -> None:
        """Start or adopt the router where we control it, and listen to its events."""
        if self._control is not None:
            await self._control.ensure()
        self._events.open()

    async def close(self) -> None:
        """Finish the digests under way, then drop the connections."""
        if self._keeper is not None:
            await self._keeper.close()
        await self._events.close()
        await self._http.close()

    def changes(self) -> AsyncIterator[None]:
        """One item once connected to the router's events, then one for each change or burst of them."""
        return self._events.pulses()

    async def observe(self) -> Mapping[str, TenantState]:
        """State of everybody by GET /models alone (`/slots` and `/metrics` would wake a sleeping model)."""
        try:
            models = await self._http.models()
        except BackendGone:
            return self._roster.unseen(self._left_behind)
        except BackendError:
            return self._roster.unseen(lambda _: TenantState.UNREACHABLE)
        self._known.compare(models)
        for model in models.values():  # so that it is missed when its router dies
            if state_of(model) in (TenantState.LOADED, TenantState.SLEEPING):
                await self._run(model)
        return self._roster.seen(models, self._state)

    def _left_behind(self, name: str) -> TenantState:
        """Without its router a model's process ends within about 1.5 s; until then it may hold VRAM."""
        run = self._runs.get(name)
        alive = run is not None and run.child is not None and run.child.alive()
        return TenantState.UNREACHABLE if alive else TenantState.STOPPED

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Wait until the server's counters show nothing running and nothing deferred, or until it is not loaded."""
        name = self._roster.known(tenant)
        slots = await idle_slots(self._http, self._known, name, limit_ms)
        if slots is None:
            return Quiesced(gone=True)
        model = self._known.loaded(name) or await self._known.look(name)
        if model is None:
            return Quiesced(gone=True)
        digest = ""
        if self._roster.has(tenant):
            with suppress(BackendError):  # it is idle all the same
                digest = short_digest(await self._fingerprint(model))
        return Quiesced(_in_use(await self._run(model), slots), strategies=self._strategies, fingerprint=digest)

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """Save one slot under a fresh name; the manifest is written last, its digest follows in the background."""
        name, keeper = self._roster.configured(tenant), self._keeper
        if keeper is None:
            raise SaveUnsupported(f"no slot_dir is configured for the router at {self._http.url}")
        problem = name_problem(args.name)
        if problem is not None:
            raise BackendRefused(problem)
        model = await self._loaded(name)
        fingerprint = await self._fingerprint(model)
        if not 0 <= args.slot < fingerprint.n_parallel:
            raise BackendRefused(f"{name} has {fingerprint.n_parallel} slots, there is no slot {args.slot}")
        keeper.begin(tenant, args.name)
        answer = await self._save_slot(tenant, name, args, keeper)
        size = keeper.size(args.name)
        if size is None:
            theirs = Args.of(model.status.args).last("--slot-save-path", default="an unknown folder")
            raise BackendError(
                f"llama-server saved {args.name} into {theirs}, but it is not in {keeper.folder.path}: "
                "slot_dir must be the server's own folder"
            )
        if answer.n_saved == 0:
            await keeper.drop(tenant, args.name)
            return Saved(args.name, args.slot, 0, 0, answer.timings.save_ms)
        if size != answer.n_written:
            await keeper.drop(tenant, args.name)
            raise BackendError(f"{args.name} has {size} bytes on disk, llama-server wrote {answer.n_written}")
        manifest = self._manifest(tenant, args, fingerprint, answer, keeper.folder.boot)
        keeper.finish(manifest, restored=(await self._run(model)).restored.get(args.slot))
        return Saved(args.name, args.slot, answer.n_saved, answer.n_written, answer.timings.save_ms)

    async def release(self, tenant: str, *, limit_ms: int) -> None:
        """Unload, and return when /models says so and the child is gone; after `limit_ms` the child is killed."""
        name = self._roster.known(tenant)
        try:
            model = self._known.loaded(name) or await self._known.look(name)
        except BackendDown:
            await self._router_is_gone(name, limit_ms / 1000)
            model = None
        if model is not None and state_of(model).holds_vram:
            await self._lifecycle.unload(name, (await self._run(model)).child, limit_ms / 1000)
        elif (run := self._runs.get(name)) is not None and run.child is not None:
            await self._lifecycle.ended(name, run.child, limit_ms / 1000)
        self._released.add(name)
        self._runs.pop(name, None)
        self._known.forget(name)
        if self._keeper is not None:
            self._keeper.tidy(tenant)

    async def _router_is_gone(self, name: str, limit_s: float) -> None:
        """A router that does not answer takes its children along; believed only of a child we know."""
        run = self._runs.get(name)
        if run is None or run.child is None or not await gone(run.child, timeout_s=limit_s):
            raise BackendDown(f"{self._http.url} does not answer, and whether {name} still runs cannot be seen")

    async def load(self, tenant: str) -> Loaded:
        """Load, wait for `loaded`, and take the smallest real answer (not on a model that was already loaded)."""
        name = self._roster.configured(tenant)
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._keeper is not None:
            self._keeper.read_ahead(tenant)
        model, fresh = await self._brought(name)
        try:
            fingerprint, snapshots = await self._readied(tenant, model, fresh=fresh)
        except BackendError:
            if fresh:  # it listens and does not answer: left there, it would be taken for one that does
                with suppress(BackendError):
                    await self._lifecycle.unload(name, (await self._run(model)).child, self._limits.answer_s)
            raise
        self._released.discard(name)
        backend_ms = (loop.time() - began) * 1000
        return Loaded(
            fingerprint.n_parallel,
            fingerprint.n_ctx_slot,
            snapshots,
            backend_ms,
            strategies=self._strategies,
            fingerprint=short_digest(fingerprint),
        )

    async def _readied(self, tenant: str, model: Model, *, fresh: bool) -> tuple[Fingerprint, tuple[SnapshotInfo, ...]]:
        fingerprint = await self._fingerprint(model)
        snapshots = await self._keeper.listing(tenant, fingerprint, port_of(model)) if self._keeper is not None else ()
        if fresh:  # not beside the above: on a CPU the model's threads spin, and every other one then delays them
            await smallest_answer(self._http, model, self._limits.answer_s)
            run = await self._run(model)
            run.ours = True
            run.restored.clear()  # it may have been asleep, which empties its slots
        return fingerprint, snapshots

    async def _once_up(self, name: str) -> Model | None:
        """Ask for the load; a router that is being started (again) gets its time to come up first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.start_s
        while True:
            await asyncio.sleep(max(0.0, self._cut_at + ORPHAN_S - loop.time()))
            try:
                return await self._lifecycle.load(name)
            except BackendGone:
                if loop.time() >= deadline:
                    raise
            except BackendDown:
                self._cut_at = loop.time()  # the router may have died over it, and not yet what it began
                raise
            if self._control is not None:
                await self._control.ensure()
            await asyncio.sleep(_START_POLL_S)

    async def _brought(self, name: str) -> tuple[Model, bool]:
        """Have the model loaded; False: it was already, and answers: a call might push a conversation out of it."""
        try:
            model = await self._once_up(name)
        except BackendRefused as refused:
            if refused.status == 404 and name not in (names := await self._http.models()):
                sentence = f"the router at {self._http.url} has no model {name!r}; it has: {', '.join(names)}"
                raise BackendRefused(sentence) from refused
            raise
        if model is not None:
            return model, True
        model = await self._known.look(name)
        if model is not None and state_of(model) is TenantState.LOADED:
            return model, not await answer_over(self._http, model.id, self._limits.answer_s)
        if model is not None and state_of(model) is TenantState.SLEEPING:  # the answer wakes it, with empty slots
            await smallest_answer(self._http, model, self._limits.answer_s)
        return await self._lifecycle.loaded(name), True

    async def restore(self, tenant: str, snapshot: str, slot: int) -> Restored:
        """Put a snapshot into an empty slot, once size, fingerprint and digest are right."""
        name, keeper = self._roster.configured(tenant), self._keeper
        if keeper is None:
            raise BackendRefused(f"no slot_dir is configured for the router at {self._http.url}: nothing to restore")
        model = await self._loaded(name)
        fingerprint = await self._fingerprint(model)
        manifest = keeper.folder.manifest(snapshot) if name_problem(snapshot) is None else None
        if manifest is None or manifest.tenant != tenant:
            raise BackendRefused(f"{snapshot} is no snapshot of {tenant}")
        slots, problem = await asyncio.gather(self._slots(name), keeper.problem(manifest, fingerprint, port_of(model)))
        problem = problem or _unfit(slots, slot, manifest)
        if problem is not None:
            raise BackendRefused(f"{snapshot} was not restored: {problem}")
        run = await self._run(model)
        call = self._http.restore(name, slot, snapshot)
        with self._forgetting(name):
            answer = await patiently(call, f"restore of {snapshot}", self._limits.restore_s, lambda: len(run.restored))
        if answer.n_restored != manifest.tokens:
            wrong = f"llama-server restored {answer.n_restored} of {manifest.tokens} tokens of {snapshot}"
            raise BackendError(f"{wrong}, {await self._taken_back(name, slot)}")
        run.restored[slot] = snapshot
        keeper.restored(snapshot)
        return Restored(slot, answer.n_restored, answer.timings.restore_ms)

    async def _taken_back(self, name: str, slot: int) -> str:
        """What is called cold must not be found in its slot: empty it; says how that went."""
        try:
            with self._forgetting(name):
                await self._http.erase(name, slot)
        except BackendError as error:
            return f"and slot {slot} could not be emptied again: {error}"
        return f"so slot {slot} was emptied again"

    def _local_path(self, path: str) -> str:
        for theirs in sorted(self._paths, key=len, reverse=True):
            root = theirs.rstrip("/")
            if path == theirs or path.startswith(root + "/"):
                return self._paths[theirs].rstrip("/") + path[len(root) :]
        return path

    def _state(self, model: Model | None) -> TenantState:
        """As `state_of`, but what we released ourselves is not failed, even if its process had to be killed.

        A router that is there again at once knows nothing of the processes that the one before it left behind.
        """
        state = state_of(model)
        if model is not None and not state.holds_vram and self._left_behind(model.name) is TenantState.UNREACHABLE:
            return TenantState.UNREACHABLE
        ours = model is not None and state is TenantState.FAILED and model.name in self._released
        return TenantState.UNLOADED if ours else state

    async def _loaded(self, name: str) -> Model:
        model = self._known.loaded(name) or await self._known.look(name)
        if model is None or state_of(model) is not TenantState.LOADED:
            raise BackendRefused(f"{name} is {model.status.value if model else 'unknown to the router'}, not loaded")
        return model

    async def _run(self, model: Model) -> _Run:
        run, port = self._runs.get(model.name), port_of(model)
        if run is None or run.port != port:
            child = await asyncio.to_thread(find_child, model.id, port)
            run = _Run(port, child, child.environ() if child is not None else ())
            self._runs[model.name] = run
        return run

    async def _fingerprint(self, model: Model) -> Fingerprint:
        return await self._fingerprints.of(model, (await self._run(model)).environ)

    @contextmanager
    def _forgetting(self, name: str) -> Generator[None]:
        """What fails may have killed the child."""
        try:
            yield
        except BackendError:
            self._known.forget(name)
            raise

    async def _save_slot(self, tenant: str, name: str, args: SaveArgs, keeper: Keeper) -> SavedSlot:
        what = f"save of slot {args.slot} of {name}"
        call = self._http.save(name, args.slot, args.name)
        try:
            with self._forgetting(name):
                return await patiently(call, what, self._limits.save_s, lambda: keeper.progress(tenant))
        except BackendRefused as refused:
            if refused.status == 501:
                raise SaveUnsupported(str(refused)) from refused
            raise

    def _manifest(
        self, tenant: str, args: SaveArgs, fingerprint: Fingerprint, answer: SavedSlot, boot: str
    ) -> Manifest:
        talk = args.talk or Talk("")
        return Manifest(
            snapshot=args.name,
            tenant=tenant,
            fingerprint=fingerprint,
            slot=args.slot,
            tokens=answer.n_saved,
            bytes=answer.n_written,
            saved_ms=self._now_ms(),
            strategy=args.strategy,
            token=args.token,
            boot=boot,
            id=talk.id,
            links=talk.links[-MAX_LINKS:],
            used_ms=talk.used_ms,
        )


def _in_use(run: _Run, slots: Sequence[Slot]) -> tuple[SlotUse, ...]:
    """Slots that may hold something: one that never ran a task is known empty only in a child we loaded."""
    return tuple(SlotUse(slot.id, slot.n_prompt_tokens or 0) for slot in slots if _may_hold(run, slot))


def _may_hold(run: _Run, slot: Slot) -> bool:
    if slot.n_prompt_tokens is None:
        return not run.ours or slot.id in run.restored
    return slot.n_prompt_tokens > 0 and (slot.id in run.restored or not only_trace(slot))


def _unfit(slots: list[Slot], slot: int, manifest: Manifest) -> str | None:
    """Why this snapshot should not be put into this slot now."""
    if not 0 <= slot < len(slots):
        return f"there is no slot {slot} among {len(slots)}"  # the server would silently wrap it round
    there = slots[slot]
    if there.is_processing:
        return f"slot {slot} is at work for somebody else"
    again = last_was_ours(there) and there.n_prompt_tokens == manifest.tokens  # put there by one who died thereafter
    if there.n_prompt_tokens and not again and not only_trace(there):
        return f"slot {slot} was taken: it holds {there.n_prompt_tokens} tokens already"
    return None
