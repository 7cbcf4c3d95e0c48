"""BERT encoders: MiniLM, BGE, E5, GTE and other models of embeddings."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="bert",
            load="fwk_models.bert.model:Bert",
            architectures=("BertModel",),
            task="embed",
            summary="Encoder with learned positions and layer norms behind each sum; makes embeddings.",
        )
    ]
