"""Types of transformers of different structure, witnessed in passes with and without drawn weights, and in steps."""

import pytest
import torch
from benchmarks.zoo.witness import witness_type

TYPES = (
    *(
        "gpt2",
        "gpt_neox",
        "gptj",
        "bloom",
        "opt",
        "codegen",
        "mpt",
        "falcon",
        "llama",
        "gemma2",
        "gemma3_text",
        "olmo2",
    ),
    *("cohere2", "qwen3", "qwen3_next", "mixtral", "deepseek_v3", "gpt_oss", "jamba", "mamba2", "mamba", "zamba2"),
    *("bert", "albert", "deberta-v2", "electra", "modernbert", "xlnet", "funnel", "t5", "bart", "pegasus", "mbart"),
    *("vit", "swin", "beit", "convnext", "clip", "whisper", "wav2vec2", "roberta", "gemma4_text"),
    *("nemotron_asr_streaming_encoder", "hy_v4", "longformer"),
)


@pytest.mark.parametrize("kind", TYPES)
def test_type_is_witnessed(kind):
    torch.set_num_threads(1)
    row = witness_type(kind)
    assert row["verdict"] == "witnessed, witnessed, witnessed", row
