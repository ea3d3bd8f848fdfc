"""Packages of an extra that is not installed."""

import pytest

from limitformer.base.errors import MissingExtraError
from limitformer.base.extras import require_packages


def test_missing_package_is_named_with_its_extra():
    require_packages("hf", "numpy")
    with pytest.raises(MissingExtraError, match=r"^This needs no_such_package, .*limitformer\[hf\]"):
        require_packages("hf", "numpy", "no_such_package")
