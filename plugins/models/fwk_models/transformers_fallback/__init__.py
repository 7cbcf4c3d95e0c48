"""Any causal language model that transformers knows, with fwk's attention, linear layers and weights."""

from collections.abc import Mapping
from typing import Any, cast

from fwk import ModelSpec, Needs, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.declaration import Facts


class FallbackSpec(ModelSpec):
    """Refuses no architecture: only transformers, once it is imported, knows which it has."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises ``ModelLoadError`` for a model whose language model is one part of several."""
        if isinstance(raw.get("text_config"), Mapping) and not raw.get("hidden_size"):
            names = ", ".join(
                sorted(name for name in raw if name.endswith("_config") and name != "quantization_config")
            )
            raise ModelLoadError(
                f"no model plugin serves {(raw.get('architectures') or ['?'])[0]!r}, and transformers' models made of "
                f"several ({names}) are not served: give a model of text alone"
            )
        return raw

    def refusal(self, facts: Facts) -> str | None:
        stored = facts.model.raw.get("quantization_config") if facts.model is not None else None
        if isinstance(stored, Mapping) and cast("Mapping[str, Any]", stored).get("quant_method") == "mxfp4":
            return "reads no experts in MXFP4"
        return self.refusal_of_run(facts)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        FallbackSpec(
            name="transformers",
            load="fwk_models.transformers_fallback.model:TransformersModel",
            architectures=(),
            needs=Needs(packages=("transformers>=5.23,<6",)),
            rank=-100,
            summary="Any causal language model of transformers, where no other plugin serves it.",
        )
    ]
