"""The processors of standard fields do what the contract says."""

from __future__ import annotations

from fwk_kit.testing import LogitsProcessorSuite


class TestTemperature(LogitsProcessorSuite):
    plugin = "temperature"
    asks = ({"temperature": 0.5}, {"temperature": 1.7})


class TestTruncation(LogitsProcessorSuite):
    plugin = "truncation"
    asks = ({"top_k": 3}, {"top_p": 0.5, "min_p": 0.02})


class TestLogitBias(LogitsProcessorSuite):
    plugin = "logit_bias"
    asks = ({"logit_bias": {3: 1.5, 7: -100.0}}, {"logit_bias": {9: 2.0}})


class TestAllowedTokenIds(LogitsProcessorSuite):
    plugin = "allowed_token_ids"
    asks = ({"allowed_token_ids": [3, 4, 9]}, {"allowed_token_ids": [11]})


class TestMinTokens(LogitsProcessorSuite):
    plugin = "min_tokens"
    asks = ({"min_tokens": 5}, {"min_tokens": 3, "stop_token_ids": [9]})
