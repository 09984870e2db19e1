"""The smallest real answer of each sort of model: proof that it computes, not only that it is listed.

Invariant: asked only of a model that was just loaded (on a live one it could push a conversation out), and its own
trace is wiped: the slot that answered is empty afterwards.
"""

from __future__ import annotations

import contextlib

import msgspec

from swapper.errors import BackendRefused
from workers.llama.fingerprint import Args
from workers.llama.http import Model, RouterHttp

_PROMPT = "."


class _Completion(msgspec.Struct):
    id_slot: int = 0


async def smallest_answer(http: RouterHttp, model: Model, limit_s: float) -> None:
    """One token, one embedding or one ranking; raises BackendError when the model does not answer within `limit_s`."""
    args = Args.of(model.status.args)
    if args.matching("--rerank"):
        body: dict[str, object] = {"model": model.id, "query": _PROMPT, "documents": [_PROMPT]}
        await http.post("/v1/rerank", body, limit_s=limit_s)
    elif args.matching("--embedding"):
        # Not /v1/embeddings: that one refuses a model without pooling.
        await http.post("/embedding", {"model": model.id, "content": _PROMPT}, limit_s=limit_s)
    else:
        await _one_token(http, model.id, limit_s)


async def _one_token(http: RouterHttp, model: str, limit_s: float) -> None:
    body: dict[str, object] = {"model": model, "prompt": _PROMPT, "n_predict": 1, "cache_prompt": False}
    answer = await http.post("/completion", body, limit_s=limit_s)
    slot = msgspec.json.decode(answer, type=_Completion).id_slot
    with contextlib.suppress(BackendRefused):  # 501: without --slot-save-path nothing is ever saved from it
        await http.erase(model, slot)
