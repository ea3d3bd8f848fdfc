"""Agreement of a weightless sample with the user's module, number by number.

The tolerance of a quantity comes from the network itself: what a relative change of all weights by δ makes of it, plus
δ times its size. Gradients and updates have a floor, because some are pure rounding, such as those of a key's bias.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from limitformer.witness.real import GRADIENT, LOSS, MODULE, OUTPUT, UPDATE, Quantity, Sketch, Values

DELTA = {torch.float64: 1e-10, torch.float32: 1e-6}
OF_CASTS = 1e-4  # relative difference of outputs of modules that casts to float32 may make in float64
MULTIPLE = 100.0  # of the tolerance; measured on right passes: at most 3.5, on misread ones: above 120
HIDDEN = 1.0  # relative difference that says nothing if its tolerance allows it
FLOOR = 1e-4  # of all gradients together, below which one is rounding
KINDS = (OUTPUT, LOSS, MODULE, GRADIENT, UPDATE)
WITNESSED, DRAWN, NOT_WITNESSED = "witnessed", "drawn", "not witnessed"


@dataclass(frozen=True)
class Witness:
    """A comparison with the user's own module.

    Attributes:
        status: "witnessed"; "drawn", if the model's own code draws the networks; or "not witnessed".
        reason: what differs first or is not understood, or why nothing was compared.
        number_format: float32 or float64.
        parameters: of the module that was compared.
        reduced: whether it is a smaller copy of the model.
        steps: of the optimiser that were compared.
        optimizer: whose they were, in words.
        counts: how many modules, weights or outputs of each kind were compared.
        hidden: how many quantities have a tolerance as large as themselves, so that nothing is said about them.
        differences: the largest relative difference of each kind.
        ratio: the largest difference as a multiple of its tolerance; above `MULTIPLE` it differs.
        identity: the largest relative error of U Dᵀ = Z Bᵀ, the rounding error of the simulated pass.
        seconds: the time of the comparison.
    """

    status: str
    reason: str = ""
    number_format: str = ""
    parameters: int = 0
    reduced: bool = False
    steps: int = 0
    optimizer: str = "your optimiser"
    counts: dict[str, int] = field(default_factory=dict)
    hidden: int = 0
    differences: dict[str, float] = field(default_factory=dict)
    ratio: float = 0.0
    identity: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return what was compared, in one sentence."""
        if self.status == DRAWN:
            return f"drawn: whole networks, because {self.reason}"
        if self.status != WITNESSED:
            return f"{self.status}: {self.reason}"
        what = f"the same loss and {self.counts[GRADIENT]} gradients" if LOSS in self.counts else "the same output"
        steps = f", and {self.steps} step{'s' if self.steps > 1 else ''} of {self.optimizer}" if self.steps else ""
        copy = f" of a copy with {self.parameters:,} parameters" if self.reduced else ""
        hidden = f"; rounding hides {self.hidden} numbers" if self.hidden else ""
        values = [each for kind, each in self.differences.items() if kind in (OUTPUT, LOSS, GRADIENT, UPDATE)]
        return (
            f"witnessed: your own module in plain PyTorch gives {what}{copy}{steps} ({self.number_format}, largest "
            f"difference {max(values, default=0.0):.0e}{hidden})"
        )

    def in_words(self, samples: int) -> str:
        """Return the sentence for a report of some networks."""
        networks = "1 whole network" if samples == 1 else f"{samples} whole networks"
        return str(self).replace("drawn: whole networks", f"drawn: {networks}", 1)

    @property
    def may_be_casts(self) -> bool:
        """Whether the rounding of casts to float32 may have made the difference: in float64, from small ones."""
        within = 0.0 < self.differences.get(MODULE, 0.0) < OF_CASTS
        return self.status == DRAWN and self.number_format == "float64" and within

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON holds it."""
        return {**asdict(self), "multiple": MULTIPLE, "sentence": str(self)}


def compare(simulated: Values, real: Values, disturbed: Values, delta: float, **about: Any) -> Witness:
    """Compare a simulated pass, or training, with the real one, of which `disturbed` has weights changed by δ."""
    scales = scales_of(real)
    ratios: dict[Quantity, float] = {}
    relative: dict[Quantity, float] = {}
    hidden = set[Quantity]()
    for key, each in real.items():
        ours, other = simulated.get(key), disturbed.get(key)
        if ours is None or not (math.isfinite(each.size) and math.isfinite(ours.size)):
            same = not each.size > 0 if ours is None else math.isfinite(each.size) == math.isfinite(ours.size)
            ratios[key] = 0.0 if same else math.inf
            continue
        apart = ours.away(each)
        tolerance = (0.0 if other is None else other.away(each)) + delta * scales[key]
        if MULTIPLE * tolerance > HIDDEN * scales[key] > 0:
            hidden.add(key)
            continue
        ratios[key] = apart / tolerance if apart and tolerance else math.inf if apart else 0.0
        relative[key] = apart / scales[key] if scales[key] else 0.0
    for key, each in simulated.items():
        if key not in real and each.size > 0:
            ratios[key] = math.inf
    wrong = [key for key, ratio in ratios.items() if ratio > MULTIPLE]
    status, reason = (DRAWN, first_of(wrong, simulated, real, scales)) if wrong else (WITNESSED, "")
    first = min((key.number for key in hidden if key.kind == OUTPUT), default=math.inf)
    about["steps"] = int(min(about.get("steps", 0), max(first - 1, 0)))  # the later ones could not be compared
    differences: dict[str, float] = {}
    for key, difference in relative.items():
        if key.kind == MODULE or key.number < first:
            differences[key.kind] = max(differences.get(key.kind, 0.0), difference)
    if not wrong and first == 0:
        status, reason = NOT_WITNESSED, f"weights that change by {delta:g} change its numbers too much to compare them"
    return Witness(
        status=status,
        reason=reason,
        counts={kind: len(names) for kind in KINDS if (names := {key.name for key in real if key.kind == kind})},
        hidden=len(hidden),
        differences=differences,
        ratio=max(ratios.values(), default=0.0),
        **about,
    )


def scales_of(real: Values) -> dict[Quantity, float]:
    """Return the size of each quantity, at least the floor of its kind in its step."""
    gradients, updates = dict[int, float](), dict[int, float]()
    for key, each in real.items():
        if key.kind == GRADIENT:
            gradients[key.number] = math.hypot(gradients.get(key.number, 0.0), each.size)
        elif key.kind == UPDATE:
            updates[key.number] = max(updates.get(key.number, 0.0), each.size / max(each.entries, 1) ** 0.5)

    def scale(key: Quantity, each: Sketch) -> float:
        if key.kind == GRADIENT:
            return max(each.size, FLOOR * gradients[key.number])
        return max(each.size, updates[key.number] * each.entries**0.5) if key.kind == UPDATE else each.size

    return {key: scale(key, each) for key, each in real.items()}


def first_of(wrong: list[Quantity], simulated: Values, real: Values, scales: dict[Quantity, float]) -> str:
    """Return in words what differs first: a module's output, else a gradient, else an update."""
    order = list(real)
    modules = [key for key in wrong if key.kind == MODULE and key in real]
    gradients = [key for key in wrong if key.kind == GRADIENT]
    updates = [key for key in wrong if key.kind == UPDATE]
    others = [key for key in wrong if key.kind in (OUTPUT, LOSS)]
    if modules:
        key = min(modules, key=order.index)
        what = f"the output of {key.name}"
    elif gradients and not any(key.number <= gradients[0].number for key in updates):
        first = min(key.number for key in gradients)
        key = [each for each in gradients if each.number == first][-1]  # errors spread from the last to the first
        what = f"the gradient of {key.name}"
    elif updates:
        first = min(key.number for key in updates)
        key = max(
            (each for each in updates if each.number == first),
            key=lambda each: difference(each, simulated, real, scales),
        )
        what = f"the update of {key.name}"
    else:
        key = (others or wrong)[0]
        what = f"the {key.kind}"
    if key not in simulated or key not in real:
        return f"{what} is only in {'PyTorch' if key in real else 'the simulation'}"
    step = f" in step {key.number}" if key.kind in (UPDATE, GRADIENT) and key.number else ""
    return f"on the same weights {what} differs by {difference(key, simulated, real, scales):.2g} of its size{step}"


def difference(key: Quantity, simulated: Values, real: Values, scales: dict[Quantity, float]) -> float:
    if key not in simulated or key not in real:
        return math.inf
    return simulated[key].away(real[key]) / max(scales.get(key, 0.0), 1e-300)
