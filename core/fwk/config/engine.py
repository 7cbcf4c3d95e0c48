"""Core's options about the engine."""

from __future__ import annotations

from pydantic import ValidationInfo, field_validator

from fwk.config.options import Options, option


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
        aliases=["distributed-executor-backend"],
        stability="beta",
    )
    tensor_parallel_size: int = option(
        1,
        "Workers that share every layer's weights and heads, each with a device of its own (on a CPU: a process).",
        aliases=["tp-size", "tp"],
        ge=1,
        le=1024,
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages that the model's layers are divided into, one after another, each with --tensor-parallel-size workers; "
        "as many batches are under way at once. On a CPU, for decoders without recurrent layers, drafts or adapters.",
        aliases=["pp-size", "pp"],
        stability="beta",
        ge=1,
        le=64,
    )
    pp_max_micro_batch_size: int | None = option(
        None,
        "Most sequences that decode in one of the batches under way in the stages of --pipeline-parallel-size "
        "(default: an equal share of those that run).",
        stability="beta",
        ge=1,
    )
    disable_overlap_schedule: bool = option(
        False, "Plan a step only when the one before has come back, also with an executor that could overlap the two."
    )
    attention_backend: str = option("auto", "Attention kernels.")
    enable_deterministic_inference: bool = option(
        False,
        "Give a sequence the same numbers, to the bit, whatever is computed alongside it, however its prompt is cut "
        "and whatever of it was cached; refused where the chosen kernels do not promise that.",
        stability="beta",
    )
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
    enable_fp32_lm_head: bool = option(
        False,
        "Compute the last layer, which makes the logits, with float32 weights and results; on a CPU they take memory "
        "of their own.",
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
    cuda_graph_bs: tuple[int, ...] = option(
        (),
        "Numbers of sequences for which decode steps are captured on a GPU, each by itself (default: 1, 2, 4, and "
        "multiples of 8, from 256 on of 16); others are padded to the next. On a CPU one capture serves all.",
        stability="beta",
    )
    disable_cuda_graph_padding: bool = option(
        False,
        "Replay steps of exactly the captured numbers of sequences only, and compute all others operator by operator.",
        stability="beta",
    )
    operator_backend: str = option("auto", "Kernels of norms, rotary positions, gates and embeddings.")
    moe_runner_backend: str = option("auto", "Kernels of mixture-of-experts layers.", stability="beta")
    sampling_backend: str = option("auto", "Kernel that picks tokens from the logits.")
    schedule_policy: str = option(
        "auto", "Order, admission and pre-emption of requests.", aliases=["scheduling-policy"]
    )
    prefix_cache: str = option("auto", "Reuse of K/V between requests with a common prefix.")
    speculative_algorithm: str = option(
        "none", "Speculative decoder that drafts tokens for the model to verify.", stability="beta"
    )
    kv_cache_dtype: str = option(
        "auto", "Precision of the KV cache: auto (the model's dtype), or a format the attention backend offers."
    )
    grammar_backend: str = option(
        "auto", "Compiler of constrained output (JSON schema, regex, ...); none: such requests are refused."
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
    device_reserve_memory_bytes: int = option(
        0,
        "In place of --mem-fraction-static: bytes of a GPU's memory that this engine may take for weights, KV cache "
        "and steps; negative: all that are free before it starts but so many. 0: the fraction decides.",
        stability="beta",
        ge=-(2**50),
        le=2**50,
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
    chunked_prefill_size: int = option(
        2048,
        "Tokens of one prompt computed in one step; longer prompts take several. -1: a prompt is cut only if it is "
        "longer than a step.",
        turns={"disable-chunked-prefill": -1},
        ge=-1,
        le=2**20,
    )
    random_seed: int | None = option(None, "Seed for requests that bring none (default: a random one).", ge=0, lt=2**63)
    check_blocks: bool = option(
        False, "Prove the block accounting after every step (slow; for debugging plugins).", stability="beta"
    )
    disable_progress_bars: bool = option(
        False,
        "Draw no progress bars of downloads, loading, kernel builds and long runs. Without this they are drawn on a "
        "terminal or in a notebook, unless TQDM_DISABLE=1 is in the environment.",
        stability="beta",
    )

    @field_validator("chunked_prefill_size")
    @classmethod
    def _not_nothing(cls, size: int) -> int:
        if size == 0:
            raise ValueError("must be -1 (do not cut prompts) or at least 1")
        return size

    @field_validator("pp_max_micro_batch_size")
    @classmethod
    def _has_stages(cls, size: int | None, info: ValidationInfo) -> int | None:
        if size is not None and info.data.get("pipeline_parallel_size") == 1:
            raise ValueError("does nothing without --pipeline-parallel-size, whose stages have a batch each")
        return size

    @field_validator("mem_fraction_static", "device_reserve_memory_bytes")
    @classmethod
    def _is_alone(cls, size: float | None, info: ValidationInfo) -> float | None:
        for name in ("max_total_tokens", "mem_fraction_static"):
            if size and info.data.get(name) is not None:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"does nothing alongside {option}, which sets the size of the KV cache: give one")
        return size

    @field_validator("quantization_layers")
    @classmethod
    def _are_patterns(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            pattern, _, method = text.rpartition("=")
            if not pattern or not method:
                raise ValueError(f"--quantization-layers takes PATTERN=METHOD, as in lm_head=none, not {text!r}")
        return texts

    @field_validator("speculative_algorithm")
    @classmethod
    def _lower(cls, name: str) -> str:
        return name.lower()  # elsewhere these names are written in capitals
