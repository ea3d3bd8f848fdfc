"""The numbers on the figures' pages are those of the records.

Next to NAME.png is NAME.json, the record of the same run. A page's table is that of the record, and so are the numbers
in its sentences, to the digits shown: `SENTENCES` has each sentence with its claim. Making a figure again (`limitformer
figure NAME --out docs/figures`) updates picture, record and table; these tests list the sentences to update.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from limitformer_papers import FIGURES
from limitformer_papers.catalogue import STORED
from limitformer_papers.making import BEGIN, END, module_of, renew, table, with_table

pytestmark = pytest.mark.fast

PAGES = Path(__file__).resolve().parents[3] / "docs" / "figures"


class Number(float):
    """A claim's value; format `p` is a power of ten, `k` has a comma for thousands, `c` is in per cent."""

    def __format__(self, spec):
        if spec.endswith("p"):
            digits, exponent = f"{float(self):.{spec[1:-1] or 0}e}".split("e")
            return f"{digits}·10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
        if spec.endswith("k"):
            digits = int(spec[1:-1])
            return f"{round(float(self), -digits):,.0f}"
        if spec.endswith("c"):
            return f"{100 * float(self):{spec[:-1]}f} %"
        return format(float(self), spec).replace("-", "−")


# Figure → (how its claim begins, the sentence).
SENTENCES = {
    "ct-fig8": [
        ("largest difference of chain and limit", "differ by at most {:.3f} at any time"),
        ("least antipodal share at β = 1 ", "d = 5 ({:.1c}, exact"),
        ("the same at T, in standard errors", "At T they differ by {:.1f} standard errors"),
    ],
    "st-fig2": [
        ("last over first layer, value gradient, Pre-LN", "| 0.0071 | {:.3f} |"),
        ("power p of a fall as ℓᵖ, Pre-LN, value", "about ℓ^({:.2f}) for values"),
        ("power p of a fall as ℓᵖ, Pre-LN, query", "and ℓ^({:.2f}) for queries"),
        ("largest over smallest of all layers, query gradient, shaped", "values and {:.1f} times for queries"),
    ],
    "st-fig1": [
        ("mean |ρ| at the last layer, shaped", r"| shaped | {:.3f} ± 0.001 (mean ρ:"),
        ("mean ρ at the last layer, shaped", "(mean ρ: {:.3f} ± 0.002)"),
        ("1 − mean |ρ| at the last layer, unshaped", "| unshaped | 1 − {:.0p};"),
        ("layer at which", "it passes 0.99 at layer {:.0f} |"),
        ("1 − mean |ρ| at the last layer, unshaped + Pre-LN", "| unshaped + Pre-LN, λ² + γ² = 1 | 1 − {:.0p} |"),
        ("mean |ρ| at the last layer, unshaped + Pre-LN, λ = γ = 1", "λ = γ = 1 | {:.3f} |"),
        ("KS distance", "distance of network and SDE is {:.3f}; two samples"),
    ],
    "st-fig3": [
        ("95th percentile of |ρ| at the smallest γ", "from {:.2f} at γ = 0.05"),
        ("95th percentile of |ρ| at γ = 1", "to {:.2f} at γ = 1. The SDE's"),
        ("largest difference of network and SDE in it", "is within {:.3f} of the network's"),
        ("KS distance of network and SDE, γ = 0.25", "is at most {:.3f} for the five γ"),
        ("KS distance of λ = 1", "KS distance of the two at γ = 1/√d: {:.3f}"),
    ],
    "st-fig4": [
        ("mean |ρ| at the last layer, shaped", "| shaped | {:.2f} |"),
        ("median |V| at the last layer, shaped", "| {:.2f} | stable |"),
        ("mean |ρ| at the last layer, τ² = n n_k, center", "| τ² = n n_k, center | {:.2f} |"),
        ("median |V| at the last layer, τ² = n n_k, center", "| {:.1p} | vanishes |"),
        ("mean |ρ| at the last layer, id, center", "| id, center | {:.2f} |"),
        ("median |V| at the last layer, id, center", "| {:.1f} | aligns"),
        ("median |V| at the last layer, id, τ² = n n_k", "| id, τ² = n n_k | 1 | {:.1p} |"),
        ("median |V| at the last layer, only id", "| only id | 1 | {:.1p} |"),
        ("mean |ρ| at the last layer, only center", "| only center | {:.2f} |"),
        ("median |V| at the last layer, only center", "| {:.1p} | vanishes |"),
        ("median |V| at the last layer, only τ² = n n_k", "| only τ² = n n_k | 1 | {:.2f} |"),
        ("share of samples whose |V| is above 10 at the last layer, shaped", "exceeds 10 in {:.1c} of the networks"),
    ],
    "st-fig5": [
        ("largest γ whose median t* is 1", "by layer 200, up to γ = {:.2f}."),
        ("median t* at γ = 0.2", "falls to {:.2f} at γ = 0.2"),
        ("median t* at γ = 0.5", "{:.3f} at γ = 0.5"),
        ("median t* at γ = 1; it falls", "and {:.3f} at γ = 1: a smaller"),
        ("least median t* of two tokens, at γ = 0.6", "{:.3f} at γ = 0.6, and 1 again"),
        ("share of two tokens that never stop there", "at γ = 0.9, {:.0c} of the networks never stop"),
        ("last layer at which", "have all passed 1e4 by layer {:.0f}."),
    ],
    "st-fig7": [
        ("KS distance of network and SDE, V", "network and SDE is {:.3f} for the covariance"),
        ("KS distance of network and SDE, variance", "and {:.3f} for the variance"),
        ("5th percentile", "lie between {:.2f} and"),
        ("95th percentile", "and {:.2f}."),
        ("where the network's density", "its peak of 1.2 at {:.2f};"),
    ],
    "st-fig8": [
        ("share of the map", "* {:.0c} of the map is stable"),
        ("largest fall of t* from one τ₀", "noise of 100 samples ({:.4f})"),
        ("median t* at γ = 0.7", "the median is {:.2f} at γ = 0.7,"),
        ("median t* at γ = 0.8", "{:.2f} at 0.8,"),
        ("median t* at γ = 0.9", "{:.2f} at 0.9 and 1 at"),
    ],
    "text-fate": [("mean correlation of different words at the last depth, shaped", "| {:.2f} ± 0.01 |")],
    "ct-fig3": [
        ("L = 10:", "is {:.4f} at L = 10"),
        ("L = 100: mean", "{:.4f} at 100 and"),
        ("L = 1000: |simulated − exact|", "over these 16 cells is {:.2f} standard errors"),
        ("the same simulated", "(simulated: {:.3f} ± 0.002)"),
    ],
    "lifetimes": [
        ("exact mean lifetime of 2 + 1", "| 2 + 1 | 4.12 | {:.2f} |"),
        ("the chain's, L = 1000", "2 + 1 tokens live {:.1f} ± 0.7 (L = 1000)"),
        ("growth of the logarithm with β, from β = 4 on, 3 + 2", "the logarithm grows by {:.2f} to"),
        ("growth of the logarithm with β, from β = 4 on, 3 + 1", "to {:.2f} per unit of β"),
    ],
    "stock-models": [
        ("llama-3-8b, width 4,096: standard deviation of the first logits over", "OLMo 2) makes it {:.0f} at"),
        ("llama-3-8b: the first block multiplies", "is {:.0f} times as large after"),
        ("llama-3-405b: the first block multiplies", "Llama 3 8B, and {:,.0f} times in"),
        ("llama-3-405b: effective tokens of the first", "look at {:.1f} of 128"),
        ("llama-3-405b: logit std, first block", "Command R, {:.1f} in Llama 3 405B"),
        ("command-r: logit std, first block", "Llama 3 8B, {:.1f} in Command R"),
        ("llama-3-8b: logit std, first block", "0.02²·width: {:.1f} in Llama"),
        ("bert-large: mean correlation at the end", "mean correlation of {:.2f}."),
        ("t5-large: mean correlation at the end", "mean correlation of {:.2f}."),
    ],
    "lifetimes-spread": [
        ("spread 0.3: share of pairs that are ever", "At s = 0.3, {:.0c} of the pairs are apart"),
        ("spread 0.3: share of pairs that split", "In {:.0c} one token comes nearer"),
    ],
    "feedforward-branch": [("weakest ReLU: share at the horizon", "and {:.2c} are there at T = 8")],
    "large-beta": [
        ("N = 5: share of 3 + 2", "five tokens {:.3f} of 4,000"),
        ("N = 5: share of 4 + 1", "as 3 + 2, {:.3f} as 4 + 1"),
        ("N = 5: share of 5 + 0", "and {:.3f} as 5 + 0"),
        ("β = 2.5: largest", "at β = 2.5 within {:.3f} at all times"),
        ("β = 1.5: largest", "at β = 1.5 within {:.3f}."),
        ("N = 3: share not in one", "{:.2f} of the trajectories of three"),
        ("N = 9: share not in one", "not one cluster, and {:.2f} of nine"),
    ],
    "gradient-limit": [
        ("attention: KS distance of chain", "(KS) is {:.3f} for attention"),
        ("attention and ReLU: KS distance of chain", "and {:.3f} with a ReLU, below it"),
        ("attention: the same", "at n = 12 it is {:.3f} and"),
        ("attention and ReLU: the same", "and {:.3f}. It falls"),
        ("attention: median of the chain", "median is {:.2f} and"),
        ("attention and ReLU: median of the chain", "and {:.2f} times the SDE's"),
        ("attention: the kernel's 95 %", "quantile is {:.0f} times its 5 % quantile for attention"),
        ("attention and ReLU: the kernel's 95 %", "and {:.0f} times with a ReLU"),
        ("attention: KS distance of the frozen", "at a distance of {:.2f} and"),
        ("attention and ReLU: KS distance of the frozen", "and {:.2f}."),
    ],
    "many-tokens": [
        ("β = 1e+06: growth", "at β = 10⁶ by {:.2f} ± 0.14 per"),
        ("β = 3: growth", "and grows by {:.2f} ± 0.05"),
        ("β = 3: mean time to gather", "shorter, {:.1f} for 1,000 tokens"),
        ("β = 2: mean of simulated", "with 20 tokens: {:.2f} (β = 2)"),
        ("β = 3: mean of simulated", "and {:.2f} (β = 3)"),
    ],
    "ct-fig6": [
        ("N = 2: largest |simulated − exact|", "within {:.3f}, the worst of 17"),
        ("the same in standard errors", "17 values by {:.1f} standard errors"),
        ("N = 3: largest fall", "largest fall being {:.3f}, and"),
        ("N = 5: largest fall", "and {:.3f} for N = 5"),
        ("N = 20: of those pairs", "and {:.1c} for N = 20"),
        ("N = 3: largest |simulated − predicted", "within {:.4f} at every β"),
    ],
    "ct-fig1": [
        ("largest difference", "the two differ by {:.4f} h"),
        ("share of the field's", "* {:.0c} of the field's mean square"),
    ],
    "ct-fig5": [
        ("largest KS distance", "boxes and chain differ by at most {:.3f} (KS;"),
        ("largest ||X| − 1|", "Tokens end on the sphere**, to {:.0p}."),
    ],
    "ct-table1": [
        ("α = 1/L, V = I, L = 1024", "off by a factor 1 − {:.5f} from"),
        ("its order in 1/L: one", "of order 1/L (fitted: {:.3f})"),
        ("α = 1/√L, V random", "from N(1, 1) is {:.3f};"),
        ("α = 1/L, V random", "is {:.4f} at L = 1024"),
        ("α = 1/√L, V = I", "(fitted order {:.2f})"),
    ],
    "foretells": [
        ("choosing: ρ of distance (", "in one half, with ρ = {:.2f} within"),
        ("H1a: ρ of distance", "in the held-out half ρ = {:.2f} (p"),
        ("held-out: ρ of RKSP radius (", "spectral radius, has {:.2f}, and"),
        ("H1b: that ρ minus", "and the difference is {:.2f} (97.5 %"),
        ("held-out: ρ of verdicts (", "number of verdicts has {:.2f}, the loss"),
        ("held-out: ρ of loss at the start (", "loss at the start {:.2f}, depth"),
        ("held-out: ρ of depth (", "depth {:.2f}."),
        ("H2: loss of fix minus placebo", "minus the placebo is {:.2f} nats (−0.19"),
        ("study 2: loss of fix minus unchanged", "the fix changed the loss by {:.2f} nats (−0.17"),
        ("study 2: loss of placebo minus unchanged", "the placebo changed it by +{:.2f} and lowered"),
        ("H3, warm-up 0: share", "held 12 of 20 ({:.2f}, 0.36"),
        ("study 1, held-out: networks", "networks fail** ({:.0f} of 24)"),
        ("held-out: AUROC of distance (", "AUROC of {:.2f} (0.56"),
        ("held-out: AUROC of angle", "Cowsik et al. {:.2f} (0.62"),
        ("held-out: AUROC of RKSP near-unit", "its near-unit mass {:.2f} (0.00"),
        ("H4: ρ of foretold", "foretold by its exponents and found is {:.2f} over sixteen"),
        ("study 4: ρ over the width", "the width alone it is {:.2f} (ten"),
        ("study 4: ρ over the depth", "over the depth {:.2f} (six)"),
        ("study 4: mean of |found", "differ from those found by {:.2f} powers of two"),
        ("study 4: mean regret in nats of 10", "costs {:.2f} nats at the last one in the mean"),
        ("study 4: mean regret in nats of 6", "by one place of the grid, and costs {:.3f}."),
        ("study 4: ρ of the change's size", "change and the cost is {:.2f} (p = 0.008)"),
        ("gpt2, width, adamw, standard: regret", "of width 64 costs {:.2f} and 0.11 nats"),
        ("gpt2, width, adamw, mup: regret", "and costs {:.2f} and 0.00"),
        ("gpt2, width, adamw, mup without rates: regret", "muP costs {:.2f} without its rates"),
    ],
    "ct-euler": [
        ("circle: mean", "at t = 1 is {:.3f}, Itô's formula has 2"),
        ("tokens, naive: growth", "(within {:.1f} standard errors"),
        ("tokens, naive, 25 steps", "tokens are {:.1f}, 3.5"),
        ("tokens, naive, 400 steps", "3.5, {:.1f} long at t = 1"),
        ("tokens, Euler with the drift, 25 steps", "is {:.3f}, 0.045"),
        ("tokens, Euler with the drift, 100 steps", "0.091, {:.3f}, 0.023"),
        ("tokens, Euler with the drift, 400 steps", "0.045, {:.3f} on average"),
        ("its order in dt", "of order √dt (fitted: {:.3f})"),
        ("tokens, normalised", "stays to {:.0p}."),
    ],
}
# Sentences that state a number in another form than the claim are not in the list.


