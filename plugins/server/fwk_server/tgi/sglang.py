"""SGLang's own ``/generate``: the same path as TGI's, with ``text`` or ``input_ids`` where that has ``inputs``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput, OutputDelta
from fwk.types import TokenLogprobs
from fwk_server._common import completion
from fwk_server._common.body import validate, want
from fwk_server._common.caller import Caller
from fwk_server._common.chat.models import IDS, MAX_PROMPTS, STRING, CompletionRequest, array
from fwk_server._common.chat.other_names import ROUTED_PREFILL, fields_of, in_our_names, refuse_unknown
from fwk_server._common.chat.outputs import Choice, Usage, of_features, run
from fwk_server._common.chat.served import check_named
from fwk_server._common.fields import CONTEXT, RequestFields, ranged
from fwk_server._common.hidden import all_states
from fwk_server._common.replies import event

DEFAULT_MAX_NEW_TOKENS = 128
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_SAMPLING = {"type": "object", "x-limit": "the fields of /v1/completions, under SGLang's names too"}
_Texts = Annotated[Any, WithJsonSchema({"anyOf": [STRING, array(STRING, MAX_PROMPTS)]})]
_Ids = Annotated[Any, WithJsonSchema({"anyOf": [IDS, array(IDS, MAX_PROMPTS)]})]
_Sampling = Annotated[Any, WithJsonSchema({"anyOf": [_SAMPLING, array(_SAMPLING, MAX_PROMPTS)]})]
_Names = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string", "x-limit": CONTEXT}, array(STRING, MAX_PROMPTS)]})]

# Fields that say nothing about the output, or nothing as long as they have this value.
_FINE: dict[str, tuple[Any, ...]] = {
    "no_logs": (True, False),
    "log_metrics": (True, False),
    "return_text_in_logprobs": (True, False),
    "return_bytes": (False,),
    "background": (False,),
    "return_routed_experts": (False,),
    "return_entropy": (False,),
    "modalities": ([], ["text"]),
}


_ROUTED = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields of SGLang's router, read where a feature does."""


class NativeRequest(RequestFields):
    """``POST /generate`` in SGLang's words."""

    text: _Texts = None
    input_ids: _Ids = None
    sampling_params: _Sampling = None
    rid: _Names = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="From which token of the prompt on log-probabilities are returned; -1: none of the prompt."
    )
    top_logprobs_num: Annotated[int, ranged("logprobs")] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | None = Field(
        None, description="Those of the prompt's tokens and of each further one; a stream has them at its end."
    )
    stream: bool | None = None
    lora_path: _Names = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None


@dataclass(slots=True)
class NativeCall:
    """A request, ready to run."""

    body: NativeRequest
    items: list[GenerateInput]
    names: list[str]
    is_list: bool  # the client sent a list, or wants several answers
    weight_version: str = "default"

    @property
    def first_scored(self) -> int:
        """The first token of the prompt that is scored; -1: none is."""
        start = self.body.logprob_start_len
        return -1 if start is None or not self.body.return_logprob else start


def is_native(raw: Mapping[str, Any]) -> bool:
    """Whether a body of ``/generate`` is one of SGLang's."""
    return "inputs" not in raw and bool(raw.keys() & {"text", "input_ids", "sampling_params"})


