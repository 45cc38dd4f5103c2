"""Fine-tune a Llama of transformers: weights from a directory, bfloat16, warm-up and cosine, windows of microbatches,
clipping, evaluation with batches of any size, an average of the weights, generation, and LoRA.  It needs transformers.

    python examples/finetune_llama.py
    torchrun --nproc-per-node 2 examples/finetune_llama.py --plan fsdp
    torchrun --nproc-per-node 2 examples/finetune_llama.py --plan fsdp --lora          # needs peft

Without `--weights` a tiny model with random weights is written to a directory first, and its tokenizer is bytes; with
it, any directory that `save_pretrained` has written will do.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import autoparallel

LENGTH = 32
BATCH = 8  # sequences in a microbatch, over all processes
ACCUMULATION = 2  # microbatches in a step of the optimizer
WARM_UP = 2


class Windows(Dataset[Tensor]):
    """Windows of the bytes of a file."""

    def __init__(self, path: str, count: int) -> None:
        self.bytes = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * LENGTH : (index + 1) * LENGTH]


def weights_of(options: argparse.Namespace) -> Path:
    """The directory of the pretrained weights; one with random weights is made where none is given."""
    if options.weights is not None:
        return Path(options.weights)
    path = Path(tempfile.gettempdir()) / f"tiny-llama-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    if int(os.environ.get("RANK", "0")) == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2 * LENGTH,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def build(path: Path, lora: bool) -> nn.Module:
    """The plain model: on the meta device, where it takes no memory; with LoRA its weights, frozen, in bfloat16."""
    if not lora:
        with torch.device("meta"):
            return LlamaForCausalLM(AutoConfig.from_pretrained(path))
    from peft import LoraConfig, get_peft_model

    base = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return get_peft_model(base, adapters, autocast_adapter_dtype=True)  # the adapters are float32


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1))


def load_weights(model: autoparallel.ParallelModule, path: Path) -> None:
    """Loads one file after the other, so that no process holds more than one of them whole."""
    for file in sorted(path.glob("*.safetensors")):
        report = model.load_state_dict(load_file(file), strict=False)
        assert not report.unexpected_keys, report.unexpected_keys


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows) -> float:
    """The mean loss over all windows; the last batch may have any size."""
    total = 0.0
    for tokens in DataLoader(data, batch_size=BATCH):  # every process reads all of it: batches are global
        total += model(input_ids=tokens, labels=tokens, use_cache=False).loss.item() * len(tokens)
    return total / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a directory that save_pretrained() has written")
    parser.add_argument("--plan", default="auto", help="auto, or a preset such as fsdp")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lora", action="store_true", help="train adapters of peft's instead of all weights")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    path = weights_of(options)
    if dist.is_initialized():
        dist.barrier()
    speaks = not dist.is_initialized() or dist.get_rank() == 0

    training, held_out = Windows(os.__file__, 8 * BATCH * ACCUMULATION), Windows(argparse.__file__, BATCH + 3)
    example = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    precision = None if options.lora else MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = autoparallel.compile(  # the only line that makes it parallel
        build(path, options.lora), plan=options.plan, precision=precision, methods=("generate",)
    )
    model.prepare(input_ids=example, labels=example, use_cache=False)  # plans; meta parameters get their part
    if not options.lora:
        load_weights(model, path)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options.steps))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))  # lies as the model does
    loader = DataLoader(training, batch_sampler=model.sampler(training, BATCH, shuffle=True))  # each reads its rows

    def batches() -> Iterator[Tensor]:
        while True:
            yield from loader

    before = evaluate(model.eval(), held_out)
    model.train()
    for step, window in enumerate(model.accumulate(ACCUMULATION, batches())):
        if step == options.steps:
            break
        for rows in window:
            tokens = model.local_rows(rows)  # puts the rows of all processes together
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
        if speaks:
            print(f"step {step}: norm {norm.item():.3f}, learning rate {schedule.get_last_lr()[0]:.2e}", flush=True)
    after, averaged = evaluate(model.eval(), held_out), evaluate(average.eval(), held_out)
    written = model.generate(input_ids=example[:1, :4] + 100, max_new_tokens=8, do_sample=False, pad_token_id=0)
    if speaks:
        print(f"loss {before:.4f} before, {after:.4f} after, {averaged:.4f} of the average")
        print("generated", written[0, 4:].tolist())
        print(model.plan.explain())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
