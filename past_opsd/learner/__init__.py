"""Terms become one optimizer step. The learner knows no method.

`plan` sorts terms into micro-batches, `step` makes the gradient and moves an adapter, `diagnostics` keeps what is
logged.
"""

from past_opsd.learner.diagnostics import POSITIONS, Log
from past_opsd.learner.plan import Bundle, Path, bundle, gather_paths, micro_batches
from past_opsd.learner.step import Learner, NonFiniteError, learning_rate, stack_jobs

__all__ = [
    "POSITIONS",
    "Bundle",
    "Learner",
    "Log",
    "NonFiniteError",
    "Path",
    "bundle",
    "gather_paths",
    "learning_rate",
    "micro_batches",
    "stack_jobs",
]
