"""Experiments of both papers that train networks, on the Trainer of Hugging Face."""

from limitformer.errors import MissingExtraError

try:
    import accelerate as _accelerate  # noqa: F401
    import datasets as _datasets  # noqa: F401
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "transformers", "train") from error

from limitformer.train.callbacks import Correlation as Correlation
from limitformer.train.callbacks import Entropy as Entropy
from limitformer.train.callbacks import Gains as Gains
from limitformer.train.callbacks import GradientNorms as GradientNorms
from limitformer.train.callbacks import ShapingSchedule as ShapingSchedule
from limitformer.train.harness import read_runs as read_runs
from limitformer.train.harness import train as train
from limitformer.train.log import Log as Log
from limitformer.train.log import read_log as read_log
from limitformer.train.masking import MaskedCollator as MaskedCollator
from limitformer.train.plan import Plan as Plan
