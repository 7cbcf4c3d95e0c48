"""A ``tokenizers.Tokenizer`` from the token lists of a GGUF file.

Two kinds are known: ``gpt2`` (byte-level BPE with merges; ``tokenizer.ggml.pre`` names how text is cut into words
first) and ``llama`` (SentencePiece BPE: tokens with scores, spaces written as U+2581, unknown text as bytes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fwk.errors import ModelLoadError
from fwk_loaders.gguf.config import CONTROL, special_id
from fwk_loaders.gguf.letters import LETTERS_WITH_CASE
from fwk_loaders.gguf.metadata import Metadata

USER_DEFINED = 4
MAX_TOKEN_LENGTH = 2**10  # in characters; only the tokens of SentencePiece are split in all places
SPACE = "\u2581"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
"""Words that begin where case rises: ``HelloWorld`` is two."""
_O200K = rf"{_CASED[0]}{_SHORT}|{_CASED[1]}{_SHORT}|\p{{N}}{{1,3}}|{_PATHS}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATHS}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{LETTERS_WITH_CASE}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[一-龥\u0800-一가-\ud7ff]+",
    r"\p{N}",
)
_FALCON = (
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[0-9][0-9][0-9]",
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001 - full stops and commas of other scripts
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER_NO_HAN, _LOWER_NO_HAN = (rf"(?:(?!\p{{Han}}){letters})" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_SHORT}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_SHORT}|\p{{N}}{{1,3}}|{_REST}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before the merges apply; the published tokenizer.json of the family says the same.

    regex: what a word is; of several, each cuts what the ones before it left. None for GPT-2's own rule.
    splits_digits: every digit stands alone, before the rule.
    ignores_merges: a word that is a token stays whole, even if no merges lead there.
    """

    regex: str | tuple[str, ...] | None = None
    splits_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The object of the tokenizers library; its words are bytes, written as GPT-2 writes them."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        given = (self.regex,) if isinstance(self.regex, str) else self.regex or ()
        steps += [pre_tokenizers.Split(Regex(regex), "isolated") for regex in given]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.regex is None))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)  # pyright: ignore[reportArgumentType]


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(splits_digits=True)
_LLAMA = PreTokenizer(_LLAMA3, ignores_merges=True, adds_bos=True)
_CL100K = PreTokenizer(_LLAMA3)
_SINGLE_DIGITS = PreTokenizer(_QWEN2)
_NFC = PreTokenizer(_QWEN2, is_nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "jais", "trillion", "phi-2", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    "glm4": PreTokenizer(_LLAMA3, ignores_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_O200K)),
    "kimi-k2": PreTokenizer(_KIMI),
    "qwen35": PreTokenizer(_QWEN35, is_nfc=True),
    "falcon": PreTokenizer(_FALCON),
    "bloom": PreTokenizer(_BLOOM),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "tekken": PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("stablelm2", "hunyuan"), _SINGLE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _NFC),
}
"""By ``tokenizer.ggml.pre``."""


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Raises ``ModelLoadError`` naming the file and the key that is missing, damaged or of an unknown kind."""
    path = metadata.file.path
    kind = metadata.string("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.model is {kind[:40]!r}; supported: {', '.join(builders)}. Give the model's own "
            "tokenizer.json with --tokenizer-path"
        )
    tokens = _tokens(metadata)
    try:
        tokenizer = builders[kind](metadata, tokens)
        tokenizer.add_tokens(_added_tokens(metadata, tokens))
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path}: the lists of tokens and merges do not make a tokeniser: {error}") from error
    _add_template(tokenizer, metadata, tokens)
    return tokenizer


def read_tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The part of tokenizer_config.json that others read."""
    config: dict[str, Any] = {"add_bos_token": _adds_bos(metadata), "add_eos_token": _adds_eos(metadata)}
    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    special = {name: token_id for name, full in names if (token_id := special_id(metadata, full)) is not None}
    tokens = _tokens(metadata, max(special.values(), default=-1) + 1)  # mostly the first few
    config.update({f"{name}_token": tokens[token_id] for name, token_id in special.items() if token_id < len(tokens)})
    return config


def _tokens(metadata: Metadata, most: int | None = None) -> list[str]:
    """The texts of all tokens, or of the first ``most``."""
    tokens = metadata.file.strings("tokenizer.ggml.tokens", most)
    # Some converters pad the vocabulary with empty texts; ids must stay where they are.
    return [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]


