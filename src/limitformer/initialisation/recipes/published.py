"""The published recipes, each with its source: a paper, or files of a repository at a commit.

A name with a commit means that the numbers were read in that version of the files. `tests/initialisation` holds each of
them against numbers that were computed by hand from the source.
"""

from limitformer.initialisation.recipes.recipe import Recipe

NORMS = {"norm gain": "constant(1)", "norm bias": "constant(0)"}
ZERO_BIASES = {**NORMS, "bias": "constant(0)"}
MATRICES = "query, key, value, attention output, feed-forward in, gate, feed-forward out"

GPT2 = Recipe(
    name="gpt2",
    title="GPT-2",
    source="Radford et al. 2019, section 2.3 (residual weights times 1/√N, N the number of residual layers); "
    "openai/gpt-2 src/model.py at 122c55a5 (0.02, positions 0.01)",
    rules={
        "embedding, query, key, value, feed-forward in": "normal(0.02)",
        "position embedding": "normal(0.01)",
        "attention output, feed-forward out": "normal(0.02 / sqrt(2 * depth))",
        "head": "normal(0.02)",
        **ZERO_BIASES,
    },
    tied=True,
    notes="The released code draws the residual weights with 0.02; the factor is the paper's, with N = 2L as in "
    "nanoGPT and Megatron-LM.",
)

MEGATRON = Recipe(
    name="megatron",
    title="Megatron-LM",
    source="NVIDIA/Megatron-LM megatron/core/utils.py (init_method_normal, scaled_init_method_normal) and "
    "megatron/core/transformer/transformer_config.py at d98e8a64",
    rules={
        "embedding, position embedding, type embedding, head, router": "normal(std)",
        "query, key, value, feed-forward in, gate": "normal(std)",
        "attention output, feed-forward out": "normal(std / sqrt(2 * depth))",
        **ZERO_BIASES,
    },
    settings={"std": 0.02},
    notes="The setting is --init-method-std. Hybrid models divide by √L in place of √(2L).",
)

NEOX = Recipe(
    name="gpt-neox",
    title="GPT-NeoX: small_init, and wang_init for output projections",
    source="EleutherAI/gpt-neox megatron/model/init_functions.py and configs/20B.yml at ea7aefd8; small_init: "
    "Nguyen and Salazar, arXiv 1910.05895",
    rules={
        "embedding, position embedding, head": "normal(sqrt(2 / (5 * width)))",
        "query, key, value, feed-forward in, gate": "normal(sqrt(2 / (5 * width)))",
        "attention output, feed-forward out": "normal(2 / depth / sqrt(width))",
        **ZERO_BIASES,
    },
    tied=False,
)

OLMO_NORMAL = Recipe(
    name="olmo-normal",
    title="OLMo, init_fn normal",
    source="allenai/OLMo olmo/model.py and olmo/initialization.py at 59a53e3f",
    rules={f"embedding, position embedding, head, {MATRICES}": "normal(std)", **ZERO_BIASES},
    settings={"std": 0.02},
    notes="The setting is init_std; init_cutoff_factor is unset.",
)

MITCHELL = Recipe(
    name="mitchell",
    title="OLMo, init_fn mitchell",
    source="allenai/OLMo olmo/model.py and olmo/initialization.py at 59a53e3f",
    rules={
        "embedding, position embedding, head": "truncated(1 / sqrt(width), 3)",
        "query, key, value, feed-forward in, gate": "truncated(1 / sqrt(width), 3)",
        "attention output": "truncated(1 / sqrt(2 * width * (layer + 1)), 3)",
        "feed-forward out": "truncated(1 / sqrt(2 * fan_in * (layer + 1)), 3)",
        **ZERO_BIASES,
    },
    notes="Normal laws are cut at three standard deviations and not rescaled, so that the std is 0.9866 of the number "
    "in the formula.",
)

OLMO_KAIMING = Recipe(
    name="olmo-kaiming-normal",
    title="OLMo, init_fn kaiming_normal",
    source="allenai/OLMo olmo/initialization.py at a52d0584 (v0.3.0); later versions do not have it",
    rules={
        MATRICES: "normal(sqrt(2 / fan_in))",
        "embedding, position embedding, head": "normal(sqrt(2 / width))",
        **ZERO_BIASES,
    },
)

