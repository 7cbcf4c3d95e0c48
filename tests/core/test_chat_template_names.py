"""Chat templates may name all that transformers' environment has, and get the same."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from jinja2.runtime import Undefined

from fwk.errors import InvalidRequest
from fwk_jinja.chat import ChatTemplate
from fwk_jinja.errors import TemplateRefusal
from fwk_jinja.sandbox import Sandbox
from fwk_jinja.template import BoundedTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Grüße <b> & 'c'",
            "parameters": {"type": "object", "properties": {"b": {"enum": ["ü\u2028"]}, "a": {"type": "integer"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": '<ü>"\n', "a": 1}}}
TALKS = [
    [{"role": "user", "content": "Hi <there>"}],
    [
        {"role": "system", "content": "Sys."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well. ", "reasoning_content": "hm"},
        {"role": "user", "content": " And? "},
    ],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}],
]


@pytest.fixture(scope="module")
def compiled() -> Callable[[str], Any]:
    """A template of transformers."""
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template


@pytest.fixture(scope="module")
def theirs(compiled: Callable[[str], Any]) -> Environment:
    return compiled("").environment


def outcome(action: Callable[[], Any]) -> Any:
    """What it returns, iterators as lists; or that it raises."""
    random.seed(1)
    try:
        found = action()
        return list(found) if hasattr(found, "__next__") else found
    except Exception:
        return "raised"


def test_every_name_is_there(theirs: Environment) -> None:
    ours = Sandbox()
    for kind in ("filters", "tests", "globals"):
        assert not getattr(theirs, kind).keys() - getattr(ours, kind).keys(), kind
    tags = [{tag for extension in each.extensions.values() for tag in extension.tags} for each in (theirs, ours)]
    assert not tags[0] - tags[1]
    for setting in ("trim_blocks", "lstrip_blocks", "autoescape", "keep_trailing_newline", "undefined", "policies"):
        assert getattr(theirs, setting) == getattr(ours, setting), setting


VALUES = [
    "a <b>\n c https://x.org",
    "3",
    [3, 1, 2],
    ["x", "Y"],
    {"b": "ü", "a": [2]},
    3.75,
    None,
    Undefined(),
    [{"a": 1}],
]
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((2,), {}),
    (("a",), {}),
    (("a", "b"), {}),
    ((True, 1), {}),
    ((), {"attribute": "a"}),
    ((), {"indent": 2, "sort_keys": True}),
    ((), {"separators": (",", ":"), "ensure_ascii": True}),
]


def test_every_filter_and_test_does_the_same(theirs: Environment) -> None:
    ours = Sandbox()
    ours.start()
    both = [(each, each.from_string("").new_context()) for each in (theirs, ours)]
    for name in sorted(theirs.filters):
        for value in VALUES:
            for args, named in ARGUMENTS:
                found = [
                    outcome(lambda: each.call_filter(name, value, args, named, context))  # noqa: B023
                    for each, context in both
                ]
                assert str(found[0]) == str(found[1]), f"{value!r}|{name}{args}{named}"
    for name in sorted(theirs.tests):
        for value in VALUES:
            for args, named in ARGUMENTS[:3]:
                found = [
                    outcome(lambda: each.call_test(name, value, args, named, context))  # noqa: B023
                    for each, context in both
                ]
                assert found[0] == found[1], f"{value!r} is {name}{args}"


SOURCES = [
    "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}",
    "{%- generation -%}\n a \n{%- endgeneration -%} b",
    "{{ tools|tojson }}{{ tools|tojson(true) }}{{ tools|tojson(4) }}{{ tools|tojson(indent=4) }}",
    "{{ tools|tojson(separators=(',', ':'), sort_keys=true) }}{{ tools|tojson(false, 2, [';', '=']) }}",
    "{{ tools|tojson(ensure_ascii=False, indent='--') }}{{ [1.0, none, true, 'é']|tojson(ensure_ascii=true) }}",
    "{{ tools|tojson(other=1) }}",
    "{{ nothing|tojson }}",
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% elif x > 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{{ strftime_now('%Y-%m-%d %%') }}{{ strftime_now(format='%Y') }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception(message='no') }}",
    "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}{{ dict([('x', 1)], y=2) }}",
    "{% set n = namespace({'a': 1}, self=2) %}{% set n.a = n.a + n.self %}{{ n.a }}",
    "{% set n = namespace() %}{% set n._a = 1 %}",
    "{{ lipsum(n=2, html=false, min=3, max=9) }}{{ lipsum(1) }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner() %}{{ j() }}{{ j() }}",
    "{% autoescape true %}{{ '<b>'|safe ~ '<i>' }}{{ '<' ~ 1 }}{% endautoescape %}{{ '<'|e ~ '<' }}",
    "{% macro f(x, y=2) %}{{ x ~ y }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3) %}z{% endcall %}",
    "{{ messages|map(attribute='role')|join(',') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{% do messages %}",
    "{% trans %}x{% endtrans %}",
]


def test_templates_render_as_they_do_there(compiled: Callable[[str], Any]) -> None:
    for source in SOURCES:
        given = {"messages": TALKS[0], "tools": TOOLS, **SPECIAL}
        found = [
            outcome(lambda: compiled(source).render(given)),  # noqa: B023
            outcome(lambda: BoundedTemplate(source).render(given)),  # noqa: B023
        ]
        assert found[0] == found[1], source


def published() -> Iterator[tuple[str, str]]:
    """Chat templates in the source of transformers."""
    import transformers

    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/processing_*.py")):
        text = path.read_text(encoding="utf-8")
        if "{%" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and "{%" in node.value:
                    yield f"{path.name}:{node.lineno}", node.value


def test_published_templates_render_as_they_do_there(compiled: Callable[[str], Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    num_same = 0
    for name, source in published():
        try:
            own = BoundedTemplate(source)
        except TemplateRefusal:
            continue  # a piece of one
        for talk in TALKS:
            given = {"messages": talk, "tools": TOOLS, "documents": None, "add_generation_prompt": True, **SPECIAL}
            found = [outcome(lambda: compiled(source).render(given)), outcome(lambda: own.render(given))]  # noqa: B023
            assert found[0] == found[1], name
            num_same += found[0] != "raised"
        for text in ("Yes, ", "end", "m"):
            talk = [*TALKS[0], {"role": "assistant", "content": text}]
            wanted = outcome(
                lambda: render_jinja_template([talk], chat_template=source, continue_final_message=True, **SPECIAL)[0]  # noqa: B023
            )
            try:
                template = ChatTemplate(source, SPECIAL)
                found = [template.render(talk, add_generation_prompt=False, continue_final_message=True)]
            except InvalidRequest:
                continue
            assert found == wanted or wanted == "raised", name
    assert num_same > 5
