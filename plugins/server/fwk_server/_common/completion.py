"""A prompt to continue, or a text whose middle is missing: read, tokenised and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput, Infill
from fwk.types import SamplingParams
from fwk.types.sampling import MAX_TOKEN_IDS
from fwk_server._common.beams import FEATURE, with_beams
from fwk_server._common.body import processor_extra, validate
from fwk_server._common.caller import Caller
from fwk_server._common.chat.budget import FIELD as CHAT_BUDGET
from fwk_server._common.chat.constraints import read_constraint
from fwk_server._common.chat.models import MAX_PROMPTS, CompletionRequest
from fwk_server._common.chat.other_names import fields_of, in_our_names, refuse_unsupported
from fwk_server._common.chat.sampling import (
    check_choices,
    check_generate,
    check_scores,
    checked,
    fitted,
    label_of,
    sampling_params,
    truncated,
)
from fwk_server._common.chat.served import adapter_of
from fwk_server._common.healing import healed
from fwk_server._common.hidden import check_hidden
from fwk_server._common.inputs import Prompt, read_prompts

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 4_096
_READ = ("lora_path", "truncate_prompt_tokens", "suffix", "token_healing", "return_hidden_states")


@dataclass(slots=True)
class CompletionCall:
    """A completions request, ready to run: one input per prompt."""

    body: CompletionRequest
    items: list[GenerateInput]
    echoes: list[str]  # per prompt, what its choices start with
    constraint: str  # the field that asked for a grammar

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def is_prompt_only(self) -> bool:
        """``max_tokens: 0`` with ``echo`` scores the prompt. The engine makes one token, which is not shown."""
        return self.body.max_tokens == 0

    @property
    def skips_special(self) -> bool:
        return self.items[0].sampling.skip_special_tokens


def read(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> CompletionCall:
    """A call that has been read and checked, its grammar compiled."""
    return check(prepare(raw, frontend, caller), frontend)


def prepare(
    raw: Mapping[str, Any], frontend: Frontend, caller: Caller, default_max_tokens: int | None = DEFAULT_MAX_TOKENS
) -> CompletionCall:
    """Read and tokenise. Runs off the event loop when there is much of it.

    ``default_max_tokens`` None: as many as there is room for.
    """
    if -1 in (raw.get("max_tokens"), raw.get("n_predict")):
        default_max_tokens = None
    raw = in_our_names(raw, frontend.processor_params)
    body = validate(CompletionRequest, raw)
    if not frontend.text.has_tokenizer:
        body = body.model_copy(update={"return_token_ids": True})  # there is nothing else to reply with
    adapter = adapter_of(body.model, frontend, body.lora_path)
    frontend.card.check_task("generate")
    of_plugins = fields_of(frontend.processor_params) - {CHAT_BUDGET}  # which needs a chat
    refuse_unsupported(raw, reads=(*_READ, *of_plugins))
    constraint = read_constraint(raw, frontend.grammar_kinds)
    check_generate(body)
    check_hidden(body.return_hidden_states, token_healing=body.token_healing, suffix=body.suffix)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens may be 0 only with echo, to score a prompt", "max_tokens")
    sampling = _sampling(body, raw, frontend, default_max_tokens)
    if constraint is not None:
        sampling = msgspec.structs.replace(sampling, grammar=constraint[0])
    if body.suffix:
        prompts, sampling = _infilled(body, body.suffix, sampling, frontend)
    else:
        prompts = read_prompts(body.prompt, body.add_special_tokens is not False, frontend)
    for prompt in prompts:
        prompt.token_ids = truncated(body, frontend.card, prompt.token_ids)
    check_choices(body.n or 1, prompts, MAX_CHOICES)
    check_scores(sampling.prompt_logprobs, (body.n or 1) * sum(len(prompt.token_ids) for prompt in prompts))
    items = [
        GenerateInput(
            prompt_token_ids=prompt.token_ids,
            sampling=fitted(sampling, body.max_tokens is not None, frontend.card, len(prompt.token_ids)),
            n=body.n or 1,
            priority=body.urgency(caller),
            service=body.service(caller),
            cache_salt=body.cache_salt or "",
            adapter=adapter,
            label=label_of(body, caller),
            trace=caller.trace,
        )
        for prompt in prompts
    ]
    items = [with_beams(item, body) for item in items]
    if body.token_healing:
        items = [healed(item, frontend) for item in items]
    echoes = [prompt.as_text(frontend.text, sampling.skip_special_tokens) if body.echo else "" for prompt in prompts]
    return CompletionCall(body, items, echoes, constraint[1] if constraint is not None else "grammar")


def _infilled(
    body: CompletionRequest, suffix: str, sampling: SamplingParams, frontend: Frontend
) -> tuple[list[Prompt], SamplingParams]:
    """Prompts for what stands between each prompt and ``suffix``, and where the middle ends."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("with suffix, prompt must be a string or an array of strings", "prompt")
    if len(texts) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts, not {len(texts)}", "prompt")
    prompts: list[Prompt] = []
    for text in texts:
        for part, name in ((text, "prompt"), (suffix, "suffix")):
            frontend.text.check_fits(part, frontend.card.max_prompt_len, name)
        infill = in_the_middle(frontend, "suffix", text, suffix)
        prompts.append(Prompt(infill.token_ids, text))
        sampling = ending(sampling, infill.stop_token_ids)
    return prompts, sampling


def in_the_middle(frontend: Frontend, field: str, *given: Any) -> Infill:
    """``TextTools.infill``; a model that cannot is told of ``field``."""
    try:
        return frontend.text.infill(*given)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error}", field) from None


def ending(sampling: SamplingParams, token_ids: list[int]) -> SamplingParams:
    """``sampling`` with more tokens to stop at, as far as there may be more."""
    own = sampling.stop_token_ids
    more = [token_id for token_id in token_ids if token_id not in own][: max(MAX_TOKEN_IDS - len(own), 0)]
    return msgspec.structs.replace(sampling, stop_token_ids=[*own, *more])


def _sampling(
    body: CompletionRequest, raw: Mapping[str, Any], frontend: Frontend, default_max_tokens: int | None
) -> SamplingParams:
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = max(body.logprobs, scored or 0)
    return sampling_params(
        body,
        frontend.default_sampling,
        max_tokens=frontend.default_sampling.get("max_tokens", default_max_tokens)
        if body.max_tokens is None
        else body.max_tokens or 1,
        logprobs=body.logprobs,
        prompt_logprobs=scored,
        extra=processor_extra(frontend.processor_params, raw) or None,
    )


def check(call: CompletionCall, frontend: Frontend) -> CompletionCall:
    """Have the frontend complete the inputs: all are checked before the first one runs."""
    for i, item in enumerate(call.items):
        name = "prompt" if len(call.items) == 1 else f"prompt[{i}]"
        name += " and suffix" if call.body.suffix else ""
        names = {"prompt": name, "prompt_token_ids": name, "grammar": call.constraint, FEATURE: "use_beam_search"}
        call.items[i] = checked(frontend, item, names)
    return call
