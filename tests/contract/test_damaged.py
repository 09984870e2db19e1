"""Whatever becomes of saved files, a restore is the conversation that was saved, or it is refused in words.

Invariant: the file of a snapshot that has its digest never reaches llama-server changed, so that nothing kills the
model's process and nothing is continued from garbage. All of it on a real router.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swapper.errors import BackendError
from swapper.snapshots.manifest import MANIFEST_SUFFIX
from tests.contract.conftest import World
from tests.contract.saving import LONG, fresh_load, save
from tests.contract.talk import Talk
from workers.backend import Backend, Saved, TenantState
from workers.llama.router import LlamaRouter

ALPHA = "llama/alpha"
PROMPTS = (LONG + "One.", LONG + "Two.")
"""Equally long: their files differ in nothing but what is in them."""
MUTATIONS = 200
DAMAGED = r"its file was damaged since the save \(the digest differs\)"
NO_SNAPSHOT = "is no snapshot of llama/alpha"
CUT = r"its file has \d+ bytes instead of \d+"


@pytest.fixture
def world(real_world: World) -> World:
    return real_world


@dataclass(frozen=True, slots=True)
class Files:
    """Two snapshots of alpha and one of beta as they were saved, all of them with digests."""

    folder: Path
    mine: str
    other: str
    foreign: str
    pristine: Mapping[str, bytes]

    def path(self, name: str) -> Path:
        return self.folder / name

    def manifest(self, name: str) -> Path:
        return self.folder / (name + MANIFEST_SUFFIX)

    def put_back(self) -> None:
        """All as it was saved; what was noted about it is forgotten."""
        for path in self.folder.glob(f"{self.mine}*"):
            if path.is_dir():
                path.rmdir()
            elif path.name not in self.pristine:
                path.unlink()
        for name, data in self.pristine.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Rewrite the manifest of the first."""
        path = self.manifest(self.mine)
        fields = json.loads(path.read_text())
        change(fields)
        path.write_text(json.dumps(fields))

    def flip(self, at: int, bit: int = 0) -> None:
        data = bytearray(self.path(self.mine).read_bytes())
        data[at] ^= 1 << bit
        self.path(self.mine).write_bytes(data)

    def cut(self, size: int) -> None:
        os.truncate(self.path(self.mine), size)

    @property
    def size(self) -> int:
        return len(self.pristine[self.mine])


async def saved_files(backend: Backend, talk: Talk, world: World) -> Files:
    """Save them; alpha is then loaded anew, with empty slots."""
    await fresh_load(backend, "beta")
    await talk.say("beta", PROMPTS[0], slot=0)
    foreign = await save(backend, "beta")
    await backend.release("llama/beta", limit_ms=10_000)
    await fresh_load(backend, "alpha")
    mine: list[Saved] = []
    for slot, prompt in enumerate(PROMPTS):
        await talk.say("alpha", prompt, slot=slot)
        mine.append(await save(backend, "alpha", slot))
    await backend.close()  # the digests are written
    assert len({one.bytes for one in (*mine, foreign)}) == 1, "they can be told apart by their digests alone"
    await fresh_load(backend, "alpha")
    names = [one.snapshot for one in (*mine, foreign)]
    kept = {name + suffix for name in names for suffix in ("", MANIFEST_SUFFIX)}
    pristine = {path.name: path.read_bytes() for path in world.slots.iterdir() if path.name in kept}
    files = Files(world.slots, names[0], names[1], names[2], pristine)
    files.put_back()
    return files


def swap_files(files: Files) -> None:
    """Each file under the other's name."""
    between = files.folder / "between"
    files.path(files.mine).rename(between)
    files.path(files.other).rename(files.path(files.mine))
    between.rename(files.path(files.other))


def swap_snapshots(files: Files) -> None:
    """Each manifest under the other's name, too."""
    swap_files(files)
    between = files.folder / "between"
    files.manifest(files.mine).rename(between)
    files.manifest(files.other).rename(files.manifest(files.mine))
    between.rename(files.manifest(files.other))


def foreign_file(files: Files) -> None:
    """The file of another model of the same shape, which llama-server itself takes without a word."""
    files.path(files.mine).write_bytes(files.pristine[files.foreign])


def foreign_snapshot(files: Files) -> None:
    """Its manifest as well, with our name in it and as our own tenant's."""
    foreign_file(files)
    fields = json.loads(files.pristine[files.foreign + MANIFEST_SUFFIX])
    files.manifest(files.mine).write_text(json.dumps({**fields, "snapshot": files.mine, "tenant": ALPHA}))


def unlink(files: Files) -> None:
    files.path(files.mine).unlink()


def folder_instead(files: Files) -> None:
    unlink(files)
    files.path(files.mine).mkdir()


