r"""The change of the stream by the first step of one kind of weight alone.

Weights whose names differ in numbers only are a kind; biases, gains and all other vectors are one kind together. The
gradients are those of the whole network, and the other kinds keep their values. The change is |X' − X|/|X| at the
last layer, of the output for a module without blocks.
"""

from dataclasses import replace

from limitformer.checking.curves import kind_and_block
from limitformer.stepping.rules import StepRules
from limitformer.stepping.simulate import Training

ALL, VECTORS = "all weights", "vectors"


def kinds_of(training: Training) -> dict[str, list[str]]:
    """Return the names of the trained weights of each kind, of which the first is that of all weights."""
    result: dict[str, list[str]] = {ALL: list(training.network.trained)}
    for name, dimensions in training.network.trained.items():
        kind = kind_and_block(name)[0].removesuffix(".weight") if dimensions > 1 else VECTORS
        result.setdefault(kind, []).append(name)
    return result


def stream_change(training: Training, rules: StepRules, sample: int, names: list[str]) -> float:
    """Return the relative change of the stream of one network if only the weights of these names take a step."""
    still = {name: (0.0, 1.0, 1.0) for name in training.network.trained if name not in names}
    every = training.of_network(sample)
    batches = replace(every, of_steps=every.of_steps[:2], unseen=None, noisy=False)
    arrays = replace(training, batches=batches, batches_at=None).trajectory(rules.with_factors(still), sample).arrays()
    if "stream_change" in arrays:
        return float(arrays["stream_change"][0, 1, -1])
    return float(arrays["output_change"][0, 1] / arrays["output"][0, 0])
