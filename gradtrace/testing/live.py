"""Plant faults into live DeepSpeed methods, to prove that a trace of them convicts."""

from __future__ import annotations

from typing import Any


def keep_last_micro_step_only(engine: Any) -> None:
    """Make ZeRO-1/2 forget, at every reduction, what was accumulated before it.

    The fault of DeepSpeed issue 7718 and open-instruct PR 1498: the accumulation buffer is replaced
    by the newest reduced micro-step instead of added to.
    """
    optimizer = engine.optimizer
    original = optimizer.independent_gradient_partition_epilogue

    def epilogue(*args: Any, **kwargs: Any) -> Any:
        for name in ("all_grad_tensors", "averaged_gradients"):
            buffers = getattr(optimizer, name, {})
            for group in buffers:
                buffers[group] = None
        return original(*args, **kwargs)

    optimizer.independent_gradient_partition_epilogue = epilogue
