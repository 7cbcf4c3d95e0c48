"""Text and tokens: tokenising, chat templates, incremental detokenising, stop strings."""

from fwk.text.detokenizer import SequenceText
from fwk.text.model_text import ModelText
from fwk.text.prepare import prepare_input

__all__ = ["ModelText", "SequenceText", "prepare_input"]
