"""Make an engine of somebody's ds_config on this machine's CPU, changing no more than that needs.

What decides the gradient path (stage, dtypes, offload, buckets, accumulation, scaling) is kept as
given. Each change is told, so that a reader can judge it.

Source: deepspeed 0.19.8, runtime/engine.py `_configure_optimizer` and `_configure_basic_optimizer`;
transformers, integrations/deepspeed.py, for what ``auto`` means.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

Config = dict[str, Any]
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Change:
    """Say what of the configuration was changed to run it here; ``None`` is not there."""

    setting: str
    given: Any
    used: Any
    why: str


@dataclass(frozen=True, slots=True)
class Fitted:
    """Hold a configuration that this machine can run.

    Attributes:
        config: what DeepSpeed is given.
        client: the optimizer to hand in, or None where DeepSpeed makes it of the configuration.
        fp16: whether DeepSpeed must be told that this CPU computes fp16.
    """

    config: Config
    changes: tuple[Change, ...]
    client: Literal["adamw", "fused_adam"] | None
    fp16: bool


_TRAINER: Final = "auto: what the Hugging Face Trainer sets by default"
_SWITCH: Final = "auto: what the Trainer sets without its flag; write true to look at that dtype"
_HIDDEN: Final = "auto: computed from the hidden size, as the Trainer does"

# ``auto`` in Hugging Face configurations: setting -> (its value for a hidden size, why).
_AUTOS: Final[Mapping[str, tuple[Callable[[int], Any], str]]] = {
    "train_micro_batch_size_per_gpu": (lambda _: 8, _TRAINER),
    "gradient_accumulation_steps": (lambda _: 1, _TRAINER),
    "gradient_clipping": (lambda _: 1.0, _TRAINER),
    "fp16.enabled": (lambda _: False, _SWITCH),
    "bf16.enabled": (lambda _: False, _SWITCH),
    "optimizer.params.lr": (lambda _: 5e-5, _TRAINER),
    "optimizer.params.betas": (lambda _: [0.9, 0.999], _TRAINER),
    "optimizer.params.eps": (lambda _: 1e-8, _TRAINER),
    "optimizer.params.weight_decay": (lambda _: 0.0, _TRAINER),
    "zero_optimization.reduce_bucket_size": (lambda hidden: hidden**2, _HIDDEN),
    "zero_optimization.stage3_prefetch_bucket_size": (lambda h: int(0.9 * h**2), _HIDDEN),
    "zero_optimization.stage3_param_persistence_threshold": (lambda h: 10 * h, _HIDDEN),
}
_REPORTS: Final = "it only reports, and may write files or use a network"
# Sections without a bearing on gradients -> why they are left out.
_LEFT_OUT: Final = {
    "scheduler": "it only sets learning rates",
    "wandb": _REPORTS,
    "tensorboard": _REPORTS,
    "csv_monitor": _REPORTS,
    "comet": _REPORTS,
    "flops_profiler": _REPORTS,
    "comms_logger": _REPORTS,
    "autotuning": "it runs trainings of its own",
}
_ADAMS: Final = ("adam", "adamw")
_KERNELS: Final = ("lamb", "lion", "fusedadam")  # need a kernel that CPUs do not have
_ADAM_PARAMS: Final = ("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam")
_MICRO, _ACCUMULATION, _TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)


def fit(given: Mapping[str, Any], ranks: int, hidden: int) -> Fitted:
    """Change a ds_config so that ``ranks`` CPU ranks can run it.

    Args:
        given: the configuration as the user has it; not modified.
        ranks: how many ranks there will be.
        hidden: hidden size of the model, for ``auto`` values that depend on it.
    """
    config: Config = copy.deepcopy(dict(given))
    changes = [
        *_leave_out(config),
        *_resolve_autos(config, hidden),
        *_fit_batch(config, ranks),
    ]
    half = any(_get(config, f"{name}.enabled") is True for name in ("fp16", "bf16"))
    stage0 = (_get(config, "zero_optimization.stage") or 0) == 0
    client: Literal["adamw", "fused_adam"] | None = None
    if not isinstance(config.get("optimizer"), Mapping):
        client = "adamw"
        changes += _add_optimizer(config)
    elif half and stage0 and _makes_fused_adam(config):
        client = "fused_adam"
        changes += _stand_in_for_fused_adam(config)
    else:
        changes += _fit_optimizer(config)
    config["steps_per_print"] = 10**9  # says nothing about gradients, and prints
    fp16 = _get(config, "fp16.enabled") is True or _autocasts(config)
    return Fitted(config, tuple(changes), client, fp16)


def build(module: torch.nn.Module, fitted: Fitted) -> tuple[Any, tuple[Change, ...]]:
    """Make an engine of a model; the process group must be initialised.

    Returns:
        The engine, and what was changed besides the configuration.

    Raises:
        Exception: whatever DeepSpeed raises for a configuration that it refuses.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    changes = []
    accelerator = get_accelerator()
    if fitted.fp16 and not accelerator.is_fp16_supported():
        accelerator.is_fp16_supported = lambda: True
        why = "DeepSpeed refuses fp16 on this CPU; torch computes it in software"
        changes.append(Change("accelerator.is_fp16_supported()", False, True, why))
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = None if fitted.client is None else _CLIENTS[fitted.client](parameters)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=parameters if optimizer is None else None,
        config=copy.deepcopy(fitted.config),
    )
    return engine, tuple(changes)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _fused_adam(parameters: Any) -> torch.optim.Optimizer:
    """Return a FusedAdam to DeepSpeed's eyes that steps by torch: its kernel takes long to compile."""
    from deepspeed.ops.adam import FusedAdam

    class TorchStepped(FusedAdam):  # type: ignore[misc]
        inner: torch.optim.AdamW | None = None

        def __init__(self, parameters: Any) -> None:
            torch.optim.Optimizer.__init__(self, parameters, {"lr": 1e-4})

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            torch.optim.Optimizer.zero_grad(self, *args, **kwargs)

        def step(self, closure: Any = None) -> None:
            if self.inner is None:  # DeepSpeed puts its own tensors into the groups first
                self.inner = torch.optim.AdamW(self.param_groups)
            self.inner.step()

    optimizer: torch.optim.Optimizer = TorchStepped(parameters)
    return optimizer


