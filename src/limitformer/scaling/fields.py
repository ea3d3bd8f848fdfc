"""The names of fields in configurations of transformers that grow with the width or the depth of a network.

The convention for width: a head keeps its size, so the number of heads grows. Inner sizes and ranks grow in
proportion; vocabulary, experts, positions, images and depth stay.
"""

import re

WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embed_dim", "width", "model_dim", "embedding_size")
DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "num_encoder_layers"),
    *("depth", "layers", "num_blocks"),
)

# Parts of a composite configuration that read or write text. If there is one, the others keep their size.
TEXT_PARTS = ("text_config", "text_encoder", "encoder", "decoder", "generator", "question_encoder", "thinker_config")

HEADS = re.compile(
    r"(.*_)?(n_heads?|num_heads?|nhead|heads|n_kv_heads?|n_head_kv|kv_n_heads|num_kv_heads|n_query_groups"
    r"|linear_num_(key|value)_heads|index_n_heads)|.*(attention|key_value|mamba_n|mamba_num)_heads"
    r"|.*(attention|key_value)_heads_per_(stage|layer)|num_heads_list"
)
GROWS_WITH_WIDTH = re.compile(
    r"(.*_)?(hidden_sizes?|hidden_dims?|d_model|dim|dims|n_embd|n_embed|n_inner|d_ff|d_inner|d_ssm|d_embed|emb_dim|embed_dims?"
    r"|width|model_dim|embedding_size|embedding_dim|ffn_dim|ff_dim|ffn_embed_dim|ffn_hidden_size|ffn_size|mlp_dim"
    r"|feed_forward_hidden_size|intermediate_size|intermediate_size_mlp|intermediate_dim|inner_dim|dim_feedforward"
    r"|linear_units|hidden_features|rank|lora_dim|embed_proj_dim|proj_dim|block_width|lru_width)"
    r"|embed_dim_per_stage|hidden_size_global|hidden_size_per_layer_input|ple_embed_dim"
)
KEEPS_ITS_WIDTH = re.compile(
    r".*(vision|audio|image|speech|codec|codebook|codevector|vocab|head_dim|rope|rotary|key_dim|value_dim|conv_dim|kernel"
    r"|position|latent|xvector|tdnn|hash|ngram|window|time|mel|patch|input_dim|feature_projection|iou|fpn|condition|pooler"
    r"|index_head|conv_kernel|quantization|num_).*"
)
GROWS_WITH_DEPTH = re.compile(r"(.*_)?(n_layers?|layers|n_blocks|num_blocks|depth)")
KEEPS_ITS_DEPTH = re.compile(
    r".*(window|shared_layers|nextn|predict|first_|dense|per_|adapter|residual_layers|feat_extract|lstm|feature_layer|mtp"
    r"|iou|resampler|memory|fuser|postnet|predictor|vision|audio|image|skip|timestamp|stage|loss_weighting|lqe|max_depth"
    r"|min_depth|which|kv_source).*"
)

# Fields of other parts (images, sound) that are the width of the text part.
INTO_TEXT = ("out_hidden_size", "text_hidden_size", "condition_dim", "audio_hidden_size", "lm_hidden_size")

BY_LAYER = re.compile(r"layer|block|idx|pattern|indexer_types")  # names of lists by layer, or of layers
NOT_BY_LAYER = ("architectures", "block_sizes", "block_repeats", "out_indices", "_out_indices")
SHARES_LAYERS = ("albert", "hrm_text", "perceiver")  # types whose layers share their parameters
