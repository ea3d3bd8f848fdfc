"""Many single steps of the gradients' SDE from one state, for `tests/covariance/test_limit_gradients.py`."""

import numpy as np

from limitformer.covariance.gradients.matrices import allocate
from limitformer.covariance.limit_gradients.backward import open_gradient_work
from limitformer.covariance.limit_gradients.paths import gradient_constants
from limitformer.covariance.limit_gradients.step_back import state_shapes, step_back
from limitformer.numerics.factor import put_in_lanes
from limitformer.numerics.kernels import driver
from limitformer.numerics.lanes import LANES, everywhere
from limitformer.numerics.random import key, rewind


@driver
def take_steps(key_words, dt, constants, mask, factor, logits, alignment, spread, state, moved, spreads):
    work = open_gradient_work(factor.shape[0], constants.forward, mask)
    for k in range(len(logits)):
        rewind(work.fresh, key_words, np.uint64(LANES * k))
        put_in_lanes(alignment, state.alignment)
        put_in_lanes(spread, state.spread)
        step_back(work.fresh, everywhere(dt), constants, mask, factor_lanes(factor, work), logits[k], state, work.back)
        for lane in range(LANES):
            for i in range(factor.shape[0]):
                for j in range(factor.shape[0]):
                    moved[LANES * k + lane, i, j] = state.alignment[i, j, lane]
                    spreads[LANES * k + lane, i, j] = state.spread[i, j, lane]


@driver
def factor_lanes(factor, work):
    put_in_lanes(factor, work.ledger.now)
    return work.ledger.now


def steps_of(limit, v, m, psi, dt, samples, seed):
    """M and Ψ after one step of dt, (samples, m, m) each, and the logits of each sample."""
    tokens, rng = len(v), np.random.default_rng(seed)
    lower = np.linalg.cholesky(v)
    logits = lower @ rng.standard_normal((samples, tokens, tokens)) @ lower.T
    in_lanes = allocate_logits(logits)
    moved, spreads = np.empty_like(logits), np.empty_like(logits)
    mask = limit.mask_for(tokens)._replace(full=False)
    words = np.array(key(seed, "test"), np.uint64)
    state = allocate(state_shapes(tokens))
    take_steps(
        words,
        dt,
        gradient_constants(limit),
        mask,
        lower,
        in_lanes,
        m,
        np.linalg.cholesky(psi),
        state,
        moved,
        spreads,
    )
    return moved, spreads @ np.swapaxes(spreads, 1, 2), logits


def allocate_logits(logits):
    """`logits` (samples, m, m) in lanes: (samples/LANES, m, m, LANES)."""
    tokens, groups = logits.shape[1], len(logits) // LANES
    out = allocate((groups, tokens, tokens))
    out[:] = np.moveaxis(logits.reshape(groups, LANES, tokens, tokens), 1, -1)
    return out
