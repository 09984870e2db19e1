"""A tiny multimodal projector and a picture for it, so that a generated model can be shown something.

Invariant: the same arguments give the same bytes. Seen to load in llama-server b10434: a `clip` file with one vision
layer and the projector `mlp` (LLaVA's), whose picture is (`SIDE` / `PATCH`) squared tokens and nothing around them.
"""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

SIDE, PATCH = 56, 14
PICTURE_TOKENS = (SIDE // PATCH) ** 2
_WIDTH, _FEED_FORWARD, _HEADS = 64, 128, 2
_FILE_TYPE_F16 = 1


def make_projector(path: Path, width: int) -> Path:
    """Write a projector for a model whose embedding has `width` numbers; returns `path`."""
    import gguf

    writer: Any = gguf.GGUFWriter(path, "clip")
    _describe(writer, width)
    _add_tensors(writer, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: Any, width: int) -> None:  # noqa: ANN401  # gguf's annotations are not complete
    writer.add_file_type(_FILE_TYPE_F16)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": _WIDTH,
        "feed_forward_length": _FEED_FORWARD,
        "projection_dim": width,
        "block_count": 1,
        "attention.head_count": _HEADS,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", size)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)


def _add_tensors(writer: Any, width: int) -> None:  # noqa: ANN401
    import numpy as np

    random = np.random.Generator(np.random.SFC64(9))

    def noise(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * shape[-1] ** -0.5).astype("float16"))

    def whole(name: str, size: int) -> None:
        writer.add_tensor(name, (random.standard_normal(size) * 0.05).astype("float32"))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(_WIDTH, np.float32))

    def layer(name: str, out: int, into: int) -> None:
        noise(f"{name}.weight", out, into)
        whole(f"{name}.bias", out)

    whole("v.class_embd", _WIDTH)
    noise("v.patch_embd.weight", _WIDTH, 3, PATCH, PATCH)
    noise("v.position_embd.weight", PICTURE_TOKENS + 1, _WIDTH)
    norm("v.pre_ln")
    for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
        layer(f"v.blk.0.{part}", _WIDTH, _WIDTH)
    norm("v.blk.0.ln1")
    norm("v.blk.0.ln2")
    layer("v.blk.0.ffn_up", _FEED_FORWARD, _WIDTH)
    layer("v.blk.0.ffn_down", _WIDTH, _FEED_FORWARD)
    layer("mm.0", width, _WIDTH)
    layer("mm.2", width, width)


def picture(seed: int) -> str:
    """A PNG of `SIDE` x `SIDE` pixels, as the `data:` URL that a chat message holds."""
    rows = b"".join(b"\0" + bytes((x * seed + y) % 256 for x in range(SIDE * 3)) for y in range(SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
