"""Load a checkpoint from its folder: every weight comes from the files, none is drawn and none is left over.

Transformers builds the class and sets the weights. It receives tensors and a configuration but never the folder, so
that nothing in the folder chooses code, kernels, adapters or other files. A missing weight, which transformers would
draw, and whole numbers, which it would take for weights, are errors here.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import escaped_errors, one_line, readable_name
from limitformer.checking.weights import check_numbers, weights_in
from limitformer.hf import load_shaped
from limitformer.hf.attention import ATTENTION
from limitformer.hf.marks import recorded_class, unmark
from limitformer.weightless.classes import family_classes, named_class
from limitformer.weightless.configurations import config_from, values_in
from limitformer.weightless.models import as_plain_formulas
from limitformer.weightless.quiet import quiet_transformers
from limitformer.weightless.sizes import Size, require_room, size_of

LISTED = 3  # names in a message
LARGE = 2**26  # entries; larger networks are not built only to name the missing weights
NAMES_CODE = (
    "auto_map",
    "_attn_implementation",
    "attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "fusion_config",
    "transformers_weights",
)


@escaped_errors()
def load(folder: Path) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the network in a checkpoint's folder, and the weights of its files that its class does not read.

    These belong to other heads and poolers, which change nothing.

    Raises:
        InputError: the folder does not hold one whole network, in real numbers, of a class of transformers.
    """
    values = values_in(folder)
    with one_line(f"config.json in {readable_name(folder)} cannot be read"):
        refuse_parts(folder, values)
    if values.get("shaping") is not None:
        return shaped_in(folder, values), ()
    config = config_from(values)
    require(
        hasattr(config, "model_type"),
        f"{folder / 'config.json'} declares a {type(config).__name__}, which has no weights.",
    )
    kind, tensors = named_class(config), weights_in(folder)
    if kind is None:
        names = fitting_class(config, None, tensors) or ", ".join(list(family_classes(config))[:LISTED])
        raise InputError(f"config.json in {folder} must name the class under 'architectures', such as {names}.")
    config = as_plain_formulas(config)
    size = size_of(lambda: kind(config), kind.__name__)
    check_numbers(tensors, size.names)
    check_room(size, tensors, folder)
    module, report = filled(kind, config, tensors, folder)
    unread = unread_of(report, kind, config, tensors, folder)
    check_written(module, folder)
    return module, unread


def check_written(module: nn.Module, folder: Path) -> None:
    """Raise `InputError` if all matrices are 0."""
    matrices = [each for each in module.parameters() if each.dim() > 1]
    zero = bool(matrices) and not any(bool(each.any()) for each in matrices)
    require(not zero, f"every matrix in {folder} is 0: the files were never written to their end, or hold no network.")


def refuse_parts(folder: Path, values: dict[str, Any]) -> None:
    """Raise `InputError` for quantised weights and for adapters."""
    for quantised in values_under("quantization_config", values):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise InputError(
            f"The weights in {folder} are quantised ({method!r:.60}); real numbers are measured. Nearest: the "
            f"checkpoint in bfloat16, or {folder / 'config.json'} for its law."
        )
    adapters = sorted(each.name for each in folder.iterdir() if each.name.startswith("adapter_"))
    require(
        not adapters,
        f"{folder} holds an adapter, {', '.join(adapters[:1])!r}. Nearest: merge_and_unload, then save_pretrained.",
    )


