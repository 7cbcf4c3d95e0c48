"""Damaged and hostile GGUF files: each is refused at once, with a sentence, and without large allocations."""

import json
import random
import struct
import subprocess
import sys
import time
import tracemalloc

import pytest

from fwk.errors import ModelLoadError

U8, U32, I32, F32, BOOL, STRING, U64 = 0, 4, 5, 6, 7, 8, 10
HUGE = 2**62
ALL_ONES = 2**64 - 1


def drain(checkpoint):
    """Ask for everything a checkpoint has."""
    checkpoint.config()
    checkpoint.generation_config()
    checkpoint.tokenizer_config()
    checkpoint.chat_template()
    weights = checkpoint.weights()
    for info in checkpoint._metadata.file.tensors.values():
        for given in weights._architecture.given_names(info.name) or ():
            weights.tensor(given, info.shape)
    checkpoint.tokenizer()


def edit(**fields):
    def change(builder, kit):
        for name, value in fields.items():
            setattr(builder, name, value)

    return change


def entry(key, value):
    def change(builder, kit):
        builder.entries[key] = value(kit)

    return change


def without(key):
    return lambda builder, kit: builder.entries.pop(key)


def tensor(which="output_norm.weight", /, **fields):
    def change(builder, kit):
        found = builder.find(which)
        for field, value in fields.items():
            setattr(found, field, value)

    return change


def extra(key, value):
    return lambda builder, kit: builder.extra_entries.append((key, value))


def string_length(length):
    return struct.pack("<IQ", STRING, length)


def array_header(kind, count):
    return struct.pack("<IIQ", 9, kind, count)


