"""Types of transformers of different structure, witnessed in passes with and without drawn weights, and in steps."""

import pytest
import torch
from benchmarks.zoo.witness import witness_type

TYPES = (  # the first ones have one structure each; `make test` stops after these
    *("gpt2", "llama", "deepseek_v3", "mamba2", "bert", "swin", "whisper"),
    *("gemma2", "mixtral", "jamba", "qwen3_next", "deberta-v2", "xlnet", "t5", "vit", "longformer"),
    *("gpt_neox", "gptj", "bloom", "opt", "codegen", "mpt", "falcon", "gemma3_text", "olmo2", "cohere2"),
    *("qwen3", "gpt_oss", "mamba", "zamba2", "albert", "electra", "modernbert", "funnel", "bart", "pegasus"),
    *("mbart", "beit", "convnext", "clip", "wav2vec2", "roberta", "gemma4_text"),
    *("nemotron_asr_streaming_encoder", "hy_v4"),
)


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize("kind", TYPES)
def test_type_is_witnessed(kind):
    torch.set_num_threads(1)
    row = witness_type(kind)
    assert row["verdict"] == "witnessed, witnessed, witnessed", row
