"""The clock and the ledger of a dry run."""

from __future__ import annotations

import itertools
import json
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel import _torch
from autoparallel.comm.groups import COMMUNICATOR, communicator_of
from autoparallel.comm.simulate import simulate
from autoparallel.hardware import CPU, H100, Profile
from autoparallel.plan import Plan
from autoparallel.predict.communicator import FORWARD, MeteredCommunicator
from autoparallel.predict.meter import Clock, Ledger, Meter
from autoparallel.predict.unseen import call_without_data
from tests.distributed import run_distributed


class TestClock:
    def test_what_is_waited_for_at_once_takes_its_whole_time(self) -> None:
        for overlap in (0.0, 0.5, 1.0):
            clock = Clock(overlap)
            clock.compute(1.0)
            clock.wait(clock.start(3.0))
            assert clock.now == 4.0

    def test_what_is_started_ahead_is_hidden_as_far_as_the_hardware_lets_it(self) -> None:
        for overlap, expected in ((1.0, 4.0), (0.5, 5.5), (0.0, 7.0)):
            clock = Clock(overlap)
            done = clock.start(3.0)
            clock.compute(4.0)
            clock.wait(done)
            assert clock.now == expected

    def test_collectives_run_one_after_the_other(self) -> None:
        clock = Clock(1.0)
        first, second = clock.start(3.0), clock.start(2.0)
        clock.compute(1.0)
        clock.wait(second)
        assert first == 3.0 and clock.now == 5.0


class TestMeter:
    def meter(self) -> tuple[Meter, Clock, Ledger]:
        clock = Clock(0.0)
        ledger = Ledger(clock)
        return Meter(CPU, (2,), clock, ledger, lambda *sent: 0.0), clock, ledger

    def test_products_are_priced_by_their_sizes_forward_and_backward(self) -> None:
        meter, clock, _ = self.meter()
        with _torch.export.make_fake_mode(), meter:
            a, b = torch.empty(64, 256, requires_grad=True), torch.empty(256, 512, requires_grad=True)
            out = a @ b
            forward = clock.now
            out.backward(torch.empty_like(out))
        product = 2 * 64 * 256 * 512 / CPU.flops[torch.float32]
        assert forward == pytest.approx(product + CPU.launch)
        # Two products of the same size.
        assert clock.now - forward == pytest.approx(2 * (product + CPU.launch))

    @pytest.mark.parametrize("by_name", [False, True])
    def test_causal_attention_costs_half_and_no_other_option_does(self, by_name: bool) -> None:
        seconds = []
        for causal in (False, True):
            meter, clock, _ = self.meter()
            with meter, torch.device("meta"):
                q = torch.empty(1, 1, 256, 64, requires_grad=True)
                mask = None if causal else torch.empty(256, 256)
                options = {"is_causal": causal} if by_name else {}
                out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q, q, q, 0.0, *([] if by_name else [causal]), attn_mask=mask, **options
                )[0]
                forward = clock.now
                torch.autograd.backward(out, torch.empty_like(out))
                seconds.append((forward - CPU.launch, clock.now))
        assert seconds[0][0] == pytest.approx(2 * seconds[1][0])
        assert seconds[0][1] > 1.8 * seconds[1][1]

    def test_views_and_allocations_are_free(self) -> None:
        meter, clock, _ = self.meter()
        with _torch.export.make_fake_mode(), meter:
            x = torch.empty(64, 256)
            x.view(-1)[5:].unsqueeze(0).expand(3, -1).t()
        assert clock.now == 0.0

    def test_memory_lives_as_long_as_autograd_holds_it(self) -> None:
        meter, _, ledger = self.meter()
        ledger.kind = "values"
        size = 64 * 256 * 4
        with _torch.export.make_fake_mode(), meter:
            x = torch.empty(64, 256, requires_grad=True)
            y = F.relu(x)  # saves its result
            z = y.sum()
            del y
            assert ledger.live["values"] == 2 * size + 4
            z.backward()
            del z
            # The gradient of x is x's; nothing else is left.
            assert ledger.live["values"] == 2 * size
            x.grad = None
            del x
        assert ledger.live["values"] == 0
        assert sum(ledger.peak.values()) >= 3 * size

    def test_what_is_there_anyway_is_not_counted(self) -> None:
        meter, _, ledger = self.meter()
        with _torch.export.make_fake_mode(), meter:
            with ledger.holding(""):
                x = torch.empty(64)
            with ledger.holding("values"):
                y = x + 1
        assert ledger.live == {"values": y.numel() * 4}

    @pytest.mark.parametrize(
        ("kind", "how"),
        [
            (nn.Conv1d, {"kernel_size": 3, "padding": 1}),
            (nn.Conv2d, {"kernel_size": 3, "padding": 1}),
            (nn.Conv2d, {"kernel_size": 3, "stride": 2}),
            (nn.Conv2d, {"kernel_size": 3, "dilation": 2}),
            (nn.Conv2d, {"kernel_size": 1}),
            (nn.Conv2d, {"kernel_size": 1, "stride": 2}),
            (nn.Conv3d, {"kernel_size": 3, "padding": 1}),
            (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2}),
        ],
    )
    def test_a_convolution_in_float64_unfolds_its_input(self, kind: type[nn.Module], how: dict[str, int]) -> None:
        def forward(device: str) -> Callable[[], torch.Tensor]:
            convolution = kind(8, 16, bias=False, device=device, dtype=torch.float64, **how)
            sizes = [9] * int(kind.__name__[-2])
            return partial(
                convolution, torch.ones(4, 8, *sizes, dtype=torch.float64, device=device, requires_grad=True)
            )

        def step(device: str) -> Callable[[], None]:
            run = forward(device)

            def stepped() -> None:
                out = run()
                out.backward(torch.empty_like(out))

            return stepped

        for run in (forward, step):
            meter, _, ledger = self.meter()
            metered = run("meta")
            with meter, ledger.holding("values"):
                metered()
            assert sum(ledger.peak.values()) == pytest.approx(_most_allocated(run("cpu")), rel=0.01)


