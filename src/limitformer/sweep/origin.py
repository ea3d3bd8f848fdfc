"""The code, the numerical libraries and the processor that make a cell's numbers.

The instructions of a processor change the order of a sum, and so its last bits.
"""

import hashlib
from functools import cache

import numpy as np

from limitformer.base.version import package_version


@cache
def origin() -> str:
    """Return versions and processor of this process in one line."""
    import numba  # slow to import, and not needed to read a store

    return f"limitformer {package_version()}, numpy {np.__version__}, numba {numba.__version__}, {processor()}"


def processor() -> str:
    """Return the name of the processor that kernels are compiled for, and a fingerprint of its features."""
    from numba.core.registry import cpu_target

    system, name, features = cpu_target.target_context.codegen().magic_tuple()
    return f"{name}-{hashlib.sha256(f'{system} {features}'.encode()).hexdigest()[:8]}"
