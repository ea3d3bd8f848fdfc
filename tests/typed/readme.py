# The README's code, for mypy (`test_documentation.py` holds it against the page).
import limitformer as lf

def block_0() -> None:
    import limitformer as lf

    net = lf.Transformer(width=200, depth=150, gamma=8**-0.5, attention=lf.ShapedAttention(tau0=1.0))
    start = lf.equicorrelated(tokens=2, correlation=0.2)
    finite = lf.simulate(net, start, samples=4096, seed=0)  # the exact law of the finite network
    limit = lf.simulate(lf.limit(net), start, samples=4096, seed=0)  # its SDE
    for name, paths in {"network": finite, "SDE": limit}.items():
        print(f"{name}: mean correlation {float(lf.correlation(paths)[:, -1, 0, 1].mean()):.3f}")

