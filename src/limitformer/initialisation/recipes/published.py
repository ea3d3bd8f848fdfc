"""The published recipes: functions from a weight to its law, in a docstring of title, source and notes.

A source is a paper, or files of a repository; a commit means that the numbers were read in that version of the files.
`tests/initialisation` holds each recipe against numbers that were computed by hand from the source.
"""

from math import log, sqrt

import numpy as np

from limitformer.initialisation.recipes.law import (
    ComparedLaw,
    Weight,
    constant,
    known_as,
    log_uniform,
    normal,
    orthogonal,
    rescaled_truncated,
    truncated,
    uniform,
    values,
)

ENDS = ("embedding", "position embedding", "head")
READS = ("query", "key", "value", "feed-forward in", "gate")  # matrices that read from the stream
WRITES = ("attention output", "feed-forward out")


def norms(w: Weight) -> ComparedLaw | None:
    return {"norm gain": constant(1), "norm bias": constant(0)}.get(w.role)


def zero_biases(w: Weight) -> ComparedLaw | None:
    return constant(0) if w.role == "bias" else norms(w)


def t5_blocks(w: Weight, scale: float) -> ComparedLaw | None:
    """Return the laws that T5 1.1 and the Switch Transformer share, which differ by a factor of the variance."""
    if w.role == "query":
        return normal(sqrt(scale / (w.width * w.head_dim)))
    if w.role in ("key", "value"):
        return normal(sqrt(scale / w.width))
    if w.role == "attention output":
        return normal(sqrt(scale / w.fan_in))
    if w.role in ("feed-forward in", "gate", "feed-forward out"):
        return rescaled_truncated(sqrt(scale / w.fan_in), 2)
    if w.role == "relative bias":
        return uniform(sqrt(6 * scale / (w.rows + w.columns)))
    if w.role == "head":
        return rescaled_truncated(sqrt(scale / w.width), 2)
    return constant(1) if w.role == "norm gain" else normal(1) if w.role == "embedding" else None


@known_as("gpt2", tied=True)
def gpt2(w: Weight) -> ComparedLaw | None:
    """GPT-2.

    Radford et al. 2019, section 2.3 (residual weights times 1/√N, N the number of residual layers); openai/gpt-2
    src/model.py at 122c55a5 (0.02, positions 0.01)

    The released code draws the residual weights with 0.02; the factor is the paper's, with N = 2L as in nanoGPT and
    Megatron-LM.
    """
    if w.role in WRITES:
        return normal(0.02 / sqrt(2 * w.depth))
    if w.role == "position embedding":
        return normal(0.01)
    return normal(0.02) if w.role in ("embedding", "head", *READS) and w.role != "gate" else zero_biases(w)


@known_as("megatron")
def megatron(w: Weight, std: float = 0.02) -> ComparedLaw | None:
    """Megatron-LM.

    NVIDIA/Megatron-LM megatron/core/utils.py (init_method_normal, scaled_init_method_normal) and
    megatron/core/transformer/transformer_config.py at d98e8a64

    The setting is --init-method-std. Hybrid models divide by √L in place of √(2L).
    """
    if w.role in WRITES:
        return normal(std / sqrt(2 * w.depth))
    return normal(std) if w.role in (*ENDS, "type embedding", "router", *READS) else zero_biases(w)


@known_as("gpt-neox", tied=False)
def gpt_neox(w: Weight) -> ComparedLaw | None:
    """GPT-NeoX: small_init, and wang_init for output projections.

    EleutherAI/gpt-neox megatron/model/init_functions.py and configs/20B.yml at ea7aefd8; small_init: Nguyen and
    Salazar, arXiv 1910.05895
    """
    if w.role in WRITES:
        return normal(2 / w.depth / sqrt(w.width))
    return normal(sqrt(2 / (5 * w.width))) if w.role in (*ENDS, *READS) else zero_biases(w)


@known_as("olmo-normal")
def olmo_normal(w: Weight, std: float = 0.02) -> ComparedLaw | None:
    """OLMo, init_fn normal.

    allenai/OLMo olmo/model.py and olmo/initialization.py at 59a53e3f

    The setting is init_std; init_cutoff_factor is unset.
    """
    return normal(std) if w.role in (*ENDS, *READS, *WRITES) else zero_biases(w)


