"""Results: an xarray Dataset with dims, units and provenance; saved whole or not at all.

`covariance` (sample, depth or time, token, token_) is V; or `variance`, `pair_covariance` and `distance` are kept, of
pairs of tokens (`pairs_dataset`). `exit` (sample,) is the layer or time at which a path left the ball (∞ if it did not)
and `exit_cause` says why. `start_covariance`, `start_means` and the attributes (`model` as JSON, `seed`, `samples`,
`radius`, and for a limit `dt` and `step`) are what it takes to get the same numbers again; `recorded_bytes` is the
memory of what was kept, `dtype` its type. Results on the sphere have other variables (`sphere_dataset`) and the options
of `simulate` among their attributes.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, first_line, printable, require
from limitformer.base.memory import check_scratch
from limitformer.base.version import package_version
from limitformer.models import Start
from limitformer.models.sphere_start import SphereStart
from limitformer.sphere.outcome import LABELS

NETCDF3_LIMIT = 2**32 - 4  # bytes of one variable
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a path has lost the second /; one letter is a drive


CAUSE_CODES = "0 inside, 1 left the ball, 2 left the cone, 3 lost its resolution, 4 no number of an own function"


def covariance_dataset(
    covariance: NDArray[Any], exits: NDArray[np.float64], causes: NDArray[np.int8], *, axis: str, **about: Any
) -> xr.Dataset:
    """The Dataset of one simulation: `covariance` (samples, points, m, m), and what `path_dataset` takes."""
    long = {"long_name": "V = X X^T / width", "units": "1"}
    kept = {"covariance": (("sample", axis, "token", "token_"), covariance, long)}
    return path_dataset(kept, exits, causes, axis=axis, **about)


def pairs_dataset(
    variance: NDArray[Any],
    pair_covariance: NDArray[Any],
    distance: NDArray[Any],
    exits: NDArray[np.float64],
    causes: NDArray[np.int8],
    *,
    pairs: NDArray[np.int64],
    axis: str,
    **about: Any,
) -> xr.Dataset:
    """The Dataset of one simulation that keeps `pairs` (pairs, 2), and what `path_dataset` takes.

    * `variance` (sample, depth or time, token): V_αα;
    * `pair_covariance` and `distance` (sample, depth or time, pair): V_αβ and |x_α − x_β|²/n of the tokens `first` and
      `second`. What the rounding of one layer or step can add to a distance is the attribute `distance_floor` times the
      larger variance.
    """
    dims, plain = ("sample", axis, "pair"), {"units": "1"}
    kept = {
        "variance": (("sample", axis, "token"), variance, {"long_name": "|x|^2 / width", **plain}),
        "pair_covariance": (dims, pair_covariance, {"long_name": "<x_first, x_second> / width", **plain}),
        "distance": (dims, distance, {"long_name": "|x_first - x_second|^2 / width", **plain}),
    }
    return path_dataset(kept, exits, causes, axis=axis, **about).assign_coords(pair_coordinates(pairs))


def path_dataset(
    kept: Mapping[str, Any],
    exits: NDArray[np.float64],
    causes: NDArray[np.int8],
    *,
    axis: str,
    points: NDArray[Any],
    start: Start,
    provenance: dict[str, Any],
    unit: str | None = None,
) -> xr.Dataset:
    """What is `kept` of the paths, with how they ended and where they began.

    `exits` and `causes` (samples,); `points` (points,) along `axis`, in `unit` (None: layers, or depth/width).
    """
    names = np.array(start.labels or [str(k) for k in range(start.tokens)])
    given = {} if start.means is None else {"start_means": ("token", start.means, {"units": "1"})}
    unit = unit or {"depth": "layer", "time": "depth/width"}[axis]
    return xr.Dataset(
        {
            **kept,
            "exit": (("sample",), exits, {"long_name": f"{axis} at the exit, inf if none", "units": unit}),
            "exit_cause": (("sample",), causes, {"long_name": CAUSE_CODES}),
            "start_covariance": (("token", "token_"), start.covariance, {"long_name": "V_0", "units": "1"}),
            **given,
        },
        coords={
            axis: (axis, points, {"units": unit}),
            "label": ("token", names, {"long_name": "what the token is"}),
        },
        attrs={
            **provenance,
            **stamp(provenance.get("dtype", "float64")),
        },
    )


def sphere_dataset(
    outputs: dict[str, NDArray[Any]],
    *,
    times: NDArray[np.float64],
    pairs: NDArray[np.int64],
    start: SphereStart,
    provenance: dict[str, Any],
) -> xr.Dataset:
    """The Dataset of tokens on the sphere: what `provenance` says is kept.

    * `overlap` and `gap` (sample, time, pair): z and 1 − |z|, which near ±1 has digits that z has not, of the tokens
      `first` and `second` of `pairs` (pairs, 2);
    * `clusters`, `largest_cluster`, `antipodal_pairs`, `unresolved_pairs` (sample, time);
    * `tokens` (sample, time, token, coordinate);
    * `stopped` (sample,): when a replica stopped early, ∞ if it did not; its last values stand at all later times.
    """
    variables: dict[str, Any] = {}
    coordinates: dict[str, Any] = {"time": ("time", times, {"units": "layers/layers_per_unit_time"})}
    if provenance["keep"] == "overlap":
        variables["overlap"] = (("sample", "time", "pair"), outputs["overlap"], {"long_name": "z", "units": "1"})
        variables["gap"] = (("sample", "time", "pair"), outputs["gap"], {"long_name": "1 - |z|", "units": "1"})
        coordinates |= pair_coordinates(pairs)
    if provenance["keep"] == "outcome":
        for k, name in enumerate(LABELS):
            variables[name] = (("sample", "time"), outputs["outcome"][..., k], {"units": "1"})
    if provenance["keep"] == "tokens":
        variables["tokens"] = (("sample", "time", "token", "coordinate"), outputs["tokens"], {"units": "1"})
    if "early_stop" in provenance:
        variables["stopped"] = (("sample",), outputs["stopped"], {"long_name": "time of an early stop"})
    if start.tokens is not None:
        variables["start_tokens"] = (("token", "coordinate"), start.tokens, {"units": "1"})
    overlap = {} if start.overlap is None else {"start_overlap": start.overlap}
    about = {**provenance, "start": start.description, **overlap, **stamp(provenance["dtype"])}
    return xr.Dataset(variables, coordinates, about)


def with_gradients(dataset: xr.Dataset, outputs: Mapping[str, NDArray[Any]], weights: list[str]) -> xr.Dataset:
    """`dataset` with `loss` (sample,), `stream_gradient` (sample, depth) and `weight_gradient` (sample, weight)."""
    plain = {"units": "1"}
    added = {
        "loss": (("sample",), outputs["loss"], {"long_name": "|x|^2 / 2 of the last tokens, mean", **plain}),
        "stream_gradient": (
            ("sample", "depth"),
            outputs["stream_gradient"],
            {"long_name": "|d loss / dX|", **plain},
        ),
        "weight_gradient": (
            ("sample", "weight"),
            outputs["weight_gradient"],
            {"long_name": "|d loss / dW|", **plain},
        ),
    }
    return dataset.assign(added).assign_coords(weight=weights)


def pair_coordinates(pairs: NDArray[np.int64]) -> dict[str, Any]:
    """The tokens of the pairs (pairs, 2)."""
    return {"first": ("pair", pairs[:, 0]), "second": ("pair", pairs[:, 1])}


def tokens_of(pairs: int) -> int:
    """How many tokens make so many pairs."""
    return (1 + isqrt(1 + 8 * pairs)) // 2


def stamp(dtype: str = "float64") -> dict[str, str]:
    """When and by what a result was made, and the type of its numbers."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"limitformer_version": package_version(), "created": created, "dtype": dtype}


