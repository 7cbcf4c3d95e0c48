"""The safetensors loader."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import LoaderContext
from fwk_jinja.chat import ChatTemplate
from fwk_loaders._common.templates import joined
from fwk_loaders.safetensors.loader import SafetensorsLoader

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3).to(torch.bfloat16),
    "model.norm.weight": torch.ones(3),
    "model.layers.0.mlp.up_proj.weight": torch.arange(6, dtype=torch.float16).view(2, 3),
}
INDEX = "model.safetensors.index.json"


def open_folder(path: Path):
    return SafetensorsLoader(LoaderContext()).open(path)


@pytest.fixture
def single(tmp_path: Path, config, write_json) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    write_json(folder / "config.json", {**config, "auto_map": {"AutoModel": "evil.Model"}})
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path, config, write_json) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    write_json(folder / "config.json", config)
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items(), 1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    return folder


def change_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update({key.replace("__", "."): value for key, value in changes.items()})
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reads_weights(kind: str, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(kind)
    assert SafetensorsLoader.reads(folder) is None
    checkpoint = open_folder(folder)
    assert checkpoint.config()["vocab_size"] == 300
    weights = checkpoint.weights()
    assert set(weights.names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        assert weights.has(name)
        found = weights.tensor(name, tuple(expected.shape))
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert torch.equal(weights.raw(name), expected)
    with pytest.raises(ModelLoadError, match=r"tensor 'lm_head\.weight' is missing"):
        weights.tensor("lm_head.weight", (4, 3))
    with pytest.raises(
        ModelLoadError, match=r"\.safetensors: tensor 'model\.norm\.weight' has the shape \(3,\).*\(4,\)"
    ):
        weights.tensor("model.norm.weight", (4,))


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_damaged_file(single: Path, cut: int):
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a whole safetensors file.*fetch it again"):
        open_folder(single).weights()


def test_hostile_header(single: Path):
    for length in (2**63, 2**40, 100):
        (single / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{" * 90)
        with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
            open_folder(single).weights()


def test_missing_shard(sharded: Path):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors: missing, but"):
        open_folder(sharded)


def test_tensor_the_index_promises_but_the_file_has_not(sharded: Path):
    change_index(sharded, extra__weight="model-00001-of-00003.safetensors")
    with pytest.raises(ModelLoadError, match=r"model-00001.*tensor 'extra\.weight' is missing, but the index"):
        open_folder(sharded).weights()


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/secret.safetensors", "a/../../secret.safetensors", "..\\secret.safetensors",
     "model.bin", "x\0.safetensors", "", 3, None],
)  # fmt: skip
def test_index_entries_stay_in_the_folder(sharded: Path, name: object):
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded.parent / "secret.safetensors")
    change_index(sharded, evil=name)
    with pytest.raises(ModelLoadError, match=r"index\.json: .*(is not the name|must be a name)"):
        open_folder(sharded)


def test_links_stay_in_the_folder(sharded: Path):
    inside, outside = sharded / "inside.safetensors", sharded.parent / "outside.safetensors"
    first = sharded / "model-00001-of-00003.safetensors"
    first.rename(inside)
    first.symlink_to(inside.name)
    assert open_folder(sharded).weights().has("model.norm.weight")
    inside.rename(outside)
    first.unlink()
    first.symlink_to(outside)
    with pytest.raises(ModelLoadError, match="outside the model's folder"):
        open_folder(sharded)
    first.unlink()
    first.symlink_to(first.name)
    with pytest.raises(ModelLoadError, match="model-00001"):
        open_folder(sharded)


def test_hub_cache_links_into_blobs(sharded: Path, tmp_path: Path):
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"blob{number}"))
    assert set(open_folder(snapshot).weights().names()) == set(TENSORS)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\udcff"])
def test_damaged_index(sharded: Path, content: str):
    (sharded / INDEX).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        open_folder(sharded)


def test_what_it_does_not_read(tmp_path: Path, write_json):
    def reason() -> str:
        with pytest.raises(ModelLoadError):
            open_folder(tmp_path)
        return SafetensorsLoader.reads(tmp_path) or ""

    assert "config.json" in reason()
    write_json(tmp_path / "config.json", {})
    assert "needs model.safetensors" in reason()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in reason()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert "no index" in reason()
    (tmp_path / "file").write_bytes(b"")
    assert SafetensorsLoader.reads(tmp_path / "file") == "needs a folder"


def test_layouts_of_quantised_layers(single: Path, config, write_json):
    """Read off the tensors where they tell, else named as config.json does."""
    words = {f"a.{name}": torch.zeros(2, 2, dtype=torch.int32) for name in ("qweight", "qzeros")}
    packed = {"b.weight_packed": torch.zeros(4, 8, dtype=torch.int32), "b.weight_shape": torch.tensor([4, 64])}
    wide = {"c.weight_packed": torch.zeros(4, 16, dtype=torch.int32), "c.weight_shape": torch.tensor([4, 64])}
    others = {
        "d.weight": torch.zeros(2, 2, dtype=torch.int8),
        "e.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn),
        "f.weight": torch.zeros(2, 2, dtype=torch.bfloat16),
        "g.weight_packed": torch.zeros(2, 2, dtype=torch.uint8),
    }
    save_file({**words, **packed, **wide, **others}, single / "model.safetensors")

    def layouts(name: str, **quantization):
        write_json(single / "config.json", {**config, "quantization_config": quantization} if quantization else config)
        return open_folder(single).weights().layouts(name)

    assert layouts("a") == layouts("d") == layouts("") == ("plain",)
    assert layouts("a", quant_method="gptq", bits=4) == ("gptq:4",)
    assert layouts("a", quant_method="gptq", bits=8, checkpoint_format="gptq_v2") == ("gptq:8",)
    assert layouts("a", quant_method="gptq", bits=4, checkpoint_format="marlin") == ("gptq-marlin:4",)
    assert layouts("a", quant_method="awq", w_bit=4, version="GEMM") == ("awq:4",)
    assert layouts("a", quant_method="awq", bits=4, version="gemv_fast") == ("awq-gemv_fast:4",)
    assert layouts("e", quant_method="fp8") == ("fp8",)
    assert layouts("d", quant_method="bitsandbytes") == ("bitsandbytes",)
    assert layouts("f", quant_method="bitsandbytes") == layouts("missing", quant_method="gptq") == ("plain",)
    compressed = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    assert [layouts(name, **compressed)[0].removeprefix("compressed-tensors:") for name in "bcdefg"] == [
        "pack-quantized:4", "pack-quantized:8", "int-quantized", "float-quantized", "plain", "mixed-precision",
    ]  # fmt: skip
    assert len(layouts("", **compressed)) == 5, "what was left out is not among them"


def test_quantised_tensors_are_no_plain_ones(single: Path):
    save_file({"a.weight": torch.zeros(2, 2, dtype=torch.int8)}, single / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"'a.weight' is quantised \(I8\), but this layer reads plain numbers only"
    ):
        open_folder(single).weights().tensor("a.weight", (2, 2))


def test_tokenizer(single: Path):
    from fwk_loaders.dummy.tokenizer import build_tokenizer

    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: missing\. Make it"):
        open_folder(single).tokenizer()
    panics = {"type": "BPE", "vocab": {"q": 0, "z": 1}, "merges": ["q z"]}  # in the library
    for content in (b"", b"{}", b"[1]", b"\xff\xfe", json.dumps({"version": "1.0", "model": panics}).encode()):
        (single / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a tokeniser"):
            open_folder(single).tokenizer()
    build_tokenizer(300, "").save(str(single / "tokenizer.json"))
    assert open_folder(single).tokenizer().encode("ab").ids == [ord("a"), ord("b")]


def test_small_files(single: Path, write_json):
    checkpoint = open_folder(single)
    assert "eos_token_id" not in checkpoint.generation_config()
    assert checkpoint.tokenizer_config() == {}
    assert checkpoint.chat_template() is None
    write_json(single / "generation_config.json", {"eos_token_id": [1, 2]})
    write_json(
        single / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    )
    assert checkpoint.generation_config() == {"eos_token_id": [1, 2]}
    assert checkpoint.tokenizer_config() == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
    (single / "generation_config.json").write_text("{,}")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: not valid JSON"):
        checkpoint.generation_config()
    (single / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_folder(single)


def rendered(source: str, tools: list[Any] | None) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}], tools=tools)


def check_pair(source: str, with_tools: str, default: str) -> None:
    assert rendered(source, None) == rendered(default, None)
    assert rendered(source, [{"name": "f"}]) == rendered(with_tools, [{"name": "f"}])


PIECES = ["x", "\n", " ", "  {% if true %}\n y{% endif %}", "{%- set a = 1 -%}\n", "{{ tools }} ", "{# c #}\n", "\t"]


def test_two_chat_templates_in_one_render_as_each_alone() -> None:
    chosen = random.Random(1)
    for _ in range(300):
        one, two = ("".join(chosen.choices(PIECES, k=chosen.randint(1, 4))) for _ in range(2))
        check_pair(joined(one, two), two, one)


def test_chat_template_in_all_its_places(single: Path, write_json):
    checkpoint = open_folder(single)
    write_json(single / "chat_template.json", {"chat_template": "from json"})
    assert checkpoint.chat_template() == "from json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_json(single / "tokenizer_config.json", {"chat_template": named})
    check_pair(checkpoint.chat_template() or "", "tools", "plain")
    write_json(single / "tokenizer_config.json", {"chat_template": named[1:]})
    assert checkpoint.chat_template() == "plain"
    write_json(single / "tokenizer_config.json", {"chat_template": named[:1]})
    assert checkpoint.chat_template() == "tools"
    for wrong in ([*named[:1], {"name": "rag", "template": "x"}], 3, [], [3], [{"name": "default"}]):
        write_json(single / "tokenizer_config.json", {"chat_template": wrong})
        with pytest.raises(ModelLoadError, match="has no 'default'"):
            checkpoint.chat_template()
    write_json(single / "tokenizer_config.json", {"chat_template": "one"})
    assert checkpoint.chat_template() == "one"
    (single / "chat_template.jinja").write_text("file")
    assert checkpoint.chat_template() == "file"
    (single / "additional_chat_templates").mkdir()
    (single / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    check_pair(checkpoint.chat_template() or "", "with tools", "file")
    (single / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: not UTF-8"):
        checkpoint.chat_template()