OLMO_FAN_IN = Recipe(
    name="olmo-fan-in",
    title="OLMo, init_fn fan_in",
    source="allenai/OLMo olmo/initialization.py and olmo/model.py at a52d0584 (v0.3.0); later versions do not have it",
    rules={
        "embedding, position embedding, head": "normal(1 / sqrt(width))",
        "query, key, value, attention output, feed-forward in, gate": "normal(1 / sqrt(width))",
        "feed-forward out": "normal(1 / sqrt(fan_in))",
        **ZERO_BIASES,
    },
)

OLMO_MEGATRON = Recipe(
    name="olmo-full-megatron",
    title="OLMo, init_fn full_megatron",
    source="allenai/OLMo olmo/model.py and olmo/initialization.py at 59a53e3f",
    rules={
        "embedding, position embedding": "truncated(std, 3)",
        "query, key, value, feed-forward in, gate": "truncated(std, 3)",
        "attention output, feed-forward out": "truncated(std / sqrt(2 * depth), 3)",
        "head": "truncated(1 / sqrt(width), 3)",
        **ZERO_BIASES,
    },
    settings={"std": 0.02},
    notes="The setting is init_std. emb_init_std and scale_emb_init are unset.",
)

LLAMA_DEPTH_INIT = Recipe(
    name="llama-depth-init",
    title="Llama 3 with torchtitan's depth_init, as its issue 3334 and pull request 3722 describe the intention",
    source="pytorch/torchtitan torchtitan/models/llama3/__init__.py at b5bcd76c; its issue 3334 and pull request 3722 "
    "(bounds of three std; only the weights that write to the stream are divided)",
    rules={
        "embedding": "normal(1)",
        "query, key, value, feed-forward in, gate": "truncated(std, 3)",
        "attention output, feed-forward out": "truncated(std / sqrt(2 * (layer + 1)), 3)",
        "head": "truncated(1 / sqrt(width), 3)",
        **ZERO_BIASES,
    },
    settings={"std": 0.02},
    tied=False,
    notes="The pull request was open when it was read; `torchtitan` is the code without it.",
)

TORCHTITAN = Recipe(
    name="torchtitan",
    title="Llama 3 as torchtitan's code draws it",
    source="pytorch/torchtitan torchtitan/models/llama3/__init__.py, torchtitan/models/common/param_init.py and "
    "config_utils.py at b5bcd76c",
    rules={
        "embedding": "normal(1)",
        "query, key, value, gate": "truncated(std, 2 / std)",
        "attention output, feed-forward out": "truncated(std / sqrt(2 * (layer + 1)), 2 * sqrt(2 * (layer + 1)) / std)",
        "feed-forward in": "truncated(std / sqrt(2 * (layer + 1)), 2 * sqrt(2 * (layer + 1)) / std)",
        "head": "truncated(1 / sqrt(width), 3)",
        **ZERO_BIASES,
    },
    settings={"std": 0.02},
    tied=False,
    notes="The bounds of ±2 are absolute, 100 standard deviations and more, and cut nothing. w3 (feed-forward in) is "
    "divided as w2 is, though it does not write to the stream.",
)

T5_ROWS = {
    "query": "normal(1 / sqrt(width * head_dim))",
    "key, value": "normal(1 / sqrt(width))",
    "attention output": "normal(1 / sqrt(fan_in))",
    "feed-forward in, gate, feed-forward out": "rescaled_truncated(1 / sqrt(fan_in), 2)",
    "relative bias": "uniform(sqrt(6 / (rows + columns)))",
    "norm gain": "constant(1)",
    "embedding": "normal(1)",
}
T5_NOTE = (
    "The feed-forward weights are normal, cut at two standard deviations of the normal law and rescaled, so that the "
    "std is "
    "the number in the formula."
)

T5 = Recipe(
    name="t5",
    title="T5 1.0",
    source="google-research/t5x t5x/examples/t5/network.py, layers.py and t5_1_0/base.gin at cc342d41",
    rules={
        **T5_ROWS,
        "feed-forward in, gate, feed-forward out": "rescaled_truncated(1 / sqrt(fan_in), 2)",
        "head": "normal(1)",
    },
    tied=True,
    notes=f"The logits are divided by √width, which is not a weight. {T5_NOTE}",
)