def values_under(name: str, values: Any) -> Iterable[Any]:
    """Yield the values of this name at any level of a configuration, except nulls."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key == name and value is not None:
            yield value
        yield from values_under(name, value)


def shaped_in(folder: Path, values: dict[str, Any]) -> nn.Module:
    """Load a model that `limitformer.hf.shape_model` shaped, after a check of its files and sizes."""
    shaping = values["shaping"]
    require(
        isinstance(shaping, dict),
        f"'shaping' in config.json in {folder} must hold what Shaping takes; got {shaping!r:.80}.",
    )
    for name in NAMES_CODE:
        strange = [each for each in values_under(name, values) if each != ATTENTION]
        require(
            not strange, f"config.json in {folder} names code under {name!r}, {strange[:1]!r:.80}, which is not run."
        )
    config = config_from(values)
    kind, tensors = recorded_class(config), weights_in(folder)
    unmark(config)
    check_numbers(tensors, tensors)
    size = size_of(lambda: kind(as_plain_formulas(config)), kind.__name__)
    check_room(size, tensors, folder)
    both = {name: (tuple(tensors[name].shape), shape) for name, shape in size.names.items() if name in tensors}
    other = [f"{name} {there} for {wanted}" for name, (there, wanted) in sorted(both.items()) if there != wanted]
    require(not other, f"{folder} does not hold a {kind.__name__} whole: it holds other shapes, {listed(other)}.")
    with quiet_transformers(), one_line(f"{readable_name(folder)} cannot be loaded"):
        module: nn.Module = load_shaped(folder, local_files_only=True, dtype=type_of(tensors))
    check_written(module, folder)
    return module


def check_room(size: Size, tensors: dict[str, Tensor], folder: Path) -> None:
    """Raise `InputError` for a network that does not fit into memory, or is far larger than its files."""
    require_room(size.whole, f"The network in {folder}", type_of(tensors).itemsize)
    stored = sum(each.numel() for each in tensors.values())
    lacks = (
        size.whole > LARGE and sum(torch.Size(shape).numel() for shape in size.names.values()) > 2 * stored
    )  # tied weights count twice there
    missing = [name for name in size.names if name not in tensors][:LISTED]
    require(
        not lacks,
        f"config.json in {folder} describes {size.whole:,} entries, its files hold {stored:,}; such as "
        f"{', '.join(missing)} is missing.",
    )


def filled(kind: Any, config: Any, tensors: dict[str, Tensor], folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the class with these weights, and the report of missing, unexpected and misshapen ones."""
    with quiet_transformers(), one_line(f"{readable_name(folder)} cannot be loaded"):
        module, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=type_of(tensors),
            ignore_mismatched_sizes=True,  # the report has them
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    return module, report


def type_of(tensors: dict[str, Tensor]) -> torch.dtype:
    """Return float64 if any weight is float64; else float32, in which sixteen bits lose nothing."""
    return torch.float64 if any(each.dtype == torch.float64 for each in tensors.values()) else torch.float32


def unread_of(
    report: dict[str, Any], kind: Any, config: Any, tensors: dict[str, Tensor], folder: Path
) -> tuple[str, ...]:
    """Return the weights that are left over and belong to other heads, if no class of the family has all files.

    Raises:
        InputError: weights are missing, misshapen, or left over for another reason; the message names them.
    """
    faults = []
    if missing := sorted(report["missing_keys"]):
        faults.append(f"lacks {listed(missing)}")
    if unexpected := sorted(report["unexpected_keys"]):
        faults.append(f"holds {listed(unexpected)} that {kind.__name__} does not have")
    shapes = {name: f"{name} {tuple(there)} for {tuple(wanted)}" for name, there, wanted in report["mismatched_keys"]}
    if shapes:
        faults.append(f"holds other shapes, {listed([shapes[name] for name in sorted(shapes)])}")
    if report["error_msgs"]:
        faults.append(f"cannot be put in: {report['error_msgs'][0]!s:.200}")
    if faults:
        better = fitting_class(config, kind, tensors)
        if unexpected and len(faults) == 1 and not better and not missing and set(unexpected) <= names_of_heads(config):
            return tuple(unexpected)
        repair = f' Nearest: "architectures": ["{better}"] in config.json.' if better else ""
        raise InputError(f"{folder} does not hold a {kind.__name__} whole: it {'; it '.join(faults)}.{repair}")
    return ()


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    text = ", ".join(f"{name:.100}" for name in names[:LISTED])
    return text if len(names) <= LISTED else f"{text} and {len(names) - LISTED} more weights"


def fitting_class(config: Any, kind: Any, tensors: dict[str, Tensor]) -> str:
    """Return the class of the family that has the weights of the files, or an empty string."""
    for name, other in family_classes(config).items():
        if other is kind:
            continue
        try:
            module = on_meta(other, config)
        except InputError:
            continue
        distinct = {key: tuple(each.shape) for key, each in module.named_parameters()}
        every = {key: tuple(each.shape) for key, each in module.named_parameters(remove_duplicate=False)}
        buffers = {key for key, _ in module.named_buffers()}
        shapes = {present_name(key): tuple(each.shape) for key, each in tensors.items() if key not in buffers}
        if distinct.items() <= shapes.items() <= every.items():
            return name
    return ""


def present_name(name: str) -> str:
    """Return a weight's current name: norms once had a gamma and a beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def names_of_heads(config: Any) -> set[str]:
    """Return the weights of all classes of the family, those of the base model also under its name in the others."""
    result: set[str] = set()
    for kind in family_classes(config).values():
        try:
            names = [name for name, _ in on_meta(kind, config).named_parameters(remove_duplicate=False)]
        except InputError:
            continue
        result.update(names)
        result.update(f"{kind.base_model_prefix}.{name}" for name in names)
    return result


def on_meta(kind: Any, config: Any) -> nn.Module:
    """Build a class of the family on the meta device."""
    with quiet_transformers(), one_line(kind.__name__), torch.device("meta"):
        module: nn.Module = kind(config)
    return module
