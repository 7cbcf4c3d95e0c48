"""The executor of a tensor-parallel group: a process for each rank, all on this machine."""

from fwk import ExecutorSpec, Options, hookimpl, option


class ProcessesOptions(Options):
    """Options of ``executors.processes``."""

    watchdog_timeout: float = option(
        300.0, "Seconds a step may take before its workers count as hung and the engine ends.", gt=0, le=86400
    )


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        ExecutorSpec(
            name="processes",
            load="fwk_executors.processes.executor:ProcessesExecutor",
            options=ProcessesOptions,
            max_tp_size=None,
            summary="a process for each tensor-parallel rank (gloo, NCCL): the next step is planned while one runs",
        )
    ]
