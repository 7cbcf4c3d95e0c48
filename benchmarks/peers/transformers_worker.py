"""transformers' ``generate`` in this process, static batches: ``transformers_worker.py MODEL_FOLDER``."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from worker import serve


class Clock(StoppingCriteria):
    """Stops nothing, and looks at the time after each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Engine:
    """Batches of as many requests as may be under way; each starts when the one before has ended."""

    def __init__(self) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self._model = AutoModelForCausalLM.from_pretrained(
            sys.argv[1], dtype=torch.bfloat16, use_safetensors=True
        ).eval()

    def run(self, concurrency: int, requests: list[dict[str, Any]]) -> dict[str, Any]:
        started = time.perf_counter()
        replies: list[dict[str, Any]] = []
        for first in range(0, len(requests), concurrency):
            replies += self._generate(requests[first : first + concurrency])
        return {"seconds": time.perf_counter() - started, "replies": replies}

    def _generate(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        ids = torch.tensor([request["prompt"] for request in batch])
        count = batch[0]["num_output"]
        clock = Clock()
        sent = time.perf_counter()
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return [{"sent": sent, "times": clock.times, "token_ids": row.tolist()} for row in made[:, ids.shape[1] :]]


if __name__ == "__main__":
    serve(lambda: Engine().run)
