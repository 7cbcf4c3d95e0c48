"""Models with an encoder and a decoder against transformers in float32, on tiny random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.helpers.architectures import close
from tests.helpers.checkpoints import token_ids
from tests.helpers.lazy import lazy
from tests.helpers.models import RunnableModel, on_ranks
from tests.helpers.rig import Server

import fwk
from fwk import SamplingParams
from fwk.errors import FwkError, InvalidRequest, ModelLoadError
from fwk_kit.testing.batches import block_tables, make_batch
from fwk_loaders.dummy.tokenizer import build_tokenizer

transformers = lazy("transformers")

VOCAB = 320
T5 = {
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 30,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
BART = {
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 256,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "flan-t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "scale_decoder_outputs": False},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "bart scaled": (
        "BartConfig",
        "BartForConditionalGeneration",
        {**BART, "scale_embedding": True, "forced_bos_token_id": 7, "activation_function": "relu"},
    ),
}
SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}


def write(folder: Path, kind: str, **changes: Any) -> transformers.PreTrainedModel:
    """A checkpoint with a tokeniser of bytes; returns the reference."""
    config_type, model_type, settings = KINDS[kind]
    torch.manual_seed(0)
    given = {"vocab_size": VOCAB, **settings, **changes, "attn_implementation": "eager"}
    model = getattr(transformers, model_type)(getattr(transformers, config_type)(**given)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = name.endswith("ttention.q.weight")  # T5's scores are not scaled
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.05 if small else 0.25)
        if "bart" in kind:
            model.get_buffer("final_logits_bias").normal_()
    model.save_pretrained(folder)
    build_tokenizer(VOCAB, str(folder)).save(str(folder / "tokenizer.json"))
    return model


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers' own loop generates, without those the decoder begins with."""
    forced = getattr(model.config, "forced_bos_token_id", None) is not None
    settings: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None}
    ids = torch.tensor([prompt])
    out = model.generate(  # pyright: ignore[reportCallIssue]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count + forced,
        do_sample=False,
        use_cache=False,
        **settings,
    )
    return out[0, 1 + forced :].tolist()


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write(folder, request.param), folder


class Texts:
    """Prompts and what their decoders have read, fed to a model in steps that need not be alike."""

    def __init__(self, folder: Path, prompts: Sequence[list[int]], texts: Sequence[list[int]], **options: Any) -> None:
        self.model = RunnableModel(folder, **options)
        self.prompts = prompts
        self.tokens = [[*p, *[0] * (-len(p) % 16), *text] for p, text in zip(prompts, texts, strict=True)]
        self.tables = block_tables([len(x) for x in self.tokens])

    def step(self, chosen: Sequence[int], pasts: Sequence[int], ends: Sequence[int]) -> list[torch.Tensor]:
        """Logits of all tokens of the sequences ``chosen`` from ``pasts`` to ``ends``."""
        new = [self.tokens[i][past:end] for i, past, end in zip(chosen, pasts, ends, strict=True)]
        lens = [len(x) for x in new]
        batch = make_batch(pasts, lens, [self.tables[i] for i in chosen], token_ids=new)
        batch = replace(batch, encoder_lens_np=np.array([len(self.prompts[i]) for i in chosen]))
        with torch.inference_mode():
            return list(self.model.model.logits(self.model.model.forward(batch)).split(lens))


def wanted_logits(reference: transformers.PreTrainedModel, prompt: list[int], text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([text])).logits[0]


