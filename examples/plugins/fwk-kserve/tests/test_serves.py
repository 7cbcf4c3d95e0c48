"""A real server, asked as a client of KServe asks."""

import urllib.error

import pytest

from fwk.testing import ask, serve_tiny


def test_generate() -> None:
    with serve_tiny("--enable-plugin", "kserve") as url:
        path = "/v2/models/any/generate"
        body = {"text_input": "Hello", "parameters": {"max_tokens": 8, "temperature": 0.0}}
        assert ask(url, path, body)["text_output"] == ask(url, path, body)["text_output"]
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url, path, {"text_input": "x", "parameters": {"beam_width": 2}})
        assert caught.value.code == 400