@known_as("mitchell")
def mitchell(w: Weight) -> ComparedLaw | None:
    """OLMo, init_fn mitchell.

    allenai/OLMo olmo/model.py and olmo/initialization.py at 59a53e3f

    Normal laws are cut at three standard deviations and not rescaled, so that the std is 0.9866 of the number in the
    formula.
    """
    if w.role in WRITES:
        size = w.width if w.role == "attention output" else w.fan_in
        return truncated(1 / sqrt(2 * size * (w.layer + 1)), 3)
    return truncated(1 / sqrt(w.width), 3) if w.role in (*ENDS, *READS) else zero_biases(w)


@known_as("olmo-full-megatron")
def olmo_full_megatron(w: Weight, std: float = 0.02) -> ComparedLaw | None:
    """OLMo, init_fn full_megatron.

    allenai/OLMo olmo/model.py and olmo/initialization.py at 59a53e3f

    The setting is init_std. emb_init_std and scale_emb_init are unset.
    """
    if w.role in WRITES:
        return truncated(std / sqrt(2 * w.depth), 3)
    if w.role == "head":
        return truncated(1 / sqrt(w.width), 3)
    return truncated(std, 3) if w.role in (*ENDS, *READS) else zero_biases(w)


@known_as("llama-depth-init", tied=False)
def llama_depth_init(w: Weight, std: float = 0.02) -> ComparedLaw | None:
    """Llama 3 with torchtitan's depth_init, as its issue 3334 and pull request 3722 describe the intention.

    pytorch/torchtitan torchtitan/models/llama3/__init__.py at b5bcd76c; its issue 3334 and pull request 3722 (bounds of
    three std; only the weights that write to the stream are divided)

    The pull request was open when it was read; `torchtitan` is the code without it.
    """
    if w.role in WRITES:
        return truncated(std / sqrt(2 * (w.layer + 1)), 3)
    if w.role in READS:
        return truncated(std, 3)
    if w.role == "head":
        return truncated(1 / sqrt(w.width), 3)
    return normal(1) if w.role == "embedding" else zero_biases(w)


@known_as("torchtitan", tied=False)
def torchtitan(w: Weight, std: float = 0.02) -> ComparedLaw | None:
    """Llama 3 as torchtitan's code draws it.

    pytorch/torchtitan torchtitan/models/llama3/__init__.py, torchtitan/models/common/param_init.py and config_utils.py
    at b5bcd76c

    The bounds of ±2 are absolute, 100 standard deviations and more, and cut nothing. w3 (feed-forward in) is divided as
    w2 is, though it does not write to the stream.
    """
    if w.role in (*WRITES, "feed-forward in"):
        return truncated(std / sqrt(2 * (w.layer + 1)), 2 * sqrt(2 * (w.layer + 1)) / std)
    if w.role in READS:
        return truncated(std, 2 / std)
    if w.role == "head":
        return truncated(1 / sqrt(w.width), 3)
    return normal(1) if w.role == "embedding" else zero_biases(w)


@known_as("t5", tied=True)
def t5(w: Weight) -> ComparedLaw | None:
    """T5 1.0.

    google-research/t5x t5x/examples/t5/network.py, layers.py and t5_1_0/base.gin at cc342d41

    The logits are divided by √width, which is not a weight. The feed-forward weights are normal, cut at two standard
    deviations of the normal law and rescaled, so that the std is the number in the formula.
    """
    return normal(1) if w.role == "head" else t5_blocks(w, 1.0)


@known_as("t5-v1.1", tied=False)
def t5_1_1(w: Weight) -> ComparedLaw | None:
    """T5 1.1, mT5 and ByT5.

    google-research/t5x t5x/examples/t5/network.py, layers.py and t5_1_1/base.gin at cc342d41

    The feed-forward weights are normal, cut at two standard deviations of the normal law and rescaled, so that the std
    is the number in the formula.
    """
    return t5_blocks(w, 1.0)


SWITCH_NAMES = {
    "expert in": r"\.experts?\..*\.wi\.weight$", "expert out": r"\.experts?\..*\.wo\.weight$",
}  # fmt: skip


