"""Formulas in sentences, in the typeface of displayed ones, with indices and exponents; MkDocs calls this.

A formula such as `V_αβ = ρ²` is a sequence of variables and numbers with operators between them. Its letters keep
their characters, so that they can be searched and copied: `i` marks those that mathematics sets in italics. Raised
letters and letters with a bar or a hat, which Unicode has as characters, are taken apart: the font has but few of them.
"""

import html
import re
import unicodedata
from typing import Any

# What is not a sentence: code, displayed formulas, and tags with their attributes.
LITERAL = re.compile(r"(<(?:pre|code|math|svg)\b.*?</(?:pre|code|math|svg)>|<[^>]+>)", re.DOTALL)
INSIDE = r"\{(?:[^{}]|\{[^{}]*\})*\}|\((?:[^()]|\((?:[^()])*\))*\)|ℓ|[−-]?(?:[α-ωΑ-Ω]+|\d+\.\d+|[A-Za-z0-9]+|∞)[′±₀]?|½"
SCRIPT = re.compile(
    r"(?<=[\wα-ωΑ-Ω∫Σ)\]|′₀-₉⁰-⁹⊥}\u0302-\u0304])(?<![a-z]{2})(?<![a-z0-9_]{3})(?P<mark>[_^])"
    rf"(?P<inside>{INSIDE})(?:\^(?P<above>{INSIDE}))?"
)

OPERATORS = frozenset("=<>≤≥≠≈≪≫∝+−·×/±→∈∼~↦≡")
FUNCTIONS = frozenset(
    [
        *("arccos", "arcsin", "artanh", "cos", "cosh", "det", "diag", "div", "erf", "exp", "inf", "lim", "ln", "log"),
        *("max", "min", "sin", "sinh", "sup", "tan", "tanh", "tr", "var"),
    ]
)
ABBREVIATIONS = frozenset(["w/o", "n/a", "N/A", "I/O", "A/B"])
UNITS = frozenset("sh")  # after a number
TITLES = frozenset(["Appendix", "Command", "Part", "Section"])  # before a letter that is a name
SIGN = re.compile(r"[α-ωΑ-Ωϵℓ√∞∂∫∇⟨⟩′⊥‖ℝᵀⁱʲᵏᵖⁿᵢⱼ₊₋±]|^(?:[A-Za-z]|log|exp|min|max)\(")
VARIABLE = re.compile(r"[b-zB-HJ-Z]")  # alone: `a`, `A` and `I` are words
NUMBER = re.compile(r"[−+]?[\d.,/·⁰-⁹⁻]*[\d½][\d⁰-⁹⁻]*")
# Single letters with digits and signs, at least one of them a sign of mathematics: 1/n, |V|, L².
SIGNS_AND_LETTERS = re.compile(r"(?=.*[²³⁴⁻₀-₉½|/])(?=.*[A-Za-z])(?:[^A-Za-z]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+")
RAISED = re.compile(r"<(su[bp])>(?:[^<]|<(su[bp])>[^<]*</\2>)*</\1>")
WORD = re.compile(rf"(?:{RAISED.pattern}|[^\s<])+")
# Each word has a kind: v, a variable or formula; n, a number; a, the word `a` or `A`; f, a function; o, an operator. A
# capital is the same with punctuation after it; q is a v, and p an n, before the comma between two arguments.
FORMULA = re.compile(r"(?:f?(?:[vna]o+|[pq]))*f?[vnaVNA]")
LETTER = re.compile(r"[A-Za-zα-ωϵℓ][\u0302-\u0304]?")
NAME = re.compile(rf"(?<![A-Za-z])(?:{LETTER.pattern}){{1,2}}(?![A-Za-z])|[α-ωϵℓ][\u0302-\u0304]?")
TAG = re.compile(r"(<[^>]+>|&[#\w]+;)")
SUPERSCRIPTS = {raised: f"<sup>{letter}</sup>" for raised, letter in zip("ᵀⁱʲᵏᵖᵗᵘⁿ", "Tijkptun", strict=True)}
LETTERS = str.maketrans(SUPERSCRIPTS | {"ᵢ": "<sub>i</sub>", "ⱼ": "<sub>j</sub>"})
PUNCTUATION = ".,;:!?…"
PAIRS = {"(": ")", "[": "]"}


def on_page_content(content: str, page: Any, **_: object) -> str:
    """Set the formulas of all sentences. In the API names are Python's, and keep their underscores."""
    return content if page.file.src_uri.startswith("api/") else in_text(content)


