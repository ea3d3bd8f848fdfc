"""Read the weights in a checkpoint's folder, one file at a time, mapped to memory.

Files of safetensors are data. Files of torch are pickles: they are read with `weights_only`, which loads only tensors.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import file_in, one_line, readable_name
from limitformer.subjects.configurations import object_in

WHOLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".distcp", ".onnx")
NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "scaler", "training_args", "trainer_state", "global_step")
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def holds_weights(what: Any) -> bool:
    """Return whether `what` is a folder with a checkpoint, of transformers or of a kind that is refused later."""
    return isinstance(what, str | Path) and os.path.isdir(what) and bool(weight_names(Path(what)))


def weight_names(folder: Path) -> list[str]:
    """Return the files in a folder that are named like a checkpoint's weights; the first counts, as in transformers."""
    names = sorted(each.name for each in folder.iterdir())
    known = [name for name in WHOLE if name in names]
    return known + [name for name in names if name.endswith(OTHER_ENDINGS) and not name.startswith(NOT_WEIGHTS)]


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint.

    Raises:
        InputError: a file is missing or broken, or two files hold one tensor.
    """
    files = weight_names(folder)[:1]
    require(
        files[0] in WHOLE,
        f"{folder} holds weights that cannot be read, {files[0]!r}; files that can be read are {', '.join(WHOLE)}. "
        f"Nearest: save_pretrained, or {folder / 'config.json'} for the configuration alone.",
    )
    if files[0].endswith(".json"):
        places: Any = object_in(folder, files[0]).get("weight_map")
        require(isinstance(places, dict), f"{files[0]} in {folder} must map weights to files under 'weight_map'.")
        files = sorted(set(map(str, places.values())))
    result: dict[str, Tensor] = {}
    for file in files:
        with one_line(f"{file} in {readable_name(folder)} cannot be read"):
            tensors = tensors_in(file_in(folder, file))
        repeated = sorted(result.keys() & tensors.keys())[:3]
        require(not repeated, f"several files in {folder} hold {', '.join(map(repr, repeated))}.")
        result |= tensors
    require(bool(result), f"The files of weights in {folder} hold none.")
    return result


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, or of one of `torch.save` that holds nothing else."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open  # which only checkpoints need

        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except UnpicklingError as error:  # its advice is to run the file's code
        raise InputError(f"{path} is not a file of tensors alone, and code in it is not run.") from error
    named = isinstance(tensors, dict) and all(isinstance(each, Tensor) for each in tensors.values())
    require(named, f"{path} does not hold tensors by name alone. Nearest: model.state_dict() in a file of its own.")
    return dict(tensors)


def check_numbers(tensors: dict[str, Tensor], parameters: Iterable[str]) -> None:
    """Raise `InputError` for a parameter that is stored in whole numbers or eight bits, without its scale."""
    known = {part for name in parameters for part in (name, name.partition(".")[2])}
    for name, each in tensors.items():
        is_parameter = bool({name, name.partition(".")[2]} & known) or name.endswith("weight")
        if each.dtype not in REAL and is_parameter:
            kind = str(each.dtype).removeprefix("torch.")
            raise InputError(
                f"{name!r:.80} holds {kind}: a quantised weight without its scale. Nearest: the checkpoint in float32, "
                "float16 or bfloat16."
            )
