"""GPT-simulator transitions (ByteSized32 state prediction) to world-model pairs: what RLVR-World trains its text world
model on.

The prompt asks for a state difference: changed objects whole, removed ids, and the score when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..schema import INTEGER, OBJECT, PAIR, STRING, violations
from .base import Item
from .lines import load_json, read_lines

KEYS = ("game", "state_id", "current_state", "action_state", "tick_state", "current_score_state", "next_score_state")
_THING = {
    "type": "object",
    "required": ["uuid", "properties", "contains"],
    "properties": {"uuid": INTEGER, "properties": OBJECT, "contains": {"type": "array", "items": STRING}},
}


def _state(*names: str) -> dict[str, Any]:
    objects = {"type": "array", "items": _THING}
    return {"type": "object", "required": ["objects", *names], "properties": {"objects": objects}}


ROW = {
    "type": "object",
    "properties": {
        "game": STRING,
        "state_id": INTEGER,
        "current_state": _state("taskDesc", "max_UUID"),
        "tick_state": _state("lastAction"),
    },
}
WHICH = ("all", "gold", "non_gold", "changed", "unchanged")
STYLES = ("full", "rules")
MARKER = "The final answer is:"
RULE_LINE = "=" * 10
TASK = (
    "You simulate a text game. Given the state of the game as JSON and an action, work out the state after the "
    "action, the score included.\n"
    "An object that comes into being takes the next free uuid, counting up from the UUID base.\n"
    "Answer with JSON of three keys: `modified`, a list of every object that is new or has changed, each "
    "written out whole; `removed`, a list of the uuids of objects that are gone; `score`, a dictionary of "
    "score, gameOver and gameWon, or {} if the score stays.\n"
    "Some things change by themselves as time passes; the tick of each object tells how.\n"
)
FORM = (
    "The form of the answer: {'modified': [{'name': ..., 'uuid': ..., 'type': ..., 'properties': {...}, "
    "'contains': [...]}], 'removed': [], 'score': {}}\n"
)


def game_state(state: dict[str, Any], score: dict[str, Any]) -> dict[str, Any]:
    """A serialized state: the objects, and the score as the last element."""
    return {"game_state": [*state["objects"], score]}


def _by_uuid(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {o["uuid"]: o for o in state["objects"]}


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal as the task judges it: the order within `contains` does not count."""
    return a["properties"] == b["properties"] and sorted(a["contains"]) == sorted(b["contains"])


def is_gold(row: dict[str, Any]) -> bool:
    """An object that is there before and after has another property or other contents."""
    before, after = _by_uuid(row["current_state"]), _by_uuid(row["tick_state"])
    return any(uuid in after and not _same(o, after[uuid]) for uuid, o in before.items())


def is_changed(row: dict[str, Any]) -> bool:
    """Anything differs: an object changed, created or removed, or the score."""
    before, after = _by_uuid(row["current_state"]), _by_uuid(row["tick_state"])
    if set(before) != set(after) or row["current_score_state"] != row["next_score_state"]:
        return True
    return any(not _same(o, after[uuid]) for uuid, o in before.items())


def difference(row: dict[str, Any]) -> dict[str, Any]:
    """The expected answer: {modified, removed, score}."""
    before, after = _by_uuid(row["current_state"]), _by_uuid(row["tick_state"])
    score = row["next_score_state"]
    return {
        "modified": [o for uuid, o in after.items() if uuid not in before or before[uuid] != o],
        "removed": [uuid for uuid in before if uuid not in after],
        "score": {} if score == row["current_score_state"] else score,
    }


class Prompts:
    """Prompts from the rules of each game and two worked examples of one other game."""

    def __init__(
        self, rules: dict[str, dict[str, str]], examples: dict[str, Any], example_game: str = "dishwasher"
    ) -> None:
        """`rules` maps object, action and score to a text per game; `examples` has the rows `action` and `tick` of
        the example game.
        """
        self.objects, self.actions, self.scores = (rules[name] for name in ("object", "action", "score"))
        self._opening = self._make_opening(examples, example_game)

    @classmethod
    def from_files(cls, rules: Path, examples: Path) -> Prompts:
        """From the rule files and the examples file of the public release."""
        loaded = load_json(examples)
        if "full" not in loaded or not {"action", "tick"} <= set(loaded["full"]):
            raise ConfigError(f"{examples}: expected full.action and full.tick, the two worked examples")
        return cls(
            {name: load_json(rules / f"{name}_rules.json") for name in ("object", "action", "score")}, loaded["full"]
        )

    def _rules(self, game: str, task: str) -> str:
        if game not in self.objects or game not in self.actions or game not in self.scores:
            raise KeyError(game)
        # the object rules are chunks divided by a line of ten "="; the last chunk is the world's own and is left out,
        # as in the release
        objects = (
            "\n".join(self.objects[game].split(RULE_LINE)[:-1])
            if RULE_LINE in self.objects[game]
            else self.objects[game]
        )
        return (
            f"The task of this game: {task}\n\nObjects and their rules:\n{objects}\n\nActions and their "
            f"rules:\n{self.actions[game]}\n\n"
            f"How the score is kept:\n{self.scores[game]}\n"
        )

    def _make_opening(self, examples: dict[str, Any], game: str) -> str:
        parts = [
            f"{TASK}\nTwo examples from another game follow.\n",
            self._rules(game, examples["action"]["current_state"]["taskDesc"]),
        ]
        for name, title in (("action", "Example A, changed by the action"), ("tick", "Example B, changed by time")):
            parts.append(
                f"{title}:\n{self._question(examples[name])}\nExpected answer:\n{difference(examples[name])!r}\n"
            )
        return "\n".join(parts)

    def _question(self, row: dict[str, Any]) -> str:
        # Python's repr, not JSON: True, False, None and single quotes, as the released models were trained
        state = game_state(row["current_state"], row["current_score_state"])
        return (
            f"State:\n{state!r}\nUUID base: {row['current_state']['max_UUID']}\nAction: "
            f"{row['tick_state']['lastAction']}\n"
        )

    def __call__(self, row: dict[str, Any]) -> str:
        rules = self._rules(row["game"], row["current_state"]["taskDesc"])
        ask = f"Think, then put the answer after the words `{MARKER}`"
        return f"{self._opening}\nNow the game to simulate.\n{rules}\n{self._question(row)}\n{ask}"

    def without_examples(self, row: dict[str, Any]) -> str:
        """The rules and the form of the answer alone, a third of the length: for models that are then trained."""
        rules = self._rules(row["game"], row["current_state"]["taskDesc"])
        ask = f"Think in a few short sentences, then put the answer after the words `{MARKER}`"
        return f"{TASK}{FORM}\n{rules}\n{self._question(row)}\n{ask}"


