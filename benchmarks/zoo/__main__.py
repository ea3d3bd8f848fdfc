"""`python -m benchmarks.zoo`: all types, or those that are named, and the page."""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from benchmarks.zoo.children import LIMITS, rows_in, run_all  # noqa: E402
from benchmarks.zoo.configurations import all_types  # noqa: E402
from benchmarks.zoo.examine import WORKS, examine  # noqa: E402
from benchmarks.zoo.laws import compare  # noqa: E402
from benchmarks.zoo.page import page  # noqa: E402
from benchmarks.zoo.scaling import scale  # noqa: E402
from benchmarks.zoo.sizes import LIMITS as LIMITS_OF_SIZES  # noqa: E402
from benchmarks.zoo.sizes import measure_size, text_types  # noqa: E402
from benchmarks.zoo.witness import witness_type  # noqa: E402

# The twenty families of `tests/weightless_families.py`, and the parts and wrappers of these.
TESTED = {
    *("bert", "cohere", "deepseek_v3", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gpt2"),
    *("gpt_neox", "gpt_oss", "llama", "mistral", "mixtral", "modernbert", "olmo", "olmo2", "qwen2", "qwen3"),
    *("roberta", "t5", "vit"),
}


def main() -> int:
    """Run what is asked for and lacks a row; return 130 after Ctrl-C."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for kind in ("gpt2", "bert"):  # whatever is imported or compiled at first use, once for all processes
        examine(kind)
    name, call = ("zoo", examine)
    if options.laws or options.sizes:
        name, call = ("laws", compare) if options.laws else ("sizes", measure_size)
    if options.witness:
        name, call = "witness", witness_type
    if options.scaling:
        name, call = "scaling", scale
    path, began = options.out / f"{name}.jsonl", time.monotonic()
    old = rows_in(path)
    todo = options.types or [kind for kind in selected(options) if not is_new(old.get(kind))]
    limits = LIMITS_OF_SIZES if options.sizes else LIMITS
    rows = run_all(call, todo, path, options.workers, {"transformers": transformers.__version__}, limits)
    try:
        for done, row in enumerate(rows, 1):
            minutes = (time.monotonic() - began) / 60 * (len(todo) / done - 1)
            print(f"{done}/{len(todo)}, {minutes:.0f} min left: {in_words(row)}", flush=True)
    except KeyboardInterrupt:
        rows.close()
        print(f"Stopped; {path} has {len(rows_in(path))} types. The same command resumes.", file=sys.stderr)
        return 130
    if options.page:
        options.page.write_text(page(*(rows_in(options.out / f"{name}.jsonl") for name in ("zoo", "laws", "sizes"))))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("--types", nargs="+", default=[], help="only these, also if they have a row")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--laws", action="store_true", help="compare with drawn networks")
    kinds.add_argument("--sizes", action="store_true", help="measure default configurations at their real size")
    kinds.add_argument(
        "--scaling", action="store_true", help="double width and depth, with the rules muP and CompleteP"
    )
    kinds.add_argument("--witness", action="store_true", help="compare with the modules themselves, number by number")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/zoo"), help="folder of the rows")
    parser.add_argument("--page", type=Path, help="the page to write at the end")
    return parser.parse_args()


def selected(options: argparse.Namespace) -> list[str]:
    """Return all types, or for laws those that work, have a loss on their own ids, and are not tested elsewhere."""
    if options.sizes:
        return text_types()
    if not options.laws:
        return all_types()
    rows = rows_in(options.out / "zoo.jsonl")
    return [
        kind
        for kind, row in rows.items()
        if row.get("verdict") == WORKS and row["task"] in ("causal", "masked", "seq2seq") and kind not in TESTED
    ]


def is_new(row: dict[str, object] | None) -> bool:
    return row is not None and row.get("transformers") == transformers.__version__


def in_words(row: dict[str, object]) -> str:
    parts = [row["type"], row.get("verdict"), row.get("reason") or row.get("error"), row.get("p"), row.get("twin")]
    return " ".join(f"{each:.2g}" if isinstance(each, float) else str(each) for each in parts if each is not None)[:200]


if __name__ == "__main__":
    sys.exit(main())
