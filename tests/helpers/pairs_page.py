"""``docs/compatibility.md``: which features compose. Written by ``python -m tests.helpers.pairs_page``."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.pairs import BY_NAME, NO_MODEL, PAIRS, TEXT_ONLY

DECODERS = (
    ("n-gram", "ngram"),
    ("draft model", "standalone"),
    ("tree", "ngram"),
    ("suffix", "suffix"),
    ("EAGLE-3", "eagle3"),
)
REFUSED: dict[tuple[str, str], str] = {
    ("n-gram", "draft model"): "--speculative-algorithm is given twice: ngram and standalone",
    ("draft model", "tree"): "--speculative-algorithm is given twice: standalone and ngram",
    ("n-gram", "suffix"): "--speculative-algorithm is given twice: ngram and suffix",
    ("draft model", "suffix"): "--speculative-algorithm is given twice: standalone and suffix",
    ("tree", "suffix"): "--speculative-algorithm is given twice: ngram and suffix",
    **{
        (name, "EAGLE-3"): f"--speculative-algorithm is given twice: {option} and eagle3"
        for name, option in DECODERS[:-1]
    },
    ("int8 KV", "fp8 KV"): "--kv-cache-dtype is given twice: int8 and fp8_e4m3",
    ("sliding window", "MLA"): "latent attention has no sliding window",
    ("window groups", "MLA"): "latent attention has no sliding window",
    **{
        (name, "rerank"): f"--speculative-algorithm {option}: .* is served to classify, there is nothing to draft"
        for name, option in DECODERS
    },
    ("LoRA", "rerank"): "--enable-lora: .* serves task generate only, not classify: adapters are for models",
    **{
        pair: "is served to classify, and this request is to generate"
        for pair in (
            ("pre-emption", "rerank"),
            ("forced tokens", "rerank"),
            ("grammar", "rerank"),
            ("logprobs", "rerank"),
            ("rerank", "n > 1"),
        )
    },
    **{
        (name, "state group"): "asked for trees of drafts: .* has recurrent layers, which can follow a chain only"
        for name in ("tree", "EAGLE-3")
    },
    **{
        (name, "hidden states"): f"hidden states are returned of chains of drafts, and .* {option} verifies trees"
        for name, option in (("tree", "ngram"), ("EAGLE-3", "eagle3"))
    },
    **{
        (
            "prefill elsewhere",
            name,
        ): "--disaggregation-mode prefill: .* takes image, of which a server that computes prompts"
        for name in ("images", "images encoded apart")
    },
    (
        "state group",
        "prefill elsewhere",
    ): "--disaggregation-mode prefill: .* has recurrent layers, whose states are not",
    (
        "rerank",
        "prefill elsewhere",
    ): "--disaggregation-mode prefill: .* does not generate, so there is nothing to decode",
    (
        "hidden states",
        "rerank",
    ): "is served to classify, and its replies are made of hidden states .* leave --enable-return-hidden-states out",
    ("sliding window", "state group"): "lfm2 has no sliding window",
    ("window groups", "state group"): "lfm2 has no sliding window",
    (
        "state group",
        "hierarchical cache",
    ): "--prefix-cache hierarchical: .* has recurrent layers, and tiers keep no states",
    ("MXFP4 experts", "triton attention"): "triton.* for sinks, which it lacks",
    ("int8 KV", "two attention backends"): "'cpu' and 'torch' lay out K/V in int8 differently: name one for both",
    ("fp8 KV", "two attention backends"): "'cpu' and 'torch' lay out K/V in fp8_e4m3 differently: name one for both",
    ("MLA", "two attention backends"): "cpu-prefill.torch-decode.* lacks latent, which model 'deepseek_v2' asks for",
    ("MXFP4 experts", "two attention backends"): "cpu-prefill.torch-decode.* for sinks, which it lacks",
    (
        "rerank",
        "two attention backends",
    ): "--decode-attention-backend torch: .* is served to classify, and there are no next tokens",
    (
        "triton attention",
        "two attention backends",
    ): "--attention-backend triton does nothing alongside --prefill-attention-backend cpu",
    **{
        (
            name,
            "double sparsity",
        ): f"'{option}' .* does not go with attention backend 'double_sparsity', which attends to fewer "
        "tokens one at a time than while drafts are verified"
        for name, option in (("n-gram", "ngram"), ("draft model", "standalone"), ("suffix", "suffix"))
    },
    **{
        (
            name,
            "double sparsity",
        ): f"'{option}' .* asks attention backend 'double_sparsity' for tree_mask, which it lacks"
        for name, option in (("tree", "ngram"), ("EAGLE-3", "eagle3"))
    },
    (
        "MLA",
        "double sparsity",
    ): "'double_sparsity' .* cannot be used: it lacks latent, which model 'deepseek_v2' asks for",
    ("MXFP4 experts", "double sparsity"): "asks attention backend 'double_sparsity' for sinks, which it lacks",
    ("triton attention", "double sparsity"): "--attention-backend is given twice: triton and double_sparsity",
    (
        "two attention backends",
        "double sparsity",
    ): "--attention-backend double_sparsity does nothing alongside --prefill-attention-backend cpu",
    **{
        (name, "overlap"): "it runs one worker, but --tensor-parallel-size is 2"
        for name in ("tensor parallel", "expert parallel", "moving experts")
    },
    ("pipeline parallel", "overlap"): "it runs models whole, but --pipeline-parallel-size is 2",
    **{
        (name, "pipeline parallel"): f"'{option}' .* drafts verified where they are embedded, and --pipeline-parallel-"
        for name, option in DECODERS
    },
    ("LoRA", "pipeline parallel"): "--enable-lora: .* adapters are for layers of one worker; leave --pipeline-parallel",
    ("rerank", "pipeline parallel"): "--pipeline-parallel-size 2 is not possible: stages are of models that generate",
    ("state group", "pipeline parallel"): "--pipeline-parallel-size 2 is not possible: .* has recurrent layers",
    ("pipeline parallel", "images"): "takes image, .* leave --pipeline-parallel-size out, or serve text alone",
    (
        "pipeline parallel",
        "images encoded apart",
    ): "takes image, .* leave --pipeline-parallel-size out, or serve text alone",
    (
        "pipeline parallel",
        "moving experts",
    ): "--enable-eplb: experts are placed in all layers at once; leave --pipeline",
    (
        "pipeline parallel",
        "prefill elsewhere",
    ): "a server's workers send the K/V of all layers; leave --pipeline-parallel-size out",
}
"""Pairs that are refused, each with what the user is told."""

HEAD = """# What composes

