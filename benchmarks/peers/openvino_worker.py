"""OpenVINO GenAI's continuous batching in this process: ``openvino_worker.py MODEL_FOLDER EOS_ID``."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import serve


class Engine:
    """Keeps as many requests under way as asked, as a closed loop of clients does."""

    def __init__(self) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        threads = {"INFERENCE_NUM_THREADS": os.cpu_count()}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", threads)
        self._eos = int(sys.argv[2])
        self._num_added = 0

    def run(self, concurrency: int, requests: list[dict[str, Any]]) -> dict[str, Any]:
        started = time.perf_counter()
        waiting = deque(enumerate(requests))
        replies: list[dict[str, Any]] = [{} for _ in requests]
        live: list[tuple[Any, dict[str, Any]]] = []
        while waiting or live:
            while waiting and len(live) < concurrency:
                place, request = waiting.popleft()
                replies[place] = {"sent": time.perf_counter(), "times": [], "token_ids": []}
                live.append((self._add(request), replies[place]))
            self._pipeline.step()
            now = time.perf_counter()
            live = [(handle, reply) for handle, reply in live if self._goes_on(handle, reply, now)]
        return {"seconds": time.perf_counter() - started, "replies": replies}

    def _add(self, request: dict[str, Any]) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["num_output"]
        config.do_sample = False
        config.eos_token_id = self._eos
        config.ignore_eos = request["schema"] is None
        if request["schema"] is not None:
            structure = openvino_genai.StructuredOutputConfig()
            structure.json_schema = request["schema"]
            config.structured_output_config = structure
        self._num_added += 1
        prompt = openvino.Tensor(np.array([request["prompt"]], dtype=np.int64))
        return self._pipeline.add_request(self._num_added, prompt, config)

    @staticmethod
    def _goes_on(handle: Any, reply: dict[str, Any], now: float) -> bool:
        is_running = handle.get_status() == openvino_genai.GenerationStatus.RUNNING
        while handle.can_read():
            for output in handle.read().values():
                reply["token_ids"] += list(output.generated_ids)
                reply["times"] += [now] * len(output.generated_ids)
        return is_running


if __name__ == "__main__":
    serve(lambda: Engine().run)
