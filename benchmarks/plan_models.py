"""Which models plan on which meshes: GPT-2, Llama, Mixtral, T5, ViT and ResNet-50 shapes on 8, 64 and 128 devices.

    python benchmarks/plan_models.py --models gpt2,t5 --layers 4

``--models dense`` is a block of DenseNet, whose graph is too wide for elimination on more than one axis.

Every row is a process of its own (see plan.py for the columns).  ``--layers`` takes fewer layers than the models have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from benchmarks import plan as planning

Made = tuple[nn.Module, planning.Inputs, Callable[..., Any] | None]
MESHES = {"8": (8,), "8,8": (8, 8), "2,8,8": (2, 8, 8)}
ROWS = 128


def _tokens(length: int) -> torch.Tensor:
    return torch.empty(ROWS, length, dtype=torch.long, device="meta")


def gpt2(layers: int | None) -> Made:
    """GPT-2 as transformers writes it: q, k and v in one product."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers or 12, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.device("meta"):
        return GPT2LMHeadModel(config), ((_tokens(1024),), {"labels": _tokens(1024)}), None


def llama(layers: int | None) -> Made:
    """Llama-3-8B."""
    return *planning.llama(layers or 32, 4096, 14336, 32, 8, rows=ROWS, length=2048), None


def mixtral(layers: int | None) -> Made:
    """Mixtral-8x7B, its experts stacked."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_hidden_layers=layers or 32, use_cache=False, experts_implementation="grouped_mm")
    with torch.device("meta"):
        return MixtralForCausalLM(config).bfloat16(), ((_tokens(1024),), {"labels": _tokens(1024)}), None


def t5(layers: int | None) -> Made:
    """T5-large: an encoder, a decoder, relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=layers or 24,
        num_heads=16,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    return model, ((), {"input_ids": _tokens(512), "labels": _tokens(512)}), None


def vit(layers: int | None) -> Made:
    """ViT-large."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=layers or 24, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = ViTForImageClassification(config)
        images = torch.empty(ROWS, 3, 224, 224)
    return model, ((images,), {"labels": torch.empty(ROWS, dtype=torch.long, device="meta")}), None


def resnet(layers: int | None) -> Made:
    """ResNet-50."""
    from transformers import ResNetConfig, ResNetModel

    config: Any = ResNetConfig(depths=[layers] * 4) if layers else ResNetConfig()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = ResNetModel(config), nn.Linear(config.hidden_sizes[-1], 1000)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.body(images).pooler_output.flatten(1))
            return logits

    with torch.device("meta"):
        model, images = Classifier(), torch.empty(ROWS, 3, 224, 224)
    return model, ((images, torch.empty(ROWS, dtype=torch.long, device="meta")), {}), F.cross_entropy


class _DenseBlock(nn.Module):
    def __init__(self, layers: int, width: int, growth: int) -> None:
        super().__init__()
        widths = [width + i * growth for i in range(layers + 1)]
        self.stem = nn.Conv2d(3, width, 3, stride=16)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for w in widths[:-1]
        )  # fmt: skip
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        made = [self.stem(images)]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        logits: torch.Tensor = self.head(torch.cat(made, 1).mean((2, 3)))
        return logits


def dense(layers: int | None) -> Made:
    """The third block of DenseNet-121, of which each layer reads all before it."""
    with torch.device("meta"):
        model, images = _DenseBlock(layers or 24, 256, 32), torch.empty(ROWS, 3, 224, 224)
    return model, ((images, torch.empty(ROWS, dtype=torch.long, device="meta")), {}), F.cross_entropy


MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "t5": t5, "vit": vit, "resnet": resnet, "dense": dense}


def main() -> None:
    """Prints the table, or one row as JSON where a case is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="model/mesh: measures one in this process and prints JSON")
    parser.add_argument("--models", default=",".join(name for name in MODELS if name != "dense"))
    parser.add_argument("--meshes", default="/".join(MESHES))
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case:
        name, _, mesh = options.case.partition("/")
        print(json.dumps(planning.measure(lambda: MODELS[name](options.layers), MESHES[mesh])))
        return
    rows = []
    for name in options.models.split(","):
        for mesh in options.meshes.split("/"):
            passed = [f"--layers={options.layers}"] if options.layers else []
            row = planning.apart(str(Path(__file__).resolve()), f"--case={name}/{mesh}", *passed)
            rows.append((f"{name} ({mesh})", row))
    Console(width=120).print(planning.table("Plans, CPU-seconds", rows))


if __name__ == "__main__":
    main()
