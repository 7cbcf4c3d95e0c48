"""How the tokens of one request are chosen, and when it stops."""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from fwk.errors import InvalidRequest
from fwk_stops.patterns import MAX_PATTERN_LENGTH as MAX_PATTERN_LENGTH
from fwk_stops.patterns import MAX_STOP_PATTERNS as MAX_STOP_PATTERNS

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1_024
MAX_PATTERN_SIZE = 256
MAX_COUNT = 65_536
MAX_TOKEN_IDS = 1_024
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_LENGTH = 256 * 1024

# Field -> (lowest, highest), both allowed. None in the params means "not given" and is always allowed.
RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


GrammarKind = Literal[
    "json_object",
    "json_schema",
    "regex",
    "choice",
    "ebnf",
    "tagged",
    "structural_tag",
    "calls",
    "free_calls",
    "delayed",
]


class GrammarRequest(msgspec.Struct, frozen=True):
    """What the whole output must look like. What ``source`` holds depends on ``kind``:

    - ``json_object``: nothing; any JSON object is allowed.
    - ``json_schema``: a JSON schema, as JSON.
    - ``regex``: a regular expression that the whole output matches.
    - ``choice``: a JSON array of strings, one of which is the output.
    - ``ebnf``: a grammar in a notation the backend reads.
    - ``tagged``: one or more pieces of JSON between fixed texts, as JSON:
      ``{"tags": [{"begin": str, "schema": schema, "end": str}, ...], "separator": str, "is_many": bool}``.
    - ``structural_tag``: any text, in which pieces of JSON follow what triggers them, as JSON:
      ``{"structures": [{"begin": str, "schema": schema, "end": str}, ...], "triggers": [str, ...]}``. A trigger is the
      beginning of a ``begin``; after it only those that begin so may follow.
    - ``calls``: tool calls in a model's own notation, as JSON: ``{"begin": str, "calls": [[part, ...], ...],
      "separator": str, "end": str, "is_many": bool, "answer": schema}``. Each call is a sequence of parts:
      ``{"text": str}``, in which special tokens stand for themselves; ``{"regex": str}``; ``{"json": schema}``;
      ``{"or": [[part, ...], ...]}``; ``{"repeat": [part, ...]}``, any number of times; ``{"arguments": [{"parts":
      [part, ...], "is_required": bool}, ...], "between": str}``, in this order, those that are not required perhaps.
      ``answer``, if there: a schema of JSON that may stand instead of calls.
    - ``free_calls``: the same among other text, with ``"free"``: ``{"trigger": str, "never": [str, ...]}`` where any
      text may stand around calls, that continues as calls behind the trigger and has none of the other texts;
      ``{"unlike": regex, "never": [...]}`` where any text may stand instead of calls, that does not begin so.
    - ``delayed``: another request, for what comes behind text that it does not bind, as JSON: ``{"kind": str,
      "source": str, "opens": ids, "closes": [ids, ...], "follows": ids}``: tokens of the mark that opens such text
      (empty: it is open), of those that close it, of what comes then (empty: white space).
    """

    kind: GrammarKind
    source: str = ""

    @property
    def length(self) -> int:
        """Characters, of a ``delayed`` one those of the other request."""
        return len(msgspec.json.decode(self.source)["source"]) if self.kind == "delayed" else len(self.source)


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends a text that says the same again and again: ``min_count`` times in a row the same ``min_pattern_size`` to
    ``max_pattern_size`` tokens."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def check(self) -> None:
        """Raises ``InvalidRequest`` for what is out of range."""
        least, most = self.min_pattern_size, self.max_pattern_size
        if not 1 <= least <= most <= MAX_PATTERN_SIZE:
            raise InvalidRequest(
                f"repetition_detection needs 1 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN_SIZE}, not "
                f"{least} and {most}",
                "repetition_detection",
            )
        if not 2 <= self.min_count <= MAX_COUNT:
            raise InvalidRequest(
                f"repetition_detection.min_count must be between 2 and {MAX_COUNT}, not {self.min_count}",
                "repetition_detection",
            )


class InvalidParams(InvalidRequest, ValueError):
    """Parameters that no request can have, where they are made."""


class _Checking(msgspec.StructMeta):
    """Checks fields where they are given: their names, types and ranges. Raises ``TypeError`` for a name that is no
    field, else ``InvalidParams`` that names the field."""

    def __call__(cls, **fields: Any) -> Any:
        for name in fields:
            if name not in cls.__struct_fields__:
                near = get_close_matches(name, cls.__struct_fields__, 1)
                hint = f": did you mean {near[0]}?" if near else f"; there are {', '.join(cls.__struct_fields__)}"
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        try:
            made = msgspec.convert({n: v.item() if hasattr(v, "item") else v for n, v in fields.items()}, cls)
            if made.max_tokens != 0:  # NOTHING_FOLLOWS
                made.check(2**63)
            for pattern in made.stop_regex:
                re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidParams(f"stop_regex: no regular expression: {error}", "stop_regex") from None
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            name = where.partition("$.")[2].partition("[")[0].rstrip("`")
            raise InvalidParams(f"{name}: {what[0].lower()}{what[1:]}", name) from None
        except InvalidRequest as error:
            raise InvalidParams(str(error), error.param) from None
        return made


