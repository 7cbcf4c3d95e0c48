"""Any causal language model that transformers knows, with fwk's attention, linear layers and weights."""

from fwk import ModelSpec, Needs, hookimpl
from fwk.interfaces.declaration import Facts


class FallbackSpec(ModelSpec):
    """Refuses no architecture: only transformers, once it is imported, knows which it has."""

    def refusal(self, facts: Facts) -> str | None:
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
