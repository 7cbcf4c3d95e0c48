"""The routes: begin a record in all engines, read it, end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fwk.errors import ConfigError
from fwk.interfaces.observer import Observer, ObserverContext
from fwk_observability.expert_distribution import ExpertDistributionOptions

if TYPE_CHECKING:
    from fastapi import FastAPI


class ExpertDistributionObserver(Observer):
    """Tells the workers of all engines what the administrator wants."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        options: ExpertDistributionOptions = context.options
        mode, folder = options.expert_distribution_recorder_mode, options.expert_distribution_recorder_folder
        self._mode = mode
        if mode is None:
            return
        if not context.has_admin:
            raise ConfigError(
                "--expert-distribution-recorder-mode: records are the administrator's to take, and there is none: add "
                "--admin-api-key KEY"
            )
        if mode != "stat" and folder is None:
            raise ConfigError(
                f"--expert-distribution-recorder-mode {mode} writes files: add "
                "--expert-distribution-recorder-folder DIR"
            )
        if mode == "stat" and folder is not None:
            raise ConfigError(
                "--expert-distribution-recorder-folder is for the modes per_pass and per_token: what stat counts is "
                "the answer of POST /dump_expert_distribution_record"
            )

    def admin_routes(self, app: FastAPI) -> None:
        if self._mode is None:
            return

        @app.post("/start_expert_distribution_record")
        async def start_expert_distribution_record() -> dict[str, Any]:
            await self.context.call_workers("start")
            return {"success": True}

        @app.post("/stop_expert_distribution_record")
        async def stop_expert_distribution_record() -> dict[str, Any]:
            await self.context.call_workers("stop")
            return {"success": True}

        @app.post("/dump_expert_distribution_record")
        async def dump_expert_distribution_record() -> dict[str, Any]:
            answers = await self.context.call_workers("dump")
            # The ranks of an engine see the same tokens; the first one tells.
            return {"mode": self._mode, "engines": [ranks[0] for ranks in answers]}
