"""A tokeniser for models that have none: one token per byte, three special tokens, and names for all other ids."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fwk.errors import ModelLoadError

NUM_BYTES = 256
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = NUM_BYTES + SPECIALS.index("<|im_end|>")
TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "add_eos_token": False,
    "unk_token": SPECIALS[0],
    "bos_token": SPECIALS[1],
    "eos_token": SPECIALS[2],
    "pad_token": SPECIALS[2],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(vocab_size: object, where: str) -> Tokenizer:
    """Token b is byte b; then the special tokens; token i above those reads ``<i>``, so that any output is text."""
    smallest = NUM_BYTES + len(SPECIALS)
    if type(vocab_size) is not int or not smallest <= vocab_size < 2**31:
        raise ModelLoadError(
            f"{where}: 'vocab_size' must be at least {smallest} for the built-in byte tokeniser, not {vocab_size!r}; "
            "raise it or put a tokenizer.json next to it"
        )
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    vocab.update({text: NUM_BYTES + number for number, text in enumerate(SPECIALS)})
    vocab.update({f"<{token_id}>": token_id for token_id in range(smallest, vocab_size)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else the next of the code points from 256."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
