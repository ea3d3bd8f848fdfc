"""The figures: their names, what they show, and their folders. Nothing that computes or draws is imported."""

# Name → what it shows.
FIGURES = {
    "st-fig1": "[ST, Fig. 1] mean correlation by layer, shaped against unshaped; density, SDE against network",
    "st-fig2": "[ST, Fig. 2] norms of value and query gradients by layer: shaped, Pre-LN, Post-LN",
    "st-fig3": "[ST, Fig. 3] correlation of a ResNet by residual strength, SDE against network",
    "st-fig4": "[ST, Fig. 4] correlation and covariance when parts of shaped attention are removed",
    "st-fig5": "[ST, Fig. 5] largest eigenvalue from an adversarial start; stopping time by residual strength",
    "st-fig7": "[ST, Fig. 7] density of the covariance, SDE against network",
    "st-fig8": "[ST, Fig. 8] stopping time by residual strength and temperature",
    "text-fate": "correlations of a real text's tokens at a few depths, shaped against unshaped",
    "ct-fig1": "[CT, Fig. 1] attention field on the circle, and its tangential part",
    "ct-fig3": "[CT, Fig. 3] phase transition of two tokens, simulated against exact, and its bias at finite depth",
    "ct-fig4": "[CT, Fig. 4] fate of two tokens by temperature and noise, simulated against exact",
    "ct-fig5": "[CT, Fig. 5] diagram of a layer, run block by block against the chain's layer",
    "ct-fig6": "[CT, Fig. 6] antipodal pairs among several tokens, early against late",
    "ct-fig7": "[CT, Fig. 7] clustering of 50 tokens in time",
    "ct-fig8": "[CT, Fig. 8] clustering of two tokens in time, simulated against exact",
    "ct-fig9": "[CT, Fig. 9] time to cluster, stochastic against deterministic",
    "ct-table1": "[CT, Table 1, eq. 1] which scaling of a residual network has an ODE, which an SDE",
    "ct-euler": "[CT, Sec. 4.1] tangential noise leaves the sphere: naive Euler, Euler, a normalised layer",
    "lifetimes": "mean lifetime of unequal antipodal clusters, exact against simulated",
    "lifetimes-spread": "mean lifetime of unequal antipodal clusters whose tokens are not together, and how many split",
    "transition": "what becomes of the transition of [CT, Fig. 3] with drawn queries and keys, heads and a causal mask",
    "feedforward-branch": "antipodal pairs with a feed-forward branch, linear, tanh or ReLU, simulated against exact",
    "large-beta": "tokens at large β: fair coins say where they go; unequal sides end on the time scale e^{2β}",
    "gradient-limit": "law of the tangent kernel and of gradients as depth and width grow: chain against SDE",
    "many-tokens": "clusters of up to 1,000 tokens in time, times to come together, lifetimes by the larger share",
    "stock-models": "what transformers draws for stock models at their real shapes: stream, heads, gradients by depth",
}
# Figures of finished runs, at the scale of those runs: of `limitformer train`, or those that the package has (STORED).
STORED = ("foretells",)
RUN_FIGURES = {
    "st-lr": "[ST v1, Fig. 5] training loss by learning rate, shaped (Recover) against Pre-LN",
    "st-fig6": "[ST, Fig. 6] entropy of attention while training, by learning rate, shaped (Recover) against Pre-LN",
    "st-table1": "[ST, Table 1] training and held-out loss at the best learning rate, by variant and residual strength",
    "st-gains": "[ST, App. D] shaping that stays against Learn and Recover, and losses by the start of γ",
    "st-sizes": "[ST, Sec. 5] does a learning rate hold where width and depth grow together?",
    "st-table2": "[ST, Table 2] scores on CoLA, MRPC and RTE after fine-tuning, shaped against Pre-LN",
    "foretells": "do verdicts, fixes, rates and transfer foretell training? Four studies, rules written first",
    "ct-fig2": "[CT, Fig. 2] validation accuracy, independent random values against one identity",
}
FOLDERS = {"st": "shaped_transformer", "ct": "clustering"}  # by the beginning of the name; others: `beyond`
