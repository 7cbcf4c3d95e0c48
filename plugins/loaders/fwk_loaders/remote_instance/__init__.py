"""Reads the weights of a server that serves the same model (the seed), over HTTP, in place of files of its own.

The model is a folder with config.json and the tokenizer, as for any other loader; weights in it are not read. The seed
gives its weights out to its administrator alone, so its ``--admin-api-key`` is needed here.
"""

import ipaddress
import re

from pydantic import field_validator

from fwk import LoaderSpec, Options, hookimpl, option

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")


class RemoteInstanceOptions(Options):
    """Options of ``loaders.remote_instance``."""

    remote_instance_weight_loader_seed_instance_ip: str | None = option(
        None,
        "With --load-format remote_instance: address or name of the server whose weights are read; https://NAME where "
        "it serves HTTPS.",
        stability="beta",
    )
    remote_instance_weight_loader_seed_instance_service_port: int | None = option(
        None, "Port of that server.", stability="beta", ge=1, le=65535
    )
    remote_instance_weight_loader_seed_api_key: str | None = option(
        None,
        "That server's --admin-api-key, without which it gives out no weights.",
        is_secret=True,
        stability="beta",
        min_length=1,
        max_length=1024,
        pattern=r"^[\x21-\x7e]*$",
    )
    remote_instance_weight_loader_timeout: float = option(
        60.0,
        "Seconds that server may take to accept a connection, to begin an answer, or for the next MiB of a tensor, "
        "until the load is given up.",
        stability="beta",
        gt=0,
        le=3600,
    )

    @field_validator("remote_instance_weight_loader_seed_instance_ip")
    @classmethod
    def _is_host(cls, given: str | None) -> str | None:
        if given is not None:
            host = given.removeprefix("https://").removeprefix("http://")
            try:
                ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
            except ValueError:
                if not _NAME.fullmatch(host):
                    raise ValueError(
                        f"{given[:80]!r} is no address: one is a name or an IP address, without port, user or path"
                    ) from None
        return given


@hookimpl
def loaders() -> list[LoaderSpec]:
    """Declare the loader."""
    return [
        LoaderSpec(
            name="remote_instance",
            load="fwk_loaders.remote_instance.loader:RemoteInstanceLoader",
            options=RemoteInstanceOptions,
            is_automatic=False,
            summary="weights of a running server, over HTTP; config.json and tokenizer from a folder here",
        )
    ]
