"""edgekv pull: download a model from Hugging Face."""

from __future__ import annotations

import click

from edgekv.errors import BadInput
from edgekv.models_found import names


@click.command("pull", short_help="Download a model from Hugging Face.")
@click.argument("name", metavar="USER/REPO[:QUANT]")
def command(name: str) -> None:
    """Download a model from Hugging Face into its cache, the newest state that there is.

    Without QUANT it is Q4_K_M, as in llama.cpp, else Q8_0, else the first file. USER/REPO/FILE
    names a file. What was stopped goes on where it was. The model's path goes to standard output.
    HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean elsewhere.
    """
    from edgekv.hub.models import Wanted, download

    wanted = Wanted.of(name)
    if wanted is None:
        bare = name.removeprefix("ollama:")
        raise BadInput(
            f"'{name}' names no repository of Hugging Face's; write USER/REPO or USER/REPO:QUANT,"
            f" or let Ollama fetch its own: 'ollama pull {bare}'"
        )
    click.echo(download(wanted, names.say))
    click.echo(f"edgekv: it is here: edgekv chat {wanted}", err=True)
