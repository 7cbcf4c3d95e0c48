"""Where experts are at the start, as a file says it (``--init-expert-location``)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fwk.errors import ConfigError, ModelLoadError
from fwk_files.regular import read_regular
from fwk_moe.expert_placement import TRIVIAL

MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class InitialLocation:
    """What ``--init-expert-location`` says. rows: of each layer its slots, or (is_counts) its experts' tokens."""

    source: str
    rows: list[list[int]]
    is_counts: bool

    def row(self, name: str, place: int, num_layers: int) -> list[int]:
        """A layer's: rows are those of layers with experts, or of all layers, and then by the number in its name."""
        number = re.search(r"\.(\d+)\.", f".{name}.")
        if len(self.rows) == num_layers and number is not None:
            place = int(number[1])
        if place >= len(self.rows):
            raise ModelLoadError(
                f"--init-expert-location {self.source} has {len(self.rows)} layers, and none for {name}"
            )
        return self.rows[place]


def read_location(given: str) -> InitialLocation | None:
    """None: trivial. Raises ``ConfigError`` for a file that says nothing about experts."""
    if given == TRIVIAL:
        return None
    path = Path(given).expanduser()
    try:
        found: Any = json.loads(read_regular(path, MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"--init-expert-location {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--init-expert-location {path} is no JSON file") from None
    if isinstance(found, dict):
        if "physical_to_logical_map" in found:
            return InitialLocation(given, _rows(given, found["physical_to_logical_map"]), is_counts=False)
        if "logical_count" in found:
            return InitialLocation(given, _rows(given, found["logical_count"]), is_counts=True)
        if "engines" in found:
            return InitialLocation(given, _recorded(given, found["engines"]), is_counts=True)
    raise ConfigError(
        f"--init-expert-location {path}: give physical_to_logical_map or logical_count, a list for each layer, or an "
        "answer of POST /dump_expert_distribution_record in mode stat"
    )


def _rows(source: str, found: Any) -> list[list[int]]:
    rows: list[Any] = found if isinstance(found, list) else []
    is_fine = all(isinstance(row, list) and all(type(x) is int and x >= 0 for x in row) for row in rows)
    if not rows or not is_fine:
        raise ConfigError(f"--init-expert-location {source}: each layer needs a list of whole numbers from 0 on")
    return rows


def _recorded(source: str, engines: Any) -> list[list[int]]:
    """The sum over engines of what they counted."""
    told = [engine for engine in engines if isinstance(engine, dict)] if isinstance(engines, list) else []
    parts = [_rows(source, engine.get("counts")) for engine in told]
    if not parts or any(list(map(len, rows)) != list(map(len, parts[0])) for rows in parts):
        raise ConfigError(f"--init-expert-location {source}: the record has no engines, or of different models")
    return [[sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
