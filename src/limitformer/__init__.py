"""limitformer: what a Transformer does at depth, before you train it."""

from limitformer.engine import Interrupted as Interrupted
from limitformer.engine import recording_size as recording_size
from limitformer.engine import simulate as simulate
from limitformer.errors import InputError as InputError
from limitformer.errors import MissingExtraError as MissingExtraError
from limitformer.errors import NoLimitError as NoLimitError
from limitformer.limits import CovarianceFlow as CovarianceFlow
from limitformer.limits import CovarianceLimit as CovarianceLimit
from limitformer.limits import TokenLimit as TokenLimit
from limitformer.limits import limit as limit
from limitformer.limits.overlap import OverlapDiffusion as OverlapDiffusion
from limitformer.limits.overlap import overlap as overlap
from limitformer.models import GELU as GELU
from limitformer.models import Elementwise as Elementwise
from limitformer.models import Gated as Gated
from limitformer.models import GeGLU as GeGLU
from limitformer.models import HybridTransformer as HybridTransformer
from limitformer.models import LayerNorm as LayerNorm
from limitformer.models import Mixing as Mixing
from limitformer.models import OneMatrix as OneMatrix
from limitformer.models import RadialNorm as RadialNorm
from limitformer.models import ReLU as ReLU
from limitformer.models import RMSNorm as RMSNorm
from limitformer.models import ShapedAttention as ShapedAttention
from limitformer.models import ShapedReLU as ShapedReLU
from limitformer.models import SiLU as SiLU
from limitformer.models import SoftmaxAttention as SoftmaxAttention
from limitformer.models import SquaredReLU as SquaredReLU
from limitformer.models import Start as Start
from limitformer.models import StochasticTransformer as StochasticTransformer
from limitformer.models import SwiGLU as SwiGLU
from limitformer.models import Tanh as Tanh
from limitformer.models import Transformer as Transformer
from limitformer.models import equicorrelated as equicorrelated
from limitformer.models import from_covariance as from_covariance
from limitformer.models import from_json as from_json
from limitformer.models import from_text as from_text
from limitformer.models import from_tokens as from_tokens
from limitformer.models import to_json as to_json
from limitformer.outcomes import outcomes as outcomes
from limitformer.outputs import outputs as outputs
from limitformer.phase import phase_diagram as phase_diagram
from limitformer.results import correlation as correlation
from limitformer.results import load as load
from limitformer.results import package_version
from limitformer.results import save as save
from limitformer.sweep import Sweep as Sweep
from limitformer.sweep import compute_sweep as compute_sweep
from limitformer.sweep import load_sweep as load_sweep
from limitformer.sweep import read_sweep as read_sweep
from limitformer.sweep import run_sweep as run_sweep

__version__ = package_version()


def __getattr__(name: str) -> object:
    """What stands on torch is imported when it is first asked for: it is heavy and optional."""
    home = {"shapes": "weightless", "check": "checking", "design": "checking"}.get(name, name)
    if home in ("nn", "hf", "train", "weightless", "checking"):
        import importlib

        try:
            module = importlib.import_module(f"limitformer.{home}")
        except MissingExtraError as error:
            raise AttributeError(str(error)) from error  # so that `hasattr` says no
        return module if home == name else getattr(module, name)
    raise AttributeError(f"module 'limitformer' has no attribute {name!r}")
