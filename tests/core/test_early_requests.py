"""Requests that come before the engines serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fwk import SamplingParams
from fwk.errors import EngineDead
from fwk.interfaces.dialect import GenerateInput, ModelCard
from fwk.server.frontend import ServerFrontend
from fwk.server.observer_dispatch import Observers
from fwk.text.prompt_limits import PromptLimits
from fwk.types import GrammarRequest


def test_a_grammar_asked_for_before_the_engines_have_settled_on_a_backend_is_early() -> None:
    text: Any = SimpleNamespace(limits=PromptLimits())
    plugins: Any = SimpleNamespace(family=lambda name: [])
    engines: Any = SimpleNamespace(pool=SimpleNamespace(trouble=lambda: "the engine is starting"))
    card = ModelCard("tiny", "p", 1, 64, 320)
    frontend = ServerFrontend(card, text, engines, plugins, Observers(), {}, text)
    assert "json_object" in frontend.grammar_kinds, "no dialect may say that there is no backend"
    grammar = GrammarRequest("json_object")
    with pytest.raises(EngineDead, match="starting"):
        frontend.check(GenerateInput([1], SamplingParams(max_tokens=1, grammar=grammar)))
    frontend.use_grammars("none")
    assert not frontend.grammar_kinds
    frontend.close()
