"""The executor of one device: the worker lives in the engine's own process."""

from fwk import ExecutorSpec, hookimpl


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        ExecutorSpec(
            name="inprocess",
            load="fwk_executors.inprocess.executor:InProcessExecutor",
            rank=20,
            summary="one worker, in the engine's process",
        )
    ]
