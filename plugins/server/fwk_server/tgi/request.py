"""The fields of a request, their checks in TGI's own words, and what the engine is asked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput
from fwk.types import GrammarRequest, SamplingParams
from fwk.types.sampling import MAX_GRAMMAR_LENGTH, MAX_LOGPROBS, MAX_N
from fwk_server._common.body import parse, processor_extra, shown, validate, want
from fwk_server._common.caller import Caller
from fwk_server._common.chat.constraints import NO_GRAMMAR
from fwk_server._common.chat.models import CompletionRequest
from fwk_server._common.chat.other_names import asks_elsewhere
from fwk_server._common.chat.served import check_named
from fwk_server._common.fields import CONTEXT, STOP_STRINGS, RequestFields, bounded, ranged

DEFAULT_MAX_NEW_TOKENS = 100
REFUSED = "nothing: it is refused"
GRAMMAR = {
    "type": "object",
    "x-limit": f"type json, json_schema or regex, and a value of {MAX_GRAMMAR_LENGTH} characters",
}


class NotJSON(InvalidRequest):
    """The body cannot be read at all: TGI answers this with another status than a wrong field."""


_GRAMMARS = ("regular_constraint", "guided_json", "guided_regex", "json_schema", "regex", "response_format")

# Core's names of fields, and what they are called here.
_NAMES = {"max_tokens": "max_new_tokens", "prompt": "inputs", "logprobs": "top_n_tokens", "n": "best_of"}


class Parameters(RequestFields):
    """``parameters``; None means "not given"."""

    max_new_tokens: Annotated[int, ranged("max_tokens", CONTEXT)] | None = DEFAULT_MAX_NEW_TOKENS
    do_sample: bool | None = None
    temperature: Annotated[float, ranged("temperature")] | None = None
    top_k: Annotated[int, ranged("top_k")] | None = None
    top_p: Annotated[float, ranged("top_p")] | None = None
    typical_p: Annotated[float, bounded("number", "between 0 and 1")] | None = None
    repetition_penalty: Annotated[float, ranged("repetition_penalty")] | None = None
    frequency_penalty: Annotated[float, ranged("frequency_penalty")] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[list[str], WithJsonSchema(STOP_STRINGS)] | None = None
    best_of: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_N})] | None = None
    truncate: Annotated[int, bounded("integer", "less than the context")] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Annotated[int, ranged("logprobs")] | None = None
    watermark: bool | None = None
    grammar: Annotated[dict[str, Any], WithJsonSchema(GRAMMAR)] | None = None
    adapter_id: Annotated[str, bounded("string", REFUSED)] | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: asked for in words, or by a setting that means nothing otherwise."""
        limits = self.top_k or self.top_p or self.typical_p
        return bool(self.do_sample or self.temperature not in (None, 1.0) or limits)

    @property
    def has_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)


class GenerateRequest(RequestFields):
    """The body of all generating routes. ``stream`` is read on / only."""

    inputs: Annotated[str, bounded("string", CONTEXT)]
    parameters: Annotated[Parameters | None, WithJsonSchema(Parameters.model_json_schema())] = None
    stream: bool | None = None


@dataclass(slots=True)
class Call:
    """A request, ready to run."""

    inputs: Annotated[str, bounded("string", CONTEXT)]
    parameters: Parameters
    item: GenerateInput
    seed: int | None  # to report: None for greedy output, and for several sequences, which have one each
    is_stream: bool

    @property
    def prefix(self) -> str:
        """What the generated text starts with."""
        return self.inputs if self.parameters.return_full_text else ""


