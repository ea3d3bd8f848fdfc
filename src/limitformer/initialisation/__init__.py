"""Initialisation: a module compared with the law that its code draws, and two builds of one model."""

from limitformer.base.extras import require_packages as _require_packages

_require_packages("torch", "torch", "threadpoolctl")

# isort: split
from limitformer.initialisation.build_report import KINDS as KINDS
from limitformer.initialisation.build_report import BuildComparison as BuildComparison
from limitformer.initialisation.build_report import ComparedTensor as ComparedTensor
from limitformer.initialisation.build_report import Difference as Difference
from limitformer.initialisation.comparison import compare as compare
from limitformer.initialisation.report import InitialisationReport as InitialisationReport
from limitformer.initialisation.weight_by_weight import check_initialisation as check_initialisation
from limitformer.initialisation.weight_by_weight import initialisation as initialisation
