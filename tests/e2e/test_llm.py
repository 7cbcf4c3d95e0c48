"""``fwk.LLM`` on a tiny random model: the whole engine in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import fwk
from fwk import AttentionBackendSpec, ModelSpec, SamplingParams, SpeculativeDecoderSpec, hookimpl
from fwk.errors import ConfigError, InvalidRequest, ModelLoadError, PluginError
from fwk.plugins import discover

Tiny = Callable[..., fwk.LLM]
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40, 1, 90, 16, 33, 64)]


def sampled(seed: int | None = None, **settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True, **settings)  # type: ignore[arg-type]


def ids(llm: fwk.LLM, prompts: list[list[int]], sampling: object) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(prompts, sampling)]  # type: ignore[arg-type]


@pytest.mark.gate(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": "none"},
        {"chunked_prefill_size": 16},
        {"chunked_prefill_size": 1, "max_prefill_tokens": 8},
        {"page_size": 1},
        {"page_size": 64},
        {"max_total_tokens": 108, "page_size": 4},  # forces pre-emption
        {"schedule_policy": "lpm"},
    ],
)
def test_greedy_and_seeded_output_is_the_same_in_every_setting(tiny_llm: Tiny, options: dict[str, object]) -> None:
    reference = tiny_llm(prefix_cache="none", max_running_requests=1)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    settings = [sampled(seed=i, top_p=0.9, repetition_penalty=1.1) for i in range(len(PROMPTS))]
    llm = tiny_llm(**options)
    for sampling in ([greedy] * len(PROMPTS), settings):
        alone = [ids(reference, [p], [s])[0] for p, s in zip(PROMPTS, sampling, strict=True)]
        assert ids(llm, PROMPTS, sampling) == alone
        assert ids(llm, PROMPTS, sampling) == alone, "again, now from the cache"
    if options.get("max_total_tokens"):
        assert llm.engine.stats().preemptions > 0
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)


@pytest.mark.gate(1)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_quantised_kv_gives_the_same_output_in_every_setting(tiny_llm: Tiny, kv_cache_dtype: str) -> None:
    """However the past was chunked, cached or computed again, it is read as it was stored."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    reference = tiny_llm(prefix_cache="none", max_running_requests=1, kv_cache_dtype=kv_cache_dtype)
    alone = [ids(reference, [p], greedy)[0] for p in PROMPTS]
    for options in ({}, {"chunked_prefill_size": 7}, {"max_total_tokens": 108, "page_size": 4}):
        llm = tiny_llm(kv_cache_dtype=kv_cache_dtype, **options)
        assert ids(llm, PROMPTS, greedy) == alone
        assert ids(llm, PROMPTS, greedy) == alone, "again, now from the cache"


def test_seeds_matter_and_n_differ(tiny_llm: Tiny) -> None:
    llm = tiny_llm()
    one, other = ids(llm, [PROMPTS[0]] * 2, [sampled(1), sampled(2)])
    assert one != other
    many = llm.generate([PROMPTS[0]], sampled(1), n=4)
    assert many[0].token_ids == one
    assert len({tuple(done.token_ids) for done in many}) == 4


def test_without_a_seed_every_request_differs(tiny_llm: Tiny) -> None:
    llm = tiny_llm()
    first, second = ids(llm, [PROMPTS[0]] * 2, sampled())
    assert first != second


def test_prompt_logprobs_agree_with_generated_ones(tiny_llm: Tiny) -> None:
    """What the model said of its own output when it made it, it says again when it reads it."""
    for options in ({}, {"chunked_prefill_size": 7}):
        llm = tiny_llm(**options)
        done = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=10, temperature=0, logprobs=3, ignore_eos=True))[0]
        assert done.logprobs is not None
        again = llm.generate(
            [PROMPTS[2] + done.token_ids], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
        )[0]
        assert again.prompt_logprobs is not None
        assert again.prompt_logprobs[0] is None
        assert len(again.prompt_logprobs) == len(PROMPTS[2]) + 10
        for made, read in zip(done.logprobs, again.prompt_logprobs[len(PROMPTS[2]) :], strict=True):
            assert read is not None
            assert (made.token_id, made.rank) == (read.token_id, read.rank) == (made.top[0][0], 1)
            assert made.logprob == pytest.approx(read.logprob, abs=1e-4)


