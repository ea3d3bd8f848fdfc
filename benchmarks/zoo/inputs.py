"""Inputs with which transformers itself runs a model, independent of those that limitformer chooses."""

from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.configurations import number_in

Named = dict[str, Any]
TOKENS = 16
IDS = torch.arange(3, 3 + TOKENS)[None]
WIDTH = ("hidden_size", "d_model")


def noise(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def ones(*size: int) -> Tensor:
    return torch.ones(*size, dtype=torch.long)


def candidates(config: Any, model: Any) -> Iterator[Named]:
    """Yield inputs to try, the most natural first."""
    if config.model_type in OWN:
        yield OWN[config.model_type](config)
    parameters = dict(signature(type(model).forward).parameters)
    needed = [
        name
        for name, each in parameters.items()
        if name != "self"
        and each.default is Parameter.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    usual = list(by_main_input(config, getattr(model, "main_input_name", "input_ids")))
    read = list(by_signature(config, parameters, needed))
    yield from read + usual if needed else usual + read


def by_main_input(config: Any, main: str) -> Iterator[Named]:
    """Yield texts, images, videos and sounds, those of the main input first."""
    channels, mel = number_in(config, ("num_channels", "in_channels", "in_chans"), 3), mel_bins(config)
    size = number_in(config, ("image_size", "img_size", "input_image_size"), 64)
    frames = number_in(config, ("num_frames", "frames_per_clip"), 8)
    pixels = noise(1, channels, size, size)
    text: list[Named] = [{"input_ids": ids_for(config)}]
    text.append(text[0] | {"decoder_input_ids": text[0]["input_ids"]})
    image: list[Named] = [{"pixel_values": each} for each in (pixels, noise(1, channels, 64, 64))]
    image.append({"pixel_values": noise(1, channels, 224, 224)})
    both = [text[0] | image[0]]
    video: list[Named] = [
        {name: noise(1, frames, channels, size, size)} for name in ("pixel_values", "pixel_values_videos")
    ]
    sound: list[Named] = [{"input_values": each} for each in (noise(1, 8000), noise(1, 1, 8000))]
    sound += [{"input_features": each} for each in (noise(1, 64, mel), noise(1, mel, 64))]
    sound.append({"input_values": noise(1, 64, mel)})
    decoder = {"decoder_input_ids": text[0]["input_ids"]}
    sound += [decoder | {"input_features": noise(1, mel, 64)}, decoder | {"input_values": noise(1, 8000)}]
    yield from {
        "pixel_values": image + video + both + text,
        "input_values": sound + text,
        "input_features": sound + text,
        "pixel_values_videos": video + image,
    }.get(main, text + both + image + video + sound)


def by_signature(config: Any, parameters: dict[str, Any], needed: list[str]) -> Iterator[Named]:
    """Yield inputs for a `forward` that needs particular arguments."""
    known, mel = tensors_by_name(config), mel_bins(config)
    patch = number_in(config, ("patch_size",), 8)
    channels = number_in(config, ("in_channels", "num_channels", "in_chans"), 3)
    if needed and all(name in known for name in needed):
        base: Named = {name: known[name] for name in needed}
        patches = "pixel_values" in base and ("grid_thw" in base or "image_grid_thw" in base)
        if patches:
            yield base | {"pixel_values": known["hidden_states"]}
        yield base
        if patches:
            yield base | {"pixel_values": noise(TOKENS, channels, patch, patch)}
        if "input_features" in base:
            yield base | {"input_features": noise(1, 64, mel)}
            yield base | {"input_features": noise(mel, 64)}
            yield base | {"input_features_mask": ones(1, 64)}
        if "input_ids" not in base:
            yield base | {"input_ids": IDS}
        if "pixel_values" in parameters and "pixel_values" not in base:
            yield base | {"pixel_values": known["pixel_values"]}
    for names in SETS:
        if set(needed) <= set(names) <= parameters.keys():
            yield {name: known[name] for name in names}
            if "input_features" in names:
                yield {name: known[name] for name in names} | {"input_features": noise(1, 64, mel)}


SETS = (
    ("input_ids", "bbox"),
    ("input_ids", "bbox", "pixel_values"),
    ("input_ids", "visual_feats", "visual_pos"),
    ("input_ids", "input_features"),
    ("input_ids", "input_values"),
    ("inputs_embeds",),
    ("input_ids", "qformer_input_ids", "pixel_values"),
    ("input_features", "input_features_mask"),
    ("past_values",),
)


def tensors_by_name(config: Any) -> dict[str, Tensor]:
    size = number_in(config, ("image_size", "img_size", "input_image_size"), 64)
    channels = number_in(config, ("in_channels", "num_channels", "in_chans"), 3)
    patch = number_in(config, ("temporal_patch_size",), 1) * number_in(config, ("patch_size",), 8) ** 2
    width, grid = number_in(config, WIDTH, 64), torch.tensor([[1, 4, 4]])
    past = number_in(config, ("context_length",), 32), number_in(config, ("num_input_channels",), 1)
    return {
        **dict.fromkeys(("input_ids", "decoder_input_ids", "qformer_input_ids"), ids_for(config)),
        "pixel_values": noise(1, number_in(config, ("num_channels", "in_channels", "in_chans"), 3), size, size),
        **dict.fromkeys(("grid_thw", "image_grid_thw"), grid),
        "hidden_states": noise(TOKENS, channels * patch),
        "input_features": noise(1, mel_bins(config), 64),
        "input_features_mask": ones(1, 64),
        "bbox": 0 * ones(1, TOKENS, 4),
        "input_values": noise(1, 8000),
        **dict.fromkeys(("inputs_embeds", "query_embeds"), noise(1, TOKENS, width)),
        "past_values": noise(1, *past),
        "visual_feats": noise(1, 8, number_in(config, ("visual_feat_dim",), 64)),
        "visual_pos": noise(1, 8, 4).abs(),
        **dict.fromkeys(("target_sizes", "tgt_sizes"), torch.tensor([[4, 4]])),
    }


def ids_for(config: Any) -> Tensor:
    """Return distinct ids that are not special."""
    special = set[Any]()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        each = getattr(config, name, None)
        special |= set(each) if isinstance(each, list | tuple) else {each}
    return torch.tensor([[k for k in range(TOKENS + len(special)) if k not in special][:TOKENS]])


def mel_bins(config: Any) -> int:
    names = ("num_mel_bins", "feature_size", "n_mels", "num_mels", "input_feat_per_channel", "mel_dim")
    return number_in(config, names, 80)


def time_series(config: Any) -> Named:
    past, features = config.context_length + max(config.lags_sequence), config.num_time_features
    return {
        "past_values": noise(1, past),
        "past_time_features": noise(1, past, features),
        "past_observed_mask": torch.ones(1, past),
        "future_values": noise(1, config.prediction_length),
        "future_time_features": noise(1, config.prediction_length, features),
    }


def packed_patches(config: Any) -> Named:
    patch = getattr(config, "vision_config", config).patch_size
    sizes = {"pixel_attention_mask": ones(1, TOKENS), "spatial_shapes": torch.tensor([[4, 4]])}
    return {"pixel_values": noise(1, TOKENS, 3 * patch**2)} | sizes


def muse_patches(_: Any) -> Named:
    return {"pixel_values": noise(TOKENS, 384), "grid_thw": torch.tensor([[1, 4, 4]])}


def transcription(_: Any) -> Named:
    return {"input_features": noise(1, 64, 128), "attention_mask": ones(1, 64), "decoder_input_ids": IDS}


def mel_first(config: Any) -> Named:
    return {"input_features": noise(1, config.num_mel_bins, 64)}


OWN: dict[str, Callable[[Any], Named]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), time_series),
    **dict.fromkeys(("siglip2", "siglip2_vision_model"), packed_patches),
    **dict.fromkeys(("muse_glimmer_vision", "muse_spark_vision"), muse_patches),
    **dict.fromkeys(("canary", "cohere_asr"), transcription),
    **dict.fromkeys(("qwen2_audio_encoder", "voxtral_encoder", "moss_transcribe_diarize_audio"), mel_first),
    **dict.fromkeys(
        ("granite_speech5_encoder", "granite_speech5_ctc"), lambda c: {"input_features": noise(1, 64, 320)}
    ),
    "audio-spectrogram-transformer": lambda c: {"input_values": noise(1, c.max_length, c.num_mel_bins)},
    "clap": lambda c: {
        "input_ids": IDS,
        "input_features": noise(1, 1, 1001, 64),
        "is_longer": torch.tensor([[True]]),
    },
    "decision_transformer": lambda c: {
        "states": noise(1, 5, c.state_dim),
        "actions": noise(1, 5, c.act_dim),
        "rewards": noise(1, 5, 1),
        "returns_to_go": noise(1, 5, 1),
        "timesteps": torch.arange(5)[None],
        "attention_mask": ones(1, 5),
    },
    "seggpt": lambda c: dict.fromkeys(("pixel_values", "prompt_pixel_values", "prompt_masks"), noise(1, 3, 32, 32)),
    "timesfm": lambda c: {"past_values": [noise(64)], "freq": torch.tensor([[0]])},
    "udop": lambda c: {"input_ids": IDS, "bbox": torch.zeros(1, TOKENS, 4), "decoder_input_ids": IDS},
    "speech_to_text": lambda c: {
        "input_features": noise(1, 64, c.input_feat_per_channel * c.input_channels),
        "decoder_input_ids": IDS,
    },
    "xclip": lambda c: {
        "input_ids": IDS,
        "pixel_values": noise(1, c.vision_config.num_frames, 3, *2 * [c.vision_config.image_size]),
    },
    "qwen3_asr_encoder": lambda c: {
        "input_features": noise(1, c.num_mel_bins, 200),
        "input_features_mask": ones(1, 200),
    },
    "video_llama_3_vision": lambda c: {
        "pixel_values": noise(TOKENS, 3 * c.patch_size**2),
        "grid_thw": torch.tensor([[1, 4, 4]]),
        "merge_sizes": torch.tensor([1]),
    },
    "fun_asr_nano_encoder": lambda c: {"input_features": noise(1, 64, 560), "input_features_mask": ones(1, 64)},
    "gemma3n_audio": lambda c: {
        "audio_mel": noise(1, 64, c.input_feat_size),
        "audio_mel_mask": torch.zeros(1, 64, dtype=torch.bool),
    },
    "align": lambda c: {"input_ids": IDS, "pixel_values": noise(1, 3, 64, 64)},
    "kosmos-2": lambda c: {
        "input_ids": IDS,
        "pixel_values": noise(1, 3, 32, 32),
        "image_embeds_position_mask": torch.tensor([([0] * 4 + [1] * c.latent_query_num + [0] * TOKENS)[:TOKENS]]),
    },
    "idefics": lambda c: {
        "input_ids": IDS,
        "pixel_values": noise(1, 1, 3, *2 * [c.vision_config.image_size]),
        "image_attention_mask": ones(1, TOKENS, 1),
        "attention_mask": ones(1, TOKENS),
    },
    "speecht5": lambda c: dict.fromkeys(("input_values", "decoder_input_values"), noise(1, TOKENS, c.hidden_size)),
    "videoprism": lambda c: {"input_ids": IDS, "pixel_values_videos": noise(1, 4, 3, 32, 32)},
    "lightglue": lambda c: {"pixel_values": noise(1, 2, 3, 64, 64)},
    "blip_2_qformer": lambda c: {
        "query_embeds": noise(1, TOKENS, c.hidden_size),
        "encoder_hidden_states": noise(1, 8, c.encoder_hidden_size),
    },
    "tvp": lambda c: {"input_ids": IDS, "pixel_values": noise(1, 2, 3, 64, 64), "attention_mask": ones(1, TOKENS)},
}