def prepare(data: bytes, frontend: Frontend, stream: bool | None, caller: Caller) -> Call:
    """Read, check and tokenise; ``stream`` None leaves it to the body. Raises ``InvalidRequest``."""
    try:
        raw = parse(data)
    except InvalidRequest as error:
        raise NotJSON(str(error), error.param) from None
    check_named(raw, frontend.card)
    body = validate(GenerateRequest, raw)
    frontend.card.check_task("generate")
    parameters = _preferring(body.parameters or Parameters(), frontend)
    is_stream = bool(body.stream) if stream is None else stream
    given = raw.get("parameters") or {}
    _refuse(parameters, given, frontend)
    _check(parameters, is_stream)
    if not body.inputs:
        raise InvalidRequest("`inputs` cannot be empty", "inputs")
    if parameters.truncate is None:
        frontend.text.check_fits(body.inputs, frontend.card.max_prompt_len, "inputs")
    ids = frontend.text.encode(body.inputs)
    if parameters.truncate is not None:
        ids = ids[-_truncation(parameters.truncate, frontend.card.max_model_len) :]
    extra = processor_extra(frontend.processor_params, given)
    for name in ("typical_p", "watermark"):
        if getattr(parameters, name) and name not in extra:
            raise InvalidRequest(f"`{name}` needs a logits processor that this server does not have", name)
    seed = _seed(parameters)
    item = GenerateInput(
        ids,
        _sampling(parameters, seed, is_stream, extra, frontend),
        n=parameters.best_of or 1,
        priority=caller.priority,
        service=caller.service,
        label=caller.label,
        trace=caller.trace,
    )
    return Call(body.inputs, parameters, item, seed if item.n == 1 else None, is_stream)


def _preferring(parameters: Parameters, frontend: Frontend) -> Parameters:
    """What a request leaves out as the server's operator prefers it, in TGI's terms: neutral values are left out."""
    preferred, p = frontend.preferred_sampling, parameters
    found: dict[str, Any] = {}
    if "max_new_tokens" not in p.model_fields_set and "max_tokens" in preferred:
        found["max_new_tokens"] = preferred["max_tokens"]
    neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0}
    for name, value in neutral.items():
        wanted = preferred.get(name, value)
        if getattr(p, name) is None and wanted not in (value, -1) and (p.do_sample is not False or "penalty" in name):
            found[name] = wanted
    if p.do_sample is None and "temperature" in found:
        found["do_sample"] = True
    return p.model_copy(update=found) if found else p


def _grammar(given: Mapping[str, Any] | None, frontend: Frontend) -> GrammarRequest | None:
    """TGI's ``grammar`` as the engine's."""
    if given is None:
        return None
    kind, value = given.get("type"), given.get("value")
    if kind not in ("json", "json_schema", "regex"):
        raise InvalidRequest(f"`grammar.type` must be json, json_schema or regex, not {shown(kind)}", "grammar")
    if kind == "json_schema":
        value = want(value, dict, "an object", "grammar.value").get("schema")
    words = "a string" if kind == "regex" else "a JSON schema"
    want(value, str if kind == "regex" else (str, dict), words, "grammar.value")
    if not frontend.grammar_kinds:
        raise InvalidRequest(f"`grammar`: {NO_GRAMMAR}", "grammar")
    source = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return GrammarRequest("regex" if kind == "regex" else "json_schema", source)


def _refuse(parameters: Parameters, given: Mapping[str, Any], frontend: Frontend) -> None:
    """What this server would have to ignore: also what other servers' APIs have a parameter for."""
    own = {*Parameters.model_fields, *(name for model in frontend.processor_params for name in model.model_fields)}
    for name in given.keys() - own:
        if asks_elsewhere(name, given[name], CompletionRequest):
            hint = "give grammar" if name in _GRAMMARS else "/v1/completions reads it"
            raise InvalidRequest(f"`{name}` is no parameter of this API: {hint}", name)
    if parameters.adapter_id is not None:
        raise InvalidRequest("`adapter_id` is not supported", "adapter_id")


