"""LoRA adapters alongside the model: loaded by name, and computed with side by side in one step.

The server knows their names, the engine gives each running sequence's adapter a slot of the workers, and each worker
holds their matrices. What computes with them are plugins of family ``lora``; what finds and reads them are plugins of
family ``lora_sources``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from pydantic import field_validator, model_validator

from fwk import FeatureSpec, Limit, Options, hookimpl, option
from fwk.interfaces.declaration import Facts
from fwk.interfaces.feature import Wire

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./@+-]{0,127}")
"""What an adapter can be called."""


class LoRAOptions(Options):
    """Options of ``features.lora``."""

    enable_lora: bool = option(False, "Serve LoRA adapters alongside the model.")
    lora_backend: str = option("auto", "LoRA kernels.")
    lora_paths: tuple[str, ...] = option((), "Adapters to load at the start, as NAME=FOLDER.", aliases=["lora-modules"])
    max_loras_per_batch: int = option(
        8,
        "LoRA adapters computed with at once; sequences that need another one wait.",
        aliases=["max-loras"],
        ge=1,
        le=1024,
    )
    max_lora_rank: int = option(64, "Largest rank of a LoRA adapter.", ge=1, le=4096)
    max_loaded_loras: int | None = option(
        None,
        "LoRA adapters kept in host memory; loading more is refused (default: no limit).",
        aliases=["max-cpu-loras"],
        ge=1,
    )

    @field_validator("lora_paths")
    @classmethod
    def _are_named_once(cls, items: tuple[str, ...]) -> tuple[str, ...]:
        names: set[str] = set()
        for item in items:
            name, equals, path = item.partition("=")
            if not equals or not path or NAME.fullmatch(name) is None:
                raise ValueError(f"{item!r} is not NAME=FOLDER (a name has no spaces and no colon)")
            if name in names:
                raise ValueError(f"the name {name!r} is given twice")
            names.add(name)
        return items

    @model_validator(mode="after")
    def _has_room(self) -> LoRAOptions:
        if self.max_loaded_loras is not None and len(self.lora_paths) > self.max_loaded_loras:
            raise ValueError(
                f"--lora-paths names {len(self.lora_paths)} adapters, but --max-loaded-loras is {self.max_loaded_loras}"
            )
        return self

    @property
    def paths(self) -> dict[str, str]:
        """The folders of ``lora_paths`` by name."""
        return dict(item.split("=", 1) for item in self.lora_paths)


class Adapted(msgspec.Struct, frozen=True):
    """A request's adapter, by its key: its name and the hash of its content."""

    key: str


class AdapterPlace(msgspec.Struct, array_like=True, frozen=True):
    """A loaded adapter, and the slot of the LoRA backend that it is in while its sequence runs."""

    slot: int
    key: str


@dataclass(frozen=True, kw_only=True)
class LoRASpec(FeatureSpec):
    """Adapters are for models of text."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.model is not None and facts.model.raw.get("is_encoder_decoder"):
            return "is for models that are a decoder alone, and this one has an encoder and a decoder"
        return super().refusal(facts)


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        LoRASpec(
            name="lora",
            server="fwk_lora.feature.server:AdapterNames",
            engine="fwk_lora.feature.engine:AdapterScheduling",
            worker="fwk_lora.feature.worker:AdapterMatrices",
            wire=Wire(request=Adapted, sequence=AdapterPlace),
            options=LoRAOptions,
            enabled_by=("enable_lora",),
            limits=(
                Limit("task", ("generate",), "adapters are for models of text"),
                Limit("pp_size", (1,), "adapters are for layers of one worker; leave --pipeline-parallel-size out"),
            ),
            methods=("load_adapter", "unload_adapter"),
            summary="LoRA adapters, of which a step can mix several",
        )
    ]
