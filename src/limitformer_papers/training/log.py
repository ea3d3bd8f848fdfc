r"""The log of a run: rows (step, name, layer, head, value), as a Parquet file and in TensorBoard.

A row without a layer or a head has −1 there. The file is replaced as a whole, so it can be read at any time.
"""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from transformers import TrainerCallback

from limitformer.base.errors import InputError, require
from limitformer.base.files import write_whole

FILE = "log.parquet"
TYPES = {"step": pa.int64(), "name": pa.string(), "layer": pa.int32(), "head": pa.int32(), "value": pa.float64()}
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in TYPES.items()])


class Log(TrainerCallback):
    """The log of a run; `training.harness.train` makes one, or takes the one among its callbacks.

    Rows belong to steps: a callback records at the end of a step, at a log or an evaluation, and not when training
    begins, since a resumed run begins again. A log serves one run.

    In a user's Trainer it is a callback that writes `path` at each checkpoint and at the end. When that Trainer
    resumes, the log starts with the rows of `path` up to the Trainer's step.

    Args:
        path: the Parquet file.
        board: a `SummaryWriter`, or None.
    """

    def __init__(self, path: Path | None = None, board: Any = None) -> None:
        self.path, self.board = path, board
        self.columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        self.written = 0

    def record(self, step: int, name: str, value: float, layer: int = -1, head: int = -1) -> None:
        """Add one row; layer and head are −1 for values that have none."""
        value = float(value)
        row = {"step": step, "name": name, "layer": layer, "head": head, "value": value}
        for column, entry in row.items():
            self.columns[column].append(entry)
        if self.board is not None and isfinite(value):
            places = (f"layer {layer}", layer), (f"head {head}", head)
            self.board.add_scalar("/".join([name, *(place for place, k in places if k >= 0)]), value, step)

    def table(self) -> pa.Table:
        """Return all rows: step, name, layer, head, value."""
        return pa.table(self.columns, schema=SCHEMA)

    def write(self, path: Path | None = None) -> None:
        """Write all rows to `path`, or to the log's own file and to TensorBoard."""
        target = self.path if path is None else path
        if target is not None:
            write_whole(target, lambda whole: pq.write_table(self.table(), whole))
        if path is None:
            self.written = len(self.columns["step"])
            if self.board is not None:
                self.board.flush()

    def restore(self, table: pa.Table, step: int) -> None:
        """Replace the rows by those of `table` up to `step`."""
        rows = table.filter(pc.less_equal(table["step"], step))
        self.columns = {name: rows[name].to_pylist() for name in SCHEMA.names}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Restore the rows written earlier, if a user's Trainer resumes; our harness has restored them already."""
        ours = state.is_world_process_zero and state.global_step > 0 and not self.columns["step"]
        if ours and self.path is not None and Path(self.path).is_file():
            self.restore(read_table(Path(self.path)), state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """Record the Trainer's own numbers, without those of its speed."""
        for name, value in (logs or {}).items():
            is_logged = name in ("loss", "grad_norm", "learning_rate") or name.startswith("eval_")
            if is_logged and isinstance(value, int | float):
                self.record(state.global_step, name, value)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.write_main(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.write_main(state)

    def write_main(self, state: Any) -> None:
        if state.is_world_process_zero and len(self.columns["step"]) != self.written:
            self.write()


def read_table(path: Path) -> pa.Table:
    """Read a table that `Log.write` wrote.

    Raises:
        InputError: no such file, or not one of ours.
    """
    require(path.is_file(), f"No such log: {path}.")
    try:
        return pq.read_table(path, schema=SCHEMA)
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise InputError(f"{path} is not a log that limitformer wrote: {error}.") from error


def read_log(folder: str | Path) -> pa.Table:
    """Return the rows of the run in `folder`: step, name, layer, head, value."""
    return read_table(Path(folder) / FILE)


def curve(log: pa.Table, name: str, layer: int = -1, head: int = -1) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps (k,) and values (k,) of one quantity.

    Raises:
        InputError: the log has no such rows.
    """
    chosen = pc.and_(pc.equal(log["layer"], layer), pc.equal(log["head"], head))
    rows = log.filter(pc.and_(chosen, pc.equal(log["name"], name)))
    if rows.num_rows == 0:
        names = ", ".join(sorted(pc.unique(log["name"]).to_pylist())) or "no rows"
        raise InputError(f"The log has no {name!r} at layer {layer}, head {head}; it has {names}.")
    return rows["step"].to_numpy(), rows["value"].to_numpy()