def test_logits_of_steps_in_which_others_begin_go_on_and_verify(
    pair: tuple[transformers.PreTrainedModel, Path],
) -> None:
    reference, folder = pair
    prompts = [token_ids(n, n) for n in (70, 16, 5)]
    texts = [[2, *token_ids(n, 9)] for n in (60, 30, 44)]
    served = Texts(folder, prompts, texts)
    wanted = [wanted_logits(reference, p, t) for p, t in zip(prompts, texts, strict=True)]
    starts = [len(x) - len(t) for x, t in zip(served.tokens, texts, strict=True)]
    ends = [len(x) for x in served.tokens]
    first = served.step([0], [0], [starts[0] + 1])  # begins alone
    close(first[0][starts[0] :], wanted[0][:1])
    # One goes on with 40 tokens at once, one begins with one token, one as after a pre-emption with all it has.
    mixed = served.step([0, 1, 2], [starts[0] + 1, 0, 0], [starts[0] + 41, starts[1] + 1, ends[2]])
    close(mixed[0], wanted[0][1:41])
    close(mixed[1][starts[1] :], wanted[1][:1])
    close(mixed[2][starts[2] :], wanted[2])
    for i in range(3):
        decoded = served.step([0, 1], [starts[0] + 41 + i, starts[1] + 1 + i], [starts[0] + 42 + i, starts[1] + 2 + i])
        close(decoded[0], wanted[0][41 + i : 42 + i])
        close(decoded[1], wanted[1][1 + i : 2 + i])
    drafted = served.step([0, 1], [starts[0] + 44, starts[1] + 4], [starts[0] + 50, starts[1] + 8])
    close(drafted[0], wanted[0][44:50])
    close(drafted[1], wanted[1][4:8])
    assert served.model.weights.asked >= set(served.model.weights.names()) - served.model.weights.skipped


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_two_ranks_together_are_the_model(kind: str, tmp_path: Path) -> None:
    reference, prompt, text = write(tmp_path, kind), token_ids(40), [2, *token_ids(20, 3)]
    wanted = wanted_logits(reference, prompt, text)
    for logits in on_ranks(2, lambda tp: Texts(tmp_path, [prompt], [text], tp=tp).step([0], [0], [48 + 21])[0]):
        close(logits[48:], wanted)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7, "max_running_requests": 3},
        {"max_total_tokens": 200, "max_running_requests": 8},
        {"executor": "threaded"},
        {"speculative_algorithm": "ngram"},
        {"kv_cache_dtype": "auto", "page_size": 1},
    ],
    ids=["plain", "chunks", "pre-emption", "overlap", "n-gram", "blocks of one"],
)
def test_greedy_tokens_through_the_whole_engine(
    pair: tuple[transformers.PreTrainedModel, Path], options: dict[str, Any]
) -> None:
    reference, folder = pair
    prompts = [token_ids(n, n) for n in (70, 3, 33, 8, 41)]
    settings = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with fwk.LLM(str(folder), **{**SMALL, **options}) as llm:
        done = llm.generate(prompts, settings)
        stats = llm.engine.stats()
    assert (stats.preemptions > 0) == ("max_total_tokens" in options)
    assert (stats.draft_tokens > 0) == ("speculative_algorithm" in options)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert [x.token_ids for x in done] == [greedy(reference, prompt, 24) for prompt in prompts]
    assert [x.prompt_token_ids for x in done] == prompts


