"""What people write for GPUs: these run where the tests train on one (see ``tests/devices.py``)."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish, net
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, leave_plain, numbers, rows, sgd, weigh
from tests.devices import DEVICE


def _sequences(step: int) -> tuple[Any, ...]:
    return (numbers(4, 16, 8, seed=step),)


def _images(step: int) -> tuple[Any, ...]:
    return (numbers(4, 8, 6, 6, seed=step),)


def _wide(step: int) -> tuple[Any, ...]:
    return (numbers(2, 128, 32, seed=step),)


@program(device="cuda")
class DeviceOfInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        mask = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
        h = self.a(x + positions / 8)
        return self.b(torch.where(mask[: len(h)], h, 0.0))


@program(device="cuda")
class NamesTheDevice(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + torch.zeros(8, device="cuda") + torch.ones(8).cuda()
        return self.b(h * torch.tensor([1.0, 2.0] * 4).to(x.device, non_blocking=True))


@program(device="cuda")
class AsksForTheDevice(Two):
    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available():
            x = self.a(x)
        if x.device == self.a.weight.device and self.b.weight.is_cuda and x.get_device() >= 0:
            x = self.b(x)
        return x


@program(device="cuda")
class AutocastInsideOnGpus(Two):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a.weight.float(), self.b.weight.float()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            h = F.linear(x.float(), a)
            with torch.amp.autocast(device_type=x.device.type, enabled=False):
                h = h.float().softmax(-1) @ a
            return F.linear(h, b).double()


@program(device="cuda")
class OldAutocastDecorator(Two):
    @torch.amp.autocast(DEVICE, dtype=torch.float16)
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a.weight.float(), self.b.weight.float()
        return F.linear(F.linear(x.float(), a).tanh().softmax(-1), b).double()


class _Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@program(device="cuda")
class FunctionWithCasts(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Square.apply(self.a(x)))


@program(device="cuda")
class Synchronizes(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.cuda.nvtx.range("first"), torch.profiler.record_function("first"):
            h = self.a(x)
        torch.cuda.nvtx.range_push("second")
        h = self.b(h)
        torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        return h


@program(device="cuda")
class WithinADevice(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.cuda.device(x.device):
            return self.b(self.a(x).relu())


@program(device="cuda", refused=".")
class OnAStream(Two):
    def __init__(self) -> None:
        super().__init__()
        self.stream = None

    def forward(self, x: Tensor) -> Tensor:
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # refused
        with torch.cuda.stream(self.stream):  # refused
            h = self.a(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.b(h)


class _Attention(nn.Module):
    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2).to(self.dtype) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2).double())


@program(device="cuda", batch=_wide)
class FlashAttention(_Attention):
    pass


class _AttentionOnOneKernel(_Attention):
    backend: SDPBackend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return super().attend(q, k, v)


@program(device="cuda", batch=_wide)
class FlashAttentionChosen(_AttentionOnOneKernel):
    backend = SDPBackend.FLASH_ATTENTION


@program(device="cuda", batch=_wide)
class EfficientAttention(_Attention):
    dtype = torch.float32

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], device=q.device, dtype=torch.bool).tril()
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@program(device="cuda", batch=_wide)
class CudnnAttention(_AttentionOnOneKernel):
    backend = SDPBackend.CUDNN_ATTENTION


@program(device="cuda", batch=_wide)
class MathAttentionInDouble(_Attention):
    dtype = torch.float64


@program(device="cuda", batch=_wide, random=True)
class AttentionWithDropout(_Attention):
    dtype = torch.float32

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


@program(device="cuda", batch=_wide)
class FlexAttentionCausal(_Attention):
    dtype = torch.float32

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda")
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j), block_mask=mask)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


@program(device="cuda", batch=_wide)
class FlexAttentionCompiled(_Attention):
    """The kernel that ``torch.compile`` makes of it, in both runs."""

    attention = staticmethod(torch.compile(flex_attention))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 40), None, None, n, n, device="cuda")
        return self.attention(q, k, v, block_mask=mask)


@program(device="cuda", batch=_sequences)
class CudnnRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(16, 8, batch_first=True), nn.RNN(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.gru(self.lstm(x)[0])[0])[0]


@program(device="cuda", batch=_images)
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return F.interpolate(self.second(self.norm(self.first(x)).relu()), scale_factor=0.5, mode="bilinear")


@program(device="cuda")
class ScattersAndGathers(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        index = torch.tensor([0, 1, 1, 0], device=x.device)
        sums = torch.zeros(2, 8, device=x.device, dtype=x.dtype).index_add(0, index, h)
        return self.b(sums[index] + h.scatter_add(0, index[:, None].expand(-1, 8), h))


@program(device="cuda")
class ValuesOfTheCpu(Two):
    """Zero-dimensional tensors and indices may lie on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * torch.tensor(1.5) * self.scale
        return self.b(h[:, torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])])


@program(device="cuda")
class LooksAtACopy(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.b(h), h.detach().cpu()


@program(device="cuda")
class ThereAndBack(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).cpu().tanh()
        return self.b(h.cuda())


@program(device="cuda", random=True)
class CheckpointsWithDropout(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda t: F.dropout(self.a(t).tanh(), 0.3, self.training), x, use_reentrant=False)
        return self.b(F.dropout(h, 0.1))


@program(device="cuda", random=True)
class DrawsOnTheDevice(Two):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, device=x.device, dtype=x.dtype) + torch.rand_like(x)
        keep = torch.bernoulli(torch.full_like(x, 0.7))
        return self.b(self.a(x + 0.1 * noise) * keep)