_CLIENTS: Final[Mapping[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "fused_adam": _fused_adam,
}


def _resolve_autos(config: Config, hidden: int) -> Iterator[Change]:
    for path in list(_paths_of(config, AUTO)):
        if path in _AUTOS:
            value, why = _AUTOS[path][0](hidden), _AUTOS[path][1]
            _set(config, path, value)
            yield Change(path, AUTO, value, why)
        else:
            _remove(config, path)
            yield Change(path, AUTO, None, "auto: left to DeepSpeed's default")


def _leave_out(config: Config) -> Iterator[Change]:
    for name, why in _LEFT_OUT.items():
        if config.pop(name, None) is not None:
            yield Change(name, "given", None, why)
    config["wall_clock_breakdown"] = False


def _fit_batch(config: Config, ranks: int) -> Iterator[Change]:
    """Make the three batch settings fit together for this number of ranks."""
    total, micro, steps = (config.get(name) for name in (_TOTAL, _MICRO, _ACCUMULATION))
    if total is None and micro is None:
        config[_MICRO] = 1
        yield Change(_MICRO, None, 1, "no batch size is given; it does not touch the gradient path")
    if not all(isinstance(x, int) and x > 0 for x in (total, micro, steps) if x is not None):
        return  # DeepSpeed's to refuse
    if total is None:
        return
    least = (micro or 1) * (steps or 1) * ranks
    whole = micro is not None and steps is not None
    fits = total == least if whole else total % least == 0
    if not fits:
        config[_TOTAL] = least
        yield Change(_TOTAL, total, least, f"the one given does not fit {ranks} ranks")
    elif steps is None and micro is not None:
        follows = total // least
        why = f"follows from {_TOTAL}: with {ranks} ranks it is {follows}; --ranks changes it"
        yield Change(_ACCUMULATION, None, follows, why)


def _add_optimizer(config: Config) -> Iterator[Change]:
    config.setdefault("zero_allow_untested_optimizer", True)
    config["zero_force_ds_cpu_optimizer"] = False
    why = "the configuration names none: one is handed in, as training scripts do"
    yield Change("optimizer", None, "torch.optim.AdamW", why)


def _makes_fused_adam(config: Config) -> bool:
    params = config["optimizer"].get("params")
    return _name(config) in _ADAMS and not (
        isinstance(params, Mapping) and params.get("torch_adam")
    )


def _stand_in_for_fused_adam(config: Config) -> Iterator[Change]:
    """Keep the class, by which DeepSpeed chooses its FP16_Optimizer at stage 0."""
    given = config.pop("optimizer").get("type")
    config.setdefault("zero_allow_untested_optimizer", True)
    why = "its kernel would have to be compiled here; the class is FusedAdam, as DeepSpeed makes it"
    yield Change("optimizer", given, "a FusedAdam that steps by torch", why)


def _fit_optimizer(config: Config) -> Iterator[Change]:
    name = _name(config)
    section = config["optimizer"]
    params = section.setdefault("params", {})
    if not isinstance(params, dict):
        return  # DeepSpeed's to refuse
    if name in _KERNELS and (_get(config, "zero_optimization.stage") or 0) > 0:
        yield Change(
            "optimizer.type",
            section.get("type"),
            "AdamW",
            "its kernel needs a GPU; ZeRO is the same",
        )
        section["type"], name = "AdamW", "adamw"
    if name not in _ADAMS or params.get("torch_adam"):
        return
    params["torch_adam"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    why = "DeepSpeed's own Adam would have to be compiled here; the gradient path is the same"
    yield Change("optimizer.params.torch_adam", None, True, why)
    for key in [key for key in params if key not in (*_ADAM_PARAMS, "max_grad_norm")]:
        yield Change(
            f"optimizer.params.{key}", params.pop(key), None, "torch's Adam has no such one"
        )


def _name(config: Config) -> str:
    return str(config["optimizer"].get("type", "")).lower()


def _autocasts(config: Config) -> bool:
    return "16" in str(_get(config, "torch_autocast.dtype")) and "bf" not in str(
        _get(config, "torch_autocast.dtype")
    )


def _paths_of(config: Any, value: str, above: str = "") -> Iterator[str]:
    if isinstance(config, Mapping):
        for key, entry in config.items():
            if entry == value:
                yield f"{above}{key}"
            else:
                yield from _paths_of(entry, value, f"{above}{key}.")


def _get(config: Mapping[str, Any], path: str) -> Any:
    at: Any = config
    for key in path.split("."):
        at = at.get(key) if isinstance(at, Mapping) else None
    return at


def _set(config: Config, path: str, value: Any) -> None:
    *above, last = path.split(".")
    for key in above:
        config = config[key]
    config[last] = value


def _remove(config: Config, path: str) -> None:
    *above, last = path.split(".")
    for key in above:
        config = config[key]
    del config[last]
