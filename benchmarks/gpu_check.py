"""Check on one GPU that tracing changes nothing: two ranks share it through gloo.

    torchrun --nproc-per-node 2 benchmarks/gpu_check.py OUT_DIR [--every-point] [NAME ...]

For each of `runs` (or those whose names contain one of the given words): trains untraced twice (the
control: a GPU need not repeat itself) and traced once, compares losses, norms and weights bitwise,
audits the trace, and prints one line of JSON. With ``--every-point`` weights and the optimizer's state
are recorded whole, so that the laws `update` and `publish` are checked too.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch

import gradtrace
from gradtrace.trace.points import POINT_NAMES

STEPS, MICRO_STEPS, WIDTH, LAYERS = 4, 4, 512, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
DYNAMIC = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 1}}


@dataclass(frozen=True)
class Run:
    """Describe one configuration."""

    name: str
    stage: int
    dtype: str
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def runs() -> Iterator[Run]:
    """Yield every configuration."""
    for dtype in DTYPES:
        yield Run(f"z0-{dtype}", 0, dtype)
    for stage in (1, 2, 3):
        for dtype in DTYPES:
            for overlap in (False, True):
                name = f"z{stage}-{dtype}-{'overlap' if overlap else 'plain'}"
                yield Run(name, stage, dtype, {"overlap_comm": overlap})
        yield Run(f"z{stage}-bf16-accum32", stage, "bf16", {"overlap_comm": True}, ACCUM32)
        yield Run(f"z{stage}-fp16-dynamic", stage, "fp16", {"overlap_comm": True}, DYNAMIC)
        yield Run(f"z{stage}-bf16-offload", stage, "bf16", {"overlap_comm": True, **OFFLOAD})
        yield Run(f"z{stage}-fp32-offload", stage, "fp32", {"overlap_comm": False, **OFFLOAD})
        yield Run(f"z{stage}-fp32-autocast", stage, "fp32", {"overlap_comm": True}, AUTOCAST)
        apart = {"contiguous_gradients": False, "overlap_comm": False}
        yield Run(f"z{stage}-bf16-noncontiguous", stage, "bf16", apart)
    yield Run("z2-bf16-offload-accum32", 2, "bf16", {"overlap_comm": True, **OFFLOAD}, ACCUM32)
    parameters = {"offload_param": {"device": "cpu", "pin_memory": True}, **OFFLOAD}
    yield Run("z3-bf16-offload-param", 3, "bf16", {"overlap_comm": True, **parameters})


def train(
    run: Run, out_dir: Path | None, points: Sequence[str] | None = None
) -> tuple[Any, list[float]]:
    """Train once; return what must be bitwise equal, and the seconds of each step."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 7)).to(device)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO_STEPS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": run.stage, "reduce_bucket_size": 300_000, **run.zero},
        "steps_per_print": 10**9,
        "bf16": {"enabled": run.dtype == "bf16"},
        "fp16": {"enabled": run.dtype == "fp16", "loss_scale": 1024.0},
        **run.config,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    tracer = None
    if out_dir is not None:
        tracer = gradtrace.wrap(engine, out_dir, points=points, on_error="raise")
    data = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    dtype = DTYPES[run.dtype]
    seen: list[Any] = []
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(MICRO_STEPS):
            inputs = torch.randn(8, WIDTH, generator=data).to(device, dtype)
            targets = torch.randn(8, 7, generator=data).to(device, dtype)
            loss = torch.nn.functional.mse_loss(engine(inputs).float(), targets.float())
            engine.backward(loss)
            engine.step()
            seen.append(float(loss.detach()))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        seen.append(float(engine.get_global_grad_norm() or 0.0))
    if tracer is not None:
        tracer.close()
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=run.stage == 3):
            seen.append(parameter.detach().float().cpu().numpy().tobytes())
    engine.destroy()
    return seen, seconds


def main() -> None:
    """Run every combination and print a line of JSON for each, on rank 0."""
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = "0"  # both ranks share the one GPU
    out_dir, words = Path(sys.argv[1]), sys.argv[2:]
    points = None
    if "--every-point" in words:
        words.remove("--every-point")
        points = POINT_NAMES
    deepspeed.init_distributed(dist_backend="gloo")
    for run in runs():
        if words and not any(word in run.name for word in words):
            continue
        first, _ = train(run, None)
        control, plain_s = train(run, None)
        traced, traced_s = train(run, out_dir / run.name, points)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            result = gradtrace.audit(out_dir / run.name)
            line = {
                "run": run.name,
                "control_repeats": _alike(first, control),
                "traced_is_bitwise_untraced": _alike(traced, control),
                "audit": result.verdict,
                "checked": {
                    law: count.checked for law, count in result.laws.items() if count.checked
                },
                "first": None if result.first is None else result.first.to_dict(),
                "notes": [] if result.verdict == "pass" else list(result.notes)[:5],
                "step_s": {
                    "untraced": round(statistics.median(plain_s), 4),
                    "traced": round(statistics.median(traced_s), 4),
                },
            }
            print(json.dumps(line), flush=True)
        torch.distributed.barrier()


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Compare bitwise; a skipped step's norm may be NaN on both sides."""
    return list(map(repr, one)) == list(map(repr, other))


if __name__ == "__main__":
    main()
