# The README's code, for mypy (`test_documentation.py` holds it against the page).
import limitformer as lf

def block_0() -> None:
    import limitformer as lf

    net = lf.Transformer(width=200, depth=150, gamma=8**-0.5, attention=lf.ShapedAttention(tau0=1.0))
    start = lf.equicorrelated(tokens=2, correlation=0.2)

    finite = lf.simulate(net, start, samples=4096, seed=0)  # the exact chain: (sample, depth, token, token_)
    limit = lf.simulate(lf.limit(net), start, samples=4096, seed=0)  # its SDE, up to time depth/width
    for name, paths in {"chain": finite, "limit": limit}.items():
        rho = lf.correlation(paths)[:, -1, 0, 1]
        print(f"{name}: mean correlation {float(rho.mean()):.3f} ± {float(rho.std()) / 4096**0.5:.3f}")


def block_1() -> None:
    def squared(x):
        return max(x, 0.0) ** 2


    mine = lf.Elementwise(squared)
    net = lf.Transformer(width=200, depth=24, gamma=0.5, attention=lf.SoftmaxAttention(), feedforward=mine)
    print(f"{mine.gain_at(200):.4f}")  # 1/E σ(g)²


def block_2() -> None:
    model = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100)
    exact = lf.overlap(model).antipodal_probability()
    print(f"antipodal, exactly: {exact:.4f}; possible above β = {lf.overlap(model).critical_beta:.3f}")
    ends = lf.simulate(model, horizon=200.0, samples=10_000, seed=0, record=[200.0], early_stop=1e-9)
    found = lf.outcomes(ends).sel(outcome="antipodal pair").isel(time=0)
    print(f"simulated: {float(found.probability):.3f}, 95 % in {float(found.low):.3f} … {float(found.high):.3f}")
    clusters = lf.overlap(lf.StochasticTransformer(tokens=3, dim=4, beta=2.0, layers_per_unit_time=100), clusters=(2, 1))
    print(f"two tokens against one part after {clusters.mean_hitting_time(0.9, start=-1.0):.1f} units of time")


def block_3() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    model = lf.hf.shape_model(LlamaForCausalLM(config))  # A = γ₁I + softmax − γ₂C̄, γ₁ and γ₂ trained
    model.save_pretrained("shaped")
    model = lf.hf.load_shaped("shaped")


def block_4() -> None:
    data = lf.weightless.simulate("gpt2", "the cat sat on the mat, and the dog sat on the log", samples=1, seed=0)
    print(data.effective_tokens.mean(("sample", "head")).round(1).values)  # by layer: how far attention spreads
