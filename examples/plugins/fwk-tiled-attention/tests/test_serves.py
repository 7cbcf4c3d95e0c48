"""A server with the backend answers, with drafts in trees too."""

from fwk.testing import ask, serve_tiny


def test_a_server_with_trees_of_drafts_answers() -> None:
    words = ["--attention-backend", "tiled", "--tiled-keys", "8", "--speculative-algorithm", "ngram"]
    with serve_tiny(*words, "--speculative-ngram-max-bfs-breadth", "2") as url:
        body = {"prompt": "abab" * 8, "max_tokens": 16, "temperature": 0}
        assert ask(url, "/v1/completions", body)["usage"]["completion_tokens"] == 16
        assert ask(url, "/server_info")["chosen"]["attention"] == "tiled"
