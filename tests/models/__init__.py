"""Plain single-device models that tests train.

Nothing here knows about meshes. Each builder returns a `Case`: the model, a maker of batches, and the loss function
(None where the model computes its own loss). Everything follows from seeds, every row of every batch is different,
and numbers of valid targets differ from row to row, so that a mean taken over the wrong rows shows.

    case = build("gpt", dtype=torch.float64)
    args, kwargs = case.make_batch(step=0, rows=8)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.models.cases import Case, ragged_tokens, token_loss
from tests.models.fused import build_fused, build_fused_odd
from tests.models.gpt import GPT, GPTConfig, build_gpt, build_gpt_dropout
from tests.models.mixtures import Experts, MoEConfig, build_moe, build_moe_dropless, build_moe_switch
from tests.models.pretrained import build_gpt2, build_llama, build_mixtral, build_mixtral_grouped, build_t5
from tests.models.small import MLP, build_frozen_tail, build_mlp, build_regressor, build_resnet, build_unet

__all__ = [
    "GPT", "MLP", "NAMES", "Case", "Experts", "GPTConfig", "MoEConfig", "build", "build_gpt", "ragged_tokens",
    "token_loss",
]  # fmt: skip

_BUILDERS: dict[str, Callable[[torch.dtype], Case]] = {
    "mlp": build_mlp,
    "regressor": build_regressor,
    "gpt": build_gpt,
    "gpt_dropout": build_gpt_dropout,
    "resnet": build_resnet,
    "moe": build_moe,
    "moe_switch": build_moe_switch,
    "llama": build_llama,
    "gpt2": build_gpt2,
    "moe_dropless": build_moe_dropless,
    "mixtral": build_mixtral,
    "mixtral_grouped": build_mixtral_grouped,
    "unet": build_unet,
    "frozen_tail": build_frozen_tail,
    "t5": build_t5,
    "fused": build_fused,
    "fused_odd": build_fused_odd,
}

_OTHERS = ("mixtral_grouped", "unet", "frozen_tail", "t5", "fused", "fused_odd")

NAMES = tuple(name for name in _BUILDERS if name not in _OTHERS)
"""The models that run plainly in float64, and are trained whole and without a pipeline."""


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """The named case, its weights drawn from `seed` alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _BUILDERS[name](dtype)
