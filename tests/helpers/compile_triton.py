"""Compile the Triton kernels for a GPU that need not be there; prints the shared memory each takes, in bytes.

``python -m tests.helpers.compile_triton CC DTYPE plain|int8|fp8 full|tree|latent short|long``, without
TRITON_INTERPRET: the interpreter takes the place of the compiler for good.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fwk_attention.triton_paged.kernels import attend_tiles, join_parts
from fwk_attention.triton_paged.plan import device_sizes, power_of_two
from fwk_attention.triton_paged.rows import store_rows

BLOCK_SIZE = 16


def shared_memory(kernel: Any, cc: int, types: dict[str, str], constants: dict[str, Any], **options: Any) -> int:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options).metadata.shared


def main(cc: int, dtype: str, form: str, kind: str, length: str) -> None:
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
    strides = {"x_token_stride": "i32", "x_head_stride": "i32"}
    layout = {"ROW": row, "BLOCK_SIZE": BLOCK_SIZE, "BLOCK_STRIDE": block_stride, "FORMAT": code}
    width = power_of_two(size + rest, 16)
    store = {"x": number, **strides, **cache, "slot_mapping": "*i64", "num_tokens": "i32", "part_offset": "i32"}
    print(
        1
        + shared_memory(store_rows, cc, store, {"SIZE": size + rest, **layout, "TOKENS": sizes.tokens, "WIDTH": width})
    )
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
        "KEYS": sizes.keys,
        "IS_INTERPRETED": False,
    }
    print(shared_memory(attend_tiles, cc, attend, constants, num_stages=2))
    if length == "short":
        print(shared_memory(join_parts, cc, {**work, "joins": "*i32"}, tile))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
