"""The GGUF loader on small files: configuration, names, row order, tokenisers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint, reference_greedy, token_ids
from tests.helpers.lazy import lazy
from tests.helpers.quantised import gguf_of

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError
from fwk.types import ModelConfig
from fwk_loaders.gguf.loader import GGUFLoader
from fwk_loaders.gguf.types import TENSOR_TYPES

gguf = lazy("gguf")
transformers = lazy("transformers")

U32, I32, F32, BOOL, STRING = 4, 5, 6, 7, 8


def test_reads_files_and_folders(tmp_path: Path, kit):
    assert GGUFLoader.reads(tmp_path / "missing.gguf") is not None
    assert "found 0" in (GGUFLoader.reads(tmp_path) or "")
    kit.open(kit.tiny(), "a.gguf")
    assert GGUFLoader.reads(tmp_path) is None
    assert GGUFLoader.reads(tmp_path / "a.gguf") is None
    (tmp_path / "other").write_bytes(b"GGML")
    assert "GGUF" in (GGUFLoader.reads(tmp_path / "other") or "")
    kit.open(kit.tiny(), "b.gguf")
    assert "found 2" in (GGUFLoader.reads(tmp_path) or "")
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert "config.json" in (GGUFLoader.reads(tmp_path) or "")


def test_opens_a_folder_with_one_file_only(tmp_path: Path, kit):
    from fwk.interfaces.loader import LoaderContext

    loader = GGUFLoader(LoaderContext())
    with pytest.raises(ModelLoadError, match="Found: none"):
        loader.open(tmp_path)
    kit.open(kit.tiny(), "a.gguf")
    assert loader.open(tmp_path).path == tmp_path / "a.gguf"
    kit.open(kit.tiny(), "b.gguf")
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        loader.open(tmp_path)


def test_config_of_a_llama(kit):
    config = kit.open(kit.tiny()).config()
    assert config["rms_norm_eps"] == 1e-5
    read = ModelConfig.from_dict(config, "model.gguf")
    assert (read.architecture, read.vocab_size, read.head_size) == ("LlamaForCausalLM", 16, 8)
    assert (read.num_layers, read.num_heads, read.num_kv_heads, read.intermediate_size) == (1, 4, 2, 64)
    assert (read.rope.theta, read.rope.kind, read.eos_token_ids) == (500000.0, "default", (0,))
    assert read.tie_word_embeddings
    assert read.torch_dtype == "bfloat16"


def test_output_matrix_unties_the_embedding(kit):
    builder = kit.tiny()
    builder.add("output.weight", [32, 16], 3)
    checkpoint = kit.open(builder)
    assert not checkpoint.config()["tie_word_embeddings"]
    assert checkpoint.weights().tensor("lm_head.weight", (16, 32)).shape == (16, 32)


def test_linear_and_yarn_rope_scaling(kit):
    builder = kit.tiny()
    builder.entries["llama.rope.scaling.type"] = kit.scalar(STRING, "linear")
    builder.entries["llama.rope.scaling.factor"] = kit.scalar(F32, 4.0)
    assert kit.open(builder).config()["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    builder.entries["llama.rope.scaling.type"] = kit.scalar(STRING, "yarn")
    with pytest.raises(ModelLoadError, match="original_context_length"):
        kit.open(builder).config()
    builder.entries["llama.rope.scaling.original_context_length"] = kit.scalar(U32, 64)
    assert kit.open(builder).config()["rope_scaling"]["original_max_position_embeddings"] == 64
    builder.entries["llama.rope.scaling.type"] = kit.scalar(STRING, "longrope")
    with pytest.raises(ModelLoadError, match="linear or yarn"):
        kit.open(builder).config()


def test_llama3_rope_scaling_is_found_again(kit):
    """The file has divisors only. transformers computes the frequencies they must come from."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters={**rope, "rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    divisors = (plain / scaled).numpy().astype("<f4")

    builder = kit.tiny()
    builder.entries["llama.attention.key_length"] = kit.scalar(U32, 64)
    builder.add("rope_freqs.weight", [32], 0, divisors.tobytes())
    checkpoint = kit.open(builder, "model.gguf")
    assert checkpoint.config()["rope_scaling"] == rope | {"factor": pytest.approx(32.0)}
    assert "rope_freqs.weight" not in list(checkpoint.weights().names())
    builder.find("rope_freqs.weight").data = divisors[::-1].tobytes()
    with pytest.raises(ModelLoadError, match="follows no rule"):
        kit.open(builder, "other.gguf").config()


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of Q and K."""
    size = rows.shape[0] // num_heads
    return rows.reshape(num_heads, 2, size // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("type_id", TENSOR_TYPES, ids=lambda number: TENSOR_TYPES[number].name)
def test_every_type_and_the_order_of_rows(kit, type_id: int):
    k_type = TENSOR_TYPES[type_id].block_size == 256
    columns = 256 if k_type else 32
    builder = kit.tiny(weight_type=8)
    for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16)):
        item = builder.find(f"blk.0.{name}.weight")
        item.dims, item.type, item.data = [columns, rows], type_id, kit.blocks(type_id, rows * columns, seed=rows)
    weights = kit.open(builder).weights()
    for name, given, rows, heads in (
        ("attn_q", "q_proj", 32, 4),
        ("attn_k", "k_proj", 16, 2),
        ("attn_v", "v_proj", 16, 0),
    ):
        stored = np.frombuffer(builder.find(f"blk.0.{name}.weight").data, np.uint8).reshape(rows, -1)
        expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(type_id))
        found = weights.tensor(f"model.layers.0.self_attn.{given}.weight", (rows, columns))
        assert str(found.dtype) == {"F16": "torch.float16", "BF16": "torch.bfloat16"}.get(
            TENSOR_TYPES[type_id].name, "torch.float32"
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name, shape = f"model.layers.0.self_attn.{given}.weight", (rows, columns)
            assert torch.equal(weights.tensor_as(name, shape, dtype), found.to(dtype))
            out = torch.full(shape, torch.nan, dtype=dtype)
            assert weights.tensor_as(name, shape, dtype, out) is out
            assert torch.equal(out, found.to(dtype))
        again = interleave(found.float().numpy(), heads) if heads else found.float().numpy()
        np.testing.assert_array_equal(again, expected)
        raw = weights.raw(f"model.layers.0.self_attn.{given}.weight").flatten(1).numpy()
        np.testing.assert_array_equal(interleave(raw, heads) if heads else raw, stored)


def test_tensors_have_their_own_memory(kit):
    weights = kit.open(kit.tiny()).weights()
    first = weights.tensor("model.norm.weight", (32,))
    before = first.clone()
    first.zero_()
    assert torch.equal(weights.tensor("model.norm.weight", (32,)), before)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_what_was_read_leaves_memory_and_can_be_read_again(kit):
    builder = kit.tiny()
    builder.add("output.weight", [1024, 2048], 1)
    checkpoint = kit.open(builder)
    weights = checkpoint.weights()
    first = weights.tensor("lm_head.weight", (2048, 1024))
    left = [_resident(checkpoint.path)]
    raw = weights.raw("lm_head.weight")
    left.append(_resident(checkpoint.path))
    assert max(left) < raw.numel() / 4  # what is left was read ahead
    assert torch.equal(weights.tensor("lm_head.weight", (2048, 1024)), first)
    assert torch.equal(weights.raw("lm_head.weight"), raw)


def _resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:")) * 1024


def test_layouts(kit):
    builder = kit.tiny(weight_type=3)
    builder.add("output.weight", [32, 16], 1)
    weights = kit.open(builder).weights()
    assert weights.layouts("model.layers.0.self_attn.q_proj") == ("gguf:Q4_1", "plain")
    assert weights.layouts("model.embed_tokens") == ("gguf:Q8_0", "plain")
    assert weights.layouts("lm_head") == weights.layouts("model.norm") == weights.layouts("missing") == ("plain",)
    assert set(weights.layouts("")) == {"gguf:Q4_1", "gguf:Q8_0", "plain"}


def test_names_shapes_and_what_is_missing(kit):
    builder = kit.tiny()
    builder.add("blk.0.strange.weight", [32])
    weights = kit.open(builder).weights()
    names = set(weights.names())
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"} <= names
    assert "blk.0.strange.weight" in names
    assert all(weights.has(name) for name in names - {"blk.0.strange.weight"})
    assert not weights.has("lm_head.weight")
    assert not weights.has("nonsense")
    with pytest.raises(ModelLoadError, match=r"'model.layers.1.mlp.up_proj.weight' \(in GGUF: 'blk.1.ffn_up.weight'\)"):
        weights.tensor("model.layers.1.mlp.up_proj.weight", (64, 32))
    with pytest.raises(ModelLoadError, match=r"'blk.0.ffn_up.weight'.*\(64, 32\).*needs \(32, 64\)"):
        weights.tensor("model.layers.0.mlp.up_proj.weight", (32, 64))


def test_qwen2_has_biases_and_keeps_its_rows(kit):
    builder = kit.tiny("qwen2")
    bias = builder.add("blk.0.attn_q.bias", [32])
    checkpoint = kit.open(builder)
    assert checkpoint.config()["architectures"] == ["Qwen2ForCausalLM"]
    found = checkpoint.weights().tensor("model.layers.0.self_attn.q_proj.bias", (32,))
    np.testing.assert_array_equal(found.numpy(), np.frombuffer(bias.data, "<f4"))
    stored = np.frombuffer(builder.find("blk.0.attn_q.weight").data, np.uint8).reshape(32, -1)
    raw = checkpoint.weights().raw("model.layers.0.self_attn.q_proj.weight").flatten(1)
    np.testing.assert_array_equal(raw.numpy(), stored)


def test_qwen3_has_norms_of_queries_and_keys(kit):
    builder = kit.tiny("qwen3")
    builder.entries["qwen3.attention.key_length"] = kit.scalar(U32, 8)
    builder.add("blk.0.attn_q_norm.weight", [8])
    checkpoint = kit.open(builder)
    assert checkpoint.config()["head_dim"] == 8
    assert checkpoint.weights().tensor("model.layers.0.self_attn.q_norm.weight", (8,)).shape == (8,)


def test_gemma3_takes_one_off_its_norms(kit):
    builder = kit.tiny("gemma3")
    builder.entries["gemma3.block_count"] = kit.scalar(U32, 7)
    builder.entries["gemma3.attention.sliding_window"] = kit.scalar(U32, 512)
    builder.add("blk.0.post_ffw_norm.weight", [32], 8)
    checkpoint = kit.open(builder)
    config = checkpoint.config()
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["sliding_window"] == 512
    stored = np.frombuffer(builder.find("blk.0.ffn_norm.weight").data, "<f4")
    found = checkpoint.weights().tensor("model.layers.0.pre_feedforward_layernorm.weight", (32,))
    np.testing.assert_array_equal(found.numpy(), stored - 1)
    for name in ("pre", "post"):
        norm = f"model.layers.0.{name}_feedforward_layernorm.weight"
        halves = checkpoint.weights().tensor_as(norm, (32,), torch.bfloat16)
        assert torch.equal(halves, checkpoint.weights().tensor(norm, (32,)).bfloat16())
    assert checkpoint.weights().has("model.layers.0.post_feedforward_layernorm.weight")


def test_byte_level_tokenizer(kit):
    checkpoint = kit.open(kit.tiny())
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.encode("hello<|im_end|>").ids == [12, 2]
    assert tokenizer.encode("12").tokens == ["1", "2"], "smollm: digits stand alone, though 12 is a token"
    assert tokenizer.encode("<tool>he").tokens == ["<tool>", "he"]
    assert tokenizer.decode([1, 12, 3, 2]) == "hello<tool>", "control tokens are special, user-defined ones are not"
    assert checkpoint.chat_template() == "{{ messages[0]['content'] }}"
    assert checkpoint.tokenizer_config()["bos_token"] == "<|im_start|>"
    assert checkpoint.tokenizer_config()["eos_token"] == "<|end|>"
    assert checkpoint.generation_config() == {"eos_token_id": [0, 2], "bos_token_id": 1}


def test_the_template_for_tools_is_read(kit):
    builder = kit.tiny()
    builder.entries["tokenizer.chat_template.tool_use"] = kit.scalar(STRING, "with tools")
    found = kit.open(builder).chat_template()
    assert found.index("if tools") < found.index("with tools") < found.index("messages[0]")


def test_sampling_may_stand_next_to_the_file(kit):
    builder = kit.tiny()
    path = kit.open(builder).path
    path.with_name("generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 7}')
    found = kit.open(builder).generation_config()
    assert found["temperature"] == 0.2
    assert found["eos_token_id"] != 7, "the file's own header goes first"


def test_the_end_of_a_turn_is_a_control_token_wherever_it_is(kit):
    builder = kit.tiny()
    tokens = ["<|end|>", "<|im_start|>", "<|im_end|>", *(f"word {number}" for number in range(12)), "<|eot_id|>"]
    builder.entries["tokenizer.ggml.tokens"] = kit.array(STRING, tokens)
    builder.entries["tokenizer.ggml.token_type"] = kit.array(I32, [3, 3] + [1] * 13 + [3])
    assert kit.open(builder).generation_config()["eos_token_id"] == [0, 15]
    builder.entries["tokenizer.ggml.token_type"] = kit.array(I32, [1] * 16)
    assert kit.open(builder).generation_config()["eos_token_id"] == [0]


def test_special_tokens_are_named_wherever_they_are(kit):
    builder = kit.tiny()
    builder.entries["tokenizer.ggml.eos_token_id"] = kit.scalar(U32, 15)
    builder.entries["tokenizer.ggml.padding_token_id"] = kit.scalar(U32, 3)
    config = kit.open(builder).tokenizer_config()
    assert {name: text for name, text in config.items() if name.endswith("_token")} == {
        "bos_token": "<|im_start|>",
        "eos_token": "12",
        "pad_token": "<tool>",
    } | {name: config[name] for name in ("add_bos_token", "add_eos_token")}


def test_bos_is_added_when_the_file_says_so(kit):
    builder = kit.tiny()
    builder.entries["tokenizer.ggml.add_bos_token"] = kit.scalar(BOOL, True)
    builder.entries["tokenizer.ggml.add_eos_token"] = kit.scalar(BOOL, True)
    checkpoint = kit.open(builder)
    assert checkpoint.tokenizer_config()["add_bos_token"]
    assert checkpoint.tokenizer().encode("hello").ids == [1, 12, 0]
    assert checkpoint.tokenizer().encode("hello", add_special_tokens=False).ids == [12]


def byte_level_vocabulary() -> list[str]:
    from fwk_loaders.dummy.tokenizer import _byte_characters

    return _byte_characters()


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'ll", "\u0120pay", "\u01201234", "!!", "\u0120\u0120", "\u0120ok", "\u010a"]),
        ("olmo", ["I", "'ll", "\u0120pay", "\u01201234", "!!", "\u0120\u0120", "\u0120ok", "\u010a"]),
        ("refact", ["I", "'ll", "\u0120pay", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120ok", "\u010a"]),
        ("dbrx", ["I", "'ll", "\u0120pay", "\u0120", "123", "4", "!!", "\u0120\u0120", "\u0120ok", "\u010a"]),
        (
            "hunyuan",
            ["I", "'ll", "\u0120pay", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120ok", "\u010a"],
        ),
        ("smollm", ["I", "'ll", "\u0120pay", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120ok", "\u010a"]),
        ("llama-bpe", ["I", "'ll", "\u0120pay", "\u0120", "123", "4", "!!", "\u0120\u0120", "\u0120ok", "\u010a"]),
        ("qwen2", ["I", "'ll", "\u0120pay", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120ok", "\u010a"]),
    ],
)
def test_how_text_is_cut_into_words(kit, pre: str, words: list[str]):
    builder = kit.tiny()
    builder.entries["tokenizer.ggml.pre"] = kit.scalar(STRING, pre)
    tokenizer = kit.open(builder).tokenizer()
    found = tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 1234!!   ok\n")  # pyright: ignore
    assert [word for word, _ in found] == words


def test_sentencepiece_tokenizer(kit):
    """Scores decide, unknown characters become bytes, and a space stands before the text."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    builder = kit.tiny(vocab_size=272)
    builder.entries |= {
        "tokenizer.ggml.model": kit.scalar(STRING, "llama"),
        "tokenizer.ggml.tokens": kit.array(STRING, tokens),
        "tokenizer.ggml.scores": kit.array(F32, scores),
        "tokenizer.ggml.token_type": kit.array(I32, [2, 3, 3] + [6] * 256 + [1] * 8),
        "tokenizer.ggml.unknown_token_id": kit.scalar(U32, 0),
        "tokenizer.ggml.eos_token_id": kit.scalar(U32, 2),
    }
    tokenizer = kit.open(builder).tokenizer()
    assert tokenizer.encode("bc").tokens == ["<s>", "\u2581", "bc"]
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == ["\u2581a", "bc"], "bc has the best score"
    found = tokenizer.encode("a\u00e9", add_special_tokens=False)
    assert found.tokens == ["\u2581a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found.ids) == "a\u00e9"
    assert tokenizer.decode(tokenizer.encode("ab c</s>").ids) == "ab c"
    builder.entries["tokenizer.ggml.add_space_prefix"] = kit.scalar(BOOL, False)
    tokenizer = kit.open(builder).tokenizer()
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_ids_stay_where_they_are_when_tokens_are_empty(kit):
    builder = kit.tiny()
    tokens = ["<|end|>", "<|im_start|>", "<|im_end|>", "", "", "h"]
    builder.entries["tokenizer.ggml.tokens"] = kit.array(STRING, tokens)
    builder.entries["tokenizer.ggml.token_type"] = kit.array(I32, [3, 3, 3, 5, 5, 1])
    builder.entries["tokenizer.ggml.merges"] = kit.array(STRING, [])
    assert kit.open(builder).tokenizer().encode("h").ids == [5]


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_mixture_of_experts_is_what_transformers_says_of_its_numbers(kind: str, tmp_path: Path) -> None:
    """Written by the gguf package's names; served packed and as numbers."""
    make_checkpoint(tmp_path / "source", "qwen3_moe", moe_intermediate_size=128)
    twins = gguf_of(tmp_path / "source", tmp_path / "twins", kind)
    reference = (
        transformers.Qwen3MoeForCausalLM.from_pretrained(twins.plain, attn_implementation="eager").float().eval()
    )
    prompts = [token_ids(n, n) for n in (40, 7)]
    wanted = [reference_greedy(reference, prompt, 8) for prompt in prompts]
    settings = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for quantization in ("none", "gguf") if kind == "Q8_0" else ("none",):
        with fwk.LLM(str(twins.path), dtype="float32", quantization=quantization, max_total_tokens=512) as llm:
            assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted
