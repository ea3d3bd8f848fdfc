"""Stores that are made, opened, gone on with, extended and restored."""

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, NotImportedError, printable, require
from limitformer.base.files import check_writable, local_path
from limitformer.base.lock import CannotLockError, only_one
from limitformer.models.serial import from_record
from limitformer.sweep.describe import Sweep, check_rest
from limitformer.sweep.files import CELLS, is_own_folder, remove_unfinished
from limitformer.sweep.grid import check_axes
from limitformer.sweep.layout import block_shape, checked_lengths, layout_from
from limitformer.sweep.metadata import LostDescriptionError, NoStoreError, OtherSweepError, block_there, description_of
from limitformer.sweep.origin import Code, checked_codes, code, code_number, differences
from limitformer.sweep.store import DAMAGED, DONE, FAILED, Store
from limitformer.sweep.trial import layout_of

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def same(condition: bool, message: str) -> None:
    """Raise `OtherSweepError(message)` unless `condition` holds."""
    if not condition:
        raise OtherSweepError(message)


def store_path(given: str | Path) -> Path:
    """The folder of a store, if it can be one.

    Raises:
        InputError: an address, or a name that the system refuses.
    """
    path = local_path(given)
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"Cannot use the folder {path}: {error.strerror}.") from error
    return path


def open_store(path: Path, *, imports: bool = False) -> Store:
    """The store in a folder, from whomever it comes; `imports` as of `from_record`.

    Raises:
        InputError: there is none, or what it says of itself makes no sense.
    """
    kept = description_of(path)
    try:
        base, over, simulate, reduce = (kept[name] for name in ("base", "over", "simulate", "keep"))
        sweep = Sweep(from_record(base, imports=imports), over=over, simulate=simulate, reduce=reduce, unchecked=True)
        check_axes(sweep.base, sweep.over)
        layout = layout_from(kept["layout"])
        lengths = checked_lengths(kept["block"], sweep.shape)
        store = Store(path, sweep, layout, lengths, checked_codes(kept["codes"]))
        check_sizes(store)
    except NotImportedError:
        raise
    except InputError as error:
        raise InputError(f"{path} is damaged: {printable(str(error))}") from error
    except Exception as error:  # whatever a stranger has written
        reason = f"{type(error).__name__} in its description ({printable(str(error))})"
        raise InputError(f"{path} is damaged: {reason}.") from error
    return store


def check_sizes(store: Store) -> None:
    """Raise `InputError` unless its arrays fit each other, its axes and their labels."""
    sizes = {name: len(values) for name, values in store.coordinates().items()}
    axes, arrays = set(store.sweep.over), set(store.layout.fields)
    require(not axes & arrays, f"an axis and a result have the same name, {', '.join(axes & arrays)}.")
    for field in store.layout.fields.values():
        for dim, size in zip(field.dims, field.shape, strict=True):
            fits = dim not in axes and sizes.setdefault(dim, size) == size
            require(fits, f"{field.name} has {size} on {dim}, which is taken or has another size.")


@contextmanager
def ready(path: Path, sweep: Sweep, *, extend: bool, any_version: bool) -> Iterator[Store]:
    """The store of a sweep, made or opened, and locked in the block if it can be written.

    Raises:
        InputError: it belongs to another sweep or to other code, or somebody is at work on it.
    """
    if not is_there(path):
        empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        require(empty, f"{path} is there and is not the store of a sweep. Choose another folder.")
        create(path, sweep)
    with ExitStack() as stack:
        reason = locked(path, stack)
        yield resume(path, sweep, extend=extend, any_version=any_version, read_only=reason)


def is_there(path: Path) -> bool:
    """Whether there is a store, in whatever state; `InputError` if it is one that nobody can go on with."""
    try:
        description_of(path)
    except NoStoreError:
        return False
    except LostDescriptionError:
        return True
    return True


def locked(path: Path, stack: ExitStack) -> str:
    """Lock the store until the stack is left; why it cannot be written, or nothing."""
    try:
        (path / CELLS).mkdir(exist_ok=True)
        require(is_own_folder(path / CELLS), f"{path} is damaged: {CELLS} is no folder of its own.")
        stack.enter_context(only_one(path / CELLS / "lock", str(path)))
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


