"""Train small models on real DeepSpeed, 2 CPU ranks, traced or not: the harness of tests/real."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.utils.checkpoint

from gradtrace.testing.ranks import run_ranks
from tests.real.models import MODELS

Mode = Literal[
    "managed",
    "by_hand",
    "set_boundary",
    "unmanaged",
    "tensor_backward",
    "mixed",  # all but the last backward pass of a step by loss.backward()
    "scale",
    "no_sync",
    "coalesce",
]
# How the optimizer is made: by DeepSpeed from the configuration, or handed in.
Client = Literal["config", "adamw", "sgd", "fused", "fused_sgd"]


@dataclass(frozen=True)
class Setup:
    """Describe one training; the same for every rank."""

    stage: int
    bf16: bool = False
    fp16: bool = False
    micro_steps: int = 4
    ranks: int = 2
    mode: Mode = "managed"
    steps: int = 3
    model: str = "mlp"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    groups: bool = False
    batch: int = 2
    client: Client = "config"
    zero_init: bool = False  # the model is built under deepspeed.zero.Init
    overflow_in: tuple[
        int, ...
    ] = ()  # steps whose last micro-step meets an infinite input on rank 0

    @property
    def dtype(self) -> torch.dtype:
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def name(self) -> str:
        dtype = "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"
        changed = {**self.zero, **self.config}
        if self.client != "config":
            changed["client"] = self.client
        if self.groups:
            changed["groups"] = True
        if self.zero_init:
            changed["zero_init"] = True
        if self.overflow_in:
            changed["overflow_in"] = self.overflow_in
        extra = "".join(f"-{k}={v}" for k, v in changed.items())
        return f"z{self.stage}-{dtype}-n{self.micro_steps}-r{self.ranks}-{self.mode}-{self.model}{extra}"

    def at(self, **changes: Any) -> Setup:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Outcome:
    """Hold what one rank saw: everything that tracing must leave bitwise unchanged.

    Losses and norms are written out in full: the NaN of a step that overflows equals nothing.
    """

    losses: list[str]
    norms: list[str]
    weights: list[bytes]


class Tied(torch.nn.Module):
    """Use one weight twice, leave one frozen, one unused, and one used every other micro-step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(7, 7)
        self.again = torch.nn.Linear(7, 7)
        self.again.weight = self.inner.weight
        self.frozen = torch.nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.sometimes = torch.nn.Linear(7, 5)
        self.head = torch.nn.Linear(7, 5)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.inner(x)))) + self.frozen(x)
        self.calls += 1
        out = self.head(hidden) * self.scale
        return out + self.sometimes(hidden) if self.calls % 2 == 0 else out


class Checkpointed(torch.nn.Module):
    """Recompute the middle in backward; reentrant checkpointing runs autograd inside autograd."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 7)
        self.middle = torch.nn.Linear(7, 33)
        self.back = torch.nn.Linear(33, 7)
        self.last = torch.nn.Linear(7, 5)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for part in (self.middle, self.back):
            hidden = torch.utils.checkpoint.checkpoint(part, hidden, use_reentrant=self.reentrant)
        out: torch.Tensor = self.last(hidden)
        return out


class Sparse(torch.nn.Module):
    """Ask torch for sparse gradients of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 5, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(x.argmax(dim=1))
        return out


class Routed(torch.nn.Module):
    """Route rows to two experts, which DeepSpeed reduces over a group of their own."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = torch.nn.Linear(7, 7)
        self.experts = MoE(7, torch.nn.Linear(7, 7), num_experts=2, use_rts=False)
        self.last = torch.nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed, _, _ = self.experts(torch.tanh(self.first(x)))
        out: torch.Tensor = self.last(routed)
        return out


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in MODELS:
        return MODELS[name]()
    if name == "mlp":  # sizes that 2 does not divide: padding, and a parameter cut in two
        return torch.nn.Sequential(
            torch.nn.Linear(7, 33),
            torch.nn.Tanh(),
            torch.nn.Linear(33, 5),
            torch.nn.Tanh(),
            torch.nn.Linear(5, 5, bias=False),
        )
    if name == "wide":  # 5 to 1089 elements; each size at least twice
        sizes = ((7, 33), (33, 33), (33, 33), (33, 5), (5, 5), (5, 5))
        return torch.nn.Sequential(
            *(part for size in sizes for part in (torch.nn.Linear(*size), torch.nn.Tanh()))
        )
    if name == "tied":
        return Tied()
    if name == "one":  # one element: the last rank's shard is empty
        return torch.nn.Linear(1, 1, bias=False)
    if name in {"reentrant", "checkpointed"}:
        return Checkpointed(name == "reentrant")
    if name == "sparse":
        return Sparse()
    if name == "moe":
        return Routed()
    raise AssertionError(name)


def initialize(setup: Setup) -> Any:
    import deepspeed

    if setup.fp16:
        allow_fp16()
    managed = setup.mode == "managed"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": setup.micro_steps if managed else 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": setup.stage, **setup.zero},
        "steps_per_print": 10**9,
        **setup.config,
    }
    if setup.bf16 and "bf16" not in config:
        config["bf16"] = {"enabled": True}
    if setup.fp16 and "fp16" not in config:
        config["fp16"] = {"enabled": True, "loss_scale": 128.0}
    if setup.mode == "unmanaged":
        config["managed_gradient_accumulation"] = False
    sharded = deepspeed.zero.Init(config_dict_or_path=config) if setup.zero_init else nullcontext()
    with sharded:
        model = build(setup.model)
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if setup.groups:
        parameters = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
    client: Any = None
    if setup.client != "config":
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
        client = make_optimizer(setup.client, parameters)
        parameters = None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=client, model_parameters=parameters, config=config
    )
    return engine


def make_optimizer(client: Client, parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer that a caller hands in."""
    if client == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2)
    if client == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    from deepspeed.ops.adam import FusedAdam

    class BuildsNothing(FusedAdam):  # type: ignore[misc]
        """Be a FusedAdam to DeepSpeed's eyes, and step by torch: the kernel takes 70 s to compile."""

        inner: torch.optim.Optimizer | None = None

        def __init__(self, parameters: Any, lr: float) -> None:
            torch.optim.Optimizer.__init__(self, parameters, {"lr": lr})

        def step(self, closure: Any = None) -> None:
            if self.inner is None:  # DeepSpeed puts its own tensors into the groups first
                if client == "fused":
                    self.inner = torch.optim.AdamW(self.param_groups)
                else:
                    self.inner = torch.optim.SGD(self.param_groups, momentum=0.9)
            self.inner.step()

    optimizer: torch.optim.Optimizer = BuildsNothing(parameters, 1e-2 if client == "fused" else 0.1)
    return optimizer


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on a CPU whose instructions do it in software (torch can)."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True


