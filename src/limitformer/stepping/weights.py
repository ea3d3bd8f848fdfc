r"""The weights of one network while it is trained: what each pass reads of them, and what each step changes.

A weight has one of three *forms*:

* *undrawn*: a Gaussian matrix that only linear maps and lookups use. W_t = a W₀ + U_t, where only products of W₀ are
  known (`products`) and U_t is made of the factors of the gradients: QᵀK P for SGD and Muon, entries that are kept, or
  computed when they are needed, for Adam and Lion (`entrywise`).
* *rows*: a table that is only looked up. Rows are drawn when they are first read.
* *entries*: everything else. It is a tensor, as in training.

`TrainedRun` is a pass that reads these weights. `Forms` remembers the form of each weight; a use that a form does not
allow raises `KeepWeightsError`, and the network's training begins again with another form (`trajectory`).
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from limitformer.base.errors import require
from limitformer.base.memory import SHARE, available_memory, readable
from limitformer.stepping.entrywise import EntrywiseHistory, StoredUpdates
from limitformer.stepping.rules import StepRules
from limitformer.stepping.updates import CoreUpdate, TensorUpdate, UpdateRule
from limitformer.weightless.implicit import Implicit, as_matrix
from limitformer.weightless.laws import NORMAL
from limitformer.weightless.maps import squared_norm, squared_product
from limitformer.weightless.numbers import normals
from limitformer.weightless.products import Bases, DrawnMatrix, UndrawnMatrix
from limitformer.weightless.run import ALWAYS, NEVER, KeepWeightsError, RandomWeight, WeightlessRun, row_error

UNDRAWN, REDRAWN, ROWS, ENTRIES = "undrawn", "drawn again for each product", "rows", "entries"
MOST_FOR_SPECTRUM = 2**20  # entries of a matrix whose largest singular value is computed
MULTIPLE = 1e-3  # relative distance at which an output counts as a multiple of another
SMALLEST = 1e-300
COPIES = 4  # of a weight with entries: itself, its start, and two of the optimiser
STORED_BYTES = 3 * 2**29  # of all updates that are kept, each with two means of its optimiser


@dataclass
class Forms:
    """The form of each weight, by name, for all networks of a simulation."""

    draw: str
    passes: int  # of each network
    steps: int
    forms: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of the weights with entries
    tied: set[str] = field(default_factory=set)  # tables that linear maps use too
    taken: int = 0  # bytes of the weights with entries
    stored: dict[str, bool] = field(default_factory=dict)  # whether updates of an undrawn weight are kept
    stored_bytes: int = 0

    def of_matrix(self, weight: RandomWeight, rule: UpdateRule | None, tokens: int) -> str:
        """Return the form of a matrix that a linear map uses, chosen by cost at its first use.

        Undrawn products cost less than a drawn matrix while their number is well below the matrix's size.
        """
        if weight.name not in self.forms:
            # Of one of stacked matrices, and of a kernel (out, in · positions).
            stacked = len(weight.shape) == 3 and weight.shape[0]
            rows, *rest = weight.shape[1:] if stacked else weight.shape
            columns = math.prod(rest)
            known = min(tokens * self.passes, rows) + min(tokens * self.steps, columns)
            gaussian = weight.law.kind == NORMAL and weight.law.shift == 0.0
            cheaper = known * (rows + columns) < rows * columns
            if rule is not None and rule.needs_entries:
                self.require_entries(weight, f"the weight decay of {rule.name} is part of its gradient")
            elif gaussian and self.draw != ALWAYS and (cheaper or self.draw == NEVER):
                self.forms[weight.name] = UNDRAWN
            elif not self.fits(weight):
                self.forms[weight.name] = REDRAWN
            else:
                self.require_entries(weight, "it costs less" if gaussian else f"it is {weight.law.kind}")
        return self.forms[weight.name]

    def fits(self, weight: RandomWeight) -> bool:
        """Whether a weight with entries fits the free memory, together with those that are there."""
        free = available_memory()
        return free is None or self.taken + self.bytes_of(weight) <= SHARE * free

    def bytes_of(self, weight: RandomWeight) -> int:
        return COPIES * math.prod(weight.shape) * weight.run.dtype.itemsize

    def stores(self, weight: RandomWeight) -> bool:
        """Whether updates by Adam or Lion are kept: those of the first matrices that take no more than `STORED_BYTES`.

        This does not depend on free memory: results would differ in their last digits.
        """
        if weight.name not in self.stored:
            size = self.stored_bytes + 3 * math.prod(weight.shape) * weight.run.dtype.itemsize
            self.stored[weight.name] = size <= STORED_BYTES
            self.stored_bytes = size if size <= STORED_BYTES else self.stored_bytes
        return self.stored[weight.name]

    def require_entries(self, weight: RandomWeight, reason: str) -> None:
        """Give a weight entries.

        Raises:
            InputError: they do not fit the free memory.
        """
        if self.forms.get(weight.name) == ENTRIES:
            return
        require(
            self.fits(weight),
            f"{weight.name} {weight.shape} needs its entries ({reason}), which take {readable(self.bytes_of(weight))} "
            "with those of its optimiser, more than is free. Nearest: a smaller model.",
        )
        self.taken += self.bytes_of(weight)
        self.forms[weight.name], self.reasons[weight.name] = ENTRIES, reason


class TrainedMatrix:
    """A matrix of which only products are known, W_t = a W₀ + U_t (n × p)."""

    def __init__(self, initial: UndrawnMatrix, rule: UpdateRule | None, stored: bool) -> None:
        self.initial, self.rule = initial, rule
        self.core = self.history = None
        if rule is not None and rule.means:
            self.history = (StoredUpdates if stored else EntrywiseHistory)(rule, initial.shape)
        elif rule is not None:
            self.core = CoreUpdate(rule, initial.shape)
        self.uses: list[tuple[Tensor, Tensor]] = []  # of this step: factors of the gradient, or their coefficients
        self.earlier = 0  # how many of them are those of earlier passes

    def times(self, z: Tensor, transpose: bool, ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return z W (m, p), or z Wᵀ, its coefficients, and the part that the updates have made of it.

        Args:
            ids: if z chooses rows of W: those that it chooses.
        """
        z = z.detach()
        product = self.initial.product(z, *self.sides(transpose))
        change = torch.zeros_like(product.answer)
        decay = 1.0
        if self.core is not None:
            decay, core = self.core.a, self.core.core.to(z.dtype)
            core = core.mT if transpose else core
            _, there = self.sides(transpose)
            change = product.coefficients[:, : core.shape[0]] @ core @ there.basis[: core.shape[1]]
        elif self.history is not None:
            decay = self.history.decay
            if ids is not None:
                change = self.history.rows(ids).to(z.dtype)
            else:
                change = self.history.times_transpose(z) if transpose else self.history.times(z)
        answer = product.answer if decay == 1.0 else product.answer * decay
        return answer + change, product.coefficients, change

    def sides(self, transpose: bool) -> Any:
        left, right = self.initial.left, self.initial.right
        return (right, left) if transpose else (left, right)

    def note_gradient(self, left: Tensor, right: Tensor, of_left: Tensor | None, of_right: Tensor | None) -> None:
        """Note a part leftᵀ right of the gradient, and the coefficients of the factors if they are known."""
        if self.core is None:
            # Copies: a factor may be a parameter of the module, whose start the next pass puts back in place.
            self.uses.append((left.detach().clone(), right.detach().clone()))
            return
        assert of_left is not None
        assert of_right is not None
        self.uses.append((of_left, of_right))

    def factors(self, since: int = 0) -> tuple[Tensor, Tensor] | None:
        """Return the factors of the gradient of this step, or their coefficients; None if nothing has used it."""
        uses = self.uses[since:]
        if not uses:
            return None
        lefts, rights = [left for left, _ in uses], [right for _, right in uses]
        if self.core is not None:
            sizes = len(self.initial.left.basis), len(self.initial.right.basis)  # bases have grown
            lefts, rights = (
                [nn.functional.pad(each, (0, size - each.shape[1])) for each in some]
                for some, size in zip((lefts, rights), sizes, strict=True)
            )
        return torch.cat(lefts), torch.cat(rights)

    def squared_gradient(self, since: int = 0) -> float:
        factors = self.factors(since)
        return 0.0 if factors is None else float(squared_product(factors[0][None], factors[1][None]).detach())

    def step(self, scale: float, factor: float, has_gradient: bool) -> None:
        """Change the matrix by its gradient times `scale`, if the weight of which it is a part has a gradient."""
        pair = self.factors()
        self.uses, self.earlier = [], 0
        if not has_gradient:  # as torch does, the step changes nothing
            return
        if self.core is not None:
            size = len(self.initial.left.basis), len(self.initial.right.basis)
            gradient = torch.zeros(size, dtype=self.initial.dtype) if pair is None else scale * pair[0].mT @ pair[1]
            self.core.add(gradient, factor)
        elif self.history is not None:
            (n, p), none = self.initial.shape, torch.zeros
            left, right = pair or (none(0, n, dtype=self.initial.dtype), none(0, p, dtype=self.initial.dtype))
            self.history.add(left, right, scale, factor)

    def change(self) -> tuple[float, float]:
        """Return |U| and its largest singular value; the second is NaN where U is not of low rank."""
        if self.core is not None:
            values = torch.linalg.svdvals(self.core.core.double()) if self.core.core.numel() else torch.zeros(1)
            return float(values.square().sum().sqrt()), float(values.max())
        return (math.sqrt(self.history.squared()), math.nan) if self.history is not None else (0.0, 0.0)


