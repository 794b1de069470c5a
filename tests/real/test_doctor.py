"""What `gradtrace doctor` says of real configurations, and that it never ends in a traceback."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradtrace
from gradtrace import errors
from gradtrace.capture.adapters import standin
from gradtrace.cli.main import run
from gradtrace.integrations.doctor import rank
from gradtrace.integrations.doctor.examine import examine
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import open_trace
from tests.real.training import Setup, train

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}


def write(path: Path, **config: Any) -> Path:
    path.write_text(json.dumps({**BASE, **config}), encoding="utf-8")
    return path


def doctor(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = run(["doctor", *argv, "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out)


def test_a_traced_configuration_is_told_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(
        tmp_path / "ds.json", zero_optimization={"stage": 2}, gradient_accumulation_steps=3
    )
    status, said = doctor("--config", str(config), "--parameters", "7e9", capsys=capsys)
    assert (status, said["verdict"], said["format"], said["version"]) == (
        0,
        "traced",
        "gradtrace.doctor",
        1,
    )
    (check,) = said["checks"]
    assert (check["optimizer"], check["adapter"]) == ("DeepSpeedZeroOptimizer", "zero12")
    assert [point["point"] for point in check["points"]] == list(POINT_NAMES)
    points = {point["point"]: point for point in check["points"]}
    assert points["local_accum"]["records"] == 0  # stage 2 reduces every micro-step
    assert points["local_grad"]["records"] == 3 * 9  # micro-steps x parameters of the stand-in
    assert points["bucket"]["bytes"] == 3 * 4 * check["cost"]["parameters"]
    assert points["master_grad"]["bytes"] == 4 * check["cost"]["parameters"] // 2
    cost = check["cost"]
    assert cost["tensor_bytes"] == sum(point["bytes"] for point in check["points"])
    assert cost["scaled_to"] == 7_000_000_000
    assert cost["scaled_tensor_bytes"] == pytest.approx(
        cost["tensor_bytes"] * 7e9 / cost["parameters"]
    )
    laws = {law["law"]: law for law in check["laws"]}
    assert laws["end_to_end"]["checked"] > 0
    assert laws["accumulate_local"]["checked"] == 0
    assert laws["accumulate_local"]["reason"]


def test_every_probe_is_named_with_its_place_in_the_installed_deepspeed(tmp_path: Path) -> None:
    import deepspeed

    root = Path(deepspeed.__file__).parents[1]
    for stage in (2, 3):
        (check,) = examine(write(tmp_path / "ds.json", zero_optimization={"stage": stage})).checks
        assert check.probes
        for probe in check.probes:
            assert probe.bound
            assert probe.place is not None
            file, _, line = probe.place.rpartition(":")
            source = (root / file).read_text(encoding="utf-8").splitlines()
            near = "\n".join(
                source[int(line) - 1 : int(line) + 4]
            )  # decorators stand before the name
            assert f"def {re.sub(r'^_[A-Za-z0-9_]+?(?=__)', '', probe.method)}(" in near


def test_a_refused_configuration_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(
        tmp_path / "ds.json",
        zero_optimization={"stage": 3, "zero_quantized_gradients": True},
        compile={"deepcompile": True},
    )
    status, said = doctor("--config", str(config), capsys=capsys)
    (check,) = said["checks"]
    assert (status, check["verdict"]) == (1, "refused")
    assert check["reason"]["slug"] == "unsupported_engine"
    assert check["reason"]["found"]
    assert check["cost"] is None
    assert check["probes"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 7}}, "stage"),
        ({"train_micro_batch_size_per_gpu": -3}, "batch"),
        ({"optimizer": {"type": "NoSuchOptimizer"}}, "nosuchoptimizer"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16"),
    ],
)
def test_what_deepspeed_itself_refuses_is_told_in_its_own_words(
    config: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "ds.json", **config)
    status, answer = doctor("--config", str(path), capsys=capsys)
    assert (status, answer["format"], answer["slug"]) == (2, "gradtrace.error", "engine_not_built")
    assert said in answer["found"].lower()


@pytest.mark.parametrize("text", ("", "{", "[1]", "[" * 100_000, "\xff"))
def test_a_file_that_is_no_ds_config_is_an_error_not_a_traceback(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="latin-1")
    status, said = doctor("--config", str(path), capsys=capsys)
    assert (status, said["slug"]) == (2, "bad_option")
    status, said = doctor("--config", str(tmp_path), capsys=capsys)
    assert (status, said["slug"]) == (2, "bad_option")


AUTO = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_auto_values_of_hugging_face_are_resolved_and_each_is_told(tmp_path: Path) -> None:
    (check,) = examine(write(tmp_path / "ds.json", **AUTO)).checks
    assert check.verdict == "traced"
    changed = {change.setting: change.used for change in check.changes}
    assert changed["zero_optimization.reduce_bucket_size"] == rank.HIDDEN**2
    assert changed["gradient_accumulation_steps"] == 1
    points = {point.point: point.status for point in check.points}
    assert points["reduced"].startswith("absent: ")
    assert changed["train_batch_size"] is None
    assert changed["gradient_clipping"] == 1.0 == check.effective["gradient_clipping"]
    told = sum(change.given == "auto" for change in check.changes)
    # The scheduler is left out as a whole.
    assert told == json.dumps(AUTO).count('"auto"') - 1


def _autos(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_autos, value.values()))
    return int(value == "auto")


def test_fitting_changes_only_what_it_tells() -> None:
    for given in (
        {**BASE, **AUTO},
        {
            **BASE,
            "train_batch_size": 256,
            "gradient_accumulation_steps": 4,
            "wandb": {"enabled": True},
        },
        {"train_batch_size": 6, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        {**BASE, "bf16": {"enabled": True}, "optimizer": {"type": "Adam"}},
        {
            **BASE,
            "optimizer": {"type": "Lamb", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 1},
        },
    ):
        before = json.dumps(given)
        fitted = standin.fit(given, 2, 64)
        assert json.dumps(given) == before
        assert _autos(fitted.config) == 0
        told = {change.setting.partition(".")[0] for change in fitted.changes}
        own = {"steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"}
        own.add("zero_force_ds_cpu_optimizer")
        for key in {*given, *fitted.config} - own:
            if given.get(key) != fitted.config.get(key):
                assert key in told, key


def test_the_class_of_the_optimizer_at_stage_0_is_the_one_that_deepspeed_takes_on_a_gpu(
    tmp_path: Path,
) -> None:
    config = write(tmp_path / "ds.json", bf16={"enabled": True})
    (check,) = examine(config).checks
    assert check.optimizer == "FP16_Optimizer"
    config = write(
        tmp_path / "ds.json",
        bf16={"enabled": True},
        optimizer={"type": "AdamW", "params": {"torch_adam": True}},
    )
    (check,) = examine(config).checks
    assert check.optimizer == "FP16_UnfusedOptimizer"


MODELS = """
import torch

