"""FlashInfer's adapter on the pretended device, over the stand-in for FlashInfer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fwk import AttentionBackendSpec, Needs, hookimpl
from fwk_attention import flashinfer
from tests.helpers import fake_flashinfer
from tests.helpers.pretend_cuda.graphs import kernel

DTYPES = ("float32", "bfloat16", "float16")


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    """FlashInfer's adapter, which runs where there is neither FlashInfer nor its GPU."""
    (real,) = flashinfer.attention_backends()
    return [replace(real, name="flashinfer-stand-in", needs=Needs(), dtypes=DTYPES, head_sizes=None, rank=-99)]


@contextmanager
def flashinfer_stand_in() -> Iterator[None]:
    """Within, FlashInfer's wrappers are those of ``fake_flashinfer``, each run of which is one launch."""
    fake_flashinfer.PLANS.clear()
    fake_flashinfer.MADE.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_flashinfer)
        for name in ("backend", "wrappers"):
            patch.delitem(sys.modules, f"fwk_attention.flashinfer.{name}", raising=False)
        wrappers = importlib.import_module("fwk_attention.flashinfer.wrappers")
        patch.setattr(
            wrappers.PlannedWrapper,
            "run",
            lambda self, *tensors, **settings: kernel(self._wrapper.run, "flashinfer", *tensors, **settings),
        )
        yield
    for name in ("backend", "wrappers"):
        sys.modules.pop(f"fwk_attention.flashinfer.{name}", None)