def read(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> NativeCall:
    """Read, tokenise and check. Raises ``InvalidRequest``."""
    check_named(raw, frontend.card)
    body = validate(NativeRequest, raw)
    frontend.card.check_task("generate")
    read_besides = {name: raw[name] for name in fields_of(frontend.processor_params) & set(_ROUTED) & raw.keys()}
    _refuse(raw, read_besides)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("either text or input_ids must be given", "text")
    name = "text" if body.input_ids is None else "input_ids"
    given = body.text if body.input_ids is None else body.input_ids
    is_list = isinstance(given, list) and not (given and type(given[0]) is int)
    prompts = given if is_list else [given]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise InvalidRequest(f"{name} must hold 1 to {MAX_PROMPTS} prompts", name)
    samplings = _spread(body.sampling_params, len(prompts), "sampling_params") if body.sampling_params else None
    labels = _spread(body.rid, len(prompts), "rid") if body.rid else None
    adapters = _spread(body.lora_path, len(prompts), "lora_path") if body.lora_path else None
    items: list[GenerateInput] = []
    for i, prompt in enumerate(prompts):
        sampling = want(samplings[i] if samplings else {}, dict, "an object", "sampling_params")
        fields = _fields(sampling, body, frontend) | read_besides
        fields["prompt"] = want(prompt, str, "a string", name) if name == "text" else _ids(prompt)
        if labels:
            fields["rid"] = labels[i]
        if adapters and adapters[i] is not None:
            fields["lora_path"] = adapters[i]
        items += completion.check(completion.prepare(fields, frontend, caller, DEFAULT_MAX_NEW_TOKENS), frontend).items
    names = [labels[i] if labels else uuid.uuid4().hex for i in range(len(prompts))]
    return NativeCall(body, items, names, is_list or items[0].n > 1)


def _ids(value: Any) -> list[int]:
    ids = want(value, list, "a list of token ids", "input_ids")
    if not all(type(token) is int for token in ids):
        raise InvalidRequest("input_ids must be a list of token ids or a list of such lists", "input_ids")
    return ids


def _refuse(raw: Mapping[str, Any], reads: Mapping[str, Any]) -> None:
    """What this server would have to ignore."""
    for name in raw.keys() - NativeRequest.model_fields.keys() - {"model"} - reads.keys():
        fine = _FINE.get(name)
        if raw[name] is None or (fine is not None and raw[name] in fine):
            continue
        if fine is None:
            in_our_names({name: raw[name]})  # has a sentence on what others document
        if name in _ROUTED:
            raise InvalidRequest(f"{name} is not supported: {ROUTED_PREFILL}", name)
        if name not in ("priority", "session_params"):
            raise InvalidRequest(f"{name} is not supported by this server", name)


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(value, list):
        return [value] * count if name != "rid" or count == 1 else [f"{value}_{i}" for i in range(count)]
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", name)
    return value


def _fields(sampling: Mapping[str, Any], body: NativeRequest, frontend: Frontend) -> dict[str, Any]:
    """The sampling parameters as fields of a completion."""
    refuse_unknown(
        {name: value for name, value in sampling.items() if name != "sampling_seed"},
        [CompletionRequest, *frontend.processor_params],
        "sampling_params",
    )
    fields = {k: v for k, v in sampling.items() if v is not None}
    if "sampling_seed" in fields:
        fields["seed"] = fields.pop("sampling_seed")
    fields.pop("stream", None)
    if body.return_logprob:
        fields["logprobs"] = body.top_logprobs_num or 0
        if (body.logprob_start_len or -1) >= 0 or body.logprob_start_len == 0:
            fields["prompt_logprobs"] = body.top_logprobs_num or 0
    if body.return_hidden_states:
        fields["return_hidden_states"] = True
    if body.priority is not None:
        fields["priority"] = body.priority
    return fields


class _Answer:
    """One sequence as far as it has come."""

    def __init__(self, call: NativeCall, prompt: int, frontend: Frontend, begun: float) -> None:
        self.choice = Choice()
        self._call = call
        self._prompt = prompt
        self._frontend = frontend
        self._begun = begun
        self._num_cached = 0
        self._num_told = (0, 0)

    def add(self, delta: OutputDelta) -> None:
        self._num_cached = max(self._num_cached, delta.cached_tokens)
        self.choice.add(delta)

    def body(self, scored: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
        """The reply so far; ``scored`` are the prompt's log-probabilities."""
        choice, item = self.choice, self._call.items[self._prompt]
        meta: dict[str, Any] = {
            "id": self._call.names[self._prompt],
            "finish_reason": self._reason(),
            "prompt_tokens": len(item.prompt_token_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": self._num_cached,
            "weight_version": self._call.weight_version,
        }
        if self._call.body.return_logprob:
            meta |= self._scores(item, scored)
        if choice.finish_reason is not None and self._call.body.return_hidden_states:
            meta["hidden_states"] = all_states(choice.hidden_states, len(item.prompt_token_ids))
        if choice.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._begun
        meta |= of_features(choice)
        return {"text": "".join(choice.texts), "output_ids": choice.token_ids, "meta_info": meta}

    def news(self) -> dict[str, Any]:
        """Text and tokens since the last call."""
        texts, ids = self.choice.texts, self.choice.token_ids
        (num_texts, num_ids), self._num_told = self._num_told, (len(texts), len(ids))
        return {"text": "".join(texts[num_texts:]), "output_ids": ids[num_ids:]}

    def _reason(self) -> dict[str, Any] | None:
        choice = self.choice
        if choice.finish_reason is None:
            return None
        if choice.finish_reason == "length":
            return {"type": "length", "length": len(choice.token_ids)}
        matched = choice.stop_reason
        if matched is None and choice.token_ids:
            matched = choice.token_ids[-1]  # the end token
        return {"type": "stop", "matched": matched}

    def _scores(self, item: GenerateInput, scored: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
        start = self._call.first_scored
        with_text = bool(self._call.body.return_text_in_logprobs)
        meta: dict[str, Any] = {"input_token_logprobs": [], "output_token_logprobs": []}
        output = self.choice.logprobs
        prompt: list[TokenLogprobs | None] = list(scored or [])[start:] if start >= 0 else []
        ids = item.prompt_token_ids[start:] if start >= 0 else []
        for i, (token_id, entry) in enumerate(zip(ids, prompt, strict=False)):
            logprob = None if entry is None or i == 0 else max(entry.logprob, LOWEST)
            meta["input_token_logprobs"].append([logprob, token_id, self._text(token_id, with_text)])
        for entry in output:
            row = [max(entry.logprob, LOWEST), entry.token_id, self._text(entry.token_id, with_text)]
            meta["output_token_logprobs"].append(row)
        if self._call.body.top_logprobs_num:
            meta["input_top_logprobs"] = [
                None if i == 0 or entry is None else self._top(entry, with_text) for i, entry in enumerate(prompt)
            ]
            meta["output_top_logprobs"] = [self._top(entry, with_text) for entry in output]
        return meta

    def _top(self, entry: TokenLogprobs, with_text: bool) -> list[list[Any]]:
        return [[max(value, LOWEST), token_id, self._text(token_id, with_text)] for token_id, value in entry.top]

    def _text(self, token_id: int, with_text: bool) -> str | None:
        return self._frontend.text.token_bytes(token_id).decode("utf-8", "replace") if with_text else None


async def complete(call: NativeCall, frontend: Frontend) -> Any:
    """The reply in one piece; a list if the request is one."""
    answers = _answers(call, frontend)
    async with aclosing(run(frontend, call.items, Usage(call.items))) as steps:
        async for prompt, deltas in steps:
            for delta in deltas:
                answers[prompt][delta.index].add(delta)
    bodies = [answer.body(every[0].choice.prompt_logprobs) for every in answers for answer in every]
    return bodies if call.is_list else bodies[0]


async def events(call: NativeCall, frontend: Frontend, is_incremental: bool = False) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events, each with the whole text so far, or only with what is new in it."""
    answers = _answers(call, frontend)
    async with aclosing(run(frontend, call.items, Usage(call.items))) as steps:
        async for prompt, deltas in steps:
            frames: list[bytes] = []
            for delta in deltas:
                answers[prompt][delta.index].add(delta)
            for index in dict.fromkeys(delta.index for delta in deltas):
                first = answers[prompt][0].choice.prompt_logprobs
                frame = answers[prompt][index].body(first)
                if is_incremental:
                    frame |= answers[prompt][index].news()
                if call.is_list:
                    frame["index"] = prompt * call.items[0].n + index
                frames.append(event(frame))
            yield b"".join(frames)


def _answers(call: NativeCall, frontend: Frontend) -> list[list[_Answer]]:
    begun = time.monotonic()
    return [[_Answer(call, prompt, frontend, begun) for _ in range(item.n)] for prompt, item in enumerate(call.items)]
