"""One layer of finite width with a given gradient above it, in vectors of n coordinates: the second route to the SDE.

The gradient g above the layer is given by M = X′gᵀ and Ψ = g gᵀ and is Haar distributed outside the tokens X′. Weights
are known only from what the tokens have seen of them; all else is drawn (docs/theory.md, "Gradients of the chain").
Nothing is expanded in 1/n. Shapes: (S, m, …) for S samples of m tokens.
"""

import numpy as np

from limitformer.models import ShapedReLU


def t(a):
    return np.swapaxes(a, -1, -2)


def root(a):
    return np.linalg.cholesky(a + 1e-14 * np.trace(a, axis1=-2, axis2=-1)[..., None, None] * np.eye(a.shape[-1]))


class Layer:
    """`attention` or `feedforward` of a width, and the change of (M, Ψ) from above to below."""

    def __init__(self, width, gamma, v, m, psi, samples, seed, seen=None):
        self.n, self.gamma, self.lam, self.samples = width, gamma, np.sqrt(1 - gamma**2), samples
        self.v, self.m, self.psi = v, m, psi
        self.rng = np.random.default_rng(seed)
        self.seen = np.ones((len(v), len(v)), bool) if seen is None else seen
        self.factor = np.linalg.cholesky(v)
        self.frame = np.eye(width)[: len(v)]  # Q: by rotation it may be any
        self.x = np.broadcast_to(np.sqrt(width) * self.factor @ self.frame, (samples, len(v), width))

    def normal(self, columns):
        return self.rng.standard_normal((self.samples, len(self.v), columns))

    def outside(self, rows, frame):
        """`rows` without their part along the orthonormal rows of `frame`."""
        return rows - rows @ t(frame) @ frame

    def gradient_above(self, above):
        """g of given M and Ψ, and its Haar distributed part."""
        inverse = np.linalg.inv(above @ t(above))
        inside = self.m.T @ inverse @ above
        free = self.normal(self.n)
        free = free - free @ t(above) @ inverse @ above
        frame = np.linalg.solve(root(free @ t(free)), free)
        haar = root(self.psi - inside @ t(inside)) @ frame
        return inside + haar, haar

    def returned(self, d, seen):
        """d Wᵀ of a W whose first m rows in `frame` are `seen` (S, m, columns); and the part that is new."""
        fresh = root(d @ t(d)) @ self.outside(self.normal(self.n), self.frame)
        return d @ t(seen) @ self.frame + fresh, fresh

    def attention(self, tau0):
        """The gradient below the layer of shaped attention, n_k = n."""
        n, gamma, lam, counts = self.n, self.gamma, self.lam, self.seen.sum(1)[:, None]
        tau = tau0 * n
        seen_query, seen_key, seen_value = self.normal(n), self.normal(n), self.normal(n)
        queries, keys = self.factor @ seen_query, self.factor @ seen_key
        logits = queries @ t(keys)
        e = np.exp(logits / tau) * self.seen
        softmax = e / e.sum(-1, keepdims=True)
        a = np.eye(len(self.v)) + softmax - self.seen / counts
        values = self.factor @ seen_value
        above = lam * self.x + gamma * a @ values
        g, haar = self.gradient_above(above)
        back, fresh = self.returned(g, seen_value)
        at_a = gamma * g @ t(values)
        at_logits = softmax * (at_a - (softmax * at_a).sum(-1, keepdims=True)) / tau
        at_query, at_key = at_logits @ keys, t(at_logits) @ queries
        through = (self.returned(at_query, seen_query)[0] + self.returned(at_key, seen_key)[0]) / np.sqrt(n)
        below = lam * g + gamma * t(a) @ back / np.sqrt(n) + through
        free = (gamma * self.x - lam * values) @ t(haar)  # ξ, of mean zero given all else
        self.control(g, fresh, g, np.zeros((1, 1)))
        mixing = self.centred(logits / np.sqrt(n)) / tau0 / np.sqrt(n)
        self.zero_spread += gamma**2 * (t(mixing) @ self.psi + self.psi @ mixing)
        answers = gamma * self.m - lam * free
        self.zero_alignment = gamma / tau0 / np.sqrt(n) * self.pulled_back(logits / np.sqrt(n), answers)
        return below

    def feedforward(self, c_plus, c_minus):
        """The gradient below a layer of hidden width n."""
        n, relu = self.n, ShapedReLU(c_plus=c_plus, c_minus=c_minus)
        positive, negative = relu.slopes(n)
        gain = np.sqrt(relu.gain_at(n) / n)
        seen = self.normal(n)
        h = self.factor @ seen
        slopes = gain * np.where(h > 0, positive, negative)
        active = slopes * h
        lower = root(active @ t(active))
        branch = lower @ self.normal(n)
        above = self.lam * self.x + self.gamma * branch
        g, _ = self.gradient_above(above)
        frame = np.linalg.solve(lower, active)
        pulls = root(g @ t(g)) @ self.outside(self.normal(n), frame)
        answered = g @ t(branch) @ t(np.linalg.inv(lower)) @ frame + pulls
        back, fresh = self.returned(slopes * answered, seen)
        below = self.lam * g + self.gamma * back / np.sqrt(n)
        self.control(g, fresh, slopes * answered, pulls / np.sqrt(n))
        kink = gain * (positive - negative) / 2
        self.zero_alignment = self.gamma * kink * (h @ t(np.sign(h) * pulls) - np.abs(h) @ t(pulls))
        return below

    def control(self, g, fresh, d, pulls):
        """Keep the part of the change of Ψ whose mean is 0: products with fresh parts of weights."""
        share = (self.n - len(self.v)) / self.n
        mixed = self.lam * self.gamma * g @ t(fresh) / np.sqrt(self.n)
        own = fresh @ t(fresh) / self.n - share * (d @ t(d))
        if pulls.size > 1:
            own = own + pulls @ t(pulls) - share * self.psi
        self.zero_spread = mixed + t(mixed) + self.gamma**2 * own

    def centred(self, logits):
        counts = self.seen.sum(1)[:, None]
        return (logits - (logits * self.seen).sum(-1, keepdims=True) / counts) * self.seen / counts

    def pulled_back(self, logits, answers):
        b, d = self.centred(logits), self.centred(t(answers))
        return answers @ b - b @ answers + logits @ t(d) + t(logits) @ d

    def change(self, below):
        """The change of M and of Ψ."""
        return self.x @ t(below) - self.m, below @ t(below) - self.psi

    def drift(self, below):
        """n times that change, less the parts of mean zero that are of order n^(−1/2)."""
        of_alignment, of_spread = self.change(below)
        return self.n * (of_alignment - self.zero_alignment), self.n * (of_spread - self.zero_spread)
