"""A Zarr folder of unknown origin neither runs code nor reads the user's other files.

Right: every pickled filter, codec or fill value is refused, and so is a chunk that is a link out of the folder. The
link was read once.
"""

import base64
import json
import pickle
from pathlib import Path

import pytest

import limitformer as lf

V2 = {"zarr_format": 2, "shape": [2], "chunks": [2], "compressor": None, "order": "C", "fill_value": 0, "filters": None}


class Bad:
    def __reduce__(self):
        return open, ("ran", "w")


def write(name, about, chunk):
    array = Path(name) / "v"
    array.mkdir(parents=True)
    (Path(name) / ".zgroup").write_text('{"zarr_format": 2}')
    (array / ".zarray").write_text(json.dumps(V2 | {"dtype": "<f8"} | about))
    (array / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["x"]}')
    (array / "0").write_bytes(chunk)


def verify():
    code = pickle.dumps(Bad())
    write("filter.zarr", {"dtype": "|O", "filters": [{"id": "pickle"}]}, code)
    write("number.zarr", {"filters": [{"id": "pickle"}]}, code)
    write("compressor.zarr", {"compressor": {"id": "pickle"}}, code)
    fill = base64.b64encode(code).decode()
    write("fill.zarr", {"dtype": "|O", "filters": [{"id": "pickle"}], "fill_value": fill}, b"")
    write("huge.zarr", {"shape": [10**14], "chunks": [10**6]}, b"")
    write("link.zarr", {}, b"")
    Path("secret").write_bytes(b"secret01secret02")
    Path("link.zarr/v/0").unlink()
    Path("link.zarr/v/0").symlink_to(Path("secret").absolute())
    for path in sorted(Path().glob("*.zarr")):
        with pytest.raises(lf.InputError):
            lf.load(path)
    assert not Path("ran").exists()
