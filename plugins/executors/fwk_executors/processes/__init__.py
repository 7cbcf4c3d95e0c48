"""The executor of a tensor-parallel group: a process for each rank, on this machine or on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import model_validator

from fwk import ExecutorSpec, hookimpl
from fwk.config import Config, Options, option
from fwk.errors import ConfigError


class ProcessesOptions(Options):
    """Machines of a tensor-parallel run: the same command on each, but for --node-rank."""

    nnodes: int = option(
        1,
        "Machines (nodes) that share the ranks of --tensor-parallel-size and --pipeline-parallel-size evenly; start "
        "the same command on each, with its own --node-rank.",
        stability="beta",
        ge=1,
        le=1024,
    )
    node_rank: int = option(
        0,
        "Which of --nnodes this machine is: 0 serves and schedules, the others only compute for it.",
        stability="beta",
        ge=0,
        le=1023,
    )
    dist_init_addr: str | None = option(
        None,
        "HOST:PORT at which node 0 waits for the others, as they reach it; HOST alone goes with --dist-init-port.",
        aliases=["nccl-init-addr", "nccl-host", "master-addr"],
        stability="beta",
        min_length=1,
        max_length=300,
    )
    dist_init_port: int | None = option(
        None,
        "Port of --dist-init-addr, where that is a host alone.",
        aliases=["nccl-port", "master-port"],
        stability="beta",
        ge=1,
        le=65535,
    )
    dist_timeout: float = option(
        600.0,
        "Seconds in which all nodes must have come, and in which ranks that have loaded must reach each other.",
        stability="beta",
        gt=0,
        le=86400,
    )
    dist_token_file: str | None = option(
        None,
        "File with a secret of 16 bytes or more, the same on every node (openssl rand -hex 32 makes one): who does not "
        "know it can neither join nor direct a rank. Needed with --nnodes.",
        stability="beta",
        min_length=1,
    )

    @model_validator(mode="after")
    def _fit(self) -> ProcessesOptions:
        if self.nnodes == 1:
            idle = self.model_fields_set - {"nnodes"}
            given = [name for name in ("node_rank", "dist_init_addr", "dist_init_port", "dist_timeout",
                                       "dist_token_file") if name in idle and self._differs(name)]  # fmt: skip
            if given:
                raise ValueError(
                    f"--{given[0].replace('_', '-')} is for several machines: add --nnodes, or leave it out"
                )
            return self
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank}: nodes of --nnodes {self.nnodes} are 0 to {self.nnodes - 1}"
            )
        self.address()
        if self.dist_token_file is None:
            raise ValueError(
                f"--nnodes {self.nnodes} needs --dist-token-file FILE, with the same secret on every node: without it, "
                "anyone who reaches --dist-init-addr could direct the ranks (openssl rand -hex 32 > FILE makes one)"
            )
        return self

    def _differs(self, name: str) -> bool:
        return getattr(self, name) != type(self).model_fields[name].default

    def address(self) -> tuple[str, int]:
        """Host and port of ``dist_init_addr``. Raises ``ValueError`` with a sentence."""
        text, port = self.dist_init_addr, self.dist_init_port
        if text is None:
            raise ValueError(
                f"--nnodes {self.nnodes} needs --dist-init-addr HOST:PORT, where node 0 waits for the others"
            )
        host, colon, digits = text.removeprefix("tcp://").rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):  # a host alone, or an IPv6 address without a port
            host, digits = text.removeprefix("tcp://"), "" if port is None else str(port)
        elif port is not None:
            raise ValueError(f"--dist-init-addr {text} has a port: leave --dist-init-port out")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not digits.isdecimal() or not 0 < int(digits) < 65536:
            raise ValueError(f"--dist-init-addr {text}: must be HOST:PORT, such as 10.0.0.1:20000")
        return host, int(digits)


@dataclass(frozen=True, kw_only=True)
class ProcessesSpec(ExecutorSpec):
    """Ranks of several machines are refused where an engine is not the server's only one, or does not stay."""

    def check_server(self, configs: Sequence[Config], options: Any) -> None:
        if options is None or options.nnodes == 1:
            return
        engine, nodes = configs[0].engine, f"--nnodes {options.nnodes}"
        if engine.tensor_parallel_size * engine.pipeline_parallel_size % options.nnodes:
            stages = engine.pipeline_parallel_size
            more = f" times --pipeline-parallel-size {stages}" if stages > 1 else ""
            raise ConfigError(
                f"{nodes} does not divide --tensor-parallel-size {engine.tensor_parallel_size}{more}, whose ranks the "
                "nodes share evenly"
            )
        if len(configs) > 1:
            raise ConfigError(f"{nodes} is not possible with several models (--also): start a server for each")
        if configs[0].server.take_over:
            raise ConfigError(f"{nodes} is not possible with --take-over: the other nodes stay with one engine")
        from fwk_executors.processes.secret import read_secret  # noqa: PLC0415 - with several machines only

        read_secret(options.dist_token_file)

    def one_engine(self, options: Any) -> tuple[str, str] | None:
        if options is None or options.nnodes == 1:
            return None
        return f"--nnodes {options.nnodes}", (
            "the other nodes stay with one engine: start a server for each, with a load balancer in front of them"
        )

    def is_local(self, options: Any) -> bool:
        return options is None or options.nnodes == 1

    def worker_node(self, options: Any) -> str | None:
        return "fwk_executors.processes.member:ProcessesNode" if options is not None and options.node_rank else None


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        ProcessesSpec(
            name="processes",
            load="fwk_executors.processes.executor:ProcessesExecutor",
            max_tp_size=None,
            has_stages=True,
            options=ProcessesOptions,
            local_options=frozenset({"node_rank", "dist_timeout", "dist_token_file"}),
            summary="a process for each tensor-parallel rank (gloo, NCCL), on one machine or several (--nnodes)",
        )
    ]
