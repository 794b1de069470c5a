"""Train what DeepSpeed issue 1488 trained: ten small linear layers, the first and the last one tied.

    torchrun --nproc-per-node 8 train.py --stage 2

Prints rank 0's loss of the first micro-batch of every step, as the report's script did.
"""

import argparse
import logging
import warnings

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="fp16")
parser.add_argument("--contiguous-gradients", action="store_true")
parser.add_argument("--no-reduce-scatter", action="store_true")
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--loss-scale", type=float, default=0, help="fixed; 0 for a dynamic one")
parser.add_argument("--no-step-before-training", action="store_true")
parser.add_argument("--steps", type=int, default=6)
options = parser.parse_args()

HIDDEN = 16
BATCH = 4
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
dtype = DTYPES[options.dtype]

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer  # noqa: E402

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
# DeepSpeed refuses fp16 on a CPU without instructions for it; torch computes it all the same.
get_accelerator().is_fp16_supported = lambda: True
get_accelerator().supported_dtypes = lambda: list(DTYPES.values())
if options.no_step_before_training:
    FP16_UnfusedOptimizer.initialize_optimizer_states = lambda self: None


class Layers(torch.nn.Module):
    """Apply ten linear layers, and return the cross entropy."""

    def __init__(self):
        super().__init__()
        half = HIDDEN // 2
        sizes = [(HIDDEN, HIDDEN), (HIDDEN, half), *[(half, half)] * 6, (half, HIDDEN)]
        layers = [torch.nn.Linear(*size) for size in sizes]
        last = torch.nn.Linear(HIDDEN, HIDDEN)
        last.weight, last.bias = layers[0].weight, layers[0].bias
        self.layers = torch.nn.Sequential(*layers, last)

    def forward(self, rows, labels):
        """Return the loss of one micro-batch."""
        return torch.nn.functional.cross_entropy(self.layers(rows).float(), labels)


PRECISION = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {
        "fp16": {
            "enabled": True,
            "loss_scale": options.loss_scale,
            "initial_scale_power": 10,
        }
    },
}
ADAM = {"lr": 0.02, "weight_decay": 0.01, "eps": 1e-6, "torch_adam": True}

deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(2222 + rank)  # DeepSpeed gives all ranks the weights of rank 0
model = Layers().to(dtype)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": ADAM},
        "zero_optimization": {
            "stage": options.stage,
            "overlap_comm": True,
            "reduce_scatter": not options.no_reduce_scatter,
            "contiguous_gradients": options.contiguous_gradients,
            "reduce_bucket_size": 20,
            "stage3_param_persistence_threshold": 1,
        },
        "steps_per_print": 10**9,
        **PRECISION[options.dtype],
    },
)
data = torch.Generator().manual_seed(2222 + rank)
for step in range(options.steps):
    for micro_step in range(options.accumulation):
        rows = torch.randn(BATCH, HIDDEN, generator=data).to(dtype)
        labels = torch.randint(HIDDEN, (BATCH,), generator=data)
        loss = engine(rows, labels)
        engine.backward(loss)
        engine.step()
        if rank == 0 and micro_step == 0:
            print(f"step {step}: loss {float(loss.detach())!r}", flush=True)
