"""Core's options about the model."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Literal

from pydantic import field_validator, model_validator

from fwk.config.options import Options, option
from fwk_tokenizer.infill import FORMATS


class ModelOptions(Options):
    """Which weights to serve, and in which precision."""

    model: str = option(
        "smollm2-135m-instruct",
        "Model to serve: a folder, a file, a hub id, or a name a model source knows.",
        aliases=["model-path", "model-dir"],
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    download_dir: str | None = option(None, "Folder for downloaded models (default: the user's cache folder).")
    load_format: str = option("auto", "Loader that reads the weights: a loader's name, or auto.", aliases=["load-way"])
    tokenizer_path: str | None = option(
        None,
        "Folder, tokenizer.json or vocabulary file to use instead of the model's own tokenizer.",
        aliases=["tokenizer"],
    )
    tokenizer_mode: Literal["auto", "fast", "slow"] = option(
        "auto",
        "Where the tokenizer comes from. auto: tokenizer.json, else the vocabulary file of sentencepiece "
        "(tokenizer.model), tiktoken or tekken, converted; fast: tokenizer.json alone; slow: the vocabulary file, even "
        "where a tokenizer.json is there.",
    )
    skip_tokenizer_init: bool = option(
        False,
        "Serve without a tokenizer: prompts are token ids, replies hold token ids and no text; what needs text (chats, "
        "stop strings, grammars) is refused.",
    )
    chat_template: str | None = option(None, "File with a Jinja chat template to use instead of the model's own.")
    completion_template: str = option(
        "auto",
        "How what comes before and after a gap becomes a prompt for the text in it: a format's name, SGLang's JSON "
        "file of one, or auto: as the tokenizer's tokens say.",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Names that requests may call the model by; the API reports the first (default: the model as given).",
        aliases=["model-name"],
    )
    model_impl: str = option(
        "auto", "Implementation of the model, by its plugin's name; auto: the best that serves the architecture."
    )
    task: str = option(
        "auto",
        "What the model is served for: generate, embed, classify, or another word that its plugin declares; auto: "
        "embed if the checkpoint says how vectors are made (modules.json), else what its best-ranked plugin is for.",
        turns={"is-embedding": "embed", "use-reward-model": "classify"},
        stability="beta",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Precision of weights and activations. auto: the checkpoint's own, or the nearest this device computes fast.",
        aliases=["data-type"],
    )
    context_length: int | None = option(
        None,
        "Longest prompt plus output, in tokens (default: the model's own limit).",
        aliases=["max-model-len", "max-req-total-len", "max-seq-len"],
        ge=8,
        le=2**24,
    )
    max_req_input_len: int | None = option(
        None, "Longest prompt, in tokens (default: as long as one token can follow).", ge=1, le=2**24
    )
    long_truncation_mode: Literal["none", "head", "center", "tail", "answer"] = option(
        "none",
        "What is done with prompts that are too long, alone or with max_tokens. none: refused; head, center, tail: the "
        "beginning, the middle or the end is cut off, and usage counts what is left; answer: the answer is shortened, "
        "and the end of a prompt cut off only where it leaves no room for one token.",
        turns={"allow-auto-truncate": "answer"},
    )
    json_model_override_args: str = option(
        "{}", "JSON object of config.json fields to replace.", aliases=["hf-overrides"]
    )

    sampling_defaults: Literal["model", "openai"] = option(
        "model",
        "What sampling fields are that a request leaves out. model: as its makers recommend (generation_config.json); "
        "openai: temperature 1, top_p 1.",
    )
    preferred_sampling_params: str = option(
        "{}",
        "JSON object of sampling fields for requests that leave them out; these go before --sampling-defaults.",
        aliases=["override-generation-config"],
    )
    eos_id: tuple[int, ...] = option((), "Ids of tokens that end an answer, in addition to the model's own.")

    @field_validator("completion_template")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in ("auto", *FORMATS) and not Path(name).suffix and not Path(name).is_file():
            close = difflib.get_close_matches(name, FORMATS, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{name!r} is neither a file nor one of auto, {', '.join(FORMATS)}{hint}")
        return name

    @field_validator("json_model_override_args", "preferred_sampling_params")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return text

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _several(cls, names: object) -> object:
        return (names,) if isinstance(names, str) else names

    @field_validator("served_model_name")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names) or not all(name and len(name) <= 256 for name in names):
            raise ValueError("must be different names of 1 to 256 characters")
        return names

    @model_validator(mode="after")
    def _fits_together(self) -> ModelOptions:
        for name in ("tokenizer_path", "chat_template"):
            if self.skip_tokenizer_init and getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is of no use with --skip-tokenizer-init: leave one out")
        return self
