"""Outputs that are paths of a tree of token ids: generative retrieval and recommendation over a fixed set of items.

The file is RTP-LLM's for its tree decoding. The method is that of Autoregressive Entity Retrieval (2010.00904, section
3.2): of each prefix of the output only the tokens that continue it towards an item are allowed.
"""

from fwk import LogitsProcessorSpec, Options, hookimpl, option


class PrefixTreeOptions(Options):
    """Options of ``logits_processors.prefix_tree``."""

    tree_decode_config: str | None = option(
        None,
        "JSON file with the tree that every output is a path of: start_token_id, end_token_id and prefix_dict, which "
        "has the tokens allowed after each prefix.",
        min_length=1,
    )


@hookimpl
def logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            name="prefix_tree",
            load="fwk_sampling.prefix_tree.processor:PrefixTree",
            order=105,
            options=PrefixTreeOptions,
            enabled_by=("tree_decode_config",),
            summary="Allows the tokens that continue a path of a given tree (--tree-decode-config).",
        )
    ]
