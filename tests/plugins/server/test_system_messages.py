"""System messages where the chat template takes none."""

from __future__ import annotations

import pytest

from fwk.errors import InvalidRequest
from fwk_jinja.chat import ChatTemplate
from fwk_kit.testing.fake_frontend import ByteText
from fwk_server._common.chat.system_messages import placed

ANY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FIRST_SHOWN = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NONE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'tool' and (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TALK = "s:S u:a s:T x:b s:U u:c"
ROLES = {"s": "system", "u": "user", "x": "assistant", "t": "tool"}


class Templated(ByteText):
    """Renders by a chat template."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, {})

    def render_chat(self, messages, **given) -> str:
        return self._template.render(messages, **given)


def turns(talk: str) -> list[dict[str, str]]:
    return [{"role": ROLES[turn[0]], "content": turn[2:]} for turn in talk.split()]


@pytest.mark.parametrize(
    ("source", "talk", "prompt"),
    [
        (ANY, TALK, "[system]S[user]a[system]T[assistant]b[system]U[user]c"),
        (FIRST_ALONE, TALK, "[system]S[user]a\n\nT[assistant]b[user]U\n\nc"),
        (FIRST_SHOWN, TALK, "[system]S[user]a\n\nT[assistant]b[user]U\n\nc"),
        (NONE, TALK, "[user]S\n\na\n\nT[assistant]b[user]U\n\nc"),
        (FIRST_ALONE, "s:S s:T u:a t:r s:U x:b s:V", "[system]S\n\nT[user]a[tool]r\n\nU[assistant]b[user]V"),
        (NONE, "s:S x:b u:c", "[user]S[assistant]b[user]c"),
        (FIRST_ALONE, "u:a", "[user]a"),
    ],
)
def test_they_become_part_of_a_turn_beside_them(source: str, talk: str, prompt: str):
    text = Templated(source)
    assert text.render_chat(placed(turns(talk), text), add_generation_prompt=False) == prompt


def test_media_stay_parts():
    text, image = Templated(FIRST_ALONE), {"type": "image"}
    asked = [{"role": "user", "content": [image]}, *turns("s:T")]
    assert placed(asked, text) == [{"role": "user", "content": [image, {"type": "text", "text": "T"}]}]


def test_a_template_of_no_chats_refuses_for_itself():
    text = Templated("{{ raise_exception('none of it') }}")
    with pytest.raises(InvalidRequest, match="none of it"):
        text.render_chat(placed(turns(TALK), text))


async def test_a_route_renders_them_so(client, frontend):
    frontend.text = Templated(FIRST_ALONE)
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = await client.post(path, json={"model": "tiny", "messages": turns(TALK)})
        assert reply.status_code == 200, reply.text