def find_material(source: Path, rules: str | Path | None, examples: str | Path | None) -> Prompts:
    """The rules and examples, as given or where a checkout keeps them."""
    roots = [p for p in (source, *source.parents[:3]) if p.is_dir()]
    rule_names = ("rules_human_written", "rules/human_written_rules")
    folder = Path(rules) if rules else next((r / n for r in roots for n in rule_names if (r / n).is_dir()), None)
    worked = (
        Path(examples)
        if examples
        else next((r / n for r in roots for n in ("examples.json", "data/examples.json") if (r / n).is_file()), None)
    )
    if folder is None:
        raise ConfigError(f"{source}: no folder of human-written rules near it; name one with -o rules=FOLDER")
    if worked is None:
        raise ConfigError(f"{source}: no examples.json near it; name it with -o examples=FILE")
    return Prompts.from_files(folder, worked)


def pair_of(row: dict[str, Any], prompts: Callable[[dict[str, Any]], str], split: str) -> dict[str, Any]:
    """The sample of one transition."""
    return {
        "prompt.json": [{"role": "user", "content": prompts(row)}],
        "target.json": game_state(row["tick_state"], row["next_score_state"]),
        "extra.json": {
            "schema": PAIR,
            "source": "llm_simulator",
            "split": split,
            "game": row["game"],
            "state_id": row["state_id"],
            "action": row["tick_state"]["lastAction"],
            "state": game_state(row["current_state"], row["current_score_state"]),
            "gold": is_gold(row),
            "changed": is_changed(row),
        },
    }


def wanted(row: dict[str, Any], which: str) -> bool:
    if which == "all":
        return True
    if which in ("gold", "non_gold"):
        return is_gold(row) == (which == "gold")
    return is_changed(row) == (which == "changed")


def read(
    source: Path,
    cursor: list[Any] | None,
    *,
    which: str = "all",
    rules: str | Path | None = None,
    examples: str | Path | None = None,
    split: str = "train",
    prompt: str = "full",
) -> Iterator[Item]:
    """Transitions of JSONL files or zips; `prompt=rules` leaves the worked examples out of the questions."""
    if which not in WHICH:
        raise ConfigError(f"which={which!r}: expected one of {', '.join(WHICH)}")
    if prompt not in STYLES:
        raise ConfigError(f"prompt={prompt!r}: expected one of {', '.join(STYLES)}")
    material = find_material(source, rules, examples)
    prompts = material if prompt == "full" else material.without_examples
    for line in read_lines(source, cursor):
        here = Item(line.cursor, where=line.where, done=line.done)
        yield replace(here, dropped=line.problem) if line.problem else item_of(here, line.value, prompts, split, which)


def item_of(here: Item, row: Any, prompts: Callable[[dict[str, Any]], str], split: str, which: str) -> Item:
    """`here` with the sample of a row, or with the reason to drop it."""
    problem = row_problem(row) or (None if wanted(row, which) else f"not {which}")
    if problem is not None:
        return replace(here, dropped=problem)
    try:
        return replace(here, sample=pair_of(row, prompts, split), key=f"{row['game']}-{row['state_id']:06d}")
    except KeyError as error:
        return replace(here, dropped=f"no rules for game {error}")


def row_problem(row: Any) -> str | None:
    """What makes a record unusable as a transition."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}, not a record"
    for key in KEYS:
        if key not in row:
            return f"{key} is missing"
    if broken := violations(row, ROW):
        return broken[0]
    for key in ("current_state", "tick_state"):
        uuids = [o["uuid"] for o in row[key]["objects"]]
        if not uuids or len(set(uuids)) != len(uuids):
            return f"{key} has no objects, or a uuid twice"
    return None