def build():
    print("to standard output")
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10))
    model[0].bias.requires_grad_(False)
    return model

def fail():
    raise RuntimeError("no weights here")

def number():
    return 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mymodels.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_users_own_model_is_examined_and_the_cost_scaled_to_what_it_trains(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write(models / "ds.json", zero_optimization={"stage": 3}))
    status, said = doctor("--config", config, "--model", "mymodels:build", capsys=capsys)
    (check,) = said["checks"]
    assert (status, check["model"]) == (0, "mymodels:build")
    assert check["cost"]["scaled_to"] == 600 + 200 + 10  # the frozen bias gives no gradient
    assert check["cost"]["scaled_by"] == "--model"
    arguments = ("--config", config, "--model", "mymodels:build", "--params", "1.*")
    status, said = doctor(*arguments, capsys=capsys)
    assert said["checks"][0]["cost"]["scaled_to"] == 210


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--model", "mymodels:fail"), "no weights here"),
        (("--model", "mymodels:number"), "int"),
        (("--model", "mymodels:absent"), "absent"),
        (("--model", "no_such_module:build"), "no_such_module"),
        (("--params", "1.*"), "--params without --model"),
        (("--points", "nothing"), "nothing"),
        (("--points", "reduced"), "reduced"),  # which stage 3 does not have
        (("--parameters", "-1"), "no positive number"),
        (("--parameters", "many"), "no positive number"),
    ],
)
def test_wrong_options_are_named(
    options: tuple[str, ...], found: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write(models / "ds.json", zero_optimization={"stage": 3}))
    status, said = doctor("--config", config, *options, capsys=capsys)
    assert (status, said["slug"]) == (2, "bad_option")
    assert found in said["found"]


