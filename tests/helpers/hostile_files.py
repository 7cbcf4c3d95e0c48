"""Files that somebody made to harm who loads them: drawn by a seed, near enough to whole ones to be read far."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fwk.errors import FwkError

MARK = "\ue000raw"
Tree = Any

NUMBERS = (
    "-1", "0", "1", "3", "0.5", "-0.0", "1e400", "NaN", "-Infinity", "2147483648", "4294967295", "9223372036854775807",
    "18446744073709551615", "18446744073709551616", "-9223372036854775809", "1e18", "9" * 400, "9" * 5000,
)  # fmt: skip
OTHERS = (
    "null", "true", "false", "[]", "{}", '""', '"x"', '"\\ud800"', '"\\u0000"', '"../../etc/passwd"', '"a\\nb"',
    "[null]", "[[]]", "[1, 2, 3, 4, 5, 6, 7, 8]", '{"a": {"a": {}}}', '["a", "a"]', "[" * 300 + "]" * 300,
    '{"a":' * 300 + "1" + "}" * 300, "[" * 20_000 + "]" * 20_000, '"' + "x" * 100_000 + '"',
    "[" + "1," * 20_000 + "1]", "{" + ",".join(f'"{i}": {i}' for i in range(5_000)) + "}", "1 2", "'x'", "{a: 1}",
)  # fmt: skip
KEYS = ("", "__metadata__", "a\nb", "\0", "../x", "x" * 70_000, "\ud800", "weight", "type", "__class__", "\u202ex")


def _places(tree: Tree) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with every key or index in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in members:
            found.append((node, key))
            waiting.append(value)
    return found


def hostile_json(whole: Tree, dice: random.Random) -> bytes:
    """``whole`` with one to three members wrong: other values, more of them, twice, elsewhere, gone."""
    tree, raw = json.loads(json.dumps(whole)), list[str]()

    def put(text: str) -> str:
        raw.append(text)
        return f"{MARK}{len(raw) - 1}"

    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        node, key = dice.choice(_places(tree) or [({}, "x")])
        match dice.randrange(8):
            case 0 | 1:
                node[key] = put(dice.choice(NUMBERS))
            case 2 | 3:
                node[key] = put(dice.choice(OTHERS))
            case 4 if key in node or isinstance(node, list):
                del node[key]
            case 5 if isinstance(node, dict):
                node[dice.choice(KEYS)] = node.get(key)
            case 6 if isinstance(node, dict):  # twice, with two values
                again = json.dumps(key) + ": " + dice.choice([*NUMBERS, *OTHERS[:12]])
                node[put("")] = put(f"0, {again}")
            case _:
                other, where = dice.choice(_places(tree) or [({}, "x")])
                node[key] = json.loads(json.dumps(other[where])) if isinstance(other, list) or where in other else None
        if not tree:
            break
    text = json.dumps(tree)
    for i in reversed(range(len(raw))):
        text = text.replace(json.dumps(f"{MARK}{i}"), raw[i] or f'"twice{i}"')
    return _torn(text.encode(errors="surrogatepass"), dice)


def _torn(data: bytes, dice: random.Random) -> bytes:
    """Mostly as it is; else cut, or with bytes before, inside or behind that do not belong there."""
    where = dice.randrange(len(data) + 1)
    match dice.randrange(20):
        case 0:
            return data[:where]
        case 1:
            return data[:where] + dice.choice([b"\xff", b"\0", b'"', b"}", b"\xed\xa0\x80", b"9" * 5000]) + data[where:]
        case 2:
            before, behind = dice.choice(
                [(b"\xef\xbb\xbf", b""), (b" " * 100_000, b""), (b"", b"x"), (b"", data), (b"[", b"]")]
            )
            return before + data + behind
        case _:
            return data


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Flipped, overwritten, cut or repeated bytes; most of them near the front, where headers are."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        where = dice.randrange(min(len(changed), 600) if dice.random() < 0.8 else len(changed))
        changed[where] = dice.choice([changed[where] ^ (1 << dice.randrange(8)), dice.randrange(256), 0xFF, ord("9")])
    if dice.random() < 0.1:
        del changed[dice.randrange(len(changed)) :]
    if dice.random() < 0.05:
        where = dice.randrange(len(changed) + 1)
        changed[where:where] = b"9" * 40
    return bytes(changed)


def hostile_safetensors(whole: bytes, dice: random.Random) -> bytes:
    """A file of safetensors with its header, the header's length or its tensors' bytes wrong."""
    (size,) = struct.unpack("<Q", whole[:8])
    header, data = whole[8 : 8 + size], whole[8 + size :]
    kind = dice.randrange(10)
    if kind < 4:
        header = hostile_json(json.loads(header), dice)
    elif kind < 7:
        header = json.dumps(moved(json.loads(header), len(data), dice)).encode()
    header += b" " * (-len(header) % 8)
    length = len(header)
    if kind == 7:
        length = dice.choice([0, 1, 2, length - 1, length + 1, length + len(data), 10**8 + 1, 2**31, 2**63, 2**64 - 1])
    if kind == 8:
        data = dice.choice([b"", data[:-1], data + b"x", data[: dice.randrange(len(data))], data * 2])
    content = struct.pack("<Q", length) + header + data
    return content[: dice.randrange(len(content))] if kind == 9 else content


def moved(header: dict[str, Any], size: int, dice: random.Random) -> dict[str, Any]:
    """A header whose tensors lie elsewhere: over another, outside, backwards, of other shapes or types."""
    name = dice.choice([name for name in header if name != "__metadata__"])
    entry, others = header[name], [header[other] for other in header if other != "__metadata__"]
    first, last = entry["data_offsets"]
    match dice.randrange(10):
        case 0:
            entry["data_offsets"] = dice.choice(others)["data_offsets"]
        case 1:
            far = dice.choice([size, 2**40, 2**63, -size, 2**64 - 8])
            entry["data_offsets"] = [first + far, last + far]
        case 2:
            entry["data_offsets"] = [last, first]
        case 3:
            turned = entry["shape"][::-1]
            entry["shape"] = dice.choice([[], [0], [-1, -1], [2**62, 4], [2**32] * 2, [1] * 10_000, turned])
        case 4:
            entry["shape"] = [*entry["shape"], dice.choice([0, 1, 2])]
        case 5:
            entry["dtype"] = dice.choice(["F64", "I8", "BOOL", "F4", "F8_E8M0", "C64", "U16", "f32", "F6_E2M3", "I64"])
        case 6:  # nothing wrong with the file, but with what the model makes of it
            entry["shape"] = [entry["shape"][0] * 2, *entry["shape"][1:]]
            entry["dtype"] = {"F32": "F16"}.get(entry["dtype"], "I16")
        case 7:
            header[name + ".weight"] = header.pop(name)
        case _:  # a whole file, with the tensors of one shape exchanged
            alike = [other for other in others if other["shape"] == entry["shape"]]
            other = dice.choice(alike)
            entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
    return header


def many_tensors(count: int) -> bytes:
    """Nothing but names: a header of ``count`` tensors without a number."""
    text = json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


WORDS = (0, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
U32, F32, BOOL, STRING, U64 = 4, 6, 7, 8, 10
"""Types of values in a GGUF file."""
FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan"))
STRINGS = (
    "",
    "x",
    "x" * 100_000,
    "../../etc/passwd",
    b"\xff",
    "a\nb\x1b[2J",
    "\0",
    "llama",
    "gpt2",
    "{{ 1 }}",
    "{% fo",
)
NAMES = ("", "x\n\x1b", b"\xff", "blk.0.attn_q.bias", "x" * 64)


def hostile_gguf(builder: Any, kit: Any, dice: random.Random) -> bytes:
    """A GGUF file with values, arrays, tensors or plain bytes wrong. builder, kit: of the loaders' ``conftest``."""
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        if dice.randrange(10) in (6, 7, 8):
            _spoil_tensor(dice.choice(builder.tensors), builder.tensors[0].name, dice)
        else:
            _spoil_entry(builder.entries, kit, dice)
    content = bytearray(builder.build())
    if dice.random() < 0.3:
        where = dice.randrange(len(content) - 8)
        struct.pack_into("<Q", content, where, dice.choice(WORDS))
    return bytes(content[: dice.randrange(len(content))] if dice.random() < 0.05 else content)


