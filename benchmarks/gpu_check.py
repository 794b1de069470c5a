"""Check on one GPU that tracing changes nothing: two ranks share it through gloo.

    torchrun --nproc-per-node 2 benchmarks/gpu_check.py OUT_DIR

For ZeRO-1, 2 and 3, fp32 and bf16, with and without overlapped communication: trains untraced twice (the
control: a GPU need not repeat itself) and traced once, compares losses, norms and weights bitwise, audits
the trace, and prints one line for each.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch

import gradtrace

STEPS, MICRO_STEPS, WIDTH, LAYERS = 4, 4, 512, 4


def train(stage: int, bf16: bool, overlap: bool, out_dir: Path | None) -> tuple[Any, list[float]]:
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
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlap,
            "reduce_bucket_size": 300_000,
        },
        "steps_per_print": 10**9,
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    tracer = None if out_dir is None else gradtrace.wrap(engine, out_dir, on_error="raise")
    data = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    dtype = torch.bfloat16 if bf16 else torch.float32
    seen: list[Any] = []
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(MICRO_STEPS):
            inputs = torch.randn(8, WIDTH, generator=data).to(device, dtype)
            targets = torch.randn(8, 7, generator=data).to(device, dtype)
            loss = torch.nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            seen.append(float(loss.detach()))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        seen.append(float(engine.get_global_grad_norm()))
    if tracer is not None:
        tracer.close()
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            seen.append(parameter.detach().float().cpu().numpy().tobytes())
    engine.destroy()
    return seen, seconds


def main() -> None:
    """Run every combination and print a line of JSON for each, on rank 0."""
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = "0"  # both ranks share the one GPU
    out_dir = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo")
    for stage, bf16, overlap in itertools.product((1, 2, 3), (False, True), (False, True)):
        name = f"z{stage}-{'bf16' if bf16 else 'fp32'}-{'overlap' if overlap else 'plain'}"
        first, _ = train(stage, bf16, overlap, None)
        control, plain_s = train(stage, bf16, overlap, None)
        traced, traced_s = train(stage, bf16, overlap, out_dir / name)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            result = gradtrace.audit(out_dir / name)
            line = {
                "run": name,
                "control_repeats": first == control,
                "traced_is_bitwise_untraced": traced == control,
                "audit": result.verdict,
                "first": None if result.first is None else result.first.to_dict(),
                "step_s": {
                    "untraced": round(statistics.median(plain_s), 4),
                    "traced": round(statistics.median(traced_s), 4),
                },
            }
            print(json.dumps(line), flush=True)
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