def test_prompt_logprobs_after_preemption_are_whole(tiny_llm: Tiny) -> None:
    llm = tiny_llm(max_total_tokens=128, page_size=4, prefix_cache="none")
    settings = SamplingParams(max_tokens=30, temperature=0, prompt_logprobs=0, ignore_eos=True)
    for done, prompt in zip(llm.generate(PROMPTS, settings), PROMPTS, strict=True):
        assert done.prompt_logprobs is not None
        assert [p.token_id if p else None for p in done.prompt_logprobs] == [None, *prompt[1:]]
    assert llm.engine.stats().preemptions > 0


def test_cached_tokens_are_reported(tiny_llm: Tiny) -> None:
    llm = tiny_llm(page_size=8)
    prompt = [9] * 41
    first, second = (llm.generate([prompt], SamplingParams(max_tokens=1))[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 40)


def test_stop_strings_end_the_text(tiny_llm: Tiny) -> None:
    llm = tiny_llm()
    free = llm.generate(["hello"], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))[0]
    stop = free.text[4:6]
    done = llm.generate(["hello"], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop=[stop]))[0]
    assert done.text == free.text[: free.text.index(stop)]
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert len(done.token_ids) < 20


def test_streaming_gives_the_same_text_and_leaving_it_aborts(tiny_llm: Tiny) -> None:
    llm = tiny_llm()
    settings = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    assert "".join(llm.stream("hello", settings)) == llm.generate("hello", settings)[0].text
    stream = llm.stream("hello", settings)
    next(stream)
    stream.close()
    assert llm.engine.stats().num_running == 0


