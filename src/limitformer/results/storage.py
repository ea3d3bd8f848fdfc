"""Save and load results, as NetCDF or Zarr."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, first_line, printable, require
from limitformer.base.files import check_writable, file_path, write_whole
from limitformer.base.memory import check_scratch

NETCDF3_LIMIT = 2**32 - 4  # bytes of one variable


def save(dataset: xr.Dataset, path: str | Path) -> Path:
    """Save as NetCDF (`.nc`) or Zarr (`.zarr`), whole or not at all, and return the path.

    Raises:
        InputError: another ending, a folder that cannot be written, a variable too large for NetCDF, or data that the
            format cannot store.
    """
    path = file_path(path)
    require(isinstance(dataset, xr.Dataset), f"A Dataset can be saved; got {type(dataset).__name__}.")
    check_target(path)
    write = partial(write_zarr, dataset) if path.suffix == ".zarr" else partial(write_netcdf, dataset)
    try:
        write_whole(path, write)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path.name} cannot store some of the data: {first_line(error)}") from error
    return path


def write_zarr(dataset: xr.Dataset, path: Path) -> None:
    dataset.to_zarr(path, mode="w", consolidated=False, zarr_format=2)


def write_netcdf(dataset: xr.Dataset, path: Path) -> None:
    largest = max((variable.nbytes for variable in dataset.variables.values()), default=0)
    require(largest <= NETCDF3_LIMIT, f"A variable of {largest:,} bytes does not fit NetCDF; save it as .zarr.")
    attributes = {name: netcdf_attribute(value) for name, value in dataset.attrs.items()}
    dataset.assign_attrs(attributes).to_netcdf(path, engine="scipy", format="NETCDF3_64BIT")


def netcdf_attribute(value: Any) -> Any:
    """Return `value`, as text if it is a whole number that does not fit the 32 bits of a NetCDF attribute."""
    return str(value) if isinstance(value, int | np.integer) and not -(2**31) <= value < 2**31 else value


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
    """Load a saved dataset into memory.

    Raises:
        InputError: no such file, or not a file that `save` wrote.
    """
    path = file_path(path)
    check_ending(path)
    require(os.path.exists(path), f"No such file: {path}.")
    engine = "zarr" if path.suffix == ".zarr" else "scipy"
    options: dict[str, Any] = {"consolidated": False} if engine == "zarr" else {}
    try:
        with xr.open_dataset(path, engine=engine, **options) as dataset:
            check_scratch(dataset.nbytes, f"What {path} says that it holds", "another file")
            check_variables(path, dataset)
            return dataset.load()
    except InputError:
        raise
    except Exception as error:  # junk raises anything
        raise InputError(f"{path} is not a file that limitformer saved: {first_line(error)}.") from error


def check_variables(path: Path, dataset: xr.Dataset) -> None:
    """Raise `InputError` if a Zarr folder has variables that cannot be read: Zarr skips them silently."""
    names = {entry.name for entry in path.iterdir() if entry.is_dir()} if path.is_dir() else set()
    lost = sorted(names - set(map(str, dataset.variables)))
    require(not lost, f"{path} is damaged: {', '.join(map(printable, lost))} cannot be read.")
