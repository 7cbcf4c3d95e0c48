"""An EAGLE-3 head (arXiv:2503.01840) and how it is trained: on its own outputs for some steps on, in torch alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fwk.types import ModelConfig
from fwk_kit.training.collect import Target, Text

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    steps: tokens that a position is trained to draft, the later ones on its own outputs. held_out: share of the texts.
    """

    epochs: int = 8
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    steps: int = 4
    held_out: float = 0.05
    draft_vocab_size: int = 8192
    seed: int = 0


class Norm(nn.Module):
    """x / rms(x), scaled."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Eagle3(nn.Module):
    """The network under the names of published heads; shapes are its target's."""

    def __init__(self, config: ModelConfig, target: Target, tokens: Tensor) -> None:
        """tokens: [draft_vocab_size] int64, those of the target that it drafts."""
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        linear = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        self.fc = linear(3 * size, size)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": Norm(size, eps),
                "hidden_norm": Norm(size, eps),
                "post_attention_layernorm": Norm(size, eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * size, self.num_heads * self.head_size),
                        "k_proj": linear(2 * size, self.num_kv_heads * self.head_size),
                        "v_proj": linear(2 * size, self.num_kv_heads * self.head_size),
                        "o_proj": linear(self.num_heads * self.head_size, size),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {"gate_proj": linear(size, inner), "up_proj": linear(size, inner), "down_proj": linear(inner, size)}
                ),
            }
        )
        self.norm = Norm(size, eps)
        self.lm_head = linear(size, len(tokens))
        with torch.no_grad():
            for weight in (x for x in self.parameters() if x.dim() == 2):
                weight.normal_(0.0, 0.02)
            self.fc.weight.zero_()
            self.fc.weight[:, 2 * size :] = torch.eye(size)  # begins with what the highest of the three says
            self.lm_head.weight.copy_(target.output[tokens])
        powers = config.rope.theta ** (-torch.arange(0, self.head_size, 2).double() / self.head_size)
        self.frequencies = powers.float()

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [batch, n, heads, head_size]; positions [n]."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def step(
        self, embedded: Tensor, features: Tensor, offset: int, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One draft for each place, ``offset`` drafts after the texts' own: logits and the next features.

        embedded, features: [batch, n, hidden_size]. past: keys and values [batch, n, heads, head_size] of the steps
        before, to which this one's are added. A place sees the texts' up to itself, and of the others its own.
        """
        layer, (batch, count, _) = self.midlayer, embedded.shape
        attention: Any = layer["self_attn"]
        x = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](features)), -1)
        q, k, v = (attention[f"{name}_proj"](x).view(batch, count, -1, self.head_size) for name in "qkv")
        positions = torch.arange(count) + offset
        repeats = self.num_heads // self.num_kv_heads
        q = self._rotated(q, positions).transpose(1, 2)
        k = self._rotated(k, positions).repeat_interleave(repeats, 2).transpose(1, 2)
        v = v.repeat_interleave(repeats, 2).transpose(1, 2)
        past.append((k, v))
        scale = self.head_size**-0.5
        mask = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores = (q @ past[0][0].transpose(2, 3) * scale).float().masked_fill(mask, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True).float() * scale for key, _ in past[1:]]
        weights = torch.cat((scores, *own), -1).softmax(-1).to(v.dtype)
        out = weights[..., :count] @ past[0][1]
        for i, (_, value) in enumerate(past[1:]):
            out = out + weights[..., count + i : count + i + 1] * value
        x = features + attention["o_proj"](out.transpose(1, 2).reshape(batch, count, -1))
        normed = layer["post_attention_layernorm"](x)
        mlp: Any = layer["mlp"]
        x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return self.lm_head(self.norm(x)), x


def draft_tokens(texts: Sequence[Text], vocab_size: int, most: int) -> Tensor:
    """The tokens that occur most often in the texts, in the order of their numbers."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += text.token_ids.bincount(minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[: min(most, vocab_size)].sort().values


