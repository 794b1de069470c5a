"""Fine-tune a tiny random Qwen2 with TRL's SFTTrainer under DeepSpeed, on CPU."""

import argparse
import random

import torch
import transformers.training_args
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

# transformers asks for a GPU before it lets bf16 be; DeepSpeed trains it on a CPU as well.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=4)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--out", default="/tmp/sft")
options = parser.parse_args()

WORDS = [f"w{n}" for n in range(96)]
tokens = {"<pad>": 0, "<eos>": 1, **{word: n + 2 for n, word in enumerate(WORDS)}}
backend = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")

rng = random.Random(0)


def words(least, most):
    """Return a sentence of random words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


rows = [{"prompt": words(4, 8), "completion": " " + words(4, 12)} for _ in range(64)]
torch.manual_seed(0)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(
        output_dir=options.out,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=True,
        completion_only_loss=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        max_length=64,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=7,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
        },
    ),
)
trainer.train()
