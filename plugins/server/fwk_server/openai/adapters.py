"""LoRA adapters: as models of requests and lists, and their loading and unloading by the administrator.

A request names an adapter in ``model``, alone or behind the served model's name and a colon, or in SGLang's
``lora_path``. vLLM's and SGLang's routes for loading are the same but for their path, and answer as SGLang's do. Both
need the administrator's key, and refuse unless the operator has named folders to load from; nothing else can be loaded.
"""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import AdapterCard, Frontend
from fwk_server._common.body import shown
from fwk_server._common.chat.models import LoadAdapterRequest, UnloadAdapterRequest
from fwk_server._common.chat.served import model_bodies, model_body, named_by_model


class UnknownAdapter(HTTPException):
    """An adapter to unload is not loaded."""

    param = "lora_name"
    code = "adapter_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(404, f"no LoRA adapter {shown(name)} is loaded")


def list_models(frontend: Frontend) -> dict[str, Any]:
    """Each served model, then its adapters."""
    data: list[dict[str, Any]] = []
    for peer in frontend.peers:
        data += [*model_bodies(peer), *(_body(adapter, peer) for adapter in peer.adapters.values())]
    return {"object": "list", "data": data}


def retrieve_model(name: str, frontend: Frontend) -> dict[str, Any]:
    """What a name stands for in ``model``."""
    adapter = named_by_model(name, frontend)
    return _body(frontend.adapters[adapter], frontend) if adapter else model_body(frontend)


def _body(adapter: AdapterCard, frontend: Frontend) -> dict[str, Any]:
    base = model_body(frontend)
    return base | {"id": adapter.name, "created": adapter.created, "root": adapter.source, "parent": base["id"]}


async def load(asked: LoadAdapterRequest, frontend: Frontend) -> dict[str, Any]:
    """Load an adapter on every engine."""
    _check_open(frontend)
    if asked.load_inplace:
        raise InvalidRequest("load_inplace is not supported: unload the adapter first", "load_inplace")
    if asked.pinned:
        raise InvalidRequest("pinned is not supported: adapters share the slots of --max-loras-per-batch", "pinned")
    await frontend.load_adapter(asked.lora_name, asked.lora_path)
    return _loaded(frontend)


async def unload(asked: UnloadAdapterRequest, frontend: Frontend) -> dict[str, Any]:
    """Take no more requests for an adapter; those under way finish."""
    if asked.lora_name not in frontend.adapters:
        raise UnknownAdapter(asked.lora_name)
    _check_open(frontend)
    await frontend.unload_adapter(asked.lora_name)
    return _loaded(frontend)


def _check_open(frontend: Frontend) -> None:
    if not frontend.can_load_adapters:
        raise InvalidRequest(
            "LoRA adapters cannot be loaded or unloaded here: the server needs --enable-lora and --lora-dirs"
        )


def _loaded(frontend: Frontend) -> dict[str, Any]:
    return {"success": True, "loaded_adapters": {card.name: card.source for card in frontend.adapters.values()}}
