"""Did a restored conversation come back warm? A judgement over three numbers of the answer that used its slot.

Invariant: pure; `warm` is said only where reuse was really seen, otherwise `cold` with a reason a person understands.
"""

from __future__ import annotations

from swapper.core.types import ProofResult

CHANCE_TOKENS = 32
"""Reuse up to here proves nothing: any two prompts of one chat template share its first tokens (10 were seen)."""


def judge(saved_tokens: int, cache_n: int, prompt_n: int) -> tuple[ProofResult, str | None]:
    """Warm or cold, with the reason where cold.

    `saved_tokens` is what was restored into the slot; `cache_n` and `prompt_n` are the prompt tokens the answer took
    from the slot and read anew (llama-server's `timings`). Warm needs half of what was saved, or half of a prompt
    that could reuse less than was saved, and then more than chance.
    """
    prompt = cache_n + prompt_n
    if saved_tokens > 0 and cache_n > 0 and 2 * cache_n >= saved_tokens:
        return ProofResult.WARM, None
    if cache_n > CHANCE_TOKENS and 2 * cache_n >= prompt:
        return ProofResult.WARM, None
    if 2 * prompt < saved_tokens:
        return ProofResult.COLD, f"slot taken by another, short prompt ({prompt} tokens, {saved_tokens} were restored)"
    return (
        ProofResult.COLD,
        f"read again: {cache_n} of {prompt} prompt tokens came from the slot, {saved_tokens} were restored",
    )
