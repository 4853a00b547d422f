"""`terrella worlds list|serve|score|imagine`: our worlds for other trainers, and how well trained models imagine
them.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import click

from ...core.errors import ConfigError
from ...core.ports import listening_at
from .imagine import imagine


@click.group()
def worlds() -> None:
    """Worlds for other trainers: list them, serve one over OpenEnv (HTTP and WebSocket), score models of them, see
    what one imagines.
    """


worlds.add_command(imagine)


@worlds.command("list")
@click.option(
    "--tags", "tag_files", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A file with further tags."
)
def list_worlds(tag_files: tuple[str, ...]) -> None:
    """Name every world, how long an episode is and what its actions are."""
    from ...rl.exchange.named_worlds import find_world, names

    for name in names(*tag_files):
        named = find_world(name, *tag_files)
        words = named.make().action_words
        actions = "free text" if words is None else ", ".join(words.values())
        click.echo(f"{name:30} at most {named.max_actions:3} actions: {actions}")


@worlds.command()
@click.argument("what", metavar="NAME|RUN")
@click.option("--of", "world", help="RUN is a trained world model: the name of the world that it imagines.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 opens it to the network.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free one.")
@click.option("--clients", type=click.IntRange(1), default=256, help="Connections at once; further ones are refused.")
@click.option(
    "--tags", "tag_files", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A file with further tags."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=512, help="RUN: of one imagined step.")
@click.option(
    "--pad-prompts-to", type=click.IntRange(1), default=1, help="RUN: as a model of text games or pages was trained."
)
@click.option(
    "--prompt",
    type=click.Choice(["full", "rules", "bare"]),
    default="bare",
    help="RUN: of a model of text games or pages.",
)
def serve(
    what: str, world: str | None, host: str, port: int, clients: int, tag_files: tuple[str, ...], **model: Any
) -> None:
    """Serve a world by NAME, or the one that the model of a RUN or folder imagines, over OpenEnv until Ctrl-C.

    A model's world is played beside the true one: every step says whether the imagined state is still the true one.
    """
    import uvicorn

    from ...rl.exchange.named_worlds import find_world
    from ...rl.exchange.to_openenv import app_of

    folder = Path(what)
    if folder.is_dir():
        if world is None:
            raise ConfigError(
                f"{what}: is a folder; name the world that its model imagines with --of NAME (`terrella worlds list`)"
            )
        from ..imagined import Imagining, imagined_world

        named = imagined_world(folder, find_world(world, *tag_files), Imagining(**model), click.echo)
    elif world is not None:
        raise ConfigError(f"--of {world}: {what} is no folder with a trained model")
    else:
        named = find_world(what, *tag_files)
    with listening_at(host, port):
        listening = socket.create_server((host, port))
    with listening:
        address = f"http://{host}:{listening.getsockname()[1]}"
        click.echo(f"serving {named.name} at {address} (OpenEnv), at most {clients} connections; Ctrl-C ends it")
        config = uvicorn.Config(app_of(named, clients), log_level="warning", ws_ping_interval=None)
        uvicorn.Server(config).run(sockets=[listening])


@worlds.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL|URL#NAME...")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(["text-game", "web-page"]), help="Only these; without it, both."
)
@click.option("--n", type=click.IntRange(1), default=200, help="Transitions of each kind that no recipe trains on.")
@click.option("--walks", type=click.IntRange(1), default=32, help="Games walked for the drift, and by each policy.")
@click.option("--steps", type=click.IntRange(1), default=8, help="Of a walk.")
@click.option(
    "--game", "games", multiple=True, help="Ask about this text game (may be repeated); without it, all of ours."
)
@click.option(
    "--train",
    type=click.IntRange(0),
    default=0,
    help="Also train a small agent in each model, so many updates of 32 games each, and judge it in the true games.",
)
@click.option("--prompt", type=click.Choice(["full", "rules", "bare"]), default="full", help="With rules and examples?")
@click.option("--max-new-tokens", type=click.IntRange(1), default=512, help="Of one answer.")
@click.option("--pad-prompts-to", type=click.IntRange(1), default=1, help="As the model was trained.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the result to this file.")
def score(models: tuple[str, ...], kinds: tuple[str, ...], out: Path | None, **asked: Any) -> None:
    """Judge world models by rules, beside copying and the true world: the next state, drift, policy ranking, what
    planning and training with it gain, changes of pages.

    A model is a folder, a run, or any OpenAI-compatible address (its key is read from TERRELLA_API_KEY).
    """
    from ...core.files import write_json
    from ..language import show
    from ..score import Asked, answerer, show_ranking
    from ..score import score as score_models

    tokens, multiple = asked.pop("max_new_tokens"), asked.pop("pad_prompts_to")
    answerers = [answerer(model, tokens, multiple) for model in models]
    table = score_models(answerers, Asked(kinds=kinds or ("text-game", "web-page"), **asked))
    show(table)
    show_ranking(table["ranking"])
    if out:
        write_json(out, table)