@known_as("switch", tied=False, names=SWITCH_NAMES)
def switch(w: Weight, scale: float = 0.1) -> ComparedLaw | None:
    """Switch Transformer.

    google/flaxformer flaxformer/t5x/configs/moe/models/switch_base.gin, tokens_choose_base.gin (SCALE = 0.1) and
    architectures/moe.gin at 399ea3a8; Fedus et al., arXiv 2101.03961
    """
    if w.role in ("expert in", "expert out"):
        return normal(sqrt(scale / w.fan_in))
    if w.role == "router":
        return normal(0.02)
    return None if w.role == "gate" else t5_blocks(w, scale)


@known_as("clip")
def clip(w: Weight) -> ComparedLaw | None:
    """CLIP's text encoder.

    openai/CLIP clip/model.py (initialize_parameters) at 0845fc46

    Biases are those of torch.nn, which are not compared. The code draws the blocks of the text encoder; those of its
    vision transformer are torch's default.
    """
    if w.role in ("query", "key", "value"):
        return normal(1 / sqrt(w.width))
    if w.role in WRITES:
        return normal(1 / sqrt(w.width) / sqrt(2 * w.depth))
    if w.role == "feed-forward in":
        return normal(1 / sqrt(2 * w.width))
    if w.role == "embedding":
        return normal(0.02)
    return normal(0.01) if w.role == "position embedding" else norms(w)


@known_as("big-vision-vit")
def big_vision_vit(w: Weight) -> ComparedLaw | None:
    """ViT of big_vision, as in SigLIP and PaliGemma.

    google-research/big_vision big_vision/models/vit.py at 0b73d7b0

    Biases of the feed-forward layers are normal with std 1e-6, those of attention zero; they are not compared.
    """
    if w.role == "position embedding":
        return normal(1 / sqrt(w.width))
    matrix = w.role in (*READS, *WRITES) and w.role != "gate"
    return uniform(sqrt(6 / (w.fan_in + w.fan_out))) if matrix else norms(w)


@known_as("deepnorm")
def deepnorm(w: Weight) -> ComparedLaw | None:
    """DeepNorm, for an encoder or a decoder alone.

    Wang et al., DeepNet, arXiv 2203.00555; gains, and the weights that have them, as in microsoft/torchscale
    torchscale/architecture/decoder.py at 4d1e0e82

    The gain is (8L)^(−1/4). That the law is Xavier's normal one is known from implementations by others; the text of
    the paper could not be read. The skip connection is multiplied by (2L)^(1/4), which is not a weight.
    """
    if w.role in ("query", "key"):
        return normal(sqrt(2 / (w.fan_in + w.fan_out)))
    if w.role in (*READS, *WRITES):
        return normal((8 * w.depth) ** -0.25 * sqrt(2 / (w.fan_in + w.fan_out)))
    return norms(w)


@known_as("torchscale-deepnorm")
def torchscale_deepnorm(w: Weight) -> ComparedLaw | None:
    """DeepNorm as torchscale's decoder draws it.

    microsoft/torchscale torchscale/architecture/decoder.py, component/multihead_attention.py, feedforward_network.py
    and embedding.py at 4d1e0e82

    Queries, keys and values have Xavier's gain 1/√2. Biases are torch's default, divided with their weights, except
    those of output projections, which are zero; they are not compared.
    """
    if w.role in ("query", "key"):
        return uniform(sqrt(3 / (w.fan_in + w.fan_out)))
    if w.role == "value":
        return uniform(sqrt(3 / (w.fan_in + w.fan_out)) / (8 * w.depth) ** 0.25)
    if w.role == "attention output":
        return uniform(sqrt(6 / (w.fan_in + w.fan_out)) / (8 * w.depth) ** 0.25)
    if w.role in ("feed-forward in", "feed-forward out"):
        return uniform(1 / sqrt(w.fan_in) / (8 * w.depth) ** 0.25)
    return normal(1 / sqrt(w.width)) if w.role in ("embedding", "head") else norms(w)


