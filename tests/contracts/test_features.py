"""What every feature must do, with our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fwk_kit.testing import FeatureSuite


class TestHiddenStates(FeatureSuite):
    plugin = "hidden_states"
    options: ClassVar[Mapping[str, Any]] = {"enable_return_hidden_states": True}
    fields: ClassVar[Mapping[str, Any]] = {"return_hidden_states": True}


class TestPromptLogprobs(FeatureSuite):
    plugin = "prompt_logprobs"
    fields: ClassVar[Mapping[str, Any]] = {"prompt_logprobs": 2}


class TestWeightUpdate(FeatureSuite):
    plugin = "weight_update"

    def exclusive(self, folder: str) -> Mapping[str, Sequence[Any]]:
        return {"update_weights": (folder, "dummy")}


class TestPluginSwitch(FeatureSuite):
    """Requests while nothing is switched; switches are in tests/core and tests/faults/test_switching.py."""

    plugin = "plugin_switch"


class TestRecurrentStates(FeatureSuite):
    """Of a model without any; others are in tests/plugins/models."""

    plugin = "recurrent_states"


class TestStepPlanning(FeatureSuite):
    """One prompt in a step, and steps of prompts apart from those of next tokens."""

    plugin = "step_planning"
    options: ClassVar[Mapping[str, Any]] = {"prefill_max_requests": 1, "enable_mixed_chunk": False}


class TestDrafting(FeatureSuite):
    """With a decoder; what it drafts for features is in tests/e2e/test_grammar.py."""

    plugin = "drafting"

    def selected(self, item: Any) -> dict[str, Any]:
        return {"speculative_algorithm": "ngram"}


class TestGrammarMasks(FeatureSuite):
    """Of requests without a grammar; others are in tests/e2e/test_grammar.py."""

    plugin = "grammar_masks"


class TestWeightsCache(FeatureSuite):
    """Of weights that nothing packs; packed ones are in tests/plugins/quant."""

    plugin = "weights_cache"


class TestCacheTiers(FeatureSuite):
    """With the host's memory; other tiers are in tests/contracts/test_caches.py."""

    plugin = "cache_tiers"

    def selected(self, item: Any) -> dict[str, Any]:
        return {"prefix_cache": "hierarchical"}


class TestAttentionPair(FeatureSuite):
    """More of it is in tests/core/test_attention_pair.py."""

    plugin = "attention_pair"
    options: ClassVar[Mapping[str, Any]] = {
        "prefill_attention_backend": "torch",
        "decode_attention_backend": "cpu",
    }


class TestPiecewiseGraphs(FeatureSuite):
    """On a host, where it stays off; on a device it is in tests/core/test_pretended_pieces.py."""

    plugin = "piecewise_graphs"


class TestAroundCaptures(FeatureSuite):
    """On a host, where it does nothing; on a device it is in tests/core/test_pretended_graphs.py."""

    plugin = "around_captures"


class TestPooling(FeatureSuite):
    """Requests to a model that generates; vectors are in tests/plugins/models."""

    plugin = "pooling"


class TestMedia(FeatureSuite):
    """Requests without any; images are in tests/e2e/test_images.py."""

    plugin = "media"