T5_11 = Recipe(
    name="t5-v1.1",
    title="T5 1.1, mT5 and ByT5",
    source="google-research/t5x t5x/examples/t5/network.py, layers.py and t5_1_1/base.gin at cc342d41",
    rules={**T5_ROWS, "head": "rescaled_truncated(1 / sqrt(width), 2)"},
    tied=False,
    notes=T5_NOTE,
)

DEEPNORM = Recipe(
    name="deepnorm",
    title="DeepNorm, for an encoder or a decoder alone",
    source="Wang et al., DeepNet, arXiv 2203.00555; gains, and the weights that have them, as in microsoft/torchscale "
    "torchscale/architecture/decoder.py at 4d1e0e82",
    rules={
        "query, key": "normal(sqrt(2 / (fan_in + fan_out)))",
        "value, attention output, feed-forward in, gate, feed-forward out": (
            "normal((8 * depth) ** -0.25 * sqrt(2 / (fan_in + fan_out)))"
        ),
        "norm gain": "constant(1)",
        "norm bias": "constant(0)",
    },
    notes="The gain is (8L)^(−1/4). That the law is Xavier's normal one is known from implementations by others; the "
    "text of "
    "the paper could not be read. The skip connection is multiplied by (2L)^(1/4), which is not a weight.",
)

TORCHSCALE = Recipe(
    name="torchscale-deepnorm",
    title="DeepNorm as torchscale's decoder draws it",
    source="microsoft/torchscale torchscale/architecture/decoder.py, component/multihead_attention.py, "
    "feedforward_network.py and embedding.py at 4d1e0e82",
    rules={
        "embedding, head": "normal(1 / sqrt(width))",
        "query, key": "uniform(sqrt(3 / (fan_in + fan_out)))",
        "value": "uniform(sqrt(3 / (fan_in + fan_out)) / (8 * depth) ** 0.25)",
        "attention output": "uniform(sqrt(6 / (fan_in + fan_out)) / (8 * depth) ** 0.25)",
        "feed-forward in, feed-forward out": "uniform(1 / sqrt(fan_in) / (8 * depth) ** 0.25)",
        **NORMS,
    },
    notes="Queries, keys and values have Xavier's gain 1/√2. Biases are torch's default, divided with their weights, "
    "except those of output projections, which are zero; they are not compared.",
)

MUP = Recipe(
    name="mup",
    title="μP, microsoft/mup's Transformer",
    source="microsoft/mup examples/Transformer/model.py and mup/layer.py at 19814971; Yang et al., arXiv 2203.03466",
    rules={
        "embedding": "normal(1)",
        "query": "constant(0)",
        "key, value, attention output, feed-forward in, feed-forward out": "normal(sqrt(var / width))",
        "head": "constant(0)",
        **ZERO_BIASES,
    },
    settings={"var": 1.0},
    notes="The setting is init_var. The scale 1/head_dim of the logits and the learning rates, which make it μP, are "
    "not "
    "weights.",
)

COMPLETEP = Recipe(
    name="completep",
    title="CompleteP",
    source="EleutherAI/nanoGPT-mup model.py at 39044043 (the authors' implementation); Dey et al., arXiv 2505.01618",
    rules={
        "embedding, position embedding, head": "normal(std)",
        "query, key, value, attention output, feed-forward in, feed-forward out": "normal(std / sqrt(width / "
        "base_width))",
        **ZERO_BIASES,
    },
    settings={"std": 0.02, "base_width": 256},
    tied=True,
    notes="Output projections are not divided by √(2L). The factor L₀/L of each branch and the learning rates, which "
    "make it "
    "CompleteP, are not weights. At base_width equal to the width it is the base model.",
)

NANOCHAT = Recipe(
    name="nanochat",
    title="nanochat",
    source="karpathy/nanochat nanochat/gpt.py (init_weights) at 92d63d4e",
    rules={
        "embedding": "normal(0.8)",
        "head": "normal(0.001)",
        "query, key, value, value embedding": "uniform(sqrt(3 / width))",
        "attention output, feed-forward out": "constant(0)",
        "feed-forward in": "uniform(0.4 * sqrt(3 / width))",
        "residual factors": "values(1.15 - 0.1 * i / max(columns - 1, 1))",
        "factors of the input": "values(0.2 - 0.15 * i / max(columns - 1, 1))",
        "smear factor": "constant(0)",
        "backout factor": "constant(0.2)",
        "smear gate, gate of value embeddings": "uniform(0, 0.02)",
    },
    names={
        "value embedding": r"(^|\.)value_embeds\.",
        "residual factors": r"(^|\.)resid_lambdas$",
        "factors of the input": r"(^|\.)x0_lambdas$",
        "smear factor": r"(^|\.)smear_lambda$",
        "backout factor": r"(^|\.)backout_lambda$",
        "smear gate": r"(^|\.)smear_gate\.weight$",
        "gate of value embeddings": r"\.ve_gate\.weight$",
    },
    tied=False,
    notes="Norms have no weights. The docstring of init_weights says 1.0 for the embedding; its code draws 0.8.",
)

