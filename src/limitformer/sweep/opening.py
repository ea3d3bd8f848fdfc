"""Create, open, resume and extend the stores of sweeps."""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, NotImportedError, printable, require
from limitformer.base.files import check_writable, local_path
from limitformer.base.lock import CannotLockError, only_one
from limitformer.models.serial import from_record
from limitformer.sweep.cells import DONE, FAILED, OWN, SHARD_LETTERS, Kind, kinds_from
from limitformer.sweep.describe import Sweep, check_rest
from limitformer.sweep.files import (
    CELLS,
    UNFINISHED,
    check_own_folder,
    names_in_cells,
    read_regular,
    readable,
    remove_unfinished,
)
from limitformer.sweep.grid import check_axes
from limitformer.sweep.origin import Code, checked_codes, code, code_number, differences
from limitformer.sweep.store import DESCRIPTION, FORMAT, LARGEST_DESCRIPTION, Store, Survey, digest
from limitformer.sweep.trial import kinds_of

LOCK = "lock"
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class OtherSweepError(InputError):
    """The store belongs to another sweep, to other code, or to another version of limitformer."""


class NoStoreError(InputError):
    """The folder is not the store of a sweep."""


class LostDescriptionError(InputError):
    """A store without a valid `sweep.json`."""


def require_same(condition: bool, message: str) -> None:
    """Raise `OtherSweepError(message)` unless `condition` holds."""
    if not condition:
        raise OtherSweepError(message)


def store_path(place: str | Path) -> Path:
    """Return the path of a store.

    Raises:
        InputError: an address, or a name that the system refuses.
    """
    path = local_path(place)
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"Cannot use the folder {path}: {error.strerror}.") from error
    return path


def description_of(path: Path) -> dict[str, Any]:
    """Return the description in `sweep.json`, whose digest is compared.

    Raises:
        OtherSweepError: the store has another format.
        LostDescriptionError: a store whose description is absent or damaged.
        NoStoreError: not a store.
        InputError: the file cannot be read.
    """
    with readable(path):
        data = read_regular(path / DESCRIPTION, LARGEST_DESCRIPTION)
        old = b'"sweep": {"format": ' in (read_regular(path / "zarr.json", LARGEST_DESCRIPTION) or b"")
    try:
        record = json.loads(data or b"")
        description = dict(record["sweep"])
        valid, version = record["digest"] == digest(description), description["format"]
    except (ValueError, LookupError, TypeError, RecursionError):
        valid, version = False, None
    if valid and version == FORMAT:
        return description
    require_same(not valid, f"{path} has the format {str(version)[:20]!r} of a store; this version reads {FORMAT}.")
    require_same(
        not old,
        f"{path} is a store of limitformer 0.2 or older, which this version cannot read. "
        "Nearest: read it with limitformer 0.2, or choose another folder, which computes it again.",
    )
    with readable(path):
        lost = is_store(path, data is not None)
    if lost:
        raise LostDescriptionError(
            f"{path} has lost its description. Nearest: run its sweep again with this store, which restores it."
        )
    raise NoStoreError(f"{path} is not the store of a sweep.")


def is_store(path: Path, has_description: bool) -> bool:
    """Whether the folder looks like a store without a valid description."""
    if not (path / CELLS).is_dir() or (path / CELLS).is_symlink():
        return False
    shards = all(len(one.name) == SHARD_LETTERS or one.name.endswith(UNFINISHED) for one in names_in_cells(path))
    return shards and (has_description or {one.name for one in path.iterdir()} <= {CELLS, LOCK})


def open_store(path: Path, *, imports: bool = False) -> Store:
    """Open a store of unknown origin; `imports` as in `from_record`.

    Raises:
        InputError: not a store, or one whose description makes no sense.
    """
    record = description_of(path)
    try:
        base, over, simulate, reduce = (record[name] for name in ("base", "over", "simulate", "keep"))
        sweep = Sweep(from_record(base, imports=imports), over=over, simulate=simulate, reduce=reduce, unchecked=True)
        check_axes(sweep.base, sweep.over)
        store = Store(path, sweep, kinds_from(record["results"]), checked_codes(record["codes"]))
        check_sizes(store)
    except NotImportedError:
        raise
    except InputError as error:
        raise InputError(f"{path} is damaged: {printable(str(error))}") from error
    except Exception as error:  # a stranger may have written anything
        reason = f"{type(error).__name__} in its description ({printable(str(error))})"
        raise InputError(f"{path} is damaged: {reason}.") from error
    return store


def check_sizes(store: Store) -> None:
    """Raise `InputError` unless its results fit each other, the axes and their labels."""
    sizes = {name: len(values) for name, values in store.coordinates().items()}
    axes, taken = set(store.sweep.over), {*store.kinds, *OWN}
    require(not axes & taken, f"an axis and a result have the same name, {', '.join(axes & taken)}.")
    for name, kind in store.kinds.items():
        for dim, size in zip(kind.dims, kind.shape, strict=True):
            fits = dim not in axes and sizes.setdefault(dim, size) == size
            require(fits, f"{name} has {size} on {dim}, which is taken or has another size.")


