"""Budgets of thinking, by the names of every dialect."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fwk.interfaces.parser import ParserContext
from fwk_parsers.harmony.channels import HarmonyChannels
from fwk_parsers.think.parser import AlwaysThinks, GraniteThinks, ThinkParser
from fwk_sampling.thinking_budget import ThinkingBudgetParams
from fwk_server._common.chat.budget import MESSAGE
from fwk_server.anthropic.request import prompt_fields

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def thinks(frontend):
    """The frontend with the processor on, and a model that thinks."""
    frontend.params = (ThinkingBudgetParams,)
    frontend.reasoning_parser = lambda tail="": ThinkParser(ParserContext((), tail))
    return frontend


def text(ids: list[int]) -> str:
    return bytes(ids).decode()


@pytest.mark.parametrize(
    "name", ["thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget"]
)
async def test_the_processor_is_told_the_marks(api, thinks, name):
    await api.chat(**{name: 7})
    extra = thinks.items[-1].sampling.extra
    assert extra["thinking_token_budget"] == 7
    marks = extra["thinking_marks"]
    assert (text(marks["opens"]), [text(close) for close in marks["closes"]]) == ("<think>", ["</think>"])
    assert text(marks["end"]) == f"{MESSAGE}</think>\n\n"


async def test_a_message_and_an_open_prompt(api, thinks):
    thinks.text.render_chat = lambda messages, **_: "<bos>[assistant]<think>\n"
    await api.chat(thinking_token_budget=0, reasoning_budget_message="Stop.</think>")
    marks = thinks.items[-1].sampling.extra["thinking_marks"]
    assert (marks["opens"], text(marks["end"])) == ([], "Stop.</think></think>\n\n")


async def test_no_limit_asks_nothing(api, thinks):
    for name in ("thinking_token_budget", "reasoning_budget", "thinking_budget_tokens"):
        await api.chat(**{name: -1})
        assert "thinking_marks" not in thinks.items[-1].sampling.extra


async def test_a_constrained_answer_keeps_every_budget(api, thinks):
    thinks.grammar_kinds = frozenset({"json_object", "delayed"})
    for thinks.grammar_in_reasoning in (False, True):
        await api.chat(thinking_token_budget=3, response_format={"type": "json_object"})
        has_budget = "thinking_token_budget" in thinks.items[-1].sampling.extra
        assert has_budget is not thinks.grammar_in_reasoning  # which leaves no thinking


async def test_what_cannot_be_kept_is_refused(api, thinks, frontend):
    for value in (-2, "x", 1.5):
        assert (await api.refused(CHAT, HI | {"thinking_token_budget": value}))["param"] == "thinking_token_budget"
    both = HI | {"thinking_token_budget": 1, "thinking_budget": 1}
    assert "mean the same" in (await api.refused(CHAT, both))["message"]
    error = await api.refused("/v1/completions", {"prompt": "Hi", "thinking_budget": 5})
    assert "chat completions" in error["message"]
    thinks.reasoning_parser = lambda tail="": None
    assert "--reasoning-parser" in (await api.refused(CHAT, HI | {"thinking_token_budget": 1}))["message"]
    frontend.params = ()
    assert "logits processor" in (await api.refused(CHAT, HI | {"thinking_token_budget": 1}))["message"]


def test_the_marks_of_other_parsers():
    harmony = HarmonyChannels(ParserContext(prompt_tail="<|start|>assistant")).thinking_marks()
    assert harmony.opens == "<|channel|>analysis<|message|>"
    assert harmony.end == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert "<|end|>" in harmony.closes
    assert AlwaysThinks(ParserContext()).thinking_marks().opens == ""
    granite = GraniteThinks(ParserContext()).thinking_marks()
    assert granite.opens == "Here is my thought process:"
    assert granite.end == "Here is my response:\n\n"


def test_anthropic_has_a_name_of_its_own():
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    fields = prompt_fields(asked | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert fields["thinking_token_budget"] == 1024
    assert "thinking_token_budget" not in prompt_fields(asked | {"thinking": {"type": "disabled"}})
    for value in ("1", 0, True, 1.5):
        with pytest.raises(Exception, match=r"thinking\.budget_tokens"):
            prompt_fields(asked | {"thinking": {"type": "enabled", "budget_tokens": value}})


def test_can_budget_needs_parser_and_processor(frontend):
    from fwk_server._common.chat.budget import can_budget

    assert not can_budget(frontend)
    frontend.params = (ThinkingBudgetParams,)
    assert not can_budget(frontend)
    frontend.reasoning_parser = lambda tail="": SimpleNamespace(thinking_marks=lambda: None)
    assert not can_budget(frontend)
    frontend.reasoning_parser = lambda tail="": ThinkParser(ParserContext((), tail))
    assert can_budget(frontend)
