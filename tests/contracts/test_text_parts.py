"""Logits processors, grammars, parsers and multimodal processors do what their contracts say."""

from __future__ import annotations

import numpy as np
from tests.helpers.images import PREPROCESSOR, VISION, encoded, noise
from tests.helpers.sounds import sound, wav

from fwk.interfaces.dialect import TextTools
from fwk.interfaces.multimodal import MediaItem
from fwk.plugins import Registered
from fwk_kit.testing import (
    GrammarBackendSuite,
    LogitsProcessorSuite,
    MultimodalProcessorSuite,
    ReasoningParserSuite,
    ToolParserSuite,
)
from fwk_kit.testing.fake_frontend import ByteText
from fwk_kit.testing.serving import TINY


class TestIdefics3(MultimodalProcessorSuite):
    plugin = "idefics3"
    samples = (
        MediaItem("image", encoded(noise(1))),
        MediaItem("image", encoded(noise(2))),
        MediaItem("image", encoded(noise(3, 16, 16), "JPEG")),
    )
    prompt = (1, 300, 5)
    config = {**TINY, "vision_config": VISION, "scale_factor": 2, "image_token_id": 300}
    processor_config = PREPROCESSOR


class TestLlava(MultimodalProcessorSuite):
    plugin = "llava"
    samples = (MediaItem("image", encoded(noise(1))), MediaItem("image", encoded(noise(2, 16, 40), "JPEG")))
    prompt = (1, 300, 5)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {**TINY, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_token_index": 300,
    }
    processor_config = {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}


class TestQwenVL(MultimodalProcessorSuite):
    plugin = "qwen_vl"
    samples = (MediaItem("image", encoded(noise(1))), MediaItem("image", encoded(noise(2, 16, 40), "JPEG")))
    prompt = (1, 300, 5)
    config = {**TINY, "vision_config": {"patch_size": 4}, "image_token_id": 300}
    processor_config = {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}


class TestGemma3(MultimodalProcessorSuite):
    plugin = "gemma3_vl"
    samples = (MediaItem("image", encoded(noise(1))), MediaItem("image", encoded(noise(2, 16, 40), "JPEG")))
    prompt = (1, 300, 5)
    config = {
        **TINY,
        "vision_config": {"image_size": 16},
        "mm_tokens_per_image": 4,
        "boi_token_index": 300,
        "eoi_token_index": 301,
        "image_token_index": 302,
    }
    processor_config = {"size": {"height": 16, "width": 16}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 9}


class TestInternVL(MultimodalProcessorSuite):
    plugin = "internvl"
    samples = (MediaItem("image", encoded(noise(1))), MediaItem("image", encoded(noise(2, 16, 40), "JPEG")))
    prompt = (1, 300, 5)
    config = {**TINY, "vision_config": {"patch_size": 4, "image_size": 16}, "image_token_id": 300}
    processor_config = {"size": {"height": 16, "width": 16}}


class TestOneVision(MultimodalProcessorSuite):
    plugin = "llava_onevision"
    samples = (MediaItem("image", encoded(noise(1))), MediaItem("image", encoded(noise(2, 16, 40), "JPEG")))
    prompt = (1, 300, 5)
    config = {**TINY, "vision_config": {"image_size": 16, "patch_size": 4}, "image_token_index": 300}
    processor_config = {"size": {"height": 16, "width": 16}}


class TestQwen2Audio(MultimodalProcessorSuite):
    plugin = "qwen2_audio"
    samples = (MediaItem("audio", wav(sound(1))), MediaItem("audio", wav(sound(2, 0.3, 8000), 8000)))
    prompt = (1, 300, 5)
    config = {**TINY, "audio_config": {"num_mel_bins": 16}, "audio_token_index": 300}
    processor_config = {"feature_size": 16, "chunk_length": 2}


class TestWhisper(MultimodalProcessorSuite):
    plugin = "whisper"
    samples = TestQwen2Audio.samples
    prompt = (1, 2, 5)
    config = {**TINY, "num_mel_bins": 16, "max_source_positions": 100}
    processor_config = TestQwen2Audio.processor_config

    def test_what_an_item_becomes_depends_on_it_alone(self, item: Registered) -> None:
        """It hears one at once: the same after another, and before other tokens."""
        processor = self.processor(item)
        for media in self.samples:
            alone, other = (processor.process(prompt, [media]).media[0] for prompt in ([1, 2, 5], [7]))
            np.testing.assert_array_equal(alone.arrays["spectrogram"], other.arrays["spectrogram"])


