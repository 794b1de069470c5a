"""Recognise a DeepSpeed engine, choose its adapter, resolve every probe before any is installed."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import inspect
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from gradtrace.capture.adapters.bf16 import BF16
from gradtrace.capture.adapters.declare import Adapter, Model, Probe, Refusal
from gradtrace.capture.adapters.fp16 import FP16, FP16_UNFUSED
from gradtrace.capture.adapters.plain import PLAIN
from gradtrace.capture.adapters.settings import settings
from gradtrace.capture.adapters.zero3 import ZERO3
from gradtrace.capture.adapters.zero12 import ZERO12
from gradtrace.errors import NotAnEngineError, ProbeError, UnsupportedEngineError

ADAPTERS: Final = (ZERO12, BF16, ZERO3, FP16, FP16_UNFUSED, PLAIN)
# What the step clock needs of the engine and of any optimizer.
ENGINE_METHODS: Final = ("forward", "backward", "step", "is_gradient_accumulation_boundary")
# What brackets a backward pass that begins at a tensor; DeepSpeed came to support such with
# ``engine.scale``. Before (to 0.18.2), only what goes through ``engine.backward`` is a backward pass.
TENSOR_BACKWARD_METHODS: Final = ("_backward_prologue", "_backward_epilogue")
OPTIMIZER_METHODS: Final = ("step",)
# Engines of DeepSpeed's own that train, and what hides their gradients from the step clock.
OTHER_ENGINES: Final[Mapping[str, str]] = {
    "PipelineEngine": "pipeline parallelism runs its micro-batches inside train_batch, each stage by a "
    "schedule of its own, and only the last one has a loss",
    "DeepSpeedHybridEngine": "the hybrid engine gathers and swaps weights for generation between steps",
}


def deepspeed_version() -> str:
    """Return the installed version, or ``none``."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def packages() -> dict[str, str]:
    """Return the versions that a verdict may depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in (
        "deepspeed",
        "numpy",
        "gradtrace",
        "transformers",
        "accelerate",
        "trl",
        "lightning",
        "pytorch-lightning",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_engine(engine: Any) -> None:
    """Refuse anything but a plain DeepSpeed training engine.

    Raises:
        NotAnEngineError: it is no DeepSpeed engine.
        UnsupportedEngineError: it is one without an optimizer, or a pipeline or hybrid engine.
    """
    try:
        from deepspeed.runtime.engine import DeepSpeedEngine
    except ImportError:
        raise NotAnEngineError(
            f"a {type(engine).__name__}, and no deepspeed installed",
            where="wrap(engine, ...)",
            expected="the engine that deepspeed.initialize returned",
            remedy="Install deepspeed, and pass its first return value.",
        ) from None
    if not isinstance(engine, DeepSpeedEngine):
        raise NotAnEngineError(
            f"a {type(engine).__module__}.{type(engine).__name__}",
            where="wrap(engine, ...)",
            expected="the engine that deepspeed.initialize returned",
            remedy="Pass the first of deepspeed.initialize's return values.",
        )
    if type(engine) is not DeepSpeedEngine:
        known = (why for c in type(engine).__mro__ if (why := OTHER_ENGINES.get(c.__name__)))
        other = "it overrides what the plain DeepSpeedEngine does, and only that is traced"
        refuse(f"a {type(engine).__name__}", next(known, other))
    if engine.optimizer is None:
        refuse("an engine without an optimizer", "there is no gradient path to trace")


def refuse(found: str, reason: str) -> NoReturn:
    """Raise `UnsupportedEngineError` for a configuration this release does not trace."""
    raise UnsupportedEngineError(
        found,
        where=f"deepspeed {deepspeed_version()}",
        expected=f"a configuration that can be traced whole; {reason}",
        remedy="Trace a run without it; docs/coverage.md lists what is traced.",
    )


COMMON_REFUSALS: Final = (
    Refusal(
        "fp16_master_weights_and_grads",
        lambda m: bool(getattr(m.optimizer, "fp16_master_weights_and_gradients", False)),
        "it needs the optimizer on the CPU and keeps scaled fp16 gradients there",
    ),
    Refusal(
        "sequence parallelism",
        lambda m: int(getattr(m.optimizer, "sequence_parallel_size", 1) or 1) > 1,
        "its reductions go over other groups",
    ),
    Refusal(
        "model parallelism (mpu)",
        lambda m: getattr(m.engine, "mpu", None) is not None,
        "its gradients are split over another dimension",
    ),
    Refusal(
        "ZenFlow",
        lambda m: bool(getattr(m.optimizer, "zenflow", False)),
        "it overrides the reduction",
    ),
    Refusal(
        "DeepCompile",
        lambda m: bool(_called(m.engine, "is_deepcompile_enabled")),
        "it removes the hooks that gradients pass through",
    ),
)


def _called(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    return method() if callable(method) else None


def build_model(engine: Any) -> Model:
    """Return the engine's parameter table, by identity.

    Tied weights are one parameter; their further names are aliases.
    """
    names: list[str] = []
    aliases: list[list[str]] = []
    index: dict[int, int] = {}
    parameters: list[torch.nn.Parameter] = []
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        known = index.get(id(parameter))
        if known is not None:
            aliases[known].append(name)
            continue
        index[id(parameter)] = len(names)
        names.append(name)
        aliases.append([])
        parameters.append(parameter)
    return Model(
        engine=engine,
        optimizer=engine.optimizer,
        names=tuple(names),
        index=index,
        parameters=tuple(parameters),
        shapes=tuple(tuple(getattr(p, "ds_shape", p.shape)) for p in parameters),
        aliases=tuple(tuple(entry) for entry in aliases),
    )


@dataclass(frozen=True, slots=True)
class Resolved:
    """Hold a probe that was found, with the signature its calls are bound by."""

    probe: Probe
    owner: Any
    signature: inspect.Signature


def select(model: Model) -> Adapter:
    """Choose the adapter by the optimizer's class, refusing subclasses and configurations by name.

    Raises:
        UnsupportedEngineError: no adapter traces this optimizer or configuration.
    """
    kind = type(model.optimizer)
    for adapter in ADAPTERS:
        family = next((c for c in kind.__mro__ if c.__name__ == adapter.optimizer_class), None)
        if family is None:
            continue
        if adapter.any_subclass and model.optimizer is not model.engine.basic_optimizer:
            continue  # any torch optimizer will do, but only the one that DeepSpeed itself steps
        changed = sorted({p.method for p in adapter.probes if p.owner == "optimizer"} | {"step"})
        overridden = [
            name for name in changed if getattr(kind, name, None) is not getattr(family, name, None)
        ]
        for refusal in (*COMMON_REFUSALS, *adapter.refusals):
            if refusal.applies(model):
                refuse(refusal.found, refusal.reason)
        if overridden and not adapter.any_subclass:
            refuse(f"{kind.__name__}", f"it overrides {', '.join(overridden)}")
        return adapter
    refuse(
        f"optimizer {kind.__name__}", f"known are {', '.join(a.optimizer_class for a in ADAPTERS)}"
    )


def resolve(model: Model, adapter: Adapter) -> tuple[Resolved, ...]:
    """Find every method and attribute that tracing needs, before anything is replaced.

    Raises:
        ProbeError: a required one is missing or has another signature.
    """
    tensor_backward = TENSOR_BACKWARD_METHODS if begins_at_tensors(model.engine) else ()
    for name in (*ENGINE_METHODS, *tensor_backward):
        if not callable(getattr(model.engine, name, None)):
            missing(f"engine.{name}", "the step clock")
    for name in OPTIMIZER_METHODS:
        if not callable(getattr(model.optimizer, name, None)):
            missing(f"optimizer.{name}", "the step clock")
    for name in adapter.attributes:
        if not hasattr(model.optimizer, name):
            missing(f"{adapter.optimizer_class}.{name}", "finding spans")
    return resolve_probes(model, adapter.probes)


def resolve_probes(model: Model, probes: tuple[Probe, ...]) -> tuple[Resolved, ...]:
    """Bind probes: all that must, of each choice the first that does.

    Raises:
        ProbeError: a required one is missing, or any has another signature.
    """
    found: list[Resolved] = []
    made: set[str] = set()
    lacking: dict[str, list[str]] = {}
    for probe in probes:
        if probe.one_of in made:
            continue
        resolved = _resolve_probe(model, probe)
        if isinstance(resolved, Resolved):
            found.append(resolved)
            if probe.one_of is not None:
                made.add(probe.one_of)
        elif probe.one_of is not None:
            lacking.setdefault(probe.one_of, []).append(resolved)
        elif probe.required or hasattr(model.owner(probe.owner), probe.method):
            missing(resolved, f"point {probe.point}")
    for choice in sorted(lacking.keys() - made):
        missing(", nor ".join(lacking[choice]), f"{choice}, which is seen at one of them")
    return tuple(found)


def _resolve_probe(model: Model, probe: Probe) -> Resolved | str:
    """Return the bound probe, or what of it is missing."""
    owner = model.owner(probe.owner)
    method: Callable[..., Any] | None = getattr(owner, probe.method, None)
    if method is None:
        return f"{type(owner).__name__}.{probe.method}"
    signature = signature_of(method)
    for name in probe.arguments:
        if name not in signature.parameters:
            return f"argument {name} of {type(owner).__name__}.{probe.method}{signature}"
    for name in probe.attributes:
        if not hasattr(model.optimizer, name):
            return f"{type(model.optimizer).__name__}.{name}"
    return Resolved(probe, owner, signature)


def begins_at_tensors(engine: Any) -> bool:
    """Say whether this release drives a backward pass that the caller starts at a tensor."""
    return hasattr(type(engine), "scale")  # the engine itself passes on what its module has


def divides_by_steps(engine: Any, asked: bool | None) -> bool | None:
    """Return whether ``engine.backward`` is to divide by the accumulation steps.

    Up to 0.18.2 the engine's attribute ``scale_wrt_gas`` outweighs the argument; later it is unread.
    """
    held = None if begins_at_tensors(engine) else getattr(engine, "scale_wrt_gas", None)
    return asked if held is None else bool(held)


def signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that calls of an object's method follow, looking through decorators.

    ``instrument_w_nvtx`` (deepspeed/utils/nvtx.py, 0.12 to 0.19) replaces a method by
    ``wrapped_fn(*args, **kwargs)`` without ``functools.wraps``; the method is in its closure.
    A scheduler of torch's (2.13, optim/lr_scheduler.py:162) puts a function of its own into the optimizer
    that calls itself after the unbound ``step``: nobody gives it that one's ``self``.
    """
    function = getattr(method, "__func__", method)
    cells = getattr(function, "__closure__", None) or ()
    if function.__name__ == "wrapped_fn":
        inner = [c.cell_contents for c in cells if inspect.isfunction(c.cell_contents)]
        if len(inner) == 1:
            return inspect.signature(inner[0].__get__(object()))
    signature = inspect.signature(method)
    names = list(signature.parameters)
    if inspect.isfunction(method) and names[:1] == ["self"]:
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature


