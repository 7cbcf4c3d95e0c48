"""/v1/completions: prompts of every kind, echo, offsets, streams."""

from itertools import chain, product

import pytest

TEXT = "Grüße {} 🙂!"


def joined(chunks, index=0):
    """What a client puts together from the chunks of one choice, in a whole reply's shape."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    *before, last = choices
    assert all(choice["finish_reason"] is None for choice in before)
    return {
        "text": "".join(choice["text"] for choice in choices),
        "finish_reason": last["finish_reason"],
        "logprobs": {name: list(chain(*(piece[name] for piece in pieces))) for name in pieces[0]} if pieces else None,
    }


async def test_a_reply_has_the_published_shape(api):
    reply = await api.complete(max_tokens=64)
    assert reply["id"].startswith("cmpl-")
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT.format(0), "stop", None)
    assert reply["usage"]["prompt_tokens"] == 3  # with the <bos>
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi", [[256, 72, 105]]),
        (["Hi", "é"], [[256, 72, 105], [256, 0xC3, 0xA9]]),
        ([72, 105], [[72, 105]]),
        ([[72], [105, 33]], [[72], [105, 33]]),
        (["Hi"], [[256, 72, 105]]),
    ],
)
async def test_prompts_of_every_kind(api, frontend, prompt, ids):
    reply = await api.complete(prompt=prompt, n=2)
    assert [item.prompt_token_ids for item in frontend.items] == ids
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(ids)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_special_tokens_can_be_left_out(api, frontend):
    await api.complete(add_special_tokens=False)
    assert frontend.items[0].prompt_token_ids == [72, 105]


async def test_prompts_run_at_the_same_time(api, frontend, fake):
    frontend.script = lambda item: [0.05, *fake.interleaved(fake.deltas_of(item, "ok"))]
    chunks = await api.complete_stream(prompt=["a", "b", "c"])
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order == [0, 1, 2, 0, 1, 2]


async def test_choices_are_numbered_by_prompt(api, frontend, fake):
    def script(item):
        names = [f"{chr(item.prompt_token_ids[-1])}{index}" for index in range(item.n)]
        return fake.interleaved(*(fake.deltas_of(item, name, index=i) for i, name in enumerate(names)))

    frontend.script = script
    reply = await api.complete(prompt=["a", "b"], n=2, best_of=2)
    assert [choice["text"] for choice in reply["choices"]] == ["a0", "a1", "b0", "b1"]
    chunks = await api.complete_stream(prompt=["a", "b"], n=2)
    assert [joined(chunks, index)["text"] for index in range(4)] == ["a0", "a1", "b0", "b1"]


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    "extras", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0}]
)
async def test_a_stream_says_what_a_whole_reply_says(api, extras):
    for prompt, n in product(("Hé", ["Hé", "🙂"], [72, 256, 105], [[72], [105]]), (1, 2)):
        body = {"prompt": prompt, "n": n, "max_tokens": 64} | extras
        reply = await api.complete(**body)
        chunks = await api.complete_stream(stream_options={"include_usage": True}, **body)
        for choice in reply["choices"]:
            assert joined(chunks, choice["index"]) == {
                "text": choice["text"],
                "finish_reason": choice["finish_reason"],
                "logprobs": choice["logprobs"],
            }, body
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == reply["usage"]


async def test_echo_with_logprobs_lines_up(api):
    reply = await api.complete(prompt="né", echo=True, logprobs=1, max_tokens=4)
    choice = reply["choices"][0]
    assert choice["text"] == "néGrü"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["<bos>", "n", "\ufffd", "\ufffd", "G", "r", "\ufffd", "\ufffd"]
    assert scores["text_offset"] == [0, 0, 1, 1, 2, 3, 4, 4]
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert scores["top_logprobs"][1] == {"o": -0.25, "n": -0.5 - ord("n") / 1000}
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert token in ("<bos>", "\ufffd") or choice["text"].startswith(token, offset)


async def test_visible_special_tokens_count_in_offsets(api):
    body = {"prompt": [256, 72], "echo": True, "logprobs": 0, "max_tokens": 1}
    assert (await api.complete(**body))["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]
    choice = (await api.complete(**body, skip_special_tokens=False))["choices"][0]
    assert choice["text"] == "<bos>HG"
    assert choice["logprobs"]["text_offset"] == [0, 5, 6]


async def test_offsets_of_trimmed_tokens_stay_in_the_text(api, frontend, fake):
    def script(item):
        first, *trimmed = fake.deltas_of(item, "aEND", stop_reason="END")
        for delta in trimmed:
            delta.text = ""
        trimmed[0].logprobs = [entry for delta in trimmed for entry in delta.logprobs]
        trimmed[0].finish_reason, trimmed[0].stop_reason = "stop", "END"
        return [[first], [trimmed[0]]]

    frontend.script = script
    assert (await api.complete(logprobs=0))["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1]
    assert joined(await api.complete_stream(logprobs=0))["logprobs"]["text_offset"] == [0, 1, 1, 1]


async def test_no_tokens_with_echo_scores_the_prompt(api, frontend):
    reply = await api.complete(prompt="Hi", echo=True, logprobs=1, max_tokens=0)
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert choice["logprobs"]["tokens"] == ["<bos>", "H", "i"]
    assert reply["usage"]["completion_tokens"] == 0
    assert frontend.items[0].sampling.max_tokens == 1


async def test_the_second_choice_waits_for_the_prompts_scores(api, frontend, fake):
    """Only choice 0 brings them, and it may be the later one."""

    def script(item):
        first = fake.deltas_of(item, "a", index=0)
        second = fake.deltas_of(item, "b", index=1)
        return [second, first]

    frontend.script = script
    chunks = await api.complete_stream(n=2, echo=True, logprobs=0)
    for index in range(2):
        assert joined(chunks, index)["logprobs"]["tokens"][:3] == ["<bos>", "H", "i"]


async def test_sixteen_tokens_unless_told(api, frontend):
    await api.complete()
    await api.complete(prompt=[65] * 4090)  # six places are left behind it
    assert [item.sampling.max_tokens for item in frontend.items] == [16, 6]


async def test_prompt_logprobs_and_token_ids_are_in_the_choice(api):
    assert (await api.complete())["choices"][0]["prompt_logprobs"] is None  # as vLLM has it
    choice = (await api.complete(prompt_logprobs=0, return_token_ids=True, max_tokens=2))["choices"][0]
    assert [None if entry is None else list(entry) for entry in choice["prompt_logprobs"]] == [None, ["72"], ["105"]]
    assert choice["prompt_token_ids"] == [256, 72, 105]
    assert choice["token_ids"] == list(b"Gr")
    first, *rest = await api.complete_stream(return_token_ids=True, max_tokens=2)
    assert first["choices"][0]["prompt_token_ids"] == [256, 72, 105]
    assert [token for chunk in (first, *rest) for token in chunk["choices"][0]["token_ids"]] == list(b"Gr")


async def test_long_prompts_are_tokenised_off_the_loop(api, frontend):
    await api.complete(prompt="a")
    assert frontend.num_blocking == 0
    await api.complete(prompt="a" * 3_000)
    assert frontend.num_blocking == 1
