"""Pictures of the server's page for the documentation, light and dark.

Needs Chromium. The text is read, a question is asked, and what was kept is shown. Writes
page-light.png and page-dark.png.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from edgekv.chat.sampling import Sampling
from edgekv.commands.declare import option
from edgekv.serve.options import ServeOptions
from edgekv_lab.experiments.checkout import root
from edgekv_lab.experiments.experiment import MODEL, RATIO, Options, experiment

QUESTION = "What did the rabbit take out of its waistcoat-pocket? Answer in one sentence."


@experiment(
    MODEL,
    option("-f --file", required=True, help="A text."),
    option("--question", default=QUESTION, help="To ask about it."),
    option("--alias", help="The model's name on the page."),
    RATIO,
    option("--out", default="docs", help="Folder of the pictures."),
)
def command(o: Options) -> None:
    root()
    from tests import browser
    from tests.serving import serving

    options = ServeOptions(alias=o.alias, sampling=Sampling(temperature=0), max_tokens=80)
    cache = dict(kv_ratio=o.ratio, n_ctx=8192, n_threads_batch=2)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(o.model), options, **cache) as (url, _),
        browser.opened(url, Path(folder) / "b", 760, 720) as page,
    ):
        page.give_file("#pick", Path(o.file))
        page.until("document.querySelector('#files').textContent.includes('tokens')")
        page.click("#text")
        page.type(o.question)
        page.press("Enter", 13)
        page.until("document.querySelector('.look')", 600)
        page.click(".look")
        page.until("document.querySelector('.kept select')")
        page.value("document.querySelector('.kept').style.maxHeight = '18rem'")
        page.value("document.querySelector('#talk').scrollTop = 1e9")
        for scheme in ("light", "dark"):
            page.set_scheme(scheme)
            (Path(o.out) / f"page-{scheme}.png").write_bytes(page.picture())
