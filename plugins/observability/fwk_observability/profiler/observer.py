"""The routes: begin a profile in all workers, end it, and name the files."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fwk.errors import ConfigError, FwkError, InvalidRequest, RequestFailed
from fwk.interfaces.observer import Observer, ObserverContext
from fwk_observability.profiler import ProfilerOptions
from fwk_process.folders import output_folder

if TYPE_CHECKING:
    from fastapi import FastAPI

POLL_SECONDS = 0.1
_NOT_HERE = ("start_step", "profile_by_stage", "profile_stages", "merge_profiles", "profile_prefix")
"""Further fields of SGLang's, which its benchmark sends unset."""

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class StartProfile(BaseModel):
    """``POST /start_profile``: the fields of SGLang's that have a meaning here."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, max_length=256)  # which one, on a server of several
    output_dir: str | None = Field(None, max_length=256)
    num_steps: int | None = Field(None, ge=1)
    activities: list[str] | None = Field(None, min_length=1, max_length=8)
    with_stack: bool = False
    record_shapes: bool = False
    profile_id: str | None = Field(None, max_length=64, pattern=_NAME)

    @model_validator(mode="before")
    @classmethod
    def _as_benchmarks_send_it(cls, data: Any) -> Any:
        """``vllm bench serve --profile`` sends the completion that it will measure; vLLM does not read it."""
        if not isinstance(data, dict):
            return data
        if "prompt" in data or "messages" in data:
            return {"model": data.get("model")}
        return {name: value for name, value in data.items() if value or name not in _NOT_HERE}

    @field_validator("activities")
    @classmethod
    def _are_known(cls, activities: list[str] | None) -> list[str] | None:
        for name in activities or ():
            if name not in ("CPU", "GPU", "MEM"):
                raise ValueError(f"{name[:32]!r} is none of CPU, GPU and MEM")
        return activities


class ProfilerObserver(Observer):
    """Tells the workers of all engines what the administrator wants."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self._options: ProfilerOptions = context.options
        if not context.has_admin:
            raise ConfigError(
                "--profiler-dir: profiles are the administrator's to take, and there is none: add --admin-api-key KEY"
            )
        self._lock = asyncio.Lock()
        self._folder = output_folder(self._options.profiler_dir or "", "--profiler-dir")

    def admin_routes(self, app: FastAPI) -> None:
        @app.post("/start_profile")
        async def start_profile(order: StartProfile | None = None) -> dict[str, Any]:
            return await asyncio.shield(asyncio.ensure_future(self.start(order or StartProfile.model_validate({}))))

        @app.post("/stop_profile")
        async def stop_profile() -> dict[str, Any]:
            return await asyncio.shield(asyncio.ensure_future(self.stop()))

    async def start(self, order: StartProfile) -> dict[str, Any]:
        """Begin a profile in every worker, or in none. Raises ``InvalidRequest``."""
        most = self._options.profiler_max_steps
        if order.num_steps is not None and order.num_steps > most:
            raise InvalidRequest(f"num_steps is {order.num_steps}, --profiler-max-steps {most}", "num_steps")
        settings = {
            "folder": str(self._inside(order.output_dir)),
            "name": order.profile_id or f"{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**9:09}",
            "num_steps": order.num_steps or most,
            "activities": order.activities,
            "with_stack": order.with_stack,
            "record_shapes": order.record_shapes,
        }
        async with self._lock:
            await self._must_be_idle()
            try:
                await self.context.call_workers("start", settings)
            except FwkError:
                await self.context.call_workers("cancel")
                raise
        return {"success": True, "num_steps": settings["num_steps"], "output_dir": settings["folder"]}

    async def stop(self) -> dict[str, Any]:
        """End the profile, unless it has ended, and wait for its files. Raises ``InvalidRequest``."""
        async with self._lock:
            await self.context.call_workers("stop")
            while None in (files := await self._files()):
                await asyncio.sleep(POLL_SECONDS)
        failed = [file["error"] for file in files if file["error"]]
        if failed:
            raise RequestFailed(f"a trace could not be written: {failed[0]}")
        return {"success": True, "files": [file["path"] for file in files]}

    async def _files(self) -> list[Any]:
        """What each worker has written; None while it has not."""
        return [file for engine in await self.context.call_workers("file") for file in engine]

    async def _must_be_idle(self) -> None:
        states = [state for engine in await self.context.call_workers("state") for state in engine]
        if "profiling" in states:
            raise InvalidRequest("a profile is under way: POST /stop_profile first")
        if "writing" in states:
            raise InvalidRequest("the last profile is still being written: try again")

    def _inside(self, name: str | None) -> Path:
        """A folder within that of ``--profiler-dir``."""
        folder = Path(self._folder, name or "")
        if ".." in folder.parts or not folder.is_relative_to(self._folder) or "\0" in (name or ""):
            raise InvalidRequest("output_dir must lie within --profiler-dir: a folder's name", "output_dir")
        if name and not all(re.fullmatch(_NAME, part) for part in folder.relative_to(self._folder).parts):
            raise InvalidRequest("output_dir must be of letters, digits and _ . -", "output_dir")
        return folder
