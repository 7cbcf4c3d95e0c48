"""The loader: a folder's config.json and tokenizer, and the weights of a running server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint, Loader, WeightSource
from fwk_loaders._common import FolderCheckpoint
from fwk_loaders.remote_instance import RemoteInstanceOptions
from fwk_loaders.remote_instance.connection import Seed
from fwk_loaders.remote_instance.index import difference, fetch_index


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


class RemoteCheckpoint(FolderCheckpoint):
    """One folder, and what the seed had when it was opened."""

    def __init__(self, path: Path, seed: Callable[[], Seed]) -> None:
        super().__init__(path)
        self._seed = seed
        asked = seed()
        try:
            self._index = fetch_index(asked)
            other = difference(self._config, self._index.config)
            if other is not None:
                raise asked.refusal(f"serves another model than {path}: {other} (config.json)")
        finally:
            asked.close()

    def weights_identity(self) -> str:
        """The seed's identity of its weights, independent of its address."""
        return self._index.identity

    def weights(self) -> WeightSource:
        """The tensors, each fetched when it is read."""
        from fwk_loaders.remote_instance.weights import RemoteWeights  # noqa: PLC0415 - imports torch

        return RemoteWeights(self._seed(), self._index, self._quantization)
