"""Experiments of both papers that train networks, on the Trainer of Hugging Face."""

from limitformer.errors import MissingExtraError

try:
    import accelerate as _accelerate  # noqa: F401
    import datasets as _datasets  # noqa: F401
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "transformers", "train") from error
