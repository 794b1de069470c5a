"""Law `publish`: the model's weight at the next step is the master weight, cast.

DeepSpeed copies the updated master shard into the model's flat weights and gathers them; a gather
moves bits. So each element is the master's own, or its one rounding to the model's dtype
(docs/laws/publish.md). Pure functions of tensors; nothing here reads a trace.
"""

from __future__ import annotations

from typing import Final

from gradtrace.analysis.bounds import Estimate, cast, exact
from gradtrace.trace.dtypes import Dtype, Float64

LAW: Final = "publish"


def expect(master: Float64, held: Dtype, model: Dtype) -> Estimate:
    """Return what the model's weight should be.

    Args:
        master: 1-D master weights after the step.
        held: their dtype.
        model: dtype of the model's weights.
    """
    return cast(exact(master), held, model)
