"""What every model implementation must do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fwk.interfaces.model import Encoder, Model, ModelSpec
from fwk.plugins import Registered
from fwk.types import ModelConfig, SamplingParams
from fwk_kit.testing.base import PluginSuite, alongside
from fwk_kit.testing.serving import TINY, tokens_of


class ModelSuite(PluginSuite):
    """The same tokens however a text is cut into steps; those of transformers, where it knows the architecture.

    config: config.json of a tiny model of the declared architecture.
    reference_config: the same for transformers, where the model's own name is not one it knows: fields to change.
    """

    family = "models"
    config: ClassVar[dict[str, Any]] = TINY
    reference_config: ClassVar[dict[str, Any] | None] = None

    def spec(self, item: Registered) -> ModelSpec:
        """The declaration."""
        assert isinstance(item.declaration, ModelSpec)
        return item.declaration

    def generating(self, item: Registered) -> None:
        """Skip for models that make embeddings, and for what is not installed."""
        self.skip_where_refused(item)
        if self.declaration is not None or self.spec(item).runner != "generate":
            pytest.skip("only an installed model that generates is served: install it, and set plugin")

    def settings(self, item: Registered) -> dict[str, Any]:
        """Options of ``fwk serve`` that choose the implementation."""
        return {"model_impl": item.name, **self.serve_with}

    def config_to_serve(self) -> Mapping[str, Any]:
        return self.config

    def exercise(self, item: Registered) -> None:
        if self.declaration is None and self.spec(item).runner == "generate":
            tokens_of(self.config, item.package, **self.settings(item))

    def test_load_names_what_the_family_asks_for(self, item: Registered) -> None:
        from fwk.plugins import load_object  # noqa: PLC0415

        self.skip_where_refused(item)
        assert issubclass(load_object(item), Model if self.spec(item).runner == "generate" else Encoder)

    def test_its_needs_of_attention_are_said_beforehand(self, item: Registered) -> None:
        spec = self.spec(item)
        needs = spec.attention_needs(ModelConfig.from_dict(spec.normalised(self.config), "fwk_kit.testing"))
        assert needs.head_size > 0
        assert needs.num_kv_heads > 0
        assert needs.features >= spec.features

    def test_steps_make_no_difference(self, item: Registered) -> None:
        """Prompts whole or in chunks, with and without reuse of prefixes, in blocks of several sizes."""
        self.generating(item)
        whole = tokens_of(self.config, item.package, **self.settings(item))
        for settings in ({"chunked_prefill_size": 5, "page_size": 8}, {"max_prefill_tokens": 16, "page_size": 32}):
            assert tokens_of(self.config, item.package, **self.settings(item), **settings) == whole, settings

    def test_says_what_transformers_says(self, item: Registered) -> None:
        """Log-probabilities of a prompt, with the same random weights."""
        self.generating(item)
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        fields = {**self.config, **(self.reference_config or {})}
        name = fields["architectures"][0]
        model_type = fields.get("model_type") or name.removesuffix("ForCausalLM").lower()
        if model_type not in transformers.CONFIG_MAPPING:
            pytest.skip(f"transformers knows no {model_type}: set reference_config to compare with another name")
        torch.manual_seed(0)
        known = {key: value for key, value in fields.items() if key not in ("architectures", "dtype", "model_type")}
        network = (
            transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(model_type, **known), attn_implementation="eager"
            )
            .float()
            .eval()
        )
        ids = list(range(3, 40))
        with tempfile.TemporaryDirectory() as folder:
            network.save_pretrained(folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            config["architectures"] = self.config["architectures"]
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self._tokenizer(folder)
            with torch.inference_mode():
                wanted = network(torch.tensor([ids])).logits[0].log_softmax(-1)
            mine = self._scores(item, folder, ids)
        for place, (token, score) in enumerate(zip(ids[1:], mine, strict=True)):
            assert abs(score - float(wanted[place, token])) < 2e-3, (
                f"token {place + 1}: {score}, not {wanted[place, token]}"
            )

    def _tokenizer(self, folder: str) -> None:
        """A tokeniser of numbers: the suite sends ids."""
        from tokenizers import Tokenizer, models  # noqa: PLC0415

        size = int(self.config["vocab_size"])
        Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<0>")).save(
            f"{folder}/tokenizer.json"
        )

    def _scores(self, item: Registered, folder: str, ids: list[int]) -> list[float]:
        from fwk import LLM  # noqa: PLC0415

        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        with LLM(
            folder, plugins=alongside(item.package), dtype="float32", max_total_tokens=256, **self.settings(item)
        ) as llm:
            [done] = llm.generate([ids], sampling)
        assert done.prompt_logprobs is not None
        return [entry.logprob for entry in done.prompt_logprobs[1:] if entry is not None]
