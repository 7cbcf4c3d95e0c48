"""Which experts tokens took, as a running server records it, held against transformers' own routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from fwk_observability.expert_distribution.worker import balancedness
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.http import NO_TLS
from tests.helpers.lazy import lazy
from tests.helpers.rig import Server, until
from tests.helpers.servers import Begin

transformers = lazy("transformers")

ADMIN = {"authorization": "Bearer admin-key"}
PROMPT = [11, 12, 13, 40, 41, 50, 51]
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, "qwen3_moe")


def serve(begin: Begin, model: Path, *flags: str) -> Server:
    words = ("--load-format", "safetensors", "--dtype", "float32", "--admin-api-key", "admin-key")
    return begin(model, *words, "--disable-radix-cache", *flags)


def record(server: Server, what: str, status: int = 200) -> dict[str, Any]:
    url = f"{server.url}/{what}_expert_distribution_record"
    reply = httpx.post(url, headers=ADMIN, verify=NO_TLS, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def generate(server: Server) -> list[int]:
    """The tokens that were computed: the last one chosen was not."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return PROMPT + server.post(body).json()["choices"][0]["token_ids"][:-1]


def routed(reference: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, num_layers, top_k], each token's experts in the order of their numbers."""
    with torch.no_grad():
        logits = reference(torch.tensor([token_ids]), output_router_logits=True).router_logits
    chosen = [layer.topk(reference.config.num_experts_per_tok, -1).indices for layer in logits]
    return torch.stack(chosen, 1).sort(-1).values


def counted(chosen: torch.Tensor, reference: transformers.PreTrainedModel, rows: list[int]) -> list[list[int]]:
    """By layer and expert; the last layer computes but ``rows``."""
    last = chosen.shape[1] - 1
    layers = [chosen[rows if layer == last else slice(None), layer] for layer in range(last + 1)]
    return [layer.flatten().bincount(minlength=reference.config.num_experts).tolist() for layer in layers]


COMPUTED = list(range(len(PROMPT) - 1, len(PROMPT) + NUM_TOKENS - 1))


RANKS = ["--tensor-parallel-size", "2"]


@pytest.mark.gate(1)
@pytest.mark.parametrize("flags", [[], RANKS, [*RANKS, "--ep-size", "2"], ["--data-parallel-size", "2"]])
def test_counts_are_those_of_transformers_routers(
    checkpoint: tuple[Path, transformers.PreTrainedModel], begin: Begin, flags: list[str]
) -> None:
    path, reference = checkpoint
    server = serve(begin, path, "--expert-distribution-recorder-mode", "stat", *flags)
    assert "observers.expert_distribution reads" in server.get("/server_info").json()["chosen"]["step"]
    record(server, "start")
    assert "is under way" in str(record(server, "start", 400))
    tokens = generate(server)
    # A replica that was given nothing refuses: both get something.
    for _ in range(3 if "--data-parallel-size" in flags else 0):
        assert generate(server) == tokens
    record(server, "stop")
    generate(server)
    told = record(server, "dump")
    assert told["mode"] == "stat"
    expected = torch.tensor(counted(routed(reference, tokens), reference, COMPUTED))
    times = 4 if "--data-parallel-size" in flags else 1
    assert sum(torch.tensor(engine["counts"]) for engine in told["engines"]).tolist() == (times * expected).tolist()
    assert sum(engine["num_steps"] for engine in told["engines"]) == times * NUM_TOKENS
    assert told["engines"][0]["layers"] == list(range(reference.config.num_hidden_layers))
    assert "nothing was recorded" in str(record(server, "dump", 400))
    assert "no record is under way" in str(record(server, "stop", 400))
    assert server.post({}, "/start_expert_distribution_record").status_code == 401


@pytest.mark.sweep
def test_each_tokens_experts_are_written(
    checkpoint: tuple[Path, transformers.PreTrainedModel], begin: Begin, tmp_path: Path
) -> None:
    path, reference = checkpoint
    folder = tmp_path / "experts"
    flags = ("--expert-distribution-recorder-mode", "per_token", "--expert-distribution-recorder-folder", str(folder))
    server = serve(begin, path, *flags)
    record(server, "start")
    tokens = generate(server)
    file = Path(record(server, "dump")["engines"][0]["file"])
    assert file.parent == folder
    assert file.stat().st_mode & 0o77 == 0
    found = load_file(file)
    assert found["token_ids"].tolist() == tokens
    assert found["positions"].tolist() == list(range(len(tokens)))
    assert found["steps"].unique().numel() == NUM_TOKENS
    expected = routed(reference, tokens)
    expected[: len(PROMPT) - 1, -1] = -1
    assert found["expert_ids"].long().sort(-1).values.tolist() == expected.tolist()


@pytest.mark.sweep
def test_a_record_by_step_keeps_the_latest(
    checkpoint: tuple[Path, transformers.PreTrainedModel], begin: Begin, tmp_path: Path
) -> None:
    path, reference = checkpoint
    flags = ("--expert-distribution-recorder-mode", "per_pass", "--expert-distribution-recorder-folder", str(tmp_path))
    server = serve(begin, path, *flags, "--expert-distribution-recorder-buffer-size", "3")
    record(server, "start")
    expected = routed(reference, generate(server))[-3:]
    found = load_file(record(server, "dump")["engines"][0]["file"])
    steps = found["steps"].tolist()
    assert steps == list(range(steps[0], steps[0] + 3))
    for counts, chosen in zip(found["counts"], expected, strict=True):
        assert counts.tolist() == counted(chosen.unsqueeze(0), reference, [0])


@pytest.mark.sweep
def test_balance_is_told_in_the_log(checkpoint: tuple[Path, transformers.PreTrainedModel], begin: Begin) -> None:
    path, _ = checkpoint
    server = serve(begin, path, "--enable-expert-distribution-metrics")
    assert server.post({}, "/start_expert_distribution_record").status_code == 404

    def is_told() -> bool:
        generate(server)
        return "experts' balance over the last" in server.log

    until(is_told, 30, "a line in the log")


def test_balancedness() -> None:
    counts = torch.tensor([[2, 2, 2, 2], [0, 0, 0, 0], [8, 0, 0, 0], [4, 2, 2, 0]])
    assert balancedness(counts).tolist() == [1.0, 0.25, 0.5]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("llama", ["--enable-expert-distribution-metrics"], "metrics: this model has no mixture of experts"),
        ("llama", ["--expert-distribution-recorder-mode", "stat"], "recorder-mode: this model has no mixture"),
        (
            "qwen3_moe",
            ["--expert-distribution-recorder-mode", "per_token"],
            "add --expert-distribution-recorder-folder",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, begin: Begin, kind: str, flags: list[str], words: str) -> None:
    make_checkpoint(tmp_path, kind)
    with pytest.raises(AssertionError, match=words):
        serve(begin, tmp_path, *flags)