class TrainedRows:
    """A table (rows, columns) that is only looked up; each row that was read has its own history of gradients."""

    def __init__(self, rule: UpdateRule | None) -> None:
        self.rule, self.a = rule, 1.0  # W_t = a W₀ + U_t
        # By step: ids, their gradients times the clipping, and the factor of the rate.
        self.gradients: list[tuple[Tensor, Tensor, float]] = []
        self.read: dict[int, Tensor] = {}  # rows that passes have read, as they were at the start

    def now(self, ids: Tensor, initial: Tensor) -> Tensor:
        """Return the rows of these ids (r, columns), of which `initial` are the rows at the start."""
        self.read |= {int(k): row for k, row in zip(ids, initial, strict=True) if int(k) not in self.read}
        if self.rule is None:
            return initial
        update, value = TensorUpdate(self.rule), initial
        for places, rows, factor in self.gradients:
            here, gradient = torch.isin(ids, places), torch.zeros_like(initial)
            gradient[here] = rows[torch.searchsorted(places, ids[here])]
            value = update.step(value, gradient, factor)
        self.a = update.a
        return value

    def step(self, gradient: tuple[Tensor, Tensor] | None, scale: float, factor: float) -> None:
        """Note the gradient: sorted ids, and a row for each."""
        if gradient is not None:
            self.gradients.append((gradient[0], scale * gradient[1], factor))

    def change(self) -> float:
        """Return |W_t − a W₀| of the rows that were read."""
        if not self.read:
            return 0.0
        initial = torch.stack(list(self.read.values()))
        now = self.now(torch.tensor(list(self.read)), initial)
        change = now - self.a * initial
        return float(change.double().norm())


