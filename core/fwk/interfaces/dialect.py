"""HTTP dialects: HTTP in, ``GenerateInput`` out, outputs back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fwk.errors import FwkError, InvalidRequest, RequestFailed
from fwk.interfaces.declaration import Declaration
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.interfaces.multimodal import Media, MediaItem
from fwk.interfaces.parser import StreamParser, ToolParser
from fwk.interfaces.served_weights import ServedWeights, WeightUpdater
from fwk.types import Features, FinishReason, SamplingParams, Service, Task, TokenLogprobs
from fwk.types.sampling import NOTHING_FOLLOWS

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import FastAPI
    from pydantic import BaseModel
    from tokenizers import Tokenizer

T = TypeVar("T")
Input = TypeVar("Input", bound="GenerateInput | EmbedInput")


@dataclass(slots=True)
class OutputDelta:
    """News of one sequence: what has been added since its last delta.

    The last delta of a sequence has a ``finish_reason``; ``stop_reason`` is the stop string or token id that ended
    it, if one did. ``logprobs`` has an entry per new token. Text held back while it could still become a stop
    string, or an unfinished character, comes with a later delta. ``prompt_logprobs`` come with the first tokens of
    sequence 0 (for the others: only the leading None), one entry per prompt token, None for the first.
    ``hidden_states`` are those of the prompt's tokens with the first delta, and of all tokens of the output but its
    last with the following ones.

    - ``index``: of the sequence among the request's ``n``.
    - ``text``: new text; empty without a tokenizer.
    - ``token_ids``: new tokens.
    - ``cached_tokens``: of the prompt, whose K/V came from the prefix cache.
    - ``num_output_tokens``: so far
    - ``draft_tokens``: verified so far by speculative decoding
    - ``accepted_draft_tokens``: of ``draft_tokens``, those that stand.
    - ``error``: why the sequence failed (``finish_reason`` is ``error``); None: it did not.
    - ``is_refusal``: ``error`` is due to what the request asks for.
    - ``hidden_states``: of each token computed since: float32 numbers, little-endian
    - ``vector``: of an ``EmbedInput``: float32 numbers, little-endian
    - ``num_cut``: tokens behind a stop string, which are left out
    - ``features``: what features' parts in the engine sent with it
    - ``reply``: what features' parts in the server add to the reply, by name: plain data (``joined_reply``)
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    num_output_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    error: str | None = None
    is_refusal: bool = False
    hidden_states: list[bytes] | None = None
    num_cut: int = 0
    vector: bytes | None = None
    features: Features = field(default_factory=Features)
    reply: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def joined(self, later: OutputDelta) -> OutputDelta:
        """One delta in place of this one and of the sequence's next one."""

        def both(name: str) -> list[Any] | None:
            mine, theirs = getattr(self, name), getattr(later, name)
            return mine if theirs is None else [*(mine or []), *theirs]

        added = {name: both(name) for name in ("logprobs", "hidden_states")}
        known = self.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs
        ids = [*self.token_ids, *later.token_ids]
        reply = joined_reply(self.reply, later.reply)
        return replace(later, text=self.text + later.text, token_ids=ids, prompt_logprobs=known, reply=reply, **added)

    def failure(self) -> FwkError:
        """What to raise for a sequence that ended with an error, or was aborted."""
        message = self.error or "the server aborted the request"
        return InvalidRequest(message) if self.is_refusal else RequestFailed(message)


