"""What layers compute in each step, in files: to compare implementations, kernels and weight formats.

Off until ``--debug-tensor-dump-output-folder`` is given. The files hold what users' words become, so only the server's
user may read them.
"""

from fwk import ObserverSpec, Options, hookimpl, option


class TensorDumpOptions(Options):
    """Options of ``observers.tensor_dump``."""

    debug_tensor_dump_output_folder: str | None = option(
        None,
        "Write what layers compute to this folder, a safetensors file for each step and worker. Steps are not captured "
        "then.",
        min_length=1,
    )
    debug_tensor_dump_layers: tuple[str, ...] = option(
        (),
        "Layers to write: numbers, or patterns of names such as 'layers.*.mlp'. Empty: all.",
        needs="debug_tensor_dump_output_folder",
    )
    debug_tensor_dump_max_steps: int = option(
        100,
        "Steps that are written, from the first one on.",
        needs="debug_tensor_dump_output_folder",
        ge=1,
        le=1_000_000,
    )


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="tensor_dump",
            load="fwk.interfaces.observer:Observer",
            worker="fwk_observability.tensor_dump.worker:WorkerDump",
            options=TensorDumpOptions,
            enabled_by=("debug_tensor_dump_output_folder",),
            reads_layers=True,
            summary="what layers compute in each step, in safetensors files",
        )
    ]
