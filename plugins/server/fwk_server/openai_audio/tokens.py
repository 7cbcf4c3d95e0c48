"""Whisper's special tokens, and what a text with timestamps says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fwk.errors import InvalidRequest, RequestFailed
from fwk.interfaces.dialect import Frontend
from fwk_server._common.body import processor_extra, shown

CODES = [
    "en",
    "zh",
    "de",
    "es",
    "ru",
    "ko",
    "fr",
    "ja",
    "pt",
    "tr",
    "pl",
    "ca",
    "nl",
    "ar",
    "sv",
    "it",
    "id",
    "hi",
    "fi",
    "vi",
    "he",
    "uk",
    "el",
    "ms",
    "cs",
    "ro",
    "da",
    "hu",
    "ta",
    "no",
    "th",
    "ur",
    "hr",
    "bg",
    "lt",
    "la",
    "mi",
    "ml",
    "cy",
    "sk",
    "te",
    "fa",
    "lv",
    "bn",
    "sr",
    "az",
    "sl",
    "kn",
    "et",
    "mk",
    "br",
    "eu",
    "is",
    "hy",
    "ne",
    "mn",
    "bs",
    "kk",
    "sq",
    "sw",
    "gl",
    "mr",
    "pa",
    "si",
    "km",
    "sn",
    "yo",
    "so",
    "af",
    "oc",
    "ka",
    "be",
    "tg",
    "sd",
    "gu",
    "am",
    "yi",
    "lo",
    "uz",
    "fo",
    "ht",
    "ps",
    "tk",
    "nn",
    "mt",
    "sa",
    "lb",
    "my",
    "bo",
    "tl",
    "mg",
    "as",
    "tt",
    "haw",
    "ln",
    "ha",
    "ba",
    "jw",
    "su",
    "yue",
]
"""Languages, where a checkpoint's files name none."""
ENGLISH_VOCAB = 51_864
"""Tokens of OpenAI's models for English alone, whose tokenizer has the languages' tokens, too."""
STEP = 320
"""Samples from one timestamp to the next."""


@dataclass(frozen=True, slots=True)
class Speech:
    """Ids of a checkpoint, by its generation_config, else by its tokenizer.

    first_time: the timestamp of a window's beginning; all ids behind it are timestamps. languages: by code; empty: of
    a model for English alone. window: samples that are heard at once. max_prompt: tokens of a prompt.
    """

    start: int
    no_times: int
    previous: int | None
    no_speech: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]
    window: int
    max_prompt: int
    rules: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def first_time(self) -> int:
        return self.no_times + 1

    @classmethod
    def of(cls, settings: Mapping[str, Any], frontend: Frontend) -> Speech:
        """settings: ``SoundReading.settings``. Raises ``RequestFailed`` where the files do not say enough."""
        text = frontend.text

        def named(name: str) -> int | None:
            ids = text.encode(f"<|{name}|>", add_special_tokens=False) if text.has_tokenizer else []
            return ids[0] if len(ids) == 1 else None

        def one(key: str, name: str) -> int:
            value = settings.get(key)
            found = value if isinstance(value, int) else named(name)
            if found is None:
                raise RequestFailed(f"neither {key} of generation_config.json nor the tokenizer has <|{name}|>")
            return found

        no_times = one("no_timestamps_token_id", "notimestamps")
        languages = {code.strip("<|>"): token for code, token in _ids(settings.get("lang_to_id")).items()}
        is_multilingual = settings.get("is_multilingual", frontend.card.vocab_size != ENGLISH_VOCAB)
        if not languages and is_multilingual:
            languages = {code: token for code in CODES if (token := named(code)) is not None}
        tasks = _ids(settings.get("task_to_id"))
        if not tasks and languages:
            tasks = {name: one("", name) for name in ("transcribe", "translate")}
        window = int(settings["window"])
        rules = {name: settings.get(name) or [] for name in ("suppress_tokens", "begin_suppress_tokens")}
        rules["max_initial_timestamp_index"] = settings.get("max_initial_timestamp_index")
        return cls(
            one("decoder_start_token_id", "startoftranscript"),
            no_times,
            settings.get("prev_sot_token_id") or named("startofprev"),
            no_times - 1,
            tasks,
            languages if is_multilingual else {},
            window,
            (frontend.card.max_model_len - window // STEP) // 2 - 1,
            rules,
        )

    def language(self, code: str) -> str:
        """A code that was asked for. Raises ``InvalidRequest``."""
        known = self.languages or {"en": 0}
        if code and code not in known:
            told = ", ".join(sorted(known)[:120])
            raise InvalidRequest(f"language {shown(code)} is not known to this model; it knows {told}", "language")
        return code or ("" if self.languages else "en")

    def prefix(self, language: str, task: str, prompt: Sequence[int], *, has_times: bool) -> list[int]:
        """What the decoder begins with."""
        before: list[int] = []
        if prompt:
            if self.previous is None:
                raise InvalidRequest("this model takes no prompt: it has no <|startofprev|>", "prompt")
            before = [self.previous, *prompt[-self.max_prompt :]]
        middle = [self.languages[language], self.tasks[task]] if self.languages else []
        return [*before, self.start, *middle, *([] if has_times else [self.no_times])]

    def extra(self, frontend: Frontend, *, has_times: bool) -> dict[str, Any]:
        """``SamplingParams.extra``: the rules of decoding. Raises ``InvalidRequest`` where nothing follows them."""
        rules = {name: value for name, value in self.rules.items() if value is not None}
        if has_times:
            rules["timestamp_begin"] = self.first_time
        else:
            times = range(self.first_time, frontend.card.vocab_size)
            rules["suppress_tokens"] = sorted({*rules["suppress_tokens"], *times})
        found = processor_extra(frontend.processor_params, rules)
        if not found.keys() >= rules.keys():
            raise InvalidRequest(
                "this server has no logits processors for the rules of transcription: enable suppress_tokens and "
                "timestamps"
            )
        return found


def _ids(table: Any) -> dict[str, int]:
    """Names and ids, without what is none."""
    given = cast("dict[Any, Any]", table) if isinstance(table, dict) else {}
    return {str(name): token for name, token in given.items() if isinstance(token, int)}


def segments(tokens: Sequence[int], first_time: int, count: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Of a window of ``count`` samples: the first and last sample and the tokens of each whole segment, and how far it
    was understood.

    Two timestamps in a row end a segment and begin the next. One that has no end stands in the window's rest, which is
    heard again, unless it is all there is.
    """
    is_time = [token >= first_time for token in tokens]

    def place(token: int) -> int:
        return (token - first_time) * STEP

    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    if not ends:
        last = max((place(token) for token, known in zip(tokens, is_time, strict=True) if known), default=0)
        return [(0, min(last or count, count), list(tokens))], count
    has_rest = not (len(tokens) > 1 and is_time[-1] and not is_time[-2])
    begins, found = 0, list[tuple[int, int, list[int]]]()
    for end in ends if has_rest else [*ends, len(tokens)]:
        part = list(tokens[begins:end])
        found.append((place(part[0]), place(part[-1]), part))
        begins = end
    return found, place(tokens[ends[-1] - 1]) if has_rest else count
