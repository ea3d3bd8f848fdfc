"""Inputs for a class of transformers, by the signature of its `forward` and its configuration.

A class may read text, images, sound or several of them. `choices_of` proposes named tensors, the most complete first;
`first_accepted` returns the first that the module's own code accepts. Images and sounds are noise.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import Parameter
from itertools import islice, product
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitformer.base.foreign import lookup, pair
from limitformer.subjects.classes import parameters_of

Named = dict[str, Tensor]
MOST_TRIED, MOST_IMAGES = 40, 12
PLACEHOLDERS = {  # token ids that stand for an image or a sound, by the argument that holds it
    "pixel_values": ("image_token_id", "image_token_index", "image_token", "media_token_id", "im_patch_id"),
    "pixel_values_images": ("image_token_id", "image_token_index"),
    "pixel_values_videos": ("video_token_id", "video_token_index"),
    "input_features": ("audio_token_id", "audio_token_index", "audio_token"),
    "input_values": ("audio_token_id", "audio_token_index"),
}
KINDS = {"pixel_values": 1, "pixel_values_images": 1, "pixel_values_videos": 2}  # in mm_token_type_ids; sounds are 3
COUNTED = re.compile(r"features:? *(\d+)")  # how transformers reports the number of placeholders that it needs
VISION, AUDIO = ("vision", "image", "vit", "visual"), ("audio", "speech", "encoder")
IMAGES = ("pixel_values", "pixel_values_images", "pixel_values_videos", "hidden_states", "images")
SOUND_MASKS = ("input_features_mask", "feature_attention_mask")
SOUNDS = ("input_features", "input_values", "audio_mel", "audio_values")
SAMPLES, FRAMES = 8000, 64  # of a sound
CODEC_SAMPLES = 1600  # of a sound for a codec, which has as many tokens in its first blocks
EPISODE, EPISODE_STEPS = ("states", "actions", "rewards", "returns_to_go", "timesteps"), 5  # of a decision model


@dataclass(frozen=True)
class Choice:
    """Named tensors, and the token that is repeated in the text once for each feature of an image or sound."""

    fixed: Named
    placeholder: int | None = None
    kind: int = 0
    width: int = 1  # of the embeddings that replace the placeholders

    def with_placeholders(self, number: int) -> "Choice":
        """Return the choice with this number of placeholders before the last token of the text."""
        ids, token = self.fixed["input_ids"], self.placeholder
        if token is None:
            return self
        text = ids[:, ids[0] != token]
        every = torch.cat([text[:, :-1], torch.full((len(ids), number), token), text[:, -1:]], 1)
        names = self.fixed.keys() & {"mm_token_type_ids", "token_type_ids"}  # they hold the kind of each token
        kinds = {name: self.kind * torch.eq(every, token).long() for name in names}
        return replace(self, fixed=self.fixed | {"input_ids": every} | kinds)


def choices_of(kind: Any, config: Any, ids: Tensor | None, rows: int, decodes: bool) -> list[Choice]:
    """Return inputs for a class of transformers, the most complete first.

    Args:
        ids: tokens of a text (rows, M); None: the class reads no text, or the user gave images or sounds.
        rows: number of images or sounds, if there is no text.
        decodes: whether a decoder reads the text one token later.
    """
    main = getattr(kind, "main_input_name", "input_ids")
    builder = InputBuilder(config, parameters_of(kind), main, ids, rows, decodes)
    seen, result = set[str](), list[Choice]()
    for each in islice(builder.choices(), MOST_TRIED):
        key = str({name: (tuple(one.shape), one.dtype) for name, one in each.fixed.items()})
        if key not in seen:
            seen.add(key)
            result.append(each)
    return result


class InputBuilder:
    """Builds a tensor for each argument of a `forward`."""

    def __init__(
        self, config: Any, parameters: dict[str, Parameter], main: str, ids: Tensor | None, rows: int, decodes: bool
    ) -> None:
        self.config, self.names, self.main, self.ids, self.decodes = config, list(parameters), main, ids, decodes
        positional = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        self.needed = [n for n, p in parameters.items() if p.default is Parameter.empty and p.kind in positional]
        self.rows = rows if ids is None else len(ids)

    def choices(self) -> Iterator[Choice]:
        """Yield choices: with all that the class reads, then with less, then with more than it needs."""
        text, images, sounds, others = self.text(), self.images(), self.sounds(), self.others()
        reads_text = "input_ids" in self.names and self.main not in (*IMAGES, *SOUNDS)
        if reads_text:
            for kind in (images, sounds):
                for each, other in product(kind[:MOST_IMAGES], others):
                    yield from self.with_token(text | other | each)
            yield from (Choice(text | other) for other in others)
            first = {"decoder_input_ids": self.tokens} if "decoder_input_ids" in self.names else {}
            for extra in (first, self.more(), first | self.more()):
                yield from (Choice(text | other | extra) for other in others if extra)
        seen = images or sounds or [{}]
        more = [] if reads_text else [self.more()]
        if "input_ids" in self.names and not reads_text:
            more.append(text)
        if "decoder_input_ids" in self.names:
            more.append({"decoder_input_ids": self.tokens})  # besides images or sounds
        books = lookup(self.config, ("num_codebooks",)) is not None  # then ids have another form
        if books and "inputs_embeds" in self.names and (embedded := self.make("inputs_embeds")) is not None:
            more.append({"inputs_embeds": embedded})
        plain: list[Named] = [{}] if images or sounds or self.needed else []
        for extra in [*plain, *more]:
            yield from (Choice(other | each | extra) for each, other in product(seen, others) if other | each | extra)

    @property
    def past(self) -> int:
        """The number of past values of a time series."""
        return self.number(("context_length",), 32) + max(lookup(self.config, ("lags_sequence",)) or [0])

    @property
    def tokens(self) -> Tensor:
        return torch.arange(3, 19)[None].repeat(self.rows, 1) if self.ids is None else self.ids

    def text(self) -> Named:
        """Return the text, which a decoder reads one token later."""
        ids = self.tokens
        result = {"input_ids": ids} if "input_ids" in self.names else {}
        if self.decodes and "decoder_input_ids" in self.names:
            first = torch.full_like(ids[:, :1], getattr(self.config, "decoder_start_token_id", None) or 0)
            result["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)
        return result

    def with_token(self, fixed: Named) -> Iterator[Choice]:
        """Yield the choice with one placeholder if the configuration has one, else as it is."""
        for name, attributes in PLACEHOLDERS.items():
            token = lookup(self.config, attributes) if name in fixed else None
            if isinstance(token, int) and "input_ids" in fixed:
                kinds = ["mm_token_type_ids"] if "mm_token_type_ids" in self.names else []
                kinds += ["token_type_ids"] if not kinds and "token_type_ids" in self.names else []
                width = self.number(("hidden_size", "d_model"), 1, ("text", "language", "llm", "decoder"))
                marked = Choice(fixed | dict.fromkeys(kinds, fixed["input_ids"]), token, KINDS.get(name, 3), width)
                yield marked.with_placeholders(1)
                return
        yield Choice(fixed)

    def images(self) -> list[Named]:
        """Return images in the forms that the signature and the configuration suggest, none if it reads none."""
        name = next((each for each in IMAGES if each in self.names), None)
        grid = next((each for each in self.names if each.endswith(("grid_thw", "grid_hws"))), None)
        if name is None or (name == "hidden_states" and grid is None):
            return []
        channels = self.number(("num_channels", "in_channels", "in_chans", "num_input_channels"), 3)
        patch = pair(lookup(self.config, ("patch_size", "spatial_patch_size"), VISION), 8)
        if grid is not None:
            return self.patches(name, grid, channels, patch)
        if "spatial_shapes" in self.names:
            flat = noise(self.rows, 16, channels * patch[0] * patch[1])
            shapes = torch.tensor([[4, 4]] * self.rows)
            return [{name: flat, "pixel_attention_mask": torch.ones(self.rows, 16).long(), "spatial_shapes": shapes}]
        own = lookup(self.config, ("image_size", "img_size", "input_image_size", "input_size"), VISION)
        sizes = list(dict.fromkeys(pair(each, 64) for each in (own, 64, 96, 224)))
        frames = self.number(("num_frames", "frames_per_clip", "tubelet_size"), 0)
        single = [{name: noise(self.rows, channels, *size)} for size in sizes]
        several = [{name: noise(self.rows, max(1, frames), channels, *size)} for size in sizes[:1]]
        several += [{name: noise(self.rows, number, channels, *sizes[0])} for number in (1, 2, 3, 5)]
        pinpoints = lookup(self.config, ("image_grid_pinpoints",))
        if pinpoints and "image_sizes" in self.names:  # tiles of the smallest size that the configuration has
            tall, wide = min(pinpoints, key=prod)
            tiles = 1 + ceil(tall / sizes[0][0]) * ceil(wide / sizes[0][1])
            tiled = {name: noise(self.rows, tiles, channels, *sizes[0])}
            single = [tiled | {"image_sizes": torch.tensor([[tall, wide]] * self.rows)}, *single]
        if "pixel_attention_mask" in self.names:
            mask = torch.ones(self.rows, 1, dtype=torch.bool)
            several = [several[-4] | {"pixel_attention_mask": mask}, *several]
        if "image_attention_mask" in self.names:
            mask = torch.ones(self.rows, self.tokens.shape[1], 1, dtype=torch.long)
            several = [each | {"image_attention_mask": mask} for each in several[:1]] + several
        every = [*several, *single] if frames or name != "pixel_values" else [*single, *several]
        if "image_sizes" in self.names:
            every = [
                each | {"image_sizes": torch.tensor([each[name].shape[-2:]] * self.rows)} for each in every
            ] + every
        return every

    def patches(self, name: str, grid: str, channels: int, patch: tuple[int, int]) -> list[Named]:
        """Return the patches of one image, and the grid that they form."""
        side = 4 * self.number(("spatial_merge_size", "merge_size"), 1)
        side = side if side <= 8 else 8
        times = self.number(("temporal_patch_size",), 1)
        shape = torch.tensor([[1, side, side]] if grid.endswith("thw") else [[side, side]])
        extra = {each: torch.tensor([1]) for each in self.names if each.endswith("merge_sizes")}
        rows, area = side * side, patch[0] * patch[1]
        flat = list(dict.fromkeys((channels * times * area, channels * area, channels * 2 * area)))
        forms = [(rows, each) for each in flat] + [(rows, channels, *patch), (rows, channels, times, *patch)]
        return [{name: noise(*form), grid: shape} | extra for form in forms]

    def sounds(self) -> list[Named]:
        """Return sounds as waves and as features, none if the class reads none."""
        name = next((each for each in SOUNDS if each in self.names), None)
        if name is None:
            return []
        bands = self.number(
            ("num_mel_bins", "n_mels", "num_mels", "mel_dim", "input_feat_size", "input_feat_per_channel", "input_dim",
             "feature_size", "num_bands"), 80, AUDIO,
        )  # fmt: skip
        bands *= self.number(("input_channels",), 1, AUDIO) if lookup(self.config, ("input_feat_per_channel",)) else 1
        longest = 2 * self.number(("max_source_positions",), 0, AUDIO)
        channels = self.number(("audio_channels", "num_channels"), 1, AUDIO)
        if name in ("input_features", "audio_mel"):
            widths = dict.fromkeys((bands, 80, 128, 320, 560))
            shapes: list[tuple[tuple[int, ...], int]] = [((self.rows, FRAMES, bands), FRAMES)]
            shapes += [((self.rows, bands, frames), frames) for frames in (FRAMES, longest, 200) if frames]
            shapes += [((self.rows, FRAMES, each), FRAMES) for each in list(widths)[1:]]
            shapes += [((bands, FRAMES), FRAMES), ((self.rows, 1, 1001, bands), 1001)]
        else:
            frames = self.number(("max_length",), FRAMES, AUDIO)
            spectrum: list[tuple[tuple[int, ...], int]] = [((self.rows, frames, bands), frames)]
            width = self.number(("hidden_size",), 64)
            length = SAMPLES if lookup(self.config, ("upsampling_ratios",)) is None else CODEC_SAMPLES
            shapes = [((self.rows, length), length), ((self.rows, channels, length), length)]
            shapes = spectrum + shapes if lookup(self.config, ("num_mel_bins",)) else shapes + spectrum
            shapes.append(((self.rows, FRAMES, width), FRAMES))
        needed = [each for each in self.needed if each.endswith("mask")]
        masks = [each for each in self.names if each.endswith(SOUND_MASKS)]
        fill = torch.zeros if name == "audio_mel" else torch.ones  # Gemma's mask marks padding
        kind = torch.bool if name == "audio_mel" else torch.long
        return [
            {name: noise(*shape)} | {each: fill(self.rows, length, dtype=kind) for each in named}
            for shape, length in shapes
            for named in ([needed] if set(masks) <= set(needed) else [needed, [*needed, *masks]])
        ]

    def others(self) -> list[Named]:
        """Return the other arguments that the signature demands; a single empty choice if there are none."""
        known = {*IMAGES, *SOUNDS, "input_ids", "decoder_input_ids"}
        names = [name for name in self.needed if name not in known and not name.endswith("thw")]
        if "query_embeds" in names:
            names.append("encoder_hidden_states")
        values = {name: self.make(name) for name in names}
        return [{name: each for name, each in values.items() if each is not None}]

    def more(self) -> Named:
        """Return arguments that some classes need though their signature does not say so."""
        names = ["bbox", "visual_feats", "visual_pos", "is_longer", "decoder_input_values", *EPISODE]
        names += ["future_values", "future_time_features"] if "past_time_features" in self.names else []
        return {name: each for name in names if name in self.names and (each := self.make(name)) is not None}

    def make(self, name: str) -> Tensor | None:
        """Return a tensor for an argument of this name."""
        rows, tokens = self.rows, self.tokens.shape[1]
        width = self.number(("hidden_size", "d_model"), 64)
        if name.endswith("_ids"):
            return self.tokens
        if name == "bbox":  # shares of the page in a model with a decoder, else whole numbers
            return torch.zeros(rows, tokens, 4, dtype=torch.float if "decoder_input_ids" in self.names else torch.long)
        if name == "is_longer":
            return torch.ones(rows, 1, dtype=torch.bool)
        if name == "visual_pos":
            return noise(rows, 8, 4).abs()
        if name in ("timesteps", "freq"):
            steps = torch.arange(EPISODE_STEPS)[None].repeat(rows, 1)
            return steps if name == "timesteps" else torch.zeros(rows, 1).long()
        if name in ("past_observed_mask", "image_attention_mask", "attention_mask"):
            return torch.ones(rows, self.past if name.startswith("past") else tokens, dtype=torch.long)
        features, lags = lookup(self.config, ("num_time_features",)) or 0, lookup(self.config, ("lags_sequence",))
        shape = {
            "past_time_features": (rows, self.past, features),
            "future_time_features": (rows, self.number(("prediction_length",), 8), features),
            "future_values": (rows, self.number(("prediction_length",), 8)),
            "states": (rows, EPISODE_STEPS, self.number(("state_dim",), 1)),
            "actions": (rows, EPISODE_STEPS, self.number(("act_dim",), 1)),
            "rewards": (rows, EPISODE_STEPS, 1),
            "returns_to_go": (rows, EPISODE_STEPS, 1),
            "decoder_input_values": (rows, FRAMES, width),
            "inputs_embeds": (rows, tokens, width),
            "query_embeds": (rows, tokens, width),
            "encoder_hidden_states": (rows, 8, self.number(("encoder_hidden_size",), width)),
            "visual_feats": (rows, 8, self.number(("visual_feat_dim",), width)),
            "past_values": (rows, self.past, *([] if lags else [self.number(("num_input_channels",), 1)])),
        }.get(name)
        return None if shape is None else noise(*shape)

    def number(self, names: tuple[str, ...], default: int, kind: tuple[str, ...] = VISION) -> int:
        """Return a number of the configuration, the first of several."""
        return pair(lookup(self.config, names, kind), default)[0]


def noise(*shape: int) -> Tensor:
    """Return standard normal numbers, the same at every call."""
    return torch.tensor(np.random.Generator(np.random.Philox(0)).standard_normal(shape))


def first_accepted(choices: list[Choice], call: Callable[[Choice], Any], measure: Callable[[Choice], Any]) -> Choice:
    """Return the first choice that the module accepts and that can be measured, else the first that it accepts.

    The first choice of all is returned if it accepts none, so that its error is the one that is raised.
    """
    accepted = None
    for choice in choices:
        if accepted is not None and accepted.fixed.keys() == choice.fixed.keys():
            continue  # only other sizes of what cannot be measured
        fitting = accepted_form(choice, call)
        if fitting is None:
            continue
        try:
            measure(fitting)
        except MemoryError:
            raise
        except Exception:  # of the measurement, which raises it again if nothing else can be measured  # noqa: BLE001
            accepted = accepted or fitting
            continue
        return fitting
    return accepted or choices[0]


def accepted_form(choice: Choice, call: Callable[[Choice], Any]) -> Choice | None:
    """Return the choice with the number of placeholders that the module asks for, None if it does not accept it."""
    waiting, tried = [choice], set[int]()
    while waiting:
        choice = waiting.pop(0)
        try:
            call(choice)
        except MemoryError:
            raise
        except Exception as error:  # the module's own code, which may raise anything  # noqa: BLE001
            reported = COUNTED.search(str(error)) if choice.placeholder is not None else None
            if reported is not None:  # some classes report the entries of all features
                numbers = {int(reported[1]), int(reported[1]) // choice.width} - tried
                waiting += [choice.with_placeholders(each) for each in sorted(numbers, reverse=True) if each > 0]
                tried |= numbers
        else:
            return choice if tried or choice.placeholder is None or not ignores_image(choice, call) else None
    return None


def ignores_image(choice: Choice, call: Callable[[Choice], Any]) -> bool:
    """Whether a module also accepts another number of placeholders, and so does not read what they stand for."""
    try:
        call(choice.with_placeholders(2))
    except MemoryError:
        raise
    except Exception:  # the module's own code, which may raise anything  # noqa: BLE001
        return False
    return True
