"""The engine without a server: ``fwk.LLM``."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, cast, overload

from fwk.config import Config, ServerOptions
from fwk.engine.core import Engine, build_engine
from fwk.errors import ConfigError, InvalidRequest, RequestFailed
from fwk.features.jobs import build_job_part
from fwk.features.server import build_server_features
from fwk.interfaces.completion import Completion
from fwk.interfaces.dialect import FEATURE_FIELDS, AnyInput, GenerateInput, Input, check_task
from fwk.interfaces.feature import Exclusive, JobPartContext, ServerPartContext
from fwk.plugins import PluginSet, discover
from fwk.plugins.families import FAMILIES
from fwk.plugins.options import build_config, called, normal, option_owners
from fwk.setup.checkpoint import open_model
from fwk.setup.resolve import resolve
from fwk.setup.sampling_defaults import FOLLOWED, sampling_defaults
from fwk.text import model_text, prepare_input
from fwk.types import Request, SamplingParams, Task, TokenEvent, cache_namespace
from fwk_offline.following import Following, Key
from fwk_offline.parts import (
    OwnJobs,
    at_once,
    check_fields,
    method_owner,
    own_fields,
    refuse_without_server,
    run,
)
from fwk_process.progress import ProgressBar, offline_bar, set_up_progress

Prompt = str | list[int]
Conversation = Sequence[Mapping[str, Any]]

READ_AHEAD = 2
"""Sequences handed to the engine, as a multiple of those it may run at once: the others cost no memory there."""


class LLM:
    """A model in this process.

        llm = fwk.LLM()                                     # the default model
        llm.generate("Once upon a time", fwk.SamplingParams(max_tokens=20))[0].text

    Options are those of ``fwk serve``, with underscores: ``LLM("folder", attention_backend="torch", page_size=32)``.
    Features add methods (``FeatureSpec.methods``), and keyword arguments of those that make texts: one value for all
    prompts, or a list with one for each. Not thread-safe. Close it, or use it as a context manager, to stop its
    workers.
    """

    def __init__(self, model: str | None = None, *, plugins: PluginSet | None = None, **options: Any) -> None:
        plugins = plugins or discover(options.get("allow_override", ()))
        given = {**options, **({"model": model} if model is not None else {})}
        config = build_config(plugins, given)
        _refuse_server_options(options, plugins)
        refuse_without_server(config, plugins)
        self._load(config, plugins, print)

    @classmethod
    def from_config(cls, config: Config, plugins: PluginSet, progress: Callable[[str], None]) -> LLM:
        """An LLM for options already resolved; ``progress`` hears of downloads."""
        refuse_without_server(config, plugins)
        self = cls.__new__(cls)
        self._load(config, plugins, progress)
        return self

    def _load(self, config: Config, plugins: PluginSet, progress: Callable[[str], None]) -> None:
        self.config = config
        self.plugins = plugins
        set_up_progress(not config.engine.disable_progress_bars)
        opened = open_model(config, plugins, progress)
        setup = resolve(config, opened, plugins)
        self.opened_path = opened.path
        self._task: Task = opened.task
        self.text = model_text(opened.checkpoint, config.model, opened.config.vocab_size)
        vocab_size, eos = opened.config.vocab_size, opened.eos_token_ids
        generation, followed = opened.checkpoint.generation_config(), opened.config.raw.get(FOLLOWED, ())
        self.default_sampling = sampling_defaults(config.model, generation, vocab_size, followed)
        """Sampling that the model's makers recommend; nothing uses it by itself."""
        self._chosen = dict(setup.resolution.chosen)
        self.engine: Engine = build_engine(config, plugins, setup)
        self._ids = itertools.count()
        context = functools.partial(
            ServerPartContext,
            model_name=config.model.model,
            text=self.text,
            has_admin=False,
            task=opened.task,
            prompts=opened.served.prompts,
            prepare=self.inputs,
            compute=self.compute,
            end_token_ids=eos,
            config=opened.config,
            inputs=opened.served.inputs,
        )
        job = functools.partial(
            JobPartContext,
            model_name=opened.name,
            config=opened.config,
            checkpoint=opened.checkpoint,
            text=self.text,
            inputs=opened.served.inputs,
            eos_token_ids=eos,
        )
        self._parts = build_server_features(
            setup.factory,
            context,
            self._ask_feature,
            jobs=lambda name: OwnJobs(lambda: build_job_part(setup.factory, name, job)),
            exclusive=self._exclusive,
        )
        at_once(self._parts.ready())
        self._parts.use_grammars(self.engine.info.chosen.get("grammar", "none"))

    def __repr__(self) -> str:
        info, chosen = self.engine.info, self._chosen
        plugins = ", ".join(
            f"{family} {chosen[family]}" for family in ("models", "attention", "quant") if family in chosen
        )
        room = "" if self._task != "generate" else f", {info.num_blocks * info.block_size} tokens of KV cache"
        return (
            f"LLM({self.config.model.model!r}: {self._task}, {info.max_model_len} tokens of context{room}; {plugins})"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers."""
        self._parts.close()
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        *,
        use_tqdm: bool | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """Complete prompts (text or token ids), all at once; ``n`` completions each, in the prompts' order.

        ``use_tqdm``: show a progress bar; by default for several prompts on a terminal or in a notebook.
        ``fields``: those of features, such as ``media``: a list for each prompt of its images and the like, in the
        order of the marks that stand for them.
        Raises ``InvalidRequest`` before anything runs when a prompt or its sampling is wrong.
        """
        items = self.inputs(prompts, sampling, n, **fields)
        with offline_bar("prompts", len(items), use_tqdm) as progress:
            return [done for group in self._run(items, progress, True) for done in group]

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        n: int = 1,
        *,
        use_tqdm: bool | None = None,
        **fields: Any,
    ) -> Iterator[list[Completion]]:
        """The same for more prompts than memory holds: the completions of each, one prompt's after another's.

        Prompts are read as the engine has room for them, and nothing is kept of those given out. A wrong one raises
        ``InvalidRequest`` when its turn comes. Leaving the iterator aborts what runs.
        """
        items = (self.inputs([prompt], sampling, n, **fields)[0] for prompt in prompts)
        with offline_bar("prompts", None, use_tqdm) as progress:
            yield from self._run(items, progress, False)

    def _run(self, items: Iterable[AnyInput], progress: ProgressBar, keeps_all: bool) -> Iterator[list[Completion]]:
        """Complete checked inputs, a bounded number at a time, in their order.

        keeps_all: those that have ended before their turn to be given out are not counted.
        """
        rest = iter(items)
        most = READ_AHEAD * self.config.engine.max_running_requests
        groups: deque[list[Key]] = deque()
        following: dict[Key, Following] = {}
        running: set[Key] = set()
        try:
            while True:
                while len(running if keeps_all else following) < most and (item := next(rest, None)) is not None:
                    submitted = self.submit(item)
                    following |= submitted
                    running |= submitted.keys()
                    groups.append(list(submitted))
                if not groups:
                    return
                if running.isdisjoint(groups[0]):
                    progress.add()
                    yield [following.pop(key).completion for key in groups.popleft()]
                    continue
                for event in self.engine.step():
                    self._take(event, following, running)
        finally:
            for key in running:  # one failed: the others are not waited for
                self.engine.abort(*key)
                following[key].leave()

    @overload
    def chat(self, messages: Conversation, sampling: SamplingParams | None = None, **template: Any) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[Completion]: ...

    def chat(self, messages: Any, sampling: Any = None, **template: Any) -> Any:
        """Answer a conversation, or each of several, rendered with the model's chat template and its variables.

        A content may be a list of parts: ``{"type": "text", "text": ...}``, and of a model that takes images
        ``{"type": "image", "image": ...}`` with the bytes of a file.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        fields = own_fields(template)
        conversations: list[Conversation] = [messages] if is_one else list(messages)
        told = [self._parts.conversation(one) for one in conversations]
        ids: list[Prompt] = [self.text.chat_ids(one, **template) for one, _ in told]
        for name in {name for _, own in told for name in own}:
            fields[name] = [own.get(name, FEATURE_FIELDS[name][1]) for _, own in told]
        found = self.generate(ids, sampling, **fields)
        return found[0] if is_one else found

    def compute(self, items: Sequence[AnyInput], use_tqdm: bool | None = None) -> list[Completion]:
        """What comes of inputs of a feature. Raises ``InvalidRequest`` before anything runs."""
        checked = [self._checked(item) for item in items]
        with offline_bar("texts", len(checked), use_tqdm) as progress:
            return [done for group in self._run(checked, progress, True) for done in group]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **fields: Any) -> Iterator[str]:
        """Complete one prompt, giving out its text as it comes. Leaving the iterator aborts the request."""
        [(key, entry)] = self.submit(self.inputs([prompt], sampling, 1, **fields)[0]).items()
        running = {key}
        try:
            while running:
                for event in self.engine.step():
                    before = len(entry.completion.text)
                    self._take(event, {key: entry}, running)
                    if len(entry.completion.text) > before:
                        yield entry.completion.text[before:]
        finally:
            if running:
                self.engine.abort(*key)

    def call_feature(self, feature: str, operation: str, *args: Any, **fields: Any) -> Any:
        """Run an operation of a feature's server part, or else of its engine part, or of its parts in the workers.

        Raises ``InvalidRequest`` for a feature that is not on, or that refuses.
        """
        self._parts.require(feature, operation)
        own = self._parts.operation(feature, operation)
        if own is None:
            return self.engine.call_feature(feature, operation, args)
        found = own(*args, **fields)
        return run(found) if inspect.isawaitable(found) else found

    def _exclusive(self, feature: str) -> AbstractAsyncContextManager[Exclusive]:
        if self.engine.has_work:
            raise InvalidRequest("prompts are under way: it has to wait until they have ended")
        return nullcontext(Exclusive(functools.partial(self._ask_feature, feature)))

    async def _ask_feature(self, feature: str, operation: str, *args: Any) -> list[Any]:
        return [self.engine.call_feature(feature, operation, args)]

    def __getattr__(self, name: str) -> Any:
        """The methods that features add."""
        plugins: PluginSet | None = self.__dict__.get("plugins")
        owner = None if plugins is None or name.startswith("_") else method_owner(plugins, name)
        if owner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self.call_feature, owner, name)

    def inputs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        **fields: Any,
    ) -> list[GenerateInput]:
        """Prompts as checked inputs for ``submit``. Raises ``InvalidRequest``."""
        many: list[Prompt] = _as_list(prompts)
        settings = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling or SamplingParams()] * len(many)
        if len(settings) != len(many):
            raise InvalidRequest(f"{len(many)} prompts, but {len(settings)} sampling settings", "sampling")
        check_fields(fields, "LLM.generate")
        spread = [_spread(name, given, len(many)) for name, given in fields.items()]
        check_task(self.config.model.model, self._task, "generate")
        inputs: list[GenerateInput] = []
        for i, (prompt, params) in enumerate(zip(many, settings, strict=True)):
            assert isinstance(params, SamplingParams)
            ids = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
            item = GenerateInput(ids, params, n, **dict(zip(fields, (values[i] for values in spread), strict=True)))
            self._parts.check(item)  # before anything runs
            inputs.append(self._checked(self._parts.complete(item)))
            if params.grammar is not None:
                self._parts.grammars.check_grammar(params.grammar)
        return inputs

    def _checked(self, item: Input) -> Input:
        info = self.engine.info
        lengths = {"max_model_len": info.max_model_len, "vocab_size": info.vocab_size}
        item = prepare_input(item, self.text, **lengths, limits=self.text.limits)
        self._parts.check(item)
        return item

    def submit(self, item: AnyInput) -> dict[Key, Following]:
        """Queue a checked input: its sequences. Events of ``engine.step`` are to be handed to them."""
        parts = self._parts.open(item, waits=False)
        if parts is not None:
            parts.num_open = item.n
            item = at_once(parts.enter(item))
        request = Request(
            request_id=f"llm-{next(self._ids)}",
            prompt_token_ids=item.prompt_token_ids,
            sampling=item.sampling,
            n=item.n,
            priority=item.priority,
            service=item.service,
            cache_namespace=cache_namespace(item.cache_salt, "" if parts is None else parts.namespace),
            features={} if parts is None else parts.features,
        )
        for event in self.engine.add(request):
            raise (InvalidRequest if event.is_refusal else RequestFailed)(event.error or "the engine refused it")
        prompt = item.prompt_token_ids
        return {
            (request.request_id, index): Following(
                Completion(prompt_token_ids=prompt), self.text.follow(item.sampling), parts
            )
            for index in range(item.n)
        }

    def _take(self, event: TokenEvent, following: Mapping[Key, Following], running: set[Key]) -> bool:
        """Hand an event to the sequence it is of; returns whether that has ended."""
        key = (event.request_id, event.index)
        if key not in running:
            return False
        try:
            has_ended = following[key].take(event, lambda: self.engine.abort(*key))
        except (InvalidRequest, RequestFailed):
            running.discard(key)
            raise
        if has_ended:
            running.discard(key)
        return has_ended


def _spread(name: str, given: Any, count: int) -> list[Any]:
    """A field's value for each prompt. Raises ``InvalidRequest`` where it has another number of them."""
    several = list(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else []
    values = several or [given] * count
    if len(values) != count:
        raise InvalidRequest(f"{count} prompts, but {len(values)} of {name}", name)
    return values


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def _refuse_server_options(given: Mapping[str, Any], plugins: PluginSet) -> None:
    """Raise for an option that only ``fwk serve`` reads: here it would do nothing."""
    flags = called(plugins)
    families = [family for family in FAMILIES.values() if family.serves]
    served = {*ServerOptions.model_fields, *(family.option for family in families)}
    used: set[str] = set()
    for owner in option_owners(plugins):
        is_served = owner.item is not None and FAMILIES[owner.item.family].serves
        own = set(owner.model.model_fields if owner.item is not None else ())
        apart = own.intersection(getattr(owner.item and owner.item.declaration, "server_options", ()))
        (served if is_served else used).update(own - apart)
        served |= apart
    for name in given:
        ours = flags[normal(name)].partition(" ")[0]
        if normal(ours) in served - used:
            raise ConfigError(f"{ours} is for fwk serve: fwk.LLM has no server, so leave {name} out")