@pytest.mark.gate(1)
def test_several_samples_of_one_prompt(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    """A sample is the same alone, and logarithms of probabilities are transformers'."""
    reference, folder = pair
    prompt = token_ids(20)
    sampled = SamplingParams(max_tokens=12, temperature=1, seed=3, ignore_eos=True, logprobs=0)
    with fwk.LLM(str(folder), **SMALL) as llm:
        three = llm.generate([prompt], sampled, n=3)
        [one] = llm.generate([prompt], sampled)
    assert three[0].token_ids == one.token_ids
    assert len({tuple(x.token_ids) for x in three}) == 3
    forced = getattr(reference.config, "forced_bos_token_id", None)
    begin = [reference.config.decoder_start_token_id, *([] if forced is None else [forced])]
    for done in three:
        wanted = wanted_logits(reference, prompt, [*begin, *done.token_ids[:-1]])[len(begin) - 1 :].log_softmax(-1)
        found = torch.tensor([entry.logprob for entry in done.logprobs or []])
        close(found, wanted[torch.arange(12), torch.tensor(done.token_ids)])


@pytest.mark.sweep
def test_tensor_parallel_ranks_generate_the_same(tmp_path: Path) -> None:
    reference, prompts = write(tmp_path, "t5"), [token_ids(30, 1), token_ids(9, 2)]
    with fwk.LLM(str(tmp_path), executor="processes", tensor_parallel_size=2, **SMALL) as llm:
        done = llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
    assert [x.token_ids for x in done] == [greedy(reference, prompt, 10) for prompt in prompts]


BOTH = "has an encoder and a decoder"
DRAFTS = "cannot draft for .*, whose prompts an encoder reads: choose a --speculative-algorithm without a model"
WHOLE = f"{BOTH}, and each K/V of a prompt depends on all of it"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prefix cache": ({"prefix_cache": "radix"}, f"--prefix-cache radix: .* {WHOLE}"),
    "cache tiers": ({"cache_tiers": ("host",)}, f"--cache-tiers host: .* {WHOLE}"),
    "adapters": ({"enable_lora": True}, f"--enable-lora: .* {BOTH}"),
    "hidden states": (
        {"enable_return_hidden_states": True},
        "this one has both; leave --enable-return-hidden-states out",
    ),
    "determinism": ({"enable_deterministic_inference": True}, "is not possible: .* computes prompts whole"),
    "backend": ({"attention_backend": "cpu"}, "'cpu' .* lacks cross_attention.*, which model '{kind}' asks"),
    "decode backend": ({"decode_attention_backend": "cpu"}, "no model plugin serves '{name}' with these options"),
    "embed": ({"task": "embed"}, f"--task embed: .* {BOTH}, which generate together"),
    "classify": ({"task": "classify"}, f"--task classify: .* {BOTH}, which generate together"),
    "pooling": ({"pooling_type": "mean"}, "--pooling-type: this model generates text"),
    "trees": (
        {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
        f"is asked for trees of drafts: .* {BOTH}",
    ),
    "draft model": ({"speculative_algorithm": "standalone", "speculative_draft_model_path": "{draft}"}, DRAFTS),
    **{
        name: ({"speculative_algorithm": name, "speculative_draft_model_path": "{draft}"}, DRAFTS)
        for name in ("eagle", "eagle3", "medusa")
    },
    "own head": ({"speculative_algorithm": "nextn"}, DRAFTS),
}


@pytest.mark.gate(5)
@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_had_is_refused(what: str, kind: str, tmp_path: Path) -> None:
    name = write(tmp_path, kind).config.architectures[0]
    options, message = REFUSED[what]
    options = {key: value.format(draft=tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(FwkError, match=message.format(name=name, kind=kind)):
        fwk.LLM(str(tmp_path), **SMALL, **options)


def test_log_probabilities_of_a_prompt_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "bart")
    with fwk.LLM(str(tmp_path), **SMALL) as llm:
        with pytest.raises(InvalidRequest, match="an encoder reads the prompt of this model"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=2, prompt_logprobs=1))
        with pytest.raises(InvalidRequest, match=r"return.hidden.states"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=2, return_hidden_states=True))
        with pytest.raises(InvalidRequest, match="this server's context is 256 tokens"):
            llm.generate([token_ids(250)], SamplingParams(max_tokens=7))
        [done] = llm.generate([token_ids(1)], SamplingParams(max_tokens=255, ignore_eos=True))
        assert len(done.token_ids) == 255


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("t5", {"decoder_start_token_id": None, "pad_token_id": None}, "'decoder_start_token_id' must say which token"),
        ("bart", {"decoder_start_token_id": None}, "'decoder_start_token_id' must say which token"),
        ("bart", {"encoder_attention_heads": 8}, "'decoder_attention_heads' is 4 and 'encoder_attention_heads' 8"),
        ("t5", {"feed_forward_proj": "tango"}, "activation 'tango' is not known"),
    ],
)
def test_wrong_settings_are_named(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(tmp_path), **SMALL)


@pytest.mark.sweep
def test_a_completion_over_http(tmp_path: Path) -> None:
    reference, prompt = write(tmp_path, "flan-t5"), token_ids(21)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    server = Server(tmp_path, "--dtype", "float32", "--load-format", "auto").start()
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        refused = httpx.post(f"{server.url}/v1/completions", json=body | {"prompt_logprobs": 0}, timeout=60)
    finally:
        server.close()
    assert answer.status_code == 200, answer.text
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["usage"]["prompt_tokens"] == 21
    assert answer.json()["usage"]["completion_tokens"] == 8
    with fwk.LLM(str(tmp_path), **SMALL) as llm:
        [done] = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert done.token_ids == greedy(reference, prompt, 8)
    assert answer.json()["choices"][0]["text"] == done.text
