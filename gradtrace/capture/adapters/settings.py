"""Read the settings that engine and optimizer hold, whatever family the optimizer is of.

Each is read where it has effect, not from the configuration; what an engine does not have is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gradtrace.capture.adapters.declare import Model

Reader = Callable[[Model], Any]


def _held(name: str) -> Reader:
    return lambda m: getattr(m.optimizer, name)


def _dynamic(model: Model) -> bool:
    holder = model.optimizer
    if not hasattr(holder, "dynamic_loss_scale"):
        holder = holder.loss_scale_config  # FP16_Optimizer since 0.18.6
    return bool(holder.dynamic_loss_scale)


def _scaler(*names: str) -> Reader:
    """Read what governs a dynamic loss scale, wherever this optimizer keeps it, under any name."""

    def read(model: Model) -> Any:
        if not _dynamic(model):
            return None
        optimizer = model.optimizer
        holders = [getattr(optimizer, n, None) for n in ("loss_scaler", "loss_scale_config")]
        for holder in (*holders, optimizer):
            for name in names:
                if getattr(holder, name, None) is not None:
                    return getattr(holder, name)
        return None

    return read


def _device(name: str) -> Reader:
    def read(model: Model) -> Any:
        config = getattr(model.engine, name)()
        return "none" if config is None else getattr(config.device, "value", config.device)

    return read


def _counts(model: Model) -> list[int]:
    found = model.optimizer.partition_count
    return [int(count) for count in (found if isinstance(found, list) else [found])]


SETTINGS: Final[Mapping[str, Reader]] = {
    "train_batch_size": lambda m: int(m.engine.train_batch_size()),
    "micro_batch_size": lambda m: int(m.engine.train_micro_batch_size_per_gpu()),
    "autocast_dtype": lambda m: (
        m.engine.torch_autocast_dtype() if m.engine.torch_autocast_enabled() else None
    ),
    "master_dtype": _held("master_weights_and_grads_dtype"),
    "dynamic_loss_scale": _dynamic,
    "loss_scale_factor": _scaler("scale_factor"),
    "loss_scale_window": _scaler("scale_window"),
    "min_loss_scale": _scaler("min_scale", "min_loss_scale"),
    "loss_scale_hysteresis": _scaler("delayed_shift"),
    "consecutive_hysteresis": _scaler("consecutive_hysteresis"),
    "offload_optimizer_device": _device("zero_offload_optimizer"),
    "offload_param_device": _device("zero_offload_param"),
    "sub_group_size": lambda m: int(m.optimizer.sub_group_size),
    "partition_count": _counts,
    "allgather_bucket_size": lambda m: int(m.optimizer.allgather_bucket_size),
    "use_multi_rank_bucket_allreduce": _held("use_multi_rank_bucket_allreduce"),
    "ignore_unused_parameters": _held("ignore_unused_parameters"),
}


def settings(model: Model) -> dict[str, Any]:
    """Return the settings that this engine has."""
    found: dict[str, Any] = {}
    for name, read in SETTINGS.items():
        try:
            value = read(model)
        except (AttributeError, TypeError, ValueError):
            continue
        if value is not None:
            found[name] = value
    return found