Every two features below serve a tiny model with exactly the tokens of the plain path (torch attention, one process,
no prefix cache, no drafts, adapters merged, quantised weights as the numbers they stand for), or are refused before
anything is served. `tests/contracts/test_pairs.py` runs every cell and
`python -m tests.helpers.pairs_page` writes this page. Client libraries that were tried are in
[clients.md](clients.md).

"""


def _cell(name: str, other: str) -> str:
    if (name, other) in NO_MODEL or (other, name) in NO_MODEL:
        return "none"
    return "no" if (name, other) in REFUSED or (other, name) in REFUSED else "yes"


def page() -> str:
    """The page's text."""
    names = list(BY_NAME)
    lines = ["| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |", "| --- |" + " --- |" * len(names)]
    for i, name in enumerate(names):
        cells = ["·" if i == j else _cell(name, other) for j, other in enumerate(names)]
        lines.append(f"| {i + 1} {name} | " + " | ".join(cells) + " |")
    count = len(PAIRS) - len(REFUSED)
    refused = "\n".join(f'- {a} with {b}: "{sentence}"' for (a, b), sentence in REFUSED.items())
    without = "; ".join(" and ".join(pair) for pair in NO_MODEL if "images" not in pair)
    without += f"; images and any of {', '.join(TEXT_ONLY)}"
    total = f"{count} of {len(PAIRS)} pairs run. No model that is served has both of these: {without}.\n"
    return HEAD + "\n".join(lines) + "\n\n" + total + "\nRefused, with what is said:\n\n" + refused + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs/compatibility.md").write_text(page())
