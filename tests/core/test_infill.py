"""Prompts for text in the middle, by the formats of the models' own cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fwk.errors import ConfigError, InvalidRequest
from fwk.interfaces.dialect import TextTools
from fwk_tokenizer.infill import FORMATS, InfillTemplate, infill_template

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


class Text(TextTools):
    """Bytes, and the special tokens it is given."""

    def __init__(self, *special: str) -> None:
        self.tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
        self._literal = Tokenizer.from_str(self.tokenizer.to_str())
        self._literal.encode_special_tokens = True

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return (self.tokenizer if parse_special else self._literal).encode(text).ids

    def decode(self, token_ids, skip_special_tokens=True) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def render_chat(self, messages, **given) -> str:
        raise NotImplementedError


def shown(text: Text, template: InfillTemplate, *args: object) -> str:
    return text.decode(template.make(*args).token_ids, skip_special_tokens=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("qwen_coder", "<|fim_prefix|>def f():<|fim_suffix|>return 1<|fim_middle|>"),
        ("star_coder", "<fim_prefix>def f():<fim_suffix>return 1<fim_middle>"),
        ("deepseek_coder", "<｜fim▁begin｜>def f():<｜fim▁hole｜>return 1<｜fim▁end｜>"),  # noqa: RUF001
        ("code_llama", "▁<PRE>def f():▁<SUF>return 1▁<MID>"),
        ("codestral", "[SUFFIX]return 1[PREFIX]def f():"),
        ("glm", "<|code_prefix|>def f():<|code_suffix|>return 1<|code_middle|>"),
    ],
)
def test_the_tokens_of_a_tokenizer_say_the_format(name: str, prompt: str) -> None:
    text = Text(*FORMATS[name].tokens)
    for chosen in ("auto", name):
        template = infill_template(chosen, text.tokenizer, text)
        assert template is not None
        assert shown(text, template, "def f():", "return 1") == prompt


def test_text_that_looks_like_a_token_stays_text() -> None:
    text = Text(*FORMATS["star_coder"].tokens, "<|endoftext|>")
    template = infill_template("auto", text.tokenizer, text)
    assert template is not None
    infill = template.make("a<fim_middle>", "b<fim_prefix>")
    special = [text.tokenizer.token_to_id(name) for name in FORMATS["star_coder"].tokens]
    assert [token for token in infill.token_ids if token >= len(ALPHABET)] == special
    assert infill.stop_token_ids == [text.tokenizer.token_to_id("<|endoftext|>")]


def test_other_files_and_a_middle_that_has_begun() -> None:
    text = Text(*FORMATS["qwen_coder"].tokens, "<|repo_name|>", "<|file_sep|>")
    template = infill_template("auto", text.tokenizer, text)
    assert template is not None
    assert shown(text, template, "a", "b", [("x.py", "X")], "c") == (
        "<|repo_name|>project\n<|file_sep|>x.py\nX\n<|file_sep|>file\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c"
    )
    plain = Text(*FORMATS["qwen_coder"].tokens)
    template = infill_template("auto", plain.tokenizer, plain)
    assert template is not None
    assert shown(plain, template, "a", "b", [("x.py", "X")]).startswith("\n\n--- snippet ---\n\nX<|fim_prefix|>a")


@pytest.mark.parametrize(("position", "prompt"), [("middle", "<B>a<M>b<E>"), ("end", "<B>a<E>b<M>")])
def test_a_file_of_sglang(tmp_path: Path, position: str, prompt: str) -> None:
    text = Text("<B>", "<M>", "<E>")
    tokens = {"fim_begin_token": "<B>", "fim_middle_token": "<M>", "fim_end_token": "<E>", "fim_position": position}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine"} | tokens))
    template = infill_template(str(path), text.tokenizer, text)
    assert template is not None
    assert shown(text, template, "a", "b") == prompt


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    text = Text("<fim_prefix>")
    assert infill_template("auto", text.tokenizer, text) is None
    with pytest.raises(InvalidRequest, match="no tokens for text in the middle"):
        text.infill("a", "b")
    with pytest.raises(ConfigError, match="no token '<fim_suffix>'"):
        infill_template("star_coder", text.tokenizer, text)
    with pytest.raises(ConfigError, match="neither a file nor one of auto, qwen_coder"):
        infill_template("nope", text.tokenizer, text)
    path = tmp_path / "bad.json"
    path.write_text('{"fim_begin_token": "a"}')
    with pytest.raises(ConfigError, match="fim_middle_token"):
        infill_template(str(path), text.tokenizer, text)
    whole = {"fim_begin_token": "a", "fim_middle_token": "b", "fim_end_token": "c", "fim_position": "up"}
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match="fim_position must be middle or end"):
        infill_template(str(path), text.tokenizer, text)
