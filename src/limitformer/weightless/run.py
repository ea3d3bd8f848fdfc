r"""The state of one pass through a module without weights: its samples, its random numbers, and the uses of weights.

A weight is used in one of three ways:

* *never drawn* or *drawn when needed*, whichever costs less, if it is used once, in a linear map (`maps`);
* *kept*: drawn for the whole pass, as a leaf of torch's graph; so are orthogonal weights that must be drawn;
* *rows drawn*: the rows of an embedding that are looked up.

A pass begins with no weight kept. A second use, or an operation other than a linear map, raises `KeepWeightsError`, and
the pass begins again with that weight kept (`network`). A pass notes all weights that are used more than once before it
begins again. If they are many, or no Gaussian weight shall be drawn, a Gaussian weight that only linear maps use is
never drawn either, where that costs less (`products.RepeatedMap`).
"""

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from limitformer.base.errors import InputError, PicklesArguments, require
from limitformer.weightless.laws import ORTHOGONAL, Law
from limitformer.weightless.maps import squared_norm
from limitformer.weightless.numbers import entries, normals, wishart_root
from limitformer.weightless.orthogonal import haar_matrix, haar_rows, has_room
from limitformer.weightless.products import RepeatedMap
from limitformer.weightless.roots import Root, root_of
from limitformer.weightless.tensors import Fingerprint, fingerprint, same_memory

AUTO, NEVER, ALWAYS = "auto", "never", "always"  # whether weights are drawn
ROOTS_KEPT = 2
MOST_REPEATED = 2**28  # entries of weights used more than once that are kept, whatever it costs
MOST_KEPT = 2**31  # bytes of kept weights; without gradients, those beyond are drawn again at their next use
POSITIONS = re.compile(r"(^|[._])(wpe|embed_positions|position_embeddings?|pos_emb\w*)(\.|$)")  # tables of positions


class KeepWeightsError(PicklesArguments, Exception):
    """The pass must begin again, with these weights kept."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        self.reasons = reasons
        self.pickled_arguments = (reasons,)


class DrawWholeError(KeepWeightsError):
    """The pass must begin again, with networks that the model's own code draws; by weight, the reasons."""


@dataclass(eq=False)
class RandomWeight:
    """A parameter with a random law, and the current pass."""

    name: str
    law: Law
    shape: tuple[int, ...]
    run: "WeightlessRun"
    numbers: str = ""  # the name that seeds its numbers, if it is a copy of another weight: that weight's
    trained: bool = True  # whether it has a gradient

    @property
    def rows(self) -> range:
        """The indices of its rows; a single number has one row."""
        return range(self.shape[0] if self.shape else 1)


