"""The report on a module's initialisation: a table, findings, and a screenful of text."""

from dataclasses import dataclass

import numpy as np
import xarray as xr

from limitformer.initialisation.findings import Finding

SHOWN = 5  # findings in the text
COLUMNS = ("law", "count", "mean", "std", "kurtosis", "ks", "p")


@dataclass(frozen=True)
class Weight:
    """What one parameter holds. `ks` is its distance from the law, `p` the smallest corrected p-value."""

    name: str
    shape: tuple[int, ...]
    law: str
    count: int
    mean: float
    std: float
    kurtosis: float
    ks: float
    p: float
    findings: tuple[str, ...]


@dataclass(frozen=True)
class InitialisationReport:
    """What a module holds beside the law that its code draws, weight by weight.

    `trained`: nearly all weights differ from the law in ways that no known bug explains, so that they are not reported
    one by one. `tests` is the number of tests that the p-values are corrected for.
    """

    name: str
    level: float
    weights: tuple[Weight, ...]
    findings: tuple[Finding, ...]
    trained: bool
    lawful: bool
    differing: int
    tests: int

    @property
    def summary(self) -> str:
        """One line."""
        number = f"{len(self.weights)} weights"
        if self.trained:
            most = "all" if self.differing == len(self.weights) else self.differing
            return f"{most} of {number} differ from the law: a trained model, or another initialisation"
        if self.findings:
            bugs = list(dict.fromkeys(each.bug for each in self.findings if each.bug))
            found = max(self.differing, len({name for each in self.findings for name in each.names}))
            where = f"{found} of {number} differ from the law" if self.lawful else f"findings in {number}"
            return ": ".join([where, ", ".join(bugs)]) if bugs else where
        return f"all {number} as the law says" if self.lawful else f"nothing found in {number}, without a law"

    def dataset(self) -> xr.Dataset:
        """One entry for each weight: law, count, mean, std, kurtosis, ks, p, shape, findings."""
        rows = {key: np.array([getattr(each, key) for each in self.weights]) for key in COLUMNS}
        rows["shape"] = np.array(["×".join(map(str, each.shape)) for each in self.weights])
        rows["findings"] = np.array([", ".join(each.findings) for each in self.weights])
        attributes = {"name": self.name, "summary": self.summary, "level": self.level, "tests": self.tests}
        return xr.Dataset(
            {key: ("weight", values) for key, values in rows.items()},
            {"weight": [each.name for each in self.weights]},
            attributes,
        )

    def __str__(self) -> str:
        """The summary, and at most a screenful of findings."""
        lines = [f"{self.name}: {self.summary}"]
        lines += [f"  {each}" for each in self.findings[:SHOWN]]
        rest = len(self.findings) - SHOWN
        return "\n".join([*lines, f"  and {rest} more"] if rest > 0 else lines)