CASES = {
    "wrong magic": (edit(magic=b"GGML"), "not a GGUF file"),
    "version 0": (edit(version=0), "version 0"),
    "version 1": (edit(version=1), "version 1 is not supported"),
    "version 4": (edit(version=4), "version 4"),
    "big endian": (edit(version=0x03000000), "big-endian"),
    "no tensors can be so many": (edit(num_tensors=HUGE), "number of tensors is 4611686018427387904"),
    "tensors all ones": (edit(num_tensors=ALL_ONES), "number of tensors"),
    "one tensor too many": (edit(num_tensors=12), "type|dimensions|truncated|name"),
    "no entries can be so many": (edit(num_entries=HUGE), "number of metadata entries"),
    "entries all ones": (edit(num_entries=ALL_ONES), "number of metadata entries"),
    "one entry too many": (edit(num_entries=30), "metadata entry|value type|key|type of"),
    "string of huge length": (extra("x", string_length(HUGE)), "x has a length of 4611686018427387904"),
    "string of all ones": (extra("x", string_length(ALL_ONES)), "x has a length"),
    "array of huge length": (extra("x", array_header(U32, HUGE)), "the length of x is 4611686018427387904"),
    "array of strings of huge length": (extra("x", array_header(STRING, HUGE)), "the length of x"),
    "array whose size overflows": (extra("x", array_header(U64, 2**61 + 1)), "the length of x"),
    "array element of huge length": (
        extra("x", array_header(STRING, 2) + struct.pack("<QQ", ALL_ONES - 8, 0)),
        "of x runs past the end",
    ),
    "nested array": (extra("x", array_header(9, 1)), "unsupported element type 9"),
    "unknown element type": (extra("x", array_header(99, 1)), "unsupported element type 99"),
    "unknown value type": (extra("x", struct.pack("<I", 13)), "unknown value type 13"),
    "boolean of 7": (extra("x", struct.pack("<IB", BOOL, 7)), "x is a boolean"),
    "repeated key": (extra("llama.block_count", struct.pack("<II", U32, 1)), "repeated key"),
    "empty key": (extra("", struct.pack("<II", U32, 1)), "empty key"),
    "key not UTF-8": (extra(b"\xff\xfe", struct.pack("<II", U32, 1)), "not UTF-8"),
    "key too long": (extra("k" * 70000, struct.pack("<II", U32, 1)), "length of 70000 bytes"),
    "string not UTF-8": (extra("x", struct.pack("<IQ", STRING, 2) + b"\xc3\x28"), "x is not UTF-8"),
    "alignment 0": (entry("general.alignment", lambda k: k.scalar(U32, 0)), "power of two"),
    "alignment 24": (entry("general.alignment", lambda k: k.scalar(U32, 24)), "power of two"),
    "alignment 1": (entry("general.alignment", lambda k: k.scalar(U32, 1)), "power of two"),
    "alignment of 2 GiB": (entry("general.alignment", lambda k: k.scalar(U32, 2**31)), "power of two"),
    "alignment of text": (entry("general.alignment", lambda k: k.scalar(STRING, "32")), "power of two"),
    "tensor listed twice": (tensor(name="blk.0.ffn_norm.weight"), "listed twice"),
    "tensor without a name": (tensor(name=""), "has no name"),
    "tensor name too long": (tensor(name="n" * 300), "length of 300 bytes"),
    "no dimensions": (tensor(dims=[]), "0 dimensions"),
    "five dimensions": (tensor(dims=[32, 1, 1, 1, 1]), "5 dimensions"),
    "dimension 0": (tensor(dims=[0]), "does not fit"),
    "huge dimension": (tensor(dims=[HUGE]), "does not fit"),
    "product of dimensions overflows to 0": (tensor(dims=[2**32, 2**32]), "does not fit"),
    "product of dimensions overflows to 32": (tensor(dims=[32, 2**63 + 1, 2]), "does not fit"),
    "unknown storage type": (tensor(type=77), "unknown storage type 77; supported: F32"),
    "known but unread storage type": (tensor(type=17), "IQ2_XS, which is not supported"),
    "row not a multiple of the block": (tensor(dims=[33], type=3), "not a multiple of 32"),
    "offset beyond the file": (tensor(offset=2**40), "does not fit"),
    "offset all ones": (tensor(offset=ALL_ONES), "does not fit"),
    "offset not aligned": (tensor(offset=4), "alignment"),
    "tensor overlaps": (tensor(offset=0), "overlaps"),
    "last tensor past the end": (tensor("blk.0.ffn_norm.weight", dims=[32, 1024]), "ends at byte|does not fit"),
    "other architecture": (entry("general.architecture", lambda k: k.scalar(STRING, "rwkv7")), "'rwkv7'.*supported"),
    "no architecture": (without("general.architecture"), "general.architecture is missing"),
    "architecture is a number": (entry("general.architecture", lambda k: k.scalar(U32, 1)), "must be text"),
    "no block count": (without("llama.block_count"), "llama.block_count is missing"),
    "block count 0": (entry("llama.block_count", lambda k: k.scalar(U32, 0)), "llama.block_count"),
    "huge block count": (entry("llama.block_count", lambda k: k.scalar(U32, 2**32 - 1)), "llama.block_count"),
    "heads 0": (entry("llama.attention.head_count", lambda k: k.scalar(U32, 0)), "head_count"),
    "heads that do not divide": (entry("llama.attention.head_count", lambda k: k.scalar(U32, 3)), "heads"),
    "heads as a list": (entry("llama.attention.head_count", lambda k: k.array(U32, [4])), "head_count"),
    "epsilon not a number": (
        entry("llama.attention.layer_norm_rms_epsilon", lambda k: k.scalar(F32, float("nan"))),
        "finite",
    ),
    "partial rotary": (entry("llama.rope.dimension_count", lambda k: k.scalar(U32, 4)), "size of a head"),
    "experts, and not how many": (
        entry("llama.expert_count", lambda k: k.scalar(U32, 8)),
        r"llama\.expert_used_count is missing",
    ),
    "part of a split": (entry("split.count", lambda k: k.scalar(U32, 2)), "join the parts"),
    "no embedding": (tensor("token_embd.weight", name="token_embd.other"), "token_embd.weight' is missing"),
    "eos beyond the vocabulary": (entry("tokenizer.ggml.eos_token_id", lambda k: k.scalar(U32, 16)), "vocabulary"),
    "no tokens": (without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
    "tokens are numbers": (entry("tokenizer.ggml.tokens", lambda k: k.array(U32, [1] * 16)), "array of strings"),
    "token not UTF-8": (entry("tokenizer.ggml.tokens", lambda k: k.array(STRING, [b"a", b"\xff"])), "element 1"),
    "token twice": (entry("tokenizer.ggml.tokens", lambda k: k.array(STRING, ["a"] * 16)), "twice"),
    "token types too few": (entry("tokenizer.ggml.token_type", lambda k: k.array(I32, [1] * 3)), "3 entries"),
    "merge of one piece": (entry("tokenizer.ggml.merges", lambda k: k.array(STRING, ["hello"])), "not two pieces"),
    "merge of unknown pieces": (entry("tokenizer.ggml.merges", lambda k: k.array(STRING, ["q z"])), "do not make"),
    "unknown tokeniser": (entry("tokenizer.ggml.model", lambda k: k.scalar(STRING, "bert")), "'bert'.*supported"),
    "unknown pre-tokeniser": (entry("tokenizer.ggml.pre", lambda k: k.scalar(STRING, "poro")), "--tokenizer-path"),
    "template is a number": (entry("tokenizer.chat_template", lambda k: k.scalar(U32, 1)), "must be text"),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused_at_once(name: str, kit):
    change, message = CASES[name]
    builder = kit.tiny()
    change(builder, kit)
    content = builder.build()
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(ModelLoadError, match=message) as caught:
            drain(kit.open(content))
        assert time.thread_time() - started < 1
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert "model.gguf" in str(caught.value)
    assert len(str(caught.value)) < 800


def test_the_49_byte_file(kit):
    """An array length of 2**62: what makes the gguf package hang."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + kit.text("x") + struct.pack("<IIQ", 9, U8, HUGE)
    assert len(content) == 49
    with pytest.raises(ModelLoadError, match="the length of x"):
        kit.open(content)


@pytest.mark.parametrize("length", [2**16, HUGE, ALL_ONES])
def test_key_of_huge_length(kit, length: int):
    content = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length) + bytes(100)
    with pytest.raises(ModelLoadError, match=f"length of {length} bytes"):
        kit.open(content)


def test_every_truncation_of_the_header_and_the_data(kit):
    content = kit.tiny().build()
    for size in [*range(0, 2000, 13), len(content) // 2, len(content) - 33]:
        with pytest.raises(ModelLoadError):
            kit.open(content[:size])


def test_many_empty_strings_are_refused_by_their_number(kit):
    """What a large file could hold is still bounded."""
    builder = kit.builder()
    builder.extra_entries.append(("x", array_header(STRING, 2**22 + 1) + bytes(8 * (2**22 + 1))))
    started = time.thread_time()
    with pytest.raises(ModelLoadError, match="the length of x"):
        kit.open(builder)
    assert time.thread_time() - started < 1


def test_a_damaged_scale_names_the_tensor(kit):
    builder = kit.tiny()
    damaged = builder.find("blk.0.ffn_up.weight")
    damaged.data = struct.pack("<e", float("inf")) + damaged.data[2:]
    with pytest.raises(ModelLoadError, match=r"model\.gguf: tensor 'blk\.0\.ffn_up\.weight'.*scale"):
        drain(kit.open(builder))


_DRAIN_ALL = """
import json, resource, signal, sys
from pathlib import Path
from fwk.errors import ModelLoadError
from fwk.interfaces.loader import LoaderContext
from fwk_loaders.gguf.loader import GGUFLoader
import tokenizers, torch
torch.set_num_threads(1)

size = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 500 * 2**20, resource.RLIM_INFINITY))
counts = {"loaded": 0, "refused": 0}
for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    print(path.name, file=sys.stderr, flush=True)
    signal.alarm(5)  # not handled: it ends the process
    try:
        checkpoint = GGUFLoader(LoaderContext()).open(path)
        drain(checkpoint)
        counts["loaded"] += 1
    except ModelLoadError:
        counts["refused"] += 1
    signal.alarm(0)
