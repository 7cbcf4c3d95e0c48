"""fwk behind Ray Serve: one engine in each replica. Run it: serve run deploy.ray_serve:app (pip install 'ray[serve]').

POST {"prompt": "...", "max_tokens": 64} to /. Ray scales replicas; requests of one replica share a batch.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.requests import Request

import fwk

FIELDS = {"max_tokens", "temperature", "top_p", "seed"}


@serve.deployment(ray_actor_options={"num_cpus": 4}, max_ongoing_requests=64)
class Completions:
    """A model."""

    def __init__(self, model: str | None = None) -> None:
        self._llm = fwk.AsyncLLM(model)

    async def __call__(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        sampling = fwk.SamplingParams(**{name: value for name, value in body.items() if name in FIELDS})
        [done] = await self._llm.generate(body["prompt"], sampling)
        return {"text": done.text, "finish_reason": done.finish_reason}


app = Completions.bind()
