"""FlashInfer's own host code where there is no GPU: its modules over a CUDA runtime that computes nothing.

``install`` builds ``runtime.c`` and puts it in the place of libcudart, for this process and for good: call it in one of
its own. Kernels are compiled by nvcc for an H100 when they are first planned, which takes minutes, and are never run.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ARCHITECTURE = "9.0a"
H100 = SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=233_472,
    shared_memory_per_block_optin=232_448,
)


@dataclass(frozen=True)
class Launched:
    """A kernel, by the name that C++ gives it, and how many programs it was launched in."""

    name: str
    grid: tuple[int, int, int]


class Runtime:
    """What host code asked of the device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.num_drained = 0
        self.num_overwritten = 0
        library.cudart_launch.restype = ctypes.c_char_p

    def launches(self) -> list[Launched]:
        """Since the last call."""
        sizes = (ctypes.c_uint * 6)()
        found: list[Launched] = []
        for i in range(self._library.cudart_num_launches()):
            name = self._library.cudart_launch(i, sizes).decode()
            found.append(Launched(name, tuple(sizes[:3])))
        self._library.cudart_forget_launches()
        return found

    @property
    def num_copies(self) -> int:
        """Copies that the device has not made yet."""
        return self._library.cudart_num_copies()

    def drain(self, count: int | None = None) -> None:
        """Make the first ``count`` copies, or all. Sources that were overwritten before are counted."""
        count = self.num_copies if count is None else count
        self.num_overwritten += self._library.cudart_drain(count)
        self.num_drained += count

    def forget(self) -> None:
        """Copies and launches so far: what they are of may be freed."""
        self.num_drained += self.num_copies
        self.num_overwritten = 0
        self._library.cudart_forget_copies()
        self._library.cudart_forget_launches()


class Event:
    """Of ``torch.cuda.Event`` what the backend uses."""

    runtime: Runtime

    def __init__(self) -> None:
        self._mark = 0

    def record(self) -> None:
        self._mark = self.runtime.num_drained + self.runtime.num_copies

    def synchronize(self) -> None:
        self.runtime.drain(max(0, self._mark - self.runtime.num_drained))


def install(folder: Path) -> Runtime:
    """folder: for libraries and FlashInfer's compiled modules, which later runs find there."""
    folder.mkdir(parents=True, exist_ok=True)
    # Modules look for the names of the real libraries (-soname): these are loaded, so those never are.
    _build(folder / "libcuda.so", "libcuda.so.1", Path(os.devnull))
    runtime = _build(folder / "libcudart.so", "libcudart.so.13", Path(__file__).with_name("runtime.c"))
    os.environ |= {
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "LIBRARY_PATH": str(folder),
        "MAX_JOBS": os.environ.get("MAX_JOBS", "2"),
        "FLASHINFER_JIT_DEBUG": "0",  # which FLASHINFER_JIT_VERBOSE else turns on: kernels without optimisation
        "FLASHINFER_EXTRA_CUDAFLAGS": "--compress-mode=none",  # all modules together compress better (benchmarks.gpu)
    }
    _answer_for_the_device()
    Event.runtime = Runtime(runtime)
    return Event.runtime


def _build(library: Path, soname: str, source: Path) -> ctypes.CDLL:
    flags = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{soname}"]
    subprocess.run(["gcc", *flags, "-x", "c", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _answer_for_the_device() -> None:
    """What the package asks torch of a device, which is a CPU here, and what it computes there before a launch."""
    import flashinfer
    from flashinfer.jit.attention import modules

    include = Path(flashinfer.__file__).parents[1] / "nvidia" / "cu13" / "include"
    os.environ["CPATH"] = str(include)  # of curand, which CUDA's compiler alone does not bring along
    answers = {
        "get_compute_capability": lambda device: (9, 0),
        "device_support_pdl": lambda device: True,
        "is_sm90a_supported": lambda device: True,
        "get_device_properties": lambda device: H100,
        "segment_packbits": _segment_packbits,
    }
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "flashinfer"]:
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, answer)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    make = torch.empty

    def empty(*sizes: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return make(*sizes, **settings)

    torch.empty = empty
    for planner in vars(modules).values():
        if hasattr(planner, "_validate_workspace"):  # asks for a device's memory and nothing else
            planner._validate_workspace = staticmethod(lambda *_: None)


def _segment_packbits(bits: torch.Tensor, starts: torch.Tensor, bitorder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Each segment's bits in bytes of its own: bits [starts[-1]] bool, starts [num_segments + 1]."""
    cuts = starts.tolist()
    segments = [np.packbits(bits[a:b].numpy(), bitorder=bitorder) for a, b in itertools.pairwise(cuts)]
    sizes = torch.tensor([0, *(len(segment) for segment in segments)]).cumsum(0).to(starts.dtype)
    return torch.from_numpy(np.concatenate(segments)), sizes