print(json.dumps(counts))
"""


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_random_damage(kit, tmp_path, kind: str):
    """Flipped, overwritten and cut bytes: a ModelLoadError or a checkpoint; in 5 s and 500 MB, whatever they are."""
    import inspect

    builder = kit.tiny()
    if kind == "llama":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(5)), *"\u2581abcdef", "ab"]
        builder.entries["tokenizer.ggml.model"] = kit.scalar(STRING, "llama")
        builder.entries["tokenizer.ggml.tokens"] = kit.array(STRING, tokens)
        builder.entries["tokenizer.ggml.scores"] = kit.array(F32, [-float(i) for i in range(len(tokens))])
        builder.entries["tokenizer.ggml.token_type"] = kit.array(I32, [2, 3, 3] + [6] * 5 + [1] * 8)
    content = builder.build()
    header = content.index(b"blk.0.ffn_norm.weight") + 60
    rng = random.Random(20 + len(kind))
    for number in range(60):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            where = rng.randrange(header if rng.random() < 0.85 else len(content))
            damaged[where] = rng.choice([damaged[where] ^ (1 << rng.randrange(8)), rng.randrange(256), 0xFF, 0])
        if rng.random() < 0.1:
            del damaged[rng.randrange(len(damaged)) :]
        (tmp_path / f"{number:03}.gguf").write_bytes(damaged)
    (tmp_path / "whole.gguf").write_bytes(content)
    script = inspect.getsource(drain) + _DRAIN_ALL
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["loaded"] + counts["refused"] == 61
    assert min(counts.values()) > 10
