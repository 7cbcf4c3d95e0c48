"""Plain data: what moves between the parts of fwk. No behaviour, no torch at import."""

from fwk.types.batch import Batch, BlockSaves, ForwardBatch, NewSequence, ScheduledSequence, SequenceResult, StepResult
from fwk.types.messages import (
    Abort,
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Ping,
    Pong,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenEvent,
)
from fwk.types.model_config import ModelConfig, RopeConfig
from fwk.types.request import FinishReason, Request, TokenLogprobs
from fwk.types.sampling import GrammarKind, GrammarRequest, SamplingParams

__all__ = [
    "Abort",
    "AddRequest",
    "Batch",
    "BlockSaves",
    "EngineFailed",
    "EngineReady",
    "EngineStats",
    "FinishReason",
    "ForwardBatch",
    "FromEngine",
    "GrammarKind",
    "GrammarRequest",
    "ModelConfig",
    "NewSequence",
    "Ping",
    "Pong",
    "Request",
    "RopeConfig",
    "SamplingParams",
    "ScheduledSequence",
    "SequenceResult",
    "Shutdown",
    "StepOutputs",
    "StepResult",
    "ToEngine",
    "TokenEvent",
    "TokenLogprobs",
]
