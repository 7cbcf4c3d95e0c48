"""Bare JSON calls with ``parameters``, and the special tokens that may stand alongside them."""

from __future__ import annotations

from fwk_parsers._common.bare import BareCalls


class LlamaParser(BareCalls):
    """Calls of Llama 3 and 4 in JSON."""

    reads_special = True
    leads = ("<|python_tag|>", "<|python_start|>", "```json", "```")
    between = ("<|python_end|>", "<|python_tag|>", "```")
    arguments_key = "parameters"
    separator = "; "
