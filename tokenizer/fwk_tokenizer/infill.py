"""Prompts for text in the middle: what stands before and after it, between the tokens a model was trained with.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022): first what comes before, then
what comes after, then the middle ("PSM"). The tokens are those of the models' own cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from fwk_errors import ConfigError
from fwk_files.regular import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_FILE = 64 * 1024
_SNIPPET = "\n\n--- snippet ---\n\n"


class Infill(NamedTuple):
    """A prompt whose completion is a text's middle, and the tokens that end the middle besides the model's own."""

    token_ids: list[int]
    stop_token_ids: list[int]


class Encoder(Protocol):
    """What makes token ids of a text."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """parse_special: whether what looks like a special token becomes one."""
        ...


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens around the head (what comes before), the tail (what comes after) and the middle; "" for none.

    head, tail, middle: token that opens the part, or ends the part before it.
    is_tail_first: the order is tail, head, middle.
    """

    head: str
    tail: str
    middle: str
    is_tail_first: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those the tokenizer must have."""
        return tuple(text for text in (self.head, self.tail, self.middle) if text)


FORMATS: dict[str, InfillFormat] = {
    "qwen_coder": InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # CodeGemma's too
    "star_coder": InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # Granite's too
    "santa_coder": InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "deepseek_coder": InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    "code_llama": InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "codestral": InfillFormat("[PREFIX]", "[SUFFIX]", "", is_tail_first=True),
    "glm": InfillFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
}
"""By the name ``--completion-template`` takes; the first whose tokens a tokenizer has is taken."""

_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "▁<EOT>",
    "<|cursor|>",
)
_REPOSITORY = ("<|repo_name|>", "<reponame>", "<repo_name>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's file of a template of one's own."""

    fim_begin_token: str
    fim_middle_token: str
    fim_end_token: str
    fim_position: str
    name: str = ""


class InfillTemplate:
    """Makes prompts in one format with one tokenizer."""

    def __init__(self, form: InfillFormat, tokenizer: Tokenizer, text: Encoder) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._text = text
        self._ends = self._known(_ENDS)

    def make(self, before: str, after: str, files: Sequence[tuple[str, str]] = (), start: str = "") -> Infill:
        """See ``fwk.interfaces.dialect.TextTools.infill``."""
        form = self._form
        ids = self._text.encode("") + self._files(files)
        first = self._part(form.head, before)
        second = self._part(form.tail, after)
        ids += second + first if form.is_tail_first else first + second
        return Infill(ids + self._part(form.middle, start), self._ends)

    def _part(self, token: str, text: str) -> list[int]:
        return self._known([token]) + self._plain(text)

    def _plain(self, text: str) -> list[int]:
        return self._text.encode(text, add_special_tokens=False, parse_special=False)

    def _known(self, names: Sequence[str]) -> list[int]:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return [token_id for token_id in ids if token_id is not None]

    def _files(self, files: Sequence[tuple[str, str]]) -> list[int]:
        """Other files of the same project; a model without tokens for them reads snippets."""
        repository, separator = self._known(_REPOSITORY)[:1], self._known(_FILE)[:1]
        ids: list[int] = []
        if files and separator:
            ids += repository + (self._plain("project\n") if repository else [])
        for name, text in files:
            ids += separator + self._plain(f"{name}\n{text}\n") if separator else self._plain(_SNIPPET + text)
        return ids + (separator + self._plain("file\n") if files and separator else [])


def infill_template(chosen: str, tokenizer: Tokenizer, text: Encoder) -> InfillTemplate | None:
    """The template ``--completion-template`` asks for; None where ``auto`` finds no tokens of a known one.

    Raises ``ConfigError`` for a name nobody knows, a file that is none, and tokens that the model has not.
    """
    if chosen == "auto":
        found = (form for form in FORMATS.values() if not _missing(form, tokenizer))
        form = next(found, None)
        return None if form is None else InfillTemplate(form, tokenizer, text)
    form = FORMATS.get(chosen) or _read(chosen)
    missing = _missing(form, tokenizer)
    if missing:
        raise ConfigError(f"--completion-template {chosen}: the model's tokenizer has no token {missing[0]!r}")
    return InfillTemplate(form, tokenizer, text)


def _missing(form: InfillFormat, tokenizer: Tokenizer) -> list[str]:
    return [name for name in form.tokens if tokenizer.token_to_id(name) is None]


def _read(chosen: str) -> InfillFormat:
    if not Path(chosen).exists():
        known = ", ".join(FORMATS)
        raise ConfigError(f"--completion-template {chosen}: neither a file nor one of auto, {known}")
    try:
        given = msgspec.json.decode(read_regular(chosen, MAX_FILE), type=_File)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--completion-template {chosen}: {why}") from None
    if given.fim_position.lower() == "middle":
        return InfillFormat(given.fim_begin_token, given.fim_middle_token, given.fim_end_token)
    if given.fim_position.lower() == "end":
        return InfillFormat(given.fim_begin_token, given.fim_end_token, given.fim_middle_token)
    raise ConfigError(f"--completion-template {chosen}: fim_position must be middle or end")
