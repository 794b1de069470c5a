"""Measure how far candidates lie from a baseline, in units of the baseline's own sensitivity.

Trains on two CPU ranks with the installed DeepSpeed: a baseline, the same from perturbed weights
(samples 0, 1, ...), and candidates that differ in stage or accumulation dtype. Prints a Markdown table
of the ratios of `gradtrace diff --envelope`. Each sample is held against the others, too.

    python -m benchmarks.noise_envelope [--steps 40] [--samples 5]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

import gradtrace
from tests.real.perturbing import train_perturbed
from tests.real.training import Setup, train

POINTS: Final = "loss,input,weight,local_grad,master_grad"
FP32_ACCUMULATION: Final = {"data_types": {"grad_accum_dtype": "fp32"}}


def problems(steps: int) -> list[tuple[str, Setup, dict[str, Setup]]]:
    """Return (name, baseline, candidates by name)."""
    found = []
    for bf16 in (False, True):
        base = Setup(2, bf16=bf16, micro_steps=4, steps=steps, model="wide")
        others = {f"ZeRO-{stage}": base.at(stage=stage) for stage in (0, 1, 3)}
        found.append((f"ZeRO-2, {'bf16' if bf16 else 'fp32'}", base, others))
    for micro_steps in (4, 32):
        base = Setup(
            2, bf16=True, micro_steps=micro_steps, steps=steps, model="wide",
            config=FP32_ACCUMULATION,
        )  # fmt: skip
        found.append(
            (
                f"ZeRO-2, bf16, {micro_steps} micro-steps, fp32 accumulation",
                base,
                {"bf16 accumulation": base.at(config={})},
            )
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=5)
    chosen = parser.parse_args()
    print(
        "| baseline | candidate | verdict | step 0 | worst ratio | at step | last step | p "
        "| first outside |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, base, candidates in problems(chosen.steps):
        with tempfile.TemporaryDirectory(prefix="gradtrace-envelope-") as directory:
            root = Path(directory)
            train(base, root / "baseline", points=POINTS)
            noise = []
            for sample in range(chosen.samples):
                noise.append(root / f"noise{sample}")
                train_perturbed(base, noise[-1], sample, points=POINTS)
            runs = {label: root / label for label in candidates}
            for label, setup in candidates.items():
                train(setup, runs[label], points=POINTS)
            runs |= {f"sample {number}": path for number, path in enumerate(noise)}
            for label, path in runs.items():
                rest = [other for other in noise if other != path]
                result = gradtrace.diff(root / "baseline", path, envelope=rest)
                found = result.envelope
                assert found is not None
                worst = max(found.steps, key=lambda entry: entry.ratio)
                print(
                    f"| {name} | {label} | {result.verdict} | {found.steps[0].ratio:.2g} "
                    f"| {worst.ratio:.2g} | {worst.step} | {found.steps[-1].ratio:.2g} "
                    f"| {found.p_value:.2g} | {found.first_outside} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
