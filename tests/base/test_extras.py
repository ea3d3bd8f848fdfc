"""Imports of extras name the missing package."""

from importlib import import_module

import pytest

from limitformer.base.errors import MissingExtraError
from limitformer.base.extras import of_extra


def test_missing_package_is_named_with_its_extra():
    with pytest.raises(MissingExtraError, match=r"^This needs no_such_package, .*limitformer\[hf\]"), of_extra("hf"):
        import_module("no_such_package.inner")


def test_missing_module_of_limitformer_raises_module_not_found():
    with pytest.raises(ModuleNotFoundError), of_extra("hf"):
        import_module("limitformer.no_such_module")
