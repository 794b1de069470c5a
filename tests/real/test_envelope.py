"""Real runs against their own sensitivity to rounding, and losses that the caller normalises."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch

import gradtrace
from gradtrace.analysis.results import DiffResult
from gradtrace.testing.live import keep_last_micro_step_only
from gradtrace.testing.ranks import run_ranks
from tests.real.perturbing import train_perturbed
from tests.real.training import Setup, initialize, train

SAMPLES = (0, 1)


def against_noise(tmp_path: Path, baseline: Setup, candidate: Path) -> DiffResult:
    train(baseline, tmp_path / "baseline")
    noise = [tmp_path / f"noise{sample}" for sample in SAMPLES]
    for sample, path in zip(SAMPLES, noise, strict=True):
        train_perturbed(baseline, path, sample)
    return gradtrace.diff(tmp_path / "baseline", candidate, envelope=noise)


@pytest.mark.parametrize("bf16", (False, True))
def test_stages_2_and_1_and_3_stay_inside(bf16: bool, tmp_path: Path) -> None:
    setup = Setup(2, bf16=bf16, model="wide", steps=6)
    for stage in (1, 3):
        train(setup.at(stage=stage), tmp_path / str(stage))
    inside = against_noise(tmp_path, setup, tmp_path / "1")
    assert inside.verdict == "rounding" and inside.envelope is not None
    assert len(inside.envelope.steps) == 6
    assert inside.envelope.first_outside is None, inside.envelope
    assert all(entry.ratio > 0 for entry in inside.envelope.steps)
    noise = [tmp_path / f"noise{sample}" for sample in SAMPLES]
    equal = gradtrace.diff(tmp_path / "baseline", tmp_path / "3", envelope=noise)
    assert equal.verdict == "agree" and equal.envelope is not None
    assert all(entry.ratio == 0 for entry in equal.envelope.steps)


@pytest.mark.parametrize("bf16", (False, True))
def test_a_lost_micro_step_is_far_outside(bf16: bool, tmp_path: Path) -> None:
    setup = Setup(3, bf16=bf16, model="wide", steps=4)
    train(
        setup.at(stage=2, mode="set_boundary"),
        tmp_path / "bad",
        before=keep_last_micro_step_only,
    )
    result = against_noise(tmp_path, setup, tmp_path / "bad")
    assert result.verdict == "diverged" and result.blame is not None
    assert (result.blame.side, result.blame.law) == ("candidate", "accumulate")
    assert result.envelope is not None
    assert result.envelope.first_outside == 0
    # In bf16, where noise is largest, a lost micro-step is still tens of times as far.
    assert min(entry.ratio for entry in result.envelope.steps) > (20 if bf16 else 1e5)
    assert [entry.judged for entry in result.growth] == [True, False, False, False]


def test_accumulation_in_bf16_is_noise_of_the_size_of_a_bf16_weight(tmp_path: Path) -> None:
    setup = Setup(
        2, bf16=True, model="wide", micro_steps=16, steps=4,
        config={"data_types": {"grad_accum_dtype": "fp32"}},
    )  # fmt: skip
    train(setup.at(config={}), tmp_path / "coarse")
    result = against_noise(tmp_path, setup, tmp_path / "coarse")
    assert result.verdict == "rounding" and result.envelope is not None
    assert result.envelope.first_outside is None
    assert any("grad_accum_dtype differs" in note for note in result.notes)


def test_losses_divided_by_hand_are_no_distance(tmp_path: Path) -> None:
    """The same cut, seeds of 1 against 1/4, and the same gradients."""
    setup = Setup(3, model="wide", steps=2)
    train(setup.at(mode="set_boundary"), tmp_path / "by_hand")
    result = against_noise(tmp_path, setup, tmp_path / "by_hand")
    assert result.envelope is not None and result.envelope.first_outside is None
    assert all((entry.gradient or 0) < 1e-6 for entry in result.growth)


def test_the_command_line(tmp_path: Path) -> None:
    setup = Setup(2, steps=2)
    train(setup.at(stage=1), tmp_path / "1")
    against_noise(tmp_path, setup, tmp_path / "1")
    command = [sys.executable, "-m", "gradtrace", "diff", tmp_path / "baseline", tmp_path / "1"]
    for sample in SAMPLES:
        command += ["--envelope", tmp_path / f"noise{sample}"]
    html = tmp_path / "page.html"
    done = subprocess.run(
        [*map(str, command), "--html", str(html)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "Noise envelope" in shown and "Inside: in none of 2 steps" in shown
    assert "Noise envelope" in html.read_text("utf-8")
    refused = subprocess.run(
        [*map(str, command), "--envelope", str(tmp_path / "1"), "--json"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["slug"] == "not_an_envelope"


# -- losses that the caller normalises -------------------------------------------------------------


@pytest.mark.parametrize("bf16", (False, True))
def test_accumulating_by_hand_with_divided_losses(bf16: bool, tmp_path: Path) -> None:
    """Each loss is divided by 4 before ``backward``; DeepSpeed divides by nothing. Legitimate."""
    train(Setup(3, bf16=bf16, micro_steps=1, batch=8, steps=2), tmp_path / "whole")
    train(Setup(3, bf16=bf16, mode="by_hand", micro_steps=4, steps=2), tmp_path / "by_hand")
    result = gradtrace.diff(tmp_path / "whole", tmp_path / "by_hand")
    assert result.blame is not None and result.first is not None
    assert result.first.point == "master_grad"
    assert (result.blame.side, result.blame.law, result.blame.cause) == ("neither", None, "scaled")
    assert "loss normalisation, not a fault of ZeRO" in result.blame.detail
    assert "The factor is the ratio of the runs' micro-steps, 1 against 4" in result.blame.detail


# Tokens that each of 8 rows of a rank is trained on; 0 is padding.
TOKENS = ((7, 1, 5, 5, 2, 2, 3, 7), (4, 4, 1, 1, 6, 7, 2, 2))


def _by_tokens(
    rank: int, setup: Setup, out_dir: Path, over: Literal["micro_batch", "rank"] = "micro_batch"
) -> None:
    """Train with losses that are averaged over each micro-batch's own tokens, or over the rank's."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    engine = initialize(setup)
    with gradtrace.wrap(engine, out_dir, on_error="raise"):
        for step in range(setup.steps):
            data = torch.Generator().manual_seed(step * 2 + rank)
            inputs = torch.randn(8, 7, 7, generator=data).to(setup.dtype)
            targets = torch.randn(8, 7, 5, generator=data).to(setup.dtype)
            mask = torch.arange(7)[None] < torch.tensor(TOKENS[rank])[:, None]
            for rows in torch.arange(8).chunk(setup.micro_steps):
                error = (engine(inputs[rows]) - targets[rows]).square().mean(dim=2)
                counted = (
                    mask[rows].sum() if over == "micro_batch" else mask.sum() / setup.micro_steps
                )
                loss = (error * mask[rows]).sum() / counted
                engine.backward(loss)
                engine.step()