def correlation(dataset: xr.Dataset) -> Annotated[xr.DataArray, "sample layer token token", "sample layer pair"]:
    """ρ = V_αβ/√(V_αα V_ββ): same dims as `covariance`, or those of `pair_covariance` where pairs are kept.

    A token of variance 0, or below the least normal number of its type (1e-38 in float32), has no correlation. It
    counts as 0, with itself too: a 0 on the diagonal of ρ marks such a token (`variance` does where pairs are kept),
    and a mean over tokens or samples stays a number, with 0 for what has died. Who must not count the dead leaves them
    out: `rho.where(rho_αα > 0)`.

    Raises:
        InputError: neither covariances nor pairs.
    """
    if "covariance" in dataset:
        v = dataset["covariance"]
        variance = np.diagonal(v.values, axis1=-2, axis2=-1)
        first, second = variance[..., :, None], variance[..., None, :]
    else:
        require("pair_covariance" in dataset, "correlation needs covariances or pairs of a Transformer's tokens.")
        v, variance = dataset["pair_covariance"], dataset["variance"].values
        first, second = (variance[..., dataset[name].values] for name in ("first", "second"))
    least = float(np.finfo(v.dtype).tiny)  # below it digits are lost
    rho = correlations(v.values, *(np.sqrt(np.where(part < least, 0, part)) for part in (first, second)))
    return v.copy(data=rho).rename("correlation").assign_attrs(long_name="correlation", units="1")


