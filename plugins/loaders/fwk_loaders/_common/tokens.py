"""What tokenizer_config.json says of tokens: more than tokenizer.json in many checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from fwk.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ONLY: dict[str, tuple[Any, ...]] = {
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (False,),
    "fix_mistral_regex": (False,),
    "split_special_tokens": (False,),
}
"""Keys that change how a text is split or shown, and the values of them that are computed."""


def add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Give ``tokenizer`` the tokens that are written next to its tokenizer.json, as transformers does.

    A token that is only an entry of tokenizer.json's vocabulary would be split in a prompt and shown in an answer.
    config: tokenizer_config.json. added: added_tokens.json, which counts where the config lists no tokens.
    Raises ``ModelLoadError``.
    """
    from tokenizers import AddedToken  # noqa: PLC0415 - only who tokenises needs it

    follow_class(tokenizer, config)
    for name, values in ONLY.items():
        if config.get(name) not in (None, *values):
            raise ModelLoadError(
                f"tokenizer_config.json: {name!r} is {config[name]!r}, which changes how text is split or shown and is "
                "not supported: remove it, or give another tokenizer with --tokenizer-path"
            )
    present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    known = {text: repr(token) for text, token in present.items()}
    named, others = special_tokens(config)
    if isinstance(listed := config.get("added_tokens_decoder"), dict):
        try:
            items = sorted(cast("dict[str, Any]", listed).items(), key=lambda item: int(item[0]))
            wanted = {item["content"]: AddedToken(**item) for _, item in items}
        except (TypeError, KeyError, ValueError) as error:
            raise ModelLoadError(f"tokenizer_config.json: added_tokens_decoder is damaged: {error!r}") from None
    else:
        legacy = sorted((index, text) for text, index in added.items() if isinstance(index, int))
        special = named | others
        wanted = {text: AddedToken(text, normalized=text not in special, special=text in special) for _, text in legacy}
        wanted |= present
    for text in sorted(named | others):
        if text in wanted:
            wanted[text].special |= text in named
        elif text not in known and tokenizer.token_to_id(text) is not None:
            wanted[text] = AddedToken(text, special=True, normalized=False)
    tokenizer.add_tokens([token for text, token in wanted.items() if repr(token) != known.get(text)])


LOWERS = frozenset({"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer", "LayoutLMTokenizer"})
"""Classes that write the three keys below over tokenizer.json's normalizer."""
OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
PREFIXES = frozenset({"GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer"})
"""Classes that write ``add_prefix_space`` over tokenizer.json's splitting into bytes; LlamaTokenizer has its own."""


def follow_class(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Split texts as the class that tokenizer_config.json names does with its keys, where tokenizer.json differs."""
    from tokenizers import normalizers, pre_tokenizers  # noqa: PLC0415 - only who tokenises needs it

    name, prefix = str(config.get("tokenizer_class")).removesuffix("Fast"), config.get("add_prefix_space")
    normalizer: Any = tokenizer.normalizer
    if name in LOWERS and isinstance(normalizer, normalizers.BertNormalizer):
        for key, attribute in OF_BERT.items():
            if isinstance(config.get(key), bool):
                setattr(normalizer, attribute, config[key])
    splits: Any = tokenizer.pre_tokenizer
    if name in PREFIXES and isinstance(prefix, bool):
        for part in splits if isinstance(splits, pre_tokenizers.Sequence) else [splits]:
            if isinstance(part, pre_tokenizers.ByteLevel):
                part.add_prefix_space = prefix
    if name == "LlamaTokenizer" and prefix is False:
        _without_prefix(tokenizer)


def _without_prefix(tokenizer: Tokenizer) -> None:
    """No blank before the first word; of a tokenizer that marks blanks, by its pre-tokenizer or its normalizer."""
    from tokenizers import decoders, normalizers, pre_tokenizers  # noqa: PLC0415 - only who tokenises needs it

    normalizer, splits, decoder = cast("list[Any]", [tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder])
    if isinstance(splits, pre_tokenizers.Metaspace):
        splits.prepend_scheme = "never"
    elif isinstance(normalizer, normalizers.Sequence):
        kept = [part for part in normalizer if not isinstance(part, normalizers.Prepend)]
        tokenizer.normalizer = normalizers.Sequence(kept)
    if isinstance(decoder, decoders.Metaspace):
        decoder.prepend_scheme = "never"
    elif isinstance(decoder, decoders.Sequence):  # whose last step takes a blank away from the beginning
        state = json.loads(decoder.__getstate__())
        state["decoders"] = [step for step in state["decoders"] if step["type"] != "Strip"]
        decoder.__setstate__(json.dumps(state).encode())
        tokenizer.decoder = decoder


def special_tokens(config: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Texts of the tokens that have a name (``eos_token``), and of those that are merely listed as special."""
    names = {key: value for key, value in config.items() if key.endswith("_token")}
    extra: Any = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for more in (extra, config.get("model_specific_special_tokens")):
        names |= more if isinstance(more, dict) else {}
    listed = extra if isinstance(extra, list) else []
    named, others = ({text for text in map(_text, found) if text} for found in (names.values(), listed))
    return frozenset(named), frozenset(others)


def _text(token: Any) -> str | None:
    """Of a token as a string or an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
