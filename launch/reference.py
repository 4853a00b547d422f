"""Pages made from the code: `python -m terrella.launch.reference > docs/configuration.md`, from the dataclasses of the
settings, and `python -m terrella.launch.reference api > docs/api.md`, from the docstrings of what users import."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import types
import typing
from typing import Any, Literal, Union

from ..core import errors
from ..core.schema import ordered_fields
from .recipe import Recipe

INTRO = """# Configuration

A recipe is a YAML file. `terrella train RECIPE --dry-run` prints it resolved; `--set a.b=value` changes one setting (a
stage by its name: `--set stages.rlvr.steps=50`; `stages.rlvr=null` takes it out). An unknown key, a wrong type or an
impossible value ends with exit code 2 and one message that names file, line and the nearest valid key. The resolved
settings and their digest are kept in the run directory as `config.yaml`.

This page is made from the dataclasses; a test keeps it in step with them.
"""

SHARED = {  # keys that mean the same in every section; a comment beside the field goes before these
    "kind": "which kind of section this is",
    "name": "what other stages and reports call this one",
    "init": "the stage whose weights to start from",
    "model": "the stage whose model is used",
    "optimizer": "AdamW and its schedule",
    "training": "optimizer, batch size and length",
    "lora": "train low-rank adapters instead of all weights",
    "steps": "optimizer steps",
    "sequences_per_step": "sequences of a batch, over all ranks",
    "microbatch_tokens": "tokens of one forward and backward pass at most; a longer sequence goes alone",
    "checkpoint_every": "steps between checkpoints",
    "log_every": "steps between lines of metrics",
    "temperature": "of sampling; 0 takes the likeliest token",
    "temperatures": "of sampling, a table for each; 0 takes the likeliest token",
    "max_new_tokens": "tokens of one answer at most",
    "rollouts": "which sampler writes the answers, with its deadlines and alarms",
    "arms": "the models or ways to act that are compared",
    "groups": "seeds played",
    "samples_per_group": "episodes of each seed",
    "prompts": "tasks played",
    "prompts_at_once": "tasks played together",
    "samples_per_prompt": "episodes of each task",
    "samples_per_shard": "rows of one shard file",
    "first_seed": "of the first episode; later ones count up from it",
    "every": "steps between two",
    "reward": "the rule that an answer is paid by",
    "games": "text games that are trained on",
    "test": "folder of shards to evaluate on",
    "drift_episodes": "episodes of the drift table",
    "at_once": "episodes played together",
    "pad_prompts_to": "prompts are padded in front to a multiple of this, so that many are decoded together",
    "bf16": "compute the video tokenizer in bf16",
}


def _inner(kind: Any) -> list[type]:
    """Dataclasses named anywhere inside a type."""
    if dataclasses.is_dataclass(kind):
        return [typing.cast(type, kind)]
    return [found for argument in typing.get_args(kind) for found in _inner(argument)]


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(a) for a in typing.get_args(kind))
    if origin is Literal:
        return " or ".join(f"`{a}`" for a in typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"  # type: ignore[union-attr]
    if origin is not None:
        inner = ", ".join(_name(a) for a in typing.get_args(kind) if a is not Ellipsis)
        return f"{origin.__name__} of {inner}"
    return {"NoneType": "null"}.get(getattr(kind, "__name__", str(kind)), getattr(kind, "__name__", str(kind)))


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return "null" if field.default is None else f"`{field.default}`"
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "its defaults" if dataclasses.is_dataclass(made) else f"`{made}`"
    return "required"


def _comments(kind: type, shared: dict[str, str] = SHARED) -> dict[str, str]:
    sources = [inspect.getsource(part) for part in reversed(kind.__mro__) if dataclasses.is_dataclass(part)]
    source = "\n".join(sources)
    above = re.findall(r"((?:^    # .+\n)+)^    (\w+): ", source, re.M)
    beside = re.findall(r"^    (\w+):[^\n#]*#(?!\s*type: ignore)\s*(.+)$", source, re.M)
    return shared | {name: " ".join(lines.replace("#", "").split()) for lines, name in above} | dict(beside)


def sections(root: type) -> list[type]:
    """The dataclass and all it reaches, each once, in reading order."""
    order = [root]
    for kind in order:
        for hint in typing.get_type_hints(kind).values():
            order.extend(found for found in _inner(hint) if found not in order)
    return order


def render() -> str:
    """The whole page."""
    parts = [INTRO]
    for kind in sections(Recipe):
        hints, comments = typing.get_type_hints(kind), _comments(kind)
        parts.append(f"## {kind.__name__}\n\n{inspect.cleandoc(kind.__doc__ or '')}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        for field in ordered_fields(kind):
            parts.append(
                f"| `{field.name}` | {_name(hints[field.name])} | {_default(field)} | {comments.get(field.name, '')} |"
            )
        parts.append("")
    parts.append("## Exit codes\n\n| code | meaning |\n|---|---|\n| 0 | done, or nothing to do |")
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TerrellaError)]
    known = [c for c in classes if "exit_code" in vars(c)]  # others are kinds of these
    parts.extend(
        f"| {c.exit_code} | {' '.join((c.__doc__ or '').split())} |" for c in sorted(known, key=lambda c: c.exit_code)
    )
    return "\n".join(parts) + "\n"


API_INTRO = """# Python interface

What `import terrella` gives. Everything else is reached through recipes and the command line; modules below may
change between releases. A whole example is in [your own task](own_task.md). This page is made from the docstrings; a
test keeps it in step with them.
"""


def _signature(name: str, item: Any) -> str:
    text = str(inspect.signature(item)).replace("self, ", "").replace("(self)", "()")
    return "    " + f"{name}{text}".replace("'", "")


def render_api() -> str:
    """The page of the public interface."""
    package = importlib.import_module(Recipe.__module__.partition(".")[0])
    parts = [API_INTRO]
    for name in sorted(package.__all__, key=lambda n: n[0].isupper()):  # functions first
        item = getattr(package, name)
        if not callable(item):
            continue
        bare = inspect.isclass(item) and item.__init__ is object.__init__
        parts.append(
            f"## {name}\n\n{f'    class {name}' if bare else _signature(name, item)}\n\n{inspect.getdoc(item)}\n"
        )
        if inspect.isclass(item) and dataclasses.is_dataclass(item):
            comments = _comments(item, {})
            rows = [f"- `{f.name}`: {comments.get(f.name, f.type)}" for f in dataclasses.fields(item)]
            parts.append("\n".join(rows) + "\n")
        methods = (
            {n: m for n, m in vars(item).items() if inspect.isfunction(m) and n[0] != "_"}
            if inspect.isclass(item)
            else {}
        )
        parts.extend(f"### {name}.{n}\n\n{_signature(n, m)}\n\n{inspect.getdoc(m)}\n" for n, m in methods.items())
    return "\n".join(parts)


if __name__ == "__main__":
    print(render_api() if sys.argv[1:] == ["api"] else render(), end="")