def correlations(v: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """v/(first second) for standard deviations of the shape of `v` or one that fits it; 0 where one of them is 0."""
    dead = (first == 0) | (second == 0)
    rho = v / np.where(first == 0, 1, first) / np.where(second == 0, 1, second)
    rho[np.broadcast_to(dead, rho.shape)] = 0
    return rho


def dead_samples(dataset: xr.Dataset) -> NDArray[np.bool_]:
    """(sample,): whether a token of the sample has variance 0 at some recorded point."""
    values = dataset["variance"].values if "variance" in dataset else dataset["covariance"].values
    variance = values if "variance" in dataset else np.diagonal(values, axis1=-2, axis2=-1)
    return np.asarray((variance == 0).any((1, 2)))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary neighbour of `path`, then move it there: the file is whole or absent.

    Raises:
        InputError: the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror} ({error.filename}).") from error
    try:
        write(folder / path.name)
        if path.is_dir():  # a folder cannot be replaced in one go: the old one waits until the new one is there
            os.replace(path, folder / "old")
        try:
            os.replace(folder / path.name, path)
        except OSError:
            if (folder / "old").exists():
                os.replace(folder / "old", path)
            raise
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def local_path(given: str | Path) -> Path:
    """A path of this machine; `InputError` of an address such as `s3://…`, which would become a folder."""
    require(isinstance(given, str | os.PathLike), f"A path must be a text or a Path; got {type(given).__name__}.")
    text = os.fsdecode(given)
    local = ADDRESS.match(text) is None
    require(local, f"{text} is an address, and only paths of this machine can be used. Nearest: a copy of it here.")
    require("\0" not in text, f"{text!r} is no path.")
    return Path(text)


def file_path(given: str | Path) -> Path:
    """The same, of a file; `InputError` of a name that is too long for one."""
    path = local_path(given)
    try:
        os.lstat(path)
    except OSError as error:
        require(error.errno != errno.ENAMETOOLONG, f"Cannot use {path}: {error.strerror}.")
    return path


def check_writable(folder: Path) -> None:
    """Make `folder`, and raise `InputError` unless a file can be written into it."""
    local_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"Cannot write into the folder {folder}: {error.strerror}.") from error


def save(dataset: xr.Dataset, path: str | Path) -> Path:
    """Save as NetCDF (`.nc`) or Zarr (`.zarr`), whole or not at all; the path.

    Raises:
        InputError: another ending, a folder that cannot be written, a variable too large for NetCDF, or something that
            the format has no place for.
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
        raise InputError(f"{path.name} has no place for some of the data: {first_line(error)}") from error
    return path


def write_zarr(dataset: xr.Dataset, path: Path) -> None:
    """Save as Zarr."""
    dataset.to_zarr(path, mode="w", consolidated=False, zarr_format=2)


def write_netcdf(dataset: xr.Dataset, path: Path) -> None:
    """Save as NetCDF."""
    largest = max((variable.nbytes for variable in dataset.variables.values()), default=0)
    require(largest <= NETCDF3_LIMIT, f"A variable of {largest:,} bytes does not fit NetCDF; save it as .zarr.")
    attributes = {name: netcdf_attribute(value) for name, value in dataset.attrs.items()}
    dataset.assign_attrs(attributes).to_netcdf(path, engine="scipy", format="NETCDF3_64BIT")


def netcdf_attribute(value: Any) -> Any:
    """`value`, as text where it is a whole number that does not fit the 32 bits of a NetCDF attribute."""
    return str(value) if isinstance(value, int | np.integer) and not -(2**31) <= value < 2**31 else value


def check_target(path: Path) -> None:
    """Raise `InputError` unless data could be saved there: known ending, writable, nothing foreign in the way."""
    check_ending(path)
    ours = path.suffix == ".zarr" and any((path / name).exists() for name in (".zgroup", "zarr.json"))
    require(ours or not path.is_dir(), f"Cannot write {path}: a folder that limitformer did not save is in the way.")
    in_the_way = path.suffix == ".zarr" and path.is_file()
    require(not in_the_way, f"Cannot write {path}: a file is in the way of the Zarr folder.")
    check_writable(path.parent)


def check_ending(path: Path) -> None:
    """Raise `InputError` unless the ending is one that can be saved."""
    known = path.suffix in (".nc", ".zarr")
    require(known, f"Data are saved as .nc (NetCDF) or .zarr; got {path.name!r}.")


def load(path: str | Path) -> xr.Dataset:
    """Load what `save` wrote, into memory.

    Raises:
        InputError: no such file, or not one of ours.
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
    """`InputError` if a Zarr folder has variables that cannot be read: Zarr leaves them out."""
    names = {entry.name for entry in path.iterdir() if entry.is_dir()} if path.is_dir() else set()
    lost = sorted(names - set(map(str, dataset.variables)))
    require(not lost, f"{path} is damaged: {', '.join(map(printable, lost))} cannot be read.")
