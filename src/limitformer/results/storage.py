"""Save and load results, as NetCDF or Zarr.

The attribute `sha256` of a saved file is the `checksum` of what it holds, so that damage is noticed.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, first_line, printable, require
from limitformer.base.files import check_regular, check_writable, file_path, write_whole
from limitformer.base.memory import check_scratch

NETCDF3_LIMIT = 2**32 - 4  # bytes of one variable
CHECKSUM = "sha256"  # the first attribute: a damaged number of attributes cuts the last ones


def save(dataset: xr.Dataset, path: str | Path) -> Path:
    """Save as NetCDF (`.nc`) or Zarr (`.zarr`), whole or not at all, and return the path.

    Raises:
        InputError: another ending, a folder that cannot be written, a variable too large for NetCDF, or data that the
            format cannot store.
    """
    path = file_path(path)
    require(isinstance(dataset, xr.Dataset), f"A Dataset can be saved; got {type(dataset).__name__}.")
    check_target(path)

    def write(temporary: Path) -> None:
        if path.suffix == ".zarr":
            signed(dataset).to_zarr(temporary, mode="w", consolidated=False, zarr_format=2)
        else:
            write_netcdf(dataset, temporary)

    try:
        write_whole(path, write)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path.name} cannot store some of the data: {first_line(error)}") from error
    return path


def write_netcdf(dataset: xr.Dataset, path: Path) -> None:
    largest = max((variable.nbytes for variable in dataset.variables.values()), default=0)
    require(largest <= NETCDF3_LIMIT, f"A variable of {largest:,} bytes does not fit NetCDF; save it as .zarr.")
    attributes = {name: netcdf_attribute(value) for name, value in dataset.attrs.items()}
    copy = dataset.drop_attrs(deep=False).assign_attrs(attributes)
    signed(copy).to_netcdf(path, engine="scipy", format="NETCDF3_64BIT")


def netcdf_attribute(value: Any) -> Any:
    """Return `value`, as text if it is a whole number that does not fit the 32 bits of a NetCDF attribute.

    Raises:
        InputError: it is a list of texts, which NetCDF does not have.
    """
    texts = isinstance(value, list | tuple) and any(isinstance(each, str) for each in value)
    require(
        not texts, f"NetCDF has no attribute that is a list of texts; got {value!r:.60}. Nearest: save it as .zarr."
    )
    return str(value) if isinstance(value, int | np.integer) and not -(2**31) <= value < 2**31 else value


def signed(dataset: xr.Dataset) -> xr.Dataset:
    """Return the dataset with its checksum as the first attribute."""
    return dataset.drop_attrs(deep=False).assign_attrs({CHECKSUM: checksum(dataset)} | without_checksum(dataset.attrs))


def without_checksum(attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in attributes.items() if name != CHECKSUM}


def checksum(dataset: xr.Dataset) -> str:
    """Return the SHA-256 of the names, dimensions, types, values and attributes, the same before and after saving."""
    digest = hashlib.sha256(json.dumps(plain_attributes(without_checksum(dataset.attrs))).encode())
    for name, variable in sorted(dataset.variables.items(), key=lambda item: str(item[0])):
        values = stored_values(variable.values)
        about = [str(name), name in dataset.coords, variable.dims, variable.shape, values.dtype.str]
        digest.update(json.dumps([about, plain_attributes(variable.attrs)]).encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def stored_values(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values in the type that stands for all types as which a format may load them."""
    if values.dtype.kind in "iu":
        return values.astype("<i8")
    if values.dtype.kind == "f":  # formats keep no payload of NaN
        return np.where(np.isnan(values), np.nan, values).astype(values.dtype.newbyteorder("<"))
    if values.dtype.kind in "mM":
        return values.astype(f"{values.dtype.kind}8[ns]").astype("<i8")
    if values.dtype.kind in "OUST":
        texts = values.ravel().tolist()
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("an array of neither numbers nor texts")
        return np.frombuffer(json.dumps(texts).encode(), np.uint8)
    return values


def plain_attributes(attributes: Mapping[Any, Any]) -> list[Any]:
    """Return the attributes for JSON; NetCDF loads a value as a list of one, and true as 1."""
    arrays = {str(name): np.ravel(value) for name, value in attributes.items()}
    return sorted([name, (each + 0 if each.dtype == bool else each).tolist()] for name, each in arrays.items())


def check_target(path: Path) -> None:
    """Raise `InputError` unless data can be saved there: known ending, writable, and no foreign file or folder."""
    check_ending(file_path(path))
    ours = path.suffix == ".zarr" and any((path / name).exists() for name in (".zgroup", "zarr.json"))
    require(ours or not path.is_dir(), f"Cannot write {path}: a folder that limitformer did not save is in the way.")
    in_the_way = path.suffix == ".zarr" and path.is_file()
    require(not in_the_way, f"Cannot write {path}: a file is in the way of the Zarr folder.")
    check_writable(path.parent)


def check_ending(path: Path) -> None:
    known = path.suffix in (".nc", ".zarr")
    require(known, f"Data are saved as .nc (NetCDF) or .zarr; got {path.name!r}.")


def load(path: str | Path) -> xr.Dataset:
    """Load a saved dataset into memory; warn if it has no checksum, as files of limitformer 0.2 and older.

    Raises:
        InputError: no such file, not a file that `save` wrote, or a damaged one.
    """
    path = file_path(path)
    check_ending(path)
    require(os.path.exists(path), f"No such file: {path}.")
    for entry in (path, *path.rglob("*")):  # no pipe or device, also in a Zarr folder, and no link out of it
        check_regular(entry)
        inside = entry.resolve().is_relative_to(path.resolve())
        require(inside, f"{entry} is a link out of {path.name}. Nearest: a copy of what it leads to.")
    engine = "zarr" if path.suffix == ".zarr" else "scipy"
    options: dict[str, Any] = {"consolidated": False} if engine == "zarr" else {}
    try:
        with xr.open_dataset(path, engine=engine, **options) as opened:
            check_scratch(opened.nbytes, f"What {path} says that it holds", "another file")
            # Zarr skips variables that cannot be read silently.
            names = {entry.name for entry in path.iterdir() if entry.is_dir()} if path.is_dir() else set()
            lost = ", ".join(map(printable, sorted(names - set(map(str, opened.variables)))))
            require(not lost, f"{path} is damaged: {lost} cannot be read.")
            dataset = opened.load()
            stored = dataset.attrs.pop(CHECKSUM, None)
            damaged = stored is not None and stored != checksum(dataset)
    except InputError:
        raise
    except Exception as error:  # junk raises anything
        raise InputError(f"{path} is not a file that limitformer saved: {first_line(error)}.") from error
    require(not damaged, f"{path} is damaged: its contents do not have the checksum that was saved with them.")
    require(stored is not None or len(dataset.variables) > 0, f"{path} holds no data.")
    if stored is None:
        warnings.warn(f"{path} has no checksum, so damage would not be noticed. Nearest: save it again.", stacklevel=2)
    return dataset