def one_step(engine: Any, setup: Setup, data: torch.Generator) -> list[float]:
    """Train one step; the global batch is the same rows however ranks and micro-steps cut it."""
    width = 1 if setup.model == "one" else 7
    out = 1 if setup.model == "one" else 5
    dtype = setup.dtype
    rows = setup.ranks * setup.micro_steps * setup.batch
    rank = torch.distributed.get_rank()
    all_inputs = torch.randn(rows, width, generator=data).to(dtype)[rank :: setup.ranks]
    all_targets = torch.randn(rows, out, generator=data).to(dtype)[rank :: setup.ranks]
    if engine.global_steps in setup.overflow_in and rank == 0:
        all_inputs[-1] = torch.inf
    coalesced = engine.coalesce_grad_reduction() if setup.mode == "coalesce" else nullcontext()
    with coalesced:
        losses = _backwards(engine, setup, all_inputs, all_targets)
    if setup.mode != "managed":
        engine.step()
    return losses


def _backwards(
    engine: Any, setup: Setup, all_inputs: torch.Tensor, all_targets: torch.Tensor
) -> list[float]:
    losses = []
    for micro_step in range(setup.micro_steps):
        last = micro_step == setup.micro_steps - 1
        mine = slice(micro_step * setup.batch, (micro_step + 1) * setup.batch)
        if setup.mode == "set_boundary":
            engine.set_gradient_accumulation_boundary(last)
        loss = torch.nn.functional.mse_loss(engine(all_inputs[mine]), all_targets[mine])
        if setup.mode != "managed":
            loss = loss / setup.micro_steps
        losses.append(float(loss.detach()))
        if setup.mode == "tensor_backward" or (setup.mode == "mixed" and not last):
            loss.backward()
        elif setup.mode == "scale":
            engine.scale(loss).backward()
        elif setup.mode == "no_sync" and not last:
            with engine.no_sync():
                engine.backward(loss)
        else:
            engine.backward(loss)
        if setup.mode == "managed":
            engine.step()
    return losses


def weights(engine: Any, setup: Setup) -> list[bytes]:
    import deepspeed

    found = []
    for parameter in engine.module.parameters():
        if setup.stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                found.append(parameter.detach().float().numpy().tobytes())
        else:
            found.append(parameter.detach().float().numpy().tobytes())
    return found


def surface(engine: Any) -> dict[str, Any]:
    """Return everything about an engine that wrapping may have touched."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    parameters = list(engine.module.parameters())
    return {
        "engine": {k: v for k, v in vars(engine).items() if callable(v)},
        "engine_names": sorted(vars(engine)),
        "optimizer": {k: v for k, v in vars(optimizer).items() if callable(v)},
        "optimizer_names": sorted(vars(optimizer)),
        "base_names": sorted(vars(base)),
        "module_hooks": len(engine.module._forward_hooks),
        "hooks": [len(p._backward_hooks or {}) for p in parameters],
        "accumulated_hooks": [len(p._post_accumulate_grad_hooks or {}) for p in parameters],
    }


def train_rank(
    rank: int,
    setup: Setup,
    out_dir: Path | None,
    options: dict[str, Any],
    before: Callable[[Any], None] | None,
) -> Outcome:
    import gradtrace

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    engine = initialize(setup)
    if before is not None:
        before(engine)
    tracer = None if out_dir is None else gradtrace.wrap(engine, out_dir, **options)
    data = torch.Generator().manual_seed(100)
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(setup.steps):
        losses += one_step(engine, setup, data)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    if tracer is not None:
        tracer.close()
    return Outcome([*map(repr, losses)], [*map(repr, norms)], weights(engine, setup))


def train(
    setup: Setup,
    out_dir: Path | None,
    *,
    before: Callable[[Any], None] | None = None,
    **options: Any,
) -> list[Outcome]:
    """Train on all ranks; traced into ``out_dir`` unless it is None."""
    options.setdefault("on_error", "raise")
    return run_ranks(setup.ranks, train_rank, setup, out_dir, options, before)
