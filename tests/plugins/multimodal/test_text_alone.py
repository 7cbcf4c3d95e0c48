"""A request of text alone costs a model that sees what it costs its text model: the same operators, calls and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.seeing import SEEING, write_text_alone
from torch.utils._python_dispatch import TorchDispatchMode

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.interfaces.graphs import StepSize
from fwk.types import Batch
from fwk_executors.inprocess.executor import InProcessExecutor
from fwk_multimodal.media.engine import MediaPrompts
from fwk_multimodal.media.worker import MediaRows

SAMPLING = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(9, 60)), [8, 8, 9]]
"""In chunks, several in a step, and then decoded."""
EAGER = {"attention_backend": "torch", "operator_backend": "torch", "disable_cuda_graph": True}
PARTS = {
    MediaRows: ("begin", "inputs", "calls_layers", "computed", "forget"),
    MediaPrompts: ("check", "limit", "cache_ids", "new", "step", "event", "restorable", "left"),
}


class Operators(TorchDispatchMode):
    """Counts torch's by name: every launch and every copy is one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls of the feature's parts, and the bytes of steps on their way to workers."""
    found: Counter[str] = Counter()

    def counting(method: Any, name: str) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            found[name] += 1
            return method(*args, **given)

        return call

    launch = InProcessExecutor.launch

    def launched(self: InProcessExecutor, batch: Batch) -> Any:
        found["steps"] += 1
        found["bytes"] += len(msgspec.msgpack.encode(batch))
        return launch(self, batch)

    with pytest.MonkeyPatch.context() as patching:
        for cls, names in PARTS.items():
            for name in names:
                patching.setattr(cls, name, counting(getattr(cls, name), f"{cls.__name__}.{name}"))
        patching.setattr(InProcessExecutor, "launch", launched)
        yield found


def served(folder: Path, **options: Any) -> tuple[list[list[int]], Counter[str], Counter[str], list[StepSize]]:
    """Tokens, operators, calls and the sizes of steps that were replayed, of one that has run before."""
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_total_tokens": 2048,
        "max_decode_gap": 0,  # steps are as large as they may be, whatever they take
        **options,
    }
    with counted_calls() as calls, fwk.LLM(str(folder), dtype="float32", chunked_prefill_size=16, **settings) as llm:
        llm.generate([[200]], SAMPLING)
        calls.clear()
        graph = getattr(llm.engine.executor._worker._runner.model, "graph", None)  # type: ignore[attr-defined]
        replayed: list[StepSize] = []
        if graph is not None:
            replay = graph.replay
            graph.replay = lambda size: (replayed.append(size), replay(size))[1]
        with Operators() as operators:
            done = llm.generate(PROMPTS, SAMPLING)
    return [one.token_ids for one in done], operators.found, calls, replayed


GATED = ("idefics3", "qwen2_5_vl", "gemma3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] * (n not in GATED)) for n in SEEING])
def test_text_alone_costs_what_the_text_model_does(name: str, tmp_path: Path) -> None:
    seeing, text = tmp_path / "seeing", tmp_path / "text"
    for folder in (seeing, text):
        folder.mkdir()
    SEEING[name].write(seeing)
    write_text_alone(text, seeing, SEEING[name].text)
    for options in (EAGER, {}) if native.refusal() is None else (EAGER,):
        tokens, operators, calls, replayed = served(seeing, **options)
        wanted_tokens, wanted_operators, wanted_calls, wanted_replayed = served(text, **options)
        assert tokens == wanted_tokens
        assert calls == wanted_calls
        assert not set(calls) - {"steps", "bytes"}, "the feature has no part in it"
        assert operators == wanted_operators
        assert replayed == wanted_replayed
