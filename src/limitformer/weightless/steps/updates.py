import torch, math
def needs_entries(r): return r.kind == "adam" and not r.decoupled and r.weight_decay > 0
def is_entrywise(r): return r.kind == "adam"
def ns(G, rule, shape):
    X = G/ G.norm().clamp(min=1e-7); a,b,c = rule.coefficients
    t = X.shape[0] > X.shape[1]
    X = X.mT if t else X
    for _ in range(rule.iterations):
        A = X@X.mT; X = a*X + (b*A + c*A@A)@X
    X = X.mT if t else X
    return X * (max(1, shape[0]/shape[1])**.5)
class TensorUpdate:
    def __init__(self, rule): self.r = rule; self.m = None; self.t = 0
    def step(self, w, g, f):
        r = self.r
        if g is None: return w
        self.t += 1
        if r.kind == "sgd":
            g = g + r.weight_decay*w
            if r.momentum: self.m = g if self.m is None else r.momentum*self.m + (1-r.dampening)*g; g = g + r.momentum*self.m if r.nesterov else self.m
            return w - r.lr*f*g
        if r.kind == "adam":
            w = w*(1-r.lr*f*r.weight_decay); b1,b2 = r.betas
            if self.m is None: self.m, self.v = torch.zeros_like(w), torch.zeros_like(w)
            self.m = b1*self.m+(1-b1)*g; self.v = b2*self.v+(1-b2)*g*g
            return w - r.lr*f*(self.m/(1-b1**self.t))/((self.v/(1-b2**self.t)).sqrt()+r.eps)
        if self.m is None: self.m = torch.zeros_like(w)
        self.m = torch.lerp(self.m, g, 1-r.momentum); u = torch.lerp(g, self.m, r.momentum) if r.nesterov else self.m
        w = w*(1-r.lr*f*r.weight_decay)
        if w.dim()==3: return w - r.lr*f*torch.stack([ns(x, r, x.shape) for x in u])
        return w - r.lr*f*ns(u, r, w.shape)
class CoreUpdate:
    def __init__(self, rule, shape): self.r=rule; self.shape=shape; self.a=1.0; self.K=torch.zeros(0,0,dtype=torch.float64); self.B=None; self.b=None
    def step(self, G, f):
        r=self.r
        if G is None: return
        pad=lambda x: torch.nn.functional.pad(x.to(G.dtype),(0,G.shape[1]-x.shape[1],0,G.shape[0]-x.shape[0]))
        self.K=pad(self.K)
        if r.kind=="sgd":
            gk, ga = G + r.weight_decay*self.K, r.weight_decay*self.a
            if r.momentum:
                self.B, self.b = (gk, ga) if self.B is None else (r.momentum*pad(self.B)+(1-r.dampening)*gk, r.momentum*self.b+(1-r.dampening)*ga)
                gk, ga = (gk+r.momentum*self.B, ga+r.momentum*self.b) if r.nesterov else (self.B, self.b)
            self.K = self.K - r.lr*f*gk; self.a -= r.lr*f*ga
        else:
            self.B = torch.zeros_like(G) if self.B is None else pad(self.B)
            self.B = torch.lerp(self.B, G, 1-r.momentum); u = torch.lerp(G, self.B, r.momentum) if r.nesterov else self.B
            d = 1-r.lr*f*r.weight_decay; self.a*=d; self.K=self.K*d
            if u.numel(): self.K = self.K - r.lr*f*ns(u, r, self.shape)