class TrainedEntries:
    """A tensor with entries."""

    def __init__(self, initial: Tensor, rule: UpdateRule | None) -> None:
        self.initial, self.value = initial, initial.clone()
        self.update = None if rule is None else TensorUpdate(rule)
        self.still = True  # whether W_t is a W₀, as every gradient was 0

    def step(self, gradient: Tensor | None, scale: float, factor: float) -> None:
        if gradient is not None and self.update is not None:
            self.still = self.still and not self.update.rule.needs_entries and not bool(gradient.any())
            self.value = self.update.step(self.value, gradient * scale, factor)

    @property
    def moved(self) -> Tensor:
        """W_t − a W₀."""
        return self.value - (1.0 if self.update is None else self.update.a) * self.initial

    def change(self) -> tuple[float, float]:
        """Return |W_t − a W₀| and its largest singular value, which is NaN for all but small matrices."""
        small = self.initial.dim() == 2 and self.initial.numel() <= MOST_FOR_SPECTRUM
        if self.still and bool(self.initial.isfinite().all()):  # nothing has moved yet: rounding is left out
            return 0.0, 0.0 if small else math.nan
        moved = self.moved.double()
        small = small and bool(moved.isfinite().all())
        return float(moved.norm()), float(torch.linalg.matrix_norm(moved, 2)) if small else math.nan


def added(before: Any, gradient: Any) -> Any:
    """Return the sum of two gradients, tensors (in the memory of the first) or sorted ids and rows."""
    if before is None:
        return gradient
    if isinstance(gradient, Tensor):
        return before.add_(gradient)
    ids = torch.unique(torch.cat([before[0], gradient[0]]))
    rows = gradient[1].new_zeros(len(ids), gradient[1].shape[1])
    for some, each in (before, gradient):
        rows.index_add_(0, torch.searchsorted(ids, some), each)
    return ids, rows


