"""BERT encoders: MiniLM, BGE, E5, GTE and other models of embeddings, cross-encoders, ColBERT."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.pooling import PoolingConfig
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "BertModel": {
        "vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "tie_word_embeddings": True,
    },
    "RobertaModel": {
        "vocab_size": 50_265, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "tie_word_embeddings": True, "pad_token_id": 1, "eos_token_id": 2,
    },
    "XLMRobertaModel": {
        "vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "tie_word_embeddings": True, "pad_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""
DEFAULTS |= {
    "BertForSequenceClassification": DEFAULTS["BertModel"],
    "HF_ColBERT": DEFAULTS["BertModel"],
    "RobertaForSequenceClassification": DEFAULTS["RobertaModel"],
    "XLMRobertaForSequenceClassification": DEFAULTS["XLMRobertaModel"],
}


class RobertaSpec(ConfiguredSpec):
    """Positions are counted from behind the padding token's id on."""

    def derived(self, config: Config, architecture: str) -> Config:
        offset, longest = int(config.get("pad_token_id") or 0) + 1, config["max_position_embeddings"]
        if not isinstance(longest, int) or longest <= offset:
            raise ModelLoadError(
                f"config.json: 'max_position_embeddings' must be above {offset} (pad_token_id + 1), not {longest!r}"
            )
        return {**config, "position_offset": offset, "max_position_embeddings": longest - offset}


class ColBERTSpec(ConfiguredSpec):
    """A vector of ``dim`` numbers for each token."""

    def vector_size(self, config: ModelConfig) -> int:
        return config.integer("dim", 128)

    def pooling(self, task: str) -> PoolingConfig:
        return PoolingConfig("token", normalize=True)


@hookimpl
def models() -> list[ModelSpec]:
    load = "fwk_models.bert.model:"
    return [
        ConfiguredSpec(
            name="bert",
            load=load + "Bert",
            architectures=("BertModel",),
            defaults=DEFAULTS,
            task="embed",
            summary="Encoder with learned positions and layer norms behind each sum; makes embeddings.",
        ),
        ConfiguredSpec(
            name="bert_classifier",
            load=load + "BertClassifier",
            architectures=("BertForSequenceClassification",),
            defaults=DEFAULTS,
            task="classify",
            summary="BERT with a classifier over the first token: cross-encoders that rerank.",
        ),
        RobertaSpec(
            name="roberta",
            load=load + "Bert",
            architectures=("RobertaModel", "XLMRobertaModel"),
            defaults=DEFAULTS,
            task="embed",
            summary="BERT's shape with positions from behind the padding token's id on; makes embeddings.",
        ),
        RobertaSpec(
            name="roberta_classifier",
            load=load + "RobertaClassifier",
            architectures=("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
            defaults=DEFAULTS,
            task="classify",
            summary="RoBERTa with a classifier over the first token: BGE's rerankers and others.",
        ),
        ColBERTSpec(
            name="colbert",
            load=load + "ColBERT",
            architectures=("HF_ColBERT",),
            defaults=DEFAULTS,
            task="embed",
            summary="BERT with a short vector for each token, compared by the largest products (late interaction).",
        ),
    ]
