"""The part in each worker: in which precision states are summed up."""

from __future__ import annotations

import torch

from fwk.interfaces.feature import ModelBuild, WorkerPart
from fwk.interfaces.model import ModelContext
from fwk_features.recurrent_states import RecurrentStatesOptions


class StatePrecision(WorkerPart):
    """Has no part in steps."""

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        options = self.context.options
        if isinstance(options, RecurrentStatesOptions) and options.mamba_ssm_dtype != "auto":
            context.state_dtype = getattr(torch, options.mamba_ssm_dtype)
        return ""
