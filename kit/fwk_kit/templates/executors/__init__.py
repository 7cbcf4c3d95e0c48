"""One worker, called directly."""

from __future__ import annotations

from fwk import ExecutorSpec, hookimpl


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        ExecutorSpec(
            name="mine",
            load="fwk_mine.plugin:MineExecutor",
            summary="one worker, called directly",
        )
    ]
