"""Run and time the commands of a page, for `make journey` and `make readme-times`.

    python -m benchmarks.journey docs/start-engineer.md

Files are the page's blocks of Python that begin with their names, such as "# model.py". Commands are its blocks of
`console`, whose first line is "$ COMMAND", and its blocks of `sh` with one command. What a command prints is written
into its block of `console`; the times are printed, and written between the lines "<!-- times -->" and "<!-- end -->" if
the page has them.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```(?:console\n\$ |sh\n)(limitformer .*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
TIMES = re.compile(r"(?<=<!-- times -->\n).*(?=<!-- end -->)", re.DOTALL)
BIN = Path(sys.executable).parent  # where the command lies


def timed(command: str, folder: Path) -> tuple[str, float, float]:
    """Run a command on one core; return what it prints, its CPU seconds and its wall seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PATH": f"{BIN}:{os.environ['PATH']}"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, cpu, time.monotonic() - began


def machine() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"one core of {names[0] if names else 'this machine'}"


def main() -> None:
    page = Path(sys.argv[1])
    text, rows = page.read_text(encoding="utf-8"), list[tuple[str, float, float]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for code, file in FILE.findall(text):
            (folder / file).write_text(code, encoding="utf-8")
        for block in list(COMMAND.finditer(text)):
            printed, cpu, wall = timed(block[1], folder)
            rows.append((block[1], cpu, wall))
            print(f"{cpu:7.0f} s of CPU, {wall:5.0f} s  {block[1]}", flush=True)
            if block[0].startswith("```console"):
                shown = re.sub(r"\n\d+ s\n", "\n", printed.rstrip())  # `transfer` prints how long it took
                text = text.replace(block[0], f"```console\n$ {block[1]}\n{shown}\n```")
    total = sum(cpu for _, cpu, _ in rows)
    print(f"{total / 60:.1f} minutes of CPU together, on {machine()}")
    lines = [f"| `{command}` | {cpu:.0f} s |\n" for command, cpu, _ in rows]
    table = ["| command | CPU |\n|---|---|\n", *lines, f"| together, on {machine()} | {total / 60:.1f} min |\n"]
    page.write_text(TIMES.sub(lambda _: "\n" + "".join(table) + "\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