def create(path: Path, sweep: Sweep) -> None:
    """A new store, or a line that says why not; made beside its place, so that a kill leaves no half store."""
    target = Path(os.path.realpath(path))
    check_writable(target.parent)
    check_rest(sweep)
    layout = layout_of(sweep)
    try:
        with tempfile.TemporaryDirectory(prefix=".sweep.", dir=target.parent, ignore_cleanup_errors=True) as folder:
            beside = Path(folder) / "store"
            (beside / CELLS).mkdir(parents=True)
            store = Store(beside, sweep, layout, block_shape(sweep.shape, layout.size), {code_number(code()): code()})
            check_sizes(store)
            store.write_description()
            beside.rename(target)
    except OSError as error:
        if not is_there(path):  # else somebody else has begun the store in the meantime
            raise InputError(f"Cannot make the store {path}: {error.strerror}.") from error


def resume(path: Path, sweep: Sweep, *, extend: bool, any_version: bool, read_only: str) -> Store:
    """The store that is there, to go on with; its axes in its own order, with the new values behind.

    Raises:
        InputError: it belongs to another sweep, to other code, or has fewer values on an axis.
    """
    try:
        there = open_store(path)
    except LostDescriptionError:
        there = restored(path, sweep, any_version)
    check_same(path, there.sweep.record(), sweep.record())
    check_code(path, there.codes.values(), any_version)
    over = merged_axes(path, there.sweep.over, sweep.over, extend)
    if any(len(over[name]) > len(values) for name, values in there.sweep.over.items()):
        check_rest(sweep)
    merged = replace(there.sweep, over=over, unchecked=True)
    store = Store(path, merged, there.layout, there.block, there.codes | {code_number(code()): code()}, read_only)
    if not read_only:
        try:
            store.write_description()
        except OSError as error:
            raise InputError(f"Cannot write the store {path}: {error.strerror or error}.") from error
    return store


def restored(path: Path, sweep: Sweep, any_version: bool) -> Store:
    """The store of the sweep whose description is lost, from the sweep and its cells, whose checksums prove them.

    Raises:
        OtherSweepError: no cell belongs to the sweep, or some are of a code that nobody knows any more.
    """
    layout = layout_of(sweep)
    lengths = block_there(path, sweep.shape) or block_shape(sweep.shape, layout.size)
    store = Store(path, sweep, layout, lengths, {code_number(code()): code()})
    found = store.survey()
    ours = (found.status == DONE) | (found.status == FAILED)
    same(
        bool(ours.any() or not (found.status == DAMAGED).any()),
        f"{path} has lost its description, and none of its cells belongs to this sweep. Choose another store.",
    )
    unknown = set(np.unique(found.code[ours]).tolist()) - set(store.codes)
    same(
        any_version or not unknown,
        f"{path} has lost its description, and some of its cells were made by other code. "
        "Nearest: another store, or accept it (any_version, --any-version).",
    )
    return store


def check_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise `OtherSweepError` if the sweeps differ in more than the values of their axes."""
    a, b = flat(there), flat(here)
    differing = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    shown = "; ".join(f"{name}: {a.get(name)!r} there, {b.get(name)!r} here" for name in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    same(not differing, f"{path} belongs to another sweep ({shown}{more}). Choose another store.")


def flat(record: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted names to values; of the axes their names alone."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if key == "over":
            found["over"] = list(value)
        elif isinstance(value, dict):
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def check_code(path: Path, there: Iterable[Code], any_version: bool) -> None:
    """Raise `OtherSweepError` if none of the codes that made the store is that of this process, unless accepted."""
    known = list(there)
    if any_version or code() in known or not known:
        return
    raise OtherSweepError(
        f"{path} was begun by other code ({differences(known[-1], code())}), whose numbers may differ. "
        "Nearest: another store, or accept it (any_version, --any-version)."
    )


def merged_axes(path: Path, there: Any, here: Any, extend: bool) -> dict[str, list[Any]]:
    """The values of both, those of the store first."""
    merged: dict[str, list[Any]] = {}
    for name, values in there.items():
        known, asked = set(values), set(here[name])
        new = [value for value in here[name] if value not in known]
        gone = [value for value in values if value not in asked]
        same(
            not new or extend,
            f"{path} has no {name} = {', '.join(map(str, new[:5]))}. Nearest: extend it (extend, --extend).",
        )
        same(not gone, f"{path} has {name} = {', '.join(map(str, gone[:5]))}, which this sweep has not. Add them.")
        merged[name] = [*values, *new]
    return merged
