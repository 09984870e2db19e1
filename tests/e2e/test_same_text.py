"""Greedy text after a handover is the text without one, word for word: nothing of a conversation is bent on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.demo.models import make_models
from tests.support.sametext import differing

CONVERSATIONS = 10
"""Of each kind; the bench takes 50."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), ["alpha", "lfm"])


@pytest.mark.parametrize("model", ["alpha", "lfm"])
def test_a_conversation_goes_on_after_a_handover_with_the_very_words_it_would_have_gone_on_with(
    models: dict[str, Path], tmp_path: Path, model: str
) -> None:
    found = differing(tmp_path, model, models[model], CONVERSATIONS, seed=11)
    assert found.compared == CONVERSATIONS
    assert found.different == []
    assert found.cold == []
