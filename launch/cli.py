"""The `terrella` command. Verbs are loaded when they are called, so `--help` answers without torch."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

import click

from .. import __version__
from ..core.errors import (
    ProgramError,
    Stopped,
    StorageError,
    TerrellaError,
    describe_error,
    did_you_mean,
    missing_extra,
)

TRACEBACK_VARIABLE = "TERRELLA_TRACEBACK"
# verb -> (module and attribute, one line of help); a verb stands here once it works
VERBS = {
    "recipes": ("commands.recipes:list_recipes", "List the recipes that ship: size, hardware, time, what they show."),
    "train": ("commands.train:train", "Run a recipe: all its stages, resuming where the last start stopped."),
    "check": (
        "commands.check:check",
        "Find what would stop a recipe, rehearse it on a CPU, or test an environment of your own.",
    ),
    "generate": ("commands.generate:generate", "Let a trained model continue prompts, or chat with it."),
    "eval": ("commands.imagine:evaluate", "Score a world model beside its baseline and the true world."),
    "launch": ("commands.launch:launch", "Run a recipe on a SLURM cluster: render, check, submit, follow."),
    "serve": ("commands.serve:serve", "Serve a trained model at an OpenAI-compatible address."),
    "worlds": (
        "commands.worlds:worlds",
        "Our worlds, and those that trained models imagine: list, serve over OpenEnv, score, look at.",
    ),
    "plan": (
        "plan.command:plan",
        "Memory, step time and best layout of a model on a cluster, before anybody pays for it.",
    ),
    "shards": (
        "commands.shards:shards",
        "Make, inspect and verify WebDataset shards; work on the files of WebRL and WebArena.",
    ),
    "convert": (
        "commands.convert:convert",
        "Convert a model between checkpoints, Hugging Face folders and public formats, with proof.",
    ),
    "report": (
        "report.command:report",
        "Write report.html for one run, or one that compares several; follow a run in the terminal.",
    ),
    "doctor": (
        "commands.doctor:doctor",
        "Find what is wrong with this machine, a run, a checkpoint or shards, and say the fix.",
    ),
    "bench": ("commands.bench:bench", "Benchmarks beside their rivals, recorded in one CSV, held against baselines."),
    "sampler-host": (
        "commands.sampler_host:sampler_host",
        "Lend this machine to a run's samplers; cluster jobs start it.",
    ),
}
HIDDEN = {"sampler-host"}  # nobody types these
# verbs of old, and what they are now
MOVED = {"rollout": "worlds imagine", "watch": "report --live", "web": "shards web"}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in VERBS if name not in HIDDEN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, attribute = VERBS[cmd_name][0].split(":")
        return getattr(importlib.import_module(f".{module}", __package__), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, VERBS[name][1]) for name in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            if args[0] in MOVED:
                raise click.UsageError(f"'{args[0]}' is now `terrella {MOVED[args[0]]}`; its options are the same", ctx)
            hint = did_you_mean(args[0], VERBS) or ";"
            raise click.UsageError(
                f"unknown verb '{args[0]}'{hint} the verbs are: {', '.join(self.list_commands(ctx))}", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="terrella")
def cli() -> None:
    """Train world models, and the agents that live in them, with RL from verifiable rewards."""


def hush() -> None:
    """Keep other packages' warnings off the screen (Megatron's about Apex, torch's about threads); -W or
    PYTHONWARNINGS shows them.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module="terrella")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; errors a person can act on are one message and an exit code."""
    hush()
    try:
        code = cli.main(args=list(argv) if argv is not None else None, prog_name="terrella", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TerrellaError as error:
        with suppress(OSError):  # who reads it may have gone; the exit code says it too
            click.echo(f"terrella: {'' if isinstance(error, Stopped) else 'error: '}{error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away, as in `terrella ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""  # a socket's error names none
        click.echo(f"terrella: error: {where}{error.strerror or error}", err=True)
        sys.exit(StorageError.exit_code)
    except Exception as error:
        missing = missing_extra(error) if isinstance(error, ImportError) else None
        if missing is not None:
            click.echo(f"terrella: error: {missing}", err=True)
            sys.exit(missing.exit_code)
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        message = f"an error of the program: {describe_error(error)}; {TRACEBACK_VARIABLE}=1 shows all of it"
        click.echo(f"terrella: error: {message}", err=True)
        sys.exit(ProgramError.exit_code)
