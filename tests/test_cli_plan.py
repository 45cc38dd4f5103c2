"""``python -m autoparallel plan``: without ranks, and its plan then runs on them without a search."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.hardware import CPU
from autoparallel.plan import Plan
from autoparallel.planner import plan_cache
from autoparallel.planner.candidates import evaluation
from autoparallel.planner.draft import call_of
from autoparallel.planner.request.pins import Pins, parse_pins
from autoparallel.planner.request.request import Request
from autoparallel.tools import plan as cli_plan
from autoparallel.tools.answers import Answer, File, answer_key
from autoparallel.tools.cli import _parser, main
from tests.captures import draft
from tests.distributed import run_distributed
from tests.plan_factories import net

MODEL = "tests.plan_factories:net"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def _train(path: str, batch: int) -> tuple[float, float, str]:
    """One step by a plan's file; the search raises, were it asked."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    model, (x, y), loss_fn = net(batch)
    plain = loss_fn(model(x), y).item()
    kept, evaluation.cheapest = evaluation.cheapest, None  # type: ignore[assignment]
    try:
        compiled = autoparallel.compile(model, mesh, loss_fn=loss_fn, plan=Plan.load(path))
        loss = compiled(x, y)
        loss.backward()
    finally:
        evaluation.cheapest = kept
    return plain, loss.item(), compiled.plan.to_json()