def joined_reply(reply: dict[str, dict[str, Any]], later: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """``OutputDelta.reply`` of two deltas: by feature and field, a list continues a list; else the later one stands."""
    joined = {name: dict(told) for name, told in reply.items()}
    for name, told in later.items():
        mine = joined.setdefault(name, {})
        for key, value in told.items():
            known = mine.get(key)
            mine[key] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value
    return joined


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One prompt to complete, as a dialect hands it to the frontend.

    label, operation, trace: for observers only: the client's own request id, what was asked in OpenTelemetry's
    words (``chat``, ``text_completion``, ...), and where the request comes from (see ``trace_context``). A field whose
    metadata names a ``feature`` is that one's: without it, a request that sets the field is refused.

    - ``prompt_token_ids``: at least one.
    - ``sampling``: how tokens are chosen; ``Frontend.check`` completes it.
    - ``n``: sequences to generate.
    - ``priority``: for schedule policies that go by it; higher is more urgent unless the policy says otherwise.
    - ``service``: who asks, and what they expect.
    - ``cache_salt``: requests share K/V only with those of the same salt.
    - ``adapter``: name of a loaded LoRA adapter
    - ``extras``: by the name of a feature, what its server part reads; without it the request is refused.
    - ``media``: and ``payload``: of ``Frontend.place_media``
    - ``task``: that it asks of the model (``ModelCard.check_task``).
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    service: Service = Service()
    cache_salt: str = ""
    adapter: str = field(default="", metadata={"feature": "lora"})
    label: str = ""
    operation: str = "text_completion"
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    media: Sequence[Any] = field(default=(), metadata={"feature": "media"})
    payload: Any = None
    task: Task = "generate"


FEATURE_FIELDS: Mapping[str, tuple[str, Any]] = {
    own.name: (own.metadata["feature"], own.default) for own in fields(GenerateInput) if "feature" in own.metadata
}
"""Fields of a ``GenerateInput`` that are a feature's: its name, and the value that asks nothing of it."""


@dataclass(frozen=True, slots=True)
class PlacedInput:
    """A prompt in which media have their tokens: three fields of a ``GenerateInput``.

    payload: holds the file that the workers read, which is removed when nothing refers to this any more.

    - ``token_ids``: the prompt.
    - ``media``: in the order of their tokens.
    """

    token_ids: list[int]
    media: Sequence[Media]
    payload: Any


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """One text, or a pair of texts, to make a vector of; the other fields are as those of ``GenerateInput``.

    ``segment_start``: first token of a pair's second text; 0 where there is one text.

    - ``token_ids``: of the input, special tokens included.
    - ``priority``: as there.
    - ``label``: as there.
    - ``trace``: as there.
    - ``service``: as there.
    - ``n``, ``sampling``, ``cache_salt``, ``operation``: of all such: one sequence, which nothing follows.
    """

    token_ids: list[int]
    priority: int = 0
    label: str = ""
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    service: Service = Service()
    segment_start: int = 0

    n: ClassVar[int] = 1
    sampling: ClassVar[SamplingParams] = NOTHING_FOLLOWS
    cache_salt: ClassVar[str] = ""
    operation: ClassVar[str] = "embeddings"

    @property
    def prompt_token_ids(self) -> list[int]:
        """``token_ids``, by the name that a ``GenerateInput`` has for them."""
        return self.token_ids


AnyInput = GenerateInput | EmbedInput

MAX_TRACE_HEADER = 512


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """The W3C trace context among a request's headers (lower-case names): what ``GenerateInput.trace`` holds."""
    found = {name: headers.get(name, "") for name in ("traceparent", "tracestate")}
    return {name: value for name, value in found.items() if 0 < len(value) <= MAX_TRACE_HEADER}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the API says of the served model.

    - ``name``: what requests call it (``--served-model-name``).
    - ``path``: as the user gave it.
    - ``created``: seconds since 1970.
    - ``max_model_len``: tokens of prompt and output together.
    - ``vocab_size``: width of the logits.
    - ``task``: what it is served for (``ModelSpec.task``).
    - ``embedding_size``: numbers in a vector; 0 for a model that makes none
    - ``other_names``: that requests may call it by as well
    - ``labels``: of a classifier's scores, which are its vector
    - ``has_token_vectors``: a vector for each token of an input
    - ``end_token_ids``: tokens that end a text
    - ``config``: config.json of a model that does not generate
    - ``peer_names``: of the server's other models
    - ``max_input_len``: tokens of a prompt, where the server takes fewer than the model
    - ``shortens_prompts``: prompts that are too long are cut, not refused
    - ``media``: kinds that prompts may have, and how many
    """

    name: str
    path: str
    created: int
    max_model_len: int
    vocab_size: int
    task: Task = "generate"
    embedding_size: int = 0
    other_names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    has_token_vectors: bool = False
    end_token_ids: tuple[int, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    peer_names: tuple[str, ...] = ()
    max_input_len: int | None = None
    shortens_prompts: bool = False
    media: Mapping[str, int] = field(default_factory=dict[str, int])

    def is_called(self, name: str) -> bool:
        """Whether requests may call the model so."""
        return name == self.name or name in self.other_names

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt: one must be able to follow, if the model generates."""
        most = self.max_model_len - (self.task == "generate")
        return most if self.max_input_len is None else min(most, self.max_input_len)

    def check_task(self, wanted: Task) -> None:
        """Raise ``InvalidRequest`` unless the model does what is ``wanted``."""
        check_task(self.name, self.task, wanted)

    @property
    def output(self) -> str:
        """What is made of an input where nothing is generated, in words; empty where something is."""
        if not self.embedding_size:
            return ""
        if self.labels:
            return f"{len(self.labels)} scores of an input, of at most {self.max_model_len} tokens"
        what = "embeddings" if self.task == "embed" else "vectors"
        return f"{what} of {self.embedding_size} numbers, inputs of at most {self.max_model_len} tokens"


def check_task(name: str, task: Task, wanted: Task) -> None:
    """Raise ``InvalidRequest`` unless a model's ``task`` is the ``wanted`` one."""
    if task == wanted:
        return
    if task == "generate" and wanted == "embed":
        raise InvalidRequest(f"the model {name!r} generates text and makes no embeddings: serve an embedding model")
    if task == "generate" and wanted == "classify":
        raise InvalidRequest(f"the model {name!r} generates text and has nothing to classify with: serve a classifier")
    if task == "embed" and wanted == "generate":
        raise InvalidRequest(f"the model {name!r} makes embeddings and generates no text: use /v1/embeddings")
    if task == "transcribe":
        raise InvalidRequest(f"the model {name!r} writes down what it hears, no more: use /v1/audio/transcriptions")
    raise InvalidRequest(f"the model {name!r} is served to {task}, and this request is to {wanted}")


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """What the API says of a loaded LoRA adapter.

    ``source`` is what a client asked for, or the adapter's name where that would tell of the server's folders.

    - ``name``: what requests call it.
    - ``created``: seconds since 1970.
    """

    name: str
    source: str
    created: int


class MediaReading(ABC):
    """Reads and places media: a service (``Frontend.service``) of the server part that does."""

    @abstractmethod
    def read(self, kind: str, url: str, name: str) -> MediaItem:
        """``Frontend.read_media``."""

    @abstractmethod
    def place(self, token_ids: list[int], items: Sequence[MediaItem]) -> PlacedInput:
        """``Frontend.place_media``."""


class SoundReading(ABC):
    """Decodes files of sound for a model that transcribes: a service of the server part that does."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """The checkpoint's generation_config, and ``window``: samples that the model hears at once. May wait."""

    @abstractmethod
    def decode(self, source: Path, target: Path, name: str) -> int:
        """Write the samples of a file, 16 bits at 16 kHz, and tell how many. Raises ``InvalidRequest``. Waits."""


class VectorMaker(ABC):
    """Makes vectors of inputs: a service (``Frontend.service``) of the server part that does."""

    @abstractmethod
    async def vectors(self, items: Sequence[EmbedInput]) -> list[bytes]:
        """``Frontend.embed``."""


class AdapterRegistry(ABC):
    """The adapters that requests can ask for: a service (``Frontend.service``) of the server part that has them."""

    @property
    @abstractmethod
    def cards(self) -> Mapping[str, AdapterCard]:
        """``Frontend.adapters``."""

    @property
    @abstractmethod
    def can_load(self) -> bool:
        """``Frontend.can_load_adapters``."""

    @abstractmethod
    async def load(self, name: str, source: str) -> AdapterCard:
        """``Frontend.load_adapter``."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """``Frontend.unload_adapter``."""


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt whose completion is a text's middle, and the tokens that end the middle besides the model's own.

    - ``token_ids``: the prompt.
    - ``stop_token_ids``: for ``SamplingParams.stop_token_ids``.
    """

    token_ids: list[int]
    stop_token_ids: list[int]


class TextTools(ABC):
    """The served model's tokeniser and templates. Every method is safe to call from any thread.

    - ``has_tokenizer``: whether there is one; else prompts are token ids, replies hold token ids, and no output has
      text.
    - ``shows_tools``: whether the chat template shows the model the tools it is given; else messages have to.
    - ``renders_pairs``: whether the chat template is one of pairs: of a message of role ``query`` and one of role
      ``document``.
    - ``tokenizer``: the library's, where there is one.
    - ``special_ids``: tokens that are part of no text.
    """

    tokenizer: Tokenizer

    special_ids: frozenset[int] = frozenset()

    has_tokenizer: bool = True

    shows_tools: bool = True

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Text to ids; ``parse_special=False`` turns text that looks like a special token into ordinary tokens."""

    renders_pairs: bool = False

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Ids of two texts as one input, special tokens around and between them, and where the second's segment starts.

        0 where the tokenizer tells no segments apart. Text that looks like a special token stays text.
        """
        ids = self.encode(first, parse_special=False)
        return ids + self.encode(second, add_special_tokens=False, parse_special=False), 0

    def min_num_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at the least, told without tokenising it."""
        return 0

    def check_fits(self, text: str, max_num_tokens: int, param: str) -> None:
        """Refuse a text that is sure to have more than ``max_num_tokens``, before megabytes are tokenised for nothing.

        What this lets pass may still be too long. Raises ``InvalidRequest`` for ``param``.
        """
        least = self.min_num_tokens(text)
        if least > max_num_tokens:
            raise InvalidRequest(
                f"{param} has at least {least} tokens; this server takes at most {max_num_tokens}", param
            )

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; those of a special token are its name's."""

    def all_bytes(self, vocab_size: int) -> Sequence[bytes]:
        """What each token adds to a text, [vocab_size]; empty for an id without a token. May take long."""
        raise NotImplementedError

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Apply the chat template in its sandbox. Raises ``InvalidRequest`` when there is none or it refuses."""

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_num_tokens: int | None = None,
    ) -> list[int]:
        """Render a conversation and tokenise it. Templates write their own special tokens: none is added by default.

        Text of the messages that looks like a special token stays text: nobody forges a turn. Raises ``InvalidRequest``
        when it is refused by the template, or sure to have more than ``max_num_tokens``.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )
        if max_num_tokens is not None:
            self.check_fits(text, max_num_tokens, "messages")
        return self.encode(text, add_special_tokens=add_special_tokens)

    def infill(self, before: str, after: str, files: Sequence[tuple[str, str]] = (), start: str = "") -> Infill:
        """The prompt for the text between ``before`` and ``after``, of which ``start`` is there already.

        ``files``: names and texts of the same project. What looks like a special token in any of them stays text.
        Raises ``InvalidRequest`` for a model that was not trained for it.
        """
        raise InvalidRequest("this model's tokenizer has no tokens for text in the middle: it only continues")