class TrainedWeights:
    """All weights of one network at one learning rate."""

    def __init__(self, rules: StepRules, forms: Forms, seed: int, sample: int, dtype: torch.dtype) -> None:
        self.rules, self.forms, self.seed, self.sample, self.dtype = rules, forms, seed, sample, dtype
        self.bases = Bases()
        self.matrices: dict[str, dict[int | None, TrainedMatrix]] = {}  # by name and slice
        self.rows: dict[str, TrainedRows] = {}
        self.entries: dict[str, TrainedEntries] = {}
        self.own: dict[str, nn.Parameter] = {}  # parameters of the module that have entries
        self.steps: dict[str, list[tuple[float, float, bool]]] = {}  # by name: the steps of all parts of a weight
        self.effects: dict[str, list[tuple[float, int]]] = {}  # by name: squares that updates add to outputs
        self.lookups: dict[str, list[tuple[float, int]]] = {}  # by table: squares that updates add to rows, by token
        self.last: tuple[str, Tensor] | None = None  # the name and the output of the last map, of a measured pass
        self.gradients: dict[str, Any] = {}  # of this step: tensors, or ids and rows

    def rule(self, name: str) -> UpdateRule | None:
        return self.rules.rules.get(name)

    def put(self, module: nn.Module) -> None:
        """Give parameters that have entries their values of now."""
        for name, parameter in module.named_parameters():
            if isinstance(parameter, Implicit):
                continue
            if name not in self.own:
                self.own[name] = parameter
                self.entries[name] = TrainedEntries(parameter.detach().clone(), self.rule(name))
            parameter.data = self.entries[name].value.clone()

    def release(self) -> None:
        """Give parameters that have entries their values of the start, and free the matrices.

        The matrices refer to this object, so that they would stay in memory until the garbage collector runs.
        """
        self.matrices.clear()
        for name, parameter in self.own.items():
            parameter.data = self.entries[name].initial

    def matrix(self, weight: RandomWeight, part: int | None, rows: int) -> TrainedMatrix | None:
        """Return a matrix or a slice of which a map asks `rows` products; None if it has entries.

        Raises:
            KeepWeightsError: it was looked up before, as a table.
        """
        if weight.name in self.rows:
            self.forms.tied.add(weight.name)
            del self.forms.forms[weight.name]
            raise KeepWeightsError({})
        form = self.forms.of_matrix(weight, self.rule(weight.name), rows)
        if form == ENTRIES:
            return None
        parts = self.matrices.setdefault(weight.name, {})
        if part not in parts:
            parts[part] = self.new_matrix(weight, part, form)
        return parts[part]

    def new_matrix(self, weight: RandomWeight, part: int | None, form: str) -> TrainedMatrix:
        """Return a matrix or a slice that no pass has used, after as many steps as the others."""
        name = weight.name if part is None else f"{weight.name}[{part}]"
        shape = weight.shape if part is None else weight.shape[1:]
        matrix = shape[0], math.prod(shape[1:])

        def draw(purpose: str, rows: Tensor, columns: int) -> Tensor:
            where = self.seed, f"{name}: {purpose}", range(self.sample, self.sample + 1)
            return normals(*where, rows, columns, self.dtype)[0]

        def whole() -> Tensor:
            rows = weight.rows if part is None else range(part, part + 1)
            return weight.run.entries(weight, rows)[0].reshape(matrix)

        initial: UndrawnMatrix = DrawnMatrix(matrix, whole, self.dtype, self.bases)
        assert form in (UNDRAWN, REDRAWN)
        if form == UNDRAWN:
            initial = UndrawnMatrix(matrix, weight.law.scale, draw, self.dtype, self.bases)
            initial.know_rows(weight.law.rows if part is None else {})
        rule = self.rule(weight.name) if weight.trained else None
        stored = rule is not None and bool(rule.means) and self.forms.stores(weight)
        result = TrainedMatrix(initial, rule, stored)
        for step in self.steps.get(weight.name, []):
            result.step(*step)
        return result

    def note_effect(self, name: str, change: Tensor) -> None:
        """Note what the updates of a weight add to the output of a map."""
        self.effects.setdefault(name, []).append((float(squared_norm(change[None])), change.numel()))

    def note_lookup(self, name: str, change: Tensor, place: Tensor) -> None:
        """Note what the updates of a table add to the rows that tokens read.

        Args:
            change: of the rows (r, columns).
            place: by token, its row.
        """
        tokens = torch.bincount(place.flatten(), minlength=len(change))
        square = float(change.detach().double().square().sum(1) @ tokens.double())
        self.lookups.setdefault(name, []).append((square, place.numel() * change.shape[1]))

    def scale_last(self, output: Tensor) -> None:
        """Note the effect of the last map on the module's output, if this is a multiple of the map's: muP's head.

        A bias, which is the same for all tokens, does not matter.
        """
        if self.last is None:
            return
        (name, own), self.last = self.last, None
        if own.numel() != output.numel() or own.shape[-1:] != output.shape[-1:] or not output.isfinite().all():
            return
        own, output = (each.detach().reshape(-1, each.shape[-1]).double() for each in (own, output))
        if len(own) > 1:
            own, output = own - own.mean(0), output - output.mean(0)
        factor = float((own * output).sum()) / max(float((own * own).sum()), SMALLEST)
        rest = torch.linalg.vector_norm(output - factor * own)
        if name in self.effects and float(rest) <= MULTIPLE * float(torch.linalg.vector_norm(output)):
            square, count = self.effects[name].pop()
            self.effects[name].append((square * factor**2, count))

    def note_gradients(self, run: "TrainedRun", alone: bool = False) -> dict[str, float]:
        """Add the gradients of a backward pass to those of this step; return |∂W|² of them `alone`, if asked."""
        gradients: dict[str, Any] = {}
        for name, looked_up in run.looked_up.items():
            pairs = [(ids, leaf.grad[0]) for ids, leaf in looked_up if leaf.grad is not None]
            if pairs:
                ids = torch.unique(torch.cat([each for each, _ in pairs]))
                rows = torch.zeros(len(ids), pairs[0][1].shape[1], dtype=self.dtype)
                for some, each in pairs:
                    rows.index_add_(0, torch.searchsorted(ids, some), each)
                gradients[name] = ids, rows
        for name, leaves in run.leaves.items():
            if name in self.entries and leaves[0].grad is not None:
                gradients[name] = leaves[0].grad[0]
        gradients |= {name: each.grad for name, each in self.own.items() if each.grad is not None}
        squares = self.squares(gradients, latest=True) if alone else {}
        self.gradients |= {name: added(self.gradients.get(name), each) for name, each in gradients.items()}
        for part in (each for parts in self.matrices.values() for each in parts.values()):
            part.earlier = len(part.uses)
        return squares

    def squares(self, gradients: dict[str, Any] | None = None, latest: bool = False) -> dict[str, float]:
        """Return |∂W|² of each weight that has a gradient in this step, or in its `latest` pass."""
        squares = {
            name: float(squared_norm((each[1] if isinstance(each, tuple) else each)[None]))
            for name, each in (self.gradients if gradients is None else gradients).items()
        }
        for name, parts in self.matrices.items():
            starts = [(each, each.earlier if latest else 0) for each in parts.values()]
            if any(len(each.uses) > start for each, start in starts):
                squares[name] = sum(each.squared_gradient(start) for each, start in starts)
        return squares

    def step(self, squares: dict[str, float], scale: float, factor: float) -> None:
        """Change every weight by its gradient times `scale`, at the learning rate of its rule times `factor`."""
        for name, parts in self.matrices.items():
            step = scale, factor, name in squares
            self.steps.setdefault(name, []).append(step)
            for each in parts.values():
                each.step(*step)
        for name, table in self.rows.items():
            table.step(self.gradients.get(name), scale, factor)
        for name, entries in self.entries.items():
            entries.step(self.gradients.get(name), scale, factor)
        self.gradients = {}

    def changes(self) -> dict[str, tuple[float, float]]:
        """Return |W_t − a W₀| of each weight, and its largest singular value or NaN."""
        result = {name: each.change() for name, each in self.entries.items()}
        result |= {name: (each.change(), math.nan) for name, each in self.rows.items()}
        for name, parts in self.matrices.items():
            every = [each.change() for each in parts.values()]
            result[name] = math.hypot(*(size for size, _ in every)), max(largest for _, largest in every)
        return result


