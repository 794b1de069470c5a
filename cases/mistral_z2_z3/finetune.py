"""Fine-tune a tiny Mistral with the Hugging Face Trainer under DeepSpeed, on CPU."""

import argparse
import json
from pathlib import Path

import torch
import transformers.training_args
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

# transformers asks for a GPU before it lets bf16 be; DeepSpeed trains it on a CPU as well.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True

parser = argparse.ArgumentParser()
parser.add_argument("--model", type=Path, required=True)
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--load-first", action="store_true")
parser.add_argument("--use-cpu", action="store_true")
parser.add_argument("--out", default="/tmp/finetune")
options = parser.parse_args()


def load():
    """Return the pretrained model."""
    return AutoModelForCausalLM.from_pretrained(options.model, torch_dtype=torch.bfloat16)


# Once the arguments are there, stage 3 makes from_pretrained partition the weights as it loads them.
model = load() if options.load_first else None
arguments = TrainingArguments(
    output_dir=options.out,
    use_cpu=options.use_cpu,
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulation,
    max_steps=options.steps,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    bf16=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=7,
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    },
)
model = model or load()

rows = [{"input_ids": ids, "labels": ids} for ids in json.loads(options.data.read_text())]
Trainer(model=model, args=arguments, train_dataset=rows).train()
