"""Read the weights in a checkpoint's folder, so that no file of it chooses which other files are opened.

Files of safetensors are data. Files of torch are pickles: they are read with `weights_only`, which loads tensors only,
after a check that the parts of the archive have the sizes that they declare.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import file_in, one_line, readable_name, small_file_in
from limitformer.models.serial import json_object
from limitformer.models.text import read_text

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WHOLE = (SAFE, SAFE_INDEX, TORCH, TORCH_INDEX)  # the first that exists counts, as in transformers
OTHER_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".distcp", ".onnx")
NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "scaler", "training_args", "trainer_state", "global_step")
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MOST_PICKLE = 2**26  # bytes of the part of an archive that names its tensors


def holds_weights(what: Any) -> bool:
    """Return whether `what` is a folder with a checkpoint, of transformers or of a kind that is refused later."""
    if not isinstance(what, str | Path):
        return False
    try:
        return Path(what).is_dir() and bool(weight_names(Path(what)))
    except (OSError, ValueError):
        return False


def weight_names(folder: Path) -> list[str]:
    """Return the files in a folder that are named like a checkpoint's weights, known names first."""
    names = sorted(each.name for each in folder.iterdir())
    known = [name for name in WHOLE if name in names]
    return known + [name for name in names if name.endswith(OTHER_ENDINGS) and not name.startswith(NOT_WEIGHTS)]


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint.

    Raises:
        InputError: files are missing, broken, outside the folder, or hold something other than real numbers.
    """
    result: dict[str, Tensor] = {}
    for file, names in files_in(folder).items():
        tensors = tensors_of(folder, file)
        absent = sorted(names - tensors.keys())[:3]
        require(not absent, f"{file} in {folder} lacks what the index names: {', '.join(map(repr, absent))}.")
        repeated = sorted(result.keys() & tensors.keys())[:3]
        require(not repeated, f"several files in {folder} hold {', '.join(map(repr, repeated))}.")
        result |= tensors
    require(bool(result), f"The files of weights in {folder} hold none.")
    return result


def files_in(folder: Path) -> dict[str, set[str]]:
    """Return the files of a checkpoint, with the tensors that its index names in each.

    Raises:
        InputError: there is no file of a known kind, or the index names files outside the folder.
    """
    names = weight_names(folder)
    first = next((name for name in WHOLE if name in names), None)
    if first is None:
        known = ", ".join(WHOLE)
        raise InputError(
            f"{folder} holds weights that cannot be read, {names[0]!r}; files that can be read are {known}. Nearest: "
            f"save_pretrained, or {folder / 'config.json'} for the configuration alone."
        )
    if first in (SAFE, TORCH):
        file_in(folder, first)
        return {first: set()}
    index = json_object(read_text(small_file_in(folder, first)), f"{first} in {folder}")
    places = index.get("weight_map")
    mapped = isinstance(places, dict) and bool(places)
    require(mapped, f"{first} in {folder} must map weights to files under 'weight_map'; got {type(places).__name__}.")
    assert isinstance(places, dict)
    ending = Path(SAFE if first == SAFE_INDEX else TORCH).suffix
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        is_kind = isinstance(file, str) and file.endswith(ending)
        require(is_kind, f"{first} in {folder} must name {ending} files; got {file!r:.80} for {name!r:.80}.")
        files.setdefault(file, set()).add(name)
    for file in files:
        file_in(folder, file)
    return dict(sorted(files.items()))


def tensors_of(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of one file, mapped to memory if the format allows it."""
    path = file_in(folder, name)
    what = f"{name} in {readable_name(folder)} cannot be read"
    require(path.stat().st_size > 0, f"{what}: it is empty.")
    with one_line(what):
        tensors = safe_tensors(path) if name.endswith(".safetensors") else torch_tensors(path, what)
    strange = [key for key, each in tensors.items() if not isinstance(each, Tensor)]
    if strange:
        kind = type(tensors[strange[0]]).__name__
        raise InputError(f"{what}: {strange[0]!r:.80} is a {kind}, not a tensor. Nearest: model.state_dict() alone.")
    for key, each in tensors.items():
        dense = each.layout == torch.strided and each.device.type == "cpu" and not each.is_quantized
        require(dense and not each.is_complex(), f"{what}: {key!r:.80} is not a plain tensor of real numbers.")
    return tensors


def safe_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open
    from safetensors.torch import load

    if not is_utf8(path):  # safetensors cannot open such a path
        return dict(load(path.read_bytes()))
    with safe_open(str(path), framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def is_utf8(path: Path) -> bool:
    return str(path) == str(path).encode("utf-8", "replace").decode("utf-8")


def torch_tensors(path: Path, what: str) -> dict[str, Any]:
    """Read a file of `torch.save` that holds a dict of tensors."""
    archive = is_zipfile(path)
    if archive:
        check_archive(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # about old pickles, whose tensors can still be read
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except UnpicklingError as error:  # its advice is to run the file's code
        raise InputError(f"{what}: it is not a file of tensors alone, and code in it is not run.") from error
    except (RuntimeError, EOFError) as error:
        raise InputError(f"{what}: it is not a whole file of torch.save.") from error
    if not isinstance(tensors, dict):
        raise InputError(f"{what}: it holds a {type(tensors).__name__}, not tensors by name.")
    strange = [key for key in tensors if not isinstance(key, str)]
    require(not strange, f"{what}: it names a tensor {strange[:1]!r:.80}, which is not a word.")
    return dict(tensors)


def check_archive(path: Path) -> None:
    """Raise unless every part of the archive is uncompressed and the list of tensors is short."""
    with ZipFile(path) as archive:
        for part in archive.infolist():
            if part.compress_type != ZIP_STORED or part.flag_bits & 1 or part.file_size != part.compress_size:
                raise BadZipFile(f"{part.filename!r:.80} is compressed, which torch.save does not do")
            if part.filename.endswith(".pkl") and part.file_size > MOST_PICKLE:
                raise BadZipFile(f"{part.filename!r:.80} has {part.file_size:,} bytes")


def check_numbers(tensors: dict[str, Tensor], parameters: Iterable[str]) -> None:
    """Raise `InputError` for a parameter stored in whole numbers or eight bits, without its scale."""
    known = {part for name in parameters for part in (name, name.partition(".")[2])}
    for name, each in tensors.items():
        is_parameter = bool({name, name.partition(".")[2]} & known) or name.endswith("weight")
        eight = each.dtype not in REAL and each.dtype.itemsize == 1 and each.dtype not in (torch.bool, torch.uint8)
        if each.dtype not in REAL and (is_parameter or eight):
            kind = str(each.dtype).removeprefix("torch.")
            raise InputError(
                f"{name!r:.80} holds {kind}: a quantised weight without its scale. Nearest: the checkpoint in float32, "
                "float16 or bfloat16."
            )
