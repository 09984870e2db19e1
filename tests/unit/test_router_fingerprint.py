"""What a child's arguments and its model file say of the state it can take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from swapper.demo.models import make_models
from swapper.snapshots.manifest import Fingerprint
from workers.llama.fingerprint import Args, Fingerprints
from workers.llama.gguf import GgufIdentities, read_header, shards
from workers.llama.http import Model, Props, RouterHttp, Status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("gguf"), ["alpha"])["alpha"]


def test_arguments_are_read_as_names_with_their_values_and_flags_without() -> None:
    args = Args.of(["/bin/llama-server", "--metrics", "--port", "41", "--lora-scaled", "a.gguf", "0.5", "--seed", "-1"])
    assert args.last("--port") == "41"
    assert args.last("--seed") == "-1"
    assert args.last("--absent", default="f16") == "f16"
    assert args.matching("--lora") == ("--lora-scaled a.gguf 0.5",)
    assert args.matching("--metrics") == ("--metrics",)


def test_the_environment_counts_where_the_command_line_is_silent() -> None:
    environ = ["LLAMA_ARG_CACHE_TYPE_K=q8_0", "LLAMA_ARG_ROPE_SCALE=2", "HOME=/root"]
    args = Args.of(["x", "--rope-scale", "4"], environ)
    assert args.last("--cache-type-k") == "q8_0"
    assert args.matching("--rope-") == ("--rope-scale 4",)


@pytest.mark.parametrize(
    ("words", "unified"),
    [
        (["--parallel", "2"], False),
        (["--parallel", "2", "--kv-unified"], True),
        (["--parallel", "2", "--no-kv-unified"], False),
        ([], True),
        (["--parallel", "-1"], True),
        (["--no-kv-unified"], False),
    ],
)
def test_kv_unified_is_as_given_else_on_with_automatic_slots_only(words: list[str], unified: bool) -> None:
    assert Args.of(["llama-server", *words]).kv_unified() is unified


def test_a_model_in_shards_is_all_of_them() -> None:
    assert shards("/m/q-00001-of-00002.gguf") == ["/m/q-00001-of-00002.gguf", "/m/q-00002-of-00002.gguf"]
    assert shards("q.gguf") == ["q.gguf"]


def test_the_identity_covers_the_header_and_not_the_weights(model: Path, tmp_path: Path) -> None:
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(data)
    data[model.read_bytes().index(b"alpha")] ^= 1
    header = tmp_path / "header.gguf"
    header.write_bytes(data)
    assert read_header(weights).digest == read_header(model).digest
    assert read_header(header).digest != read_header(model).digest


def test_an_identity_is_computed_once_for_each_state_of_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    first = GgufIdentities(tmp_path).identity(str(copy))
    assert (first.known, first.size) == (True, copy.stat().st_size)

    def fail(_path: Path) -> str:
        raise AssertionError("read again")

    with monkeypatch.context() as patched:
        patched.setattr("workers.llama.gguf.read_header", fail)
        assert GgufIdentities(tmp_path).identity(str(copy)) == first
    os.utime(copy, ns=(0, 12345))
    touched = GgufIdentities(tmp_path).identity(str(copy))
    assert (touched.digest, touched.mtime_ns) == (first.digest, 12345)


def test_what_a_header_says_of_its_architecture_is_known_without_the_rest(model: Path, tmp_path: Path) -> None:
    facts = GgufIdentities(tmp_path).facts(str(model))
    assert facts is not None
    assert (facts["general.architecture"], facts["llama.embedding_length"]) == ("llama", 256)
    assert {key.partition(".")[0] for key in facts} == {"general", "llama"}
    assert GgufIdentities(tmp_path).facts(str(model)) == facts
    assert GgufIdentities(tmp_path).facts(str(tmp_path / "absent.gguf")) is None


@pytest.mark.parametrize("keep", [0, 3, 20, 2000])
def test_a_file_that_is_no_whole_gguf_has_no_identity(model: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:keep])
    assert not GgufIdentities(tmp_path).identity(str(cut)).known
    assert not GgufIdentities(tmp_path).identity(str(tmp_path / "absent.gguf")).known


class Told:
    """A server that says what it was started with."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def props(self, model: str) -> Props:
        del model
        settings = Props.Settings(n_ctx=4096)
        return Props("b1", model_path=str(self._path), total_slots=2, default_generation_settings=settings)


async def fingerprint(model: Path, *words: str) -> Fingerprint:
    http = cast("RouterHttp", Told(model))
    running = Model("m", Status("loaded", ["llama-server", "--model", str(model), *words]), name="m")
    return await Fingerprints(http, GgufIdentities(model.parent), lambda path: path).of(running)


@pytest.mark.parametrize("option", ["--model-draft", "--mmproj", "--lora", "--spec-draft-model"])
async def test_another_file_beside_the_model_is_another_fingerprint(model: Path, tmp_path: Path, option: str) -> None:
    side = tmp_path / "side.gguf"
    side.write_bytes(b"one")
    without, first = await fingerprint(model), await fingerprint(model, option, str(side))
    assert first == await fingerprint(model, option, str(side))
    side.write_bytes(b"another")
    second = await fingerprint(model, option, str(side))
    assert len({without, first, second}) == 3


async def test_what_is_drafted_how_counts_as_well(model: Path) -> None:
    kinds = [("--spec-type", "draft-mtp"), ("--spec-type", "draft-simple"), ("--spec-draft-n-max", "8"), ()]
    assert len({await fingerprint(model, *words) for words in kinds}) == 4


async def test_a_file_that_is_elsewhere_counts_by_its_name(model: Path) -> None:
    urls = [("--mmproj-url", "https://x/a.gguf"), ("--mmproj-url", "https://x/b.gguf")]
    assert len({await fingerprint(model, *words) for words in urls}) == 2
