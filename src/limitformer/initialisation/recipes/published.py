"""The published recipes, each with its source: a paper, or files of a repository at a commit."""

from limitformer.initialisation.recipes.recipe import Recipe

GPT2 = Recipe(
    name="gpt2",
    title="GPT-2",
    source="Radford et al. 2019, section 2.3 (residual weights times 1/√N, N the number of residual layers); "
    "openai/gpt-2 src/model.py at 122c55a5 (0.02, positions 0.01)",
    rules={
        "embedding, query, key, value, feed-forward in": "normal(0.02)",
        "position embedding": "normal(0.01)",
        "attention output, feed-forward out": "normal(0.02 / sqrt(2 * depth))",
        "norm gain": "constant(1)",
        "norm bias, bias": "constant(0)",
        "head": "normal(0.02)",
    },
    tied=True,
    notes="The released code draws the residual weights with 0.02; the factor is the paper's, with N = 2L as in "
    "nanoGPT and Megatron-LM.",
)

PUBLISHED = (GPT2,)
