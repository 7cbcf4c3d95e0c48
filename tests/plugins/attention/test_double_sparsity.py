"""Double sparsity: its dense part is held by the contract suite; here what it leaves out, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fwk
from fwk import Facts, SamplingParams
from fwk.errors import FwkError
from fwk.interfaces.attention import AttentionContext, AttentionLayer
from fwk.plugins import discover, find
from fwk.plugins.selection import plugin_options
from fwk_attention.double_sparsity.backend import DoubleSparsityBackend
from fwk_attention.double_sparsity.channels import Channels
from fwk_kit.testing.attention_cases import as_stored
from fwk_kit.testing.batches import block_tables, make_batch

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 8
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 8, 9] * 12, [5] * 20, [100, 101]]


def channel_file(folder: Path, lists: dict[str, Any]) -> str:
    path = folder / "channels.json"
    path.write_text(json.dumps(lists), encoding="utf-8")
    return str(path)


def for_all(folder: Path, channels: list[int], kind: str = "qk") -> str:
    """The same channels of every head of two layers."""
    return channel_file(folder, {f"model.layers.{i}.self_attn.{kind}_proj": [channels] for i in range(2)})


def make(path: str, kv_dtype: str = "auto", **options: Any) -> DoubleSparsityBackend:
    item = find(discover(), "attention", "double_sparsity")
    own = plugin_options(item, {item.key: {"ds_channel_config_path": path, **options}})
    return DoubleSparsityBackend(AttentionContext(torch.device("cpu"), torch.float32, kv_dtype, BLOCK, own))


def layer_of(backend: DoubleSparsityBackend, num_blocks: int, window: int | None = None) -> AttentionLayer:
    layer = AttentionLayer(0, HEADS, KV_HEADS, SIZE, SIZE**-0.5, window)
    form = backend.block_format(layer.kv_spec)
    filler = 255 if form.dtype == torch.uint8 else torch.nan
    layer.kv_cache = torch.full((num_blocks, *form.block_shape), filler, dtype=form.dtype)
    return layer


def decoded(
    backend: DoubleSparsityBackend, lens: list[int], layer: AttentionLayer, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Prompts of all tokens but the last, then the last of each: queries, outcome, keys and values by sequence."""
    random = torch.Generator().manual_seed(seed)
    tables = block_tables(lens, BLOCK)
    keys = [torch.randn(n, KV_HEADS, SIZE, generator=random) for n in lens]
    values = [torch.randn(n, KV_HEADS, SIZE, generator=random) for n in lens]
    q = torch.empty(0)
    for pasts, num_new in (([0] * len(lens), [n - 1 for n in lens]), ([n - 1 for n in lens], [1] * len(lens))):
        ends = [a + b for a, b in zip(pasts, num_new, strict=True)]
        k, v = (torch.cat([x[a:b] for x, a, b in zip(of, pasts, ends, strict=True)]) for of in (keys, values))
        batch = make_batch(pasts, num_new, tables, block_size=BLOCK)
        batch.plan = backend.plan(batch, [layer])
        q = torch.randn(sum(num_new), HEADS, SIZE, generator=random)
        out = backend.forward(q, k, v, layer, batch)
    return q, out, keys, values


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, channels: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, list[set[int]]]:
    """One token's attention as the paper's algorithm has it, in float64, a head at a time; and the tokens it took.

    q: [HEADS, SIZE]; k, v: [n, KV_HEADS, SIZE]; channels: [KV_HEADS, r].
    """
    out, taken = np.zeros((HEADS, SIZE)), []
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        query, keys, values = q[head].double().numpy(), k[:, of].double().numpy(), v[:, of].double().numpy()
        approximate = keys[:, channels[of]] @ query[channels[of]]
        heavy = np.argsort(-approximate)[:num_tokens]
        scores = keys[heavy] @ query * SIZE**-0.5
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ values[heavy]
        taken.append(set(heavy.tolist()))
    return out, taken


