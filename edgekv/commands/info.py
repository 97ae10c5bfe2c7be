"""edgekv info: what is installed, and how a model would be run."""

from __future__ import annotations

import json
from typing import Any

import click

from edgekv.commands.named import model_named
from edgekv.commands.report import mib, table


@click.command("info", short_help="Show versions and devices; with a model how it is read.")
@model_named(optional=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool) -> None:
    """Show versions, patches and devices; with a model its shape, its KV bytes per token, and how
    it is read.
    """
    from edgekv.commands import load

    shape = {**load.model_info(load.model_path(model)), "model": model} if model else None
    if shape:
        shape["kv_bytes_per_token"] = {
            name: bytes_per_token(shape, *sizes[1:]) for name, sizes in load.cache_types().items()
        }
    build = load.build_info()
    if as_json:
        click.echo(json.dumps({"build": build, "model": shape}, indent=2, default=str))
        return
    click.echo(table(build_rows(build)) + ("\n\n" + table(model_rows(shape)) if shape else ""))


def bytes_per_token(shape: dict[str, Any], n_block: int, block_bytes: int) -> int | None:
    """KV bytes of one token over all layers with K and V in blocks of `n_block` values and
    `block_bytes` bytes.

    None if a head's values do not fill whole blocks, so the cache cannot have that type.
    """
    sizes = shape["d_head_k"], shape["d_head_v"]
    if any(d % n_block for d in sizes):
        return None
    stored = sizes[:1] if shape["v_in_k"] else sizes
    return sum(shape["n_head_kv"]) * sum(d // n_block * block_bytes for d in stored)


def build_rows(build: dict[str, Any]) -> list[tuple[str, str]]:
    """What is installed and loaded, line by line."""
    rows = [
        ("edgekv", build["edgekv"]),
        (
            "llama.cpp",
            f"{build['llama_cpp_commit']} (of llama-cpp-python {build['llama_cpp_python']})",
        ),
        ("patches", ", ".join(build["patches"]) or "none"),
        ("libraries", build["lib"]),
        ("compiled for", ", ".join(build["instructions"]) or "any processor of its kind"),
    ]
    rows += [("device", device_line(device)) for device in build["devices"]]
    return [*rows, *(("passed over", line) for line in build["passed_over"])]


def device_line(device: dict[str, Any]) -> str:
    return (
        f"{device['name']}: {device['description']}, {mib(device['memory_free'])} of "
        f"{mib(device['memory_total'])} MiB free"
    )


def model_rows(shape: dict[str, Any]) -> list[tuple[str, str]]:
    heads = sorted(set(shape["n_head_kv"]))
    rows = [
        ("model", str(shape["model"])),
        ("architecture", str(shape["arch"])),
        ("parameters", f"{shape['n_params']:,}, {mib(shape['size_bytes'])} MiB"),
        ("layers", str(shape["n_layer"])),
        ("heads", f"{shape['n_head']}, KV heads {' or '.join(map(str, heads))}"),
        (
            "head size",
            f"K {shape['d_head_k']}, V {shape['d_head_v']}{' of them' * shape['v_in_k']}",
        ),
        ("trained context", f"{shape['n_ctx_train']:,} tokens"),
        ("read by", shape["mode"] + (f" ({shape['note']})" if shape["note"] else "")),
    ]
    return [
        *rows,
        *(
            kv_row(name, n_bytes, shape["n_ctx_train"])
            for name, n_bytes in shape["kv_bytes_per_token"].items()
        ),
    ]


def kv_row(name: str, n_bytes: int | None, n_ctx: int) -> tuple[str, str]:
    if n_bytes is None:
        return f"KV {name}", "not possible with this head size"
    return (
        f"KV {name}",
        f"{n_bytes:,} bytes per token, {mib(n_bytes * n_ctx)} MiB for {n_ctx:,} tokens",
    )