class _Page(HTMLParser):
    """What a page asks the network for, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [str(v) for k, v in attrs if k in ("src", "href")] + [tag] * (tag in ("script", "link", "img"))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.wide
def test_planned_here_and_run_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "report.html"
    status = main(
        ["plan", "--model", MODEL, "--mesh", "dp=2,tp=2", "--hardware", "cpu", "--batch", "16", "--plan",
         "tensor_parallel", "--compare", "fsdp", "--out", str(out), "--report", str(page), "--explain", "--passes",
         "--beside", "dp=1,tp=4"]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert status == 0
    lines = [line.split() for line in printed.out.splitlines()]
    heads = next(line for line in lines if line[:2] == ["plan", "step"])
    assert heads[2:5] == ["rows/s", "MFU", "memory"] and "reduce" in heads
    assert {line[0] for line in lines if line} >= {"tensor_parallel", "fsdp"}
    assert "Net on (dp=2, tp=2), cpu: 16 rows a step" in printed.out and "Predicted memory per device" in printed.out
    assert "# captured" in printed.out and "# insert_collectives: " in printed.out
    phases = [line.rsplit(" ", 2)[0] for line in printed.err.splitlines()]
    assert phases[:3] == ["tensor_parallel: trace", "tensor_parallel: search", "tensor_parallel: predict"]

    ranks = run_distributed(_train, str(out), 24, world_size=4)  # another batch size than the planned one
    for plain, loss, text in ranks:
        assert abs(plain - loss) < 1e-12
        assert text == out.read_text(), "what ran is the file"
    parsed = _Page()
    parsed.feed(page.read_text())
    assert parsed.asked == ["script"], "one file, and nothing from the network"
    assert "(dp=1, tp=4)" in parsed.text and "The best plan on each mesh" in parsed.text
    assert "layers.0-1.0" in parsed.text and "dim 0 over tp" in parsed.text and "Memory of a device" in parsed.text


@pytest.mark.wide
def test_the_same_step_on_twice_and_four_times_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", MODEL, "--hardware", "cpu", "--batch", "16", "--compare", "none"]
    assert main([*command, "--mesh", "dp=2,tp=2", "--doublings", "2"]) == 0
    printed = capsys.readouterr().out
    lines = printed.split("The same step on more devices:")[1].splitlines()
    rows = [line.split() for line in lines if "dp=" in line]
    assert [(row[0], " ".join(row[1:3])) for row in rows] == [
        ("4", "(dp=2, tp=2)"), ("8", "(dp=4, tp=2)"), ("16", "(dp=8, tp=2)")
    ]  # fmt: skip
    assert next(word for word in rows[0] if word.endswith("%")) == "100%"
    assert main([*command, "--mesh", "dp=2,tp=2", "--plan", "fsdp"]) == 0
    assert "more devices" not in capsys.readouterr().out
    assert main([*command, "--devices", "2", "--doublings", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "=" in line][-2:] == ["2", "4"]


def test_more_devices_than_anyone_has(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        ["plan", "--model", MODEL, "--mesh", "dp=512,tp=16", "--batch", "8192", "--plan", "data_parallel",
         "--compare", "none"]
    )  # fmt: skip
    assert status == 0 and "Net on (dp=512, tp=16), h100: 8,192 rows" in capsys.readouterr().out


@pytest.mark.wide
def test_a_config_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(LLAMA))
    arguments = ["plan", "--model", str(config), "--mesh", "dp=4,tp=2", "--seq", "32", "--out", str(out)]
    assert main([*arguments, "--batch", "16", "--precision", "bfloat16", "--compare", "none"]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM on (dp=4, tp=2), h100: 512 tokens a step" in printed
    assert "model(input_ids=input_ids, labels=labels)" in printed and "param_dtype=torch.bfloat16" in printed
    assert "model.layers.1.mlp.down_proj.weight" in Plan.load(out).parameters
    with pytest.raises(SystemExit):
        main(arguments)
    assert "--batch is needed with a config.json" in capsys.readouterr().err


def test_a_config_that_asks_to_run_code_or_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    arguments = ["plan", "--model", str(config), "--mesh", "2", "--batch", "8"]
    for content, message in (
        (json.dumps({**LLAMA, "auto_map": {"AutoModelForCausalLM": "code.Model"}}), "names code of its own"),
        ("[]", "is not a configuration of transformers"),
        ("{", "is not a configuration of transformers"),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "is not a configuration of transformers that makes a model"),
        (json.dumps({**LLAMA, "hidden_act": "absent"}), "KeyError: 'absent'"),
        (json.dumps({**LLAMA, "architectures": [3]}), "is not a configuration of transformers that makes a model"),
        (json.dumps({**LLAMA, "rms_norm_eps": float("nan")}), "NaN is not a number"),
        (json.dumps({**LLAMA, "num_hidden_layers": -1}), "num_hidden_layers cannot be -1"),
        (json.dumps({**LLAMA, "attention_dropout": 1.5}), "attention_dropout cannot be 1.5"),
    ):
        config.write_text(content)
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.wide
def test_a_command_is_answered_without_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out, trace = tmp_path / "config.json", tmp_path / "plan.json", tmp_path / "trace.json"
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    arguments = ["plan", "--model", str(tmp_path), "--mesh", "2", "--batch", "4", "--seq", "16", "--compare", "none"]
    arguments += ["--explain", "--out", str(out), "--trace", str(trace), "--cache", str(tmp_path / "kept")]
    assert main(arguments) == 0
    first, written = capsys.readouterr().out, (out.read_text(), trace.read_text())
    assert "LlamaForCausalLM on (dp=2)" in first and f"wrote {out}" in first
    out.unlink()
    monkeypatch.setattr(cli_plan, "from_config", pytest.fail)
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    assert (out.read_text(), trace.read_text()) == written and Plan.load(out)


def test_an_answer_that_does_not_fit_is_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out, made = tmp_path / "config.json", tmp_path / "plan.json", []
    config.write_text(json.dumps(LLAMA))
    arguments = ["plan", "--model", str(config), "--mesh", "2", "--out", str(out), "--cache", str(tmp_path / "kept")]

    def answer(*args: object) -> Answer:
        made.append(args)
        return Answer("tokens", {"out": File("the plan", "wrote it")})

    monkeypatch.setattr(cli_plan, "_answer", answer)
    for count in (1, 1):
        assert main(arguments) == 0 and len(made) == count
        assert capsys.readouterr().out == "tokens\nwrote it\n" and out.read_text() == "the plan"
        out.unlink()
    (kept,) = (tmp_path / "kept").iterdir()
    text = kept.read_text()
    for damage in (
        "",
        "{}",
        "[" * 100_000,
        text[:-9],
        text.replace("the plan", "The plan"),
        text.replace('"out"', '"a"'),
    ):
        made.clear()
        kept.write_text(damage)
        for _ in range(2):
            assert main(arguments) == 0 and out.read_text() == "the plan" and len(made) == 1
    config.write_text(config.read_text().replace("256", "512"))
    assert main(arguments) == 0 and len(made) == 2

    def edited(*args: object) -> Answer:  # while the command runs: of which of both was it?
        config.write_text(json.dumps(LLAMA) + " " * len(made))
        return answer()

    monkeypatch.setattr(cli_plan, "_answer", edited)
    config.write_text("{}")
    for count in (3, 4):
        config.write_text("{}")
        assert main(arguments) == 0 and len(made) == count


@pytest.mark.parametrize(
    "changed",
    [
        {"auto_map": {"AutoConfig": "code.Config"}},
        {"configuration_files": ["config.4.0.0.json"]},
        {"backbone": "resnet50"},
        {"text_config": {"encoder": "./folder"}},
        {"model_type": "timm_wrapper"},
    ],
)
def test_a_config_that_names_something_else_is_not_kept(tmp_path: Path, changed: dict[str, Any]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "_name_or_path": "meta-llama/Llama-3-8B"}))
    options = ["plan", "--mesh", "2", "--model"]
    assert answer_key(_parser().parse_args([*options, str(config)])) is not None
    assert answer_key(_parser().parse_args([*options, MODEL])) is None
    config.write_text(json.dumps({**LLAMA, **changed}))
    assert answer_key(_parser().parse_args([*options, str(config)])) is None


def test_what_a_command_reads_is_another_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, profile, package = tmp_path / "config.json", tmp_path / "profile.json", tmp_path / "path"
    config.write_text(json.dumps(LLAMA))
    CPU.save(profile)
    package.mkdir()
    monkeypatch.syspath_prepend(package)
    options = ["plan", "--model", str(config), "--mesh", "2"]
    options += ["--hardware", str(profile)]
    keys = [answer_key(_parser().parse_args(options)) for _ in range(2)]
    assert keys[0] is not None and keys[0] == keys[1]
    keys += [answer_key(_parser().parse_args([*options, *more])) for more in (["--batch", "8"], ["--explain"])]
    profile.write_text(profile.read_text() + "\n")
    keys.append(answer_key(_parser().parse_args(options)))
    monkeypatch.setenv("USE_HUB_KERNELS", "YES")
    keys.append(answer_key(_parser().parse_args(options)))
    (package / "timm-1.0.dist-info").mkdir()
    keys.append(answer_key(_parser().parse_args(options)))
    monkeypatch.setattr(plan_cache, "_sources", lambda: "another")
    keys.append(answer_key(_parser().parse_args(options)))
    assert None not in keys and len(set(keys)) == len(keys) - 1


def test_a_profile_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CPU.save(tmp_path / "mine.json")
    arguments = ["plan", "--model", MODEL, "--mesh", "2", "--compare", "none", "--hardware"]
    assert main([*arguments, str(tmp_path / "mine.json")]) == 0
    own = capsys.readouterr().out
    assert main([*arguments, "cpu"]) == 0
    assert capsys.readouterr().out == own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "abacus"], "unknown hardware 'abacus': expected one of a100, h100"),
        (["--pin", "layers"], "'layers' is not a pin"),
        (["--pin", "layers.9.weight=S0"], "the model has no such parameter or module; did you mean layers."),
        (["--pin", "head.weight=S0,S1"], "gives 2 placements, the mesh has the axes (dp)"),
        (["--pin", "head.weight=S5"], "head.weight cannot lie so; it can lie as R, S0, S1"),
        (["--memory-limit", "much"], "'much' is not a limit"),
        (["--memory-limit", "1kB"], "no plan fits in 1.0 kB per device"),
        (["--seq", "8"], "takes no argument 'seq'"),
        (["--compare", "best"], "unknown preset 'best' in --compare"),
        (["--plan", "best"], "unknown plan 'best'"),
        (["--out", "there/is/no/plan.json"], "there/is/no/plan.json cannot be written"),
        (["--report", "."], ". cannot be written"),
        (["--report", "page.html", "--beside", "dp=3"], "--beside (dp=3) has not the"),
        (["--doublings", "-1"], "--doublings must not be negative, got -1"),
        (["--model", "there/config.json", "--batch", "8"], "there is no file there/config.json"),
    ],
)
def test_what_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--model", MODEL, "--mesh", "dp=2", "--compare", "none", *arguments])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_factory_that_reads_values(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tests.plan_factories:reads_values", "--mesh", "2", "--compare", "none"]
    assert main(arguments) == 1
    assert "cannot run on the meta device" in capsys.readouterr().err
    assert main([*arguments, "--real-tensors"]) == 0
    assert main(["plan", "--model", "tests.plan_factories:fails", "--mesh", "2", "--real-tensors"]) == 1
    printed = capsys.readouterr().err
    assert "fails failed: KeyError: 'width'" in printed and "plan_factories.py:" in printed


def _pinned(saved: str | None) -> list[tuple[dict[str, Any], str, str]]:
    """Compiles with pins; how parameters lie, and what the plan says of itself."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for pins, forbid in (
        ({"layers.*.0.weight": (Replicate(), Shard(0)), "layers.*.2.weight": (None, Shard(-1))}, None),
        ({"head.weight": (Shard(0), Replicate())}, {"layers.*.weight": (Replicate(), Replicate())}),
        (Plan.load(saved) if saved else None, None),
    ):
        torch.manual_seed(7)
        model, (x, y), loss_fn = net(16)
        plain = loss_fn(model(x), y).item()
        compiled = autoparallel.compile(
            model, mesh, loss_fn=loss_fn, plan="data_parallel", pins=pins, forbid=forbid, example_inputs=(x, y)
        )
        assert abs(compiled(x, y).item() - plain) < 1e-12
        lying = {name: str(p.placements) for name, p in compiled.named_parameters()}  # type: ignore[attr-defined]
        # Each rank may ask on its own: nobody else takes part.
        why = compiled.plan.explain("layers.*.0") if not found and mesh.get_rank() == 0 else ""
        found.append((lying, compiled.plan.to_json(), why))
    return found


