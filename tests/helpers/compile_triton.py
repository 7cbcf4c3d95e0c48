"""Compile the Triton kernels for a GPU that need not be there; prints a line of JSON about the machine code of each.

``python -m tests.helpers.compile_triton CC|gfx942 DTYPE plain|int8|fp8 full|tree|latent short|long|shared`` for
attention, ``python -m tests.helpers.compile_triton CC|gfx942 DTYPE NAME`` for those of ``COMPILED``, all without
TRITON_INTERPRET: the interpreter takes the place of the compiler for good.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fwk_attention.triton_paged.kernels import attend_tiles, join_parts
from fwk_attention.triton_paged.plan import device_sizes, power_of_two
from fwk_attention.triton_paged.rows import store_rows, turn_rows
from fwk_lora.triton_lora import kernels as adapters
from fwk_moe.triton_fused import kernels as experts
from fwk_moe.triton_fused.runner import gate_up_columns, tiling
from fwk_operators.triton_ops import kernels as operators
from fwk_quant._linear_triton import kernels as packed_kernels
from fwk_quant._linear_triton import matrix as packed
from fwk_quant.none import invariant as products
from fwk_sampling.triton_sampler import kernels as sampler
from fwk_tiles.launches import Tile
from fwk_tiles.matrices import round_rows

BLOCK_SIZE = 16


DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

INSTRUCTIONS = {
    "local_loads": r"\bLDL\b",
    "local_stores": r"\bSTL\b",
    "matrix_products": r"\b(HGMMA|HMMA|UTCHMMA)",
    "e4m3_products": r"\b(QGMMA|QMMA|UTCQMMA)",
    "hopper_matrix_products": r"\bHGMMA",
    "loads_of_128_bits": r"\b(LDG|LDGSTS)[.\w]*\.128",
}

ON_AMD = {
    "local_loads": r"\bscratch_load",
    "local_stores": r"\bscratch_store",
    "matrix_products": r"\bv_mfma",
    "e4m3_products": r"\bv_mfma\w*_fp8_fp8",
    "hopper_matrix_products": r"\bHGMMA",
    "loads_of_128_bits": r"\b(global|buffer)_load_dwordx4",
}

NOT_DIVISIBLE = (
    "num_heads",
    "num_kv_heads",
    "num_tokens",
    "num_rows",
    "num_pairs",
    "max_tiles",
    "table_stride",
    "tree_stride",
    "num_chunks",
    "num_words",
)
"""Arguments whose values Triton knows nothing of; others it takes to be multiples of 16, as they are."""


def target_of(cc: int | str) -> GPUTarget:
    return GPUTarget("cuda", cc, 32) if isinstance(cc, int) else GPUTarget("hip", cc, 64)


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(DISASSEMBLER), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def report(kernel: Any, cc: int | str, types: dict[str, str], constants: dict[str, Any], **options: Any) -> None:
    """Compile and print."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    known = [name for name, kind in types.items() if kind != "fp32" and name not in NOT_DIVISIBLE]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in known}
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    made = triton.compile(source, target=target_of(cc), options=options)
    patterns = INSTRUCTIONS if isinstance(cc, int) else ON_AMD
    code = disassembled(made.asm["cubin"]) if isinstance(cc, int) else made.asm["amdgcn"]
    counts = {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}
    print(json.dumps({"name": kernel.__name__, "shared": made.metadata.shared, **counts}))


