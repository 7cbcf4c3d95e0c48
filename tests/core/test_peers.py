"""Other servers' arguments: each works, or is answered with a sentence; the counts are those of their pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fwk.cli.main import main
from fwk.errors import ConfigError
from fwk.plugins import build_config, discover
from fwk.plugins.families import FAMILIES
from fwk.plugins.options import called, normal
from fwk.plugins.peers import Peer, answer, meant, peers, valued
from fwk_kit.cli.arguments import run as print_arguments
from fwk_kit.cli.migrating import OF_COMMANDS, counts, page

ROOT = Path(__file__).parents[2]
PLUGINS = discover()
NAMES = called(PLUGINS) | OF_COMMANDS
PEERS = {peer.product: peer for peer in peers()}


def test_every_argument_of_their_pages_is_there_once() -> None:
    # LightLLM 96, RTP-LLM 92, SGLang 266 and 8 second names of those: 454 in all.
    sizes = {product: sum(counts(peer, NAMES)) for product, peer in PEERS.items()}
    assert sizes == {"LightLLM": 96, "RTP-LLM": 92, "SGLang": 274, "vLLM": sizes["vLLM"]}
    for peer in PEERS.values():
        names = [*peer.works, *peer.says, *peer.waits]
        assert len(names) == len(set(map(normal, names))), f"{peer.product} has a name twice"


@pytest.mark.parametrize("peer", PEERS.values(), ids=list(PEERS))
def test_what_works_is_an_option_and_nothing_else_is(peer: Peer) -> None:
    for name in (*peer.works, *peer.says, *peer.waits):
        assert (normal(name) in NAMES) == (name in peer.works), f"{peer.product}'s {name} stands in the wrong list"


@pytest.mark.parametrize("peer", PEERS.values(), ids=list(PEERS))
def test_every_other_argument_is_answered_with_one_sentence(peer: Peer) -> None:
    for name in (*peer.says, *peer.waits):
        said = answer(name) or ""
        assert normal(said.split(" ", 1)[0]) == normal(name)
        assert re.search(r" is not needed or not taken here: \S| it waits for \S", said)
        assert "\n" not in said
        assert len(said) < 300
    last = [*peer.says, *peer.waits][-1]
    with pytest.raises(ConfigError) as error:
        build_config(PLUGINS, {last: "1"})
    assert str(error.value) == answer(last)


def test_the_command_line_says_it_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--enable-dp-attention"]) == ConfigError.exit_code
    assert capsys.readouterr().err == f"fwk: error: {answer('--enable-dp-attention')}\n"


def test_names_are_known_in_every_spelling() -> None:
    assert answer("--pp_size") == answer("pp-size") == answer("--pp-size")
    assert answer("--no-server-has-this") is None


def test_sentences_name_options_that_exist() -> None:
    for peer in PEERS.values():
        for name, what in (peer.says | peer.waits).items():
            for named in re.findall(r"--[a-z][a-z-]+", what):
                assert normal(named) in NAMES, f"the sentence of {peer.product}'s {name} names {named}"


def test_the_page_is_the_generated_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_arguments(["--peers"]) == 0
    assert capsys.readouterr().out == page(PLUGINS)
    built_in = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert built_in == page(PLUGINS), "run make docs"


def test_the_page_of_features_has_the_counts() -> None:
    same, other, said, wait = (
        sum(n) for n in zip(*(counts(PEERS[p], NAMES) for p in PEERS if p != "vLLM"), strict=True)
    )
    text = f"{same} work as they are, {other} as another name of ours, {said} are not needed or not taken, {wait} wait"
    assert text in " ".join((ROOT / "docs/features.md").read_text(encoding="utf-8").split())


def test_another_name_sets_the_same_option() -> None:
    taken = {"--max-num-seqs": 7, "--running_max_req_size": 7, "--max-batch-size": 7}
    for name, value in taken.items():
        assert build_config(PLUGINS, {name: value}).engine.max_running_requests == 7
    assert build_config(PLUGINS, {"--use_dynamic_prompt_cache": "true"}).engine.prefix_cache == "radix"


VALUED = [(option, value, ours) for option in sorted({normal(n) for n in NAMES}) for value, ours in valued(option)]


@pytest.mark.parametrize(("option", "value", "ours"), VALUED, ids=[f"{o}={v}" for o, v, _ in VALUED])
def test_other_servers_values_are_ours_or_are_answered(option: str, value: str, ours: str) -> None:
    """What a value is called here is an installed plugin or one of the option's own words."""
    for written in (value, value.upper()):
        if " " in ours:
            with pytest.raises(ConfigError, match=rf"^--{option.replace('_', '-')} {written}: ".replace("+", r"\+")):
                build_config(PLUGINS, {option: written})
            continue
        config = build_config(PLUGINS, {option: written})
        (got,) = (found for part in (config.model, config.engine, config.server) if (found := getattr(part, option, 0)))
        assert got == ours
    if " " not in ours and option not in ("dtype", "kv_cache_dtype", "tokenizer_mode"):
        assert any(item.name == ours for item in PLUGINS.all())


def test_a_plugin_of_the_name_comes_first() -> None:
    config = build_config(PLUGINS, {"attention_backend": "FlashInfer"})
    assert config.engine.attention_backend == "flashinfer"
    for option, value, _ in VALUED:
        named = {item.name for item in PLUGINS.all() if FAMILIES[item.family].option == option}
        assert value not in named, f"{option}={value} is never looked up"
    assert meant("model", "half") == "half"
