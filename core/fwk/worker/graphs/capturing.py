"""Whether and how the steps of a run are captured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from torch import Tensor

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackendSpec, CaptureSizes
from fwk.interfaces.drafting import DraftingMaker
from fwk.interfaces.graphs import GraphCapture
from fwk.interfaces.model import Model
from fwk.interfaces.moe import GRAPH_CAPTURE
from fwk.interfaces.parallel import ParallelGroup
from fwk.setup.resolve import ModelSetup
from fwk.worker.graphs.graph_sizes import GraphSizes, graph_sizes
from fwk.worker.graphs.step_graphs import CapturedStepModel, DecodeGraphs, StepModel, StepSize
from fwk.worker.loading.model_builder import ModelBuilder
from fwk.worker.runner.inputs import InputBuffers


class Capturing:
    """Chooses the step model: on the host's operators one capture for all sizes, on a device one for each of some."""

    def __init__(self, config: Config, setup: ModelSetup, models: ModelBuilder, ranks: ParallelGroup) -> None:
        """Raises ``ConfigError`` for options that would do nothing."""
        self._options = config.engine
        self._setup = setup
        self._models = models
        self._ranks = ranks
        self._asked = graph_sizes(config, setup.device)
        self.drafting: DraftingMaker | None = None
        self.reader = ""

    @cached_property
    def sizes(self) -> GraphSizes:
        """Numbers of rows of the steps that are captured by themselves; once ``drafting`` is known."""
        most = self._max_drafts
        return self._asked.with_drafts(most, self._setup.max_step_tokens) if most else self._asked

    @property
    def _max_drafts(self) -> int:
        return 0 if self.drafting is None else self.drafting.max_drafts

    @property
    def piece_sizes(self) -> Sequence[int]:
        """Numbers of tokens of the steps that are captured in pieces."""
        return () if self._models.pieces is None else self._models.pieces.sizes

    @property
    def num_rows(self) -> int:
        """Of the largest step that is captured by itself; 0: none is."""
        return self.sizes.sizes[-1] if self._captures_decodes else 0

    @cached_property
    def _captures_decodes(self) -> bool:
        return not self._setup.device.is_host and not self.refusal

    @cached_property
    def _capture(self) -> GraphCapture | None:
        device = self._setup.device
        return self._models.operators.graph_capture() if device.is_host else device.graph_capture()

    @cached_property
    def refusal(self) -> str:
        """Why steps are not even tried to be captured whole; empty when they are."""
        return self._refusal or ("" if self._setup.device.is_host else self._device_refusal())

    @cached_property
    def _refusal(self) -> str:
        """The same of whole steps and of pieces."""
        if self._options.disable_cuda_graph:
            return "--disable-cuda-graph"
        if self.reader:
            return f"{self.reader} reads what layers compute"
        if self._ranks.size > 1:
            return "ranks add up their parts through torch.distributed"
        if self._ranks.stage.count > 1:
            return "stages hand hidden states on through torch.distributed"
        if self._setup.opened.served.is_recurrent and not self._setup.device.is_host:
            return "the model has recurrent layers"
        if self._setup.device.is_host and self._models.attention.not_recorded:
            return self._models.attention.not_recorded
        if self._setup.opened.served.encoder is not None:
            return "an encoder reads the prompts"
        moe = self._models.moe
        if not self._setup.device.is_host and moe is not None and GRAPH_CAPTURE not in moe.declaration.offers:
            return f"MoE runner {moe.name} makes the host wait for the device"
        if self._capture is None:
            is_host, chosen = self._setup.device.is_host, self._setup.resolution.chosen
            return f"the operators {chosen['operators']} are not captured" if is_host else "the device captures none"
        return ""

    def _device_refusal(self) -> str:
        if self._models.layers:
            spec = self._setup.factory.item("attention").declaration
            assert isinstance(spec, AttentionBackendSpec)
            if "graph_capture" not in spec.features:
                return f"attention {self._setup.resolution.chosen['attention']} plans each step anew"
        if self.drafting is not None and self.drafting.reads_inputs:
            return "the speculative decoder reads the inputs of each step"
        return ""

    def prepare(self, inputs: InputBuffers, num_blocks: int, null_block: int) -> None:
        """Tell inputs and attention of the KV cache's blocks, and of the one that no sequence holds."""
        if not self.num_rows:
            return
        inputs.table.reserve(null_block)
        if self._models.layers:
            most = self._setup.max_model_len
            sizes = CaptureSizes(self.num_rows, most, num_blocks, null_block, 1 + self._max_drafts)
            self._models.attention.init_capture(self._models.layers, sizes)

    def on_trial(self, model: Model, is_greedy: Tensor | None, sizes: Sequence[int]) -> StepModel:
        """Captures of some sizes of steps, in memory of their own: for what they take to be measured."""
        capture = self._setup.device.graph_capture()
        assert capture is not None, "only where decode steps are captured"
        operators, taps = self._models.operators, self._models.wanted_taps
        return DecodeGraphs(model, is_greedy, operators, capture, GraphSizes(tuple(sizes), self.sizes.pads), taps)

    def pieces_on_trial(self, model: Model, is_greedy: Tensor | None, sizes: Sequence[int]) -> StepModel:
        """As ``on_trial``, of steps in pieces."""
        made = StepModel(model, is_greedy, self._models.operators, self._models.wanted_taps)
        capture, pieces = self._setup.device.graph_capture(), self._models.pieces
        assert capture is not None, "refused otherwise"
        assert pieces is not None, "only where steps are captured in pieces"
        made.pieces = pieces.captures(capture, sizes)
        return made

    def step_model(self, model: Model, is_greedy: Tensor | None, max_tokens: int, max_drafts: int) -> StepModel:
        """What runs the steps. Raises ``ConfigError`` where pieces are asked for and cannot be captured."""
        made = self._step_model(model, is_greedy, max_tokens, max_drafts)
        pieces = self._models.pieces
        if pieces is None:
            return made
        refusal = self._refusal or ("" if self._models.layers else "the model has no attention")
        if refusal:
            raise ConfigError(f"{pieces.label}: {refusal}; leave it out")
        assert self._capture is not None, "refused otherwise"
        made.pieces = pieces.captures(self._capture, pieces.sizes, self._around)
        return made

    def _around(self) -> AbstractContextManager[None]:
        return self._models.features.around_captures()

    def _step_model(self, model: Model, is_greedy: Tensor | None, max_tokens: int, max_drafts: int) -> StepModel:
        operators, taps = self._models.operators, self._models.wanted_taps
        if self._capture is None or self.refusal:
            return StepModel(model, is_greedy, operators, taps, makes_logits=self._ranks.stage.is_last)
        if self._captures_decodes:
            return DecodeGraphs(model, is_greedy, operators, self._capture, self.sizes, taps, self._around)
        max_seqs = self._options.cuda_graph_max_bs
        if self._setup.opened.served.is_recurrent:  # operators count sequences, which have room for so many tokens each
            max_tokens = min(max_tokens, self._setup.max_sequence_len)
        most = StepSize(max_tokens, max_tokens, min(max_tokens, max_seqs * (1 + max_drafts)), max_seqs)
        return CapturedStepModel(model, is_greedy, operators, self._capture, most, taps)

    def how(self, model: StepModel) -> str:
        """``captured``, on a device with the numbers of sequences of decode steps, or ``eager`` and why; pieces."""
        if model.pieces is None:
            return self._how(model)
        sizes, refusal = self.piece_sizes, model.pieces.refusal
        how = f"eager ({refusal})" if refusal else f"in pieces ({len(sizes)} numbers of tokens up to {sizes[-1]})"
        return f"{self._how(model)}; prompts {how}"

    def _how(self, model: StepModel) -> str:
        captured = isinstance(model, CapturedStepModel | DecodeGraphs)
        refusal = model.refusal if captured else self.refusal
        if refusal:
            return f"eager ({refusal})"
        if isinstance(model, DecodeGraphs):
            sizes = self.sizes.sizes
            if self._max_drafts:
                numbers = f"{len(sizes)} numbers of them up to {sizes[-1]}"
                return f"captured (next tokens and drafts in chains, {numbers}; not trees of drafts)"
            return f"captured (next tokens of {len(sizes)} numbers of sequences up to {sizes[-1]})"
        return "captured"
