r"""The SDE of gradients in the infinite-depth limit, and its paths.

**Letters.** The tokens are X (m × n), and the gradient of a loss ℓ in X is G (m × n). As n and the depth grow, with
t = layer/n,

  V = X Xᵀ/n,   M = X Gᵀ/n,   Ψ = G Gᵀ/n²,

have a limit: M is the alignment of tokens and gradients, Ψ the covariance of gradients between tokens. For the loss of
the chain, ℓ = ½|x|² of the last tokens, mean over tokens, M = V/m and Ψ = 0 at t = T. In units of the width,

  ℓ/n = tr V/(2m),   |G|/n = √tr Ψ,   |∂W|/n = γ √⟨V, Ψ⟩ for values, pre- and post-weights of a layer,
  |∂W|/√n = (γ/τ₀) |Lᵀ D L| for queries and keys,   Σ_W |∂W|²/n³ = ∫ w γ² ⟨V, Ψ⟩ dt,

w = 1 for attention, 2 for a feed-forward layer, 3 for both.

**The equation**, down in t, given the path of V and the logits Y of its noise N = √dt (a L G₁ Lᵀ + (γ²/τ₀) B V),
B = 𝒞(Y), where 𝒞 centres row α over the m_α tokens that α sees and divides by m_α:

  M ← M + (γ²/τ₀)√dt 𝒦(Y, M) − (λγ/τ₀)√dt 𝒦(Y′, ξ)
      + (γ²/τ₀²) dt E[𝒦(Y, λ² V BᵀV⁻¹M − γ² B M) + Y Qᵀ + YᵀQ + ½(M W − W M)]
      + E_h[(h sgn hᵀ − |h| 1ᵀ) ∘ 1 (√(η dt) k + η dt MᵀV⁻¹|h|)ᵀ],
  Ψ ← Ψ + a√dt (T G Tᵀ + T GᵀTᵀ) + (γ²/τ₀)√dt (BᵀΨ + ΨB) + 2a² dt (MᵀV⁻¹M − mΨ)
      + (γ²/τ₀²) dt E[BᵀΨB + ½(WᵀΨ + ΨW) + D V Dᵀ + DᵀV D] − η dt (2/π) arccos ρ ∘ Ψ,

  𝒦(Y, J) = J B − B J + Y 𝒞(Jᵀ)ᵀ + Yᵀ 𝒞(Jᵀ),   Q = 𝒞(C Y ∘ C Mᵀ),   D = 𝒞(γMᵀ − λξᵀ),

with ξ = L G Tᵀ, Y′ = L G Lᵀ and k = T g fresh; V = L Lᵀ and Ψ = T Tᵀ. Derived, not proven, in
docs/gradient-limit.md. `step_back` is one step.

**Short steps** (`limit.short_steps`) are drawn again in the backward pass, where they are needed. A path that would
need more than `MOST_SHORT` in one step is stopped, with the cause "resolution lost", and has no gradient.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.gradients.matrices import Buffer, clear
from limitformer.covariance.limit.drift import add_second_order_to_tokens, drift_workspace
from limitformer.covariance.limit.factor_step import (
    StepWorkspace,
    add_kink_to_tokens,
    add_mixing,
    add_mixing_block,
    centre_rows,
    draw_linear,
    step_workspace,
)
from limitformer.covariance.limit.short_steps import BLOCKS_OF_STEP, FACTOR_RESOLUTION, LEAST_TIME, measure_pace
from limitformer.covariance.limit_gradients.step_back import (
    BLOCKS,
    add_transposed_product,
    respond,
    step_back,
    store_query,
)
from limitformer.numerics.factor import (
    FIRST,
    copy,
    gram_of_lower,
    multiply_by_lower_transposed,
    multiply_lower,
    trace_of_gram,
    triangularise,
)
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import LANES, all_below, choose, everywhere, lane_matrix, load, smaller, store
from limitformer.numerics.random import U64, Stream, draw_normals, open_stream, rewind, seek
from limitformer.numerics.watch import count_whole, is_halted, keep_going
from limitformer.sampling.exits import (
    LEFT_BALL,
    LOST,
    Ledger,
    check_factor,
    clear_exits,
    copy_exits,
    first_at,
    norm_of,
    open_ledger,
    record_exit,
)
from limitformer.sampling.recording import replicas_of, rows_of, write_factor

MOST_SHORT = 1024  # short steps in one step


class KeptPath(NamedTuple):
    """The numbers of the forward pass that the backward pass needs."""

    factors: Buffer  # (steps + 1, m, m): L
    logits: Buffer  # (steps, m, m): Y of each step's noise
    lengths: Buffer  # (steps, 1, 1): dt, or 0 where the lane takes short steps instead
    short_factors: Buffer  # (MOST_SHORT + 1, m, m): of one step
    short_logits: Buffer  # (MOST_SHORT, m, m)
    short_lengths: Buffer  # (MOST_SHORT, 1, 1)


def kept_shapes(m: int, steps: int, attention: bool) -> KeptPath:
    """Return the shapes for m tokens; without attention there are no logits, and no step is too long."""
    short = MOST_SHORT if attention else 1
    logits = steps if attention else 1
    return KeptPath((steps + 1, m, m), (logits, m, m), (steps, 1, 1), (short + 1, m, m), (short, m, m), (short, 1, 1))


class GradientResults(NamedTuple):
    """Output arrays of the gradients."""

    loss: np.ndarray  # (replicas,): tr V/(2m)
    stream: np.ndarray  # (replicas, points): √tr Ψ
    weights: np.ndarray  # (replicas, points, weights)
    kernel: np.ndarray  # (replicas,)


class GradientWork(NamedTuple):
    """The state of one thread."""

    stream: Stream
    short: Stream  # for the short steps of the forward pass
    fresh: Stream  # for the backward pass
    short_fresh: Stream  # for its short steps
    ledger: Ledger
    step: StepWorkspace
    back: StepWorkspace
    sums: np.ndarray  # (4, 1, LANES): the rows below
    remaining: np.ndarray  # (1, 1, LANES): of a step, in short steps


RATE, KERNEL, NORM, LOSS = 0, 1, 2, 3  # γ²⟨V, Ψ⟩, its integral so far, tr Ψ, tr V/(2m)


@allocator
def open_gradient_work(tokens, constants, mask):
    return GradientWork(
        open_stream(),
        open_stream(),
        open_stream(),
        open_stream(),
        open_ledger(tokens),
        step_workspace(tokens, constants, mask),
        StepWorkspace(
            drift_workspace(tokens),
            lane_matrix(1, 1),
            lane_matrix(tokens, tokens),
            lane_matrix(1, 1),
            lane_matrix(1, 1),
            lane_matrix(1, 1),
            lane_matrix(1, 1),
            lane_matrix(1, 1),
            lane_matrix(1, 1),
            lane_matrix(tokens, BLOCKS * tokens),
        ),
        lane_matrix(4, 1),
        lane_matrix(1, 1),
    )


@driver
def run_gradient_paths(start, constants, mask, dt, steps, kept, state, share, results, watch):
    """Run the replicas of a share from `start` (m, m, LANES), forward and backward; `share.key_words` is (4, 2)."""
    work = open_gradient_work(start.shape[0], constants.forward, mask)
    for begin in range(0, len(share.exits), LANES):
        rewind(work.stream, share.key_words[0], np.uint64(share.first + begin))
        rewind(work.short, share.key_words[1], np.uint64(share.first + begin))
        rewind(work.fresh, share.key_words[2], np.uint64(share.first + begin))
        rewind(work.short_fresh, share.key_words[3], np.uint64(share.first + begin))
        copy(start, kept.factors[0])
        clear_exits(work.ledger)
        record = rows_of(share.arrays, begin)
        go_up(constants.forward, mask, dt, steps, share.points, share.radius, record, kept, work, watch)
        rows = GradientResults(
            results.loss[begin : begin + LANES],
            results.stream[begin : begin + LANES],
            results.weights[begin : begin + LANES],
            results.kernel[begin : begin + LANES],
        )
        go_down(constants, mask, dt, steps, share.points, share.radius, rows, kept, state, work, watch)
        if is_halted(watch):
            return
        copy_exits(work.ledger, begin, share.exits, share.causes)
        count_whole(watch, min(LANES, len(share.exits) - begin))


@kernel
def go_up(constants, mask, dt, steps, points, radius, record, kept, work, watch):
    """Run the paths of V and keep the factor and the logits of every step."""
    for step in range(steps + 1):
        if not keep_going(watch, replicas_of(record), step / (3.0 * steps + 1.0)):
            return
        if step > 0:
            advance(step, dt, constants, mask, radius, kept, work)
        check_factor(kept.factors[step], kept.factors[max(step - 1, 0)], step, radius, work.ledger)
        write_factor(kept.factors[step], points, step, record, work.ledger)


@kernel
def advance(step, dt, constants, mask, radius, kept, work):
    """Move the paths by one step, or by short ones where it is too long for attention."""
    factor, moved, long = kept.factors[step - 1], kept.factors[step], everywhere(dt)
    measure_pace(constants, mask, factor, work.step)
    for lane in range(LANES):
        # An exited path takes long steps; nobody reads them.
        fine = work.ledger.exits[lane] != np.inf or dt * work.step.pace[0, 0, lane] < FACTOR_RESOLUTION
        kept.lengths[step - 1, 0, 0, lane] = dt if fine else 0.0
    logits = kept.logits[min(step, kept.logits.shape[0]) - 1]
    step_up(work.stream, long, constants, mask, factor, logits, moved, work.step)
    used = take_short_steps(step, dt, constants, mask, radius, kept, work)
    if used > 0:
        for lane in range(LANES):
            if kept.lengths[step - 1, 0, 0, lane] == 0.0:
                for i in range(moved.shape[0]):
                    for k in range(moved.shape[0]):
                        moved[i, k, lane] = kept.short_factors[used, i, k, lane]


@kernel
def take_short_steps(step, dt, constants, mask, radius, kept, work):
    """Take the short steps of `step` into `kept`, in the lanes that need them; return how many there are.

    Called again, it returns the same.
    """
    short = False
    for lane in range(LANES):
        needed = kept.lengths[step - 1, 0, 0, lane] == 0.0
        short = short or needed
        work.remaining[0, 0, lane] = dt if needed else 0.0
    if not short:
        return 0
    copy(kept.factors[step - 1], kept.short_factors[0])
    seek(work.short, U64(step) << BLOCKS_OF_STEP)
    most = kept.short_lengths.shape[0]
    for j in range(most):
        factor, moved, remaining = kept.short_factors[j], kept.short_factors[j + 1], load(work.remaining, 0, 0)
        measure_pace(constants, mask, factor, work.step)
        length = smaller(FACTOR_RESOLUTION / load(work.step.pace, 0, 0), remaining)
        length = choose(remaining, length, everywhere(0.0))
        store(kept.short_lengths[j], 0, 0, length)
        step_up(work.short, length, constants, mask, factor, kept.short_logits[j], moved, work.step)
        for i in range(moved.shape[0]):
            for k in range(moved.shape[0]):
                store(moved, i, k, choose(length, load(moved, i, k), load(factor, i, k)))
        store(work.remaining, 0, 0, remaining - length)
        leave_ball(step, dt, radius, moved, work)
        if all_below(load(work.remaining, 0, 0), LEAST_TIME):
            return j + 1
    for lane in range(LANES):
        if work.remaining[0, 0, lane] > 0.0 and work.ledger.exits[lane] == np.inf:
            gram_of_lower(kept.short_factors[most], work.ledger.now)
            record_exit(lane, step - work.remaining[0, 0, lane] / dt, LOST, work.ledger.now, work.ledger)
    return most


@kernel
def leave_ball(step, dt, radius, factor, work):
    """Stop the paths whose |V| has reached the radius after a short step."""
    if all_below(trace_of_gram(factor), radius):
        return
    gram_of_lower(factor, work.ledger.now)
    for lane in range(LANES):
        norm = norm_of(work.ledger.now, lane)
        if not norm < radius:
            if work.ledger.exits[lane] == np.inf:
                cause = LEFT_BALL if norm < np.inf else LOST
                record_exit(lane, step - work.remaining[0, 0, lane] / dt, cause, work.ledger.now, work.ledger)
            work.remaining[0, 0, lane] = 0.0


@kernel
def step_up(stream, dt, constants, mask, factor, logits, out, work):
    """Take the measured factor step of `factor_step.blocks_of_tokens` from `factor` into `out`; keep its `logits`."""
    draw_linear(stream, dt, constants, everywhere(0.0), factor, work)
    if constants.mixing > 0.0:
        draw_normals(stream, work.normals)
        multiply_lower(factor, work.normals, work.turned)
        multiply_by_lower_transposed(work.turned, factor, logits)
        copy(logits, work.normals)
        centre_rows(work.normals, mask)
        add_mixing(dt, constants, factor, work)
        add_mixing_block(dt, constants, work)
        add_second_order_to_tokens(dt, constants, work)
    if constants.kink > 0.0:
        add_kink_to_tokens(stream, dt, constants, factor, work)
    triangularise(work.rows, FIRST, work.rows.shape[1], out, FIRST)


@kernel
def go_down(constants, mask, dt, steps, points, radius, rows, kept, state, work, watch):
    """Compute the gradients from the horizon to the start."""
    begin_at_horizon(constants, mask, kept.factors[steps], state, work)
    write_gradients(constants, points, steps, rows, state, work)
    for step in range(steps, 0, -1):
        if not keep_going(watch, len(rows.loss), (3.0 * steps - 2.0 * step) / (3.0 * steps + 1.0)):
            return
        factor, logits = kept.factors[step - 1], kept.logits[min(step, kept.logits.shape[0]) - 1]
        move_back(work.fresh, load(kept.lengths[step - 1], 0, 0), constants, mask, factor, logits, state, work)
        used = take_short_steps(step, dt, constants.forward, mask, radius, kept, work)
        for j in range(used - 1, -1, -1):
            blocks = U64(64 + factor.shape[0] * (factor.shape[0] + 1))  # a quarter of the normals of a step, and more
            seek(work.short_fresh, (U64(step) << BLOCKS_OF_STEP) + U64(j) * blocks)
            length = load(kept.short_lengths[j], 0, 0)
            factor, logits = kept.short_factors[j], kept.short_logits[j]
            move_back(work.short_fresh, length, constants, mask, factor, logits, state, work)
        write_gradients(constants, points, step - 1, rows, state, work)
    write_totals(rows, work)


@kernel
def move_back(stream, dt, constants, mask, factor, logits, state, work):
    """Move the gradients down by dt, and add a step of the trapezoidal rule to ∫ γ²⟨V, Ψ⟩ dt."""
    step_back(stream, dt, constants, mask, factor, logits, state, work.back)
    clear(state.product)
    add_transposed_product(constants.gamma, factor, state.spread, state.product, FIRST)
    before, rate = load(work.sums, RATE, 0), trace_of_gram(state.product)
    store(work.sums, KERNEL, 0, load(work.sums, KERNEL, 0) + 0.5 * dt * (before + rate))
    store(work.sums, RATE, 0, choose(dt, rate, before))
    store(work.sums, NORM, 0, trace_of_gram(state.spread))


@kernel
def begin_at_horizon(constants, mask, factor, state, work):
    """M = V/m, Ψ = 0, the loss, and the rates of the last layer."""
    m = factor.shape[0]
    gram_of_lower(factor, state.covariance)
    for i in range(m):
        for k in range(m):
            store(state.alignment, i, k, load(state.covariance, i, k) / float(m))
    clear(state.spread)
    clear(state.noise)
    clear(work.sums)
    store(work.sums, LOSS, 0, trace_of_gram(factor) / (2.0 * m))
    respond(constants, mask, state)
    store_query(everywhere(1.0), constants, factor, state)


@kernel
def write_gradients(constants, points, step, rows, state, work):
    """Write the norms at every point that equals `step`; NaN for a path that was stopped."""
    k = first_at(points, step)
    while k < len(points) and points[k] == step:
        for lane in range(len(rows.loss)):
            inside = work.ledger.exits[lane] == np.inf
            rows.stream[lane, k] = np.sqrt(work.sums[NORM, 0, lane]) if inside else np.nan
            value, query = np.sqrt(work.sums[RATE, 0, lane]), np.sqrt(state.query[0, 0, lane])
            first = 0
            if constants.inverse_temperature > 0.0:
                first = 3
                rows.weights[lane, k, 0] = query if inside else np.nan
                rows.weights[lane, k, 1] = query if inside else np.nan
                rows.weights[lane, k, 2] = value if inside else np.nan
            for weight in range(first, rows.weights.shape[2]):
                rows.weights[lane, k, weight] = value if inside else np.nan
        k += 1


@kernel
def write_totals(rows, work):
    """Write the loss and the kernel."""
    for lane in range(len(rows.loss)):
        inside = work.ledger.exits[lane] == np.inf
        rows.loss[lane] = work.sums[LOSS, 0, lane] if inside else np.nan
        rows.kernel[lane] = work.sums[KERNEL, 0, lane] if inside else np.nan
