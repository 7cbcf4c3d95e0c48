"""Vectors and scores over HTTP: ``/v1/rerank``, ``/v1/score``, ``/classify``, ``/pooling``, as vLLM, Jina and Cohere.

Pairs are scored by what is served: a cross-encoder or another classifier with one output reads both texts as one
input; of a model that embeds, the cosine of two vectors counts, or with a vector for each token (ColBERT) the sum of
each query token's largest product.
"""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="scoring",
            load="fwk_server.scoring.dialect:PoolingDialect",
            summary="Reranking, scores of pairs, classes and vectors: vLLM's, Jina's and Cohere's routes",
        )
    ]