@pytest.mark.slow
def test_pins_beside_a_preset(tmp_path: Path) -> None:
    """Parameters lie as they are pinned, in ``placements``' own words, whatever the preset; and the loss stays."""
    out = tmp_path / "plan.json"
    main(["plan", "--model", MODEL, "--mesh", "dp=2,tp=2", "--batch", "16", "--plan", "fsdp", "--compare", "none",
          "--hardware", "cpu", "--out", str(out)])  # fmt: skip
    ranks = run_distributed(_pinned, str(out), world_size=4)
    (first, _, why), (second, _, _), (third, text, _) = ranks[0]
    for i in range(2):
        assert first[f"layers.{i}.0.weight"] == "(Replicate(), Shard(dim=0))"
        assert first[f"layers.{i}.2.weight"] == "(Replicate(), Shard(dim=1))", "the preset rules the axis left open"
        assert second[f"layers.{i}.0.weight"] != "(Replicate(), Replicate())"
    assert second["head.weight"] == "(Shard(dim=0), Replicate())"
    plan, saved = Plan.from_json(text), Plan.load(out)
    assert plan.parameters == saved.parameters and plan.operators == saved.operators, "a saved plan is kept whole"
    assert "Shard" in third["head.weight"]
    assert "weight (2 x)" in why and "next best" in why
    assert all(rank[0][0] == first for rank in ranks)


