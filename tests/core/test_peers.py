"""Other servers' arguments: each works, or is answered with a sentence; the counts are those of their pages."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from fwk.cli.common import given_options
from fwk.cli.main import main
from fwk.cli.option_parsing import Parser, add_option_flags
from fwk.config import Config
from fwk.errors import ConfigError, FwkError
from fwk.plugins import build_config, option_owners, options
from fwk.plugins.families import FAMILIES
from fwk.plugins.options import called, flag, naming, normal
from fwk.plugins.selection import option_value
from fwk_kit.cli.arguments import run as print_arguments
from fwk_kit.cli.migrating import OF_COMMANDS, counts, page
from fwk_kit.testing.base import installed
from fwk_peers.arguments import OURS, Argument, Peer, foreign, meant, peers, valued

ROOT = Path(__file__).parents[2]
PLUGINS = installed()
NAMES = called(PLUGINS) | OF_COMMANDS
OTHERS_SIZES = {"llama.cpp": 279, "TGI": 55, "vLLM": 277}
PEERS = {peer.product: peer for peer in peers()}


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Parser:
    """``fwk serve``'s, made once, as what the names mean is."""
    found = options._meanings(PLUGINS)
    monkeypatch.setattr(options, "_meanings", lambda plugins: found)
    return made_parser()


@functools.cache
def made_parser() -> Parser:
    parser = Parser("fwk serve", allow_abbrev=False)
    parser.add_argument("bare_model", nargs="?", default=None)
    parser.own = frozenset(action.dest for action in parser._actions)
    parser.add_argument("--config")
    add_option_flags(parser, PLUGINS)
    return parser


def read(parser: Parser, *words: str) -> tuple[str, Config | None]:
    """What is said of a command line, and what it comes to if it is none that is refused."""
    notes: list[str] = []
    try:
        given, _ = given_options(parser, PLUGINS, words)
        config = build_config(PLUGINS, given, notes.append)
    except FwkError as error:
        return str(error), None
    return "\n".join(notes), config


def test_every_argument_of_their_pages_is_there_once() -> None:
    # LightLLM 96, RTP-LLM 92, SGLang 266 and 8 second names of those: 454 in all.
    sizes = {product: sum(counts(peer, NAMES)) for product, peer in PEERS.items()}
    assert sizes == OTHERS_SIZES | {"LightLLM": 96, "RTP-LLM": 92, "SGLang": 274}
    for peer in PEERS.values():
        names = [argument.name for argument in peer.arguments]
        assert len(names) == len(set(map(normal, names))), f"{peer.product} has a name twice"
        for argument in peer.arguments:
            works = argument.kind in OURS
            assert (normal(argument.name) in NAMES) == works, f"{argument} stands in the wrong list"


