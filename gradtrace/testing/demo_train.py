"""Train the demo's model: gradient accumulation by hand, as many training loops do it.

The configuration says ``gradient_accumulation_steps: 1``; the loop calls ``backward`` four times
and then ``step`` once. Under ZeRO-2, DeepSpeed 0.17.6 to 0.19.8 then keep the last micro-batch only.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Final

import torch

import gradtrace
from gradtrace.testing.live import keep_last_micro_step_only
from gradtrace.testing.ranks import import_once, run_ranks

STEPS: Final = 3
MICRO_STEPS: Final = 4
WIDTH: Final = 48


def train(rank: int, stage: int, out_dir: str, plant: bool) -> list[float]:
    """Train on this rank and return the mean loss of each step."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 8)
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if plant:
        keep_last_micro_step_only(engine)
    data = torch.Generator().manual_seed(1 + rank)
    losses = []
    with gradtrace.wrap(engine, out_dir):
        for _ in range(STEPS):
            total = 0.0
            for _ in range(MICRO_STEPS):
                inputs = torch.randn(4, WIDTH, generator=data)
                targets = torch.randn(4, 8, generator=data)
                loss = torch.nn.functional.mse_loss(engine(inputs), targets) / MICRO_STEPS
                engine.backward(loss)
                total += float(loss.detach())
            engine.step()
            losses.append(total)
    return losses


def main() -> None:
    """Train under each stage that the command line names; print the losses as one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("stages", type=int, nargs="+")
    parser.add_argument("--plant", action="store_true")
    chosen = parser.parse_args()
    import_once()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    losses = {
        f"zero{stage}": run_ranks(
            2, train, stage, str(chosen.out_dir / f"zero{stage}"), chosen.plant and stage == 2
        )[0]
        for stage in chosen.stages
    }
    print(json.dumps({"losses": losses, "micro_steps": MICRO_STEPS}))


if __name__ == "__main__":
    main()
