"""Pictures of the server's page for the documentation, light and dark.

    python benchmarks/page.py MODEL TEXT [--question ...] [--alias ...] [--out docs]

Needs Chromium. The text is read, a question is asked, and what was kept is shown. Writes
page-light.png and page-dark.png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from edgekv.chat.sampler import Sampling  # noqa: E402
from edgekv.serve.options import ServeOptions  # noqa: E402
from tests import browser  # noqa: E402
from tests.serving import serving  # noqa: E402

QUESTION = "What did the rabbit take out of its waistcoat-pocket? Answer in one sentence."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--alias")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    options = ServeOptions(alias=given.alias, sampling=Sampling(temperature=0), max_tokens=80)
    cache = dict(kv_ratio=given.ratio, n_ctx=8192, n_threads_batch=2)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(given.model, options, **cache) as (url, _),
    ):
        with browser.opened(url, Path(folder) / "b", 760, 720) as page:
            page.give_file("#pick", given.text)
            page.until("document.querySelector('#files').textContent.includes('tokens')")
            page.click("#text")
            page.type(given.question)
            page.press("Enter", 13)
            page.until("document.querySelector('.look')", 600)
            page.click(".look")
            page.until("document.querySelector('.kept select')")
            page.value("document.querySelector('.kept').style.maxHeight = '18rem'")
            page.value("document.querySelector('#talk').scrollTop = 1e9")
            for scheme in ("light", "dark"):
                page.set_scheme(scheme)
                (given.out / f"page-{scheme}.png").write_bytes(page.picture())


if __name__ == "__main__":
    main()