def spellings(argument: Argument, tmp_path: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Words of a command line and variables that give an argument as its server's page does."""
    values = [argument.value] if argument.value.startswith(("[", "{")) else argument.value.split()
    text, name = " ".join(values), normal(argument.name)
    file = tmp_path / "options.yaml"
    file.write_text(f"{argument.name.lstrip('-')}: {as_yaml(values)}\n")
    line: list[tuple[list[str], dict[str, str]]] = [
        ([argument.name, *values], {}),
        ([f"{argument.name}={text}"] if len(values) == 1 else [argument.name, *values], {}),
    ]
    if not argument.name.startswith("--"):  # -C is written on a command line alone
        return line
    return [*line, (["--config", str(file)], {}), ([], {f"FWK_{name.upper()}": text or "true"})]


def as_yaml(values: list[str]) -> str:
    """As one writes it by hand: numbers and words bare, and what YAML would read otherwise in quotes."""
    bare = re.compile(r"-?[\d.]+|[Tt]rue|[Ff]alse|[\w/]+|\{.*\}")
    read = [value if bare.fullmatch(value) else json.dumps(value) for value in values]
    return ("true", *read)[-1] if len(read) < 2 else f"[{', '.join(read)}]"


ALONE = (
    r"belongs to|does nothing without|several machines|needs --|, and there is one: set|does not divide"
    r"|must be the http"  # SGLang's collector speaks gRPC
)


@pytest.mark.gate(3)
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.sweep)], ids=["some", "all"])
@pytest.mark.parametrize("peer", PEERS.values(), ids=list(PEERS))
def test_every_argument_as_its_page_types_it(
    peer: Peer, step: int, parser: Parser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In each spelling, next to a model by flag; none of its values is taken for the model. The gate takes one or no
    spelling of an argument, another one of the next."""
    for at, argument in enumerate(peer.arguments):
        if argument.name == "--config" or argument.kind == "differs":
            continue
        for words, variables in spellings(argument, tmp_path)[at % step :: step]:
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                is_model = NAMES.get(normal(argument.name)) == "--model"
                said, config = read(parser, *([] if is_model else ["--model-path", "M"]), *words)
            case = f"{argument.product}: {words} {variables}: {said}"
            if argument.kind == "works":
                option = option_of(argument)
                known = [f"--{option.replace('_', '-')} {argument.value}: {what}" for value, what in valued(option)]
                assert re.search(ALONE, said) or said in known or (not said and is_set(config, option)), case
            elif argument.kind == "so":
                assert config is not None and config.model.model == "M" and argument.what in said, case  # noqa: PT018
                assert foreign(argument.name) is not None
            elif argument.value.lower() in argument.so:
                assert config is not None and re.search(r"[)] is so already$", said), case  # noqa: PT018
            else:
                assert said.split(" (")[0].strip("-").replace("-", "_") == normal(argument.name), case
                assert argument.what in said and len(said) < 300 and "\n" not in said, case  # noqa: PT018


def option_of(argument: Argument) -> str:
    return normal(NAMES[normal(argument.name)].partition(" ")[0])


def is_set(config: Config | None, option: str) -> bool:
    assert config is not None
    parts = (config.model, config.engine, config.server, config.plugins)
    given = [*(part.model_fields_set for part in parts), *config.plugin_options.values()]
    return any(option in some for some in given)


def test_sglangs_own_example_starts(parser: Parser, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model-path: meta-llama/Meta-Llama-3-8B-Instruct\nhost: 0.0.0.0\nport: 30000\ntensor-parallel-size: 2\n"
        "enable-metrics: true\nlog-requests: true\n"
    )
    said, config = read(parser, "--config", str(file))
    assert said == "--enable-metrics (SGLang) is so already: metrics are always served at /metrics"
    assert config is not None
    assert (config.server.port, config.engine.tensor_parallel_size) == (30000, 2)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.sweep)], ids=["some", "all"])
def test_what_asks_for_nothing_that_is_not_so_is_accepted(step: int, parser: Parser) -> None:
    """A switch that is off, and the values that say what is so, of every argument that is else refused."""
    for argument in [argument for peer in peers() for argument in peer.arguments if argument.kind not in OURS][::step]:
        values = [*argument.so, *(["false", "False"] if argument.is_switch else [])]
        for value in values:
            said, config = read(parser, "M", argument.name, value)
            if argument.is_on:
                assert config is None, (argument, said)
                assert said.startswith(f"{argument.name} (") and said.endswith(argument.what), said  # noqa: PT018
                continue
            assert config is not None and config.model.model == "M", (argument, value, said)  # noqa: PT018
            changes = f" changes nothing: {re.escape(argument.what)}" if argument.kind == "so" else "unsaid"
            assert re.search(rf" is so already$| is as if it were left out$|{changes}$", said), (argument, value, said)
        said, config = read(parser, argument.name, "maybe", "--model", "M")
        assert config is None, (argument, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--log-requests", "M"], ""),
        (["--reuse-cache", "True", "M"], ""),
        (["M", "--disable-radix-cache=false"], ""),
        (["M", "--is-embedding"], ""),
        (["M", "--enable-metrics", "--trust_remote_code"], "always served at /metrics\n--trust-remote-code"),
        (["M", "--reuse-cache", "false"], "--reuse-cache false: without it --prefix-cache is radix, too"),
        (["M", "--reuse-cache", "often"], "unexpected argument 'often'"),
        (["--visual_nccl_ports", "0", "1", "2", "--model", "M"], "--visual_nccl_ports (LightLLM)"),
        (["-tp", "2", "-ep=2", "M"], ""),
        (["-m", "M"], "-m (llama.cpp) is not needed or not taken here: --model is its name here"),
        (["-zz", "M"], "unknown option -zz: neither"),
        (["-fa", "-tp", "2", "M"], "-fa (llama.cpp) is not needed or not taken here: --attention-backend"),
        (["-O3", "M"], "-O3 (vLLM) is known but not here yet: it waits for torch.compile"),
        (["-dcp=2", "M"], "-dcp (vLLM) is known but not here yet"),
        (["-ngl", "99", "M"], "-ngl 99 (llama.cpp) is so already"),
        (["--no-enable-lora", "--no_log_requests", "M"], ""),
        (["--no-enable-sleep-mode", "M"], ""),
        (["--no-trust-remote-code", "M"], "--trust-remote-code false (SGLang) changes nothing: code of a"),
        (["--no-enable-chunked-prefill", "M"], "--enable-chunked-prefill (vLLM) is true or false, and always true"),
        (["--no-enable-metrics=false", "M"], "--enable-metrics (SGLang) is so already: metrics"),
        (["--no-attention-backend", "M"], "unknown option --no-attention-backend"),
        (["M", "--mm-processor-kwargs", "{a"], "--mm-processor-kwargs: not JSON: Expecting"),
        (["M", "--preferred-sampling-params", "{a"], "--preferred-sampling-params: not JSON: Expecting"),
        (["M", "--hf-overrides", "[1]"], "--json-model-override-args: must be a JSON object"),
        (["M", "--enable-dp-attention", "--no-such-thing", "3"], "--enable-dp-attention (SGLang) is known but not"),
    ],
)
def test_switches_take_no_model_and_no_foreign_value_is_one(
    parser: Parser, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found, config = read(parser, *words)
    except SystemExit:
        found, config = capsys.readouterr().err, None
    assert said in found if said else found == ""
    assert config is None or config.model.model == "M"


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.sweep)], ids=["some", "all"])
def test_a_switch_turned_off_is_answered_alike_in_every_spelling(
    step: int, parser: Parser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``--x false``, ``--no-x``, in a file and by a variable; a file's null says nothing."""
    switches = [argument for peer in peers() for argument in peer.arguments if argument.is_switch]
    file = tmp_path / "options.yaml"
    for argument in [a for a in switches if a.kind not in OURS and a.name.startswith("--")][::step]:
        name = normal(argument.name)
        wanted, config = read(parser, "M", argument.name, "false")
        ways: dict[str, str] = {f"{name}: false": "", f"{name}: 'no'": "", "{}": f"FWK_{name.upper()}=off"}
        if not foreign(f"--no-{name}") and f"no_{name}" not in NAMES:
            ways |= {
                f"no-{name}: true": "",
                f"no_{name}: 1": "",
                "": f"FWK_NO_{name.upper()}=true",
                "# ": f"--no-{name}",
            }
        for text, other in ways.items():
            file.write_text(text)
            variable, _, value = other.partition("=")
            with monkeypatch.context() as patch:
                if value:
                    patch.setenv(variable, value)
                said, found = read(parser, "M", "--config", str(file), *([] if value or not other else [other]))
            assert (found is None) == (config is None), (argument, text, other, said)
            assert said.split(") ", 1)[-1] == wanted.split(") ", 1)[-1], (argument, text, other)
        file.write_text(f"{name}: null")
        assert read(parser, "M", "--config", str(file))[0].endswith(" is as if it were left out"), argument


def test_the_command_line_says_it_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    argument = foreign("--enable-dp-attention")
    assert argument is not None
    assert main(["serve", "--enable-dp-attention"]) == ConfigError.exit_code
    assert capsys.readouterr().err == f"fwk: error: {argument.answer()}\n"


def test_names_are_known_in_every_spelling() -> None:
    assert (
        foreign("--enable_dp_attention")
        == foreign("enable-dp-attention")
        == foreign("--enable-dp-attention")
        is not None
    )
    assert foreign("--no-server-has-this") is None


def test_sentences_name_options_that_exist() -> None:
    said = [(argument.name, argument.what) for peer in peers() for argument in peer.arguments]
    said += [(f"{option} {value}", what) for option in VALUED for value, what in VALUED[option] if " " in what]
    for name, what in said:
        for named in re.findall(r"--[a-z][a-z0-9-]+", what):
            assert normal(named) in NAMES, f"the sentence of {name} names {named}"


def test_the_page_is_the_generated_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_arguments(["--peers"]) == 0
    assert capsys.readouterr().out == page(PLUGINS)
    built_in = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert built_in == page(PLUGINS), "run make docs"


def test_the_page_of_features_has_the_counts() -> None:
    same, other, so, said, wait = (
        sum(n) for n in zip(*(counts(PEERS[p], NAMES) for p in PEERS if p not in OTHERS_SIZES), strict=True)
    )
    text = (
        f"{same} work as they are, {other} as another name of ours, {so} ask for what is so, {said} are not needed or "
        f"not taken, {wait} wait"
    )
    assert text in " ".join((ROOT / "docs/features.md").read_text(encoding="utf-8").split())


def test_another_name_sets_the_same_option() -> None:
    taken = {"--max-num-seqs": 7, "--running_max_req_size": 7, "--max-batch-size": 7}
    for name, value in taken.items():
        assert build_config(PLUGINS, {name: value}).engine.max_running_requests == 7
    assert build_config(PLUGINS, {"--use_dynamic_prompt_cache": "true"}).engine.prefix_cache == "radix"


VALUED = {option: found for option in sorted({normal(n) for n in NAMES}) if (found := valued(option))}


def test_other_servers_values_are_ours_or_are_answered(parser: Parser) -> None:
    """What a value is called here is an installed plugin or one of the option's own words, which come first."""
    own = {item.name for item in PLUGINS.all()}
    for option, value, ours in ((name, *pair) for name in VALUED for pair in VALUED[name]):
        named = {item.name for item in PLUGINS.all() if FAMILIES[item.family].option == option}
        assert value not in named, f"{option}={value} is never looked up"
        for written in (value, value.upper()):
            said, config = read(parser, flag(option), written, *WITH.get(option, ()))
            if " " in ours:
                assert said == f"{flag(option)} {written}: {ours}"
                continue
            assert config is not None, said
            found = option_value(config, PLUGINS, option)
            assert ours in (found if isinstance(found, tuple | list) else (found,)), (option, written)
        words = words_of(option)
        assert " " in ours or ours in own | words, (option, value, ours)
    assert build_config(PLUGINS, {"attention_backend": "FlashInfer"}).engine.attention_backend == "flashinfer"
    assert meant("model", "half") == "half"


WITH = {"lora_backend": ["--enable-lora"]}
"""Options without which others do nothing."""


def words_of(option: str) -> set[str]:
    """The words that an option's type lists, and those that are no plugin's."""
    fields = (owner.model.model_fields.get(option) for owner in option_owners(PLUGINS))
    kinds = [field.annotation for field in fields if field is not None]
    return {"auto", "none", "fp8_e4m3"} | {
        str(w) for kind in kinds if get_origin(kind) is Literal for w in get_args(kind)
    }


OF_PAGES = """
load_format HF DS auto pt safetensors npcache dummy gguf bitsandbytes layered sharded_state remote remote_instance
tokenizer_mode auto slow fast hf mistral
tool_call_parser qwen25 llama3 mistral deepseekv3 deepseekv31 glm glm45 gpt-oss kimi_k2 pythonic qwen qwen3_coder step3
reasoning_parser deepseek-r1 deepseek-v3 glm45 gpt-oss kimi kimi_k2 qwen3 qwen3-thinking minimax minimax-append-think
sampling_backend triton sglang_kernel flashinfer pytorch ascend
quantization ppl-w4a16-128 flashllm-w6a16 ao-int4wo-32 ao-int4wo-64 ao-int4wo-128 ao-int4wo-256 ao-int8wo ao-fp8w8a16
quantization ao-fp6w6a16 vllm-w8a8 vllm-fp8w8a8 vllm-fp8w8a8-b128 triton-fp8w8a8-block128 none awq fp8 gptq marlin
quantization gptq_marlin awq_marlin bitsandbytes gguf modelopt modelopt_fp8 modelopt_fp4 petit_nvfp4 w8a8_int8 w8a8_fp8
quantization moe_wna16 qoq w4afp8 mxfp4 compressed-tensors auto-round
kv_cache_dtype auto fp8_e5m2 fp8_e4m3 bf16 fp4_e2m1 fp8
dtype auto half float16 bfloat16 float float32 fp16 bf16 fp32
device cuda xpu hpu npu cpu
schedule_policy lpm random fcfs dfs-weight lof priority
load_balance_method round_robin shortest_queue minimum_tokens
attention_backend triton torch_native flex_attention nsa cutlass_mla fa3 fa4 flashinfer flashmla trtllm_mla trtllm_mha
attention_backend dual_chunk_flash_attn aiter wave intel_amx ascend FLASH_ATTN FLASHINFER TRITON_ATTN XFORMERS
grammar_backend xgrammar outlines llguidance none
speculative_algorithm EAGLE EAGLE3 NEXTN STANDALONE NGRAM
moe_runner_backend auto deep_gemm triton triton_kernel flashinfer_trtllm flashinfer_cutlass flashinfer_cutedsl cutlass
lora_backend triton csgmv ascend
disaggregation_transfer_backend mooncake nixl ascend fake
disaggregation_mode null prefill decode
executor ray mp uni external_launcher
eplb_algorithm auto deepseek deepseek_hierarchical elasticity_aware
ep_dispatch_algorithm static dynamic fake
expert_distribution_recorder_mode stat stat_approx per_pass per_token
cache_tiers file mooncake hf3fs nixl aibrix dynamic
hicache_write_policy write_back write_through write_through_selective
hicache_storage_prefetch_policy best_effort wait_complete timeout
radix_eviction_policy lru lfu
mamba_ssm_dtype float32 bfloat16
sampling_defaults openai model
log_level debug info warning error critical ERROR WARN INFO DEBUG
completion_template deepseek_coder star_coder qwen_coder
torchao_config int8dq int8wo int4wo-128 fp8wo fp8dq-per_tensor fp8dq-per_row
model_impl auto sglang vllm transformers
long_truncation_mode None head center
rank_factor 0 1
"""
"""Values that their argument pages list."""


def test_every_value_of_their_pages_is_taken_or_has_its_sentence(parser: Parser) -> None:
    for option, *values in (row.split() for row in OF_PAGES.strip().splitlines()):
        for value in values:
            said, config = read(parser, flag(option), value)
            known = said.startswith(f"{flag(option)} {value}: ")
            assert config is not None or known or re.search(ALONE, said), (option, value, said)


def test_a_misspelt_word_is_refused_at_once_with_the_one_that_was_meant(parser: Parser) -> None:
    """Of every option that chooses among words: plugins' names, words that they offer, and words of its own."""
    choices = {"kv_cache_dtype": {"fp8_e4m3"}, "task": {"embed"}, "completion_template": {"star_coder"}}
    for family in FAMILIES.values():
        for option in naming(PLUGINS, family.spec.family):
            choices[option] = {item.name for item in PLUGINS.family(family.spec.family)}
    for owner in option_owners(PLUGINS):
        for option, field in owner.model.model_fields.items():
            if get_origin(field.annotation) is Literal and not isinstance(get_args(field.annotation)[0], int):
                choices[option] = {str(word) for word in get_args(field.annotation)}
    assert len(choices) > 40
    for option, words in choices.items():
        word = max(words, key=len)
        wrong = word[:-1] + "x"
        said, config = read(parser, flag(option), wrong, *WITH.get(option, ()))
        assert config is None, (option, wrong, said)
        assert (wrong in said and "did you mean" in said) or re.search(ALONE, said), (option, wrong, said)
    said, _ = read(parser, "--quantization-layers", "lm_head=int9")
    assert said.startswith("--quantization-layers: unknown quantizer 'int9' (did you mean 'int8'?)")