@dataclass(eq=False)
class WeightlessRun:
    """One pass of a sample, of `sequences` sequences; the laws of maps hold for several samples side by side too."""

    seed: int
    samples: range
    sequences: int
    dtype: torch.dtype
    device: torch.device
    draw: str = AUTO
    gradients: bool = False
    reasons_to_keep: dict[str, str] = field(default_factory=dict)  # by the names of the weights that are kept
    again: dict[str, str] = field(default_factory=dict)  # reasons to keep weights when the pass begins again
    repeated: set[str] = field(default_factory=set)  # weights used more than once that are never drawn
    repeats: dict[str, RepeatedMap] = field(default_factory=dict)  # by the names of these weights and their slices
    tokens: dict[str, int] = field(default_factory=dict)  # of all uses of a weight or slice
    costly: set[str] = field(default_factory=set)  # weights that cost less if they are drawn
    drawn_entries: int = 0  # of the weights that the pass begins again to keep
    kept: dict[str, Tensor] = field(default_factory=dict)  # whole weights that are kept, the last used one last
    mapped: set[str] = field(default_factory=set)  # weights and slices that a linear map has used
    factors: dict[str, float] = field(default_factory=dict)  # by which the code multiplies weights before it uses them
    squared: dict[str, Tensor] = field(default_factory=dict)  # |∂W|² (S,)
    read: set[Any] = field(default_factory=set)  # parameters that were read: ids, and names of those without entries
    leaves: dict[str, list[Tensor]] = field(default_factory=dict)  # entries that are kept (S, rows, …)
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of embeddings: ids, (S, rows, columns)
    roots: list[tuple[Tensor, Fingerprint, Root]] = field(default_factory=list)
    uses: dict[str, str] = field(default_factory=dict)  # how each weight was used, for the result
    operations: dict[str, str] = field(default_factory=dict)  # in which weights had to be kept
    fresh: dict[str, set[str]] = field(default_factory=dict)  # by weight: purposes of its fresh numbers, with the slice
    products: dict[tuple[str, int | None], dict[bool, tuple[Tensor, Tensor]]] | None = None  # for a witness, if it asks

    interpreter: Any = None  # while a pass is looked at
    rounds: Any = None  # a function of a factor of products with weights, and whether it is that of the backward pass
    in_format: bool = False  # whether the module has the type of a number format

    trains: ClassVar[bool] = False  # whether the weights change from pass to pass (`steps`)

    def __post_init__(self) -> None:
        self.anchor = torch.zeros((), device=self.device, dtype=self.dtype, requires_grad=self.gradients)

    @property
    def side_by_side(self) -> int:
        return len(self.samples)

    def by_sample(self, x: Tensor) -> Tensor:
        """Reshape tokens (samples · sequences, …, n) to (samples, tokens, n)."""
        return x.reshape(self.side_by_side, -1, x.shape[-1])

    def map(self, z: Tensor, tensor: Any, transpose: bool) -> Tensor:
        """Return z W (S, M, p), or z Wᵀ, of weights that change from pass to pass."""
        raise NotImplementedError

    def root(self, x: Tensor, z: Tensor) -> Root:
        """Return the root of `z`, which is `x` by sample; maps of the same tensor share it."""
        now = fingerprint(z)
        for tensor, then, root in self.roots:
            if same_memory(tensor, x) and now == then:
                return root
        # Code may multiply the tokens without a gradient first, as routers do.
        root = root_of(z.detach(), torch.is_grad_enabled() or self.gradients)
        self.roots = [*self.roots[1 - ROOTS_KEPT :], (x.detach(), now, root)]
        return root

    def use(self, name: str, how: str, weight: RandomWeight) -> None:
        """Note that a map uses a weight or its slice `name`; after a second use, the pass begins again."""
        if weight.name in self.repeated and name not in self.repeats:
            raise KeepWeightsError({weight.name: "used in several ways"})
        if name in self.mapped and name not in self.repeats and weight.name not in self.again:
            self.again[weight.name] = "used more than once"
            self.drawn_entries += prod(weight.shape)
        self.mapped.add(name)
        before = self.uses.get(weight.name)
        self.uses[weight.name] = f"rows drawn, rest {how}" if weight.name in self.rows else before or how

    def repeatable(self) -> set[str]:
        """The weights used more than once that need no entries."""
        many = self.drawn_entries > MOST_REPEATED or self.draw == NEVER
        return self.again.keys() - self.costly if many else set()

    def forget(self, names: set[str]) -> None:
        """Count the weights of these names as unused: their part of the module runs again."""
        self.mapped = {name for name in self.mapped if name.partition("[")[0] not in names}
        self.fresh = {name: each for name, each in self.fresh.items() if name not in names}

    def note_fresh(self, weight: str, purpose: str) -> None:
        """Note that fresh numbers answer for a weight; the purpose names the slice, and forward or backward.

        Raises:
            DrawWholeError: they have answered for it before, so that this answer would contradict that one.
        """
        known = self.fresh.setdefault(weight, set())
        if purpose in known and weight not in self.again:
            raise DrawWholeError({weight: "fresh numbers would answer twice for one product"})
        known.add(purpose)

    def entries(self, weight: RandomWeight, rows: range | Tensor) -> Tensor:
        """Draw rows of the weight (S, rows, *rest) by its law; the same ones at every call.

        Raises:
            DrawWholeError: fresh numbers have answered for it, which its entries do not know.
        """
        if weight.name in self.fresh and weight.name not in self.again:  # a second use begins the pass again
            raise DrawWholeError({weight.name: "its entries are read after answers without them"})
        if weight.law.kind == ORTHOGONAL:
            size = weight.shape[0], prod(weight.shape[1:])
            gaussian = self.normals(f"{weight.numbers or weight.name}: entries", range(size[0]), size[1])
            whole = haar_matrix(gaussian).mul_(self.scale(weight)).reshape(self.side_by_side, *weight.shape)
            every = isinstance(rows, range) and rows == weight.rows
            return whole if every else whole[:, torch.as_tensor(rows, device=self.device)]
        purpose, columns = f"{weight.numbers or weight.name}: entries", prod(weight.shape[1:])
        drawn = entries(weight.law, self.seed, purpose, self.samples, rows, columns, self.dtype).to(self.device)
        for row, value in weight.law.rows.items():
            numbers = torch.as_tensor(rows) if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop)
            drawn[:, numbers.to(drawn.device) == row] = value
        if weight.name in self.factors:
            drawn *= self.factors[weight.name]
        return drawn.reshape(self.side_by_side, *((len(rows), *weight.shape[1:]) if weight.shape else ()))

    def scale(self, weight: RandomWeight) -> float:
        """Return the scale of the weight's law, times the factors of the code."""
        return weight.law.scale * self.factors.get(weight.name, 1.0)

    def multiply(self, weight: RandomWeight, factor: float) -> bool:
        """Multiply a weight that the pass has not used yet by a number; return whether it could."""
        require(
            not self.trains,
            f"the module multiplies its weight {weight.name} in place when it runs, which training does not follow. "
            "Nearest: multiply the output of its map.",
        )
        used = any(name.partition("[")[0] == weight.name for name in self.mapped)
        if used or weight.name in self.leaves or weight.name in self.rows:
            return False
        self.factors[weight.name] = self.factors.get(weight.name, 1.0) * factor
        return True

    def wishart_root(self, purpose: str, rows: int, freedom: int) -> Tensor:
        """Draw T (S, rows, min(rows, freedom)), of which T Tᵀ is a Wishart matrix."""
        return wishart_root(self.seed, purpose, self.samples, rows, freedom, self.dtype).to(self.device)

    def normals(self, purpose: str, rows: range | Tensor, columns: int) -> Tensor:
        """Draw N(0, 1) (S, rows, columns)."""
        return normals(self.seed, purpose, self.samples, rows, columns, self.dtype).to(self.device)

    def leaf(self, weight: RandomWeight, rows: range | Tensor) -> Tensor:
        """Draw rows as a leaf of torch's graph, whose gradient is that of the weight."""
        orthogonal = isinstance(rows, Tensor) and weight.law.kind == ORTHOGONAL and self.draw != ALWAYS
        if orthogonal and has_room(len(rows), *weight.shape):  # these rows are all of the table that the pass looks up
            beyond, purpose = weight.shape[0] - weight.shape[1], f"{weight.name}: rows"
            gaussian = self.normals(purpose, rows, weight.shape[1])
            extra = self.wishart_root(purpose, len(rows), beyond) if beyond > 0 else gaussian[..., :0]
            values = haar_rows(gaussian, extra).mul_(self.scale(weight))
        else:
            values = self.entries(weight, rows)
        values = values.requires_grad_(self.gradients and weight.trained)
        self.leaves.setdefault(weight.name, []).append(values)
        return values

    def whole(self, weight: RandomWeight) -> Tensor:
        """Return the weight (S, *shape), kept for the pass.

        Raises:
            KeepWeightsError: it has been used in another way.
        """
        if any(name.partition("[")[0] == weight.name for name in self.mapped) or weight.name in self.rows:
            raise KeepWeightsError({weight.name: "used in several ways"})
        if weight.name in self.kept:
            self.kept[weight.name] = self.kept.pop(weight.name)
            return self.kept[weight.name]
        self.uses[weight.name] = "kept"
        self.kept[weight.name] = self.leaf(weight, weight.rows)
        # Those that were not used for longest are forgotten if all of them take too much memory.
        taken = 0 if self.gradients else sum(each.nbytes for each in self.kept.values())
        for name in list(self.kept)[:-1]:
            if taken > MOST_KEPT:
                taken -= self.kept.pop(name).nbytes
                self.leaves[name] = []  # it is still a weight that was kept
        return self.kept[weight.name]

    def embed(self, weight: RandomWeight, ids: Tensor) -> Tensor:
        """Look up rows of the weight (S, *ids.shape, columns), drawing one for each distinct id."""
        distinct, place = torch.unique(ids.to(self.device), return_inverse=True)
        if int(distinct[-1]) >= weight.shape[0] or int(distinct[0]) < 0:
            raise row_error(weight, int(distinct[0]), int(distinct[-1]))
        if weight.name in self.reasons_to_keep:
            return self.whole(weight)[:, distinct][:, place]
        known, rows = self.draw_rows(weight, distinct)
        order = torch.argsort(known)
        return rows[:, order[torch.searchsorted(known[order], distinct)]][:, place]

    def draw_rows(self, weight: RandomWeight, distinct: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the new ones of `distinct` rows; return indices and entries of all rows looked up so far."""
        known, rows = self.rows.get(weight.name, (distinct[:0], None))
        new = distinct[~torch.isin(distinct, known)]
        if len(new):
            if weight.name in self.mapped:
                raise KeepWeightsError({weight.name: "looked up after it was used as a head"})
            if len(known) and weight.law.kind == ORTHOGONAL:  # the new rows depend on those
                raise KeepWeightsError({weight.name: "orthogonal, and looked up several times"})
            drawn = self.leaf(weight, new.cpu())
            rows = drawn if rows is None else torch.cat([rows, drawn], 1)
            self.rows[weight.name] = torch.cat([known, new]), rows
            self.uses[weight.name] = "rows drawn"
        return self.rows[weight.name]

    def gradient_norms(self) -> dict[str, Tensor]:
        """Return |∂W| (S,) of every weight that has a gradient."""
        squared = dict(self.squared)
        for name, repeated in self.repeats.items():
            each = repeated.squared_gradient()
            if each is not None:
                add_to(squared, name.partition("[")[0], each)
        for name, leaves in self.leaves.items():
            for leaf in leaves:
                if leaf.grad is not None:
                    add_to(squared, name, squared_norm(leaf.grad))
        return {name: value.sqrt() for name, value in squared.items()}


def gradient_norm(gradient: Tensor) -> Tensor:
    """Return |∂W|, also of complex entries."""
    return torch.linalg.vector_norm((gradient.abs() if gradient.is_complex() else gradient).double())


def row_error(weight: RandomWeight, least: int, most: int) -> InputError:
    """Return the error about rows that a table does not have; for a table of positions it names the tokens that fit."""
    rows = weight.shape[0]
    if least >= 0 and POSITIONS.search(weight.name):
        fitting = rows - least
        return InputError(
            f"the network reads at most {fitting} tokens, as many as {weight.name} has positions for; got "
            f"{most - least + 1}. Nearest: {fitting} tokens."
        )
    fewer = f"at most {rows} tokens (--tokens {rows}), or ids below {rows}"
    got, nearest = (least, "ids of 0 or more") if least < 0 else (most, fewer)
    return InputError(f"{weight.name} has rows 0 to {rows - 1}; got the number {got}. Nearest: {nearest}.")


def add_to(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value
