"""Tiny language models made on the spot, so that a real llama-server has something to load.

Invariant: the same name gives the same bytes; every model answers printable ASCII only, one character a
token, and never ends by itself (see `_add_heads`). Touches only the folder it is given; `gguf` and `numpy`
are imported on use, because most commands need neither.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swapper.errors import SwapperError

if TYPE_CHECKING:
    import numpy as np

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # llama.cpp's token types
_SPECIAL_TOKENS = 3
_MUTE_TOKENS = _SPECIAL_TOKENS + 256  # the special and the raw byte tokens come first and are never produced
_FILE_TYPE_F16 = 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size and architecture of one model. `context` is in tokens, `window` is gemma3's sliding window."""

    arch: str = "llama"
    layers: int = 2
    width: int = 256
    feed_forward: int = 512
    heads: int = 4
    kv_heads: int = 4
    context: int = 65_536
    window: int = 64
    seed: int = 0

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    def recurrent(self, layer: int) -> bool:
        """Tell whether a layer keeps a short convolution instead of attention (every second one of lfm2)."""
        return self.arch == "lfm2" and layer % 2 == 0


SHAPES: Mapping[str, ModelShape] = {
    "alpha": ModelShape(seed=1),
    "beta": ModelShape(seed=2),
    "med": ModelShape(layers=8, width=512, feed_forward=1536, heads=8, kv_heads=8, seed=3),
    "big": ModelShape(layers=16, width=1024, feed_forward=3072, heads=16, kv_heads=4, seed=4),
    "gemma": ModelShape(arch="gemma3", layers=6, seed=5),
    "lfm": ModelShape(arch="lfm2", layers=4, seed=6),
}


def make_models(folder: Path, names: Sequence[str], *, layers: int | None = None) -> dict[str, Path]:
    """Write `NAME.gguf` into `folder` for each name of SHAPES and return where they are.

    alpha, beta, med and big are dense llamas of growing size, gemma has a sliding window, lfm is a hybrid.
    `layers` makes them shallower or deeper than they are: time and memory go in proportion.
    Raises ValueError for a name that is not in SHAPES, SwapperError where the extra `demo` is not installed.
    """
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise ValueError(f"no model is called {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if importlib.util.find_spec("gguf") is None:
        raise SwapperError("The demo's models need gguf, not installed: pip install -e '.[demo]' in a checkout.")
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Path] = {}
    for name in names:
        made[name] = folder / f"{name}.gguf"
        _write_model(made[name], name, replace(SHAPES[name], layers=layers or SHAPES[name].layers))
    return made


