"""Draws the diagrams of the documentation: `python docs/diagrams/render.py [NAME ...]` makes NAME.svg of NAME.mmd.

It needs npm (for mermaid, fetched into build/) and chromium. The pictures are in the repository, so pages show them
without scripts, without another host, and wherever Markdown is rendered.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / "build" / "mermaid"
VERSION = "11.17.2"
# Labels as SVG text: HTML inside an SVG is not shown everywhere
SETTINGS = {"htmlLabels": False, "flowchart": {"htmlLabels": False}, "fontFamily": "Arial, sans-serif"}
PAGE = """<script src="mermaid.min.js"></script><body><script>
mermaid.initialize({startOnLoad: false, ...SETTINGS});
mermaid.render("diagram", SOURCE).then(({svg}) => { document.body.innerHTML = svg; });
</script></body>"""


def script() -> Path:
    """The folder with mermaid's script."""
    if not (BUILD / "mermaid.min.js").is_file():
        BUILD.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", "--pack-destination", str(BUILD), f"mermaid@{VERSION}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(BUILD / f"mermaid-{VERSION}.tgz") as archive:
            member = archive.extractfile("package/dist/mermaid.min.js")
            assert member
            (BUILD / "mermaid.min.js").write_bytes(member.read())
    return BUILD


def draw(source: Path) -> None:
    """Draw one diagram next to its source, on white: pages have dark colours, too."""
    page = script() / "page.html"
    page.write_text(PAGE.replace("SETTINGS", json.dumps(SETTINGS)).replace("SOURCE", json.dumps(source.read_text())))
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([*chromium, page.as_uri()], check=True, capture_output=True, text=True)
    found = re.search(r"<svg .*</svg>", done.stdout, re.DOTALL)
    if not found or "Syntax error" in found[0]:
        raise SystemExit(f"{source}: mermaid draws no diagram of it")
    svg = found[0].replace("<br>", "<br/>")
    width, height = re.findall(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg)[0]
    svg = svg.replace('width="100%"', f'width="{float(width):.0f}" height="{float(height):.0f}"', 1)
    svg = re.sub(r'style="max-width: [^"]*"', 'style="background: white"', svg, count=1)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    source.with_suffix(".svg").write_text(f"{svg}\n<!-- drawn of source {digest} -->\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.mmd")):
        draw(FOLDER / f"{name}.mmd")
