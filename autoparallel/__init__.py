"""autoparallel: a compiler that makes a plain PyTorch model train on a whole mesh."""

from autoparallel.api import compile
from autoparallel.checkpoint.folder import CheckpointError
from autoparallel.checkpoint.loading import Checkpoint, latest
from autoparallel.comm.traffic import Traffic, count_traffic
from autoparallel.comm.waiting import RankMismatchError
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.graph.errors import CaptureError
from autoparallel.plan import Plan
from autoparallel.planner.request.presets import Preset
from autoparallel.rules import RuleError, register_rule
from autoparallel.runtime.meter import Meter
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.norms.limits import ClipGradNorm
from autoparallel.runtime.programs.pipeline import PipelineError
from autoparallel.runtime.rerun import Finding, Rerun
from autoparallel.runtime.steps.cuts import register_optimizer
from autoparallel.tools.launch import launch
from autoparallel.tools.parity.report import VerifyError, VerifyReport
from autoparallel.tools.processes import ProcessError
from autoparallel.tools.verify import verify

__version__ = "0.1.0"
__all__ = [
    "CaptureError", "Checkpoint", "CheckpointError", "ClipGradNorm", "Finding", "Meter", "ParallelModule", "Pipeline",
    "PipelineError", "Plan", "PlanError", "Preset", "ProcessError", "RankMismatchError", "Rerun", "RuleError",
    "Traffic", "VerifyError", "VerifyReport", "compile", "count_traffic", "latest", "launch", "register_optimizer",
    "register_rule", "verify",
]  # fmt: skip
