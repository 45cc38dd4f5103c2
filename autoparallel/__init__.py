"""autoparallel: a compiler that makes a plain PyTorch model train on a whole mesh."""

from autoparallel.api import compile
from autoparallel.graph.captured import CaptureError
from autoparallel.plan import Plan, PlanError
from autoparallel.processes import ProcessError
from autoparallel.report.verification import VerifyError, VerifyReport
from autoparallel.rules import RuleError, register_rule
from autoparallel.runtime.agreement import RankMismatchError
from autoparallel.runtime.limits import ClipGradNorm
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.pipeline import PipelineError
from autoparallel.staging import Pipeline
from autoparallel.traffic import Traffic, count_traffic
from autoparallel.verify import verify

__version__ = "0.1.0"
__all__ = [
    "CaptureError", "ClipGradNorm", "ParallelModule", "Pipeline", "PipelineError", "Plan", "PlanError", "ProcessError",
    "RankMismatchError", "RuleError", "Traffic", "VerifyError", "VerifyReport", "compile", "count_traffic",
    "register_rule", "verify",
]  # fmt: skip