MODDED = Recipe(
    name="modded-nanogpt",
    title="modded-nanogpt",
    source="KellerJordan/modded-nanogpt train_gpt.py at f411b3d3",
    rules={
        "embedding, head": "normal(0.005)",
        "query, key, value, attention output": "uniform(0.5 * sqrt(3 / width))",
        "feed-forward in": "uniform(0.5 * sqrt(3 / width))",
        "feed-forward out": "constant(0)",
        "value embedding": "normal(0.01)",
        "smear gate, gate of value embeddings": "constant(0)",
        "residual factors": "constant(1.1 ** 0.5)",
        "branch factors": "constant(1)",
    },
    names={
        "value embedding": r"(^|\.)value_embeds(\.|$)",
        "residual factors": r"(^|\.)resid_lambdas$",
        "branch factors": r"(^|\.)post_lambdas$",
        "smear gate": r"(^|\.)smear_gate\.weight$",
        "gate of value embeddings": r"(^|\.)ve_gate_bank$",
    },
    notes="Its own code stores the matrices of all layers in banks, padded with zeros: the law of a bank is not one "
    "law, and "
    "is not compared. The embedding starts as a copy of the head. The weights of its MUDD connections are not covered.",
)

ZIGZAG = "((i % 64 - 31.5) / 31.5 * abs((i % 64 - 31.5) / 31.5))"
LINEAR = "(i / (columns - 1) - 0.5)"
LATE = "(1 - layer / depth)"  # ratio_1_to_almost0

RWKV7 = Recipe(
    name="rwkv-7",
    title="RWKV-7",
    source="BlinkDL/RWKV-LM RWKV-v7/train_temp/src/model.py (modules, then generate_init_weight) at 118e451c",
    rules={
        "embedding": "uniform(1e-4)",
        "head": "orthogonal(0.5 * sqrt(vocabulary / width) if vocabulary > width else 0.5, rows, columns)",
        "receptance, values, channel keys": "orthogonal(1, rows, columns)",
        "keys": "orthogonal(0.1, rows, columns)",
        "outputs, channel values": "constant(0)",
        "first low-rank factors": "constant(0)",
        "second low-rank factors": "orthogonal(0.1 * sqrt(max(rows / columns, 1)), rows, columns)",
        "mix r, mix g": f"values(1 - (i / columns) ** (0.2 * {LATE}))",
        "mix w, mix a": f"values(1 - (i / columns) ** (0.9 * {LATE}))",
        "mix k, mix v": f"values(1 - (i / columns) ** (0.7 * {LATE}))",
        "channel mix": f"values(1 - (i / columns) ** ({LATE} ** 4))",
        "decay": f"values(-5.5 + 6 * (i / (columns - 1)) ** (1 + (layer / (depth - 1)) ** 0.3) + 2.5 * {ZIGZAG})",
        "rate": f"values(-0.19 + 0.3 * {ZIGZAG} + 0.4 * {LINEAR})",
        "value residual": f"values(0.73 - 0.4 * {LINEAR})",
        "key scale": f"values(0.71 - 0.1 * {LINEAR})",
        "key rate": "constant(1.02)",
        "bonus": "constant(-0.04)",
        "gain after time mixing": "constant(((1 + layer) / depth) ** 0.7)",
        **NORMS,
    },
    names={
        "receptance": r"\.att\.receptance\.weight$",
        "keys": r"\.att\.key\.weight$",
        "values": r"\.att\.value\.weight$",
        "outputs": r"\.att\.output\.weight$",
        "channel keys": r"\.ffn\.key\.weight$",
        "channel values": r"\.ffn\.value\.weight$",
        "first low-rank factors": r"\.att\.[wavg]1$",
        "second low-rank factors": r"\.att\.[wavg]2$",
        "mix r": r"\.att\.x_r$",
        "mix w": r"\.att\.x_w$",
        "mix k": r"\.att\.x_k$",
        "mix v": r"\.att\.x_v$",
        "mix a": r"\.att\.x_a$",
        "mix g": r"\.att\.x_g$",
        "channel mix": r"\.ffn\.x_k$",
        "decay": r"\.att\.w0$",
        "rate": r"\.att\.a0$",
        "value residual": r"\.att\.v0$",
        "key scale": r"\.att\.k_k$",
        "key rate": r"\.att\.k_a$",
        "bonus": r"\.att\.r_k$",
        "gain after time mixing": r"\.att\.ln_x\.weight$",
    },
    tied=False,
    notes="Heads have 64 dimensions. generate_init_weight overwrites the uniform matrices that the modules draw by "
    "orthogonal "
    "ones. Names are those of the repository.",
)

