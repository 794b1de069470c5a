"""Weights that DeepSpeed really trains from, moved by one unit in the last place."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtrace
from gradtrace.analysis.align import Alignment
from gradtrace.analysis.origins import weight_hashes
from gradtrace.errors import PerturbationError
from gradtrace.testing.ranks import run_ranks
from gradtrace.trace.dtypes import DTYPES, Float64, from_float64, raw_bits
from gradtrace.trace.reader import open_trace
from tests.real.perturbing import train_perturbed
from tests.real.test_launch import SCRIPT, _torchrun
from tests.real.training import Setup, initialize, train

SETUPS = [
    Setup(stage, bf16=bf16, steps=2, micro_steps=2) for stage in range(4) for bf16 in (False, True)
]
SETUPS += [
    Setup(3, steps=2, micro_steps=2, zero_init=True),
    Setup(3, bf16=True, steps=2, micro_steps=2, zero_init=True),
    Setup(
        1, bf16=True, steps=2, micro_steps=2, config={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    Setup(2, fp16=True, steps=2, micro_steps=2),
    Setup(2, steps=2, micro_steps=2, ranks=1, batch=4),
]


def whole_weights(path: Path) -> dict[str, tuple[str, Float64]]:
    """Return the weights at the start of step 0, put together from all ranks."""
    align = Alignment(open_trace(path))
    found = {}
    for parameter in align.parameters:
        part = align.gather(0, None, "weight", parameter.index)
        assert part.complete
        found[parameter.name] = (parameter.dtype, part.values)
    return found


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_training_begins_one_unit_away(setup: Setup, tmp_path: Path) -> None:
    points = "weight,local_grad,master_grad,loss"
    train(setup, tmp_path / "plain", points=points)
    traced = train_perturbed(setup, tmp_path / "moved", 1, points=points)
    assert traced == train_perturbed(setup, None, 1), "tracing changed a perturbed run"
    plain, moved = whole_weights(tmp_path / "plain"), whole_weights(tmp_path / "moved")
    steps = []
    for name, (dtype, values) in plain.items():
        kind = DTYPES[dtype]
        ulps = [
            raw_bits(from_float64(held, kind), kind).astype(np.int64)
            for held in (values, moved[name][1])
        ]
        steps.append((ulps[1] - ulps[0])[values != 0])
    together = np.concatenate(steps)
    assert set(np.unique(together)) == {-1, 1}
    assert 0.4 < (together > 0).mean() < 0.6
    for name, perturbation in (
        ("plain", None),
        ("moved", {"sample": 1, "ulp": 1, "hash": "splitmix64/xxh3-64"}),
    ):
        assert open_trace(tmp_path / name).manifest.perturbation == perturbation
        assert gradtrace.audit(tmp_path / name).verdict == "pass"


@pytest.mark.parametrize("bf16", (False, True))
def test_every_stage_and_world_size_begins_with_the_same_bits(bf16: bool, tmp_path: Path) -> None:
    # Under zero.Init in bf16 torch draws other weights: that run begins elsewhere by itself.
    setups = [s for s in SETUPS if s.bf16 == bf16 and not s.fp16 and not (s.zero_init and bf16)]
    found = []
    for number, setup in enumerate(setups):
        train_perturbed(setup.at(steps=1), tmp_path / str(number), 5)
        align = Alignment(open_trace(tmp_path / str(number)))
        names = {parameter.index: parameter.name for parameter in align.parameters}
        found.append({names[i]: hashed for i, hashed in weight_hashes(align, 0).items()})
    assert len(found[0]) == 5
    assert all(weights == found[0] for weights in found)


def test_tied_and_frozen_weights(tmp_path: Path) -> None:
    setup = Setup(2, model="tied", steps=1)
    train(setup, tmp_path / "plain", points="weight,local_grad,master_grad,loss")
    train_perturbed(setup, tmp_path / "moved", 0, points="weight,local_grad,master_grad,loss")
    plain, moved = whole_weights(tmp_path / "plain"), whole_weights(tmp_path / "moved")
    assert "frozen.weight" in plain and "again.weight" not in plain
    for name, (_, values) in plain.items():
        assert np.all(values != moved[name][1]), name
        assert np.allclose(values, moved[name][1], rtol=2.0**-22), name


def _edited_script(rank: int, dtype: torch.dtype | None, out_dir: Path) -> int:
    from unittest import mock

    import deepspeed

    setup = Setup(2, bf16=True)
    original = deepspeed.initialize

    def perturbed_first(*args: Any, model: Any, **kwargs: Any) -> Any:
        gradtrace.perturb_ulp(model, 1, dtype=dtype)
        return original(*args, model=model, **kwargs)

    with mock.patch.object(deepspeed, "initialize", perturbed_first):
        engine = initialize(setup)
    with gradtrace.wrap(engine, out_dir):
        pass
    return rank


def test_an_edited_script_must_name_the_dtype_that_deepspeed_casts_to(tmp_path: Path) -> None:
    run_ranks(2, _edited_script, torch.bfloat16, tmp_path / "named")
    assert open_trace(tmp_path / "named").manifest.perturbation is not None
    with pytest.raises(PerturbationError, match=r"dtype=torch\.bfloat16"):
        run_ranks(2, _edited_script, None, tmp_path / "not")
    assert not (tmp_path / "not" / "manifest.json").exists()


def test_under_torchrun_an_unedited_script_is_perturbed(tmp_path: Path) -> None:
    done = _torchrun(
        tmp_path,
        ["-m", "gradtrace", "run", "-o", str(tmp_path / "trace"), "--perturb-ulp", "3"],
        ["--steps", "1"],
    )
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "gradtrace", "info", str(tmp_path / "trace"), "--json"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(shown.stdout)["perturbation"]["sample"] == 3
    assert "perturb" not in textwrap.dedent(SCRIPT)
    text = subprocess.run(
        [sys.executable, "-m", "gradtrace", "info", str(tmp_path / "trace")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "one unit in the last place" in " ".join(text.stdout.split())
