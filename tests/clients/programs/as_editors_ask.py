"""The requests of Open WebUI 0.12.4 and of VS Code, as their sources make them. ``URL`` and the model's name.

Both are too large to install here, or in no registry. Their bodies are those of ``routers/ollama.py``,
``routers/openai.py`` and ``utils/payload.py`` of the one, ``byok/vscode-node/ollamaProvider.ts`` and
``byok/node/openAIEndpoint.ts`` of the other.
"""

import json
import sys
import urllib.error
import urllib.request

URL, MODEL = sys.argv[1:3]
SAID = {"role": "user", "content": "Hello"}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]


def ask(path, body=None, method=None, key=None):
    """The status and the text of a reply, which a tool sends on as it is."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
    try:
        with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers, method=method)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read(path, body=None, **how):
    status, text = ask(path, body, **how)
    assert status == 200, (path, status, text)
    return json.loads(text)


def lines(path, body):
    """The objects of Ollama's streams."""
    status, text = ask(path, body)
    assert status == 200, (path, text)
    return [json.loads(line) for line in text.splitlines()]


def events(path, body, **how):
    """The objects of server-sent events."""
    status, text = ask(path, body, **how)
    assert status == 200, (path, text)
    told = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) for data in told if data != "[DONE]"]


def open_webui_ollama() -> None:
    assert "version" in read("/api/version")
    [listed] = [one for one in read("/api/tags")["models"] if one["model"].removesuffix(":latest") == MODEL]
    assert {"name", "model", "size", "digest", "details", "modified_at"} <= listed.keys()
    assert "expires_at" in read("/api/ps")["models"][0]
    options = {"temperature": 0.5, "num_ctx": 2048, "num_batch": 512, "num_keep": 4, "num_gpu": 1, "num_thread": 2}
    options |= {"use_mmap": True, "use_mlock": False, "mirostat": 0, "repeat_last_n": 64, "num_predict": 5}
    body = {"model": MODEL, "messages": [SAID], "stream": True, "options": options, "keep_alive": "5m", "tools": TOOLS}
    parts = lines("/api/chat", body | {"think": False, "metadata": {"chat_id": "c", "message_id": "m"}})
    assert parts[-1]["done"]
    assert any(part["message"]["content"] for part in parts)
    assert lines("/api/generate", {"model": MODEL, "prompt": "Hello", "stream": True, "options": options})[-1]["done"]
    assert read("/api/generate", {"model": MODEL, "keep_alive": 0, "prompt": ""})["done"], "unload"


def open_webui_openai() -> None:
    assert MODEL in [one["id"] for one in read("/v1/models", key="none")["data"]]
    sampling = {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.0, "seed": 1, "stop": ["###"], "max_tokens": 5}
    body = {"stream": True, "model": MODEL, "messages": [SAID], "stream_options": {"include_usage": True}, **sampling}
    parts = events("/v1/chat/completions", body | {"logit_bias": {"5": -100}, "tools": TOOLS}, key="none")
    assert 0 < parts[-1]["usage"]["completion_tokens"] <= 5, parts[-1]
    title = '### Task:\nGenerate a title.\n### Output:\nJSON format: { "title": "..." }'
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": title}],
        "stream": False,
        "max_completion_tokens": 5,
    }
    assert read("/v1/chat/completions", body, key="none")["choices"][0]["message"]["content"]
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    body = {"model": MODEL, "input": [message], "instructions": "Be brief.", "stream": True, "max_output_tokens": 5}
    body["temperature"] = 0  # else it may end sooner
    assert events("/v1/responses", body, key="none")[-1]["type"] == "response.incomplete"


def vs_code_ollama() -> None:
    """A version below 0.6.4 is refused; the window and the abilities decide how the model is offered."""
    assert [int(part) for part in read("/api/version")["version"].split(".")] >= [0, 6, 4]
    for one in read("/api/tags")["models"]:
        shown = read("/api/show", {"model": one["model"]})
        info = shown["model_info"]
        assert info["general.basename"]
        assert info[f"{info['general.architecture']}.context_length"] >= 1024
        assert "tools" in shown["capabilities"]


def vs_code_chat() -> None:
    """Without a key and without a limit: what ends the answer is the stop of the first turn."""
    turns = [{"role": "system", "content": "You are an AI programming assistant."}]
    turns += [{"role": "user", "content": [{"type": "text", "text": "Say the word yes."}]}]
    body = {"messages": turns, "model": MODEL, "temperature": 0.1, "top_p": 1, "n": 1, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "tools": TOOLS, "tool_choice": "auto", "stop": ["."]}
    parts = events("/v1/chat/completions", body, key="")
    assert parts[-1]["usage"]["total_tokens"]
    given = [{"type": "function", "strict": False, **WEATHER}]
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    body = {"model": MODEL, "input": [item], "stream": True, "store": True, "tools": given, "truncation": "auto"}
    parts = events("/v1/responses", body | {"max_output_tokens": 5}, key="")
    told = {"type": "function_call_output", "call_id": "c", "output": "Sunny."}
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Paris"}'}
    later = {"input": [call, told], "previous_response_id": parts[-1]["response"]["id"], "max_output_tokens": 5}
    assert events("/v1/responses", body | later, key="")[-1]["response"]["status"] in ("completed", "incomplete")


for check in (open_webui_ollama, open_webui_openai, vs_code_ollama, vs_code_chat):
    check()
    print("ok", check.__name__, flush=True)
