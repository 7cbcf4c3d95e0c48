"""A chat request, read and checked: what all dialects of chat run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput
from fwk_server._common.beams import FEATURE, with_beams
from fwk_server._common.body import processor_extra, validate
from fwk_server._common.caller import Caller
from fwk_server._common.chat.answers import Answer
from fwk_server._common.chat.budget import FIELD, with_marks
from fwk_server._common.chat.delayed import behind_thinking
from fwk_server._common.chat.items import with_messages
from fwk_server._common.chat.media import MediaParts
from fwk_server._common.chat.messages import chat_ids, read_messages, text_of
from fwk_server._common.chat.models import ChatRequest
from fwk_server._common.chat.other_names import fields_of, in_our_names, refuse_unsupported
from fwk_server._common.chat.sampling import (
    check_generate,
    check_scores,
    checked,
    fitted,
    label_of,
    sampling_params,
    truncated,
)
from fwk_server._common.chat.served import adapter_of
from fwk_server._common.chat.tools import ToolUse, tools_and_constraint, with_tools

TAIL_TOKENS = 32
"""Of the prompt, looked at for thinking that the template has opened."""


@dataclass(slots=True)
class ChatCall:
    """A chat request, ready to run."""

    body: ChatRequest
    item: GenerateInput
    echo: str  # what the reply starts with: the last message, if the client asked for that
    tools: ToolUse | None
    constraint: str | None  # the field that asked for a grammar
    thinks: bool  # whether thinking may come before the answer

    @property
    def num_top(self) -> int:
        return self.body.top_logprobs or 0

    def reads_special(self, frontend: Frontend) -> bool:
        """Whether a parser of the output looks for marks that may be special tokens."""
        tools = self.tools
        parser = tools.parser(frontend) if tools is not None else None
        reasoning = frontend.reasoning_parser() if self.thinks else None
        return any(found is not None and found.reads_special for found in (parser, reasoning))

    def answers(self, frontend: Frontend) -> list[Answer]:
        """What reads the choices, where there is something to look for in their text."""
        tail = _tail(frontend, self.item.prompt_token_ids)
        is_legacy = self.tools is not None and self.tools.is_legacy
        is_parallel = self.tools is None or self.tools.is_parallel
        is_silent = self.body.include_reasoning is False
        make = partial(Answer, is_parallel=is_parallel, is_silent=is_silent, is_legacy=is_legacy)
        found: list[Answer] = []
        for _ in range(self.item.n):
            reasoning = frontend.reasoning_parser(tail) if self.thinks else None
            tools = self.tools.parser(frontend, tail) if self.tools is not None else None
            if reasoning is not None or tools is not None:
                found.append(make(reasoning, tools))
        return found


def read(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> ChatCall:
    """A call that has been read and checked, its grammar compiled."""
    return check(prepare(raw, frontend, caller), frontend)


def prepare(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> ChatCall:
    """Read, render and tokenise the fields of a body. Runs off the event loop when there is much of it."""
    processors = frontend.processor_params
    raw = with_messages(in_our_names(raw, processors))
    own = ("lora_path", "truncate_prompt_tokens", "return_hidden_states")
    refuse_unsupported(raw, reads=(*own, *fields_of(processors)))
    body = validate(ChatRequest, raw)
    extra = processor_extra(processors, raw) or None
    adapter = adapter_of(body.model, frontend, body.lora_path)
    frontend.card.check_task("generate")
    max_prompt_len = None if body.truncate_prompt_tokens else frontend.card.max_prompt_len
    tools, constraint = tools_and_constraint(raw, frontend)
    media = MediaParts(frontend)
    messages = read_messages(body.messages, media)
    rendered, shown = with_tools(messages, tools, frontend)
    token_ids = chat_ids(frontend.text, body, rendered, bool(body.add_special_tokens), shown, max_prompt_len)
    if media.items and body.truncate_prompt_tokens is not None:
        raise InvalidRequest("truncate_prompt_tokens would cut media off: leave it out", "truncate_prompt_tokens")
    placed = media.place(truncated(body, frontend.card, token_ids))
    token_ids = placed.token_ids
    tail = _tail(frontend, token_ids)
    delayed = behind_thinking(constraint[0], tail, frontend) if constraint is not None else None
    thinks = constraint is None or delayed is not None
    if constraint is not None and delayed is not None:
        constraint = delayed, constraint[1]
    if extra is not None and extra.get(FIELD, -1) >= 0:
        extra = with_marks(extra, tail, frontend, is_constrained=not thinks)
    check_generate(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_params(
        body,
        frontend.default_sampling,
        max_tokens=wanted,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        extra=extra,
        grammar=constraint[0] if constraint is not None else tools.free if tools is not None else None,
    )
    item = GenerateInput(
        prompt_token_ids=token_ids,
        sampling=fitted(sampling, wanted is not None, frontend.card, len(token_ids)),
        n=body.n or 1,
        label=label_of(body, caller),
        priority=body.urgency(caller),
        service=body.service(caller),
        cache_salt=body.cache_salt or "",
        adapter=adapter,
        operation="chat",
        trace=caller.trace,
        media=placed.media,
        payload=placed.payload,
    )
    item = with_beams(item, body)
    echo = text_of(messages[-1]["content"]) if body.echo else ""
    return ChatCall(body, item, echo, tools, constraint[1] if constraint is not None else None, thinks)


def _tail(frontend: Frontend, token_ids: Sequence[int]) -> str:
    """How a prompt ends, special tokens spelled out."""
    return frontend.text.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False)


def check(call: ChatCall, frontend: Frontend) -> ChatCall:
    """Have the frontend complete the input."""
    sampling = call.item.sampling
    if call.reads_special(frontend):
        call.item = replace(call.item, sampling=msgspec.structs.replace(sampling, skip_special_tokens=False))
    check_scores(sampling.prompt_logprobs, len(call.item.prompt_token_ids))
    names = {
        "logprobs": "top_logprobs",
        "prompt": "messages",
        "prompt_token_ids": "messages",
        FEATURE: "use_beam_search",
    }
    if call.body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if sampling.grammar is not None:
        names["grammar"] = call.constraint or "tools"
    call.item = checked(frontend, call.item, names)
    return call