def claims_of(name):
    record = json.loads((PAGES / f"{name}.json").read_text(encoding="utf-8"))
    return {claim["name"]: float(claim["value"]) for claim in record["claims"]}


def one_line(text):
    return re.sub(r"\s+", " ", text)


def prose(name):
    """Return the page without the record's table, on one line."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    return one_line(text.split(BEGIN)[0] + text.split(END)[1])


def sentence(name, begins, template):
    """Return the sentence that the record requires; the claim has that name or is the only one with that beginning."""
    claims = claims_of(name)
    values = [claims[begins]] if begins in claims else [v for k, v in claims.items() if k.startswith(begins)]
    assert len(values) == 1, f"{name}: {len(values)} claims begin with {begins!r}"
    return one_line(template.format(Number(values[0])))


def test_every_figure_has_a_record():
    assert {path.stem for path in PAGES.glob("*.json")} == {*FIGURES, *STORED}


@pytest.mark.parametrize("name", FIGURES)
def test_record_is_of_the_papers_scale(name):
    record = json.loads((PAGES / f"{name}.json").read_text(encoding="utf-8"))
    paper = module_of(name).paper()
    assert record["config"] == json.loads(json.dumps(asdict(paper)))
    assert (record["figure"], record["scale"], record["seed"]) == (name, "paper", 0)
    assert [claim["name"] for claim in record["claims"] if claim["holds"] is False] == []


@pytest.mark.parametrize("name", [*FIGURES, *STORED])
def test_table_on_the_page_is_that_of_the_record(name):
    record = json.loads((PAGES / f"{name}.json").read_text(encoding="utf-8"))
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert text == with_table(text, record)


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_state_the_records_numbers(name):
    page = prose(name)
    expected = [sentence(name, *one) for one in SENTENCES[name]]
    assert [one for one in expected if one not in page] == []


def test_wrong_twin_sentence_with_another_number_is_missing():
    """Each sentence of the page, with its value half as large again, is missing."""
    page = prose("st-fig1")
    for begins, template in SENTENCES["st-fig1"]:
        claims = claims_of("st-fig1")
        value = claims.get(begins) or next(v for k, v in claims.items() if k.startswith(begins))
        assert one_line(template.format(Number(1.5 * value))) not in page


@pytest.mark.parametrize("name", [*FIGURES, *STORED])
def test_page_describes_its_picture(name):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    (description,) = re.findall(rf"!\[([^\]]+)\]\({name}\.png\)", text)
    assert len(description) > 80
    with Image.open(PAGES / f"{name}.png") as picture:
        assert picture.format == "PNG"


# Updating a page.

RECORD = {
    "figure": "st-fig1",
    "claims": [
        {"name": "mean |ρ|", "value": 0.123456, "holds": True},
        {"name": "lifetime", "value": "inf", "holds": False},
        {"name": "share", "value": 5e-9, "holds": None},
    ],
}


def test_table_of_a_record():
    assert table(RECORD).splitlines()[2:] == [
        r"| mean \|ρ\| | 0.1235 | yes |",
        "| lifetime | inf | **no** |",
        "",
        "Other numbers: 1, in [st-fig1.json](st-fig1.json).",
    ]
    assert table(RECORD | {"claims": RECORD["claims"][:2]}).splitlines()[-1] == "| lifetime | inf | **no** |"


def test_page_is_updated_between_its_marks(tmp_path):
    page = tmp_path / "st-fig1.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert renew(page, RECORD) == [page]
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\n{table(RECORD)}\n\n{END}\nafter\n"
    assert renew(page, RECORD) == [page]
    assert page.read_text(encoding="utf-8").count(BEGIN) == 1


@pytest.mark.parametrize("text", ["no marks\n", f"{BEGIN}\none mark\n"])
def test_page_without_marks_is_not_changed(tmp_path, text):
    page = tmp_path / "st-fig1.md"
    assert renew(page, RECORD) == []
    assert not page.exists()
    page.write_text(text, encoding="utf-8")
    assert renew(page, RECORD) == []
    assert page.read_text(encoding="utf-8") == text


def test_number_formats():
    assert f"{Number(5.4686e-9):.0p}" == "5·10⁻⁹"
    assert f"{Number(1.80871e59):.1p}" == "1.8·10⁵⁹"
    assert f"{Number(46240.4):.3k}" == "46,000"
    assert f"{Number(0.413574):.0c}" == "41 %"
