"""Choosing from all families together: what one asks, another must offer; the best that agrees, and why not better."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.fake_plugins import of

from fwk import (
    Ask,
    AttentionBackendSpec,
    DialectSpec,
    ExecutorSpec,
    Facts,
    GrammarBackendSpec,
    Host,
    Limit,
    LogitsProcessorSpec,
    LoRABackendSpec,
    ModelSpec,
    MoERunnerSpec,
    Needs,
    PrefixCacheSpec,
    QuantizerSpec,
    SchedulePolicySpec,
    SpeculativeDecoderSpec,
)
from fwk.errors import PluginError
from fwk.plugins import PluginSet, Resolution, judge, negotiate
from fwk.types import ModelConfig

TINY_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
FULL = frozenset({"sliding_window", "tree_mask", "latent"})


def attention(name: str, rank: int = 0, **fields: Any) -> AttentionBackendSpec:
    return AttentionBackendSpec(name=name, load="a:b", rank=rank, **fields)


def model(name: str, rank: int = 0, **fields: Any) -> ModelSpec:
    return ModelSpec(name=name, load="a:b", rank=rank, architectures=("Arch",), **fields)


def settle(plugins: PluginSet, wanted: dict[str, str] | None = None, **facts: Any) -> Resolution:
    """With ``auto`` for every family that is declared and not in ``wanted``."""
    asked = {family: "auto" for family in plugins.by_family} | (wanted or {})
    return negotiate(plugins, asked, Facts(architecture="Arch", **facts), {})


def test_a_decoders_ask_takes_the_next_best_attention() -> None:
    plugins = of(
        attention("fast", 10),
        attention("full", 0, features=FULL),
        SpeculativeDecoderSpec(name="trees", load="a:b", asks=(Ask("attention", frozenset({"tree_mask"})),)),
    )
    found = settle(plugins)
    assert found.chosen == {"attention": "full", "speculative": "trees"}
    assert found.reasons() == [
        "attention backend 'fast' was not taken: it lacks tree_mask, which speculative decoder 'trees' asks for"
    ]
    assert found.refusals()["attention"] == {"fast": "it lacks tree_mask, which speculative decoder 'trees' asks for"}


def test_a_model_that_asks_what_nobody_offers_gives_way_to_the_next_one() -> None:
    plugins = of(
        model("native", 10, features=frozenset({"latent"})),
        model("plain", 0),
        attention("int8", kv_dtypes=("auto", "int8")),
        attention("full", 5, features=FULL),
    )
    assert settle(plugins).chosen == {"models": "native", "attention": "full"}
    quantised = settle(plugins, kv_dtype="int8")
    assert quantised.chosen == {"models": "plain", "attention": "int8"}
    assert quantised.reasons() == [
        "model 'native' was not taken: it asks attention backend 'int8' for latent, which it lacks",
        "attention backend 'full' was not taken: it keeps K/V as auto, not int8",
    ]


def test_what_is_named_changes_the_model_plugin_in_no_way() -> None:
    """The next plugin would compute the model otherwise, which nobody asked for."""
    plugins = of(
        model("native", 10, features=frozenset({"latent"})),
        model("plain", 0),
        attention("poor"),
        attention("full", features=FULL),
    )
    with pytest.raises(PluginError) as error:
        settle(plugins, {"attention": "poor"})
    words = "attention backend 'poor' (acme) cannot be used: it lacks latent, which model 'native' asks for"
    assert str(error.value) == words
    judged = judge(plugins, {"models": "auto", "attention": "poor"}, Facts(architecture="Arch"), {}, "attention")
    assert judged.error == words
    assert settle(plugins, {"attention": "poor", "models": "plain"}).chosen["models"] == "plain"
    assert settle(plugins, {"attention": "full"}).chosen["models"] == "native"


def test_what_is_named_decides_over_what_is_automatic() -> None:
    plugins = of(
        ExecutorSpec(name="usual", load="a:b", rank=10),
        ExecutorSpec(name="replaying", load="a:b", asks=(Ask("attention", frozenset({"graph_capture"})),)),
        attention("best", 10, limits=(Limit("executors", ("usual",)),)),
        attention("captured", 0, features=frozenset({"graph_capture"})),
    )
    assert settle(plugins).chosen == {"attention": "best", "executors": "usual"}
    assert settle(plugins, {"executors": "replaying"}).chosen["attention"] == "captured"
    with pytest.raises(PluginError) as error:
        settle(plugins, {"executors": "replaying", "attention": "best"})
    assert str(error.value) == (
        "executor 'replaying' (acme) cannot be used: it asks attention backend 'best' for graph_capture, which it lacks"
    )


@pytest.mark.parametrize(
    ("limit", "facts", "wanted", "sentence"),
    [
        (Limit("kv_dtype", ("auto",)), {"kv_dtype": "int8"}, {}, "serves kv_dtype auto only, not int8"),
        (Limit("block_size", (16, 32)), {"block_size": 8}, {}, "serves block_size 16 or 32 only, not 8"),
        (Limit("head_size", (64,)), {"head_size": 80}, {}, "serves head_size 64 only, not 80"),
        (Limit("tp_size", (1,)), {"tp_size": 2}, {}, "serves tp_size 1 only, not 2"),
        (Limit("device", ("cuda",)), {}, {}, "serves device cuda only, not cpu"),
        (Limit("dtype", ("bfloat16",)), {}, {}, "serves dtype bfloat16 only, not float32"),
        (Limit("drafts", ("none", "chain"), "it keeps no mask"), {}, {"speculative": "trees"}, "not tree: it keeps no"),
        (Limit("speculative", ("none",)), {}, {"speculative": "chains"}, "serves speculative none only, not chains"),
        (Limit("lora", ("none",)), {}, {"lora": "adapters"}, "serves lora none only, not adapters"),
        (Limit("quant", ("plain",)), {}, {"quant": "packed"}, "serves quant plain only, not packed"),
        (Limit("quant", ("plain",)), {"chosen": {"quant": ("packed",)}}, {"quant": "plain"}, "only, not packed"),
        (Limit("cache", ("none",)), {}, {"cache": "tree"}, "serves cache none only, not tree"),
        (Limit("executors", ("usual",)), {}, {"executors": "other"}, "serves executors usual only, not other"),
        (Limit("moe", ("none",)), {}, {"moe": "experts"}, "serves moe none only, not experts"),
        (Limit("grammar", ("none",)), {}, {"grammar": "masks"}, "serves grammar none only, not masks"),
    ],
)
def test_each_limit_is_a_sentence(limit: Limit, facts: dict[str, Any], wanted: dict[str, str], sentence: str) -> None:
    plugins = of(
        attention("bounded", 10, features=FULL, kv_dtypes=("auto", "int8"), limits=(limit,)),
        attention("free", 0, features=FULL, kv_dtypes=("auto", "int8")),
        SpeculativeDecoderSpec(name="trees", load="a:b", asks=(Ask("attention", frozenset({"tree_mask"})),)),
        SpeculativeDecoderSpec(name="chains", load="a:b"),
        LoRABackendSpec(name="adapters", load="a:b"),
        MoERunnerSpec(name="experts", load="a:b"),
        GrammarBackendSpec(name="masks", load="a:b", kinds=frozenset({"regex"})),
        QuantizerSpec(name="plain", load="a:b", rank=10),
        QuantizerSpec(name="packed", load="a:b"),
        PrefixCacheSpec(name="none", load="a:b", rank=10),
        PrefixCacheSpec(name="tree", load="a:b"),
        ExecutorSpec(name="usual", load="a:b", rank=10, max_tp_size=None),
        ExecutorSpec(name="other", load="a:b", max_tp_size=None),
    )
    families = {"attention": "auto", "quant": "auto", "cache": "auto", "executors": "auto", **wanted}
    idle = {"head_size": 64, "dtype": "bfloat16", "host": Host("cuda"), **(facts or {"host": Host()})}
    if limit.fact == "dtype":
        idle["dtype"] = "float32"
    found = negotiate(plugins, families, Facts(**idle), {})
    assert found.item("attention").name == "free"
    assert sentence in found.reasons()[0]
    with pytest.raises(PluginError, match="cannot be used: it ") as error:
        negotiate(plugins, families | {"attention": "bounded"}, Facts(**idle), {})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([attention("x", limits=(Limit("kv_type", ("auto",)),))], "which no run has (did you mean 'kv_dtype'?)"),
        ([attention("x", asks=(Ask("observers", frozenset({"f"})),))], "'x' asks something of 'observers'"),
        ([DialectSpec(name="x", load="a:b", limits=(Limit("dtype", ("float32",)),))], "has limits, but a HTTP dialect"),
        (
            [DialectSpec(name="x", load="a:b", asks=(Ask("attention", frozenset({"f"})),))],
            "'x' has asks, but a HTTP dialect is not settled together with others",
        ),
    ],
)
def test_terms_about_nothing_are_refused_when_declared(specs: list[Any], message: str) -> None:
    assert message in of(*specs).broken[0].sentence()


def test_an_ask_of_a_family_that_is_not_used_is_refused() -> None:
    plugins = of(attention("x", asks=(Ask("lora", frozenset({"fused"})),)), attention("y", -1))
    found = negotiate(plugins, {"attention": "auto"}, Facts(), {})
    assert found.chosen == {"attention": "y"}
    assert found.reasons() == [
        "attention backend 'x' was not taken: it asks a LoRA backend for fused, and this run uses none"
    ]


def test_third_parties_are_taken_by_rank_alone() -> None:
    ours, theirs = attention("ours", 10), attention("theirs", 11)
    assert settle(of(ours, theirs)).chosen == {"attention": "theirs"}
    assert settle(of(ours, attention("theirs", 11, needs=Needs(device="cuda")))).chosen == {"attention": "ours"}


def test_auto_quantises_nothing_and_leaves_others_architectures_without_a_word() -> None:
    plugins = of(
        QuantizerSpec(name="eager", load="a:b", rank=99, layouts=("plain",), api=2),
        QuantizerSpec(name="exact", load="a:b", layouts=("plain",), exact=("plain",), api=2),
        ModelSpec(name="other", load="a:b", rank=99, architectures=("Other",)),
        model("right"),
        ExecutorSpec(name="single", load="a:b", rank=99),
        ExecutorSpec(name="many", load="a:b", max_tp_size=None),
    )
    found = settle(plugins, layouts=("plain",), tp_size=2)
    assert found.chosen == {"models": "right", "quant": "exact", "executors": "many"}
    assert found.reasons() == []
    assert set(found.refusals()["models"]) == {"other"}
    assert settle(plugins, {"quant": "eager"}, layouts=("plain",)).chosen["quant"] == "eager"


def test_nothing_possible_names_those_meant_for_the_run() -> None:
    plugins = of(model("right", features=frozenset({"latent"})), attention("poor"), model("wrong"))
    with pytest.raises(PluginError) as error:
        settle(plugins, {"models": "right"})
    assert str(error.value) == (
        "no attention backend can serve this run: poor lacks latent, which model 'right' asks for"
    )


def test_a_hopeless_choice_among_many_is_found_out_at_once() -> None:
    """Ten plugins in each of five families, and a family that asks for what nobody offers."""
    many: list[Any] = [model(f"m{i}", i) for i in range(10)]
    many += [attention(f"a{i}", i) for i in range(10)]
    many += [PrefixCacheSpec(name=f"c{i}", load="a:b", rank=i) for i in range(10)]
    many += [ExecutorSpec(name=f"e{i}", load="a:b", rank=i) for i in range(10)]
    many += [QuantizerSpec(name=f"q{i}", load="a:b", rank=i, asks=(Ask("cache", frozenset({"x"})),)) for i in range(10)]
    with pytest.raises(PluginError, match=r"no prefix cache can serve this run: c9 lacks x"):
        settle(of(*many))


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        (Limit("drafts", ("chain",)), {"attention": "bounded", "speculative": "chains"}),
        (Limit("quant", ("packed",)), {"quant": "packed", "attention": "bounded"}),
        (Limit("head_size", (64,)), {"attention": "bounded", "models": "right"}),
        (Limit("executors", ("usual",)), {"attention": "bounded", "executors": "usual"}),
    ],
)
def test_what_is_not_known_yet_is_no_reason_to_refuse(limit: Limit, wanted: dict[str, str]) -> None:
    plugins = of(
        attention("bounded", limits=(limit,)),
        SpeculativeDecoderSpec(name="chains", load="a:b"),
        ExecutorSpec(name="usual", load="a:b"),
        QuantizerSpec(name="packed", load="a:b"),
        model("right"),
    )
    config = ModelConfig.from_dict({"architectures": ["Arch"], "head_dim": 64, **TINY_SIZES}, "config.json")
    facts = Facts(architecture="Arch", model=config, chosen={"quant": ()})  # no layer has a method of its own
    assert negotiate(plugins, wanted, facts, {}).chosen == wanted


def test_every_candidate_is_judged_beside_the_other_choices() -> None:
    plugins = of(
        attention("fast", 10),
        attention("full", 0, features=FULL),
        SpeculativeDecoderSpec(name="trees", load="a:b", asks=(Ask("attention", frozenset({"tree_mask"})),)),
        LoRABackendSpec(name="adapters", load="a:b", limits=(Limit("speculative", ("none",), "it follows no tree"),)),
    )
    asked = {"attention": "auto", "speculative": "trees"}
    told = judge(plugins, asked, Facts(), {}, "attention")
    assert (told.error, told.selection.chosen and told.selection.chosen.name) == (None, "full")
    assert told.selection.refusals() == {"fast": "it lacks tree_mask, which speculative decoder 'trees' asks for"}
    why = "it serves speculative none only, not trees: it follows no tree"
    assert judge(plugins, asked, Facts(), {}, "lora").selection.refusals() == {"adapters": why}
    hopeless = judge(plugins, asked | {"attention": "fast"}, Facts(), {}, "attention")
    assert hopeless.error is not None
    assert "cannot be used: it " in hopeless.error
    assert set(hopeless.selection.refusals()) == {"fast"}


def test_what_joins_later_is_held_against_what_is_settled() -> None:
    plugins = of(
        attention("best", limits=(Limit("schedulers", ("first",)),)),
        SchedulePolicySpec(name="first", load="a:b"),
        SchedulePolicySpec(name="second", load="a:b"),
        LogitsProcessorSpec(name="careful", load="a:b", limits=(Limit("drafts", ("none",)),)),
        LogitsProcessorSpec(name="easy", load="a:b"),
        QuantizerSpec(name="packed", load="a:b"),
    )
    asked = {"attention": "auto", "schedulers": "first", "quant": "auto"}
    found = negotiate(plugins, asked, Facts(drafts="chain", chosen={"speculative": ("chains",)}), {})
    second = found.refusal(plugins.by_family["schedulers"]["second"], None)
    assert second == "does not go with attention backend 'best', which serves schedulers first only, not second"
    chained = Resolution(Facts(drafts="chain"), {})
    refusals = {name: chained.refusal(item, None) for name, item in plugins.by_family["logits_processors"].items()}
    assert refusals == {"careful": "serves drafts none only, not chain", "easy": None}
    found.check(found.facts)
    with pytest.raises(PluginError, match="does not go with attention backend 'best'"):
        found.check(Facts(chosen={"schedulers": ("second",)}))
