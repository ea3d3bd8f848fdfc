import torch
from .updates import TensorUpdate
class EntrywiseHistory:
    def __init__(self, rule, shape): self.r=rule; self.shape=shape; self.h=[]
    def add(self, l, r, scale, factor): self.h.append((l,r,scale,factor))
    @property
    def decay(self):
        a=1.0
        for l,_,_,f in self.h:
            if l is not None: a*=1-self.r.lr*f*self.r.weight_decay
        return a
    def U(self):
        up=TensorUpdate(self.r); w=None
        for l,r,s,f in self.h:
            if l is None: continue
            g=s*l.mT@r; w=torch.zeros_like(g) if w is None else w
            w=up.step(w,g,f)
        return w
    def products(self, z=None, d=None):
        U=self.U(); x=z if z is not None else d
        if U is None: return x.new_zeros(len(x), self.shape[1] if z is not None else self.shape[0])
        return z@U if z is not None else d@U.mT
    def squared(self):
        U=self.U(); return 0.0 if U is None else float(U.square().sum())
