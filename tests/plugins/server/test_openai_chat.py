"""/v1/chat/completions: shapes, streams, usage, log-probabilities."""

import pytest

TEXT = "Grüße {} 🙂!"
NUM_TOKENS = len(TEXT.format(0).encode())


def joined(chunks, index=0):
    """What a client puts together from the chunks of one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return {
        "content": "".join(choice["delta"].get("content") or "" for choice in choices),
        "finish_reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None],
        "last": choices[-1],
        "first": choices[0],
        "logprobs": [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]],
        "token_ids": [token for choice in choices for token in choice.get("token_ids", [])],
    }


async def test_a_reply_has_the_published_shape(api):
    reply = await api.chat()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "tiny"
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT.format(0), "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt_tokens = len(b"[user]Hi[assistant]")
    assert reply["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": NUM_TOKENS,
        "total_tokens": prompt_tokens + NUM_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extras", [{}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}])
async def test_a_stream_says_what_a_whole_reply_says(api, n, extras):
    reply = await api.chat(n=n, **extras)
    chunks = await api.chat_stream(n=n, stream_options={"include_usage": True}, **extras)
    for choice in reply["choices"]:
        streamed = joined(chunks, choice["index"])
        assert streamed["content"] == choice["message"]["content"] == TEXT.format(choice["index"])
        assert streamed["finish_reasons"] == [choice["finish_reason"]]
        assert streamed["last"]["finish_reason"] is not None
        assert streamed["first"]["delta"] == {"role": "assistant", "content": ""}
        if "logprobs" in extras:
            assert streamed["logprobs"] == choice["logprobs"]["content"]
        assert streamed["token_ids"] == choice.get("token_ids", [])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == reply["usage"]
    assert not any("usage" in chunk for chunk in chunks[:-1])


async def test_choices_are_interleaved_in_a_stream(api):
    order = [chunk["choices"][0]["index"] for chunk in await api.chat_stream(n=2)]
    assert order[:6] == [0, 1, 0, 1, 0, 1]


async def test_a_stream_has_no_usage_unless_asked(api):
    assert not any("usage" in chunk for chunk in await api.chat_stream())


async def test_running_usage_counts_up(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await api.chat_stream(stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == NUM_TOKENS


async def test_the_length_limit_ends_with_length(api, frontend):
    assert (await api.chat(max_tokens=3))["choices"][0]["finish_reason"] == "length"
    assert joined(await api.chat_stream(max_completion_tokens=3))["finish_reasons"] == ["length"]
    await api.chat(max_tokens=9, max_completion_tokens=2)
    assert [item.sampling.max_tokens for item in frontend.items] == [3, 3, 2]


async def test_the_stop_that_matched_is_told(api, frontend, fake):
    frontend.script = lambda item: fake.interleaved(fake.deltas_of(item, "ab", stop_reason="END"))
    choice = (await api.chat(stop="END"))["choices"][0]
    assert choice["stop_reason"] == choice["matched_stop"] == "END"
    assert joined(await api.chat_stream(stop=["END"]))["last"]["stop_reason"] == "END"
    assert [item.sampling.stop for item in frontend.items] == [["END"], ["END"]]


async def test_logprobs_name_tokens_bytes_and_the_likeliest(api):
    choice = (await api.chat(logprobs=True, top_logprobs=2, max_tokens=3))["choices"][0]
    first, _, third = choice["logprobs"]["content"]
    assert first["token"] == "G"
    assert first["bytes"] == [ord("G")]
    assert [top["token"] for top in first["top_logprobs"]] == ["H", "I"]
    assert third["token"] == "\ufffd"  # half a character: its bytes tell
    assert third["bytes"] == [0xC3]
    assert choice["logprobs"]["refusal"] is None


async def test_logprobs_without_top_have_none(api, frontend):
    choice = (await api.chat(logprobs=True))["choices"][0]
    assert len(choice["logprobs"]["content"]) == NUM_TOKENS
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    assert frontend.items[0].sampling.logprobs == 0


async def test_minus_infinity_is_a_number(api, frontend, fake):
    def script(item):
        [delta] = fake.deltas_of(item, "a")
        delta.logprobs = [type(delta.logprobs[0])(97, float("-inf"), 9, [(98, float("-inf"))])]
        return [[delta]]

    frontend.script = script
    [entry] = (await api.chat(logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


async def test_tokens_trimmed_by_a_stop_string_keep_their_entries(api, frontend, fake):
    def script(item):
        first, *trimmed = fake.deltas_of(item, "aEND", stop_reason="END")
        for delta in trimmed:
            delta.text = ""
        return [[first], *([delta] for delta in trimmed)]

    frontend.script = script
    reply = await api.chat(logprobs=True)
    choice = reply["choices"][0]
    assert choice["message"]["content"] == "a"
    assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"] == 4


async def test_token_ids_are_returned_when_asked(api, frontend):
    reply = await api.chat(return_token_ids=True, max_tokens=2)
    assert reply["prompt_token_ids"] == frontend.items[0].prompt_token_ids
    assert reply["choices"][0]["token_ids"] == list(b"Gr")
    first, *_ = await api.chat_stream(return_token_ids=True)
    assert first["prompt_token_ids"] == reply["prompt_token_ids"]


async def test_prompt_logprobs_come_at_the_top(api):
    assert (await api.chat())["prompt_logprobs"] is None  # as vLLM has it
    scores = (await api.chat(prompt_logprobs=1))["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1][str(ord("u"))] == {"logprob": -0.5 - ord("u") / 1000, "rank": 2, "decoded_token": "u"}
    assert scores[1][str(ord("v"))] == {"logprob": -0.25, "rank": 1, "decoded_token": "v"}


async def test_messages_reach_the_template_flat(api, frontend):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    await api.chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ]
    )
    function = {"name": "f", "arguments": {"x": 1}}
    assert frontend.text.seen.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "no"},
    ]


async def test_template_options_reach_the_template(api, frontend):
    await api.chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert frontend.text.seen.kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert frontend.num_blocking == 1  # a client's variables can make a template slow
    await api.chat(add_special_tokens=True)
    assert frontend.items[-1].prompt_token_ids[0] == 256
    await api.chat(add_generation_prompt=False)
    assert frontend.text.decode(frontend.items[-1].prompt_token_ids) == "[user]Hi"


async def test_an_effort_switches_the_thinking(api, frontend):
    """Templates call the switch one of two names; those that have none ignore both."""
    for effort, switch in (("none", False), ("minimal", True), ("high", True)):
        await api.chat(reasoning_effort=effort)
        wanted = {"enable_thinking": switch, "thinking": switch} | ({"reasoning_effort": effort} if switch else {})
        assert frontend.text.seen.kwargs == wanted
    error = await api.refused(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "much"}
    )
    assert error["param"] == "reasoning_effort"


async def test_the_service_tier_is_told(api):
    assert "service_tier" not in await api.chat()
    assert (await api.chat(service_tier="auto"))["service_tier"] == "default"
    assert {chunk["service_tier"] for chunk in await api.chat_stream(service_tier="flex")} == {"flex"}


async def test_the_last_message_can_be_continued_and_echoed(api, frontend):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    assert (await api.chat(**body))["choices"][0]["message"]["content"] == "Well, " + TEXT.format(0)
    assert joined(await api.chat_stream(**body))["content"] == "Well, " + TEXT.format(0)
    assert not frontend.text.decode(frontend.items[0].prompt_token_ids).endswith("[assistant]")


async def test_tools_that_may_not_be_called_are_fine(api, frontend):
    tool = {"type": "function", "function": {"name": "f"}}
    await api.chat(tools=[tool], tool_choice="none")
    assert frontend.text.seen.tools is None
    await api.chat(tools=[], tool_choice="auto")


async def test_empty_deltas_make_no_chunks(api, frontend, fake):
    frontend.script = lambda item: fake.interleaved(fake.deltas_of(item, "🙂"))
    chunks = await api.chat_stream()
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "🙂"},
    ]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_what_features_add_is_with_the_choice(api, frontend, fake, route):
    """Whole and in pieces, also with a piece that has no text."""

    def told(item, index):
        first, second, last = fake.deltas_of(item, "éa", index=index)
        assert first.text == ""
        first.reply, last.reply = {"mine": {"rows": [0, 1]}}, {"mine": {"rows": [2]}}
        return [first, second, last]

    default = frontend.script
    frontend.script = lambda item: fake.interleaved(*(told(item, index) for index in range(item.n)))
    reply = await getattr(api, route)(n=2)
    assert [choice["features"] for choice in reply["choices"]] == [{"mine": {"rows": [0, 1, 2]}}] * 2
    choices = [choice for chunk in await getattr(api, f"{route}_stream")() for choice in chunk["choices"]]
    assert [choice["features"]["mine"]["rows"] for choice in choices if "features" in choice] == [[0, 1], [2]]
    frontend.script = default
    assert "features" not in (await getattr(api, route)())["choices"][0]
