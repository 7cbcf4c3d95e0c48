"""KServe's generate extension, on fwk."""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="kserve",
            load="fwk_kserve.dialect:KServeDialect",
            summary="KServe's generate extension: /v2/models/NAME/generate and generate_stream",
        )
    ]
