"""Make what is fine-tuned: a tiny Mistral that has learnt to look a few places back, and text.

A model of random weights hardly feels where a token stands; one that was trained does.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import MistralConfig, MistralForCausalLM

VOCABULARY = 64
LENGTH = 512
BACK = 3  # a token repeats the one that stands so many places before it ...
NOISE = 0.25  # ... but for this share, which is random


def text(rows, seed):
    """Return token ids, shape (rows, LENGTH), int64."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=generator)
    repeats = torch.rand((rows, LENGTH), generator=generator) >= NOISE
    for at in range(BACK, LENGTH):
        ids[:, at] = torch.where(repeats[:, at], ids[:, at - BACK], ids[:, at])
    return ids


parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
directory, steps = options.directory, options.steps
torch.manual_seed(0)
model = MistralForCausalLM(
    MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        sliding_window=LENGTH,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
for step in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * (1 - step / steps)
    ids = text(4, seed=step)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(directory)
(directory / "train.json").write_text(json.dumps(text(512, seed=steps).tolist()))
