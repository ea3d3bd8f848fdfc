"""The surroundings of a command: environment variables, the working folder, and packages that can be imported."""

import os
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

from limitformer.base.errors import InputError, first_line

OURS = {
    "MPLBACKEND": "agg",  # pictures are files: no window opens, and a backend that is not installed does no harm
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
PREFIXES = {  # of the variables that a package reads when it is imported
    "numba": ("NUMBA_",),
    "torch": ("TORCH", "PYTORCH_"),
    "transformers": ("TRANSFORMERS_", "HF_"),
    "huggingface_hub": ("HF_", "HUGGINGFACE_"),
    "datasets": ("HF_",),
    "matplotlib": ("MPL",),
}
COMPILER = "TORCHINDUCTOR_CACHE_DIR"
CHOSEN = os.environ.get(COMPILER)  # by the user, before torch sets it


def prepare_environment() -> None:
    """Set the variables that other packages read when they are imported; what a user chose for messages stays."""
    for name, value in OURS.items():
        os.environ[name] = value if name == "MPLBACKEND" else os.environ.get(name, value)
    if os.environ.get("COLUMNS", "").strip() == "0":  # which Rich takes for the width, and prints nothing
        del os.environ["COLUMNS"]


def remove_new_folder() -> None:
    """Remove the folder of torch's compiler, which an import of transformers makes and commands leave empty."""
    if CHOSEN is None and COMPILER in os.environ:
        with suppress(OSError):  # it is not empty, or not made yet
            os.rmdir(os.environ[COMPILER])


def check_folder() -> None:
    """Raise `InputError` unless there is a working folder: without one torch ends the process in its import."""
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(f"The working folder is gone: {error.strerror}. Nearest: cd to another one.") from error


def import_failure(error: BaseException) -> str | None:
    """Return a line about a package that cannot be imported, and the variables that it read; None for other errors."""
    packages = [name for name in imports_of(error) if not name.startswith(("limitformer", "__main__"))]
    if not packages:
        return None
    prefixes = tuple(prefix for name in packages for prefix in PREFIXES.get(name, ()))
    known = sorted(name for name, value in os.environ.items() if name.startswith(prefixes) and OURS.get(name) != value)
    hint = f" Nearest: without {' and '.join(known)} in the environment." if known else ""
    return f"{packages[-1]} cannot be imported: {type(error).__name__}: {first_line(error).rstrip('.')}.{hint}"


def imports_of(error: BaseException) -> Iterator[str]:
    """Yield the packages whose modules were being imported when the error was raised, the innermost last."""
    trace = error.__traceback__
    while trace is not None:
        if is_module(trace.tb_frame):
            yield str(trace.tb_frame.f_globals["__name__"]).partition(".")[0]
        trace = trace.tb_next


def is_module(frame: FrameType) -> bool:
    """Whether the frame runs the file of a module."""
    return frame.f_code.co_name == "<module>" and frame.f_code.co_filename == frame.f_globals.get("__file__")