@contextmanager
def ready(path: Path, sweep: Sweep, *, extend: bool, any_version: bool) -> Iterator[tuple[Store, Survey]]:
    """Yield the store of a sweep, created or opened, and its state; it is locked in the block if it can be written.

    Raises:
        InputError: the store belongs to another sweep or to other code, or another process works on it.
    """
    kinds = new_kinds(path, sweep)
    with ExitStack() as stack:
        reason = locked(path, stack)
        store = resumed(path, sweep, kinds, extend=extend, any_version=any_version, read_only=reason)
        known = set(store.codes)
        survey = store.survey()  # it adds the codes of all cells, before they are written
        copied = [store.codes[number] for number in set(store.codes) - known]
        require_same(
            any_version or not copied,
            f"{path} has cells that were copied into it from other code. Nearest: delete them, or accept them "
            "(any_version, --any-version).",
        )
        if not reason:
            try:
                store.write_description()
            except OSError as error:
                raise InputError(f"Cannot write the store {path}: {error.strerror or error}.") from error
        yield store, survey


def new_kinds(path: Path, sweep: Sweep) -> dict[str, Kind]:
    """Make the folder of a new store and return the results of a cell, from a trial; empty if there is a store.

    Raises:
        InputError: something else is there, the folder cannot be made, or no cell can run.
    """
    try:
        description_of(path)
        return {}
    except NoStoreError:
        empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        require(empty, f"{path} is there and is not the store of a sweep. Choose another folder.")
    except LostDescriptionError:
        pass
    folder = Path(os.path.realpath(path))
    check_writable(folder.parent)
    check_rest(sweep)
    kinds = kinds_of(sweep)
    check_sizes(Store(path, sweep, kinds, {}))
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make the store {path}: {error.strerror}.") from error
    return kinds


def locked(path: Path, stack: ExitStack) -> str:
    """Lock the store until the stack is left; return why it cannot be written, or an empty text."""
    try:
        (path / CELLS).mkdir(exist_ok=True)
        check_own_folder(path / CELLS)
        stack.enter_context(only_one(path / LOCK, str(path)))
        remove_unfinished(path)
    except CannotLockError as error:
        if error.reason in READ_ONLY:
            return os.strerror(error.reason)
        raise
    except OSError as error:
        if error.errno in READ_ONLY:
            return os.strerror(error.errno)
        raise InputError(f"Cannot write the store {path}: {error.strerror} ({error.filename}).") from error
    return ""


def resumed(
    path: Path, sweep: Sweep, kinds: Mapping[str, Kind], *, extend: bool, any_version: bool, read_only: str
) -> Store:
    """Return the store to continue with: its axes in its own order, then the new values.

    Raises:
        InputError: it belongs to another sweep or to other code, or has values that the sweep lacks.
    """
    try:
        there = open_store(path)
    except (NoStoreError, LostDescriptionError):
        there = undescribed(path, sweep, kinds)
    check_same(path, there.sweep.record(), sweep.record())
    check_code(path, there.codes.values(), any_version)
    over = merged_axes(path, there.sweep.over, sweep.over, extend)
    if over != there.sweep.over:
        check_rest(sweep)
    merged = replace(there.sweep, over=over, unchecked=True)
    return Store(path, merged, there.kinds, there.codes | {code_number(code()): code()}, read_only)


def undescribed(path: Path, sweep: Sweep, kinds: Mapping[str, Kind]) -> Store:
    """Return the store of the sweep in a folder without a description; cells prove by their checksums that they fit.

    Raises:
        OtherSweepError: there are cells, and none belongs to the sweep.
    """
    store = Store(path, sweep, kinds, {})
    status = store.survey().status
    ours = bool(((status == DONE) | (status == FAILED)).any())
    require_same(
        ours or not store.present(),
        f"{path} has lost its description, and none of its cells belongs to this sweep. Choose another store.",
    )
    return store


def check_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise `OtherSweepError` if the sweeps differ in more than the values of their axes."""
    a, b = flat(there), flat(here)
    differing = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    examples = "; ".join(f"{name}: {a.get(name)!r} there, {b.get(name)!r} here" for name in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    require_same(not differing, f"{path} belongs to another sweep ({examples}{more}). Choose another store.")


def flat(record: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return a nested record with dotted names; of the axes it has only their names."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        if key == "over":
            values["over"] = list(value)
        elif isinstance(value, dict):
            values |= flat(value, f"{before}{key}.")
        else:
            values[before + key] = value
    return values


def check_code(path: Path, there: Iterable[Code], any_version: bool) -> None:
    """Raise `OtherSweepError` if this process has none of the store's codes, unless any is accepted."""
    known = list(there)
    if any_version or code() in known or not known:
        return
    raise OtherSweepError(
        f"{path} was begun by other code ({differences(known[-1], code())}), whose numbers may differ. "
        "Nearest: another store, or accept it (any_version, --any-version)."
    )


def merged_axes(path: Path, there: Any, here: Any, extend: bool) -> dict[str, list[Any]]:
    """Return the values of both, those of the store first."""
    merged: dict[str, list[Any]] = {}
    for name, values in there.items():
        known, asked = set(values), set(here[name])
        new = [value for value in here[name] if value not in known]
        lacking = [value for value in values if value not in asked]
        require_same(
            not new or extend,
            f"{path} has no {name} = {', '.join(map(str, new[:5]))}. Nearest: extend it (extend, --extend).",
        )
        require_same(
            not lacking,
            f"{path} has {name} = {', '.join(map(str, lacking[:5]))}, which this sweep lacks. Nearest: add them.",
        )
        merged[name] = [*values, *new]
    return merged
