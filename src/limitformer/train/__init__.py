"""Experiments of both papers that train networks, on the Trainer of Hugging Face."""

from importlib.util import find_spec as _find_spec

from limitformer.base.errors import MissingExtraError

# All of the extra, by the names that `import` and `pip` have for them: some are imported late, in the middle of a run.
if _missing := [
    package
    for module, package in {
        "torch": "torch",
        "transformers": "transformers",
        "accelerate": "accelerate",
        "datasets": "datasets",
        "tokenizers": "tokenizers",
        "pyarrow": "pyarrow",
        "tensorboard": "tensorboard",
        "sklearn": "scikit-learn",
        "PIL": "pillow",
        "filelock": "filelock",
    }.items()
    if _find_spec(module) is None
]:
    raise MissingExtraError(_missing[0], "train")

from limitformer.train.callbacks import Correlation as Correlation
from limitformer.train.callbacks import Entropy as Entropy
from limitformer.train.callbacks import Gains as Gains
from limitformer.train.callbacks import GradientNorms as GradientNorms
from limitformer.train.callbacks import ShapingSchedule as ShapingSchedule
from limitformer.train.data.masking import MaskedCollator as MaskedCollator
from limitformer.train.harness import read_runs as read_runs
from limitformer.train.harness import train as train
from limitformer.train.log import Log as Log
from limitformer.train.log import read_log as read_log
from limitformer.train.plan import Plan as Plan
