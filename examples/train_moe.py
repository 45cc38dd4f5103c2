"""Train a small mixture-of-experts language model on the text of Python's own standard library.

On one process, or on four, where the batch is cut over all of them and the experts over pairs of them:

    python examples/train_moe.py
    torchrun --nproc-per-node 4 examples/train_moe.py --mesh dp=2,ep=2

The model knows nothing of meshes. Its experts are one parameter, stacked along dim 0, which a batched product uses; on
a mesh axis named "ep" every preset shards it, and tokens travel to their experts and back by all-to-all. The loss that
balances the experts is a product of two means over the *whole* batch, whatever the mesh. The data, the attention and
the picture are those of `train_gpt.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from train_gpt import MAX_NORM, Attention, GPTConfig, draw_batch, read_text, save, token_loss

import autoparallel

BALANCE = 0.02  # weight of the balancing loss


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    experts: int = 8
    choices: int = 2  # experts per token
    hidden: int = 128  # of one expert
    capacity: float = 1.25  # places per expert, as a multiple of an even share


class Experts(nn.Module):
    """One MLP per expert."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(config.experts, config.width, config.hidden) * config.width**-0.5)
        self.down = nn.Parameter(torch.randn(config.experts, config.hidden, config.width) * config.hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


class MoE(nn.Module):
    """Every token goes to its best experts, as long as its sequence has places left there.

    Places are counted within a sequence, so that sequences do not depend on one another and may lie anywhere.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        batch, length, width = x.shape
        places = int(config.capacity * config.choices * length / config.experts)
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(config.choices, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        choice = F.one_hot(chosen, config.experts)  # [batch, length, choices, experts]
        queue = choice.transpose(1, 2).reshape(batch, -1, config.experts)  # all first choices, then all second ones
        place = ((queue.cumsum(1) - 1) * queue).sum(-1).view(batch, config.choices, length).transpose(1, 2)
        taken = F.one_hot(place.clamp(max=places - 1), places) * (place < places).unsqueeze(-1)
        choice, taken = choice.to(x.dtype), taken.to(x.dtype)

        sent = torch.einsum("bske,bskc,bsd->ebcd", choice, taken, x)
        made = self.experts(sent.reshape(config.experts, batch * places, width))
        combine = torch.einsum("bsk,bske,bskc->bsec", weights, choice, taken)
        y = torch.einsum("bsec,ebcd->bsd", combine, made.view(config.experts, batch, places, width))

        share = choice[:, :, 0].mean((0, 1))  # of tokens whose first choice an expert is
        return y, config.experts * (share * probabilities.mean((0, 1))).sum()


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class MoEGPT(nn.Module):
    """Returns logits, and how far the experts are from an even share: 1 where they are used alike."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.tok = nn.Embedding(config.vocabulary, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.tok.weight, std=0.05)
        nn.init.normal_(self.pos.weight, std=0.05)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def balanced_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = outputs
    return token_loss(logits, targets) + BALANCE * balance


def make_mesh(option: str | None) -> DeviceMesh | None:
    """'dp=2,ep=2' is two mesh axes of two ranks. Without the option, all processes there are lie on one axis."""
    if option is None:
        return None
    axes = [axis.split("=") for axis in option.split(",")]
    return init_device_mesh("cpu", tuple(int(n) for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes))


def train(steps: int, plan: autoparallel.Preset, mesh: DeviceMesh | None) -> list[tuple[float, float]]:
    """Loss and gradient norm of every optimizer step."""
    torch.manual_seed(0)
    text, config = read_text(), MoEConfig()
    generator = torch.Generator().manual_seed(0)
    example = draw_batch(text, config.context, torch.Generator().manual_seed(1))

    model = autoparallel.compile(MoEGPT(config), mesh, loss_fn=balanced_loss, example_inputs=example, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.2)

    leader = not dist.is_initialized() or dist.get_rank() == 0
    if leader:
        print(model.plan.explain(), flush=True)
    history: list[tuple[float, float]] = []
    with Progress(disable=not leader) as progress:
        for step in progress.track(range(steps), description="train"):
            loss = model(*draw_batch(text, config.context, generator))
            loss.backward()
            norm = model.clip_grad_norm_(MAX_NORM)  # of all parameters, experts on other ranks included
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            history.append((loss.item(), norm.item()))
            if leader and (step % 10 == 0 or step == steps - 1):
                progress.console.print(f"step {step:4d}  loss {history[-1][0]:.4f}  norm {history[-1][1]:.3f}")
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--plan", help="expert_parallel, fsdp, ... (default: expert_parallel on an axis ep, else auto)")
    parser.add_argument("--mesh", help="names and sizes of the mesh axes, such as dp=2,ep=2")
    parser.add_argument("--out", type=Path, default=Path("moe_loss_curve.png"), help="the picture")
    options = parser.parse_args()

    mesh = make_mesh(options.mesh)
    experts = mesh is not None and "ep" in (mesh.mesh_dim_names or ())
    history = train(options.steps, options.plan or ("expert_parallel" if experts else "auto"), mesh)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save(history, options.out)
        print(f"loss {history[0][0]:.3f} -> {history[-1][0]:.3f}; the curve is in {options.out}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
