"""Text and tokens: tokenising, chat templates, incremental detokenising, stop strings."""

from fwk.text.detokenizer import SequenceText
from fwk.text.model_text import ModelText
from fwk.text.prepare import check_embed_input, prepare_input

__all__ = ["ModelText", "SequenceText", "check_embed_input", "prepare_input"]
