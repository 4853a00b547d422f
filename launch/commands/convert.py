"""`terrella convert`: models between checkpoints, Hugging Face folders and the formats of public releases, each
conversion proven.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...core.process import unwind_on_sigterm

KINDS = ["auto", "checkpoint", "hf", "peft", "verl-fsdp", "verl-megatron", "accelerate", "bin", "nemo"]


@click.group()
@click.pass_context
def convert(context: click.Context) -> None:
    """Convert a model; a conversion that cannot be proven, or is interrupted, leaves nothing behind."""
    context.with_resource(unwind_on_sigterm())


def _source(command: Any) -> Any:
    base = "Hugging Face folder of the model, or its config file alone, where SOURCE does not say it."
    command = click.option("--base", type=click.Path(path_type=Path), help=base)(command)
    command = click.option("--kind", type=click.Choice(KINDS), default="auto", help="What SOURCE is.")(command)
    command = click.argument("out", type=click.Path(path_type=Path))(command)
    return click.argument("source", type=click.Path(path_type=Path))(command)


def _say(proof: dict[str, Any], out: Path) -> None:
    tensors = f"{len(proof['tensors'])} tensors hashed, " if "tensors" in proof else ""
    click.echo(
        f"{out}: {tensors}logits within {proof['max_logit_difference']:.1e} of transformers' (allowed "
        f"{proof['tolerance']:.1e})"
    )


@convert.command("to-hf")
@_source
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", help="Type of the written weights.")
@click.option(
    "--adapters", type=click.Choice(["merge", "peft"]), default="merge", help="What becomes of LoRA adapters."
)
@click.option("--shard-gb", type=float, default=5.0, help="Largest safetensors file.")
def to_hf(source: Path, out: Path, kind: Any, base: Path | None, dtype: str, adapters: Any, shard_gb: float) -> None:
    """Write SOURCE as the Hugging Face folder OUT."""
    from ...models.convert import to_hf as run

    _say(run(source, out, kind=kind, base=base, dtype=dtype, adapters=adapters, shard_bytes=int(shard_gb * 2**30)), out)


@convert.command("from-hf")
@_source
def from_hf(source: Path, out: Path, kind: Any, base: Path | None) -> None:
    """Write SOURCE (a Hugging Face folder or another public format) as the checkpoint OUT."""
    from ...models.convert import from_any

    _say(from_any(source, out, kind=kind, base=base), out)


@convert.command("push")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--base", help="Hub id of the model it was trained from.")
@click.option("--notes", default="", help="A paragraph for the model card.")
@click.option("--public", is_flag=True, help="Make the repository public; private otherwise.")
def push(folder: Path, repo: str, base: str | None, notes: str, public: bool) -> None:
    """Upload the proven export FOLDER to the hub repository REPO, with a model card and the proof."""
    from ...models.hub import push as run

    click.echo(run(folder, repo, base=base, notes=notes, private=not public))


@convert.command("to-nemo")
@_source
def to_nemo(source: Path, out: Path, kind: Any, base: Path | None) -> None:
    """Write SOURCE as the NeMo 2 folder OUT: its weights, and the settings of the model."""
    from ...models.convert import open_source
    from ...models.nemo import write_nemo

    write_nemo(open_source(source, kind=kind, base=base), out)
    click.echo(f"{out}: written")


@convert.command("from-nemo")
@_source
def from_nemo(source: Path, out: Path, kind: Any, base: Path | None) -> None:
    """Write the NeMo 2 folder SOURCE as the checkpoint OUT."""
    from ...models.convert import from_any

    _say(from_any(source, out, kind="nemo", base=base), out)