@dataclass(eq=False)
class TrainedRun(WeightlessRun):
    """A pass that reads trained weights."""

    trained: TrainedWeights = field(kw_only=True)
    measured: bool = False  # whether effects of updates are noted
    looked_up: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # by table: ids and leaves

    trains: ClassVar[bool] = True

    def map(self, z: Tensor, tensor: Implicit, transpose: bool) -> Tensor:
        """Return z W (1, M, p), or z Wᵀ, of a random matrix W."""
        weight = tensor.weight
        matrix = self.trained.matrix(weight, tensor.part, z.shape[-2])
        if matrix is not None:
            noted = self.trained.note_effect if self.measured else None
            out: Tensor = TrainedMap.apply(
                z[0], self.anchor, matrix, transpose, tensor.frozen, weight.name, noted, None
            )
            self.trained.last = (weight.name, out.detach().clone()) if self.measured else None
            return out[None]
        entries = as_matrix(self.part_of(self.whole(weight), tensor), transpose)
        if self.measured and z.isfinite().all():
            trained, change = self.trained.entries[weight.name], z.new_zeros(z.shape[-2], entries.shape[-1])
            if not trained.still:
                change = z[0].detach() @ as_matrix(self.part_of(trained.moved[None], tensor), transpose)[0]
            self.trained.note_effect(weight.name, change)
        answer: Tensor = z @ (entries.detach() if tensor.frozen else entries)
        self.trained.last = (weight.name, answer.detach().clone()) if self.measured else None
        return answer

    @staticmethod
    def part_of(whole: Tensor, tensor: Implicit) -> Tensor:
        return whole if tensor.part is None else whole[:, tensor.part]

    def leaf(self, weight: RandomWeight, rows: range | Tensor) -> Tensor:
        """Return a whole weight as a leaf of torch's graph.

        Raises:
            KeepWeightsError: it had another form before.
        """
        trained, name = self.trained, weight.name
        before = trained.forms.forms.get(name)
        trained.forms.require_entries(weight, self.operations.get(name, "it is not a matrix of a linear map"))
        if before not in (None, ENTRIES):
            raise KeepWeightsError({})
        if name not in trained.entries:
            rule = trained.rule(name) if weight.trained else None
            trained.entries[name] = TrainedEntries(self.entries(weight, rows)[0], rule)
        values = trained.entries[name].value[None].clone().requires_grad_(self.gradients and weight.trained)
        self.leaves.setdefault(name, []).append(values)
        return values

    def embed(self, weight: RandomWeight, ids: Tensor) -> Tensor:
        """Look up rows of a table (1, *ids.shape, columns)."""
        distinct, place = torch.unique(ids, return_inverse=True)
        if int(distinct[-1]) >= weight.shape[0] or int(distinct[0]) < 0:
            raise row_error(weight, int(distinct[0]), int(distinct[-1]))
        trained, name = self.trained, weight.name
        rule = trained.rule(name) if weight.trained else None
        tied = name in trained.forms.tied or name in trained.matrices or (rule is not None and rule.of_matrices)
        matrix = trained.matrix(weight, None, len(distinct)) if tied else None

        def note(name: str, change: Tensor) -> None:
            trained.note_lookup(name, change, place)

        noted = note if self.measured else None
        if matrix is not None:
            choice = torch.zeros(len(distinct), weight.shape[0], dtype=self.dtype)
            choice[torch.arange(len(distinct)), distinct] = 1.0
            frozen = not weight.trained
            rows = TrainedMap.apply(choice, self.anchor, matrix, False, frozen, name, noted, distinct)[None]
        elif tied or trained.forms.forms.get(name) == ENTRIES:
            rows = self.whole(weight)[:, distinct]
            if noted:
                noted(name, trained.entries[name].moved[distinct])
        else:
            trained.forms.forms[name] = ROWS
            table = trained.rows.setdefault(name, TrainedRows(rule))
            initial = self.entries(weight, distinct)[0]
            now = table.now(distinct, initial)
            if noted:
                noted(name, now - table.a * initial)
            rows = now[None].clone().requires_grad_(self.gradients and weight.trained)
            self.looked_up.setdefault(name, []).append((distinct, rows))
        return rows[:, place]


class TrainedMap(torch.autograd.Function):
    """The map by a matrix of which only products are known."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, anchor: Tensor, matrix: TrainedMatrix, transpose: bool, frozen: bool, name: str,
        noted: Any, ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return z W (M, p), or z Wᵀ."""
        answer, coefficients, change = matrix.times(z, transpose, ids)
        ctx.matrix, ctx.transpose, ctx.frozen = matrix, transpose, frozen
        ctx.save_for_backward(z, coefficients)
        if noted is not None:
            noted(name, change)
        return answer

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None, None]:
        """Return the gradient of z, and note that of W."""
        (z, of_z), matrix, back = ctx.saved_tensors, ctx.matrix, None
        of_d: Tensor | None = None
        if ctx.needs_input_grad[0] or (matrix.core is not None and not ctx.frozen):
            back, of_d, _ = matrix.times(d, not ctx.transpose)
        if not ctx.frozen:
            factors = (d, z, of_d, of_z) if ctx.transpose else (z, d, of_z, of_d)
            matrix.note_gradient(*factors)
        return back, None, None, None, None, None, None, None