def write_preset(
    path: Path,
    models: Mapping[str, Path],
    *,
    parallel: int = 2,
    ctx: int = 16_384,
    defaults: Mapping[str, str] | None = None,
    overrides: Mapping[str, Mapping[str, str]] | None = None,
) -> Path:
    """Write llama-server's router preset for `models` and return `path`.

    `ctx` is the context of all `parallel` slots of a model together, in tokens. It keeps to the processor
    (no device, no GPU layers), gives every slot its own cache and keeps a conversation in its slot until it
    is saved. `defaults` adds to or replaces the settings of `[*]`, `overrides` those of single models; their
    keys are llama-server's long option names.
    """
    common = {
        "device": "none",
        "n-gpu-layers": "0",
        "ctx-size": str(ctx),
        "parallel": str(parallel),
        "kv-unified": "false",
        "cache-idle-slots": "false",
        "slot-prompt-similarity": "0.5",
        "skip-chat-parsing": "true",
        **(defaults or {}),
    }
    lines = ["version = 1", "", "[*]", *_settings(common)]
    for name, model in models.items():
        section = {"model": str(model), **(overrides or {}).get(name, {})}
        lines += ["", f"[{name}]", *_settings(section)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _settings(values: Mapping[str, str]) -> list[str]:
    return [f"{key} = {value}" for key, value in values.items()]


def _vocabulary() -> tuple[list[bytes], list[float], list[int]]:
    """Tokens, scores and types: three special ones, all bytes, then each printable character by itself."""
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    scores = [0.0] * len(tokens)
    printable = [*(chr(code) for code in range(0x21, 0x7F)), "\u2581"]  # the last is the tokenizer's space
    for character in printable:
        tokens.append(character.encode())
        types.append(_NORMAL)
        scores.append(-float(len(tokens)))
    return tokens, scores, types


@dataclass(frozen=True, slots=True)
class _Model:
    """One model being written; its weights come from one seeded generator: the order of calls matters.

    `writer` is gguf's GGUFWriter, whose own annotations are not complete enough for a strict checker.
    """

    writer: Any
    random: np.random.Generator

    def noise(self, name: str, *shape: int, scale: float | None = None, whole: bool = False) -> None:
        """Add Gaussian noise, by default scaled to the width of its input; `whole` keeps 32 bits."""
        values = self.draw(shape, shape[-1] ** -0.5 if scale is None else scale)
        self.writer.add_tensor(name, values if whole else values.astype("float16"))

    def ones(self, name: str, width: int) -> None:
        """Add a norm that changes nothing."""
        import numpy as np

        self.writer.add_tensor(name, np.ones(width, np.float32))

    def draw(self, shape: tuple[int, ...], scale: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Draw normally distributed numbers around 0."""
        import numpy as np

        values = self.random.standard_normal(shape, dtype=np.float32)
        values *= scale
        return values

    def finish(self) -> None:
        """Write it all to the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _write_model(path: Path, name: str, shape: ModelShape) -> None:
    import gguf
    import numpy as np

    writer: Any = gguf.GGUFWriter(path, shape.arch)
    model = _Model(writer, np.random.Generator(np.random.SFC64(shape.seed)))
    _describe(model, name, shape)
    _add_heads(model, shape)
    for layer in range(shape.layers):
        _add_layer(model, shape, layer)
    model.finish()


def _describe(model: _Model, name: str, shape: ModelShape) -> None:
    writer = model.writer
    tokens, scores, types = _vocabulary()
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPE_F16)
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_width)
    if shape.arch == "gemma3":
        writer.add_key_length(shape.head_width)
        writer.add_value_length(shape.head_width)
        writer.add_sliding_window(shape.window)
    if shape.arch == "lfm2":
        writer.add_uint32("lfm2.shortconv.l_cache", 3)
        writer.add_head_count_kv([0 if shape.recurrent(i) else shape.kv_heads for i in range(shape.layers)])
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(_CHAT_TEMPLATE)


def _add_heads(model: _Model, shape: ModelShape) -> None:
    """Add embedding and output. The mute tokens' rows are zero: a logit of 0 is never the largest of many."""
    size = len(_vocabulary()[0])
    model.noise("token_embd.weight", size, shape.width, scale=0.05)
    model.ones("token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight", shape.width)
    output = model.draw((size, shape.width), 0.2)
    output[:_MUTE_TOKENS] = 0
    model.writer.add_tensor("output.weight", output.astype("float16"))


def _add_layer(model: _Model, shape: ModelShape, layer: int) -> None:
    width, kv_width = shape.width, shape.kv_heads * shape.head_width
    block = f"blk.{layer}."
    model.ones(block + "attn_norm.weight", width)
    model.ones(block + "ffn_norm.weight", width)
    if shape.recurrent(layer):
        model.noise(block + "shortconv.conv.weight", width, 3, scale=0.5, whole=True)
        model.noise(block + "shortconv.in_proj.weight", 3 * width, width)
        model.noise(block + "shortconv.out_proj.weight", width, width)
    else:
        sharp = 3 * width**-0.5  # attention that looks at something, so that an answer depends on what was said
        model.noise(block + "attn_q.weight", width, width, scale=sharp)
        model.noise(block + "attn_k.weight", kv_width, width, scale=sharp)
        model.noise(block + "attn_v.weight", kv_width, width)
        model.noise(block + "attn_output.weight", width, width)
        if shape.arch in ("gemma3", "lfm2"):
            model.ones(block + "attn_q_norm.weight", shape.head_width)
            model.ones(block + "attn_k_norm.weight", shape.head_width)
    if shape.arch == "gemma3":
        model.ones(block + "post_attention_norm.weight", width)
        model.ones(block + "post_ffw_norm.weight", width)
    model.noise(block + "ffn_gate.weight", shape.feed_forward, width)
    model.noise(block + "ffn_up.weight", shape.feed_forward, width)
    model.noise(block + "ffn_down.weight", width, shape.feed_forward)
