"""The loop over replicas and layers of N tokens."""

import numpy as np

from limitformer.numerics.kernels import driver, kernel
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import rewind
from limitformer.numerics.watch import count_whole, is_halted, keep_going
from limitformer.paths.exits import first_at
from limitformer.sphere.near.near_tree import link_initial, update_links
from limitformer.sphere.pair.chain import CHECK
from limitformer.sphere.stopping.merging import NOT_YET, all_merged, open_merged
from limitformer.sphere.stopping.two_clusters import open_two_clusters, run_two_clusters
from limitformer.sphere.tokens.record import part_of, record_workspace, write_point
from limitformer.sphere.tokens.step import GRAM, advance_tokens, begin_tokens, open_relations, token_workspace


@driver
def run_tokens(
    start,
    start_parent,
    start_sign,
    how,
    constants,
    bilinear,
    key_words,
    start_key,
    query_key,
    follow,
    points,
    first,
    coordinates,
    record,
    watch,
):
    """Run replicas `first`, … of N tokens and write their points to `record`.

    `start` (N, r) is of the kind `how`. Rows of tokens with a parent in `start_parent` (N,) hold differences, with the
    signs `start_sign` (N,). `follow` is the `two_clusters.Continuation` of replicas that merge.
    """
    tokens, replicas = start.shape[0], len(record.stopped)
    work = token_workspace(tokens, coordinates, constants, bilinear)
    relations, record_work = open_relations(tokens, coordinates), record_workspace(tokens)
    merged, two = open_merged(tokens), open_two_clusters()
    for begin in range(0, replicas, LANES):
        rows = part_of(record, begin, min(begin + LANES, replicas))
        replica = np.uint64(first + begin)
        begin_tokens(start, how, constants, start_key, query_key, replica, work)
        link_initial(start_parent, start_sign, constants.attention, work.x, relations.tree)
        merged.since[:] = NOT_YET
        last = run_lanes(
            constants, key_words, replica, follow.bounds, points, rows, record_work, work, relations, merged, watch
        )
        if follow.bounds.together > 0.0 and not is_halted(watch):
            run_two_clusters(follow, tokens, replica, points, rows, merged, last, two, watch)
        if is_halted(watch):
            return
        count_whole(watch, min(LANES, replicas - begin))


@kernel
def run_lanes(constants, key_words, replica, bounds, points, record, record_work, work, relations, merged, watch):
    """Run LANES replicas to the last layer, or until all have merged; return the layer reached."""
    tree, replicas = relations.tree, len(record.stopped)
    if constants.draw == GRAM:
        rewind(work.stream, key_words, replica)
    for layer in range(constants.layers + 1):
        if not keep_going(watch, replicas, layer / (constants.layers + 1)):
            return layer
        if layer > 0:
            advance_tokens(layer, constants, key_words, replica, work, relations)
        if constants.near > 0.0 and layer % constants.update_every == 0:
            update_links(work.x, constants.near, layer % constants.relink_every == 0, constants.attention, tree)
        k = first_at(points, layer)
        while k < len(points) and points[k] == layer:
            write_point(work.x, tree, k, record, record_work)
            k += 1
        if bounds.together > 0.0 and layer % CHECK == 0 and all_merged(layer, replicas, work.x, tree, bounds, merged):
            return layer
    return constants.layers