class SamplingParams(
    msgspec.Struct, metaclass=_Checking, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Immutable sampling and stop settings of a request.

    ``top_k`` of 0 or -1 and ``top_p`` of 1 mean "off". ``temperature`` 0 is greedy. ``extra`` carries the
    parameters of third-party logits processors, already validated by the plugin that declared them.

    - ``max_tokens``: most tokens of the output; None: as many as fit.
    - ``min_tokens``: no stop before so many.
    - ``min_p``: least probability, as a share of the largest; 0: off.
    - ``repetition_penalty``: divides positive logits of tokens of prompt and output, multiplies negative ones; 1: off.
    - ``presence_penalty``: subtracted from logits of tokens of the output; 0: off.
    - ``frequency_penalty``: the same, for each time they stand there.
    - ``logit_bias``: added to logits, by token id; -100 to 100.
    - ``allowed_token_ids``: no others are chosen; None: all are.
    - ``bad_words``: texts that do not occur.
    - ``bad_word_token_ids``: ``bad_words`` as tokens; set by ``Frontend.check``.
    - ``seed``: of the request; None: one is drawn.
    - ``stop_regex``: patterns in Python's syntax that end the text as ``stop`` does; ``fwk_stops.patterns`` has
      what is read.
    - ``stop_token_ids``: end the text, besides the model's own.
    - ``repetition_detection``: None: off.
    - ``ignore_eos``: the model's own end tokens end nothing.
    - ``include_stop_str_in_output``: whether a stop string stays in the text.
    - ``skip_special_tokens``: whether special tokens leave no text.
    - ``logprobs``: number of most likely tokens reported alongside each chosen one; 0 reports the chosen one only, None
      nothing.
    - ``prompt_logprobs``: as ``logprobs``, for the prompt; None: not asked for.
    - ``return_hidden_states``: report what logits are made of, of every token of the prompt and of the output but its
      last.
    - ``grammar``: what the output must look like; None: anything.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_word_token_ids: list[list[int]] = []
    seed: int | None = None
    stop: list[str] = []
    stop_regex: list[str] = []
    stop_token_ids: list[int] = []
    repetition_detection: RepetitionDetection | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_hidden_states: bool = False
    grammar: GrammarRequest | None = None
    extra: dict[str, Any] = {}

    @classmethod
    def unchecked(cls, **fields: Any) -> SamplingParams:
        """For fields of the right types that ``Frontend.check`` will look at, and name as the client wrote them."""
        return msgspec.StructMeta.__call__(cls, **fields)

    def check(self, vocab_size: int) -> None:
        """Raise ``InvalidRequest`` naming the first field out of range; ``vocab_size`` is the logits width."""
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"{name} must be between {_plain(low)} and {_plain(high)}, not {value}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0", "top_p")
        self._check_lists()
        check_token_ids(list(self.logit_bias), vocab_size, "logit_bias", MAX_TOKEN_IDS)
        for value in self.logit_bias.values():
            if not math.isfinite(value) or abs(value) > 100:
                raise InvalidRequest(f"logit_bias values must be between -100 and 100, not {value}", "logit_bias")
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids", MAX_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
            check_token_ids(self.allowed_token_ids, vocab_size, "allowed_token_ids", vocab_size)
        for ids in self.bad_word_token_ids:
            check_token_ids(ids, vocab_size, "bad_words", MAX_BAD_WORD_TOKENS)

    def _check_lists(self) -> None:
        if self.repetition_detection is not None:
            self.repetition_detection.check()
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, not {len(self.stop)}", "stop")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
        if len(self.bad_words) > MAX_BAD_WORDS or len(self.bad_word_token_ids) > 2 * MAX_BAD_WORDS:
            raise InvalidRequest(f"at most {MAX_BAD_WORDS} bad words", "bad_words")
        if any(not word or len(word) > MAX_STOP_LENGTH for word in self.bad_words):
            raise InvalidRequest(f"a bad word must have 1 to {MAX_STOP_LENGTH} characters", "bad_words")
        length = self.grammar.length if self.grammar is not None else 0
        if length > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(
                f"the grammar has {length} characters; at most {MAX_GRAMMAR_LENGTH} are allowed", "grammar"
            )


FEATURE_FIELDS = ("prompt_logprobs", "return_hidden_states")
"""Fields that a feature answers (``FeatureSpec.fields``): nothing else reads them."""

NOTHING_FOLLOWS = SamplingParams(max_tokens=0)
"""The sampling of requests that generate nothing."""


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def check_token_ids(ids: list[int], vocab_size: int, param: str, max_len: int) -> None:
    """The one check of every list of token ids a client sends."""
    if len(ids) > max_len:
        raise InvalidRequest(f"{param} holds {len(ids)} token ids; at most {max_len} are allowed", param)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param
            )
