"""The engine without a server: ``fwk.LLM``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fwk.config import Config
from fwk.engine.core import Engine, build_engine
from fwk.errors import ConfigError, InvalidRequest, RequestFailed
from fwk.interfaces.dialect import EmbedInput, GenerateInput, check_task
from fwk.plugins import PluginSet, discover
from fwk.plugins.options import build_config
from fwk.setup.checkpoint import open_model
from fwk.setup.resolve import resolve
from fwk.text import ModelText, SequenceText, check_embed_input, prepare_input
from fwk.text.grammars import Grammars
from fwk.types import (
    AdapterInfo,
    FinishReason,
    Request,
    SamplingParams,
    Task,
    TokenEvent,
    TokenLogprobs,
    cache_namespace,
)
from fwk.types.sampling import NOTHING_FOLLOWS

Prompt = str | list[int]


@dataclass(slots=True)
class Completion:
    """What became of one sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_token_ids: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    draft_tokens: int = 0  # verified by speculative decoding
    accepted_draft_tokens: int = 0


@dataclass(slots=True)
class _Following:
    """A sequence on its way."""

    completion: Completion
    text: SequenceText


class LLM:
    """A model in this process.

        llm = fwk.LLM()                                     # the default model
        llm.generate("Once upon a time", fwk.SamplingParams(max_tokens=20))[0].text

    Options are those of ``fwk serve``, with underscores: ``LLM("folder", attention_backend="torch", page_size=32)``.
    Not thread-safe. Close it, or use it as a context manager, to stop its workers.
    """

    def __init__(self, model: str | None = None, *, plugins: PluginSet | None = None, **options: Any) -> None:
        plugins = plugins or discover(options.get("allow_override", ()))
        given = {**options, **({"model": model} if model is not None else {})}
        self._load(build_config(plugins, given), plugins, print)

    @classmethod
    def from_config(cls, config: Config, plugins: PluginSet, progress: Callable[[str], None]) -> LLM:
        """An LLM for options already resolved; ``progress`` hears of downloads."""
        self = cls.__new__(cls)
        self._load(config, plugins, progress)
        return self

    def _load(self, config: Config, plugins: PluginSet, progress: Callable[[str], None]) -> None:
        self.config = config
        self.plugins = plugins
        if config.engine.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {config.engine.data_parallel_size}: only a server has several engines; "
                "run fwk serve, or leave it out"
            )
        opened = open_model(config, plugins, progress)
        setup = resolve(config, opened, plugins)
        self.opened_path = opened.path
        self._task: Task = opened.task
        self._vector_size = opened.served.vector_size
        self.text = ModelText(opened.checkpoint, config.model, opened.config.vocab_size)
        vocab_size, eos = opened.config.vocab_size, opened.eos_token_ids
        self._grammars = Grammars(setup.factory, lambda: self.text, vocab_size, eos)
        self._grammars.use(setup.resolution.chosen.get("grammar", "none"))
        self.engine: Engine = build_engine(config, plugins, setup)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        adapter: str | Sequence[str] = "",
    ) -> list[Completion]:
        """Complete prompts (text or token ids), all at once; ``n`` completions each, in the prompts' order.

        ``adapter`` names a loaded LoRA adapter, for all prompts or one for each (empty for the model alone).
        Raises ``InvalidRequest`` before anything runs when a prompt or its sampling is wrong.
        """
        inputs = self._inputs(prompts, sampling, n, adapter)
        following: dict[tuple[str, int], _Following] = {}
        for item in inputs:
            for sequence in self._submit(item):
                following[sequence[0]] = sequence[1]
        open_sequences = set(following)
        try:
            while open_sequences:
                for event in self.engine.step():
                    self._take(event, following, open_sequences)
        finally:
            for key in open_sequences:  # one failed: the others are not waited for
                self.engine.abort(*key)
        return [entry.completion for entry in following.values()]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        adapter: str = "",
        **template: Any,
    ) -> Completion:
        """Answer a conversation, rendered with the model's chat template."""
        ids = self.text.chat_ids(messages, **template)
        return self.generate([ids], sampling, adapter=adapter)[0]

    def embed(self, texts: Prompt | Sequence[Prompt]) -> np.ndarray:
        """Embeddings of texts (or token ids): [num_texts, size] float32, in the texts' order.

        Of a model that makes a vector of each token: [num_tokens, size], one text's after another. Raises
        ``InvalidRequest`` before anything runs when a text is wrong, or when the model generates text.
        """
        check_task(self.config.model.model, self._task, "embed")
        return self._vectors([self._embed_input(text) for text in _as_list(texts)])

    def classify(self, texts: Prompt | Sequence[Prompt]) -> np.ndarray:
        """What a classifier or a reward model makes of texts (or token ids), before any softmax or sigmoid.

        Returns [num_texts, num_labels] float32. Raises as ``embed`` does.
        """
        check_task(self.config.model.model, self._task, "classify")
        return self._vectors([self._embed_input(text) for text in _as_list(texts)])

    def classify_pairs(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """The same of pairs of texts, each read as one input, as cross-encoders do: query and document."""
        check_task(self.config.model.model, self._task, "classify")
        return self._vectors([self._pair(*pair) for pair in pairs])

    def _embed_input(self, text: Prompt) -> EmbedInput:
        return EmbedInput(self.text.encode(text) if isinstance(text, str) else list(text))

    def _pair(self, first: str, second: str) -> EmbedInput:
        ids, start = self.text.encode_pair(first, second)
        return EmbedInput(ids, segment_start=start)

    def _vectors(self, items: Sequence[EmbedInput]) -> np.ndarray:
        info = self.engine.info
        for item in items:
            check_embed_input(item, max_model_len=info.max_model_len, vocab_size=info.vocab_size)
        found: dict[str, np.ndarray | None] = {}
        try:
            for item in items:
                request = Request(
                    request_id=f"llm-{next(self._ids)}",
                    prompt_token_ids=item.token_ids,
                    sampling=NOTHING_FOLLOWS,
                    segment_start=item.segment_start,
                )
                for event in self.engine.add(request):
                    raise RequestFailed(event.error or "the engine refused the request")
                found[request.request_id] = None
            while any(vector is None for vector in found.values()):
                for event in self.engine.step():
                    if event.request_id not in found:
                        continue
                    if event.embedding is None:
                        raise RequestFailed(event.error or "the engine made no embedding")
                    found[event.request_id] = np.frombuffer(event.embedding, "<f4")
        finally:
            for request_id, vector in found.items():
                if vector is None:  # one failed: the others are not waited for
                    self.engine.abort(request_id)
        size = self._vector_size
        return np.concatenate([vector.reshape(-1, size) for vector in found.values() if vector is not None])

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str = "") -> Iterator[str]:
        """Complete one prompt, giving out its text as it comes. Leaving the iterator aborts the request."""
        item = self._inputs([prompt], sampling, 1, adapter)[0]
        [(key, entry)] = self._submit(item)
        open_sequences = {key}
        try:
            while open_sequences:
                for event in self.engine.step():
                    before = len(entry.completion.text)
                    self._take(event, {key: entry}, open_sequences)
                    if len(entry.completion.text) > before:
                        yield entry.completion.text[before:]
        finally:
            if open_sequences:
                self.engine.abort(*key)

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load the LoRA adapter in a folder; ``name`` is what requests call it. Raises ``InvalidRequest``."""
        return self.engine.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Raises ``InvalidRequest`` when there is none of that name."""
        self.engine.adapters.unload(name)

    def _inputs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        adapter: str | Sequence[str],
    ) -> list[GenerateInput]:
        many: list[Prompt] = _as_list(prompts)
        settings = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling or SamplingParams()] * len(many)
        if len(settings) != len(many):
            raise InvalidRequest(f"{len(many)} prompts, but {len(settings)} sampling settings", "sampling")
        names = [adapter] * len(many) if isinstance(adapter, str) else list(adapter)
        if len(names) != len(many):
            raise InvalidRequest(f"{len(many)} prompts, but {len(names)} adapters", "adapter")
        check_task(self.config.model.model, self._task, "generate")
        info = self.engine.info
        inputs: list[GenerateInput] = []
        for prompt, params, name in zip(many, settings, names, strict=True):
            assert isinstance(params, SamplingParams)
            ids = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
            self.engine.adapters.key_of(name)  # known, before anything runs
            item = GenerateInput(ids, params, n, adapter=name)
            inputs.append(prepare_input(item, self.text, max_model_len=info.max_model_len, vocab_size=info.vocab_size))
            self._grammars.check(params.grammar)
        return inputs

    def _submit(self, item: GenerateInput) -> list[tuple[tuple[str, int], _Following]]:
        adapter = self.engine.adapters.key_of(item.adapter)
        request = Request(
            request_id=f"llm-{next(self._ids)}",
            prompt_token_ids=item.prompt_token_ids,
            sampling=item.sampling,
            n=item.n,
            priority=item.priority,
            service=item.service,
            cache_namespace=cache_namespace(item.cache_salt, adapter),
            adapter=adapter,
        )
        for event in self.engine.add(request):
            raise RequestFailed(event.error or "the engine refused the request")
        return [
            (
                (request.request_id, index),
                _Following(
                    Completion(prompt_token_ids=item.prompt_token_ids),
                    self.text.follow(item.sampling),
                ),
            )
            for index in range(item.n)
        ]

    def _take(
        self,
        event: TokenEvent,
        following: Mapping[tuple[str, int], _Following],
        open_sequences: set[tuple[str, int]],
    ) -> None:
        key = (event.request_id, event.index)
        entry = following.get(key)
        if entry is None or key not in open_sequences:
            return
        done = entry.completion
        text, count = entry.text.feed(event)
        done.text += text
        done.token_ids.extend(event.token_ids[:count])
        done.cached_tokens = event.cached_tokens
        done.draft_tokens, done.accepted_draft_tokens = event.draft_tokens, event.accepted_draft_tokens
        if event.logprobs is not None:
            done.logprobs = [*(done.logprobs or []), *event.logprobs[:count]]
        if event.prompt_logprobs is not None:
            done.prompt_logprobs = event.prompt_logprobs
        if event.error is not None:
            open_sequences.discard(key)
            raise InvalidRequest(event.error) if event.is_refusal else RequestFailed(event.error)
        if entry.text.stop_string is not None:
            done.finish_reason, done.stop_reason = "stop", entry.text.stop_string
            self.engine.abort(*key)
        elif event.finish_reason is not None:
            done.finish_reason, done.stop_reason = event.finish_reason, event.stop_token_id
        if done.finish_reason is not None:
            open_sequences.discard(key)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], int) else items