class Marks(ByteText):
    """A token for each byte, and for each mark."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        if text.startswith("[IMG_"):
            return [301 + ("END" in text)]
        return super().encode(text, add_special_tokens, parse_special)


class TestMistral3(MultimodalProcessorSuite):
    plugin = "mistral3"
    samples = (MediaItem("image", encoded(noise(1))), MediaItem("image", encoded(noise(2, 16, 40), "JPEG")))
    prompt = (1, 300, 5)
    config = {**TINY, "vision_config": {"patch_size": 4}, "image_token_index": 300}
    processor_config = {"size": {"longest_edge": 48}}

    def text(self) -> TextTools:
        return Marks()


class TestTemperature(LogitsProcessorSuite):
    plugin = "temperature"
    asks = ({"temperature": 0.5}, {"temperature": 2.0})


class TestPenalties(LogitsProcessorSuite):
    plugin = "penalties"
    asks = ({"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": -0.5})


class TestTruncation(LogitsProcessorSuite):
    plugin = "truncation"
    asks = ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_p": 0.5, "min_p": 0.02})


class TestSuppressTokens(LogitsProcessorSuite):
    plugin = "suppress_tokens"
    asks = (
        {"extra": {"suppress_tokens": [3, 5, 7]}},
        {"extra": {"suppress_tokens": [4], "begin_suppress_tokens": [1, 2]}},
    )


class TestTimestamps(LogitsProcessorSuite):
    plugin = "timestamps"
    asks = ({"extra": {"timestamp_begin": 40}}, {"extra": {"timestamp_begin": 60, "max_initial_timestamp_index": 5}})


class TestTypical(LogitsProcessorSuite):
    plugin = "typical"
    asks = ({"extra": {"typical_p": 0.3}}, {"extra": {"typical_p": 0.8}})


class TestTopNSigma(LogitsProcessorSuite):
    plugin = "top_n_sigma"
    asks = ({"extra": {"top_n_sigma": 0.5}}, {"extra": {"top_n_sigma": 1.0}})


class TestTopA(LogitsProcessorSuite):
    plugin = "top_a"
    asks = ({"extra": {"top_a": 0.5}}, {"extra": {"top_a": 1.0}})


class TestXtc(LogitsProcessorSuite):
    plugin = "xtc"
    asks = ({"extra": {"xtc_probability": 1.0, "xtc_threshold": 0.001}, "seed": 1},)


class TestDry(LogitsProcessorSuite):
    plugin = "dry"
    asks = (
        {"extra": {"dry_multiplier": 0.8, "dry_allowed_length": 1}},
        {"extra": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_base": 1.2}},
    )


class TestDynamicTemperature(LogitsProcessorSuite):
    plugin = "dynamic_temperature"
    asks = ({"extra": {"dynatemp_range": 0.5}}, {"temperature": 0.7, "extra": {"dynatemp_range": 0.7}})


class TestMirostat(LogitsProcessorSuite):
    plugin = "mirostat"
    asks = (
        {"extra": {"mirostat": 2, "mirostat_tau": 0.5}},
        {"extra": {"mirostat": 1, "mirostat_tau": 0.5, "mirostat_eta": 0.5}},
    )


class TestWatermark(LogitsProcessorSuite):
    plugin = "watermark"
    asks = ({"extra": {"watermark": True}}, {"extra": {"watermark": True, "watermark_delta": 5.0}})


class TestThinkingBudget(LogitsProcessorSuite):
    plugin = "thinking_budget"
    asks = (
        {
            "extra": {
                "thinking_token_budget": 0,
                "thinking_marks": {"opens": [], "closes": [[9]], "end": [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]},
            }
        },
        {
            "extra": {
                "thinking_token_budget": 1,
                "thinking_marks": {"opens": [], "closes": [[40]], "end": [13, 14, 15, 16, 17, 18, 40]},
            }
        },
    )


class TestLogitBias(LogitsProcessorSuite):
    plugin = "logit_bias"
    asks = ({"logit_bias": {3: 1.5, 7: -100.0}}, {"logit_bias": {9: 2.0}})


class TestAllowedTokenIds(LogitsProcessorSuite):
    plugin = "allowed_token_ids"
    asks = ({"allowed_token_ids": [3, 4, 9]}, {"allowed_token_ids": [11]})


class TestBadWords(LogitsProcessorSuite):
    plugin = "bad_words"
    asks = ({"bad_word_token_ids": [[16, 50], [5]]}, {"bad_word_token_ids": [[5, 9], [3, 3, 7]]})


class TestMinTokens(LogitsProcessorSuite):
    plugin = "min_tokens"
    asks = ({"min_tokens": 5}, {"min_tokens": 3, "stop_token_ids": [9]})


class TestLLGuidance(GrammarBackendSuite):
    plugin = "llguidance"


class TestXGrammar(GrammarBackendSuite):
    plugin = "xgrammar"


class TestOutlines(GrammarBackendSuite):
    plugin = "outlines"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n</tool_call>'


class TestHermes(ToolParserSuite):
    plugin = "hermes"
    samples = {
        CALL: ("", "", [("add", '{"a": 1, "b": [2, {"c": "}"}]}')]),
        f"I will add.\n\n{CALL}\n": ("I will add.", "", [("add", '{"a": 1, "b": [2, {"c": "}"}]}')]),
        f'{CALL}\n<tool_call>{{"name":"say","arguments":{{}}}}</tool_call>': (
            "",
            "",
            [("add", '{"a": 1, "b": [2, {"c": "}"}]}'), ("say", "{}")],
        ),
    }


class TestJson(ToolParserSuite):
    plugin = "json"
    samples = {
        '{"name": "add", "arguments": {"a": "}"}}': ("", "", [("add", '{"a": "}"}')]),
        '```json\n{"name": "add", "parameters": {"a": 1}}\n```': ("", "", [("add", '{"a": 1}')]),
        '[{"name": "add", "arguments": {}},\n {"name": "say"}]': ("", "", [("add", "{}"), ("say", "{}")]),
        '{"name": "add", "arguments": {}}\n{"name": "say"}': ("", "", [("add", "{}"), ("say", "{}")]),
    }


class TestQwen3(ReasoningParserSuite):
    plugin = "qwen3"
    samples = {"<think>hm</think>Yes.": ("Yes.", "hm", []), "Yes.": ("Yes.", "", [])}


class TestDeepSeekR1(ReasoningParserSuite):
    plugin = "deepseek-r1"
    samples = {"hm</think>Yes.": ("Yes.", "hm", []), "<think>hm</think>Yes.": ("Yes.", "hm", [])}
