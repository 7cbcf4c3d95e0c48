"""What every feature must do, whichever parts it has."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import FEATURE_FIELDS
from fwk.interfaces.feature import EnginePart, FeatureSpec, ServerPart, WorkerPart
from fwk.plugins import Registered, load_object
from fwk.types import SamplingParams
from fwk_kit.testing.base import alongside
from fwk_kit.testing.served import ServedSuite
from fwk_kit.testing.serving import PROMPTS, TINY, plain_tokens

_PARTS = {"server": ServerPart, "engine": EnginePart, "worker": WorkerPart}
_PROMPT = PROMPTS[0]


class FeatureSuite(ServedSuite):
    """Requests without it say what they say without the feature; with it, the same alone, together, and started over.

    request: the fields of a request (``FeatureSpec.params``) that ask for the feature; none for one that no field asks.
    fields: the same of ``SamplingParams`` (``FeatureSpec.fields``), or of keyword arguments of ``fwk.LLM.generate``.
    prepare: called with the ``fwk.LLM`` before such a request, for what has to be loaded first.
    """

    family = "features"
    request: ClassVar[Mapping[str, Any]] = {}
    fields: ClassVar[Mapping[str, Any]] = {}

    def prepare(self, llm: Any) -> None:
        """Nothing has to be loaded."""

    def exclusive(self, folder: str) -> Mapping[str, Sequence[Any]]:
        """Arguments of each operation of ``FeatureSpec.exclusive``. folder: of the served model."""
        return {}

    def parts(self, item: Registered) -> dict[str, Any]:
        """The classes that the declaration names, by where they run."""
        assert isinstance(item.declaration, FeatureSpec)
        places = {where: getattr(item.declaration, where) for where in _PARTS}
        return {where: load_object(item, place) for where, place in places.items() if place}

    def test_load_names_what_the_family_asks_for(self, item: Registered) -> None:
        self.skip_where_refused(item)
        for where, part in self.parts(item).items():
            assert inspect.isclass(part), f"{where} names no class"
            assert issubclass(part, _PARTS[where]), f"{where} names no {_PARTS[where].__name__}"

    def test_what_is_sent_can_be_sent(self, item: Registered) -> None:
        assert isinstance(item.declaration, FeatureSpec)
        wire = item.declaration.wire
        for name in ("request", "sequence", "step", "result", "event", "stats"):
            kind = getattr(wire, name)
            if kind is not None:
                assert issubclass(kind, msgspec.Struct), f"wire.{name} is no msgspec.Struct"
                msgspec.msgpack.Decoder(kind)  # raises for fields that cannot be sent
        if wire.stats is not None:
            lacks = [field.name for field in msgspec.structs.fields(wire.stats) if field.required]
            assert not lacks, (
                f"wire.stats: {', '.join(lacks)} has no default: the numbers of an engine that has none yet"
            )
            numbers = msgspec.structs.asdict(wire.stats())
            assert all(isinstance(number, int | float) for number in numbers.values()), (
                "wire.stats has other than numbers"
            )

    def test_every_field_of_a_request_has_a_bound(self, item: Registered) -> None:
        assert isinstance(item.declaration, FeatureSpec)
        if item.declaration.params is None:
            pytest.skip(f"{item.name} reads no fields: it declares no params")
        for name, schema in item.declaration.params.model_json_schema().get("properties", {}).items():
            told = json.dumps(schema)
            has_bound = any(
                word in told for word in ("axLength", "aximum", "axItems", "maxProperties", "enum", "boolean")
            )
            assert has_bound or "const" in told, f"{name} has no bound: {told}"

    def test_says_the_same_alone_together_and_started_over(self, item: Registered) -> None:
        """With few blocks sequences are pre-empted, and start over."""
        if self.declaration is not None:
            pytest.skip("only an installed plugin is served: install it, and set plugin")
        self.skip_where_refused(item)
        from fwk import LLM  # noqa: PLC0415 - imports torch

        given = {name: value for name, value in self.fields.items() if name in FEATURE_FIELDS}
        sampled = {name: value for name, value in self.fields.items() if name not in given}
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, extra=dict(self.request), **sampled)
        plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        settings = {
            "load_format": "dummy",
            "max_running_requests": 4,
            "check_blocks": True,
            **self.selected(item),
            **self.options,
        }
        said: list[list[list[int]]] = []
        for num_tokens in (2048, 96):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(self.model_config))
                with LLM(folder, plugins=alongside(item.package), max_total_tokens=num_tokens, **settings) as llm:
                    self.prepare(llm)
                    prompts = [_PROMPT, [*_PROMPT, 5], [9, 9, 2]]
                    fields: dict[str, Any] = {
                        name: [value] * 3 + [FEATURE_FIELDS[name][1]] for name, value in given.items()
                    }
                    done = llm.generate([*prompts, _PROMPT], [sampling, sampling, sampling, plain], **fields)
                    said.append([completion.token_ids for completion in done])
                    said.append([llm.generate([prompt], sampling, **given)[0].token_ids for prompt in prompts])
        if self.is_exact and self.model_config is TINY:
            without = plain_tokens(json.dumps(TINY))[0]
            assert said[0][3] == without, "alongside, a request without it says something else than without the feature"
        assert said[0][:3] == said[1], "alone it says something else than together"
        assert said[0] == said[2], "started over it says something else"
        assert said[1] == said[3], "started over it says something else"

    def test_what_needs_the_engine_to_itself_waits_for_prompts(self, item: Registered) -> None:
        """Operations of ``FeatureSpec.exclusive`` are refused while a prompt is under way, which ends as ever."""
        assert isinstance(item.declaration, FeatureSpec)
        if self.declaration is not None or not item.declaration.exclusive:
            pytest.skip("it has none, or is not installed")
        self.skip_where_refused(item)
        from fwk import LLM  # noqa: PLC0415 - imports torch

        settings = {"load_format": "dummy", "max_total_tokens": 256, **self.selected(item), **self.options}
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.model_config))
            calls = self.exclusive(folder)
            assert set(calls) == set(item.declaration.exclusive), "the suite's exclusive() has arguments for others"
            with LLM(folder, plugins=alongside(item.package), **settings) as llm:
                wanted = llm.generate([_PROMPT], sampling)[0].token_ids
                for name, args in calls.items():
                    [(key, under_way)] = llm.submit(llm.inputs([_PROMPT], sampling, 1)[0]).items()
                    with pytest.raises(InvalidRequest, match="under way"):
                        llm.call_feature(item.name, name, *args)
                    while llm.engine.has_work:
                        for event in llm.engine.step():
                            assert (event.request_id, event.index) == key
                            under_way.take(event, lambda: None)
                    assert under_way.completion.token_ids == wanted, f"{name} changed a prompt that was under way"
                    llm.call_feature(item.name, name, *args)
