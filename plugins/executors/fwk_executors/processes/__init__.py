"""The executor of a tensor-parallel group: a process for each rank, all on this machine."""

from fwk import ExecutorSpec, hookimpl


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        ExecutorSpec(
            name="processes",
            load="fwk_executors.processes.executor:ProcessesExecutor",
            max_tp_size=None,
            summary="a process for each tensor-parallel rank (gloo, NCCL): the next step is planned while one runs",
        )
    ]
