"""What core itself reads. A plugin's options live with the plugin; core never learns their fields."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from pydantic import ValidationInfo, field_validator

from fwk.config.options import Options, option


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
        None, "Folder or tokenizer.json to use instead of the model's own tokenizer.", aliases=["tokenizer"]
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
        stability="beta",
    )
    pooling_type: Literal["auto", "mean", "cls", "last", "token"] = option(
        "auto",
        "How a model that does not generate makes a vector of hidden states: mean, cls (the first), last, or token (a "
        "vector of each); auto: as the checkpoint says, else the last of a decoder and the mean of an encoder.",
        stability="beta",
    )
    classifier_from_token: tuple[str, ...] = option(
        (),
        "With --task classify, a model that generates scores by its logits of one token, or of the second less the "
        "first: no yes.",
        stability="beta",
    )
    weights_cache: str = option(
        "auto",
        "Folder that keeps weights as the CPU's kernels read them, so that the next start maps them; auto: "
        "fwk/weights in the user's cache folder, for models of 600 MiB or more; none: nothing is kept.",
        stability="beta",
    )
    weights_cache_size: float = option(
        64.0,
        "GiB that files in --weights-cache may take; those used longest ago are removed.",
        stability="beta",
        gt=0,
        le=2**20,
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
    long_truncation_mode: Literal["none", "head", "center", "tail"] = option(
        "none",
        "What is done with prompts that are too long, alone or with max_tokens. none: refused; head, center, tail: the "
        "beginning, the middle or the end is cut off, and usage counts what is left.",
        turns={"allow-auto-truncate": "tail"},
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


class EngineOptions(Options):
    """Device, kernels, memory and scheduling."""

    device: str = option("auto", "What workers compute on; auto takes a GPU when there is one.")
    cpu_threads: int | None = option(
        None,
        "Threads that compute on the CPU, in each worker (default: one for each physical core, or OMP_NUM_THREADS).",
        ge=1,
        le=1024,
    )
    executor: str = option(
        "auto",
        "How the engine reaches its workers; auto: in its own process if there is one, else the best for their number.",
        stability="beta",
    )
    tensor_parallel_size: int = option(
        1,
        "Workers that share every layer's weights and heads, each with a device of its own (on a CPU: a process).",
        aliases=["tp-size", "tp"],
        ge=1,
        le=1024,
    )
    data_parallel_size: int = option(
        1,
        "Engines behind the server's address, each with all of the model, its own KV cache and its own devices.",
        aliases=["dp-size", "dp"],
        ge=1,
        le=64,
    )
    load_balance_method: str = option("auto", "Which engine serves a request, if there are several.")
    disable_overlap_schedule: bool = option(
        False, "Plan a step only when the one before has come back, also with an executor that could overlap the two."
    )
    attention_backend: str = option("auto", "Attention kernels.")
    quantization: str = option(
        "auto",
        "Weight format the linear layers compute with; auto: what the checkpoint holds.",
        aliases=["quant-type"],
    )
    quantization_exclude: tuple[str, ...] = option(
        (),
        "Layers that stay unquantised, by patterns of their names: lm_head '*.down_proj' 'model.layers.0.*'.",
        stability="beta",
    )
    quantization_layers: tuple[str, ...] = option(
        (),
        "Weight formats of single layers: PATTERN=METHOD, as in lm_head=none; the first that matches counts.",
        stability="beta",
    )
    max_mamba_cache_size: int | None = option(
        None,
        "States of recurrent layers in memory: one for each running request, the rest for prefixes to continue from "
        "(default: as many of both).",
        stability="beta",
        ge=1,
        le=2**20,
    )
    mamba_track_interval: int = option(
        256,
        "Generated tokens after which the state of recurrent layers is kept for the prefix cache again.",
        stability="beta",
        ge=1,
        le=2**24,
    )
    enable_fp32_lm_head: bool = option(
        False,
        "Compute the last layer, which makes the logits, with float32 weights and results; on a CPU they take memory "
        "of their own.",
    )
    mamba_ssm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of the states of recurrent layers; auto: float32.", stability="beta"
    )
    disable_hybrid_swa_memory: bool = option(
        False,
        "Keep all of a sequence in layers that see a window only, too, with one block table for all layers.",
        aliases=["disable-hybrid-kv-cache-manager"],
    )
    disable_cuda_graph: bool = option(
        False,
        "Compute every step operator by operator; otherwise steps, of prompts as of next tokens, are captured once "
        "and replayed, on a CPU as a tape of native operators.",
        aliases=["disable-cudagraph", "enforce-eager"],
    )
    cuda_graph_max_bs: int = option(
        256,
        "Most sequences of a step that is replayed from its capture; larger steps are computed operator by operator.",
        aliases=["graph-max-batch-size"],
        ge=1,
        le=4096,
    )
    operator_backend: str = option("auto", "Kernels of norms, rotary positions, gates and embeddings.")
    moe_runner_backend: str = option("auto", "Kernels of mixture-of-experts layers.", stability="beta")
    sampling_backend: str = option("auto", "Kernel that picks tokens from the logits.")
    schedule_policy: str = option(
        "auto", "Order, admission and pre-emption of requests.", aliases=["scheduling-policy"]
    )
    prefix_cache: str = option("auto", "Reuse of K/V between requests with a common prefix.")
    cache_tiers: tuple[str, ...] = option(
        (),
        "Stores of K/V outside the device, fastest first, for a prefix cache that uses them; its own come before.",
        aliases=["hicache-storage-backend"],
        stability="beta",
    )
    speculative_algorithm: str = option(
        "none", "Speculative decoder that drafts tokens for the model to verify.", stability="beta"
    )
    enable_lora: bool = option(False, "Serve LoRA adapters alongside the model.")
    lora_backend: str = option("auto", "LoRA kernels.", needs="enable_lora")
    lora_paths: tuple[str, ...] = option(
        (), "Adapters to load at the start, as NAME=FOLDER.", aliases=["lora-modules"], needs="enable_lora"
    )
    max_loras_per_batch: int = option(
        8,
        "LoRA adapters computed with at once; sequences that need another one wait.",
        aliases=["max-loras"],
        needs="enable_lora",
        ge=1,
        le=1024,
    )
    max_lora_rank: int = option(64, "Largest rank of a LoRA adapter.", needs="enable_lora", ge=1, le=4096)
    max_loaded_loras: int | None = option(
        None,
        "LoRA adapters kept in host memory; loading more is refused (default: no limit).",
        aliases=["max-cpu-loras"],
        needs="enable_lora",
        ge=1,
    )
    kv_cache_dtype: str = option(
        "auto", "Precision of the KV cache: auto (the model's dtype), or a format the attention backend offers."
    )
    grammar_backend: str = option(
        "auto", "Compiler of constrained output (JSON schema, regex, ...); none: such requests are refused."
    )
    disable_jump_forward: bool = option(
        False,
        "Write text that a grammar leaves no choice about one token a step, as any other; outputs are the same.",
        stability="beta",
    )
    page_size: int = option(16, "Tokens per KV cache block.", aliases=["block-size"], ge=1, le=1024)
    max_total_tokens: int | None = option(
        None,
        "Size of the KV cache in tokens (default: from --mem-fraction-static).",
        aliases=["max-total-token-num"],
        ge=1,
        le=2**31,
    )
    mem_fraction_static: float | None = option(
        None,
        "Share of the device's free memory for weights and KV cache (default: 0.88 on a GPU; on a CPU the KV cache "
        "alone gets a tenth of the free memory, used only as it fills).",
        aliases=["mem-fraction", "gpu-memory-utilization"],
        gt=0,
        lt=1,
    )
    max_running_requests: int = option(
        256,
        "Sequences computed at once; others wait.",
        aliases=["running-max-req-size", "max-batch-size", "max-num-seqs"],
        ge=1,
        le=4096,
    )
    max_prefill_tokens: int | None = option(
        None,
        "Tokens computed in one step, over all sequences (default: 2048; on a CPU 512, or two for each running "
        "sequence, since longer steps are no cheaper there and keep others waiting).",
        aliases=["batch-max-tokens", "max-num-batched-tokens"],
        ge=1,
        le=2**20,
    )
    max_start_tokens: int | None = option(
        None,
        "Tokens of prompts in a step from which it starts no further prompt, so that the first of several are answered "
        "sooner (default: no limit; on a CPU 16, since computing more of them together is hardly cheaper there).",
        ge=1,
        le=2**20,
    )
    prefill_max_requests: int | None = option(
        None,
        "Prompts computed in one step, from which it starts no further one (default: no limit).",
        aliases=["max-context-batch-size"],
        turns={"prefill-only-one-req": 1},
        ge=1,
        le=4096,
    )
    chunked_prefill_size: int = option(
        2048,
        "Tokens of one prompt computed in one step; longer prompts take several. -1: a prompt is cut only if it is "
        "longer than a step.",
        turns={"disable-chunked-prefill": -1},
        ge=-1,
        le=2**20,
    )
    enable_mixed_chunk: bool = option(
        True, "Compute prompts and next tokens in the same step; false: steps of the one and of the other take turns."
    )
    schedule_conservativeness: float = option(
        1.0,
        "Blocks of KV cache kept free for each running sequence when another one starts: more means fewer "
        "pre-emptions, less means more sequences at once.",
        ge=0,
        le=2**20,
    )
    num_continuous_decode_steps: int = option(
        1,
        "Steps from one look at the waiting queue to the next, while sequences run: more means less scheduling, and "
        "a longer wait for the first token.",
        aliases=["router-max-wait-tokens"],
        ge=1,
        le=1024,
    )
    random_seed: int | None = option(None, "Seed for requests that bring none (default: a random one).", ge=0, lt=2**63)
    check_blocks: bool = option(
        False, "Prove the block accounting after every step (slow; for debugging plugins).", stability="beta"
    )

    @field_validator("chunked_prefill_size")
    @classmethod
    def _not_nothing(cls, size: int) -> int:
        if size == 0:
            raise ValueError("must be -1 (do not cut prompts) or at least 1")
        return size

    @field_validator("mem_fraction_static")
    @classmethod
    def _is_alone(cls, fraction: float | None, info: ValidationInfo) -> float | None:
        if fraction is not None and info.data.get("max_total_tokens") is not None:
            raise ValueError("does nothing beside --max-total-tokens, which sets the size of the KV cache: give one")
        return fraction

    @field_validator("speculative_algorithm")
    @classmethod
    def _lower(cls, name: str) -> str:
        return name.lower()  # elsewhere these names are written in capitals


KEY_PATTERN = r"^[\x21-\x7e]*$"
"""What a header can carry."""


class ServerOptions(Options):
    """The HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    uds: str | None = option(None, "Path of a unix socket to listen on, instead of --host and --port.", min_length=1)
    ssl_certfile: str | None = option(None, "Serve HTTPS with this certificate (PEM, with its chain).")
    ssl_keyfile: str | None = option(
        None, "Private key of --ssl-certfile, where it is in a file of its own.", needs="ssl_certfile"
    )
    ssl_keyfile_password: str | None = option(
        None, "Password of the private key.", is_secret=True, needs="ssl_certfile", min_length=1
    )
    ssl_ca_certs: str | None = option(
        None, "Let in only clients with a certificate of one of these authorities (PEM).", needs="ssl_certfile"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Web pages of these origins (https://chat.example.org, or * for all) may use the server from a browser."
    )
    api_key: str | None = option(
        None,
        "Key that clients must send as 'Authorization: Bearer KEY'.",
        is_secret=True,
        min_length=1,
        max_length=1024,
        pattern=KEY_PATTERN,  # an empty one would leave the door open
    )
    api_key_file: str | None = option(
        None, "File of more such keys: a line 'NAME KEY' for each holder, whose name is in the log of requests."
    )
    admin_api_key: str | None = option(
        None,
        "Key of the server's administrator. With it come the routes for administrators (loading LoRA adapters, ...), "
        "which take this key and no other; without it they do not exist.",
        is_secret=True,
        min_length=1,
        max_length=1024,
        pattern=KEY_PATTERN,
    )
    also: tuple[str, ...] = option(
        (),
        "More models at the same address, each as NAME=MODEL; requests choose by their 'model'. They load when first "
        "asked for. A --config file may have a list of them, with options of their own, under 'models'.",
        stability="beta",
    )
    idle_timeout: float | None = option(
        None,
        "Seconds without a request after which a model's engines end and give their memory back; the next request "
        "starts them again (default: never).",
        stability="beta",
        gt=0,
        le=2592000,
    )
    models_memory_limit: float | None = option(
        None,
        "GiB that the engine processes of all models of --also may take together; to load one more, those used least "
        "recently end first (default: no limit).",
        stability="beta",
        gt=0,
        le=2**20,
    )
    tool_call_parser: str = option(
        "auto",
        "Parser of the model's tool calls; auto: the one whose marks are in the chat template, else one that reads "
        "plain JSON calls; none: only calls that tool_choice forces are read.",
    )
    reasoning_parser: str = option(
        "auto",
        "Parser that splits thinking from the answer; auto: the one whose marks are in the chat template, "
        "none: thinking stays in the text.",
    )
    tokenizer_worker_num: int = option(
        2, "Threads that tokenise and render prompts, outside of the event loop and Python's lock.", ge=1, le=64
    )
    stream_interval: int = option(
        1,
        "Tokens gathered for an event of a stream, after the first: more means fewer events and less work for server "
        "and client.",
        ge=1,
        le=1024,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least level of what the log shows.")
    log_format: Literal["text", "json"] = option(
        "text", "Lines of the log: text for people, or a JSON object each for programs.", stability="beta"
    )
    shutdown_timeout: float = option(
        5.0,
        "Seconds that requests under way may take after SIGTERM until they end with an error; a second one ends all "
        "at once.",
        ge=0,
        le=86400,
    )
    take_over: bool = option(
        False,
        "Take the listening socket of the server that runs at this address, once this one serves: no connection is "
        "refused meanwhile, and the old one finishes what it has and ends. Without one there, listen as usual.",
        stability="experimental",
    )
    grammar_timeout: float = option(
        2.0,
        "Seconds of CPU time that compiling the grammar of one request may take; one that takes more is refused (400).",
        gt=0,
        le=60,
    )
    health_monitor: bool = option(
        True,
        "Restart an engine that died or hangs; the server gives up after five deaths within a minute. Without it, "
        "/health says 503 until the server is started again.",
        stability="beta",
    )
    watchdog_timeout: float = option(
        300.0,
        "Seconds a step may take, and the engine's loop may not answer, until it counts as hung and is ended.",
        gt=0,
        le=86400,
    )
    ping_timeout: float = option(
        20.0, "Seconds without an answer from the engine's loop until /health reports 503.", gt=0, le=3600
    )
    max_queued_requests: int = option(
        4096,
        "Sequences that may wait beyond --max-running-requests, for each engine; more requests are refused (429).",
        ge=0,
        le=2**20,
    )
    concurrency_limit: int | None = option(
        None,
        "POST requests answered at once, over all routes; more are refused with 429 (default: as many as may run or "
        "wait in all engines).",
        ge=1,
        le=2**20,
    )
    concurrency_with_block: bool = option(
        False,
        "Let requests above --concurrency-limit wait, --max-queued-requests of them at most, instead of refusing them.",
        needs="concurrency_limit",
    )
    queue_timeout: float | None = option(
        None,
        "Seconds a request may wait for its first token until it is given up with 503 (default: no limit).",
        gt=0,
        le=86400,
    )
    request_timeout: float | None = option(
        None, "Seconds a request may take altogether until it is ended with 504 (default: no limit).", gt=0, le=86400
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names the Host header may hold ('*': any, '*.example.org': what ends so); others are refused with 421 "
        "(default: any; without --api-key on a loopback --host: localhost and IP addresses).",
    )
    read_timeout: float = option(
        60.0, "Seconds a client may take to send a whole request until it is cut off with 408.", gt=0, le=86400
    )
    write_timeout: float = option(
        60.0,
        "Seconds a client may take to make room in the full buffer of its reply (64 KB) until it is cut off.",
        gt=0,
        le=86400,
    )
    max_body_bytes: int = option(8 * 2**20, "Largest request body, in bytes.", ge=1024, le=2**31)

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _as_json(cls, origins: object) -> object:
        """vLLM takes a JSON list."""
        if not isinstance(origins, str | list | tuple):
            return origins
        one = [origins] if isinstance(origins, str) else cast("Sequence[object]", origins)
        return json.loads(str(one[0])) if len(one) == 1 and str(one[0]).startswith("[") else one

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin):
                raise ValueError(f"{origin!r} is no origin: one is * or scheme://host[:port], without a path")
        return origins

    @field_validator("admin_api_key")
    @classmethod
    def _is_another(cls, key: str | None, info: ValidationInfo) -> str | None:
        if key is not None and key == info.data.get("api_key"):
            raise ValueError("must be another key than --api-key: else all users are administrators")
        return key


class PluginOptions(Options):
    """How plugins are chosen."""

    strict: bool = option(
        False, "Make it an error when auto departs from the checkpoint's dtype or from the best-ranked plugin."
    )
    plugin_catalogue: str | None = option(
        None,
        "TOML file of plugins that need not be installed (tables [[plugin]] with package and flags): a flag of one is "
        "answered with how to install it.",
        stability="beta",
    )
    allow_override: tuple[str, ...] = option((), "Names a plugin may take over from another (family.name).")
    plugins_lock: str | None = option(
        None, "File of 'fwk plugins freeze': nothing starts unless exactly those plugins are installed."
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that was asked for, validated; nothing assigns to it afterwards.

    ``plugin_options`` holds the options of each plugin some were given for, by the plugin's name.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    plugins: PluginOptions = field(default_factory=PluginOptions)
    plugin_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    seed: int = field(default_factory=lambda: secrets.randbits(62))
