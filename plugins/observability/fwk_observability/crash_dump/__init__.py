"""The requests around an engine's death, in a file: to find out which of them it died of.

Off until ``--crash-dump-folder`` is given. The files hold users' words, so only the server's user may read them.
"""

from fwk import ObserverSpec, Options, hookimpl, option


class CrashDumpOptions(Options):
    """Options of ``observers.crash_dump``."""

    crash_dump_folder: str | None = option(
        None,
        "When an engine dies, write the requests under way and those that ended shortly before, prompts and outputs "
        "included, to a file in this folder.",
        min_length=1,
    )
    crash_dump_seconds: float = option(
        300.0,
        "Seconds before an engine's death from which ended requests are written as well, 10,000 of them at most.",
        needs="crash_dump_folder",
        ge=0,
        le=86400,
    )


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="crash_dump",
            load="fwk_observability.crash_dump.observer:CrashDumpObserver",
            options=CrashDumpOptions,
            enabled_by=("crash_dump_folder",),
            summary="the requests around an engine's death, in a file",
        )
    ]