def in_text(content: str) -> str:
    """Set formulas such as V_αβ and e^{ru} in sentences; leave code and displayed formulas unchanged."""
    pieces = LITERAL.split(content)
    return "".join(piece if k % 2 else in_sentence(piece) for k, piece in enumerate(pieces))


def in_sentence(text: str) -> str:
    """Set indices and exponents, and find the formulas of a piece of text by the kinds of its words."""
    text = SCRIPT.sub(script, text)
    words = list(WORD.finditer(text))
    kinds = "".join(kind(each[0]) for each in words)
    result, done = [], 0
    for formula in FORMULA.finditer(kinds):
        if is_name(words, kinds, formula.start()) or not re.search("[vVq]|a.", formula[0]):
            continue
        first, last = words[formula.start()].start(), words[formula.end() - 1].end()
        result += [text[done:first], without_punctuation(text[first:last])]
        done = last
    return "".join([*result, text[done:]])


def is_name(words: list[re.Match[str]], kinds: str, place: int) -> bool:
    """Return whether a letter is a unit after a number, or a name such as that of an appendix."""
    letter, before = words[place][0].strip(PUNCTUATION), words[place - 1][0] if place else ""
    return (letter in UNITS and bool(before) and kinds[place - 1] == "n") or before in TITLES


def kind(word: str) -> str:
    """Return the kind of a word as one letter, as `FORMULA` reads it; "." if it is not part of a formula."""
    text = html.unescape(word)
    core = text.strip(PUNCTUATION + "()[]\"'“”„«»") if len(text) > 1 else text
    letter = "." if re.fullmatch(r"\([a-z]\)\W?", text) else kind_of_core(core)  # (a), (b) count
    if text[-1] not in PUNCTUATION or letter not in "vna":
        return letter
    if text[-1] == "," and text.count("(") > text.count(")"):
        return "q" if letter == "v" else "p"
    return letter.upper()


def kind_of_core(core: str) -> str:
    if core in OPERATORS:
        return "o"
    if core in FUNCTIONS:
        return "f"
    if core in ("a", "A"):
        return "a"
    if NUMBER.fullmatch(core):
        return "n"
    names = [name for name in re.findall("[A-Za-z]+", RAISED.sub("", core)) if name not in FUNCTIONS]
    signs = any(each.search(core) for each in (SIGN, RAISED))
    formal = signs or VARIABLE.fullmatch(core) or SIGNS_AND_LETTERS.fullmatch(core)
    return "v" if formal and core not in ABBREVIATIONS and all(len(name) < 3 for name in names) else "."


def without_punctuation(text: str) -> str:
    """Set a formula, and leave what only surrounds it: the sentence's punctuation, and half a pair of parentheses."""
    before, after = "", ""
    while len(text) > 1:
        if text[-1] in PUNCTUATION + "\"'”" and not re.search(r"&[#\w]+;$", text):
            text, after = text[:-1], text[-1] + after
        elif text[0] in "\"'“„" or (text[0] in PAIRS and text.count(text[0]) > text.count(PAIRS[text[0]])):
            before, text = before + text[0], text[1:]
        elif text[-1] in ")]" and any(text[-1] == b and text.count(b) > text.count(a) for a, b in PAIRS.items()):
            text, after = text[:-1], text[-1] + after
        else:
            break
    return f'{before}<span class="math">{slanted(text)}</span>{after}'


def slanted(text: str) -> str:
    """Mark variables: Greek letters, and Latin ones alone or in pairs."""
    text = re.sub("[À-ɏḀ-ỿ]", lambda one: unicodedata.normalize("NFD", one[0]), text.translate(LETTERS))
    pieces = TAG.split(text)
    return "".join(piece if k % 2 else NAME.sub(variable, piece) for k, piece in enumerate(pieces))


def variable(found: re.Match[str]) -> str:
    name = found[0]
    upright = name in FUNCTIONS or (len(name) == 2 and name.isascii() and name.isupper())
    return name if upright else LETTER.sub(r"<i>\g<0></i>", name)


def script(found: re.Match[str]) -> str:
    first = raised("sub" if found["mark"] == "_" else "sup", found["inside"])
    return first + (raised("sup", found["above"]) if found["above"] else "")


def raised(tag: str, inside: str) -> str:
    """Return the tag with its text, without the braces or parentheses that hold it together in the source."""
    inside = inside[1:-1] if inside[0] in "{(" else inside
    return f"<{tag}>{SCRIPT.sub(script, inside)}</{tag}>"