def _check(p: Parameters, is_stream: bool) -> None:
    """TGI's own rules, stricter than core's; what it does not mention is core's to check."""
    _check_best_of(p, 1 if p.best_of is None else p.best_of, is_stream)
    if p.decoder_input_details and is_stream:
        raise _broken("decoder_input_details", "== true is not supported when streaming tokens")
    for name in ("temperature", "repetition_penalty", "top_k", "max_new_tokens"):
        value = getattr(p, name)
        if value is not None and value <= 0:
            raise _broken(name, "must be strictly positive")
    if p.top_p is not None and not 0 < p.top_p < 1:
        raise _broken("top_p", "must be > 0.0 and < 1.0")
    if p.typical_p is not None and not 0 < p.typical_p < 1:
        raise _broken("typical_p", "must be > 0.0 and < 1.0")
    if not -2 <= (p.frequency_penalty or 0.0) <= 2:
        raise _broken("frequency_penalty", "must be >= -2.0 and <= 2.0")
    if not 0 <= (p.top_n_tokens or 0) <= MAX_LOGPROBS:
        raise _broken("top_n_tokens", f"must be >= 0 and <= {MAX_LOGPROBS}. Given: {p.top_n_tokens}")


def _check_best_of(p: Parameters, best_of: int, is_stream: bool) -> None:
    if not 1 <= best_of <= MAX_N:
        raise _broken("best_of", f"must be > 0 and <= {MAX_N}. Given: {best_of}")
    if best_of == 1:
        return
    if is_stream:
        raise _broken("best_of", "!= 1 is not supported when streaming tokens")
    if p.seed is not None:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1", "seed")
    if not p.samples:
        raise InvalidRequest("you must use sampling when `best_of` is > 1", "best_of")


def _broken(name: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"`{name}` {rule}", name)


def _truncation(length: int, max_model_len: int) -> int:
    """How many of the last tokens of a prompt to keep."""
    if not 0 < length < max_model_len:
        raise InvalidRequest(
            f"`truncate` must be strictly positive and less than {max_model_len}. Given: {length}", "truncate"
        )
    return length


def _seed(parameters: Parameters) -> int | None:
    """The request's seed. One is drawn when there is none, for the reply tells it."""
    if not parameters.samples:
        return None
    return secrets.randbits(63) if parameters.seed is None else parameters.seed


def _sampling(
    parameters: Parameters, seed: int | None, is_stream: bool, extra: dict[str, Any], frontend: Frontend
) -> SamplingParams:
    p, preferred = parameters, frontend.preferred_sampling
    best_of = p.best_of or 1
    needs_scores = p.has_details or is_stream or best_of > 1
    return SamplingParams.unchecked(
        max_tokens=p.max_new_tokens,
        temperature=(p.temperature or 1.0) if p.samples else 0.0,
        top_k=p.top_k or 0,
        top_p=p.top_p or 1.0,
        repetition_penalty=p.repetition_penalty or 1.0,
        frequency_penalty=p.frequency_penalty or 0.0,
        # 64 bits without a sign there, with one here: the same bits.
        seed=seed - 2**64 if seed is not None and seed >= 2**63 else seed,
        stop=p.stop or [],
        include_stop_str_in_output=True,
        logprobs=(p.top_n_tokens or 0) if needs_scores else None,
        prompt_logprobs=0 if p.decoder_input_details else None,
        grammar=_grammar(p.grammar, frontend),
        **{name: preferred[name] for name in ("min_p", "presence_penalty", "min_tokens") if name in preferred},
        extra=extra,
    )


def checked(frontend: Frontend, item: GenerateInput) -> GenerateInput:
    """Have the frontend check and complete ``item``; errors call a field what it is called here."""
    try:
        return frontend.check(item)
    except InvalidRequest as error:
        message, param = str(error), error.param or ""
        name = _NAMES.get(param, param)
        if param and message.startswith(param):
            message = name + message.removeprefix(param)
        message = message.replace("max_tokens", "max_new_tokens")
        raise InvalidRequest(message if name in message else f"`{name}`: {message}", name) from None
