"""I-BERT in its quantised mode applies an `autograd.Function` to its weights, bound when the model is made.

Right: the code draws the networks, and each weight has a gradient where the drawn network has one.
"""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

import limitformer as lf


def loss(output, inputs):
    return output.logits.float().flatten(1).square().mean(1)


def verify():
    fields = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"intermediate_size": 64, "max_position_embeddings": 40, "pad_token_id": 1, "quant_mode": True}
    ids = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8]])
    config = {"model_type": "ibert", **fields}
    data = lf.weightless.simulate(config, ids, samples=2, seed=0, gradients=True, loss=loss, progress=False)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("ibert", **fields)).eval()
    loss(model(input_ids=ids), None).mean().backward()
    real = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    for name, norm in real.items():
        if np.isfinite(norm) and norm > 0:
            assert np.isfinite(data.weight_gradient.sel(weight=name)).all(), name
