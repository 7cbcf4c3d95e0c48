"""The loader: a folder's config.json and tokenizer, and the weights of a running server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint, Loader, WeightSource
from fwk.types import PoolingConfig
from fwk_loaders._common import ModelFolder
from fwk_loaders.remote_instance import RemoteInstanceOptions
from fwk_loaders.remote_instance.connection import Seed
from fwk_loaders.remote_instance.index import difference, fetch_index

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class RemoteInstanceLoader(Loader):
    """Opens a folder with a config.json; the seed is asked what it has at once, and for tensors when they are read."""

    @classmethod
    def reads(cls, path: Path) -> str | None:
        """Weights need not be there."""
        if not path.is_dir():
            return "needs a folder"
        return None if (path / "config.json").is_file() else "needs a folder with a config.json"

    def open(self, path: Path) -> Checkpoint:
        """Raises ``ModelLoadError``, also when the seed does not answer or serves another model."""
        why = self.reads(path)
        if why is not None:
            raise ModelLoadError(f"{path}: the remote_instance loader {why}")
        options: RemoteInstanceOptions = self.context.options or RemoteInstanceOptions()
        host = options.remote_instance_weight_loader_seed_instance_ip
        port = options.remote_instance_weight_loader_seed_instance_service_port
        if host is None or port is None:
            raise ModelLoadError(
                "--load-format remote_instance needs the server whose weights it reads: "
                "--remote-instance-weight-loader-seed-instance-ip and "
                "--remote-instance-weight-loader-seed-instance-service-port"
            )
        key = options.remote_instance_weight_loader_seed_api_key
        return RemoteCheckpoint(path, lambda: Seed(host, port, key, options.remote_instance_weight_loader_timeout))


class RemoteCheckpoint(Checkpoint):
    """One folder, and what the seed had when it was opened."""

    def __init__(self, path: Path, seed: Callable[[], Seed]) -> None:
        self.path = path
        self._folder = ModelFolder(path)
        self._seed = seed
        asked = seed()
        try:
            self._index = fetch_index(asked)
            other = difference(self._config, self._index.config)
            if other is not None:
                raise asked.refusal(f"serves another model than {path}: {other} (config.json)")
        finally:
            asked.close()

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._folder.config()

    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self._config

    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json; empty when there is none."""
        return self._folder.generation_config()

    def tokenizer(self) -> Tokenizer:
        """tokenizer.json."""
        return self._folder.tokenizer()

    def tokenizer_config(self) -> Mapping[str, Any]:
        """tokenizer_config.json; empty when there is none."""
        return self._folder.tokenizer_config()

    def chat_template(self) -> str | None:
        """chat_template.jinja or the one in tokenizer_config.json."""
        return self._folder.chat_template()

    def pooling(self) -> PoolingConfig | None:
        """The folder's."""
        return self._folder.pooling()

    def weights_identity(self) -> str:
        """The seed's word for its weights, wherever it listens."""
        return self._index.identity

    def weights(self) -> WeightSource:
        """The tensors, each fetched when it is read."""
        from fwk_loaders.remote_instance.weights import RemoteWeights  # noqa: PLC0415 - imports torch

        quantization = self._config.get("quantization_config")
        return RemoteWeights(self._seed(), self._index, quantization if isinstance(quantization, dict) else {})
