"""Workloads: traffic that `deft ab` replays. One module each; :data:`WORKLOADS` names them."""

from deft_backend.tools.ab.workloads.document_questions import DocumentQuestions
from deft_backend.tools.ab.workloads.few_shot import FewShot
from deft_backend.tools.ab.workloads.parallel_samples import ParallelSamples
from deft_backend.tools.ab.workloads.rollout import Rollout
from deft_backend.tools.ab.workloads.tree_of_thoughts import TreeOfThoughts
from deft_backend.tools.ab.workloads.unshared import Unshared
from deft_backend.tools.harness.request_plan import Request, RequestPlan, Workload, WorkloadError

WORKLOADS = (
    "few-shot",
    "parallel-samples",
    "document-questions",
    "tree-of-thoughts",
    "unshared",
)
"""The workloads that run if the user names none."""

ROLLOUTS = {f"rollout-{samples}": samples for samples in (8, 16, 64)}
"""Names of the rollout workloads, with the samples of one prompt."""

TRACE = "trace"
"""The workload that replays a trace of arrivals."""

CHOICES = (*WORKLOADS, *ROLLOUTS)

__all__ = [
    "CHOICES",
    "ROLLOUTS",
    "TRACE",
    "WORKLOADS",
    "DocumentQuestions",
    "FewShot",
    "ParallelSamples",
    "Request",
    "RequestPlan",
    "Rollout",
    "TreeOfThoughts",
    "Unshared",
    "Workload",
    "WorkloadError",
]
