"""The part in the server: loads vectors, and sends their keys along with the requests that name them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import load

from fwk.errors import InvalidRequest, what_is_wrong
from fwk.interfaces.dialect import EmbedInput, GenerateInput
from fwk.interfaces.feature import Ask, RequestPart, ServerPart, ServerPartContext
from fwk_control_vectors import ControlVectorFields, ControlVectorOptions, Steering

if TYPE_CHECKING:
    from fastapi import FastAPI

Directions = dict[str, bytes]
"""By layer: float32 numbers, little-endian."""


class LoadVector(BaseModel):
    """``POST /control_vectors``."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
    path: str = Field(min_length=1, max_length=4096)


class ControlVectorRoutes(ServerPart):
    """Keeps what was loaded, so that an engine that starts in another's place gets it, too."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        self._options: ControlVectorOptions = context.options
        self._keys: dict[str, str] = {}
        self._loaded: dict[str, Directions] = {}
        self._turn = asyncio.Lock()

    def admin_routes(self, app: FastAPI) -> None:
        @app.post("/control_vectors")
        async def load_vector(body: LoadVector) -> dict[str, Any]:
            # A client that goes away meanwhile leaves no vector behind that engines have and nobody knows of.
            return await asyncio.shield(asyncio.ensure_future(self.load(body.name, body.path)))

        @app.get("/control_vectors")
        async def list_vectors() -> dict[str, Any]:
            return {"control_vectors": [self._told(name) for name in self._keys]}

        @app.delete("/control_vectors/{name}")
        async def unload_vector(name: str) -> dict[str, Any]:
            return await asyncio.shield(asyncio.ensure_future(self.unload(name)))

    def _told(self, name: str) -> dict[str, Any]:
        return {"name": name, "layers": sorted(map(int, self._loaded[self._keys[name]]))}

    async def load(self, name: str, path: str) -> dict[str, Any]:
        """Load a file under a name; what was loaded. Raises ``InvalidRequest``."""
        async with self._turn:
            if name in self._keys:
                raise InvalidRequest(f"a control vector {name!r} is loaded already; delete it first", "name")
            directions = await asyncio.to_thread(_read, Path(path), self._options.control_vector_max_bytes)
            key = name + "@" + hashlib.sha256(repr(sorted(directions.items())).encode()).hexdigest()[:16]
            await self.context.ask("load", key, directions)
            self._keys[name], self._loaded[key] = key, directions
            return self._told(name)

    async def unload(self, name: str) -> dict[str, Any]:
        """Take no more requests for it; those under way end with it. Raises ``InvalidRequest``."""
        async with self._turn:
            if name not in self._keys:
                raise InvalidRequest(f"no control vector {name!r} is loaded", "name")
            key = self._keys.pop(name)
            del self._loaded[key]
            await self.context.ask("unload", key)
            return {"name": name}

    async def engine_begins(self, ask: Ask) -> None:
        for key, directions in list(self._loaded.items()):
            await ask("load", key, directions)

    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        return {"load": self.load, "unload": self.unload}

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        if not isinstance(item, GenerateInput) or not item.sampling.extra.get("control_vector"):
            return None
        return Steered(self._keys, item.sampling.extra)


class Steered(RequestPart):
    """A request that names a vector."""

    def __init__(self, keys: dict[str, str], extra: dict[str, Any]) -> None:
        self._keys = keys
        self._extra = extra

    async def enter(self, item: GenerateInput) -> Steering:
        try:
            asked = ControlVectorFields.model_validate(
                {k: v for k, v in self._extra.items() if k.startswith("control_")}
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise InvalidRequest(f"{name}: {what_is_wrong(first, repr(first['input']))}", name) from None
        key = self._keys.get(asked.control_vector)
        if key is None:
            raise InvalidRequest(f"no control vector {asked.control_vector!r} is loaded", "control_vector")
        self.namespace = f"{key}*{asked.control_strength!r}"  # its K/V are no other request's
        return Steering(key, asked.control_strength)


def _read(path: Path, max_bytes: int) -> Directions:
    """A safetensors file with a vector ``direction.N`` for each layer N it is added to the output of, from 0 on."""
    try:
        if path.stat().st_size > max_bytes:
            raise InvalidRequest(f"path has more than {max_bytes} bytes (--control-vector-max-bytes)", "path")
        tensors = load(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"path cannot be read: {error.strerror}", "path") from None
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(f"path is no safetensors file: {error}", "path") from None
    found: Directions = {}
    for name, tensor in tensors.items():
        prefix, _, layer = name.partition(".")
        if prefix != "direction" or not layer.isdecimal() or tensor.ndim != 1:
            raise InvalidRequest(f"path has {name!r}: its vectors are called direction.0, direction.1, ...", "path")
        values = tensor.astype("<f4")
        if not np.isfinite(values).all():
            raise InvalidRequest(f"{name} has numbers that are not finite", "path")
        found[str(int(layer))] = values.tobytes()
    if not found:
        raise InvalidRequest("path has no vector", "path")
    return found
