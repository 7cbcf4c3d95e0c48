"""Options of every transport whose workers wait for decode servers at an address."""

from __future__ import annotations

from pydantic import field_validator

from fwk import Options, option


class ListenerOptions(Options):
    """Where workers of a prefill server wait for those of decode servers."""

    disaggregation_transfer_host: str = option(
        "127.0.0.1",
        "Address of this machine at which workers of a prefill server wait for those of decode servers.",
        stability="experimental",
        min_length=1,
        max_length=253,
    )
    disaggregation_bootstrap_port: int = option(
        0,
        "Port at which the first worker of a prefill server waits for decode servers, the next one at the next, and "
        "after these for decode servers with other numbers of ranks; 0: any free ones.",
        stability="experimental",
        ge=0,
        le=65535,
    )

    @field_validator("disaggregation_transfer_host")
    @classmethod
    def _is_an_address(cls, host: str) -> str:
        if host in ("0.0.0.0", "::"):
            raise ValueError("must be an address that decode servers reach, not all of this machine")
        return host
