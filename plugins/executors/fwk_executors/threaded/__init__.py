"""The executor of one device whose steps overlap with their planning: the worker has a thread of its own."""

from fwk import ExecutorSpec, hookimpl


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        ExecutorSpec(
            name="threaded",
            load="fwk_executors.threaded.executor:ThreadedExecutor",
            rank=10,
            summary="one worker, in a thread of the engine's process: the next step is planned while one runs",
        )
    ]
