"""Token healing: the output continues within the prompt's last token, and nothing is written twice."""

from __future__ import annotations

import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import GenerateInput
from fwk.types import GrammarRequest, SamplingParams
from fwk_kit.testing.fake_frontend import EOS, FakeFrontend, deltas_of, interleaved
from fwk_server._common import completion
from fwk_server._common.best_of import best_of
from fwk_server._common.caller import Caller
from fwk_server._common.chat.outputs import Usage, collect
from fwk_server._common.healing import HealedInput, healed


@pytest.fixture
def frontend() -> FakeFrontend:
    frontend = FakeFrontend()
    frontend.grammar_kinds = frozenset({"regex"})
    return frontend


def item_of(frontend: FakeFrontend, text: str) -> GenerateInput:
    return GenerateInput(frontend.text.encode(text), SamplingParams(max_tokens=8))


@pytest.mark.parametrize(
    ("text", "prefix", "pattern"),
    [
        ("say (", "(", r"\((.|\n)*"),
        ("Grü", "ü", r"ü(.|\n)*"),
        ("a🙂", "🙂", r"🙂(.|\n)*"),
        ("line\n", "\n", r"\n(.|\n)*"),
        ("ab", "b", r"b(.|\n)*"),
    ],
)
def test_the_last_characters_tokens_are_chosen_again(
    frontend: FakeFrontend, text: str, prefix: str, pattern: str
) -> None:
    item = healed(item_of(frontend, text), frontend)
    assert isinstance(item, HealedInput)
    assert item.prefix == prefix
    assert item.prompt_token_ids == frontend.text.encode(text)[: -len(prefix.encode())]
    assert item.sampling.grammar is not None
    assert item.sampling.grammar.source == pattern


async def test_the_reply_leaves_out_what_the_prompt_has(frontend: FakeFrontend) -> None:
    frontend.script = lambda item: interleaved(
        *(deltas_of(item, text, index=index) for index, text in enumerate(("ünde", "üße!")))
    )
    call = completion.read({"prompt": "Grü", "n": 2, "token_healing": True}, frontend, Caller())
    [choices] = await collect(frontend, call.items, Usage(call.items))
    assert ["".join(choice.texts) for choice in choices] == ["nde", "ße!"]
    assert bytes(choices[0].token_ids).decode() == "ünde"


def test_what_has_nothing_to_heal_stays(frontend: FakeFrontend) -> None:
    item = item_of(frontend, "a")
    assert healed(GenerateInput([EOS, EOS], item.sampling), frontend).prompt_token_ids == [EOS, EOS]
    assert healed(GenerateInput([97], item.sampling), frontend).prompt_token_ids == [97]


def test_what_cannot_be_had_together_is_refused(frontend: FakeFrontend) -> None:
    item = item_of(frontend, "ab")
    with pytest.raises(InvalidRequest, match="beams or best_of"):
        healed(best_of(item, 3), frontend)
    bound = SamplingParams(grammar=GrammarRequest("regex", "a"))
    with pytest.raises(InvalidRequest, match="cannot be had with a grammar"):
        healed(GenerateInput([97, 98], bound), frontend)
    frontend.grammar_kinds = frozenset()
    with pytest.raises(InvalidRequest, match="no grammar backend"):
        healed(item, frontend)
