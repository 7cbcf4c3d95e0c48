"""The server's log: statistics every few seconds, a line per request when asked, totals at the end.

Prompts and outputs are written only with ``--log-requests-level`` 2 or 3.
"""

from fwk import ObserverSpec, Options, hookimpl, option


class LogOptions(Options):
    """Options of ``observers.log``."""

    log_stats_interval: float = option(
        10.0,
        "Seconds between two lines of statistics in the log, while there is work; 0: none.",
        turns={"disable-log-stats": 0},
        ge=0,
        le=86400,
    )
    log_requests: bool = option(False, "Write a line for each request when it ends.", aliases=["enable-log-requests"])
    log_requests_level: int = option(
        1,
        "What the lines of --log-requests tell. 0: tokens and times; 1: sampling parameters too; 2: the beginnings of "
        "prompts and outputs too; 3: all of them.",
        ge=0,
        le=3,
    )
    max_log_len: int = option(
        2048, "Characters of a prompt, and of an output, that --log-requests-level 2 writes.", ge=1, le=2**20
    )
    gc_warning_threshold_secs: float = option(
        0.0,
        "Warn of each garbage collection of the server's process, not the engines', that takes as many seconds; "
        "0: of none.",
        ge=0,
        le=3600,
    )


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="log",
            load="fwk_observability.log.observer:LogObserver",
            options=LogOptions,
            summary="statistics and requests in the log",
        )
    ]
