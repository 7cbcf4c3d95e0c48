"""The sizes of steps that are captured, each by itself, where a capture serves one size."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.device import Device

SMALLEST_SIZES = (1, 2, 4)
FINE, COARSE = 8, 16
MANY = 256
"""Sequences from which sizes are COARSE apart, below FINE: a padded row costs what a real one does."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Numbers of rows, smallest first; with ``pads``, a step between two of them is padded to the larger.

    A row is a sequence's next token, or a draft that is verified.
    """

    sizes: tuple[int, ...]
    pads: bool = True

    def padding(self, num_rows: int) -> int | None:
        """Rows to add to a step of so many; None: it is not captured."""
        at = bisect_left(self.sizes, num_rows)
        if at == len(self.sizes):
            return None
        missing = self.sizes[at] - num_rows
        return missing if self.pads or not missing else None

    def with_drafts(self, max_drafts: int, max_rows: int) -> GraphSizes:
        """Also those of as many sequences that all have ``max_drafts``, up to ``max_rows``.

        With padding, those alone that are more than the largest size: the others are close to one that there is.
        """
        largest = self.sizes[-1] if self.sizes and self.pads else 0
        drafted = [size * (1 + max_drafts) for size in self.sizes]
        more = {size for size in drafted if largest < size <= max_rows}
        return GraphSizes(tuple(sorted({*self.sizes, *more})), self.pads)


def graph_sizes(config: Config, device: Device) -> GraphSizes:
    """The sizes that the options ask for; none where nothing is captured or one capture serves all sizes.

    Raises ``ConfigError`` for options that would do nothing.
    """
    options = config.engine
    given = {
        "--cuda-graph-bs": options.cuda_graph_bs,
        "--disable-cuda-graph-padding": options.disable_cuda_graph_padding,
    }
    for name in (name for name, value in given.items() if value):
        if options.disable_cuda_graph:
            raise ConfigError(f"{name} and --disable-cuda-graph: nothing is captured, so leave one of them out")
        if device.is_host:
            raise ConfigError(f"{name}: on this device one capture serves steps of all sizes; leave it out")
    if options.disable_cuda_graph or device.is_host:
        return GraphSizes(())
    most = min(options.cuda_graph_max_bs, options.max_running_requests)
    for size in options.cuda_graph_bs:
        if size < 1:
            raise ConfigError(f"--cuda-graph-bs {size}: a step has at least 1 sequence")
        if size > most:
            limit = "--cuda-graph-max-bs" if most == options.cuda_graph_max_bs else "--max-running-requests"
            raise ConfigError(f"--cuda-graph-bs {size} is more than {limit} {most}: no captured step is as large")
    sizes = options.cuda_graph_bs or default_sizes(most)
    return GraphSizes(tuple(sorted(set(sizes))), not options.disable_cuda_graph_padding)


def default_sizes(most: int) -> tuple[int, ...]:
    """Sizes up to ``most``, which is one of them."""
    sizes = {*SMALLEST_SIZES, *range(FINE, MANY, FINE), *range(MANY, most, COARSE), most}
    return tuple(sorted(size for size in sizes if size <= most))