def _vocab(metadata: Metadata, tokens: list[str]) -> dict[str, int]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise ModelLoadError(f"{metadata.file.path}: tokenizer.ggml.tokens holds {twice[:60]!r} twice")
    return vocab


def _byte_level(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    name = metadata.string("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelLoadError(
            f"{metadata.file.path}: tokenizer.ggml.pre is {name[:40]!r}; supported: {', '.join(PRE_TOKENIZERS)}. Give "
            "the model's own tokenizer.json with --tokenizer-path"
        )
    merges: list[tuple[str, str]] = []
    for line in metadata.file.strings("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise ModelLoadError(f"{metadata.file.path}: tokenizer.ggml.merges holds {line[:60]!r}: not two pieces")
        merges.append((left, right))
    model = models.BPE(vocab=_vocab(metadata, tokens), merges=merges, ignore_merges=pre.ignores_merges)
    tokenizer = Tokenizer(model)
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre.build()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    path = metadata.file.path
    scores = metadata.file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise ModelLoadError(f"{path}: tokenizer.ggml.scores must hold {len(tokens)} finite numbers")
    if max(map(len, tokens), default=0) > MAX_TOKEN_LENGTH:
        raise ModelLoadError(f"{path}: tokenizer.ggml.tokens holds a token of more than {MAX_TOKEN_LENGTH} characters")
    unknown = special_id(metadata, "unknown")
    if unknown is not None and unknown >= len(tokens):
        raise metadata.wrong("tokenizer.ggml.unknown_token_id", f"below the number of tokens {len(tokens)}", unknown)
    vocab = _vocab(metadata, tokens)
    model = models.BPE(
        vocab=vocab,
        merges=_merges_from_scores(vocab, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _adds_space_prefix(metadata):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])  # pyright: ignore
        back.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = replace  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(back)  # pyright: ignore
    return tokenizer


def _adds_space_prefix(metadata: Metadata) -> bool:
    return metadata.flag("tokenizer.ggml.add_space_prefix", True)


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the token with the best score; ranks say the same.

    Every way to make a token of two others is a merge; they are ordered by the token's score, then by the parts' ids.
    """
    ways: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ways.append((-scores[token_id], vocab[left], vocab[right], left, right))
    ways.sort()
    return [(left, right) for _, _, _, left, right in ways]


def _added_tokens(metadata: Metadata, tokens: list[str]) -> list[AddedToken]:
    """Tokens found in text before anything else: control tokens (left out of decoded text) and the user's own.

    Where spaces are written as U+2581, a token of spaces is looked for after they are (Gemma has them): a U+2581 in the
    text then counts as the space it looks like, as it does in SentencePiece.
    """
    if not metadata.has("tokenizer.ggml.token_type"):
        ids = {special_id(metadata, name) for name in ("bos", "eos", "unknown", "padding")} - {None}
        kinds = [CONTROL if token_id in ids else 1 for token_id in range(len(tokens))]
    else:
        kinds = metadata.file.numbers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ModelLoadError(
            f"{metadata.file.path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens"
        )
    spells_spaces = metadata.string("tokenizer.ggml.model") == "llama" and not _adds_space_prefix(metadata)
    return [
        AddedToken(token, special=kind == CONTROL, normalized=spells_spaces and kind == USER_DEFINED and " " in token)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _adds_bos(metadata: Metadata) -> bool:
    if metadata.string("tokenizer.ggml.model") == "llama":
        default = True
    else:
        pre = PRE_TOKENIZERS.get(metadata.string("tokenizer.ggml.pre", "default"))
        default = pre is not None and pre.adds_bos
    return metadata.flag("tokenizer.ggml.add_bos_token", default)


def _adds_eos(metadata: Metadata) -> bool:
    return metadata.flag("tokenizer.ggml.add_eos_token", False)


def _add_template(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    """bos and eos around what ``encode`` is given, unless the caller says ``add_special_tokens=False``."""
    ids = {"bos": special_id(metadata, "bos") if _adds_bos(metadata) else None}
    ids["eos"] = special_id(metadata, "eos") if _adds_eos(metadata) else None
    used = {name: token_id for name, token_id in ids.items() if token_id is not None and token_id < len(tokens)}
    if not used:
        return
    single = [*(["bos"] if "bos" in used else []), "$A", *(["eos"] if "eos" in used else [])]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=single,
        pair=[*single, *("$B" if piece == "$A" else piece for piece in single)],
        special_tokens=[{"id": name, "ids": [used[name]], "tokens": [tokens[used[name]]]} for name in used],
    )
