"""The Llama family."""

from __future__ import annotations

from fwk_models._common.llama import LlamaDecoder


class Llama(LlamaDecoder):
    """Token ids to hidden states to logits."""
