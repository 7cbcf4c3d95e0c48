"""The OpenAI HTTP dialect: chat completions, completions, embeddings, models, and vLLM's tokenize and detokenize.

Files, batches and stored completions are kept for the key that sent them, while the server runs, or with
``--files-dir`` for the next one, which goes on with batches wherever this one ended: ``/v1/files`` (purpose ``batch``)
and ``/v1/batches`` over chat completions, completions and embeddings. An upload goes to the disk as it comes; its bound
is ``--max-files-bytes``. A line that is no request fails alone.

``model`` names the served model, a LoRA adapter of it, or both (``MODEL:ADAPTER``); see ``adapters.py``.

A chat completion with ``store`` is kept in memory for the key that asked for it (``--completions-store-bytes``), to be
listed, told again, given other metadata and deleted (``/v1/chat/completions``, ``/v1/chat/completions/{id}``).

Hints (``user``, ``safety_identifier``, ``prompt_cache_retention``, ``prediction``, ``verbosity``) are ignored, and so
are fields that no server documents: of one that is written nearly as a known one the log says so, the first time;
``--strict-requests`` refuses them. Every other field that OpenAI, vLLM, SGLang, llama.cpp or TGI documents is done or
refused with 400 and its name in ``param``: ignoring it would lie. The tables are in ``_common/chat/other_names.py``.
Hints for the schedule policy (``priority``, ``session_id``, ``prompt_cache_key``, ``service_tier``, ``deadline``) are
passed on; see docs/scheduling.md.

Output is constrained by ``response_format``, by ``structured_outputs`` (``json``, ``regex``, ``choice``, ``grammar``,
``json_object``) and the older ``guided_*`` of vLLM, and by SGLang's ``json_schema``, ``regex`` and ``ebnf``; one
of them at a time. A schema is always kept, ``strict`` or not. ``tool_choice`` ``required`` or naming a function
constrains the output to calls, in the model's own format where that can be said in a grammar, else as plain JSON. With
``auto``, calls of tools with ``strict: true`` are valid wherever the tool parser and the grammar backend can see to it
(all formats of ours, with llguidance); calls of other tools are what the model makes of them. With
a ``response_format`` and ``tool_choice`` ``auto`` the output is a call or keeps to the schema. Where the chat template
shows the model no tools, a system message does. The grammar of a model that thinks binds what comes behind its
thinking, or with ``--grammar-in-reasoning`` the output from the first token on, which then has no thinking.

Two values leave OpenAI's published schema, where OpenAI's service leaves it too and clients rely on it: a completion's
``finish_reason`` is null in the chunks before its last, and the first token of an echoed prompt, which nothing
predicts, has a null log-probability.
"""

from fwk import DialectSpec, hookimpl, option
from fwk_server._common.batch_options import BatchOptions


class OpenAIOptions(BatchOptions):
    """Options of ``dialects.openai``."""

    strict_requests: bool = option(
        False,
        "Refuse chat, completions and responses requests that name no model, or with a field, or a type of tool, that "
        "is neither read nor documented by a known server.",
    )
    completions_store_bytes: int = option(
        16 * 2**20, "Memory for stored chat completions; the oldest go first. 0 stores none.", ge=0, le=2**40
    )


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="openai",
            load="fwk_server.openai.dialect:OpenAIDialect",
            options=OpenAIOptions,
            summary="OpenAI's HTTP API: chat and other completions, embeddings, models, files, batches, tokenize",
        )
    ]