class Trainer:
    """Trains a head on texts. ``say`` gets a line for each epoch."""

    def __init__(
        self, config: ModelConfig, target: Target, texts: Sequence[Text], recipe: Recipe, say: Callable[[str], None]
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.target, self.say, self.config = recipe, target, say, config
        self.tokens = draft_tokens(texts, config.vocab_size, recipe.draft_vocab_size)
        self.number = torch.full((config.vocab_size,), IGNORED)  # of the target's tokens among the drafted ones
        self.number[self.tokens] = torch.arange(len(self.tokens))
        num_held = max(1, int(len(texts) * recipe.held_out))
        self.held, self.texts = list(texts[:num_held]), list(texts[num_held:])
        self.model = Eagle3(config, target, self.tokens)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.epoch = 0
        self.total = recipe.epochs * len(self._batches(self.texts))
        self.done = 0

    def _batches(self, texts: Sequence[Text]) -> list[list[Text]]:
        """Texts of about the same length together, ``batch_tokens`` in each batch."""
        found: list[list[Text]] = []
        for text in sorted(texts, key=lambda text: len(text.token_ids)):
            if not found or (len(found[-1]) + 1) * len(text.taps) > self.recipe.batch_tokens:
                found.append([])
            found[-1].append(text)
        return found

    def _losses(self, batch: Sequence[Text]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each step its loss, and which places [num_places] were right, of those that count."""
        longest = max(len(text.taps) for text in batch)
        tokens = torch.full((len(batch), longest + self.recipe.steps + 1), -1)
        taps = torch.zeros(len(batch), longest, batch[0].taps.shape[1])
        for row, text in enumerate(batch):
            tokens[row, : len(text.token_ids)] = text.token_ids
            taps[row, : len(text.taps)] = text.taps
        past: list[tuple[Tensor, Tensor]] = []
        features = self.model.fc(taps)
        for step in range(self.recipe.steps):
            given, wanted = tokens[:, 1 + step : 1 + step + longest], tokens[:, 2 + step : 2 + step + longest]
            if given.shape[1] > wanted.shape[1]:
                wanted = F.pad(wanted, (0, 1), value=-1)
            embedded = self.target.embedding[given.clamp(min=0)]
            logits, features = self.model.step(embedded, features, step, past)
            labels = torch.where(wanted >= 0, self.number[wanted.clamp(min=0)], IGNORED)
            counts = wanted >= 0
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
            yield loss, (logits.argmax(-1) == labels)[counts], counts

    def run(self, keep: Callable[[Trainer], None]) -> None:
        """Train the epochs that are left; ``keep`` is called after each."""
        while self.epoch < self.recipe.epochs:
            started, losses = time.monotonic(), []
            batches = self._batches(self.texts)
            order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.epoch)).tolist()
            for place in order:
                losses.append(self._train(batches[place]))
            self.epoch += 1
            seconds = time.monotonic() - started
            rates = ", ".join(f"{rate:.2f}" for rate in self.accuracy())
            self.say(
                f"epoch {self.epoch} of {self.recipe.epochs}: loss {sum(losses) / len(losses):.3f}, held-out drafts "
                f"right by place: {rates} ({seconds:.0f} s)"
            )
            keep(self)

    def _train(self, batch: Sequence[Text]) -> float:
        self.done += 1
        warm = min(1.0, self.done / max(1, self.total // 20))
        rate = self.recipe.learning_rate * warm * (0.05 + 0.475 * (1 + math.cos(math.pi * self.done / self.total)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.stack([loss * 0.8**i for i, (loss, _, _) in enumerate(self._losses(batch))]).sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        """How often the held-out texts continue as drafted, given that the drafts before were the texts' own."""
        right, counted = [0] * self.recipe.steps, [0] * self.recipe.steps
        for batch in self._batches(self.held):
            with torch.autocast("cpu", torch.bfloat16):
                for step, (_, hits, _) in enumerate(self._losses(batch)):
                    right[step] += int(hits.sum())
                    counted[step] += len(hits)
        return [a / max(1, b) for a, b in zip(right, counted, strict=True)]

    def state(self) -> dict[str, Any]:
        """What a run continues from."""
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "tokens": self.tokens,
            "epoch": self.epoch, "done": self.done,
        }  # fmt: skip

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, of a run on the same texts."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.done = state["epoch"], state["done"]

    def save(self, folder: Path) -> None:
        """The head in the published layout: config.json and model.safetensors."""
        config = self.config
        tensors = {name: x.detach().to(torch.bfloat16).contiguous() for name, x in self.model.state_dict().items()}
        tensors["d2t"] = self.tokens - torch.arange(len(self.tokens))
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        drafted[self.tokens] = True
        tensors["t2d"] = drafted
        settings: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_size, "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope.theta,
            "vocab_size": config.vocab_size, "draft_vocab_size": len(self.tokens), "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "eagle_aux_hidden_state_layer_ids": list(self.target.layers),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
