"""A suite's last test: an engine with the plugin, on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from fwk.plugins import FAMILIES, Registered
from fwk.plugins.discovery import OWN
from fwk.plugins.families import NAMED
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.serving import TINY, plain_tokens, tokens_of


class ServedSuite(PluginSuite):
    """For families that take part in an engine's steps.

    is_exact: whether the engine must say what it says without the plugin.
    model_config: config.json of the model to serve.
    """

    is_exact: ClassVar[bool] = True
    model_config: ClassVar[dict[str, Any]] = TINY

    def selected(self, item: Registered) -> dict[str, Any]:
        """The options of ``fwk serve`` that select the plugin."""
        option = FAMILIES[self.family].option
        if self.family in NAMED and item.package != OWN:
            return {"enable_plugin": [item.key]}
        return {} if option is None else {option: item.name}

    def config_to_serve(self) -> Mapping[str, Any]:
        return self.model_config

    def test_serves_a_tiny_model(self, item: Registered) -> None:
        """Alone and together, the same tokens; and those of the plain engine, where the plugin may change none."""
        if self.declaration is not None:
            pytest.skip("only an installed plugin is served: install it, and set plugin")
        self.skip_where_refused(item)
        package = None if self.family == "executors" else item.package  # an executor's workers discover for themselves
        tokens = tokens_of(self.model_config, package, **self.selected(item) | dict(self.serve_with), **self.options)
        if self.is_exact:
            assert tokens == plain_tokens(json.dumps(self.model_config)), "the engine says something else than without"
