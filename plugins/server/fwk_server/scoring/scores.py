"""Scores of pairs of texts, by what the served model makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, Frontend

_COLBERT_MARKERS = ("[unused0]", "[unused1]")
"""Tokens that ColBERT's own code puts behind the first one of a query and of a document."""


class PairScorer:
    """Makes the inputs for pairs, and scores of their vectors."""

    def __init__(self, frontend: Frontend) -> None:
        card = frontend.card
        if card.task not in ("embed", "classify"):
            card.check_task("classify")
        if card.task == "classify" and len(card.labels) != 1:
            raise InvalidRequest(
                f"the model {card.name!r} sorts into {len(card.labels)} classes and scores no pairs: use /classify, or "
                "serve a reranker or a model of embeddings"
            )
        self._frontend = frontend
        self._reads_pairs = card.task == "classify"

    def inputs(self, first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[EmbedInput]:
        """One for each pair, or one for each text. first: one text, or as many as second. names: the fields'."""
        if not self._reads_pairs:
            return [self._text(text, 0, names[0]) for text in first] + [
                self._text(text, 1, names[1]) for text in second
            ]
        firsts = first if len(first) == len(second) else list(first) * len(second)
        return [self._pair(*pair, f"{names[1]}[{i}]") for i, pair in enumerate(zip(firsts, second, strict=True))]

    def scores(self, vectors: Sequence[bytes], num_first: int, num_second: int) -> list[float]:
        """One for each of ``num_second`` pairs."""
        card = self._frontend.card
        if self._reads_pairs:
            return [float(probability(np.frombuffer(x, "<f4")[0], card.config)) for x in vectors]
        rows = [np.frombuffer(x, "<f4").reshape(-1, card.embedding_size).astype(np.float64) for x in vectors]
        firsts, seconds = rows[:num_first], rows[num_first:]
        firsts = firsts if num_first == num_second else firsts * num_second
        compare = max_sim if card.has_token_vectors else cosine
        return [compare(a, b) for a, b in zip(firsts, seconds, strict=True)]

    def _text(self, text: str, kind: int, name: str) -> EmbedInput:
        tools, card = self._frontend.text, self._frontend.card
        tools.check_fits(text, card.max_prompt_len, name)
        ids = tools.encode(text, parse_special=False)
        if card.config.get("architectures") == ["HF_ColBERT"]:
            ids[1:1] = tools.encode(_COLBERT_MARKERS[kind], add_special_tokens=False)
        return EmbedInput(ids)

    def _pair(self, first: str, second: str, name: str) -> EmbedInput:
        tools, most = self._frontend.text, self._frontend.card.max_prompt_len
        tools.check_fits(second, most, name)
        tools.check_fits(first, most, name)
        if tools.renders_pairs:
            messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
            return EmbedInput(tools.chat_ids(messages, add_generation_prompt=False, max_num_tokens=most))
        ids, start = tools.encode_pair(first, second)
        return EmbedInput(ids, segment_start=start)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Of two vectors [1, size]; 0 where one is zero."""
    length = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float((first[0] @ second[0]) / length) if length else 0.0


def max_sim(first: np.ndarray, second: np.ndarray) -> float:
    """Each of the first's vectors [num_tokens, size] with the nearest of the second's (arXiv:2004.12832, eq. 3)."""
    return float((first @ second.T).max(axis=1).sum())


def probability(logit: float, config: Mapping[str, Any]) -> float:
    """Of a classifier's one output: its sigmoid, unless config.json says that it is left as it is."""
    own: Any = config.get("sentence_transformers") or {}
    name = own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or ""
    if str(name).endswith("Identity") or config.get("problem_type") == "regression":
        return float(logit)
    return float(1.0 / (1.0 + np.exp(-np.float64(logit))))


def probabilities(logits: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Of a classifier's outputs [num_labels]: a softmax, or of labels that do not exclude each other sigmoids."""
    if len(logits) == 1:
        return np.array([probability(logits[0], config)])
    if config.get("problem_type") == "regression":
        return logits
    if config.get("problem_type") == "multi_label_classification":
        return 1.0 / (1.0 + np.exp(-logits))
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()