class TestNumbers:
    @pytest.mark.parametrize(("kind", "kv_dtype"), [("q", "auto"), ("k", "int8"), ("qk", "fp8_e4m3")])
    def test_the_heaviest_tokens_by_the_heaviest_channels(self, tmp_path: Path, kind: str, kv_dtype: str) -> None:
        """Each KV head has channels of its own; sequences on both sides of the threshold, in one step."""
        order = [np.random.default_rng(head).permutation(SIZE) for head in range(KV_HEADS)]
        lists = {f"model.layers.0.self_attn.{kind}_proj": [x.tolist() for x in order]}
        options = {"ds_heavy_channel_num": 4, "ds_heavy_token_num": 5, "ds_heavy_channel_type": kind}
        backend = make(channel_file(tmp_path, lists), kv_dtype, ds_sparse_decode_threshold=30, **options)
        lens = [31, 30, 9, 77, 64]
        q, out, keys, values = decoded(backend, lens, layer_of(backend, 60))
        channels = np.stack([x[:4] for x in order])
        for i, n in enumerate(lens):
            stored = (as_stored(x[i], kv_dtype) for x in (keys, values))
            wanted, taken = expected(q[i], *stored, channels, 5 if n > 30 else n)
            np.testing.assert_allclose(out[i].double().numpy(), wanted, atol=1e-5)
            assert n <= 30 or len(set().union(*taken)) > 5  # heads took tokens of their own

    def test_all_tokens_are_all_of_attention(self, tmp_path: Path) -> None:
        path = for_all(tmp_path, [3, 1])
        sparse = make(path, ds_heavy_channel_num=2, ds_heavy_token_num=100, ds_sparse_decode_threshold=0)
        full = make(path, ds_heavy_channel_num=2)
        found = [decoded(x, [70, 3], layer_of(x, 20))[1] for x in (sparse, full)]
        torch.testing.assert_close(*found)

    def test_a_window_sees_all_of_itself(self, tmp_path: Path) -> None:
        backend = make(
            for_all(tmp_path, [0]), ds_heavy_channel_num=1, ds_heavy_token_num=1, ds_sparse_decode_threshold=0
        )
        q, out, keys, values = decoded(backend, [40], layer_of(backend, 6, window=10))
        wanted, _ = expected(q[0], keys[0][-10:], values[0][-10:], np.zeros((KV_HEADS, 1), np.int64), 10)
        np.testing.assert_allclose(out[0].double().numpy(), wanted, atol=1e-5)

    def test_a_sequence_has_the_same_numbers_alone(self, tmp_path: Path) -> None:
        options = {"ds_heavy_channel_num": 2, "ds_heavy_token_num": 12, "ds_sparse_decode_threshold": 8}
        backend = make(for_all(tmp_path, [5, 2]), **options)
        alone, together = (decoded(backend, lens, layer_of(backend, 40), seed=3) for lens in ([10], [10, 200]))
        wanted, _ = expected(together[0][0], together[2][0], together[3][0], np.array([[5, 2]] * KV_HEADS), 12)
        np.testing.assert_allclose(together[1][0].double().numpy(), wanted, atol=1e-5)
        assert alone[1].isfinite().all()


