"""BERT encoders: MiniLM, BGE, E5, GTE and other models of embeddings, cross-encoders, ColBERT."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.types import ModelConfig, PoolingConfig


class RobertaSpec(ModelSpec):
    """Positions are counted from behind the padding token's id on."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        offset = int(raw.get("pad_token_id", 1)) + 1
        longest = raw.get("max_position_embeddings", 514)
        if not isinstance(longest, int) or longest <= offset:
            raise ModelLoadError(
                f"config.json: 'max_position_embeddings' must be above {offset} (pad_token_id + 1), not {longest!r}"
            )
        return {**raw, "position_offset": offset, "max_position_embeddings": longest - offset}


class ColBERTSpec(ModelSpec):
    """A vector of ``dim`` numbers for each token."""

    def vector_size(self, config: ModelConfig) -> int:
        return config.integer("dim", 128)

    def pooling(self, task: str) -> PoolingConfig:
        return PoolingConfig("token", normalize=True)


@hookimpl
def models() -> list[ModelSpec]:
    load = "fwk_models.bert.model:"
    return [
        ModelSpec(
            name="bert",
            load=load + "Bert",
            architectures=("BertModel",),
            task="embed",
            summary="Encoder with learned positions and layer norms behind each sum; makes embeddings.",
        ),
        ModelSpec(
            name="bert_classifier",
            load=load + "BertClassifier",
            architectures=("BertForSequenceClassification",),
            task="classify",
            summary="BERT with a classifier over the first token: cross-encoders that rerank.",
        ),
        RobertaSpec(
            name="roberta",
            load=load + "Bert",
            architectures=("RobertaModel", "XLMRobertaModel"),
            task="embed",
            summary="BERT's shape with positions from behind the padding token's id on; makes embeddings.",
        ),
        RobertaSpec(
            name="roberta_classifier",
            load=load + "RobertaClassifier",
            architectures=("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
            task="classify",
            summary="RoBERTa with a classifier over the first token: BGE's rerankers and others.",
        ),
        ColBERTSpec(
            name="colbert",
            load=load + "ColBERT",
            architectures=("HF_ColBERT",),
            task="embed",
            summary="BERT with a short vector for each token, compared by the largest products (late interaction).",
        ),
    ]
