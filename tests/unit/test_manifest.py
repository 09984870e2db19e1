"""A snapshot enters only the model it was saved under, and says why it does not."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from swapper.snapshots.manifest import (
    Fingerprint,
    GgufIdentity,
    Manifest,
    decode,
    encode,
    name_problem,
    refusal,
    short_digest,
)
from workers.llama.gguf import GgufIdentities

NOW = Fingerprint(
    model="med",
    gguf=GgufIdentity("/models/med.gguf", "abc", 1000, 5),
    build="b1-7e4c0a9",
    n_ctx_slot=4096,
    n_parallel=2,
    kv_unified=False,
)
SAVED = Manifest("med.1.0.kv", "llama/med", NOW, slot=0, tokens=1500, bytes=24_000, saved_ms=1)


def saved_under(**changed: Any) -> Manifest:  # noqa: ANN401
    return replace(SAVED, fingerprint=replace(NOW, **changed))


def test_a_snapshot_enters_the_model_it_was_saved_under() -> None:
    assert refusal(SAVED, NOW) is None


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"model": "other"}, "another model"),
        ({"build": "b2"}, "llama-server build (b2, now b1-7e4c0a9)"),
        ({"n_ctx_slot": 8192}, "context size per slot (8192, now 4096)"),
        ({"n_parallel": 4}, "number of slots"),
        ({"kv_unified": True}, "kv-unified"),
        ({"cache_types": ("q8_0", "f16")}, "cache types (q8_0 f16, now f16 f16)"),
        ({"flash_attn": "off"}, "flash-attn"),
        ({"rope": ("--rope-freq-base 5000",)}, "rope or attention arguments (--rope-freq-base 5000, now none)"),
        ({"lora": ("--lora a.gguf",)}, "LoRA"),
        ({"drafter": "draft.gguf"}, "draft model"),
        ({"mmproj": "vision.gguf"}, "projector"),
        ({"template": "123"}, "chat template"),
    ],
)
def test_every_difference_that_matters_is_refused_and_named(changed: dict[str, Any], word: str) -> None:
    assert word in (refusal(saved_under(**changed), NOW) or "")


@pytest.mark.parametrize(
    ("gguf", "word"),
    [
        (
            GgufIdentity("/models/old.gguf", "def", 1000, 5),
            "another model file (/models/old.gguf, now ",
        ),
        (
            GgufIdentity("/models/med.gguf", "abc", 1001, 5),
            "med.gguf had 1,001 bytes of 1970-01-01 00:00:00 UTC then",
        ),
        (GgufIdentity("/models/med.gguf", "abc", 1000, 6), "may be another one"),
        (GgufIdentity("/models/med.gguf"), "cannot be read here"),
    ],
)
def test_other_weights_are_refused(gguf: GgufIdentity, word: str) -> None:
    assert word in (refusal(saved_under(gguf=gguf), NOW) or "")


@pytest.mark.parametrize("names", [["my model.gguf"], ["my-00001-of-00002.gguf", "my-00002-of-00002.gguf"]])
def test_a_file_that_was_only_touched_has_its_date_back_by_what_the_refusal_says(
    tmp_path: Path, names: list[str]
) -> None:
    for nth, name in enumerate(names):
        (tmp_path / name).write_bytes(b"GGUF" + bytes([3]) + bytes(19))
        os.utime(tmp_path / name, ns=(1, 1_700_000_000_123_456_789 + nth))
    identities, path = GgufIdentities(tmp_path), str(tmp_path / names[0])
    then = identities.identity(path)
    assert then.known
    for name in names:
        (tmp_path / name).touch()
    said = refusal(saved_under(gguf=then), replace(NOW, gguf=identities.identity(path)))
    assert said is not None
    command = said.partition("its date back: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert refusal(saved_under(gguf=then), replace(NOW, gguf=identities.identity(path))) is None


def test_a_model_file_nobody_can_read_never_matches_not_even_itself() -> None:
    unknown = replace(NOW, gguf=GgufIdentity("/models/med.gguf"))
    assert refusal(replace(SAVED, fingerprint=unknown), unknown) is not None


def test_the_same_weights_may_lie_elsewhere() -> None:
    assert refusal(saved_under(gguf=replace(NOW.gguf, path="/srv/med.gguf")), NOW) is None


def test_a_conversation_longer_than_a_slot_is_refused() -> None:
    assert "do not fit" in (refusal(replace(SAVED, tokens=4097), NOW) or "")


def test_a_manifest_of_another_version_is_refused() -> None:
    assert "version 2" in (refusal(replace(SAVED, version=2), NOW) or "")


def test_a_manifest_survives_the_disk() -> None:
    manifest = replace(SAVED, digest="00ff", restored_ms=7, fingerprint=replace(NOW, lora=("--lora a 1",)))
    assert decode(encode(manifest)) == manifest


def test_a_manifest_that_knows_nothing_of_its_conversation_is_read_and_may_be_restored() -> None:
    fields = cast("dict[str, object]", json.loads(encode(SAVED)))
    old = {name: value for name, value in fields.items() if name not in ("id", "links", "used_ms")}
    assert decode(json.dumps(old).encode()) == SAVED
    assert refusal(SAVED, NOW) is None


def test_a_snapshot_counts_as_used_at_its_save_unless_somebody_knew_better() -> None:
    assert replace(SAVED, saved_ms=9).last_ms == 9
    assert replace(SAVED, saved_ms=9, used_ms=5).last_ms == 5


def test_equal_fingerprints_have_one_short_digest_and_every_difference_another() -> None:
    assert short_digest(replace(NOW)) == short_digest(NOW)
    others = [replace(NOW, build="b2"), replace(NOW, n_parallel=4), replace(NOW, drafter="d.gguf")]
    assert len({short_digest(one) for one in (NOW, *others)}) == 4
    assert len(short_digest(NOW)) == 16


@pytest.mark.parametrize("data", [b"", b"{}", b'{"snapshot": 1}', b"\xff"])
def test_what_is_no_manifest_is_not_read_as_one(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(data)


@pytest.mark.parametrize("name", ["llama-med.6f0.0.kv", "x", "a b.bin", "ünï.bin"])
def test_plain_names_are_taken(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "a:b",
        "a\\b",
        "..",
        "a..b",
        ".a",
        " a",
        "a ",
        "a.",
        "a\n",
        "a*",
        "x" * 250,
        "a.manifest.json",
        "a.tmp",
    ],
)
def test_names_that_llama_server_refuses_or_that_hide_are_not_taken(name: str) -> None:
    assert name_problem(name) is not None