@known_as("mup")
def mup(w: Weight, var: float = 1) -> ComparedLaw | None:
    """μP, microsoft/mup's Transformer.

    microsoft/mup examples/Transformer/model.py and mup/layer.py at 19814971; Yang et al., arXiv 2203.03466

    The setting is init_var. The scale 1/head_dim of the logits and the learning rates, which make it μP, are not
    weights.
    """
    if w.role == "embedding":
        return normal(1)
    if w.role in ("query", "head"):
        return constant(0)
    matrix = w.role in (*READS, *WRITES) and w.role != "gate"
    return normal(sqrt(var / w.width)) if matrix else zero_biases(w)


@known_as("completep", tied=True)
def completep(w: Weight, std: float = 0.02, base_width: float = 256) -> ComparedLaw | None:
    """CompleteP.

    EleutherAI/nanoGPT-mup model.py at 39044043 (the authors' implementation); Dey et al., arXiv 2505.01618

    Output projections are not divided by √(2L). The factor L₀/L of each branch and the learning rates, which make it
    CompleteP, are not weights. At base_width equal to the width it is the base model.
    """
    if w.role in ENDS:
        return normal(std)
    matrix = w.role in (*READS, *WRITES) and w.role != "gate"
    return normal(std / sqrt(w.width / base_width)) if matrix else zero_biases(w)


NANOCHAT_NAMES = {
    "value embedding": r"(^|\.)value_embeds\.", "residual factors": r"(^|\.)resid_lambdas$",
    "factors of the input": r"(^|\.)x0_lambdas$", "smear factor": r"(^|\.)smear_lambda$",
    "backout factor": r"(^|\.)backout_lambda$", "smear gate": r"(^|\.)smear_gate\.weight$",
    "gate of value embeddings": r"\.ve_gate\.weight$",
}  # fmt: skip


@known_as("nanochat", tied=False, names=NANOCHAT_NAMES)
def nanochat(w: Weight) -> ComparedLaw | None:
    """nanochat.

    karpathy/nanochat nanochat/gpt.py (init_weights) at 92d63d4e

    Norms have no weights. The docstring of init_weights says 1.0 for the embedding; its code draws 0.8.
    """
    if w.role in ("query", "key", "value", "value embedding"):
        return uniform(sqrt(3 / w.width))
    if w.role == "feed-forward in":
        return uniform(0.4 * sqrt(3 / w.width))
    if w.role in ("residual factors", "factors of the input"):
        first, fall = (1.15, 0.1) if w.role == "residual factors" else (0.2, 0.15)
        return values(first - fall * w.i / max(w.columns - 1, 1))
    if w.role in ("smear gate", "gate of value embeddings"):
        return uniform(0, 0.02)
    if w.role in (*WRITES, "smear factor", "backout factor"):
        return constant(0.2 if w.role == "backout factor" else 0)
    return normal(0.8 if w.role == "embedding" else 0.001) if w.role in ("embedding", "head") else None


MODDED_NANOGPT_NAMES = {
    "value embedding": r"(^|\.)value_embeds(\.|$)", "residual factors": r"(^|\.)resid_lambdas$",
    "branch factors": r"(^|\.)post_lambdas$", "smear gate": r"(^|\.)smear_gate\.weight$",
    "gate of value embeddings": r"(^|\.)ve_gate_bank$",
}  # fmt: skip


@known_as("modded-nanogpt", names=MODDED_NANOGPT_NAMES)
def modded_nanogpt(w: Weight) -> ComparedLaw | None:
    """modded-nanogpt.

    KellerJordan/modded-nanogpt train_gpt.py at f411b3d3

    Its own code stores the matrices of all layers in banks, padded with zeros: the law of a bank is not one law, and is
    not compared. The embedding starts as a copy of the head. The weights of its MUDD connections are not covered.
    """
    if w.role in ("query", "key", "value", "attention output", "feed-forward in"):
        return uniform(0.5 * sqrt(3 / w.width))
    if w.role in ("feed-forward out", "smear gate", "gate of value embeddings"):
        return constant(0)
    if w.role in ("residual factors", "branch factors"):
        return constant(1.1**0.5 if w.role == "residual factors" else 1)
    stds = {"embedding": 0.005, "head": 0.005, "value embedding": 0.01}
    return normal(stds[w.role]) if w.role in stds else None


