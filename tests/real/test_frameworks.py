"""TRL, Accelerate and Lightning: their recipes of docs/frameworks.md, on the real packages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gradtrace
from gradtrace.trace.reader import open_trace

BEGIN = """
    import sys, warnings
    warnings.simplefilter("ignore")
    import torch
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__["deepspeed_shm_comm"] = False
"""
SFT = (
    BEGIN
    + """
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer
    known = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(60))]
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    draw = torch.Generator().manual_seed(1)
    texts = [" ".join(f"w{n}" for n in torch.randint(60, (10,), generator=draw)) for _ in range(32)]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2))
    config = SFTConfig(sys.argv[1], per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=3, logging_steps=1, learning_rate=1e-2, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, deepspeed={
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True})
    trainer = SFTTrainer(model, args=config, processing_class=words,
        train_dataset=Dataset.from_list([{"text": text} for text in texts]))
    trainer.train()
    for entry in trainer.state.log_history:
        told = [repr(entry.get(name)) for name in ("loss", "grad_norm", "learning_rate")]
        print("\\nlog " + ", ".join(told), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""
)
ACCELERATE = (
    BEGIN
    + """
    import gradtrace
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    accelerator = Accelerator(cpu=False, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}))
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if len(sys.argv) > 1:
        gradtrace.wrap(model, sys.argv[1])
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(6):
        with accelerator.accumulate(model):
            loss = model(torch.randn(2, 7, generator=draw)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"\\nlog {loss.item()!r}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""
)
# Lightning allows DeepSpeed on CUDA alone: what asks for that is taken out, the rest is its own.
LIGHTNING = (
    BEGIN
    + """
    import gradtrace, lightning
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy, deepspeed
    deepspeed.CUDAAccelerator = CPUAccelerator
    deepspeed._validate_device_index_selection = lambda devices: None
    class OnCpu(DeepSpeedStrategy):
        root_device = property(lambda self: torch.device("cpu", 0))
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(7, 5)
        def on_train_start(self):
            if len(sys.argv) > 1:
                gradtrace.wrap(self.trainer.strategy.model, sys.argv[1])
        def training_step(self, batch, number):
            loss = self.net(batch[0]).square().mean()
            print(f"\\nlog {loss.item()!r}", flush=True)
            return loss
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, 7))
    lightning.Trainer(accelerator="cpu", devices=1, max_steps=3, logger=False,
        strategy=OnCpu(stage=2, process_group_backend="gloo"), enable_checkpointing=False,
        enable_progress_bar=False).fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
"""
)


def _python(words: list[str], ranks: int) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    launcher += [f"--master-port={port}"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), *words],
        env={**os.environ, "ACCELERATE_USE_DEEPSPEED": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("log"))


def _script(text: str, tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_an_unmodified_trl_script_prints_the_same_and_its_reports_agree(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs pip install '.[frameworks]'")
    script = _script(SFT, tmp_path)
    trace = tmp_path / "trace"
    plain = _python([script, str(tmp_path / "out")], 2)
    run = ["-m", "gradtrace", "run", "-o", str(trace)]
    assert len(plain) == 2 * 4
    assert _python([*run, script, str(tmp_path / "out")], 2) == plain
    result = gradtrace.audit(trace)
    assert result.verdict == "pass", (result.first, result.notes)
    assert len(result.reported) == 3
    for entry in result.reported:
        assert entry.quantities["loss"].agrees and entry.quantities["grad_norm"].agrees


@pytest.mark.parametrize(
    ("package", "text", "ranks", "steps"),
    [("accelerate", ACCELERATE, 2, (0, 1, 2)), ("lightning", LIGHTNING, 1, (0, 1, 2))],
    ids=("accelerate", "lightning"),
)
def test_the_recipe_of_one_line(
    package: str, text: str, ranks: int, steps: tuple[int, ...], tmp_path: Path
) -> None:
    pytest.importorskip(package, reason="needs pip install '.[frameworks]'")
    script = _script(text, tmp_path)
    plain = _python([script], ranks)
    assert plain
    assert _python([script, str(tmp_path / "line")], ranks) == plain
    run = ["-m", "gradtrace", "run", "-o", str(tmp_path / "run")]
    assert _python([*run, script], ranks) == plain
    for name in ("line", "run"):
        trace = open_trace(tmp_path / name)
        assert trace.steps == steps
        assert gradtrace.audit(trace).verdict == "pass"
    assert gradtrace.diff(tmp_path / "line", tmp_path / "run").verdict == "agree"