@pytest.mark.wide
def test_a_preset_rules_the_axes_that_pins_leave_open() -> None:
    """FSDP over one axis and the preset's tensor parallelism over the other: what is sharded there is used so."""

    def planned(pins: dict[str, str]) -> Plan:
        model, inputs, loss_fn = net(16)
        axes, found = (("dp", 2), ("tp", 2)), parse_pins(pins, None)
        request = Request(axes=axes, profile=CPU, loss_fn=loss_fn, plan="tensor_parallel", pins=found)
        return draft(model, call_of(inputs, with_target=True), request).plan

    plain, pinned = planned({}), planned({"layers.*.weight": "S0,*"})
    weights = [name for name in plain.parameters if name.startswith("layers") and name.endswith("weight")]
    assert len(weights) == 4
    for name in weights:
        before, after = plain.parameters[name].at_rest.split(","), pinned.parameters[name].at_rest.split(",")
        assert before[0] == "I" and after[0] == "S0" and before[1][0] == after[1][0] == "S"
    linears = {key: modes for key, modes in pinned.operators.items() if "aten.linear" in key and "layers" in key}
    assert {modes[1] for modes in linears.values()} == {"shard:n", "shard:k"}, "no weight is gathered over tp"
    assert linears == {key: plain.operators[key] for key in linears}


@pytest.mark.wide
def test_an_edit_elsewhere_keeps_a_pinned_plan() -> None:
    def planned(model: nn.Module, **options: Any) -> Plan:
        request = Request(axes=(("dp", 2), ("tp", 2)), profile=CPU, loss_fn=net()[2], **options)
        return draft(model, call_of(net(16)[1], with_target=True), request).plan

    before, _, _ = net()
    saved = planned(before, plan="fsdp")
    edited, _, _ = net()
    edited.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    free = planned(edited)
    kept = planned(edited, pins=Pins(plan=Plan.from_json(saved.to_json())))
    same = [name for name in saved.parameters if name in kept.parameters]
    assert len(same) == 8, "all but the head's"
    assert all(kept.parameters[name] == saved.parameters[name] for name in same)
    assert any(free.parameters[name] != saved.parameters[name] for name in same), "which is not what auto would choose"
    changes = saved.diff(kept)
    assert "different models" in changes and "(absent)" in changes and "head.0" in changes
    assert "layers.0.0.weight" not in changes
    assert saved.diff(Plan.from_json(saved.to_json())) == "The plans decide the same."
    moved = planned(before, plan="data_parallel")
    text = saved.diff(moved)
    assert "(dp=2, tp=2), fsdp  ->  (dp=2, tp=2), data_parallel" in text
    assert "layers.0-1" in text and "memory per device" in text
