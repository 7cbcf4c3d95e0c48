"""Counts and sums by length class: all a mean needs, and nothing that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord

if TYPE_CHECKING:
    from fastapi import FastAPI

BOUNDS = (128, 1024, 8192)
NAME = "fwk_aging_time_to_first_token_seconds"


class AgingMetrics(Observer):
    """A count, a sum and a maximum for each class of lengths."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        classes = [*(str(bound) for bound in BOUNDS), "+Inf"]
        self._counts = dict.fromkeys(classes, 0)
        self._sums = dict.fromkeys(classes, 0.0)
        self._largest = dict.fromkeys(classes, 0.0)

    def routes(self, app: FastAPI) -> None:
        async def metrics() -> PlainTextResponse:
            await self.context.settle()  # observers are told a moment later, on a thread of their own
            return PlainTextResponse(self.text(), media_type="text/plain; version=0.0.4")

        app.add_api_route("/aging/metrics", metrics, methods=["GET"])

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        if record.num_output_tokens != num_tokens:  # not the first
            return
        name = next((str(bound) for bound in BOUNDS if record.num_prompt_tokens <= bound), "+Inf")
        waited = (record.last_token or record.arrived) - record.arrived
        self._counts[name] += 1
        self._sums[name] += waited
        self._largest[name] = max(self._largest[name], waited)

    def text(self) -> str:
        """Prometheus' text format."""
        lines = [f"# TYPE {NAME} summary"]
        for name, count in self._counts.items():
            label = f'{{max_prompt_tokens="{name}"}}'
            lines += [f"{NAME}_count{label} {count}", f"{NAME}_sum{label} {self._sums[name]:.6f}"]
        lines.append(f"# TYPE {NAME}_max gauge")
        lines += [f'{NAME}_max{{max_prompt_tokens="{name}"}} {most:.6f}' for name, most in self._largest.items()]
        return "\n".join(lines) + "\n"
