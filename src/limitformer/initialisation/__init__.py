"""Initialisation, weight by weight: what a module holds beside the law that its code draws."""

from limitformer.initialisation.report import InitialisationReport as InitialisationReport
from limitformer.initialisation.weight_by_weight import check_initialisation as check_initialisation
from limitformer.initialisation.weight_by_weight import initialisation as initialisation
