"""The gradients' SDE in NumPy, written with the closed forms of attention without a mask; the second implementation.

Euler-Maruyama for V, M and Ψ. `missing` leaves out one term, or all noise: a wrong twin.
"""

import numpy as np


def t(a):
    return np.swapaxes(a, -1, -2)


def trace(a):
    return np.trace(a, axis1=-2, axis2=-1)[..., None, None]


def total(a):
    return a.sum((-2, -1), keepdims=True)


def root(a):
    """A root of `a` as near as Euler-Maruyama has left it to a covariance."""
    values, vectors = np.linalg.eigh(a)
    return vectors * np.sqrt(np.maximum(values, 0))[:, None, :]


class NaiveLimit:
    """Paths of (V, M, Ψ) for `limit` from V₀, by steps of dt; the results are (samples, …)."""

    def __init__(self, limit, start, samples, seed, dt, missing=()):
        self.rng, self.samples, self.missing = np.random.default_rng(seed), samples, missing
        self.gamma2, self.tau0, self.tokens = limit.gamma**2, limit.tau0, len(start)
        constants = limit.constants()
        self.a2, self.eta = constants.linear**2, constants.kink
        self.weights = (1 if self.tau0 else 0) + (2 if self.eta > 0 else 0)
        self.centre = np.eye(self.tokens) - 1 / self.tokens
        steps = round(limit.horizon / dt)
        self.dt = limit.horizon / steps
        self.v = np.broadcast_to(start, (samples, *np.shape(start))).copy()
        self.alive = np.ones(samples, bool)
        up = [self.step_up() for _ in range(steps)]
        self.m, self.psi = self.v / self.tokens, np.zeros_like(self.v)
        self.kernel = np.zeros(samples)
        for v, logits in reversed(up):
            before = self.rate(v)
            self.step_down(v, logits)
            self.kernel += self.dt * (before + self.rate(v)) / 2
        self.stream = np.where(self.alive, np.sqrt(np.maximum(np.trace(self.psi, axis1=1, axis2=2), 0)), np.inf)
        self.kernel = np.where(self.alive, self.kernel, np.inf)

    def rate(self, v):
        return self.weights * self.gamma2 * (v * self.psi).sum((-2, -1))

    def normal(self, columns=None):
        if "noise" in self.missing:
            return np.zeros((self.samples, self.tokens, columns or self.tokens))
        return self.rng.standard_normal((self.samples, self.tokens, columns or self.tokens))

    def second_order(self, v):
        """C V C and W."""
        cvc = self.centre @ v @ self.centre
        s = np.einsum("sii->si", cvc) - trace(cvc)[..., 0] / self.tokens
        return cvc, np.einsum("sii->si", v)[:, :, None] * s[:, None, :] / self.tokens

    def step_up(self):
        v, m = self.v, self.tokens
        lower, logits, drift = root(v), None, 0.0
        noise = np.sqrt(self.a2) * lower @ self.normal() @ t(lower)
        if self.tau0:
            logits = lower @ self.normal() @ t(lower)
            noise += self.gamma2 / self.tau0 * logits @ self.centre / m @ v
            cvc, w = self.second_order(v)
            drift = self.gamma2 / self.tau0**2 * (v * total(cvc * v) / m**2 + (w @ v + t(w @ v)) / 2)
        if self.eta > 0:
            deviation = np.sqrt(np.einsum("sii->si", v))
            scale = deviation[:, :, None] * deviation[:, None, :]
            rho = np.clip(v / scale, -1, 1)
            drift = drift + self.eta * 2 / np.pi * (np.sqrt(1 - rho**2) - rho * np.arccos(rho)) * scale
        moved = v + self.dt * drift + np.sqrt(self.dt) * (noise + t(noise))
        sound = (trace(moved)[:, 0, 0] < 300) & (np.linalg.eigvalsh(moved)[:, 0] > 1e-9)
        self.alive &= sound
        self.v = np.where(self.alive[:, None, None], moved, v)
        return v, logits

    def step_down(self, v, logits):
        """The state at the upper end is (m, ψ); V is that of the lower end."""
        m, psi, dt = self.m, self.psi, self.dt
        lower, spread = root(v), root(psi)
        inverse = np.linalg.solve(v, m)
        of_m, of_psi = np.zeros_like(m), 2 * self.a2 * dt * (t(m) @ inverse - self.tokens * psi)
        if "alignment" in self.missing:
            of_psi = np.zeros_like(psi)
        noise = np.sqrt(dt * self.a2) * spread @ self.normal() @ t(spread)
        if self.tau0:
            moved, drift, mixed = self.attention_down(v, m, psi, lower, logits)
            of_m, of_psi, noise = of_m + moved, of_psi + drift, noise + mixed
        if self.eta > 0:
            h = (lower @ self.normal(1))[..., 0]
            pull = (spread @ self.normal(1))[..., 0]
            pull = np.sqrt(self.eta * dt) * pull + self.eta * dt * np.einsum("sk,skb->sb", abs(h), inverse)
            sign = np.sign(h)
            of_m = of_m + (h[:, :, None] * sign[:, None, :] - abs(h)[:, :, None]) * pull[:, None, :]
            of_psi = of_psi + self.eta * dt * (sign[:, :, None] * sign[:, None, :] - 1) * psi
        self.m, self.psi = m + of_m, psi + of_psi + noise + t(noise)

    def attention_down(self, v, m, psi, lower, logits):
        c, count, g2, tau0, dt = self.centre, self.tokens, self.gamma2, self.tau0, self.dt
        cvc, w = self.second_order(v)
        overlap = total(v * psi)
        moved = g2 / tau0 * np.sqrt(dt) * m @ logits
        scale = np.sqrt((1 - g2) * g2 * dt * np.maximum(overlap, 0)) / tau0
        moved = moved + scale * (lower @ self.normal() @ t(lower))
        moved = (moved + t(moved)) @ c / count
        cm = c @ m
        q = np.einsum("sii,sia->sa", cvc, cm) / count
        e = np.einsum("saa,sia->si", v, cm)
        turned = v @ t(m) @ c @ v
        drift = (-g2 * (turned + t(turned)) + 2 * (1 - g2) * trace(m) * v @ c @ v) @ c / count**2
        drift = drift + (m @ w - w @ m) / 2 + v * q[:, None, :] + v @ c @ (e[:, :, None] * c) / count
        source = g2 * (t(m) @ cvc @ m + c @ m @ v @ t(m) @ c) / count**2
        source = source + (1 - g2) * (total(cvc * v) * psi + overlap * cvc) / count**2
        if "logits" in self.missing:
            source = 0.0
        spread = overlap * cvc / count**2 + (t(w) @ psi + psi @ w) / 2 + source
        mixed = g2 / tau0 * np.sqrt(dt) * t(logits @ c / count) @ psi
        return moved + g2 / tau0**2 * dt * drift, g2 / tau0**2 * dt * spread, mixed