RWKV_7_NAMES = {
    "receptance": r"\.att\.receptance\.weight$", "keys": r"\.att\.key\.weight$", "values": r"\.att\.value\.weight$",
    "outputs": r"\.att\.output\.weight$", "channel keys": r"\.ffn\.key\.weight$",
    "channel values": r"\.ffn\.value\.weight$", "first low-rank factors": r"\.att\.[wavg]1$",
    "second low-rank factors": r"\.att\.[wavg]2$", "mix r": r"\.att\.x_r$", "mix w": r"\.att\.x_w$",
    "mix k": r"\.att\.x_k$", "mix v": r"\.att\.x_v$", "mix a": r"\.att\.x_a$", "mix g": r"\.att\.x_g$",
    "channel mix": r"\.ffn\.x_k$", "decay": r"\.att\.w0$", "rate": r"\.att\.a0$", "value residual": r"\.att\.v0$",
    "key scale": r"\.att\.k_k$", "key rate": r"\.att\.k_a$", "bonus": r"\.att\.r_k$",
    "gain after time mixing": r"\.att\.ln_x\.weight$",
}  # fmt: skip


@known_as("rwkv-7", tied=False, names=RWKV_7_NAMES)
def rwkv_7(w: Weight) -> ComparedLaw | None:
    """RWKV-7.

    BlinkDL/RWKV-LM RWKV-v7/train_temp/src/model.py (modules, then generate_init_weight) at 118e451c

    Heads have 64 dimensions. generate_init_weight overwrites the uniform matrices that the modules draw by orthogonal
    ones. Names are those of the repository.
    """
    gains = {"receptance": 1, "values": 1, "channel keys": 1, "keys": 0.1}
    if w.role in gains:
        return orthogonal(w, gains[w.role])
    if w.role == "head":
        return orthogonal(w, 0.5 * sqrt(max(w.vocabulary / w.width, 1)))
    if w.role == "second low-rank factors":
        return orthogonal(w, 0.1 * sqrt(max(w.rows / w.columns, 1)))
    constants = {"outputs": 0, "channel values": 0, "first low-rank factors": 0, "key rate": 1.02, "bonus": -0.04}
    if w.role in constants:
        return constant(constants[w.role])
    if w.role == "gain after time mixing":
        return constant(((1 + w.layer) / w.depth) ** 0.7)
    powers = {"mix r": 0.2, "mix g": 0.2, "mix w": 0.9, "mix a": 0.9, "mix k": 0.7, "mix v": 0.7}
    if w.role in powers:
        return values(1 - (w.i / w.columns) ** (powers[w.role] * (1 - w.layer / w.depth)))
    if w.role == "channel mix":
        return values(1 - (w.i / w.columns) ** ((1 - w.layer / w.depth) ** 4))
    centred = (w.i % 64 - 31.5) / 31.5
    zigzag, linear = centred * abs(centred), w.i / (w.columns - 1) - 0.5
    if w.role == "decay":
        power = 1 + (w.layer / (w.depth - 1)) ** 0.3
        return values(-5.5 + 6 * (w.i / (w.columns - 1)) ** power + 2.5 * zigzag)
    if w.role == "rate":
        return values(-0.19 + 0.3 * zigzag + 0.4 * linear)
    if w.role in ("value residual", "key scale"):
        return values(0.73 - 0.4 * linear if w.role == "value residual" else 0.71 - 0.1 * linear)
    return uniform(1e-4) if w.role == "embedding" else norms(w)


RWKV_4_NAMES = {
    "keys": r"\.att(ention)?\.key\.weight$", "values": r"\.att(ention)?\.value\.weight$",
    "receptance": r"\.att(ention)?\.receptance\.weight$", "outputs": r"\.att(ention)?\.output\.weight$",
    "channel keys": r"\.(ffn|feed_forward)\.key\.weight$", "channel values": r"\.(ffn|feed_forward)\.value\.weight$",
    "channel receptance": r"\.(ffn|feed_forward)\.receptance\.weight$", "time decay": r"\.time_decay$",
    "time first": r"\.time_first$", "mix k": r"\.att(ention)?\.time_mix_k(ey)?$",
    "mix v": r"\.att(ention)?\.time_mix_v(alue)?$", "mix r": r"\.att(ention)?\.time_mix_r(eceptance)?$",
    "channel mix": r"\.(ffn|feed_forward)\.time_mix_(k|r|key|receptance)$",
}  # fmt: skip


