"""How tensors are stored in a GGUF file: the ggml types this loader reads, and the names of those it does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type: ``block_bytes`` bytes hold ``block_size`` consecutive values of a row."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""By the number in the file."""

UNREAD_TYPES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
"""Known to ggml but not to this loader: only for a message that helps."""


def describe_unread(number: int) -> str:
    """A sentence about a type number that ``TENSOR_TYPES`` does not hold."""
    supported = ", ".join(item.name for item in TENSOR_TYPES.values())
    known = UNREAD_TYPES.get(number)
    what = f"is stored as {known}, which is not supported" if known else f"has the unknown storage type {number}"
    return f"{what}; supported: {supported}"