class TestChannels:
    def layer(self) -> AttentionLayer:
        return AttentionLayer(0, 4, 2, 4, 0.5, prefix="h.0.attn")

    def order(self, folder: Path, lists: Any, kind: str = "qk") -> list[list[int]]:
        return Channels(channel_file(folder, lists), kind).order(self.layer()).tolist()

    def test_heads_that_share_keys_vote(self, tmp_path: Path) -> None:
        votes = [[3, 1, 0, 2], [1, 3, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
        assert self.order(tmp_path, {"h.0.attn.qk_proj": votes}) == [[1, 3, 0, 2], [0, 1, 2, 3]]

    @pytest.mark.parametrize("each", [1, 2])
    def test_a_rank_has_its_own_heads(self, tmp_path: Path, each: int) -> None:
        """Two ranks of a model with 4 KV heads and 8 heads: lists of the former, or of the latter."""
        lists = {"h.0.attn.qk_proj": [[(i // each) % 4] for i in range(4 * each)]}
        path = channel_file(tmp_path, lists)
        found = [Channels(path, "qk", rank, 2).order(self.layer())[:, 0].tolist() for rank in range(2)]
        assert found == [[0, 1], [2, 3]]

    def test_unnamed_channels_follow(self, tmp_path: Path) -> None:
        assert self.order(tmp_path, {"model.layers.0.self_attn.k_proj": [[2], [3]]}, "k") == [
            [2, 0, 1, 3],
            [3, 0, 1, 2],
        ]

    @pytest.mark.parametrize(
        ("lists", "why"),
        [
            ([], "JSON with a list by layer"),
            ({}, "has no model.layers.0.self_attn.qk_proj"),
            ({"h.0.attn.qk_proj": [[0, 1]] * 3}, "the file is of another model"),
            ({"h.0.attn.qk_proj": [[0, 1], [4, 1]]}, "different numbers below 4"),
            ({"h.0.attn.qk_proj": [[0, 0], [1, 2]]}, "different numbers below 4"),
            ({"h.0.attn.qk_proj": [[0, -1], [1, 2]]}, "different numbers below 4"),
            ({"h.0.attn.qk_proj": [["a"]]}, "must be a list of up to 4 channels"),
            ({"h.0.attn.qk_proj": [[0], [1, 2]]}, "must be a list of up to 4 channels"),
        ],
    )
    def test_what_fits_no_layer(self, tmp_path: Path, lists: Any, why: str) -> None:
        with pytest.raises(FwkError, match=why):
            self.order(tmp_path, lists)


class TestServed:
    def options(self, folder: Path, **more: Any) -> dict[str, Any]:
        path = for_all(folder, [4, 1, 2, 7])
        return {
            "enable_double_sparsity": True,
            "ds_channel_config_path": path,
            "ds_heavy_channel_num": 4,
            "dtype": "float32",
        } | more

    def test_below_the_threshold_nothing_changes(self, tmp_path: Path, tiny_llm: Callable[..., fwk.LLM]) -> None:
        plain = tiny_llm(attention_backend="torch", dtype="float32").generate(PROMPTS, GREEDY)
        found = tiny_llm(**self.options(tmp_path)).generate(PROMPTS, GREEDY)
        assert [x.token_ids for x in found] == [x.token_ids for x in plain]

    def test_past_it_fewer_tokens_are_read(self, tmp_path: Path, tiny_llm: Callable[..., fwk.LLM]) -> None:
        """One token of all changes the text; as many as there are does not, nor does company."""
        one, all_of = (self.options(tmp_path, ds_sparse_decode_threshold=8, ds_heavy_token_num=n) for n in (1, 1000))
        plain = [x.token_ids for x in tiny_llm(attention_backend="torch", dtype="float32").generate(PROMPTS, GREEDY)]
        assert [x.token_ids for x in tiny_llm(**all_of).generate(PROMPTS, GREEDY)] == plain
        llm = tiny_llm(**one)
        together = [x.token_ids for x in llm.generate(PROMPTS, GREEDY)]
        assert together != plain
        assert [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS] == together

    @pytest.mark.parametrize(
        ("more", "why"),
        [
            ({"ds_channel_config_path": ""}, "--ds-channel-config-path is needed: fwk heavy-channels MODEL"),
            ({"ds_channel_config_path": "/nowhere.json"}, "/nowhere.json"),
            ({"ds_heavy_channel_num": 1000}, "--ds-heavy-channel-num 1000: this model's heads have"),
            ({"speculative_algorithm": "ngram"}, "drafts would change the text"),
            ({"ds_heavy_channel_type": "k"}, "has no model.layers.0.self_attn.k_proj"),
        ],
    )
    def test_what_cannot_be_served_is_said_at_the_start(
        self, tmp_path: Path, tiny_llm: Callable[..., fwk.LLM], more: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(FwkError, match=why):
            tiny_llm(**self.options(tmp_path, **more))


def test_auto_never_takes_it_and_ranks_have_heads_of_their_own() -> None:
    spec = find(discover(), "attention", "double_sparsity").declaration
    assert "changes a model's numbers" in (spec.auto_skip_reason(Facts()) or "")
    assert "3 are too few for 2 ranks" in (spec.refusal(Facts(tp_size=2, num_kv_heads=3)) or "")