def _spoil_entry(entries: dict[str, Any], kit: Any, dice: random.Random) -> None:
    key = dice.choice(list(entries))
    match dice.randrange(7):
        case 0 | 1:
            kind = dice.choice([U32, U32, U64, BOOL])
            most = {U32: 2**32, U64: 2**64, BOOL: 256}[kind]
            entries[key] = kit.scalar(kind, (dice.choice(WORDS) + dice.choice([-1, 0, 1])) % most)
        case 2:
            entries[key] = kit.scalar(F32, dice.choice(FLOATS))
        case 3:
            entries[key] = kit.scalar(STRING, dice.choice(STRINGS))
        case 4:
            values = [dice.choice(STRINGS) for _ in range(dice.randrange(40))]
            entries[key] = kit.array(STRING, values, dice.choice([None, None, *WORDS]))
        case 5:
            numbers = [dice.choice(WORDS) % 2**32 for _ in range(dice.randrange(40))]
            entries[key] = kit.array(U32, numbers, dice.choice([None, None, *WORDS]))
        case _:
            del entries[key]


def _spoil_tensor(tensor: Any, other: str, dice: random.Random) -> None:
    """other: the name of one that the file has already."""
    match dice.randrange(3):
        case 0:
            tensor.dims = dice.choice([[], [0], tensor.dims[::-1], [*tensor.dims, 1], [2**32] * 2, [2**63 + 1, 2]])
        case 1:
            tensor.type, tensor.offset = dice.randrange(45), dice.choice([None, None, *WORDS])
        case _:
            tensor.name = dice.choice([other, *NAMES])


class Examiner:
    """Loads what is hostile: it serves, or is refused in one sentence, soon and in little memory."""

    def __init__(self, seconds: float = 3.0, megabytes: int = 100) -> None:
        """seconds: of CPU for each. megabytes: how much more memory may be taken, at any time, than before."""
        self.seconds, self.megabytes = seconds, megabytes
        self.served = self.refused = 0
        self.wrong: list[str] = []

    def examine(self, name: str, load: Callable[[], object], named: Sequence[str]) -> None:
        """named: what errors say, one of them at least."""
        Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far: counted anew
        before, started = _memory("VmRSS"), time.process_time()
        try:
            load()
            self.served += 1
        except FwkError as error:
            self.refused += 1
            said = str(error)
            if not said.isprintable() or len(said) > 2100 or not any(word in said for word in named):
                self.wrong.append(f"{name}: said {said[:300]!r}")
            if " raised " in said:
                self.wrong.append(f"{name}: taken for a fault of ours: {said[:300]}")
        except Exception as error:
            self.wrong.append(f"{name}: {type(error).__name__}: {error!s:.300}")
        seconds, megabytes = time.process_time() - started, (_memory("VmHWM") - before) / 1024
        if seconds > self.seconds or megabytes > self.megabytes:
            self.wrong.append(f"{name}: took {seconds:.1f} s and {megabytes:.0f} MB")


def _memory(name: str) -> int:
    """In kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
