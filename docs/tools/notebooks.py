"""Notebooks of the folder `examples` as pages of the site, with the output that they keep; MkDocs calls this."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

FOLDER = Path(__file__).resolve().parents[2] / "examples"
BESIDE = re.compile(r"\]\(([\w-]+)\.ipynb\)")
SOURCE = "https://github.com/limitformer/limitformer/blob/main/examples/"


def on_files(files: Any, config: Any, **_: object) -> Any:
    """Add a page for each notebook, and its pictures."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        text, pictures = page_of(path)
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"examples/{name}", content=picture))
    return files


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by name."""
    parts, pictures = [], dict[str, bytes]()
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(BESIDE.sub(r"](\1.md)", source.replace("](../docs/", "](../")))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![What the code above draws]({name})")
            elif "text/plain" in output.get("data", {}):
                parts.append(f"```text\n{''.join(output['data']['text/plain']).rstrip()}\n```")
    first, _, rest = "\n\n".join(parts).partition("\n\n")
    assert re.match("# ", first), f"{path.name} begins with its title"
    return f"{first}\n\n[This notebook]({SOURCE}{path.name}) as a file.\n\n{rest}\n", pictures