@program(device="cuda")
class CompiledInside(Two):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.compile(lambda t: F.silu(t) * torch.sigmoid(t))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@program(device="cuda", batch=_sequences, options={"backend": "inductor"})
class WithInductor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@program(device="cuda", batch=_sequences)
class EncoderInEvaluation(nn.Module):
    """torch has a fast path for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True).eval()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.layer(x)
        return self.head(h)


@program(device="cuda")
class LinearAlgebraOnGpus(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        a = h.mT @ h + torch.eye(8, device=x.device, dtype=x.dtype)
        return self.b(torch.linalg.solve(a, h.mT).mT) + torch.linalg.cholesky(a).diagonal() + torch.logdet(a)


@program(device="cuda")
class AsksForMemory(Two):
    """A number of Python, which is that of the trace."""

    def forward(self, x: Tensor) -> Tensor:
        used = torch.cuda.memory_allocated()
        return self.b(self.a(x)) * (1.0 if used > 0 else 2.0)


def _kernel_of_triton() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, 2.0 * tl.load(x + at, mask=at < count), mask=at < count)

    return double


class _Doubled(torch.autograd.Function):
    kernel: Any = None

    @staticmethod
    def launch(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _Doubled.kernel[(1,)](x, out, x.numel(), BLOCK=64)  # refused
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _Doubled.launch(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Doubled.launch(grad.contiguous())


@program(device="cuda", refused="custom_op|triton_op")
class KernelInAFunction(Two):
    def __init__(self) -> None:
        super().__init__()
        _Doubled.kernel = _Doubled.kernel or _kernel_of_triton()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Doubled.apply(self.a(x)))


@torch.library.custom_op("tests_on_gpus::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return _Doubled.launch(x.contiguous())


@_doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_doubled.register_autograd(lambda ctx, grad: _doubled(grad))


@program(device="cuda")
class KernelInAnOperator(Two):
    def __init__(self) -> None:
        super().__init__()
        _Doubled.kernel = _Doubled.kernel or _kernel_of_triton()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_doubled(self.a(x)))


# ---------------------------------------------------------------------------------------------------------- around it


@loop(device="cuda")
def scaler(run: Run) -> None:
    """A scaler that meets an infinite gradient."""
    model = run.compile(net())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cuda", 2.0**10)
    for step in range(STEPS):
        out = model(*rows(step))
        loss = out.square().mean() * (torch.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        run.note("scale", scaler.get_scale())
        optimizer.zero_grad()
        run.note_state(model)


@loop(device="cuda")
def optimizers_for_gpus(run: Run) -> None:
    for options in ({"fused": True}, {"foreach": True}, {"capturable": True}):
        torch.manual_seed(0)
        model = run.compile(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for step in range(STEPS):
            run.call(model, step).square().mean().backward()
            finish(run, model, optimizer)


@loop(device="cuda")
def autocast_around(run: Run) -> None:
    model = run.compile(net().float())
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(rows(step)[0].float())
        run.note("output", out)
        weigh(out).backward()
        finish(run, model, optimizer)


@loop(device="cuda")
def autocast_and_scaler(run: Run) -> None:
    """The recipe of torch's tutorials, in float16."""
    model = run.compile(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)).float())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler("cuda")
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(rows(step)[0].float()), rows(step + 9)[0].float())
        run.note("loss", loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.note_state(model)


@loop(device="cuda")
def precision(run: Run) -> None:
    """A policy computes as casting all parameters and inputs does."""
    plain = net().float()
    if run.wrap is leave_plain:
        model: Any = copy.deepcopy(plain)
        run.compile(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = run.compile(plain, precision=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for step in range(STEPS):
        x = numbers(64, 8, seed=step).float()
        if run.wrap is leave_plain:
            out = functional_call(model, {n: p.bfloat16() for n, p in model.named_parameters()}, (x.bfloat16(),))
        else:
            out = model(x)
        run.note("output", out)
        out.float().square().mean().backward()
        finish(run, model, optimizer)


@loop(device="cuda")
def states_in_host_memory(run: Run) -> None:
    model = run.compile(net(), offload_optimizer=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        run.call(model, step).square().mean().backward()
        finish(run, model, optimizer)


@loop(device="cuda")
def inputs_from_pinned_memory(run: Run) -> None:
    model = run.compile(net())
    optimizer = sgd(model)
    loader = torch.utils.data.DataLoader(numbers(12, 8, seed=1).cpu(), batch_size=4, pin_memory=True)
    for x in loader:
        loss = model(x.cuda(non_blocking=True)).square().mean()
        run.note("loss", loss.item())
        loss.backward()
        finish(run, model, optimizer)


@loop(device="cuda")
def inputs_left_on_the_cpu(run: Run) -> None:
    model = run.compile(net())
    try:
        model(rows(0)[0].cpu())
    except (RuntimeError, ValueError) as error:
        cure = ".to('cuda')"
        run.note("says what to change", run.wrap is leave_plain or cure in str(error))


@loop(device="cuda")
def saves_and_loads(run: Run) -> None:
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.call(model, step).square().mean().backward()
        finish(run, model, optimizer)
        state = {name: value.cpu() for name, value in model.state_dict().items() if name != "_extra_state"}
        model.load_state_dict({name: value.cuda() for name, value in state.items()}, strict=False)


@loop(device="cuda")
def side_stream(run: Run) -> None:
    """A step on another stream than the default one, as a warm-up for a graph does."""
    model = run.compile(net())
    optimizer = sgd(model)
    stream = torch.cuda.Stream()
    for step in range(STEPS):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run.call(model, step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        run.note_state(model)


@loop(device="cuda")
def captured_in_a_graph(run: Run) -> None:
    """A whole step as a CUDA graph."""
    model = run.compile(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    x = rows(0)[0].clone()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for number in range(STEPS):
        x.copy_(rows(number)[0])
        graph.replay()
        run.note("loss", loss)
    run.note_state(model)