def no_manifest(files: Files) -> None:
    files.manifest(files.mine).unlink()


def no_json(files: Files) -> None:
    path = files.manifest(files.mine)
    path.write_bytes(path.read_bytes()[:-20])


def without_digest_on_another_boot(files: Files) -> None:
    files.edit(lambda m: m.update(digest=None, boot="another"))


def written_to_before_its_digest(files: Files) -> None:
    files.edit(lambda m: m.update(digest=None))
    files.flip(files.size // 2)
    sealed = files.manifest(files.mine).stat().st_mtime_ns
    os.utime(files.path(files.mine), ns=(sealed + 1, sealed + 1))


def edited(**changes: object) -> Callable[[Files], None]:
    return lambda files: files.edit(lambda m: m.update(changes))


def other_fingerprint(**changes: object) -> Callable[[Files], None]:
    return lambda files: files.edit(lambda m: m["fingerprint"].update(changes))


def other_weights(**changes: object) -> Callable[[Files], None]:
    return lambda files: files.edit(lambda m: m["fingerprint"]["gguf"].update(changes))


REFUSED: Mapping[str, tuple[Callable[[Files], object], str]] = {
    "cut by a byte": (lambda f: f.cut(f.size - 1), CUT),
    "cut in half": (lambda f: f.cut(f.size // 2), CUT),
    "cut to nothing": (lambda f: f.cut(0), CUT),
    "longer by a byte": (lambda f: f.cut(f.size + 1), CUT),
    "cut, and its manifest with it": (
        lambda f: (f.cut(f.size - 1), f.edit(lambda m: m.update(bytes=f.size - 1))),
        DAMAGED,
    ),
    "gone": (unlink, "its file is gone"),
    "a folder instead": (folder_instead, "is no regular file"),
    "a bit of its magic": (lambda f: f.flip(0), DAMAGED),
    "a bit of its token count": (lambda f: f.flip(8), DAMAGED),
    "a bit of a token": (lambda f: f.flip(64), DAMAGED),
    "a bit of K": (lambda f: f.flip(f.size // 3), DAMAGED),
    "a bit of V": (lambda f: f.flip(f.size - 100), DAMAGED),
    "its last byte": (lambda f: f.flip(f.size - 1, 7), DAMAGED),
    "two files swapped": (swap_files, DAMAGED),
    "two snapshots swapped": (swap_snapshots, DAMAGED),
    "a foreign file": (foreign_file, DAMAGED),
    "a foreign snapshot": (foreign_snapshot, "saved under another model file"),
    "no manifest": (no_manifest, NO_SNAPSHOT),
    "a manifest cut off": (no_json, NO_SNAPSHOT),
    "no digest, from before a crash": (without_digest_on_another_boot, "the machine went down before its digest"),
    "written to before its digest": (written_to_before_its_digest, "its file was written to after the save"),
    "another digest": (edited(digest="0" * 32), DAMAGED),
    "another version": (edited(version=2), "its manifest is of version 2"),
    "another tenant": (edited(tenant="llama/beta"), NO_SNAPSHOT),
    "more tokens than fit": (edited(tokens=5000), "its 5000 tokens do not fit the 4096 tokens of a slot"),
    "another build": (other_fingerprint(build="b1-x"), "saved under another llama-server build"),
    "another context": (other_fingerprint(n_ctx_slot=8192), "saved under another context size per slot"),
    "other slots": (other_fingerprint(n_parallel=1), "saved under another number of slots"),
    "one cache": (other_fingerprint(kv_unified=True), "saved under another kv-unified setting"),
    "other types": (other_fingerprint(cache_types=["q8_0", "f16"]), "saved under other cache types"),
    "other rope": (other_fingerprint(rope=["--rope-freq-base 5"]), "saved under other rope or attention arguments"),
    "an adapter": (other_fingerprint(lora=["a.gguf"]), "saved under other LoRA adapters"),
    "a drafter": (other_fingerprint(drafter="d.gguf"), "saved under another draft model"),
    "a projector": (other_fingerprint(mmproj="p.gguf"), "saved under another multimodal projector"),
    "another template": (other_fingerprint(template="0"), "saved under another chat template"),
    "other weights": (other_weights(digest="0" * 64), "saved under another model file"),
    "weights changed since": (other_weights(mtime_ns=1), "may be another one: it is of"),
    "weights nobody could read": (other_weights(digest=""), "cannot be read here, so nothing proves"),
}
"""What may become of a snapshot -> the change, and the sentence that its restore is refused with."""


async def process_of(backend: LlamaRouter, talk: Talk) -> str:
    """The port of alpha's process: another one is another process."""
    assert (await backend.observe())[ALPHA] is TenantState.LOADED
    args = (await talk.model("alpha"))["status"]["args"]
    return args[args.index("--port") + 1]


async def refusal(backend: Backend, files: Files, slot: int) -> str | None:
    """Why the first is not restored; None: it was."""
    try:
        await backend.restore(ALPHA, files.mine, slot)
    except BackendError as error:
        return str(error)
    return None


async def empty(talk: Talk, *, slot: int) -> None:
    status, _ = await talk.act("erase", slot, "alpha")
    assert status == 200


async def test_each_kind_of_damage_is_refused_in_its_own_words_and_reaches_no_slot(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    files = await saved_files(backend, talk, world)
    process = await process_of(backend, talk)
    for what, (change, sentence) in REFUSED.items():
        change(files)
        for slot in (0, -1):
            why = await refusal(backend, files, slot)
            assert re.search(sentence, why or "restored"), (what, slot, why)
        files.put_back()
    assert await process_of(backend, talk) == process, "the model's process lives on"
    assert (await backend.quiesce(ALPHA)).slots == ()
    assert (await backend.restore(ALPHA, files.mine, 0)).slot == 0, "untouched it comes back"
    assert (await talk.say("alpha", PROMPTS[0]))["timings"]["cache_n"] >= len(PROMPTS[0]) - 1


async def test_a_manifest_that_speaks_of_other_tokens_leaves_the_slot_empty(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    files = await saved_files(backend, talk, world)
    edited(tokens=5)(files)
    with pytest.raises(BackendError, match=r"restored \d+ of 5 tokens of .* so slot 0 was emptied again"):
        await backend.restore(ALPHA, files.mine, 0)
    assert (await talk.say("alpha", PROMPTS[0], slot=0))["timings"]["cache_n"] == 0


def accidents(files: Files, seed: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Random damage to file, manifest, or both, without end."""
    rng = random.Random(seed)

    def some_bytes(path: Path) -> Callable[[], object]:
        data = bytearray(path.read_bytes())
        at, size = rng.randrange(len(data)), rng.choice((1, 1, 8, 4096))
        data[at : at + size] = rng.randbytes(len(data[at : at + size]))
        return lambda: path.write_bytes(data)

    def one_bit() -> Callable[[], object]:
        region = rng.choice((16, 512, files.size))  # header, tokens, anywhere
        at, bit = rng.randrange(region), rng.randrange(8)
        return lambda: files.flip(at, bit)

    def shorter(path: Path) -> Callable[[], object]:
        left = rng.randrange(path.stat().st_size)
        return lambda: os.truncate(path, left)

    def longer(path: Path) -> Callable[[], object]:
        more = rng.randbytes(rng.randint(1, 99))
        return lambda: path.write_bytes(path.read_bytes() + more)

    def field() -> Callable[[], object]:
        fields = json.loads(files.pristine[files.mine + MANIFEST_SUFFIX])
        name = rng.choice([*fields, *fields["fingerprint"]])
        values: tuple[object, ...] = (None, 0, -1, 2**63, "", "x", [], {})
        value = rng.choice(values)
        return lambda: files.edit(lambda m: (m if name in m else m["fingerprint"]).update({name: value}))

    mine, manifest = files.path(files.mine), files.manifest(files.mine)
    while True:
        kinds: dict[str, Callable[[], Callable[[], object]]] = {
            "bytes": lambda: some_bytes(mine),
            "a bit": one_bit,
            "shorter": lambda: shorter(mine),
            "longer": lambda: longer(mine),
            "manifest bytes": lambda: some_bytes(manifest),
            "manifest shorter": lambda: shorter(manifest),
            "manifest longer": lambda: longer(manifest),
            "a field": field,
        }
        kind = rng.choice([*kinds])
        yield kind, kinds[kind]()


async def test_whatever_happens_to_the_files_the_process_lives_and_only_what_was_saved_comes_back(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    files = await saved_files(backend, talk, world)
    process = await process_of(backend, talk)
    story = accidents(files, seed=4)
    refused = 0
    for number in range(MUTATIONS):
        what, strike = next(story)
        strike()
        changed = files.path(files.mine).read_bytes() != files.pristine[files.mine]
        why = await refusal(backend, files, 0)
        if why is None:
            assert not changed, (number, what, "a damaged file was restored")
            await empty(talk, slot=0)
        else:
            assert files.mine in why, (number, what, why)
            refused += 1
        files.put_back()
    assert await process_of(backend, talk) == process, "the model's process lives on"
    assert refused > MUTATIONS // 2
    await backend.restore(ALPHA, files.other, 1)
    assert (await talk.say("alpha", PROMPTS[1]))["timings"]["cache_n"] >= len(PROMPTS[1]) - 1
