"""FlashInfer's kernel modules that the checks use, compiled for an H100 on a machine without one.

    PYTHONPATH=build/flashinfer python -m benchmarks.gpu.modules [FOLDER]

Each shape of a check is planned and launched over a runtime that computes nothing, and what the package loads for it is
compiled. FOLDER/modules.txt names it: other modules there do not travel. Needs nvcc.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import MODELS, Check, proofs, speeds
from fwk_kit.testing.attention_cases import Shape

MODULES = Path("build/flashinfer-modules")
LIST = "modules.txt"
Wanted = tuple[Shape, str]
"""And the kernel for prompts."""


def wanted() -> list[Wanted]:
    """What attention is computed for, those first whose kernels compile in less time."""
    found: dict[Wanted, None] = {}
    for check in (*proofs(), *speeds()):
        for shape, kernel in _of(check):
            found |= {(shape, "fa2"): None, (shape, kernel): None}
    return sorted(found, key=lambda pair: (pair[1], pair[0].sliding_window is not None))


def _of(check: Check) -> Iterator[Wanted]:
    if check.function == "suite" and check.settings["backend"] == "flashinfer":
        from tests.gpu.test_attention_gpu import SHAPES

        for name, shape in SHAPES.items():
            if any(word in name for word in check.settings["words"]):
                yield shape, _prompt_kernel(shape.kv_dtype)
    elif check.options.get("attention_backend") == "flashinfer":
        config, kv_dtype = MODELS[check.model], check.options.get("kv_cache_dtype", "auto")
        heads = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        shape = Shape(*heads, dtype="bfloat16", kv_dtype=kv_dtype)
        yield shape, check.options.get("flashinfer_prompt_kernel", _prompt_kernel(kv_dtype))


def _prompt_kernel(kv_dtype: str) -> str:
    """That the adapter takes on Hopper."""
    return "fa3" if kv_dtype == "auto" else "fa2"


def build(folder: Path) -> list[str]:
    """Compile what is missing there. Returns the modules' names."""
    from tests.helpers import cudart
    from tests.helpers.cudart.served import STEPS, TREE, Served

    runtime = cudart.install(folder)
    from flashinfer.jit.quantization import gen_quantization_module  # pyright: ignore[reportMissingImports]

    with _loaded_modules() as names:
        gen_quantization_module().build_and_load()  # packs the masks of trees
        for shape, kernel in wanted():
            served = Served(runtime, shape, 256, kernel)
            for pasts, num_new in STEPS.values():
                served.plan(pasts, num_new)
                served.launch()
            served.plan([20, 300], [5, 5], TREE)
            served.launch()
            runtime.forget()
    (folder / LIST).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return list(names)


@contextmanager
def _loaded_modules() -> Iterator[dict[str, None]]:
    """Names of those that the package loads, in order; a line is printed as each is there."""
    from flashinfer.jit.core import JitSpec  # pyright: ignore[reportMissingImports]

    load, names = JitSpec.build_and_load, dict[str, None]()

    def loaded(spec: Any) -> Any:
        started = time.monotonic()
        module = load(spec)
        names[spec.name] = None
        print(f"{time.monotonic() - started:7.1f} s  {spec.name}", flush=True)
        return module

    JitSpec.build_and_load = loaded
    try:
        yield names
    finally:
        JitSpec.build_and_load = load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=MODULES)
    folder: Path = parser.parse_args().folder.resolve()
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    print(f"{len(build(folder))} modules in {folder}")


if __name__ == "__main__":
    main()