class _Names(TorchDispatchMode):
    """The operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class TestNorms:
    """A root mean square norm is priced as the device runs it: as its operators on a CPU, as one kernel on a GPU."""

    def step(self, device: str, call: Callable[..., torch.Tensor], weight_dtype: torch.dtype) -> list[str]:
        x = torch.ones(4, 8, device=device, requires_grad=True)
        weight = torch.ones(8, device=device, dtype=weight_dtype, requires_grad=True)
        with _Names() as names:
            call(x, [8], weight, 1e-6).backward(torch.ones(4, 8, device=device))
        return names.names

    def without_data(self, profile: Profile, dtype: torch.dtype = torch.float32) -> list[str]:
        norm = torch.ops.aten.rms_norm.default
        return self.step("meta", lambda *args: call_without_data(norm, args, {}, profile), dtype)

    def test_a_cpu_runs_its_operators(self) -> None:
        assert self.without_data(CPU) == self.step("cpu", torch.ops.aten.rms_norm.default, torch.float32)
        assert "aten::pow" in self.without_data(CPU)

    def test_a_gpu_runs_one_kernel_each_way(self) -> None:
        assert [n for n in self.without_data(H100) if "norm" in n] == [
            "aten::native_layer_norm",
            "aten::native_layer_norm_backward",
        ]
        assert "aten::pow" not in self.without_data(H100)

    def test_not_for_a_weight_of_another_dtype_nor_in_compiled_layers(self) -> None:
        assert "aten::pow" in self.without_data(H100, torch.float64)
        assert "aten::pow" in self.without_data(replace(H100, fuses=True))


class TestMeteredCommunicator:
    """A dry run gets tensors of the forms that ranks get, and counts and pays for what they send."""

    KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

    def test_results_have_the_forms_of_real_ones(self) -> None:
        def shapes(device: str) -> list[torch.Size]:
            communicator, axis = communicator_of("m/tp")
            x = torch.ones(3, 4, device=device)
            return [getattr(communicator, kind)(x.clone(), axis)().shape for kind in self.KINDS]

        real = simulate(lambda rank: shapes("cpu"), (2, 3), ("dp", "tp"))[0]
        metered = self.metered()
        with COMMUNICATOR.using(metered):
            assert shapes("meta") == real
        # The bytes of the whole tensors, as ``sent_bytes`` means them.
        full = dict(zip(self.KINDS, (48, 3 * 48, 48, 3 * 48), strict=True))
        counted = metered.counters[FORWARD].result().volumes
        assert counted == {(kind, "tp", 3): (1, full[kind]) for kind in self.KINDS}
        spent = sum(CPU.step_seconds((2, 3), kind, (1,), full[kind]) for kind in self.KINDS)
        assert metered.clock.now == pytest.approx(spent)

    def test_what_is_sent_lives_until_it_is_waited_for(self) -> None:
        x = torch.empty(8, device="meta")
        sent = weakref.ref(x.untyped_storage())
        wait = self.metered().all_gather(x, "tp")
        del x
        assert sent() is not None
        wait()
        assert sent() is None

    def metered(self) -> MeteredCommunicator:
        plan = Plan((("dp", 2), ("tp", 3)), "auto", "", {}, {}, {})
        return MeteredCommunicator(plan, CPU, Clock(0.0))


class Net(nn.Module):
    """Wide enough that what is alive is much more than bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _most_allocated(run: Callable[[], object]) -> int:
    """The most bytes that what runs has taken and not given back, as the CPU's allocator reports them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(itertools.accumulate(size for _, size in changes))


def _peaks(cases: list[tuple[str, int, float | None]]) -> list[tuple[float, float, int]]:
    """Predicted and measured bytes of a step at its worst moment, on this rank, and how many layers are recomputed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found = []
    for plan, rows, limit in cases:
        torch.manual_seed(0)
        x, y = torch.randn(rows, 128), torch.randn(rows, 128)
        model = autoparallel.compile(Net(), mesh, loss_fn=F.mse_loss, plan=plan, memory_limit=limit)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
        optimizer.zero_grad()
        kept = [x, y, *model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        local = [v.to_local() if isinstance(v, DTensor) else v for v in kept]

        def step() -> None:
            model(x, y).backward()  # noqa: B023
            optimizer.step()  # noqa: B023

        most = _most_allocated(step)
        optimizer.zero_grad()
        assert model.plan.prediction is not None
        total = sum(v.untyped_storage().nbytes() for v in local) + most
        found.append((model.plan.prediction.total_memory, float(total), len(model.plan.recompute)))
    return found


@pytest.mark.slow  # on a busy machine gloo's threads let go of their buffers later, which is more at the worst moment
def test_predicted_memory_is_that_of_the_allocator() -> None:
    """Within 10%: many rows, so that activations count; few, so that parameters and gradients do; layers recomputed."""
    cases = [("data_parallel", 2048, None), ("fsdp", 64, None), ("tensor_parallel", 512, None)]
    cases.append(("data_parallel", 2048, 20e6))
    for rank in run_distributed(_peaks, cases, world_size=2, timeout=280):
        for case, (predicted, measured, layers) in zip(cases, rank, strict=True):
            assert bool(layers) == (case[2] is not None)
            assert predicted == pytest.approx(measured, rel=0.10), (case, predicted / measured)


class TestFusion:
    """What compiled programs move: ``Profile.fuses``."""

    N = 64 * 32 * 4  # bytes of a tensor

    def moved(self, run: Callable[[torch.Tensor], object], *, fuses: bool = True) -> tuple[float, dict[str, int]]:
        """The bytes that a program moves beside its products, and the worst moment of its memory."""
        clock = Clock(0.0)
        ledger = Ledger(clock)
        hardware = replace(CPU, memory_bandwidth=1.0, launch=0.0, flops={}, default_flops=1e30, fuses=fuses)
        with torch.device("meta"):
            x, weight = torch.empty(64, 32), torch.empty(32, 32)
            self.clock, self.meter = clock, Meter(hardware, (2,), clock, ledger, lambda *sent: 0.0)
            with self.meter, ledger.holding("working"):
                before = clock.now
                x @ weight
                product = clock.now - before
                products = [0]

                def linear(value: torch.Tensor) -> torch.Tensor:
                    products[0] += 1
                    return value @ weight

                self.linear = linear
                run(x)
        return clock.now - product * (1 + products[0]), ledger.peak

    def test_a_chain_is_one_kernel_that_reads_what_it_begins_with_and_writes_what_a_product_reads(self) -> None:
        def chain(x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.relu().mul(2.0).exp())

        assert self.moved(chain)[0] == 2 * self.N
        assert self.moved(chain, fuses=False)[0] == 6 * self.N

    def test_a_normalisation_in_a_wider_dtype_moves_no_more(self) -> None:
        def norm(x: torch.Tensor) -> torch.Tensor:
            wide = x.double()
            return self.linear((wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).float())

        assert self.moved(norm)[0] == 2 * self.N
        assert self.moved(norm, fuses=False)[0] > 12 * self.N

    def test_what_several_products_read_is_made_once(self) -> None:
        def shared(x: torch.Tensor) -> list[torch.Tensor]:
            y = x.exp()
            return [self.linear(y), self.linear(y)]

        assert self.moved(shared)[0] == 2 * self.N

    def test_a_residual_stream_is_written_once(self) -> None:
        def residual(x: torch.Tensor) -> torch.Tensor:
            stream = x + self.linear(x)
            return self.linear(stream + self.linear(stream.exp()))

        # One kernel reads two tensors and writes the sum and its exponential; one reads the sum and a product.
        assert self.moved(residual)[0] == 4 * self.N + 3 * self.N

    def test_what_follows_from_little_is_made_again_rather_than_kept(self) -> None:
        def gated(x: torch.Tensor) -> torch.Tensor:
            gate = self.linear(x).sigmoid()
            return self.linear(gate * self.linear(x))  # two products read, one written

        assert self.moved(gated)[0] == 3 * self.N

    def test_layers_are_compiled_each_apart_and_what_stands_between_them_is_not(self) -> None:
        def layered(x: torch.Tensor) -> torch.Tensor:
            self.meter.layered = True
            self.clock.layers |= {"blocks.0.norm": "blocks.0", "blocks.1.norm": "blocks.1"}
            for self.clock.module in ("blocks.0.norm", "blocks.1.norm"):
                x = x.relu().exp()
            self.clock.module = "norm"
            return self.linear(x.relu().exp())

        # Each layer reads what it begins with and writes what it hands on; the last two calls read and write each.
        assert self.moved(layered)[0] == (2 + 2 + 4) * self.N

    def test_memory_is_told_as_without(self) -> None:
        def chain(x: torch.Tensor) -> torch.Tensor:
            return self.linear((x.exp() + x.relu()).mul(2.0))

        assert self.moved(chain)[1] == self.moved(chain, fuses=False)[1]