RWKV4 = Recipe(
    name="rwkv-4",
    title="RWKV-4",
    source="BlinkDL/RWKV-LM RWKV-v4/src/model.py (modules and RWKV_Init) at 083f9504",
    rules={
        "embedding": "orthogonal(1e-4 * sqrt(max(rows, columns)), rows, columns)",
        "head": "orthogonal(0.5 * sqrt(max(rows / columns, 1)), rows, columns)",
        "keys, receptance, outputs, channel values, channel receptance": "constant(0)",
        "values, channel keys": "orthogonal(sqrt(max(rows / columns, 1)), rows, columns)",
        "time decay": "values(-5 + 8 * (i / (columns - 1)) ** (0.7 + 1.3 * layer / (depth - 1)))",
        "time first": "values(log(0.3) + 0.5 * ((i + 1) % 3 - 1))",
        "mix k": f"values((i / columns) ** {LATE})",
        "mix v": f"values((i / columns) ** {LATE} + 0.3 * layer / (depth - 1))",
        "mix r": f"values((i / columns) ** (0.5 * {LATE}))",
        "channel mix": f"values((i / columns) ** {LATE})",
        **NORMS,
    },
    names={
        "keys": r"\.att(ention)?\.key\.weight$",
        "values": r"\.att(ention)?\.value\.weight$",
        "receptance": r"\.att(ention)?\.receptance\.weight$",
        "outputs": r"\.att(ention)?\.output\.weight$",
        "channel keys": r"\.(ffn|feed_forward)\.key\.weight$",
        "channel values": r"\.(ffn|feed_forward)\.value\.weight$",
        "channel receptance": r"\.(ffn|feed_forward)\.receptance\.weight$",
        "time decay": r"\.time_decay$",
        "time first": r"\.time_first$",
        "mix k": r"\.att(ention)?\.time_mix_k(ey)?$",
        "mix v": r"\.att(ention)?\.time_mix_v(alue)?$",
        "mix r": r"\.att(ention)?\.time_mix_r(eceptance)?$",
        "channel mix": r"\.(ffn|feed_forward)\.time_mix_(k|r|key|receptance)$",
    },
    tied=False,
)

MAMBA2 = Recipe(
    name="mamba-2",
    title="Mamba-2",
    source="state-spaces/mamba mamba_ssm/modules/mamba2.py and mamba_ssm/models/mixer_seq_simple.py (_init_weights) "
    "at e9594ce1",
    rules={
        "embedding": "normal(0.02)",
        "input projection": "uniform(1 / sqrt(fan_in))",
        "output projection": "uniform(1 / sqrt(fan_in * depth))",
        "convolution": "uniform(1 / sqrt(fan_in))",
        "bias of the convolution": "uniform(1 / sqrt(kernel))",
        "step bias": "softplus_log_uniform(0.001, 0.1)",
        "log of A": "log_uniform(1, 16)",
        "D": "constant(1)",
        "head": "normal(0.02)",
        **NORMS,
    },
    settings={"kernel": 4},
    names={
        "input projection": r"\.mixer\.in_proj\.weight$",
        "output projection": r"\.mixer\.out_proj\.weight$",
        "convolution": r"\.mixer\.conv1d\.weight$",
        "bias of the convolution": r"\.mixer\.conv1d\.bias$",
        "step bias": r"\.mixer\.dt_bias$",
        "log of A": r"\.mixer\.A_log$",
        "D": r"\.mixer\.D$",
    },
    tied=True,
    notes="Blocks without an MLP; with one the output projection is divided by √(2L). The setting is d_conv.",
)

