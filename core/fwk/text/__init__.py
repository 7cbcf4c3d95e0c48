"""Text and tokens: tokenising, chat templates, detokenising, stop strings.

Here belongs what turns text into token ids and back, for servers and ``fwk.LLM`` alike. Parsers of tool calls and
reasoning are plugins; masks of constrained output are applied in ``fwk.worker``.
"""

from fwk.text.detokenizer import SequenceText
from fwk.text.model_text import ModelText
from fwk.text.no_tokenizer import model_text
from fwk.text.prepare import check_embed_input, prepare_input

__all__ = ["ModelText", "SequenceText", "check_embed_input", "model_text", "prepare_input"]
