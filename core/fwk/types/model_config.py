"""A model's architecture, read from a Hugging Face style ``config.json`` (or built from GGUF metadata)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fwk.errors import ModelLoadError
from fwk_files.config_numbers import check_config

_OLDER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
"""How configurations of before Llama spell some fields."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and how it is stretched for long contexts (``config.json``'s ``rope_scaling``).

    - ``theta``: the base of the frequencies.
    - ``kind``: ``rope_type`` of config.json: ``default``, ``linear``, ``llama3``, ``yarn``, ...
    - ``scaling``: its other fields. ``partial_rotary_factor`` here, or in ``ModelConfig.raw``: the share of a head's
      numbers, from the first on, that is turned (1.0 without); ``fwk_layers.RotaryEmbedding`` reads it.
    """

    theta: float = 10_000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields most architectures share; everything else is in ``raw``, for the model's own file to read.

    ``ropes`` has an entry for each kind of layer (``layer_types``) whose rotary settings are its own; ``rope`` is that
    of the layers that see everything.

    - ``architecture``: the first of config.json's ``architectures``.
    - ``vocab_size``: rows of the embedding.
    - ``hidden_size``: numbers in a hidden state.
    - ``num_layers``: of all kinds.
    - ``num_heads``: query heads.
    - ``num_kv_heads``: K/V heads; ``num_heads`` where config.json has none.
    - ``head_size``: ``head_dim``, else hidden_size / num_heads.
    - ``intermediate_size``: of the MLP.
    - ``max_position_embeddings``: tokens the model was made for.
    - ``rms_norm_eps``: of config.json; 1e-6 without.
    - ``tie_word_embeddings``: whether the head is the embedding.
    - ``sliding_window``: tokens; None: layers see everything.
    - ``torch_dtype``: of the stored weights, by torch's name.
    - ``eos_token_ids``: tokens that end a text; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    sliding_window: int | None
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any]
    ropes: Mapping[str, RopeConfig] = field(default_factory=dict[str, RopeConfig])

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of ``raw``. Raises ``ModelLoadError`` naming it when it is not one, or too low."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
            raise ModelLoadError(f"config.json: {name!r} must be a whole number of at least {low}, not {value!r}")
        return value

    @property
    def num_experts(self) -> int:
        """Experts a token is routed among, by any of the names that are in use; 0 for a dense model."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((value for name in names if isinstance(value := self.raw.get(name), int) and value > 1), 0)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of a classifier's outputs, in their order: ``id2label``, or ``num_labels`` numbered ones, or two."""
        names = cast("Mapping[str | int, object]", self.raw.get("id2label") or {})
        if names:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        return tuple(f"LABEL_{i}" for i in range(self.integer("num_labels", 2)))

    def rope_of(self, layer_type: str) -> RopeConfig:
        """The rotary settings of a kind of layer."""
        return self.ropes.get(layer_type, self.rope)

    def layer_type(self, index: int) -> str:
        """``full_attention`` or ``sliding_attention``, by ``layer_types`` or, for all layers, ``sliding_window``."""
        kinds = cast("list[str] | None", self.raw.get("layer_types"))
        if kinds is not None:
            return kinds[index]
        return "full_attention" if self.sliding_window is None else "sliding_attention"

    def window_of(self, index: int) -> int | None:
        """The sliding window of a layer; None for one that sees everything."""
        kind = self.layer_type(index)
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelLoadError(f"layer {index} is of type {kind!r}; only full and sliding attention are known")
        return self.sliding_window if kind == "sliding_attention" else None

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str) -> ModelConfig:
        """Read and check a ``config.json``; ``where`` names the file in errors.

        Both spellings of the rotary settings are read: ``rope_theta``/``rope_scaling`` and the newer
        ``rope_parameters``.
        """
        check_config(raw, where)
        architectures = cast(list[Any], raw.get("architectures") or [])
        if not architectures:
            raise ModelLoadError(f"{where}: 'architectures' is missing, so no model class can be chosen")

        def integer(name: str, default: int | None = None, high: int = 2**31) -> int:
            value = next((raw[n] for n in (name, *_OLDER_NAMES.get(name, ())) if raw.get(n) is not None), None)
            if value is None:
                value = default
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < high:
                raise ModelLoadError(f"{where}: '{name}' must be an integer from 1 to {high - 1}, not {value!r}")
            return value

        hidden_size = integer("hidden_size")
        num_heads = integer("num_attention_heads", high=2**16)
        head_size = integer("head_dim", hidden_size // num_heads, high=2**16)
        window = raw.get("sliding_window")
        if raw.get("use_sliding_window") is False:
            window = None
        kinds: Any = raw.get("layer_types")
        num_layers = integer("num_hidden_layers", high=2**10)
        num_kv_heads = integer("num_key_value_heads", num_heads, high=2**16)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"{where}: the {num_heads} attention heads ('num_attention_heads') cannot share {num_kv_heads} heads "
                "of K and V ('num_key_value_heads')"
            )
        if kinds is not None and (not isinstance(kinds, list) or len(cast("list[Any]", kinds)) < num_layers):
            raise ModelLoadError(f"{where}: 'layer_types' must name the kind of each of the {num_layers} layers")
        ropes = _ropes(raw)
        eos: Any = raw.get("eos_token_id")
        eos_ids = tuple(cast(list[int], eos) if isinstance(eos, list) else [eos] if isinstance(eos, int) else [])
        return ModelConfig(
            architecture=str(architectures[0]),
            vocab_size=integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            intermediate_size=integer("intermediate_size", 4 * hidden_size),
            max_position_embeddings=integer("max_position_embeddings", 2048),
            rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
            rope=ropes.get("full_attention") or next(iter(ropes.values())),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            sliding_window=int(window) if window else None,
            torch_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            eos_token_ids=eos_ids,
            raw=raw,
            ropes=ropes,
        )


def _ropes(raw: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """By kind of layer; a config with one set of settings has them under ``full_attention`` alone."""
    given: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    nested = {kind: dict(cast(Mapping[str, Any], v)) for kind, v in given.items() if isinstance(v, Mapping)}
    if nested:
        return {kind: _rope(value, None) for kind, value in nested.items()}
    ropes = {"full_attention": _rope(given, raw.get("rope_theta"))}
    local = raw.get("rope_local_base_freq")
    if local is not None:
        ropes["sliding_attention"] = RopeConfig(theta=float(local))
    return ropes


def _rope(parameters: dict[str, Any], theta: Any) -> RopeConfig:
    base = float(parameters.get("rope_theta") or theta or 10_000.0)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return RopeConfig(theta=base, kind=kind, scaling=parameters)
