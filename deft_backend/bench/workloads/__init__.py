"""Workloads: traffic that `deft ab` replays. One module each; :data:`WORKLOADS` names them."""

from deft_backend.bench.workloads.base import Request, RequestPlan, Workload, WorkloadError
from deft_backend.bench.workloads.documents import DocumentQuestions
from deft_backend.bench.workloads.few_shot import FewShot
from deft_backend.bench.workloads.parallel_samples import ParallelSamples
from deft_backend.bench.workloads.tree_of_thoughts import TreeOfThoughts
from deft_backend.bench.workloads.unshared import Unshared

WORKLOADS = (
    "few-shot",
    "parallel-samples",
    "document-questions",
    "tree-of-thoughts",
    "unshared",
)

__all__ = [
    "WORKLOADS",
    "DocumentQuestions",
    "FewShot",
    "ParallelSamples",
    "Request",
    "RequestPlan",
    "TreeOfThoughts",
    "Unshared",
    "Workload",
    "WorkloadError",
]
