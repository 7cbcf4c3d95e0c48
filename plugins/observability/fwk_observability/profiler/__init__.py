"""Profiles of the workers' steps by torch.profiler, as Chrome traces.

Off until ``--profiler-dir`` is given. The administrator begins and ends one with ``POST /start_profile`` and
``POST /stop_profile``, as in vLLM and SGLang.
"""

from fwk import ObserverSpec, Options, hookimpl, option


class ProfilerOptions(Options):
    """Options of ``observers.profiler``."""

    profiler_dir: str | None = option(
        None,
        "Folder of traces that POST /start_profile and /stop_profile write, for the administrator (--admin-api-key).",
        aliases=["torch-cuda-profiler-dir"],
        min_length=1,
    )
    profiler_max_steps: int = option(
        1000,
        "Steps after which a profile ends and is written that is not stopped before: it is kept in memory until then.",
        needs="profiler_dir",
        ge=1,
        le=100_000,
    )
    profiler_memory: bool = option(
        False,
        "Profiles record allocations of memory, too, if /start_profile does not name its activities.",
        aliases=["trace-memory"],
        needs="profiler_dir",
    )


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="profiler",
            load="fwk_observability.profiler.observer:ProfilerObserver",
            worker="fwk_observability.profiler.worker:WorkerProfiler",
            options=ProfilerOptions,
            enabled_by=("profiler_dir",),
            summary="profiles of the workers' steps, by POST /start_profile and /stop_profile",
        )
    ]
