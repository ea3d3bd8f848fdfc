"""Initialisation, weight by weight: a module compared with the law that its code draws."""

from limitformer.initialisation.report import InitialisationReport as InitialisationReport
from limitformer.initialisation.weight_by_weight import check_initialisation as check_initialisation
from limitformer.initialisation.weight_by_weight import initialisation as initialisation
