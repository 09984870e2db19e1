"""The conversations of one llama-server: what its slots hold, saved to files and put back; the same for both kinds.

Invariant: a verb ends on what `/slots` or the slot folder shows, not on a 200; nothing here loads or wakes a model.
Our own smallest answer is nobody's conversation: what it leaves in a slot is neither saved nor spared, also if another
swapper made it. Where a model runs and how it is found is the backend's own (`Models`, `find`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swapper.errors import BackendBusy, BackendError, BackendRefused
from swapper.snapshots.manifest import MAX_LINKS, Fingerprint, Manifest, name_problem, short_digest
from workers.backend import (
    Loaded,
    Quiesced,
    Restored,
    Room,
    SaveArgs,
    Saved,
    SaveUnsupported,
    Talk,
    TenantState,
)
from workers.llama.answer import smallest_answer
from workers.llama.child import Child
from workers.llama.fingerprint import Args, Fingerprints, local_path
from workers.llama.gguf import GgufIdentities
from workers.llama.http import Model, RouterHttp, SavedSlot, Slot
from workers.llama.joined import Joined
from workers.llama.keeping import Keeper
from workers.llama.known import state_of
from workers.llama.lifecycle import Limits, patiently
from workers.llama.pace import Paces
from workers.llama.quiet import Models, idle
from workers.llama.seats import Arrived, Run, disturbed, in_use, task_of, unfit
from workers.llama.shelf import FolderShelf
from workers.llama.slots import Keep, SlotFolder
from workers.llama.strategy import strategies
from workers.llama.taking import Taking


@dataclass(frozen=True, slots=True)
class Keeping:
    """How the conversations of a server are kept.

    `slot_dir` is its --slot-save-path as this host sees it (None: nothing is saved); `path_map` rewrites prefixes of
    model paths the server names, `folder` is where those of them begin that are relative (None: not known); `state_dir`
    keeps the cache of model identities.
    """

    state_dir: Path
    slot_dir: Path | None
    strategy: str
    keep: Keep
    path_map: Mapping[str, str]
    now_ms: Callable[[], int]
    folder: Path | None = None


class Conversations:
    """Saves and restores in the models of one server; `find` gives the process that a loaded model runs in."""

    def __init__(
        self, http: RouterHttp, models: Models, find: Callable[[Model], Child | None], how: Keeping, limits: Limits
    ) -> None:
        self._http = http
        self._models = models
        self._find = find
        self._how = how
        self._limits = limits
        self._slots = Joined(http.slots)
        self._keeper = Keeper(SlotFolder(how.slot_dir), how.keep, how.now_ms) if how.slot_dir is not None else None
        self._identities = GgufIdentities(how.state_dir)
        self._fingerprints = Fingerprints(http, self._identities, self._local_path)
        self._paces = Paces()
        self._runs: dict[str, Run] = {}
        self._taking = None if self._keeper is None else Taking(http, self._keeper, self.run, self._saved, self._put)

    async def close(self) -> None:
        """Finish the digests under way."""
        if self._keeper is not None:
            await self._keeper.close()

    def files(self, model: Model) -> tuple[Path, ...]:
        """What it reads to load, as this host sees them."""
        args = Args.of(model.status.args)
        named = (args.last("--model"), args.last("--mmproj"), args.last("--model-draft", "--spec-draft-model"))
        return tuple(Path(self._local_path(name)) for name in named if name)

    async def run(self, model: Model) -> Run:
        """The process that a model runs in, as known since it was first seen there."""
        run = self._runs.get(model.name)
        if run is None or run.key != model.run:
            child = await asyncio.to_thread(self._find, model)
            run = Run(model.run, child, child.environ() if child is not None else ())
            self._runs[model.name] = run
        return run

    def last_run(self, name: str) -> Run | None:
        """The process a model was last seen in, if it was not released since."""
        return self._runs.get(name)

    def released(self, tenant: str, name: str) -> None:
        """Its process is gone: clear away what its saves replaced."""
        self._runs.pop(name, None)
        if self._keeper is not None:
            self._keeper.tidy(tenant)

    async def read_ahead(self, tenant: str) -> None:
        """A load begins: its slot folder must be there, and the newest snapshots' digests are checked meanwhile."""
        if self._keeper is not None:
            await self._keeper.read_ahead(tenant)

    async def quiesced(self, name: str, limit_ms: int | None, *, configured: bool) -> Quiesced:
        """Wait until the server's counters show nothing running and nothing deferred, or until it is not loaded."""
        found = await idle(self._http, self._models, name, limit_ms)
        model = self._models.loaded(name) or await self._models.look(name) if found is not None else None
        if found is None or model is None:
            return Quiesced(gone=True)
        run = await self.run(model)
        used = in_use(run, found.slots)
        if not configured:
            return Quiesced(used)
        read = found.counters
        costs = read and self._paces.costs(name, read.prompt_tokens, read.prompt_s, self._how.now_ms())
        with suppress(BackendError):  # it is idle all the same
            fingerprint = await self._fingerprint(model)
            ways = await self._ways(fingerprint, run)
            return Quiesced(used, strategies=ways, fingerprint=short_digest(fingerprint), costs=costs)
        return Quiesced(used, strategies=await self._ways(None, run), costs=costs)

    async def readied(self, tenant: str, model: Model, *, fresh: bool) -> Loaded:
        """What a loaded model can take back; one that is `fresh` proves that it answers, for which the caller waits."""
        fingerprint = await self._fingerprint(model)
        snapshots = await self._keeper.listing(tenant, fingerprint, model.run) if self._keeper is not None else ()
        run = await self.run(model)
        if fresh:  # not beside the above: on a CPU the model's threads spin, and every other one then delays them
            await smallest_answer(self._http, model)
            run.ours = True
            run.arrived.clear()  # it may have been asleep, which empties its slots
        return Loaded(
            fingerprint.n_parallel,
            fingerprint.n_ctx_slot,
            fingerprint.n_ctx_slot if fingerprint.kv_unified else None,
            snapshots,
            strategies=await self._ways(fingerprint, run),
            fingerprint=short_digest(fingerprint),
        )

    async def _ways(self, fingerprint: Fingerprint | None, run: Run) -> tuple[str, ...]:
        path = fingerprint.gguf.path if fingerprint is not None else None
        facts = await asyncio.to_thread(self._identities.facts, path) if path is not None else None
        can_save = self._keeper is not None and not run.cannot_save
        return strategies(self._how.strategy, facts, can_save=can_save)

    async def save(self, tenant: str, name: str, args: SaveArgs) -> Saved:
        """Save one slot under a fresh name; the manifest is written last, its digest follows in the background."""
        keeper = self._keeper
        if keeper is None:
            raise SaveUnsupported(f"no slot_dir is configured for the llama-server at {self._http.url}")
        problem = name_problem(args.name)
        if problem is not None:
            raise BackendRefused(problem)
        if (done := await keeper.manifest(args.name)) and (done.tenant, done.slot) == (tenant, args.slot):
            return Saved(done.snapshot, done.slot, done.tokens, done.bytes, 0.0)  # it was done, and is not on record
        model = await self._loaded(name)
        fingerprint = await self._fingerprint(model)
        if not 0 <= args.slot < fingerprint.n_parallel:
            raise BackendRefused(f"{name} has {fingerprint.n_parallel} slots, there is no slot {args.slot}")
        arrived = (await self.run(model)).arrived.get(args.slot)
        slot = (await self._slots(name))[args.slot] if arrived is not None and args.talk is None else None

        def talk_of(tokens: int) -> Talk | None:
            return args.talk if slot is None or arrived is None else arrived.talk(slot, tokens)

        if args.holds is not None:
            return await self._beside_calls(tenant, model, args, args.holds, keeper, talk_of)
        return await self._saved(tenant, model, args, talk_of)

    async def _beside_calls(
        self,
        tenant: str,
        model: Model,
        args: SaveArgs,
        holds: int,
        keeper: Keeper,
        talk_of: Callable[[int], Talk | None],
    ) -> Saved:
        """Save what is known to be in a slot, while calls may come: what one of them changed is not kept."""
        before = await self._http.slots(model.name)
        problem = disturbed(before, args.slot, holds)
        if problem is not None:
            raise BackendBusy(f"nothing was saved of {model.name}: {problem}")
        saved = await self._saved(tenant, model, args, talk_of)
        now = (await self._http.slots(model.name))[args.slot]
        if saved.tokens != holds or now.is_processing or task_of(now) != task_of(before[args.slot]):
            await keeper.drop(tenant, args.name)
            raise BackendBusy(f"slot {args.slot} of {model.name} was gone on with while it was being saved")
        keeper.replace_soon(tenant, args.name)
        return saved

    async def _saved(self, tenant: str, model: Model, args: SaveArgs, talk_of: Callable[[int], Talk | None]) -> Saved:
        """`talk_of` says whose conversation it is by the tokens that were saved."""
        keeper = self._keeper
        assert keeper is not None
        await keeper.begin(tenant, args.name)
        answer = await self._save_slot(tenant, model, args, keeper)
        size = await keeper.size(args.name)
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
            short = await keeper.short()  # before what was written goes again
            await keeper.drop(tenant, args.name)
            raise BackendError(f"{args.name} has {size} bytes on disk, llama-server wrote {answer.n_written}{short}")
        talk = talk_of(answer.n_saved)
        manifest = self._manifest(tenant, args, await self._fingerprint(model), answer, talk)
        await keeper.finish(manifest, restored=await self._came(model, args, manifest, talk))
        self._paces.saved(model.name, answer.n_saved, answer.timings.save_ms, self._how.now_ms())
        return Saved(args.name, args.slot, answer.n_saved, answer.n_written, answer.timings.save_ms)

    async def _came(self, model: Model, args: SaveArgs, saved: Manifest, talk: Talk | None) -> str | None:
        """The snapshot that what was saved has gone on from: as its gateway says, else what came into this slot."""
        if args.talk is not None:
            return args.replaces
        if talk is not None and talk.snapshot:
            return talk.snapshot
        came = (await self.run(model)).restored(args.slot)
        keeper = self._keeper
        assert keeper is not None
        return came if came is not None and await asyncio.to_thread(keeper.folder.went_on, came, saved) else None

    async def _save_slot(self, tenant: str, model: Model, args: SaveArgs, keeper: Keeper) -> SavedSlot:
        what = f"save of slot {args.slot} of {model.name}"
        call = self._http.save(model.name, args.slot, args.name)
        try:
            with self._forgetting(model.name):
                return await patiently(call, what, self._limits.save_s, lambda: keeper.progress(tenant))
        except BackendRefused as refused:
            if refused.status == 501:
                (await self.run(model)).cannot_save = True
                raise SaveUnsupported(str(refused)) from refused
            raise BackendRefused(f"{refused}{await keeper.short()}", refused.status) from refused

    def _manifest(
        self, tenant: str, args: SaveArgs, fingerprint: Fingerprint, answer: SavedSlot, talk: Talk | None
    ) -> Manifest:
        assert self._keeper is not None
        talk = talk or Talk("")
        return Manifest(
            snapshot=args.name,
            tenant=tenant,
            fingerprint=fingerprint,
            slot=args.slot,
            tokens=answer.n_saved,
            bytes=answer.n_written,
            saved_ms=self._how.now_ms(),
            strategy=args.strategy,
            token=args.token,
            boot=self._keeper.folder.boot,
            id=talk.id,
            links=talk.links[-MAX_LINKS:],
            used_ms=talk.used_ms,
        )

    async def restore(self, tenant: str, name: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        """Put a snapshot into an empty slot, once size, fingerprint and digest are right; see `Backend.restore`."""
        keeper = self._keeper
        if keeper is None:
            nothing = f"no slot_dir is configured for the llama-server at {self._http.url}: nothing to restore"
            raise BackendRefused(nothing)
        model = await self._loaded(name)
        fingerprint = await self._fingerprint(model)
        judged = self._judged(tenant, snapshot, fingerprint, model, keeper)
        slots, (manifest, problem) = await asyncio.gather(self._slots(name), judged)
        problem = problem or (unfit(slots, slot, manifest) if slot >= 0 else None)
        if problem is not None:
            raise BackendRefused(f"{snapshot} was not restored: {problem}")
        if slot >= 0:
            return await self._put(model, manifest, slots[slot], -1)
        assert self._taking is not None
        return await self._taking.put(tenant, model, manifest, room)

    async def _judged(
        self, tenant: str, snapshot: str, now: Fingerprint, model: Model, keeper: Keeper
    ) -> tuple[Manifest, str | None]:
        """A snapshot of the tenant, and why it must not be restored."""
        manifest = await keeper.manifest(snapshot) if name_problem(snapshot) is None else None
        if manifest is None or manifest.tenant != tenant:
            raise BackendRefused(f"{snapshot} is no snapshot of {tenant}")
        return manifest, await keeper.problem(manifest, now, model.run)

    async def _put(self, model: Model, manifest: Manifest, slot: Slot, after: int) -> Restored:
        assert self._keeper is not None
        name, snapshot = model.name, manifest.snapshot
        run = await self.run(model)
        call = self._http.restore(name, slot.id, snapshot)
        with self._forgetting(name):
            answer = await patiently(call, f"restore of {snapshot}", self._limits.restore_s, lambda: len(run.arrived))
        if answer.n_restored != manifest.tokens:
            wrong = f"llama-server restored {answer.n_restored} of {manifest.tokens} tokens of {snapshot}"
            raise BackendError(f"{wrong}, {await self._taken_back(name, slot.id)}")
        run.arrived[slot.id] = Arrived(manifest, task_of(slot), after)
        await self._keeper.restored(snapshot)
        self._paces.restored(name, answer.n_restored, answer.timings.restore_ms, self._how.now_ms())
        return Restored(slot.id, answer.n_restored, answer.timings.restore_ms)

    async def _taken_back(self, name: str, slot: int) -> str:
        """What is called cold must not be found in its slot: empty it; says how that went."""
        try:
            with self._forgetting(name):
                await self._http.erase(name, slot)
        except BackendError as error:
            return f"and slot {slot} could not be emptied again: {error}"
        return f"so slot {slot} was emptied again"

    async def _loaded(self, name: str) -> Model:
        model = self._models.loaded(name) or await self._models.look(name)
        if model is None or state_of(model) is not TenantState.LOADED:
            raise BackendRefused(f"{name} is {model.status.value if model else 'unknown to the router'}, not loaded")
        return model

    def shelf(self, name_of: Callable[[str], str | None]) -> FolderShelf | None:
        """The snapshots, for whoever looks at them; `name_of` gives a tenant's name at the server."""

        async def now(tenant: str) -> Fingerprint | None:
            name = name_of(tenant)
            try:
                return None if name is None else await self._fingerprint(await self._loaded(name))
            except BackendError:
                return None

        return FolderShelf(self._keeper, now) if self._keeper is not None else None

    async def _fingerprint(self, model: Model) -> Fingerprint:
        return await self._fingerprints.of(model, (await self.run(model)).environ)

    def _local_path(self, path: str) -> str:
        return local_path(path, self._how.path_map, self._how.folder)

    @contextmanager
    def _forgetting(self, name: str) -> Generator[None]:
        """What fails may have killed the child."""
        try:
            yield
        except BackendError:
            self._models.forget(name)
            raise