def compile_operators(cc: int | str, dtype: str) -> None:
    """Those of a model of 4,096 numbers, with heads of 128, and of their norms."""
    number, strides = f"*{dtype}", {"x_token_stride": "i32", "x_head_stride": "i32"}
    given = {"IS_INTERPRETED": False}
    norm = {"x": number, **strides, "residual": number, "weight": number, "weight_head_stride": "i32", "out": number}
    norm |= {"scales": "*fp32", "num_rows": "i32", "eps": "fp32"}
    for heads, size, rows, adds in ((1, 4096, 1, True), (8, 128, 8, False)):
        sizes = {
            "HEADS": heads,
            "SIZE": size,
            "WIDTH": size,
            "ROWS": rows,
            "ADDS": adds,
            "ROUNDS_LAST": False,
            "GROUPS": 0,
        }
        report(operators.norm_rows, cc, norm, {**sizes, **given}, num_warps=16 if adds else 4)
    for groups in (1, 32):
        sizes = {
            "HEADS": 1,
            "SIZE": 4096,
            "WIDTH": 4096,
            "ROWS": 1,
            "ADDS": True,
            "ROUNDS_LAST": False,
            "GROUPS": groups,
        }
        report(operators.norm_rows, cc, norm | {"out": "*u8"}, {**sizes, **given}, num_warps=16)
    turn = {"x": number, **strides, "cos": number, "cos_stride": "i32", "sin": number, "sin_stride": "i32"}
    sizes = {"HEADS": 8, "HALF": 64, "WIDTH": 64, "ROWS": 16}
    report(operators.rotate_rows, cc, {**turn, "num_rows": "i32"}, {**sizes, **given})
    rows = {"SIZE": 4096, "WIDTH": 1024}
    gate = {"x": number, "x_stride": "i32", "out": number, "scales": "*fp32"}
    for activation in range(5):
        report(operators.gate_rows, cc, gate, {**rows, "ACTIVATION": activation, "GROUPS": 0, **given})
    for width, groups in ((1024, 8), (16384, 1)):
        sizes = {"SIZE": 14336, "WIDTH": width, "ACTIVATION": 0, "GROUPS": groups}
        report(operators.gate_rows, cc, gate | {"out": "*u8"}, {**sizes, **given}, num_warps=min(width // 256, 16))
    table = {"table": number, "table_stride": "i32", "indices": "*i64", "out": number, "scale": "fp32"}
    report(operators.table_rows, cc, table, {**rows, "SCALES": True, **given})


FORMS: tuple[tuple[str | None, int, int, int, int], ...] = (
    (None, 0, 1, 1, 1),
    ("*u8", 1, 1, 2048, 1),
    ("*u8", 2, 16, 128, 1),
    ("*u8", 3, 16, 128, 128),
)
"""Plain numbers; int8 with a scale a row, int4 with one for 128 inputs, e4m3 with one for blocks of 128 x 128."""


def compile_experts(cc: int | str, dtype: str) -> None:
    """Those of Qwen3-30B-A3B: 128 of 768 for 2,048 numbers, eight for each token; few tokens, and many."""
    number, indices = f"*{dtype}", {"tiles": "*i32", "pairs": "*i32"}
    given, size, top_k = {"IS_INTERPRETED": False}, {"SIZE": 2048, "INNER": 768}, 8
    counted = {"expert_ids": "*i64", "counts": "*i32", "num_pairs": "i32"}
    report(experts.count_pairs, cc, counted, {"WIDTH": 1024, **given})
    placed = {"EXPERTS": 128, "EXPERTS_WIDTH": 128, "ROWS": 16, "WIDTH": 1024}
    report(experts.sort_pairs, cc, {**counted, **indices, "max_tiles": "i32"}, {**placed, **given})
    for num_pairs in (64, 2**16):
        tile = tiling(num_pairs, 128, 4 if dtype == "fp32" else 2)
        cut = {**size, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step, **given}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        for element, form, groups, group, block in FORMS:
            packed = number if element is None else element
            scales = number if element is None else "*fp32"
            product = {"x": number, "weights": packed, "scales": scales, "zeros": scales, **indices, "out": number}
            product["x_scales"] = number
            chosen = {"FORMAT": form, "GROUPS": groups, "GROUP": group, "ROW_BLOCK": block, **NO_ZEROS, **cut}
            report_products(cc, product, {**chosen, "ROUNDS": False}, options)
    total = {"x": number, "factors": "*fp32", "expert_ids": "*i64", "out": number}
    for others in (False, True):
        summed = {"SIZE": 2048, "TOP_K": top_k, "EXPERTS": 128, "HAS_OTHERS": others, "WIDTH": 1024}
        report(experts.add_experts, cc, total, {**summed, **given})


def compile_adapters(cc: int | str, dtype: str) -> None:
    """Of rank 16 and 64, for the queries, keys and values of a model of 4,096 numbers."""
    number, indices = f"*{dtype}", {"tiles": "*i32", "tokens": "*i32"}
    for rank in (16, 64):
        shared = {"RANKS": 3 * rank, "ROWS": 16, "IS_INTERPRETED": False}
        types = {"x": number, "x_stride": "i32", "a": number, **indices, "out": number}
        sizes = {"INPUTS": 4096, "COLUMNS": rank, "STEP": 128 // (4 if dtype == "fp32" else 2)}
        report(adapters.shrink_tiles, cc, types, {**shared, **sizes})
        types = {"x": number, "b": number, **indices, "blocks": "*i32", "y": number, "y_stride": "i32"}
        report(adapters.expand_tiles, cc, types, {**shared, "OUTPUTS": 6144, "RANK": rank, "COLUMNS": 64})


NO_ZEROS = {"HAS_ZEROS": False}


def report_products(cc: int | str, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> None:
    """Of one form of experts' matrices."""
    tile = Tile(constants["ROWS"], constants["COLUMNS"], constants["STEP"], **options)
    columns = gate_up_columns(tile, constants["FORMAT"], is_amd=not isinstance(cc, int))
    gated = {**constants, "COLUMNS": columns, "TOP_K": 8, "ACTIVATION": 0}
    report(experts.gate_up_tiles, cc, {**types, "x_stride": "i32"}, gated, **options)
    report(experts.down_tiles, cc, types, constants, **options)


def compile_rounded_experts(cc: int | str, dtype: str) -> None:
    """The same model's in e4m3, with activations in e4m3: with a scale a row, and one for blocks of 128 x 128."""
    number, given = f"*{dtype}", {"IS_INTERPRETED": False}
    for size, group in ((2048, 2048), (2048, 128)):
        types = {"x": number, "x_stride": "i32", "numbers": "*u8", "scales": "*fp32"}
        sizes = {"SIZE": size, "GROUPS": size // group, "GROUP": group, "WIDTH": min(group, 1024)}
        report(round_rows, cc, types, {**sizes, **given})
    types = {"x": "*u8", "x_scales": "*fp32", "weights": "*u8", "scales": "*fp32", "zeros": "*fp32"}
    types |= {"tiles": "*i32", "pairs": "*i32", "out": number}
    for num_pairs in (64, 2**16):
        tile = tiling(num_pairs, 128, 2)
        cut = {"SIZE": 2048, "INNER": 768, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": 2 * tile.step, **given}
        for groups, group, block in ((1, 2048, 1), (16, 128, 128)):
            form = {"FORMAT": 3, "GROUPS": groups, "GROUP": group, "ROW_BLOCK": block, **NO_ZEROS, "ROUNDS": True}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            report_products(cc, types, {**form, **cut}, options)


def packed_types(number: str, x: str) -> dict[str, str]:
    """Of ``packed_products`` without zeros."""
    given = {"x": x, "x_stride": "i32", "x_scales": "*fp32", "numbers": "*u8", "scales": "*fp32", "zeros": "*fp32"}
    return {**given, "bias": number, "out": "*fp32", "num_tokens": "i32"}


def compile_packed_products(cc: int | str, dtype: str) -> None:
    """Of 4,096 numbers by 4,096, for one token, 32 and 64, in the three forms and with zeros of int4's groups."""
    number, sizes = f"*{dtype}", {"INPUTS": 4096, "OUTPUTS": 4096, "HAS_BIAS": False, "IS_INTERPRETED": False}
    forms = [(form, groups, group, block, False) for _, form, groups, group, block in FORMS[1:]]
    forms[0] = (1, 1, 4096, 1, False)
    for num_tokens in (1, 32, 64):
        for form, groups, group, block, has_zeros in [*forms, (2, 32, 128, 1, True)]:
            kind = {1: "int8", 2: "int4", 3: "e4m3"}[form]
            tile = packed.tile_of(num_tokens, 2, kind, is_amd=not isinstance(cc, int))
            parts, span = packed.parts_of(4096, 4096, tile.step)
            cut = {"PARTS": parts, "SPAN": span, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            shape = {"FORMAT": form, "GROUPS": groups, "GROUP": group, "ROW_BLOCK": block, "HAS_ZEROS": has_zeros}
            types = packed_types(number, number) | ({"zeros": "*u8"} if has_zeros else {})
            report(packed_kernels.packed_products, cc, types, {**sizes, **shape, **cut, "ROUNDS": False}, **options)
            if num_tokens == 1:
                types = {name: types[name] for name in ("numbers", "scales", "zeros")} | {"out": number}
                whole = {"INPUTS": 4096, "OUTPUTS": 4096, "ROWS": 32, "STEP": 128, "IS_INTERPRETED": False}
                report(packed_kernels.unpack_tiles, cc, types, {**shape, **whole})
    types = {"parts": "*fp32", "bias": number, "out": number, "num_tokens": "i32"}
    report(packed_kernels.add_parts, cc, types, {"PARTS": 4, "WIDTH": 1024, **without_inputs(sizes)})


def without_inputs(sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name != "INPUTS"}


def compile_rounded_products(cc: int | str, dtype: str) -> None:
    """The same of e4m3 numbers by e4m3 numbers: a scale a row, and one for blocks of 128 x 128."""
    sizes = {"INPUTS": 4096, "OUTPUTS": 4096, "HAS_BIAS": False, "HAS_ZEROS": False, "IS_INTERPRETED": False}
    for num_tokens in (1, 64):
        tile = packed.tile_of(num_tokens, 1, "e4m3", is_amd=not isinstance(cc, int))
        parts, span = packed.parts_of(4096, 4096, tile.step)
        cut = {"PARTS": parts, "SPAN": span, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        for groups, group, block in ((1, 4096, 1), (32, 128, 128)):
            shape = {"FORMAT": 3, "GROUPS": groups, "GROUP": group, "ROW_BLOCK": block, "ROUNDS": True}
            report(
                packed_kernels.packed_products,
                cc,
                packed_types(f"*{dtype}", "*u8"),
                {**sizes, **shape, **cut},
                **options,
            )


def compile_sampler(cc: int | str, dtype: str) -> None:
    """Of a vocabulary of 151,936; steps that are all greedy, and others."""
    shared: dict[str, Any] = {"WIDTH": 4096}
    found = {"settings": "*fp64", "scaled": "*fp32", "tops": "*fp32", "places": "*i32", "vocab_size": "i32"}
    for samples in (False, True):
        tops = {"logits": f"*{dtype}", "stride": "i32", **found}
        report(sampler.chunk_tops, cc, tops, {"SAMPLES": samples, **shared}, num_warps=16)
    for samples in (False, True):
        picks = {**found, "picked": "*i64", "num_chunks": "i32"}
        report(sampler.pick_rows, cc, picks, {"SAMPLES": samples, "CHUNKS": 64, "WIDTH": 2048}, num_warps=16)
    masks = {"logits": f"*{dtype}", "stride": "i32", "rows": "*i64", "masks": "*i32"}
    report(sampler.mask_rows, cc, {**masks, "vocab_size": "i32", "num_words": "i32"}, shared, num_warps=16)


def compile_products(cc: int | str, dtype: str) -> None:
    """With a bias and without."""
    number, tile = f"*{dtype}", products.tile_of(4 if dtype == "fp32" else 2)
    given = {"x": number, "x_stride": "i32", "weight": number, "weight_stride": "i32", "bias": number, "out": number}
    given |= {"num_rows": "i32", "out_features": "i32", "in_features": "i32"}
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step, "IS_INTERPRETED": False}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    for has_bias in (False, True):
        report(products.linear_tiles, cc, given, {"HAS_BIAS": has_bias, **sizes}, **options)


def main(cc: int | str, dtype: str, form: str, kind: str, length: str) -> None:
    size, rest, group = (512, 64, 128) if kind == "latent" else (128, 0, 6)
    kv_heads, parts = (1, 1) if kind == "latent" else (4, 2)
    number = f"*{dtype}"
    code = {"plain": 0, "int8": 1, "fp8": 2}[form]
    element, scale = (number, number) if code == 0 else ("*u8", "*fp32")
    row = size + rest + (0 if code == 0 else 4)
    sizes = device_sizes(size + rest, size, 4 if dtype == "fp32" else 2)
    heads = min(power_of_two(group), 16)
    rows = sizes.short_rows if length == "short" else sizes.rows
    block_stride = parts * kv_heads * BLOCK_SIZE * row
    cache = {"cache": element, "scales": scale}
    layout = {"ROW": row, "BLOCK_SIZE": BLOCK_SIZE, "BLOCK_STRIDE": block_stride, "FORMAT": code}
    width = power_of_two(size + rest, 16)
    strides = {"k_token_stride": "i32", "k_head_stride": "i32", "v_token_stride": "i32", "v_head_stride": "i32"}
    counts = {"num_tokens": "i32", "num_heads": "i32", "value_offset": "i32"}
    store = {"k": number, "v": number, **strides, **cache, "slot_mapping": "*i64", **counts}
    report(store_rows, cc, store, {"SIZE": size + rest, **layout, "TOKENS": sizes.tokens, "WIDTH": width})
    if kind != "latent":
        turn = {
            "qkv": number,
            "token_stride": "i32",
            "head_stride": "i32",
            "weight": number,
            "cos": number,
            "sin": number,
        }
        turn |= {"cos_stride": "i32", "sin_stride": "i32", **cache, "slot_mapping": "*i64", **counts, "eps": "fp32"}
        half = {"num_kv_heads": "i32"}, {"HALF": size // 2, "WIDTH": width // 2, "TOKENS": sizes.tokens, **layout}
        norm = {"NORMS": True, "ROUNDS_LAST": False, "IS_INTERPRETED": False}
        report(turn_rows, cc, turn | half[0], half[1] | norm)
    work = {"out": number, "parts": "*fp32", "part_stats": "*fp32", "num_heads": "i32"}
    tile = {"GROUP": group, "HEADS": heads, "SIZE": size, "WIDTH": power_of_two(size, 16), "ROWS": rows}
    attend = {
        **work,
        **cache,
        "q": number,
        "q_token_stride": "i32",
        "q_head_stride": "i32",
        "tiles": "*i32",
        "table": "*i32",
        "table_stride": "i32",
        "positions": "*i64",
        "tree_mask": "*u8" if kind == "tree" else "*i64",
        "tree_stride": "i32",
        "scale": "fp32",
        "soft_cap": "fp32",
    }
    constants = {
        **tile,
        **layout,
        "REST": rest,
        "REST_WIDTH": power_of_two(max(rest, 1), 16),
        "VALUE_OFFSET": 0 if kind == "latent" else kv_heads * BLOCK_SIZE * row,
        "WINDOW": 100 if kind == "tree" else 0,
        "HAS_CAP": kind == "tree",
        "IS_TREE": kind == "tree",
        "KEYS": sizes.shared_keys if length == "shared" else sizes.keys,
        "PART_ROWS": sizes.short_rows if length == "shared" else rows,
        "SLOTS": rows // heads if length == "shared" else 0,
        "IS_INTERPRETED": False,
    }
    report(attend_tiles, cc, attend, constants, num_stages=2)
    if length == "short":
        report(join_parts, cc, {**work, "joins": "*i32"}, tile)


COMPILED = {
    "operators": compile_operators,
    "adapters": compile_adapters,
    "experts": compile_experts,
    "rounded-experts": compile_rounded_experts,
    "sampler": compile_sampler,
    "products": compile_products,
    "packed-products": compile_packed_products,
    "rounded-products": compile_rounded_products,
}

if __name__ == "__main__":
    target, number_type, *words = sys.argv[1:]
    device = int(target) if target.isdecimal() else target
    if words[0] in COMPILED:
        COMPILED[words[0]](device, number_type)
    else:
        main(device, number_type, *words)