@pytest.mark.parametrize(
    ("prompt", "settings", "param"),
    [
        ([], {}, "prompt"),
        ([5] * 512, {}, "prompt"),
        ([320], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"max_tokens": 513}, "max_tokens"),
        ([5], {"temperature": float("nan")}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"logit_bias": {320: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": {1: float("nan")}}, "logit_bias"),
        ([5], {"stop_token_ids": [-1]}, "stop_token_ids"),
        ([5], {"allowed_token_ids": []}, "allowed_token_ids"),
        ([5], {"stop": [""]}, "stop"),
        ([5], {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_wrong_input_is_refused_by_name(
    tiny_llm: Tiny, prompt: list[int], settings: dict[str, object], param: str
) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidRequest) as error:
        llm.generate([prompt], SamplingParams(**settings))  # type: ignore[arg-type]
    assert error.value.param == param
    assert not llm.engine.has_work


def test_a_request_nobody_can_pick_a_token_for_fails_alone(tiny_llm: Tiny) -> None:
    llm = tiny_llm()
    impossible = SamplingParams(max_tokens=4, allowed_token_ids=[7], bad_words=["\x00"], logit_bias={}, temperature=1.0)
    banned = SamplingParams(max_tokens=4, allowed_token_ids=[7], bad_word_token_ids=[[7]], temperature=1.0)
    assert ids(llm, [[5]], impossible) == [[7, 7, 7, 7]]
    with pytest.raises(InvalidRequest, match="no token is allowed"):
        llm.generate([[5], [6]], [banned, sampled(1)])
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    assert len(ids(llm, [[6]], sampled(1))[0]) == 12


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_backend": "flash"}, PluginError, "unknown attention backend 'flash'"),
        ({"kv_cache_dtype": "fp5"}, ConfigError, "no installed plugin offers 'fp5'; auto, fp8_e4m3, int8 are"),
        ({"quantization": "int3"}, PluginError, "unknown quantizer 'int3'"),
        ({"speculative_algorithm": "EAGLE9"}, PluginError, "unknown speculative decoder"),
        ({"device": "cuda"}, ConfigError, "no usable GPU"),
        ({"context_length": 100_000}, ConfigError, "longer than the model's 512 positions"),
        ({"max_total_tokens": 2**31 - 1}, ConfigError, "MiB of KV cache"),
        (
            {"json_model_override_args": '{"architectures": ["Nonesuch"]}'},
            ModelLoadError,
            "no model plugin serves 'Non",
        ),
        ({"model_impl": "qwen3"}, PluginError, "it serves Qwen3ForCausalLM, Qwen3MoeForCausalLM, not LlamaFor"),
        ({"model_impl": "nonesuch"}, PluginError, "unknown model 'nonesuch'; installed: .*, transformers"),
        ({"json_model_override_args": "{"}, ConfigError, "not JSON"),
        ({"nonsense": 1}, ConfigError, "unknown option --nonsense"),
        (
            {"strict": True, "device": "cpu", "json_model_override_args": '{"dtype": "float16"}'},
            PluginError,
            "--strict: dtype (bfloat16|float32) instead of the checkpoint's float16",
        ),
        ({"port": 9}, ConfigError, "--port is for fwk serve: fwk.LLM has no server"),
        ({"tool_call_parser": "hermes"}, ConfigError, "--tool-call-parser is for fwk serve"),
        ({"strict_requests": True}, ConfigError, "--strict-requests is for fwk serve"),
        ({"log_requests": True}, ConfigError, "--log-requests is for fwk serve"),
        ({"load_balance_method": "nope"}, PluginError, "--load-balance-method: unknown load balancer 'nope'"),
        ({"load_balance_method": "round_robin"}, ConfigError, "--load-balance-method is for fwk serve"),
        (
            {"mem_fraction_static": 0.5, "max_total_tokens": 256},
            ConfigError,
            "--mem-fraction-static: does nothing alongside --max-total-tokens",
        ),
    ],
)
def test_what_cannot_be_is_said_before_serving(
    tiny_folder: object, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fwk.LLM(str(tiny_folder), load_format="dummy", **options)


def test_an_unknown_model_says_who_was_asked() -> None:
    with pytest.raises(ModelLoadError, match="no model 'no-such-model'"):
        fwk.LLM("no-such-model")


class TreeSpec(SpeculativeDecoderSpec):
    """Asks for tree masks."""

    def required_features(self, options: object) -> frozenset[str]:
        return frozenset({"tree_mask"})


class PoorPlugin:
    """An attention backend that can do nothing special, and two plugins that ask for more."""

    @hookimpl
    def attention_backends(self) -> list[AttentionBackendSpec]:
        return [AttentionBackendSpec(name="poor", load="fwk_attention.torch_sdpa.backend:TorchBackend")]

    @hookimpl
    def speculative_decoders(self) -> list[SpeculativeDecoderSpec]:
        load = "tests.helpers.scripted_decoder:EchoDecoder"
        return [TreeSpec(name="trees", load=load)]

    @hookimpl
    def models(self) -> list[ModelSpec]:
        load = "fwk_models.llama.model:Llama"
        return [ModelSpec(name="odd", load=load, architectures=("Odd",), features=frozenset({"latent", "soft_cap"}))]


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"speculative_algorithm": "trees"}, "tree_mask"),
        ({"json_model_override_args": '{"architectures": ["Odd"]}', "model_impl": "odd"}, "latent, soft_cap"),
        (
            {"json_model_override_args": '{"architectures": ["MistralForCausalLM"], "sliding_window": 64}'},
            "sliding_window",
        ),
        ({}, None),
    ],
)
def test_attention_must_have_what_model_and_decoder_need(
    tiny_folder: object, options: dict[str, object], needed: str | None
) -> None:
    plugins = discover()
    plugins.register(PoorPlugin(), "attention.poor", "tests", "1")

    def start() -> None:
        fwk.LLM(
            str(tiny_folder),
            load_format="dummy",
            plugins=plugins,
            attention_backend="poor",
            max_total_tokens=256,
            **options,  # type: ignore[arg-type]
        ).close()

    if needed is None:
        start()
        return
    lacks = f"lacks {needed}, which (model|speculative decoder)|'poor' for {needed}, which it lacks"
    with pytest.raises(PluginError, match=lacks):
        start()