def missing(what: str, purpose: str) -> NoReturn:
    """Raise `ProbeError` for something that the installed DeepSpeed does not have."""
    raise ProbeError(
        f"no {what} in deepspeed {deepspeed_version()}",
        where="wrap(engine, ...), before anything was changed",
        expected=f"it, for {purpose}",
        remedy="Use a DeepSpeed release that docs/deepspeed-compat.md lists, or report this one.",
    )


def engine_settings(model: Model) -> Mapping[str, Any]:
    """Return what the engine holds, beside what its optimizer does."""
    engine = model.engine
    managed = _called(engine, "managed_gradient_accumulation")
    return {
        "optimizer": type(model.optimizer).__name__,
        "base_optimizer": type(model.base_optimizer).__name__,
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "managed_gradient_accumulation": True if managed is None else bool(managed),
        "sequence_parallel_size": 1,
        **settings(model),
    }


def ds_config(engine: Any) -> dict[str, Any]:
    """Return the configuration as DeepSpeed was given it."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return dict(config) if isinstance(config, Mapping) else {}


def loss_scale(model: Model) -> float:
    """Return the loss scale that the optimizer holds; 1 where it has none.

    ``FP16_Optimizer`` answers None under bf16, and divides by ``cur_scale`` all the same; since 0.18.6
    that stands in its ``loss_scale_config``.
    """
    holder = model.optimizer
    value = getattr(holder, "loss_scale", None)
    if value is None:
        value = getattr(getattr(holder, "loss_scale_config", holder), "cur_scale", None)
    return 1.0 if value is None else float(value)


def step_facts(model: Model, scale: float) -> dict[str, Any]:
    """Return the step's scalars; ``scale`` is the loss scale before the optimizer changed it.

    They are read as the optimizer's step returns: the engine's counters do not count this step yet.
    """
    optimizer, engine = model.optimizer, model.engine
    clip = getattr(optimizer, "clip_grad", None)
    return {
        "loss_scale": scale,
        "loss_scale_after": loss_scale(model),
        "overflow": bool(getattr(optimizer, "overflow", False)),
        "grad_norm": getattr(optimizer, "_global_grad_norm", None),
        "clip": float(engine.gradient_clipping() if clip is None else clip),
        "lr": [group.get("lr") for group in optimizer.param_groups],
        "engine_micro_steps": int(engine.micro_steps),
        "engine_global_steps": int(engine.global_steps),
        "engine_skipped_steps": int(engine.skipped_steps),
        "engine_global_samples": int(engine.global_samples),
        "boundary": bool(engine.is_gradient_accumulation_boundary()),
    }


def trains(engine: Any) -> bool:
    """Say whether an engine has an optimizer: one that only holds a model has no gradient path.

    ZeRO-3 gives an engine without one a ``DeepSpeedZeRoOffload`` in its place, bf16 a BF16_Optimizer.
    Source: DeepSpeed 0.19.8, runtime/engine.py:687.
    """
    return getattr(engine, "basic_optimizer", engine.optimizer) is not None


def engine_of(module: torch.nn.Module | None) -> Any | None:
    """Return the training engine of DeepSpeed's that holds a module, or ``None``.

    For frameworks that make the engine out of sight: it is looked for among all living objects.
    """
    if module is None or "deepspeed" not in sys.modules:
        return None
    from deepspeed.runtime.engine import DeepSpeedEngine

    # No event of Trainer's hands the engine, or the Trainer, to a callback: only the model inside it.
    for held in gc.get_objects():
        # type(), not isinstance(): that asks the object, and proxies answer with work of their own.
        if issubclass(type(held), DeepSpeedEngine) and held.module is module and trains(held):
            return held
    return None


def patch_initialize(
    on_engine: Callable[[Any], None], on_model: Callable[[Any], None] | None = None
) -> Callable[[], None]:
    """Call ``on_engine`` with every engine that ``deepspeed.initialize`` makes from now on.

    Args:
        on_engine: takes the engine.
        on_model: takes each engine's model once its weights are cast, on the device and the same on all
            ranks, and before an optimizer is made of them.

    Returns:
        A function that puts everything back.

    Raises:
        ProbeError: the engine of this release prepares its model elsewhere.

    Source: 0.14.4 to 0.19.8, engine.py ``DeepSpeedEngine.__init__``: ``_configure_distributed_model``
    casts, moves and broadcasts the weights; ``_configure_optimizer`` comes after it.
    """
    import deepspeed

    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        on_engine(made[0])
        return made

    put_back = [] if on_model is None else [_patch_model(on_model)]
    deepspeed.initialize = initialize

    def restore() -> None:
        if deepspeed.initialize is initialize:
            deepspeed.initialize = original
        for undo in put_back:
            undo()

    return restore


def _patch_model(on_model: Callable[[Any], None]) -> Callable[[], None]:
    from deepspeed.runtime.engine import DeepSpeedEngine

    name = "_configure_distributed_model"
    original = vars(DeepSpeedEngine).get(name)
    if original is None:
        missing(f"DeepSpeedEngine.{name}", "moving weights before an optimizer is made of them")

    def configure(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        on_model(engine.module)
        return result

    setattr(DeepSpeedEngine, name, configure)

    def restore() -> None:
        if vars(DeepSpeedEngine).get(name) is configure:
            setattr(DeepSpeedEngine, name, original)

    return restore
