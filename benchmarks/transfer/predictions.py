"""Predicted effects at four times the width, against networks of that width that are drawn whole.

python -m benchmarks.transfer.predictions benchmarks/transfer/results.jsonl: the twelve settings of `settings.json`,
which was written before the first of them ran; a line each. A setting that is in the file is not repeated. The first
five of `results.jsonl` ran before tables of embeddings were a measure of the verdict.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import limitformer as lf

SETTINGS = json.loads((Path(__file__).parent / "settings.json").read_text(encoding="utf-8"))


def outcome(setting: dict[str, Any]) -> dict[str, Any]:
    """Return each measure of the verdict: low, predicted and high, and the geometric mean of the drawn networks."""
    model, widths, target = SETTINGS["models"][setting["model"]], setting["widths"], setting["target"]
    options = {key: setting[key] for key in ("rule", "optimizer", "rate", "steps")}
    options |= {"base": widths[0], "progress": False, "witness": False}
    tokens, samples = SETTINGS["tokens"], SETTINGS["samples"]
    result = lf.transfer(model, {"width": widths}, tokens, target=target, samples=samples, seed=0, **options)
    drawn = lf.transfer(
        model, {"width": [widths[0], target]}, tokens, samples=SETTINGS["drawn"], seed=1, draw="always", **options
    )
    measures = {}
    for name in result.deciding:
        band, seen = result.prediction(name), float(np.exp(np.log(drawn.measures[name][:, -1]).mean()))
        measures[name] = [band.low, band.value, band.high, seen]
    inside = all(low <= seen <= high for low, _, high, seen in measures.values())
    return {"setting": setting, "inside": inside, "verdict": result.transfers, "measures": measures}


def main(path: Path) -> None:
    """Run the settings that are not in the file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = [json.loads(line)["setting"] for line in lines]
    for setting in SETTINGS["settings"]:
        if setting not in known:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome(setting)) + "\n")
    every = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    print(f"{sum(each['inside'] for each in every)} of {len(every)} settings inside")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
