"""`GradtraceCallback` in Trainer: nothing changes, and reports stand beside the records."""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradtrace
from gradtrace.analysis.inspect import inspect
from gradtrace.analysis.reported import reported
from gradtrace.errors import BadOptionError, NotAnEngineError
from gradtrace.testing.ranks import run_ranks
from gradtrace.trace.reader import open_trace

transformers = pytest.importorskip("transformers", reason="needs pip install '.[frameworks]'")
pytest.importorskip("accelerate", reason="needs pip install '.[frameworks]'")

from gradtrace.integrations.transformers import GradtraceCallback  # noqa: E402  skipped first


class Doubling(transformers.Trainer):  # type: ignore[misc]
    """Report twice the gradient norm, and from the second step on half of the loss."""

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "grad_norm" in logs:
            logs["grad_norm"] *= 2
            logs["loss"] /= 1 if self.state.global_step == 1 else 2
        super().log(logs, *args, **kwargs)


def build(
    directory: Path,
    trace: Path | None,
    *,
    stage: int = 2,
    kind: Callable[..., Any] = transformers.Trainer,
    zero: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    without_deepspeed: bool = False,
    **arguments: Any,
) -> Any:
    """Return a Trainer of a random Llama of two layers, on one rank of a group that is there."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if section is not None:
        config["gradtrace"] = section
    options = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "deepspeed": None if without_deepspeed else config,
        **arguments,
    }
    chosen = transformers.TrainingArguments(str(directory), **options)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    numbers = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 64, (12,), generator=numbers) for _ in range(40)]
    data = [{"input_ids": text, "labels": text} for text in texts]
    callbacks = [] if trace is None else [GradtraceCallback(trace, on_error="raise")]
    return kind(model, chosen, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def outcome(trainer: Any) -> tuple[list[Any], str]:
    """Return what was logged, clocks aside, and a hash of the weights."""
    clocks = ("runtime", "per_second", "flos")
    logs = [
        {name: repr(value) for name, value in entry.items() if not any(c in name for c in clocks)}
        for entry in trainer.state.log_history
    ]
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        held = getattr(parameter, "ds_tensor", parameter)
        digest.update(held.detach().float().numpy().tobytes())
    return logs, digest.hexdigest()


def _train(rank: int, directory: Path, trace: Path | None, setup: dict[str, Any]) -> Any:
    trainer = build(directory, trace, **setup)
    trainer.train()
    return outcome(trainer)


def trained(tmp_path: Path, ranks: int = 2, **setup: Any) -> Path:
    """Train with the callback and without, compare, and return the trace."""
    plain = run_ranks(ranks, _train, tmp_path / "plain", None, setup)
    traced = run_ranks(ranks, _train, tmp_path / "traced", tmp_path / "trace", setup)
    assert plain == traced
    return tmp_path / "trace"


@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_training_is_bitwise_its_own_and_reports_agree(
    stage: int, bf16: bool, tmp_path: Path
) -> None:
    path = trained(tmp_path, stage=stage, bf16=bf16)
    result = gradtrace.audit(path)
    assert result.verdict == "pass", (result.first, result.notes)
    assert [(entry.step, entry.steps) for entry in result.reported] == [(0, 1), (1, 1), (2, 1)]
    for entry in result.reported:
        assert entry.quantities["loss"].agrees is True
        norm = entry.quantities["grad_norm"]
        assert norm.agrees is True or (norm.recorded is None and stage == 0 and not bf16)
    # The last rate is compared with no later step's.
    assert [entry.quantities["lr"].agrees for entry in result.reported][:2] == [True, True]
    assert inspect(path).reported == result.reported
    assert {rank.closed for rank in open_trace(path).ranks.values()} == {"closed"}


def test_a_loss_that_is_averaged_over_steps_agrees(tmp_path: Path) -> None:
    path = trained(tmp_path, max_steps=5, logging_steps=2, gradient_accumulation_steps=3)
    entries = reported(open_trace(path))
    assert [(e.step, e.steps, e.framework_step) for e in entries] == [(1, 2, 2), (3, 2, 4)]
    assert all(entry.quantities["loss"].agrees for entry in entries)


def test_one_rank_agrees_too(tmp_path: Path) -> None:
    path = trained(tmp_path, ranks=1, gradient_accumulation_steps=4)
    assert gradtrace.audit(path).verdict == "pass"
    assert all(entry.quantities["loss"].agrees for entry in reported(open_trace(path)))


def test_evaluation_inside_the_training_leaves_nothing_in_the_trace(tmp_path: Path) -> None:
    path = trained(tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    plain = trained(tmp_path / "without")
    assert gradtrace.audit(path).verdict == "pass"
    counts = [
        [
            (record.step, record.micro_step, record.point)
            for record in open_trace(p).ranks[0].records
        ]
        for p in (path, plain)
    ]
    assert counts[0] == counts[1]


def test_what_is_reported_wrongly_is_a_note_and_no_finding(tmp_path: Path) -> None:
    path = trained(tmp_path, kind=Doubling)
    result = gradtrace.audit(path)
    assert result.verdict == "pass"
    notes = [note for note in result.notes if "transformers.Trainer" in note]
    assert len(notes) == 2
    assert "a loss of" in notes[0] and "at step 1" in notes[0] and "0.5 times" in notes[0]
    assert "a gradient norm of" in notes[1] and "at step 0" in notes[1] and "2 times" in notes[1]
    assert [e.quantities["loss"].agrees for e in result.reported] == [True, False, False]


def _resume(rank: int, directory: Path, trace: Path | None) -> Any:
    setup = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = build(directory, None, **setup)
    trainer.args.max_steps = 2
    trainer.train()
    resumed = build(directory, trace, **setup)
    resumed.train(resume_from_checkpoint=True)
    return outcome(resumed)


@pytest.mark.parametrize("stage", (2, 3))
def test_a_resumed_training_is_traced_from_its_own_first_step(stage: int, tmp_path: Path) -> None:
    plain = run_ranks(2, _resume, tmp_path / "plain", None)
    traced = run_ranks(2, _resume, tmp_path / "traced", tmp_path / "trace")
    assert plain == traced
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", (result.first, result.notes)
    assert [(e.step, e.framework_step) for e in result.reported] == [(0, 3), (1, 4)]
    assert all(entry.quantities["loss"].agrees for entry in result.reported)


def _twice(rank: int, directory: Path, trace: Path | None) -> Any:
    """Train twice with one callback; one Trainer cannot, by itself, under DeepSpeed.

    Source: its engine is forgotten by ``accelerator.free_memory()`` (transformers 5.24.0, 4.57.3).
    """
    first, second = build(directory, trace), build(directory, None)
    first.train()
    if trace is not None:
        callback = first.pop_callback(GradtraceCallback)
        second.add_callback(callback)
    second.train()
    return outcome(second)


def test_a_second_training_leaves_a_second_trace(tmp_path: Path) -> None:
    plain = run_ranks(2, _twice, tmp_path / "plain", None)
    assert run_ranks(2, _twice, tmp_path / "traced", tmp_path / "trace") == plain
    for name in ("trace", "trace-train1"):
        result = gradtrace.audit(tmp_path / name)
        assert result.verdict == "pass", (result.first, result.notes)
        assert len(result.reported) == 3


def _section(rank: int, directory: Path, variables: dict[str, str], section: Any) -> Any:
    os.environ.update(variables)
    trainer = build(directory, None, section=section)
    trainer.add_callback(GradtraceCallback())
    trainer.train()


def test_options_come_from_the_section_and_the_directory_from_the_environment(
    tmp_path: Path,
) -> None:
    variables = {"GRADTRACE_OUT": str(tmp_path / "a"), "GRADTRACE_PARAMS": "*.mlp.*"}
    section = {"steps": "1:", "params": ["nothing"], "points": ["local_grad", "loss"]}
    run_ranks(2, _section, tmp_path / "out", variables, section)
    manifest = open_trace(tmp_path / "a").manifest
    assert manifest.plan["steps"] == "1:"
    assert manifest.plan["params"] == ["*.mlp.*"]
    assert manifest.plan["points"] == ["loss", "local_grad"]
    assert "gradtrace" not in manifest.ds_config
    run_ranks(2, _section, tmp_path / "out", {"GRADTRACE_OUT": str(tmp_path / "b")}, None)
    notes = gradtrace.diff(tmp_path / "a", tmp_path / "b").notes
    assert not [note for note in notes if "ds_config" in note]


def test_the_callback_and_the_section_give_the_same_trace(tmp_path: Path) -> None:
    run_ranks(2, _train, tmp_path / "one", tmp_path / "callback", {})
    place = {"GRADTRACE_OUT": str(tmp_path / "section")}
    run_ranks(2, _section, tmp_path / "two", place, {"on_error": "raise"})
    traces = [open_trace(tmp_path / name) for name in ("callback", "section")]
    assert traces[0].manifest.plan == traces[1].manifest.plan
    for rank in (0, 1):
        assert traces[0].ranks[rank].records == traces[1].ranks[rank].records
    assert gradtrace.diff(*traces).verdict == "agree"


def test_a_bad_section_is_refused_by_name(tmp_path: Path) -> None:
    variables = {"GRADTRACE_OUT": str(tmp_path / "a")}
    with pytest.raises(BadOptionError, match="section 'gradtrace' of the ds_config"):
        run_ranks(2, _section, tmp_path / "out", variables, {"steps": "soon"})
    assert not (tmp_path / "a").exists()


def test_a_callback_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOptionError, match="GRADTRACE_OUT"):
        run_ranks(1, _section, tmp_path / "out", {}, None)


def test_a_trainer_without_deepspeed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAnEngineError, match="no DeepSpeed engine"):
        run_ranks(1, _train, tmp_path, tmp_path / "trace", {"without_deepspeed": True})
    assert not (tmp_path / "trace").exists()


def test_an_option_that_means_nothing_is_refused_before_any_training() -> None:
    with pytest.raises(BadOptionError):
        GradtraceCallback("somewhere", steps="soon")


def test_wrong_counting_is_noticed(tmp_path: Path) -> None:
    """A framework that counts another number of steps than the optimizer made."""
    run_ranks(1, _count, tmp_path / "out", tmp_path / "trace")
    result = gradtrace.audit(tmp_path / "trace")
    assert "counted 2 steps, and the optimizer made 1" in " ".join(result.notes)
    assert [entry.quantities["loss"].agrees for entry in result.reported] == [
        True,
        None,
        None,
        None,
    ]


class _Skipping(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.more = itertools.count()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.global_step += 1 if next(self.more) else 0


def _count(rank: int, directory: Path, trace: Path) -> None:
    trainer = build(directory, trace, max_steps=5)
    trainer.add_callback(_Skipping())
    trainer.train()