@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_the_mean_of_means_is_loss_normalisation(stage: int, bf16: bool, tmp_path: Path) -> None:
    """Source: huggingface/transformers 34191; batch 8 x 1 against 2 x 4."""
    setup = Setup(stage, bf16=bf16, micro_steps=1, batch=8, steps=2)
    cut = setup.at(micro_steps=4, batch=2)
    run_ranks(2, _by_tokens, setup, tmp_path / "whole")
    run_ranks(2, _by_tokens, cut, tmp_path / "cut")
    for name in ("whole", "cut"):
        assert gradtrace.audit(tmp_path / name).verdict == "pass"
    result = gradtrace.diff(tmp_path / "whole", tmp_path / "cut")
    assert result.first is not None and result.blame is not None
    assert (result.first.step, result.first.point) == (0, "master_grad")
    assert (result.blame.side, result.blame.law, result.blame.cause) == ("neither", None, "scaled")
    assert "loss normalisation, not a fault of ZeRO" in result.blame.detail
    if bf16:
        return
    # In the whole batch's mean a micro-batch weighs as many tokens as it has of the rank's.
    told = []
    for rank, tokens in enumerate(TOKENS):
        shares = [sum(tokens[at : at + 2]) * 4 / sum(tokens) for at in range(0, 8, 2)]
        told.append(f"rank {rank}: " + ", ".join(f"{share:.4g}" for share in shares))
    assert "; ".join(told) in result.blame.detail, result.blame.detail


def test_the_mean_of_means_with_the_same_cut(tmp_path: Path) -> None:
    """One run weighs by tokens, the other not: one factor for each micro-step of each rank."""
    setup = Setup(2, micro_steps=4, batch=2, steps=1)
    run_ranks(2, _by_tokens, setup, tmp_path / "means")
    run_ranks(2, _by_tokens, setup, tmp_path / "sums", "rank")
    result = gradtrace.diff(tmp_path / "means", tmp_path / "sums")
    assert result.first is not None and result.blame is not None
    assert (result.first.micro_step, result.first.point) == (0, "local_grad")
    assert (result.blame.side, result.blame.cause) == ("neither", "scaled")
    assert "loss normalisation, not a fault of ZeRO" in result.blame.detail
    # Rank 0's first micro-batch has just its share of the tokens.
    shares = [sum(TOKENS[1][at : at + 2]) * 4 / sum(TOKENS[1]) for at in range(0, 8, 2)]
    told = ", ".join(f"{share:.6g} in micro-step {at}" for at, share in enumerate(shares))
    assert f"Candidate over baseline on rank 1: {told}." in result.blame.detail