MHC = Recipe(
    name="mhc",
    title="Manifold-constrained hyper-connections, as in tokenbender's implementation",
    source="tokenbender/mHC-manifold-constrained-hyper-connections hyper_connections/hyper_connections_mhc.py at "
    "f4d7acb1",
    rules={
        "mixing of streams": "values(where(i == j, 0, -8))",
        "reading of streams": "sorted_values(where(i == 0, 0, -8))",
        "writing to streams": "constant(0)",
        "share of mixing": "constant(log(share / (1 - share)))",
    },
    settings={"share": 0.01},
    names={
        "mixing of streams": r"(^|\.)H_res_logits$",
        "reading of streams": r"(^|\.)H_pre_logits$",
        "writing to streams": r"(^|\.)H_post_logits$",
        "share of mixing": r"(^|\.)H_res_alpha_logit$",
    },
    notes="Logits before softmax and Sinkhorn's iterations. A sub-layer reads one stream, its own, which the recipe "
    "does not "
    "place. The numbers of the paper (Xie et al., arXiv 2512.24880) could not be read, and may be others.",
)

CLIP = Recipe(
    name="clip",
    title="CLIP's text encoder",
    source="openai/CLIP clip/model.py (initialize_parameters) at 0845fc46",
    rules={
        "embedding": "normal(0.02)",
        "position embedding": "normal(0.01)",
        "query, key, value": "normal(1 / sqrt(width))",
        "attention output, feed-forward out": "normal(1 / sqrt(width) / sqrt(2 * depth))",
        "feed-forward in": "normal(1 / sqrt(2 * width))",
        **NORMS,
    },
    notes="Biases are those of torch.nn, which are not compared. The code draws the blocks of the text encoder; those "
    "of its "
    "vision transformer are torch's default.",
)

SIGLIP = Recipe(
    name="big-vision-vit",
    title="ViT of big_vision, as in SigLIP and PaliGemma",
    source="google-research/big_vision big_vision/models/vit.py at 0b73d7b0",
    rules={
        "query, key, value, attention output": "uniform(sqrt(6 / (fan_in + fan_out)))",
        "feed-forward in, feed-forward out": "uniform(sqrt(6 / (fan_in + fan_out)))",
        "position embedding": "normal(1 / sqrt(width))",
        **NORMS,
    },
    notes="Biases of the feed-forward layers are normal with std 1e-6, those of attention zero; they are not compared.",
)

SWITCH = Recipe(
    name="switch",
    title="Switch Transformer",
    source="google/flaxformer flaxformer/t5x/configs/moe/models/switch_base.gin, tokens_choose_base.gin (SCALE = 0.1) "
    "and "
    "architectures/moe.gin at 399ea3a8; Fedus et al., arXiv 2101.03961",
    rules={
        "embedding": "normal(1)",
        "query": "normal(sqrt(scale / (width * head_dim)))",
        "key, value": "normal(sqrt(scale / width))",
        "attention output": "normal(sqrt(scale / fan_in))",
        "feed-forward in, feed-forward out": "rescaled_truncated(sqrt(scale / fan_in), 2)",
        "expert in, expert out": "normal(sqrt(scale / fan_in))",
        "router": "normal(0.02)",
        "relative bias": "uniform(sqrt(6 * scale / (rows + columns)))",
        "head": "rescaled_truncated(sqrt(scale / width), 2)",
        "norm gain": "constant(1)",
    },
    settings={"scale": 0.1},
    names={"expert in": r"\.experts?\..*\.wi\.weight$", "expert out": r"\.experts?\..*\.wo\.weight$"},
    tied=False,
)

PUBLISHED = (
    *(
        GPT2,
        MEGATRON,
        NEOX,
        OLMO_NORMAL,
        MITCHELL,
        OLMO_KAIMING,
        OLMO_FAN_IN,
        OLMO_MEGATRON,
        LLAMA_DEPTH_INIT,
        TORCHTITAN,
    ),
    *(
        T5,
        T5_11,
        SWITCH,
        CLIP,
        SIGLIP,
        DEEPNORM,
        TORCHSCALE,
        MUP,
        COMPLETEP,
        NANOCHAT,
        MODDED,
        RWKV7,
        RWKV4,
        MAMBA2,
        MHC,
    ),
)