def _lose_average_tensor(module: Any, fitted: standin.Fitted) -> Any:
    engine, changes = _BUILD(module, fitted)
    del type(engine.optimizer).average_tensor
    return engine, changes


_BUILD = standin.build


def test_a_probe_that_does_not_bind_is_named_and_the_others_still_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(standin, "build", _lose_average_tensor)  # a release that moved it
    config = write(tmp_path / "ds.json", zero_optimization={"stage": 2})
    status, said = doctor("--config", str(config), capsys=capsys)
    (check,) = said["checks"]
    assert (status, check["verdict"], check["reason"]["slug"]) == (1, "unbound", "probe_missing")
    lost = [probe for probe in check["probes"] if not probe["bound"]]
    assert {probe["method"] for probe in lost} == {"average_tensor"}
    assert all("average_tensor" in probe["reason"] for probe in lost)
    assert len(lost) < len(check["probes"])


def test_the_cost_is_that_of_a_real_trace(tmp_path: Path) -> None:
    """The same stage, traced by wrap: bytes per trainable parameter and point agree."""
    (check,) = examine(write(tmp_path / "ds.json", zero_optimization={"stage": 2})).checks
    assert check.cost is not None
    train(Setup(2, micro_steps=1), tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    numel = sum(p.numel for p in trace.manifest.parameters if p.trainable)
    found = dict.fromkeys(POINT_NAMES, 0)
    for record in trace.ranks[0].records:
        if record.step == 1 and record.key is not None:
            found[record.point] += trace.bits(record).nbytes
    for point in check.points:
        # Padding and uneven shards are a few elements of some hundred.
        measured, expected = point.bytes / check.cost.parameters, found[point.point] / numel
        assert measured == pytest.approx(expected, abs=0.1), point


def test_without_a_config_each_stage_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["doctor"])
    text = capsys.readouterr().out
    for stage in (0, 1, 2, 3):
        assert f"stage {stage} " in text
    assert status in (0, 1)
    assert (status == 0) == ("refused" not in text)


WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "deepspeed" else find(name, *rest)
from gradtrace.cli.main import main
main(["doctor", "--json"])
"""


def test_without_deepspeed_the_remedy_is_told() -> None:
    root = Path(inspect.getfile(gradtrace)).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 2
    said = json.loads(done.stdout)
    assert (said["slug"], said["found"]) == (errors.MissingDependencyError.slug, "no deepspeed")
    assert "pip install" in said["remedy"]


def test_standard_output_holds_one_document_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mymodels.py").write_text(MODELS, encoding="utf-8")
    config = write(tmp_path / "ds.json", zero_optimization={"stage": 1}, bf16={"enabled": True})
    root = Path(inspect.getfile(gradtrace)).parents[1]
    command = [sys.executable, "-m", "gradtrace", "doctor", "--config", str(config), "--json"]
    done = subprocess.run(
        [*command, "--model", "mymodels:build"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "traced"
    assert all(line.startswith("gradtrace: ") for line in done.stderr.splitlines()), done.stderr


@pytest.mark.parametrize("section", ("offload_optimizer", "offload_param"))
def test_offload_to_nvme_is_refused_without_building_anything(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 3, section: {"device": "nvme", "nvme_path": "/tmp"}}
    config = write(tmp_path / "ds.json", zero_optimization=zero)
    status, said = doctor("--config", str(config), capsys=capsys)
    (check,) = said["checks"]
    assert (status, check["verdict"], check["reason"]["slug"]) == (
        1,
        "refused",
        "unsupported_engine",
    )
    assert f"{section} to NVMe" in check["reason"]["found"]


def test_what_the_stand_in_cannot_show_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(
        tmp_path / "ds.json",
        zero_optimization={"stage": 1},
        pipeline={"stages": 2},
        bf16={"enabled": "auto"},
    )
    _, said = doctor("--config", str(config), capsys=capsys)
    notes = " ".join(said["checks"][0]["notes"])
    assert "pipeline: not examined" in notes
    assert "bf16.enabled is auto" in notes
