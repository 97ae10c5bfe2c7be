"""edgekv profile tuned: a profile's shares, moved to where the model itself shows that rows are missing."""

from __future__ import annotations

from pathlib import Path

import click

from edgekv.commands.options import MODEL, ratio
from edgekv.commands.profile_options import GPU_LAYERS, OUTPUT, THREADS, check_folder, command_line, given, progress_bar, summary
from edgekv.errors import BadInput


@click.command("tuned")
@MODEL
@OUTPUT
@click.option("--kv-profile", "wish", metavar="FILE", help="The profile to start from; without it: the one that the method takes.")
@click.option("--kv-method", "method", default="edgekv", show_default=True, metavar="METHOD", help="The method that it is for, with budgets from a profile.")
@click.option("--kv-ratio", "share", default="0.2", show_default=True, metavar="R", callback=ratio, help="The ratio at which it is learned; it serves every other.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, metavar="N", help="How often all heads move.")
@click.option("--cases", "n_cases", type=click.IntRange(min=1), default=24, show_default=True, metavar="N", help="Texts of a round.")
@click.option("--pairs", "n_pairs", type=click.IntRange(min=1), default=12, show_default=True, metavar="N", help="Pairs of tables that are tried on a text.")
@click.option("--tokens", "n_tokens", type=click.IntRange(min=1000), default=2000, show_default=True, metavar="N", help="Tokens of a text, about.")
@click.option("-s", "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of the texts and of the tables.")
@THREADS
@GPU_LAYERS
def tuned(model: str, output: str, wish: str | None, method: str, share: float, rounds: int, n_cases: int, n_pairs: int, n_tokens: int, seed: int,
         threads: int | None, gpu_layers: int) -> None:
    """Make a profile better: try shares around it, and move rows to the heads where they bring the model nearest to its full cache.

    The texts are put together from those that come with edgekv. It serves the score of its method. Stopped with Ctrl-C, the same command goes on where it was.
    """
    from edgekv.choose import choose
    from edgekv.commands.load import count_threads, model_path
    from edgekv.profiles import find, identify, write
    from edgekv.profiles import tuned as search

    path = model_path(model)
    identify(path)
    check_folder(output)
    plan = search.Plan(rounds, n_cases, n_pairs, n_tokens, seed=seed)
    preset = choose(method, path, wish)
    start = find(path, wish, preset.score.name, getattr(preset.budget, "kind", ""))
    if start is None:
        raise BadInput(f"there is no profile for {path} to start from: make one with 'edgekv profile probe'")
    n = count_threads(threads)
    llm = search.load(path, method, share, n_tokens, wish, n_threads=n, n_threads_batch=n, n_gpu_layers=gpu_layers)
    recorded = command_line(
        "tuned", "-m", Path(path).name, *given("--kv-profile", wish and Path(wish).name), "--kv-method", method, "--kv-ratio", f"{share:g}",
        "--rounds", str(rounds), "--cases", str(n_cases), "--pairs", str(n_pairs), "--tokens", str(n_tokens), "--seed", str(seed))
    partial = Path(output + ".partial")
    with progress_bar("profile", partial) as progress:
        profile, check = search.make(llm, start, plan, partial=partial, progress=progress, command=recorded)
    write(profile, output)
    click.echo(f"KL divergence to the full cache at {share:g}, on {check.n} texts that nothing was learned from: {check.after:.4f} nats, before {check.before:.4f}")
    click.echo(summary(profile, share))
