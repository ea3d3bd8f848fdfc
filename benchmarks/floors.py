"""The cost of the random numbers only, eight replicas at a time: a lower bound for kernels of the same algorithm."""

import numpy as np

from limitformer.numerics.factor import draw_bartlett, draw_gaussian_product
from limitformer.numerics.kernels import driver
from limitformer.numerics.lanes import LANES, lane_matrix
from limitformer.numerics.random import draw_normals, open_stream, rewind


@driver
def attention_layer(replicas, layers, tokens, width, key_dim, key_words):
    """Logits and values of one attention sublayer, a layer at a time."""
    stream = open_stream()
    square, lower = lane_matrix(tokens, tokens), lane_matrix(tokens, tokens)
    for replica in range(0, replicas, LANES):
        rewind(stream, key_words, np.uint64(replica))
        for _ in range(layers):
            draw_gaussian_product(stream, key_dim, lower, square)
            draw_normals(stream, square)
            draw_bartlett(stream, width - tokens, lower)


@driver
def feedforward_layer(replicas, layers, tokens, width, hidden, key_words):
    """Hidden units and output of one feed-forward sublayer, a layer at a time."""
    stream = open_stream()
    square, lower = lane_matrix(tokens, tokens), lane_matrix(tokens, tokens)
    units = lane_matrix(tokens, hidden)
    for replica in range(0, replicas, LANES):
        rewind(stream, key_words, np.uint64(replica))
        for _ in range(layers):
            draw_normals(stream, units)
            draw_normals(stream, square)
            draw_bartlett(stream, width - tokens, lower)


@driver
def limit_step(replicas, steps, tokens, key_words):
    """A and G₂ of one factor step, a step at a time."""
    stream = open_stream()
    square, lower = lane_matrix(tokens, tokens), lane_matrix(1, tokens * (tokens + 1) // 2)
    for replica in range(0, replicas, LANES):
        rewind(stream, key_words, np.uint64(replica))
        for _ in range(steps):
            draw_normals(stream, lower)
            draw_normals(stream, square)
