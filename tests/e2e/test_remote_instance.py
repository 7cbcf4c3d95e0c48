"""A server that starts from the weights of another: its tokens are the other's, or it says why it does not start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest, ModelLoadError
from fwk_loaders.remote_instance.connection import Seed
from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server, until
from tests.helpers.seed_server import http, scripted_seed
from tests.helpers.servers import Start
from tests.helpers.tiny import save_llama
from tests.helpers.zygote import run_fwk

KEY = "of-the-seed"
ADMIN = {"authorization": f"Bearer {KEY}"}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 90)]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LIMITS: dict[str, Any] = {"max_total_tokens": 2048, "max_running_requests": 8, "check_blocks": True, "device": "cpu"}
NAME = "remote-instance-weight-loader"


def only_text(folder: Path, target: Path, **changes: Any) -> Path:
    """The folder of a receiver: no weights."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("seed"))


@pytest.fixture(scope="module")
def another(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same architecture."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("another"), dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.flip(-1).contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def here(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return only_text(model, tmp_path_factory.mktemp("here") / "model")


@pytest.fixture(scope="module")
def seed(model: Path, python_path: str) -> Iterator[Server]:
    server = Server(model, "--load-format", "auto", "--admin-api-key", KEY, python_path=python_path)
    yield server.start()
    server.close()


@pytest.fixture(autouse=True)
def first_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that gives the seed other weights leaves it as it was."""
    yield
    if "seed" in request.fixturenames and "another" in request.fixturenames:
        give(request.getfixturevalue("seed"), request.getfixturevalue("model"))


def give(server: Server, folder: Path, status: int = 200, **body: Any) -> Any:
    body = {"model_path": str(folder)} | body
    reply = httpx.post(f"{server.url}/update_weights_from_disk", json=body, headers=ADMIN, verify=NO_TLS, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def flags(port: int, key: str = KEY, timeout: float = 20) -> list[str]:
    return [
        "--load-format", "remote_instance", f"--{NAME}-seed-instance-ip", "127.0.0.1",
        f"--{NAME}-seed-instance-service-port", str(port), f"--{NAME}-seed-api-key", key,
        f"--{NAME}-timeout", str(timeout),
    ]  # fmt: skip


def options(server: Server) -> dict[str, Any]:
    given = flags(port_of(server))
    return {flag[2:].replace("-", "_"): value for flag, value in zip(given[::2], given[1::2], strict=True)}


def ids(llm: fwk.LLM) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def fresh(path: Path, **given: Any) -> list[list[int]]:
    with fwk.LLM(str(path), **LIMITS, **given) as llm:
        return ids(llm)


def served(server: Server) -> list[list[int]]:
    bodies = [{"prompt": p, "max_tokens": 8, "temperature": 0, "ignore_eos": True} for p in PROMPTS]
    replies = [server.post(body | {"return_token_ids": True}) for body in bodies]
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


@pytest.mark.sweep
def test_a_receiver_has_the_seeds_tokens(seed: Server, model: Path, here: Path, python_path: str) -> None:
    """Without a file of weights; it does not reveal the key; and it is no seed itself."""
    receiver = Server(here, *flags(port_of(seed)), "--admin-api-key", "own", python_path=python_path)
    try:
        receiver.start()
        assert served(receiver) == served(seed) == fresh(model)
        info = receiver.get("/server_info").text
        assert f'{NAME.replace("-", "_")}_seed_api_key":"(hidden)"' in info.replace(" ", "")
        assert KEY not in info
        assert KEY not in receiver.log
        reply = httpx.get(
            f"{receiver.url}/remote_instance_weights", headers={"authorization": "Bearer own"}, verify=NO_TLS
        )
        assert reply.status_code == 409
        assert "the loader 'remote_instance' read the weights" in reply.json()["error"]
        receiver.check_invariants()
        seed.check_invariants()
    finally:
        receiver.close()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "given",
    [
        {"quantization": "int8", "dtype": "bfloat16"},
        pytest.param({"quantization": "int4", "int4_group_size": 32}, marks=pytest.mark.sweep),
        pytest.param({"executor": "processes", "tensor_parallel_size": 2}, id="ranks"),
    ],
)
def test_what_the_receiver_makes_of_the_weights(seed: Server, model: Path, here: Path, given: dict[str, Any]) -> None:
    assert fresh(here, **options(seed), **given) == fresh(model, **given)


@pytest.mark.sweep
def test_updated_weights_are_those_that_serve(seed: Server, model: Path, another: Path, here: Path) -> None:
    """A receiver started after an update gets the new ones; a running one needs an update of its own."""
    before, wanted = fresh(model), fresh(another)
    assert before != wanted
    with fwk.LLM(str(here), **LIMITS, **options(seed)) as llm:
        give(seed, another)
        assert fresh(here, **options(seed)) == wanted
        assert ids(llm) == before
        llm.update_weights(str(here))
        assert ids(llm) == wanted
        refused = give(seed, another / "nothing", 400)
        assert not refused["success"]
        assert fresh(here, **options(seed)) == wanted


@pytest.mark.sweep
def test_kept_weights_are_not_those_of_another_seed(
    seed: Server, model: Path, another: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--weights-cache knows the weights, not the folder or the address; the second start reads no tensor."""
    asked: list[str] = []
    get = Seed.get

    def noting(self: Seed, path: str) -> Any:
        asked.append(path)
        return get(self, path)

    monkeypatch.setattr(Seed, "get", noting)
    kept = {"weights_cache": str(tmp_path), "quantization": "int8", "dtype": "bfloat16"}
    cold = fresh(here, **options(seed), **kept)
    num_cold = sum("q_proj" in path for path in asked)
    asked.clear()
    assert fresh(here, **options(seed) | {f"{NAME.replace('-', '_')}_seed_instance_ip": "localhost"}, **kept) == cold
    assert num_cold
    assert not any("q_proj" in path for path in asked)
    give(seed, another)
    assert fresh(here, **options(seed), **kept) == fresh(another, **{**kept, "weights_cache": "none"}) != cold


@pytest.mark.sweep
def test_files_that_changed_are_not_given_out(
    model: Path, another: Path, here: Path, python_path: str, tmp_path: Path
) -> None:
    """Of the right size and name, and with the right time: what serves is another model than what is there."""
    folder = shutil.copytree(model, tmp_path / "model")
    server = Server(folder, "--load-format", "auto", "--admin-api-key", KEY, python_path=python_path)
    try:
        server.start()
        assert fresh(here, **options(server)) == fresh(model)
        path = folder / "model.safetensors"
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        shutil.copyfile(another / "model.safetensors", path)
        os.utime(path, ns=times)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is no longer what this server read"):
            fresh(here, **options(server))
        give(server, folder)
        assert fresh(here, **options(server)) == fresh(another)
    finally:
        server.close()


@pytest.mark.sweep
def test_another_model_is_refused(seed: Server, model: Path, tmp_path: Path) -> None:
    wider = only_text(model, tmp_path / "wider", intermediate_size=512)
    with pytest.raises(ModelLoadError, match=r"serves another model than .*intermediate_size is 512 here"):
        fresh(wider, **options(seed))
    silent = only_text(model, tmp_path / "silent")
    config = json.loads((silent / "config.json").read_text())
    del config["intermediate_size"]
    config["num_hidden_layers"] += 1
    (silent / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="num_hidden_layers is"):
        fresh(silent, **options(seed))
    with fwk.LLM(str(model), **LIMITS) as llm, pytest.raises(InvalidRequest, match="needs the server whose"):
        llm.update_weights(str(wider), "remote_instance")


@pytest.mark.sweep  # that a receiver gives none out is above
def test_a_server_of_dummy_weights_gives_none_out(spawn: Start) -> None:
    server = spawn("--admin-api-key", KEY)
    reply = httpx.get(f"{server.url}/remote_instance_weights", headers=ADMIN, verify=NO_TLS)
    assert (reply.status_code, "the loader 'dummy' read" in reply.json()["error"]) == (409, True)


# What a person sees; tests/plugins/loaders has each of these errors.


Ended = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def ended(here: Path, python_path: str) -> Ended:
    """Start a receiver that cannot start: its exit code, and its lines about errors."""

    def run(*given: str) -> tuple[int, list[str]]:
        environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        done = run_fwk("serve", str(here), "--device", "cpu", "--port", "0", *given, environment=environment)
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower() or "the seed" in line]
        return done.returncode, lines

    return run


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("said", "words", "ranks"),
    [
        ([60.0], "is too slow: nothing whole came within 2 seconds (--remote-instance-weight-loader-timeout)", 1),
        (None, "ended the connection before its answer was whole", 1),
        ([60.0], "is too slow", 2),
    ],
    ids=["silent", "gone", "silent to two ranks"],
)
def test_a_seed_that_dies_ends_the_start(
    seed: Server, ended: Ended, said: list[float] | None, words: str, ranks: int
) -> None:
    """After its index was read: one error, and no process is left waiting."""
    index = httpx.get(f"{seed.url}/remote_instance_weights", headers=ADMIN, verify=NO_TLS).content
    given = ["--executor", "processes", "--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    with scripted_seed(lambda path, query: said if query else [http(index)]) as server:
        code, lines = ended(*flags(server.server_address[1], timeout=2), *given)
    assert code != 0
    assert len(lines) == 1, lines
    assert words in lines[0]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda port: flags(port, key="no"), "refuses the key"),
        (lambda port: flags(port)[:2], "needs the server whose weights it reads: --remote-instance"),
        (lambda port: flags(port)[2:], "belongs to loaders.remote_instance"),
        (lambda port: [*flags(port)[:3], "user@host", *flags(port)[4:]], "'user@host' is no address"),
    ],
)
def test_wrong_options_are_one_error(seed: Server, ended: Ended, given: Callable[[int], list[str]], words: str) -> None:
    code, lines = ended(*given(port_of(seed)))
    assert code != 0
    assert len(lines) == 1, lines
    assert words in lines[0]


@pytest.mark.sweep
def test_an_engine_that_finds_other_weights_is_not_let_in(
    model: Path, another: Path, here: Path, python_path: str
) -> None:
    """The seed has taken others when a receiver's engine dies: the new engine would not be like the one before."""
    source = Server(model, "--load-format", "auto", "--admin-api-key", KEY, python_path=python_path)
    try:
        source.start()
        receiver = Server(here, *flags(port_of(source)), "--health-monitor", "true", python_path=python_path)
        try:
            receiver.start()
            before = served(receiver)
            give(source, another)
            assert receiver.engine is not None
            receiver.engine.kill()
            until(lambda: "are others than those that this server began with" in receiver.log, 20, "a refusal")
            give(source, model)
            until(lambda: "engine 0 serves again" in receiver.log, 30, "the weights of before")
            assert served(receiver) == before
        finally:
            receiver.close()
    finally:
        source.close()