class Frontend(ABC):
    """The server as a dialect sees it.

    - ``card``: the served model.
    - ``text``: its tokenizer and templates.
    - ``default_sampling``: sampling fields for requests that leave them out: the server's, else those of the model's
      generation_config.
    - ``preferred_sampling``: those of them that are the server's (``--preferred-sampling-params``), for APIs that ask
      no model.
    - ``grammar_kinds``: kinds of grammars that ``SamplingParams.grammar`` may have; empty: output cannot be
      constrained.
    - ``grammar_in_reasoning``: whether a grammar holds from the first token on, so that a constrained answer has no
      thinking.
    """

    card: ModelCard
    text: TextTools
    default_sampling: Mapping[str, Any]
    preferred_sampling: Mapping[str, Any] = {}
    grammar_kinds: frozenset[str] = frozenset()
    grammar_in_reasoning: bool = False

    @abstractmethod
    async def run_blocking(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run tokenising, templating and the like off the event loop."""

    @abstractmethod
    def check(self, item: Input) -> Input:
        """Validate and complete: max_tokens resolved, bad words tokenised. Raises ``InvalidRequest``.

        Call it through ``run_blocking`` when the input has a grammar: it is compiled, which takes up to seconds.
        """

    def tool_parser(
        self, tools: Sequence[Mapping[str, Any]], prompt_tail: str = "", is_forced: bool = False
    ) -> ToolParser | None:
        """A parser of tool calls for one sequence; None when this server has none.

        With ``is_forced`` it has a grammar of calls, and the model writes nothing else; None only where no installed
        parser has one.
        """
        return None

    def reasoning_parser(self, prompt_tail: str = "") -> StreamParser | None:
        """A parser that splits thinking from the answer for one sequence; None when this server has none."""
        return None

    @abstractmethod
    def generate(self, item: AnyInput) -> AsyncGenerator[list[OutputDelta], None]:
        """Run a checked input. Yields deltas in batches until every sequence has finished.

        Closing the iterator aborts the request. Raises ``EngineDead``, ``NotServed`` or ``RequestFailed``.
        """

    def check_embed(self, item: EmbedInput) -> EmbedInput:
        """Validate an input for ``embed``; what is to be embedded, shortened if the server does that.

        Raises ``InvalidRequest``.
        """
        if self.card.task == "generate":
            self.card.check_task("embed")
        return self.check(item)

    async def embed(self, items: Sequence[EmbedInput]) -> list[bytes]:
        """The vectors of checked inputs, in their order: float32 numbers, little-endian.

        One vector each, or where ``card.has_token_vectors`` one for each token, one after another.

        Cancelling it aborts what still runs. Raises ``EngineDead``, ``NotServed`` or ``RequestFailed``.
        """
        maker = self.service(VectorMaker)
        if maker is None:
            raise InvalidRequest(f"no feature that is on makes vectors of inputs for the model {self.card.name!r}")
        return await maker.vectors(items)

    def read_media(self, kind: str, url: str, name: str) -> MediaItem:
        """What a URL of a request holds: ``data:``, or one that the server may follow. Call it off the event loop.

        kind: one of ``card.media``. name: what errors call it, its place in the request. Raises ``InvalidRequest``.
        """
        reading = self.service(MediaReading)
        if reading is None or kind not in self.card.media:
            raise InvalidRequest(f"{name}: this server's model reads text only, not {kind}", name)
        return reading.read(kind, url, name)

    def place_media(self, token_ids: list[int], items: Sequence[MediaItem]) -> PlacedInput:
        """Decode media and put their tokens where the chat template left marks. Call it off the event loop.

        Raises ``InvalidRequest`` that names the item, or ``NotServed`` when too many wait for it.
        """
        reading = self.service(MediaReading)
        if reading is None or not self.card.media:
            raise InvalidRequest("this server's model reads text only", "messages")
        return reading.place(token_ids, items)

    @property
    def peers(self) -> Sequence[Frontend]:
        """The frontends of all models of the server, this one's among them, in the order they are listed."""
        return (self,)

    def is_called(self, name: str) -> bool:
        """Whether a request's ``model`` is this one, one of its adapters, or both with a colon between."""
        before, _, after = name.rpartition(":")
        card, adapters = self.card, self.adapters
        return card.is_called(name) or name in adapters or (card.is_called(before) and after in adapters)

    @property
    def is_loaded(self) -> bool:
        """Whether the model's engines run; else the next request starts them."""
        return True

    def service(self, kind: type[T]) -> T | None:
        """The server part of a feature that is a ``kind``, a class of ``fwk.interfaces``; None: none is on."""
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """All that a request's ``model`` may be, but for two of them with a colon between."""
        return (self.card.name, *self.card.other_names, *self.adapters)

    @property
    def adapters(self) -> Mapping[str, AdapterCard]:
        """The LoRA adapters requests can ask for now, by name."""
        registry = self.service(AdapterRegistry)
        return {} if registry is None else registry.cards

    @property
    def can_load_adapters(self) -> bool:
        """Whether clients may load and unload adapters: LoRA is on, and a source has places to look."""
        registry = self.service(AdapterRegistry)
        return registry is not None and registry.can_load

    async def load_adapter(self, name: str, source: str) -> AdapterCard:
        """Load the LoRA adapter that a LoRA source knows as ``source``. Raises ``InvalidRequest``."""
        registry = self.service(AdapterRegistry)
        if registry is None:
            raise InvalidRequest("this server loads no LoRA adapters while it runs", "lora_name")
        return await registry.load(name, source)

    async def update_weights(self, model: str, load_format: str | None = None, *, aborts: bool = False) -> int:
        """Serve the weights of another checkpoint of the same kind, in all engines or in none.

        Requests under way end before, by themselves or aborted (``aborts``); returns how many waited meanwhile.
        load_format: None for that of the start. Raises ``InvalidRequest`` for a checkpoint that does not fit.
        """
        updater = self.service(WeightUpdater)
        if updater is None:
            raise InvalidRequest(
                "this server takes no other weights while it runs: no feature that is installed and on exchanges them "
                "(fwk plugins list)",
                "model_path",
            )
        return await updater.update(model, load_format, aborts=aborts)

    @property
    def served_weights(self) -> ServedWeights | None:
        """The files of the weights that serve now, for routes that give them out; None where they are not known."""
        return None

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those under way finish. Raises ``InvalidRequest``."""
        registry = self.service(AdapterRegistry)
        if registry is None:
            raise InvalidRequest("this server unloads no LoRA adapters while it runs", "lora_name")
        await registry.unload(name)

    @property
    @abstractmethod
    def processor_params(self) -> Sequence[type[Any]]:
        """Pydantic models of request fields that installed logits processors and features read (for ``extra``)."""


def openai_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error shape, which clients of all dialects understand well enough."""
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class DialectContext:
    """What a dialect is built with.

    - ``frontend``: the served model.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``lifecycle``: for calls of its own at setup, ready, drain and close, and for work in the background.
    """

    frontend: Frontend
    options: Any = None
    lifecycle: PluginLifecycle = field(default_factory=PluginLifecycle)


class Dialect(ABC):
    """A set of HTTP routes.

    - ``requests``: of each path that takes a body, the body's model. docs/limits.md is made from it: every number,
      text, list and object says its most in its JSON schema (``maximum``, ``maxLength``, ...), or in words under
      ``x-limit``.
    - ``elsewhere``: paths that other servers of the kind have and this one has not, each with what does it here: said
      with 404.
    - ``public_paths``: of its routes those that need no key: they hold nothing of the server's or a client's, as a
      page's files do.
    - ``max_bodies``: of paths whose bodies may be larger than ``--max-body-bytes``, as they are not kept in memory:
      their bytes.
    - ``invalid_status``: what a body past a limit is answered with.
    - ``request_notes``: a sentence for docs/limits.md on limits of bodies as a whole.
    """

    requests: ClassVar[Mapping[str, type[BaseModel]]] = {}

    elsewhere: ClassVar[Mapping[str, str]] = {}

    max_bodies: Mapping[str, int] = {}

    public_paths: ClassVar[tuple[str, ...]] = ()

    invalid_status: ClassVar[int] = 400

    request_notes: ClassVar[str] = ""

    def __init__(self, context: DialectContext) -> None:
        self.context = context

    @abstractmethod
    def routes(self, app: FastAPI) -> None:
        """Add the routes. Errors of fwk's own types need no handling: ``error_body`` shapes them."""

    def admin_routes(self, app: FastAPI) -> None:
        """Add routes that change the server for all its clients, or give out what is its operator's.

        They exist only where the operator set ``--admin-api-key``, and answer to that key alone. Every route added here
        is one of them, and none that is added elsewhere.
        """

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        """The JSON body of an error on one of this dialect's routes; OpenAI's shape by default."""
        return openai_error(status, message, param, code)


@dataclass(frozen=True, kw_only=True)
class DialectSpec(Declaration):
    """Declares an HTTP dialect; every installed one is mounted unless its routes collide."""

    family: ClassVar[str] = "dialects"