@known_as("rwkv-4", tied=False, names=RWKV_4_NAMES)
def rwkv_4(w: Weight) -> ComparedLaw | None:
    """RWKV-4.

    BlinkDL/RWKV-LM RWKV-v4/src/model.py (modules and RWKV_Init) at 083f9504
    """
    if w.role == "embedding":
        return orthogonal(w, 1e-4 * sqrt(max(w.rows, w.columns)))
    if w.role in ("head", "values", "channel keys"):
        return orthogonal(w, (0.5 if w.role == "head" else 1) * sqrt(max(w.rows / w.columns, 1)))
    if w.role in ("keys", "receptance", "outputs", "channel values", "channel receptance"):
        return constant(0)
    if w.role == "time decay":
        return values(-5 + 8 * (w.i / (w.columns - 1)) ** (0.7 + 1.3 * w.layer / (w.depth - 1)))
    if w.role == "time first":
        return values(log(0.3) + 0.5 * ((w.i + 1) % 3 - 1))
    if w.role in ("mix k", "mix v", "mix r", "channel mix"):
        late = 1 - w.layer / w.depth
        mix = (w.i / w.columns) ** (0.5 * late if w.role == "mix r" else late)
        return values(mix + 0.3 * w.layer / (w.depth - 1) if w.role == "mix v" else mix)
    return norms(w)


MAMBA_2_NAMES = {
    "input projection": r"\.mixer\.in_proj\.weight$", "output projection": r"\.mixer\.out_proj\.weight$",
    "convolution": r"\.mixer\.conv1d\.weight$", "bias of the convolution": r"\.mixer\.conv1d\.bias$",
    "log of A": r"\.mixer\.A_log$", "D": r"\.mixer\.D$",
}  # fmt: skip


@known_as("mamba-2", tied=True, names=MAMBA_2_NAMES)
def mamba_2(w: Weight, kernel: float = 4) -> ComparedLaw | None:
    """Mamba-2.

    state-spaces/mamba mamba_ssm/modules/mamba2.py and mamba_ssm/models/mixer_seq_simple.py (_init_weights) at e9594ce1

    Blocks without an MLP; with one the output projection is divided by √(2L). The setting is d_conv. The law of the
    step bias is not compared.
    """
    if w.role in ("input projection", "convolution"):
        return uniform(1 / sqrt(w.fan_in))
    if w.role == "output projection":
        return uniform(1 / sqrt(w.fan_in * w.depth))
    if w.role == "bias of the convolution":
        return uniform(1 / sqrt(kernel))
    if w.role == "log of A":
        return log_uniform(1, 16)
    if w.role in ("embedding", "head"):
        return normal(0.02)
    return constant(1) if w.role == "D" else norms(w)


MHC_NAMES = {
    "mixing of streams": r"(^|\.)H_res_logits$", "writing to streams": r"(^|\.)H_post_logits$",
    "share of mixing": r"(^|\.)H_res_alpha_logit$",
}  # fmt: skip


@known_as("mhc", names=MHC_NAMES)
def mhc(w: Weight, share: float = 0.01) -> ComparedLaw | None:
    """Manifold-constrained hyper-connections, as in tokenbender's implementation.

    tokenbender/mHC-manifold-constrained-hyper-connections hyper_connections/hyper_connections_mhc.py at f4d7acb1

    Logits before softmax and Sinkhorn's iterations. Which stream a sub-layer reads is not compared. The numbers of the
    paper (Xie et al., arXiv 2512.24880) could not be read, and may be others.
    """
    if w.role == "mixing of streams":
        return values(np.where(np.eye(w.rows, w.columns), 0, -8))
    if w.role == "share of mixing":
        return constant(log(share / (1 - share)))
    return constant(0) if w.role == "writing to streams" else None


PUBLISHED = (
    *(gpt2, megatron, gpt_neox, olmo_normal, mitchell, olmo_full_megatron),
    *(llama_depth_init, torchtitan, t5, t5_1_1, switch, clip, big_vision_vit, deepnorm, torchscale_deepnorm),
    *(mup, completep, nanochat, modded_nanogpt, rwkv_7, rwkv_4, mamba_2, mhc),
)
