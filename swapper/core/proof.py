"""Did a restored conversation come back warm? A judgement over three numbers of the answer that used its slot.

Invariant: pure; `warm` is said only where reuse was really seen, otherwise `cold` with a reason a person understands.
"""

from __future__ import annotations

from swapper.core.conversations import ProofResult

CHANCE_TOKENS = 32
"""Reuse up to here proves nothing: any two prompts of one chat template share its first tokens (10 were seen)."""
NEARLY = 0.8
"""A prompt shorter than this part of what was saved is another conversation with the same beginning: a system prompt
may be long, so that most of a stranger's short prompt comes from the slot."""


def judge(saved_tokens: int, cache_n: int, prompt_n: int) -> tuple[ProofResult, str | None]:
    """Warm or cold, with the reason where cold.

    `saved_tokens` is what was restored into the slot; `cache_n` and `prompt_n` are the prompt tokens the answer took
    from the slot and read anew (llama-server's `timings`). Warm needs half of what was saved, or more than chance and
    half of a prompt that is about as long as what was saved (an earlier turn of it again).
    """
    prompt = cache_n + prompt_n
    if saved_tokens > 0 and cache_n > 0 and 2 * cache_n >= saved_tokens:
        return ProofResult.WARM, None
    if prompt < NEARLY * saved_tokens:
        return (
            ProofResult.COLD,
            f"slot taken by another, shorter prompt ({prompt} tokens, {cache_n} of them from the slot, "
            f"{saved_tokens} were restored)",
        )
    if cache_n > CHANCE_TOKENS and 2 * cache_n >= prompt:
        return ProofResult.WARM, None
    return (
        ProofResult.COLD,
        f"read again: {cache_n} of {prompt} prompt tokens came from the slot, {saved_tokens} were restored",
    )
