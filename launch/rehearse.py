"""`terrella check RECIPE --rehearse`: the very recipe, its model and counts turned down, by `terrella train` on a CPU.

What breaks at a joint (a layout, a start folder, a stage that reads what another left) breaks here within minutes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..core import schema
from ..core.config import ParallelConfig, PrecisionConfig
from ..core.errors import ConfigError, DeadlineError
from ..models.config import ModelConfig
from .recipe import Recipe

REHEARSAL_VARIABLE = "TERRELLA_REHEARSAL"  # tells `terrella train` that nobody can look at what it leaves
MOST_RANKS = 8
ERROR = "terrella: error: "  # what the command line writes before one
PATIENCE_S = 1800.0  # for the whole rehearsal; an idle machine needs a minute or two
AXES = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "cp": "context", "ep": "expert"}
# counts are lowered to these wherever a stage has them
MOST = {
    "steps": 2,
    "epochs": 1.0,
    "samples_per_prompt": 2,
    "updates_per_rollout": 2,
    "epochs_per_rollout": 2,
    "max_new_tokens": 16,
    "checkpoint_every": 2,
    "log_every": 1,
    "rollouts_every": 1,
    "prompts_at_once": 8,
    "heldout_rooms": 8,
    "actions_per_room": 6,
    "seeds": 2,
    "heldout_per_verb": 2,
    "n": 4,
    "unseen_n": 4,
    "drift_steps": 2,
    "drift_episodes": 2,
    "count": 8,
    "phases": 1,
    "samples": 2,
    "at_once": 8,
    "others": 1,
    "every": 1,
    "clips_per_step": 2,
    "heldout_clips": 2,
    "clips_per_episode": 2,
    "heldout_clips_per_episode": 1,
    "runs": 1,
    "reject_repeats": 1,
    "shown": 1,
    "warmup_steps": 1,
    "total_steps": 2,
    "heldout_every": 3,
    "branching": 2,
}
EVENLY = ("prompts_per_step", "sequences_per_step", "prompts", "episodes")  # multiples of the data ranks
MOST_TURNS = 2  # of worlds, which end an episode there; the prompt of a turn repeats all before it
ALL_IF_ZERO = ("n", "evaluate")  # in these 0 means all
PHASE = re.compile(r"(.+)-(\d+)-(tasks|played|rollout|replay|critic|actor)")  # stages of WebRL's phases
SITES = {
    "tag": "WebSites",
    "test_tag": "WebSitesTest",
    "tag_files": [],
}  # local sites, in place of those that somebody runs
SCENE = {"episodes": 6, "heldout_episodes": 2, "frames": 16}
SIDE = 32  # pixels of a frame
IN_SCENE = {
    "tasks": ["open", "close"],
    "policies": ["scripted", "random"],
    "shards": None,
    "judge": None,
    "truth": None,
}


@dataclass(frozen=True)
class Rehearsal:
    """A recipe turned down: its settings as plain values, and in words what else stands in for what."""

    settings: dict[str, Any]
    stand_ins: list[str]
    folders: dict[str, ModelConfig]  # start folders to write, by path
    episodes: dict[str, tuple[Any, list[int]]]  # small copies of video episodes to write, by path: of what, which


def parse_layout(text: str) -> dict[str, int]:
    """`tp=2,pp=2` as sizes by axis; dp is how many copies of the model there are."""
    sizes = {}
    for part in text.split(","):
        axis, _, number = part.strip().partition("=")
        if axis not in (*AXES, "dp") or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--layout {text}: write it as tp=2,pp=2 with {', '.join(AXES)} and dp")
        sizes[axis] = int(number)
    return sizes


def small_layout(recipe: Recipe, asked: str | None) -> tuple[ParallelConfig, int]:
    """The asked layout, or the recipe's own, with every axis above 1 at 2, and its ranks."""
    p = recipe.parallel
    own = {axis: getattr(p, name) for axis, name in AXES.items()} | {"dp": max(1, recipe.ranks // p.model_size)}
    sizes = {axis: min(2, size) for axis, size in (parse_layout(asked) if asked else own).items()}
    sizes = {axis: sizes.get(axis, 1) for axis in (*AXES, "dp")}
    if sizes["vpp"] > 1 and sizes["pp"] == 1:
        sizes["vpp"] = 1
    if sizes["ep"] > sizes["dp"] * sizes["tp"] * sizes["cp"]:
        sizes["dp"] = 2
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
    sizes["dp"] = min(sizes["dp"], MOST_RANKS // ranks)
    together = sizes["tp"] > 1 and (p.sequence_parallel or recipe.model.experts > 0)
    parallel = replace(
        p,
        **{AXES[axis]: size for axis, size in sizes.items() if axis in AXES},
        sequence_parallel=together,
        cuda_graphs=False,
    )
    return parallel, ranks * sizes["dp"]


def small_model(model: ModelConfig, parallel: ParallelConfig, tensor: int = 1) -> ModelConfig:
    """The same family and switches with a few narrow layers. Where more than one of the recipe's `tensor` ranks use a
    key head, those of the rehearsal do too.
    """
    grouped = 1 if tensor > model.kv_heads else 2
    layers = max(2, parallel.pipeline * parallel.virtual_pipeline)
    experts = {"experts": 4, "experts_per_token": 2, "expert_ffn": 32} if model.experts else {}
    narrow = {
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4 if model.kv_heads == model.heads else grouped,
        "head_dim": 16,
        "ffn": 128,
    }
    return replace(model, layers=layers, **narrow, **experts, init_std=max(model.init_std, 0.05))


def turned_down(recipe: Recipe, layout: str | None, folder: Path) -> Rehearsal:
    """The recipe as it is rehearsed; start folders that it needs are to be written under `folder`."""
    parallel, ranks = small_layout(recipe, layout)
    copies = ranks // parallel.model_size
    tensor = parse_layout(layout).get("tp", 1) if layout else recipe.parallel.tensor
    model = small_model(recipe.model.sizes, parallel, tensor)
    plain: dict[str, Any] = schema.to_plain(recipe)
    notes: list[str] = []
    folders: dict[str, ModelConfig] = {}
    copied: dict[str, tuple[Any, list[int]]] = {}
    stages = _first_phases(plain["stages"])
    sections = [(f"stages.{s['name']}", part) for s in stages for part in (s, *s.get("arms", ()))]
    for place, env in (("env", plain["env"]), *((f"{place}.env", part.get("env")) for place, part in sections)):
        if env:
            notes += [f"{place}: {note}" for note in _lower_environment(env, copies)]
    _lower(plain["env"] or {}, copies)
    for stage in stages:
        _lower(stage, copies)
        if "clips_per_step" in stage:  # every rank trains a tokenizer on clips of its own
            stage["clips_per_step"] = max(stage["clips_per_step"], ranks)
        notes += [f"stages.{stage['name']}: {note}" for note in _stand_ins(stage)]
        env = stage.get("env") or plain["env"]
        if stage["kind"] == "collect" and env and env.get("teaches") == "transitions":
            notes.append(f"stages.{stage['name']}: {_random_play(stage)}")
    judges = [stage for stage in stages if stage["kind"] == "web-orm"]
    for stage in judges[1:]:  # of a few rollouts of an actor that has learnt nothing none may succeed
        stage["data"] = list(dict.fromkeys([*judges[0]["data"], *stage["data"]]))
    codes = (plain["env"] or {}).get("kind") == "video"
    for stage in stages:
        if stage["kind"] != "start" or not stage["folder"]:
            continue
        if codes:
            notes.append(f"stages.{stage['name']}.folder: fresh weights in place of those of {stage['folder']}")
            stage["folder"] = None
        else:
            model, note = _start_folder(stage, model, folder, folders)
            notes.append(f"stages.{stage['name']}.folder: {note}")
    if codes:
        sections = [section for stage in stages for section in (stage, *stage.get("arms", ()))]
        environments = [plain["env"], *(section["env"] for section in sections if section.get("env"))]
        notes += _lower_video(environments, stages)
        copied = _small_episodes(recipe, environments, stages, folder)
        notes += [f"{path}: frames of {SIDE} x {SIDE} from episodes of yours" for path in copied]
    kept = next(iter(folders), None) if recipe.model.folder else None
    changed = {
        "stages": stages,
        "model": {**asdict(model), "folder": kept},
        "ranks": ranks,
        "parallel": asdict(parallel),
        "sinks": [],
        "precision": asdict(PrecisionConfig()),
    }
    return Rehearsal(plain | changed, notes, folders, copied)


def _lower_environment(env: dict[str, Any], copies: int) -> Iterator[str]:
    """What an environment has too much of, or not on this machine; in words what stands in for what."""
    if env.get("only_tagged"):
        env["only_tagged"] = False
        yield "turns without tags are lessons, for a model that has learnt nothing writes no other"
    if env["kind"] == "worlds":
        env["max_turns"] = min(env["max_turns"], MOST_TURNS)
        folder = env["config"].get("folder", ".")
        if not Path(folder).exists():
            yield f"{folder} is not there; made products take the place of its files"
            env["config"] = {}
    if "unseen_n" in env:
        _lower(env, copies)
        yield from _shards(env)
    if env["kind"] == "web-site":
        _lower(env, copies)
        if any(not Path(p).exists() for p in env["tag_files"]):
            yield f"{env['tag_files'][0]} is not there; the sites that ship take the place of '{env['tag']}'"
            env |= SITES
        if env["demonstrations"] and not Path(env["demonstrations"]).exists():
            yield f"{env['demonstrations']} is not there; oracles demonstrate on the sites that ship"
            env["demonstrations"] = None


def _random_play(stage: dict[str, Any]) -> str:
    """Let a stage record transitions of random play, some of them held out; what was done, in words."""
    stage |= {"model": None, "again": None, "least_reward": None, "prompts": 4 * stage["prompts"]}
    stage["validation_share"] = 0.5 if stage["validation_share"] else 0.0
    return "played at random, for a model that has learnt nothing takes no action that something could follow"


def _lower(section: dict[str, Any], copies: int) -> None:
    """Counts of a section and of those inside it, in place."""
    for key, value in section.items():
        # a user's arguments may have any name, and the algorithm is rehearsed as it is
        if key in ("env", "args", "algorithm"):
            continue
        if isinstance(value, dict):
            _lower(value, copies)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    _lower(item, copies)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if key in EVENLY and isinstance(value, int):  # `prompts` is also the name of a weight
                section[key] = min(value, 2 * copies if copies > 1 else 4)
                section[key] += -section[key] % copies
            elif key in ("tasks", "evaluate"):
                section[key] = min(value or 8, 8)
            elif key == "max_prompt_tokens":
                section[key] = min(value, 512)
            elif key in MOST:
                section[key] = MOST[key] if key in ALL_IF_ZERO and value == 0 else min(value, MOST[key])
    # of a user's own data: nobody knows how long an epoch is
    if section.get("epochs") is not None and "steps" in section:
        section |= {"epochs": None, "steps": MOST["steps"]}
    if section.get("schedule") in ("linear", "cosine"):
        section |= {"warmup_steps": min(section["warmup_steps"], 1), "total_steps": 2}
    if "best_of" in section:
        section["best_of"] = [n for n in section["best_of"] if n <= 2]


def _shards(env: dict[str, Any]) -> Iterator[str]:
    """Questions that ship in place of shards that are not there, in words."""
    parts = ("train", "test", "unseen")
    if gone := [path for part in parts if (path := env[part]) and not Path(path).exists()]:
        games = env["kind"] == "text-game"
        env |= dict.fromkeys(parts) | ({"games": ["charge-torch", "weigh-stones"]} if games else {})
        yield f"{gone[0]} is not there; rows of the {'games' if games else 'pages'} that ship take its place"


def _stand_ins(stage: dict[str, Any]) -> Iterator[str]:
    """What cannot be had on this machine, replaced; each replacement in words."""
    for section in (stage, stage.get("rollouts") or {}):
        if isinstance(section.get("sampler"), dict) and section["sampler"]["kind"] == "vllm":
            section["sampler"] = {"kind": "embedded"}
            yield "the embedded sampler, which needs no GPU, samples in place of vLLM"
    if stage.get("rollouts"):
        stage["rollouts"]["ahead"] = min(stage["rollouts"]["ahead"], 1)
    if stage.get("url"):
        yield f"instances of failed tasks in place of what {stage['url']} would write"
        stage |= {"url": "", "model": ""}
    if stage.get("released"):
        yield f"trained here in place of the weights of {stage['released']}"
        stage["released"] = None


def _start_folder(
    stage: dict[str, Any], model: ModelConfig, folder: Path, folders: dict[str, ModelConfig]
) -> tuple[ModelConfig, str]:
    """The model of a start folder's stand-in, which the stage names from now on, and in words what stands in for
    what.
    """
    from ..models.hub import resolve
    from ..models.stand_in import byte_vocab, copy_tokenizer, write_byte_tokenizer

    where = folder / f"start-{stage['name']}"
    try:
        source = resolve(stage["folder"])
    except ConfigError:
        source = None
    if source is not None and any(source.glob("*token*")):
        copy_tokenizer(source, where)
        note = f"fresh weights with the tokenizer of {stage['folder']}"
    else:
        write_byte_tokenizer(where, model.family)
        # bytes are more than tokens; of a second folder the first one's sizes hold
        longer = replace(model, vocab=byte_vocab(model.family), max_positions=4 * model.max_positions)
        model = next(iter(folders.values()), longer)
        note = f"{stage['folder']} is not there; fresh weights and a tokenizer of bytes with a chat template stand in"
    stage["folder"] = str(where)
    folders[str(where)] = model
    return model, note


def _first_phases(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stages without WebRL's phases after the first; what refers to those refers to the first one's."""
    later = {s["name"]: f"{m[1]}-1-{m[3]}" for s in stages if (m := PHASE.fullmatch(s["name"])) and int(m[2]) > 1}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            new = [renamed(item) for item in value]
            return list(dict.fromkeys(new)) if all(isinstance(item, str) for item in new) else new
        return later.get(value, value) if isinstance(value, str) else value

    return [renamed(stage) for stage in stages if stage["name"] not in later]


def _lower_video(environments: list[dict[str, Any]], stages: list[dict[str, Any]]) -> list[str]:
    """Small frames, short clips, the actions of the scene where it is recorded here, and no LPIPS where its weights
    are not: in words.
    """
    small = {
        "height": SIDE,
        "width": SIDE,
        "channels": [8, 16, 32],
        "encoder_resnets": 1,
        "latent": 16,
        "groups": 4,
        "levels": [8, 6, 5],
        "patch": 2,
    }
    notes: list[str] = []
    for env in environments:
        if env["shards"] and not Path(env["shards"]).exists():
            notes = [f"env.shards: {env['shards']} is not there; the table-top scene is recorded"]
            env["shards"] = None
        _lower(env, 1)
        tokenizer = env["tokenizer"]
        tokenizer |= {
            **small,
            "decoder_resnets": 2 if tokenizer["kind"] == "compressive" and not tokenizer["still"] else 1,
        }
        env |= {"horizon": min(env["horizon"], 2), "context_reach": min(env["context_reach"], 4)}
        if list(env["train_part"]) != [0.0, 1.0]:  # of a few episodes a twentieth would be none
            env["train_part"] = [0.0, 0.5] if env["train_part"][0] == 0.0 else [0.5, 1.0]
        if env["shards"] is None:
            env |= {"recording": {**(env["recording"] or {}), **SCENE}, "actions": "tabletop", "action_dims": 3}
    for stage in stages:
        if "frames_per_clip" in stage:
            stage |= {"frames_per_clip": 2, "window": 6 if stage["window"] else 0}
        if stage["kind"] == "video-real2sim":
            stage["frames"] = min(stage["frames"], 6)
            gone = environments[0]["shards"] is None and not set(stage["tasks"]) <= set(IN_SCENE["tasks"]) | {"push"}
            if stage["shards"] and not Path(stage["shards"]).exists():
                notes.append(f"stages.{stage['name']}: {stage['shards']} is not there; held-out episodes of env begin")
                stage["shards"] = None
            if gone:
                notes.append(f"stages.{stage['name']}: policies that ship play in the scene in place of yours")
                stage |= IN_SCENE
            elif not _on_recordings(stage, environments[0]):
                stage["truth"] = None  # made for other frames
    return notes + _without_learnt_metrics([*environments, *stages])


def _small_episodes(
    recipe: Recipe, environments: list[dict[str, Any]], stages: list[dict[str, Any]], folder: Path
) -> dict[str, tuple[Any, list[int]]]:
    """Small copies to be made of the user's episodes, by path; sections that read those read the copies from now on."""
    from ..rl.video.clips import Episodes
    from ..rl.video.config import VideoEnvironment
    from ..rl.video.recorded import find_episodes

    assert isinstance(recipe.env, VideoEnvironment)
    copied: dict[str, tuple[Any, list[int]]] = {}
    shards = recipe.env.shards
    for stage in stages:
        if stage["kind"] != "video-real2sim" or not _on_recordings(stage, environments[0]):
            continue
        split = {} if stage["shards"] else {"every": recipe.env.heldout_every, "heldout": True}
        recorded = stage["shards"] or shards
        assert recorded is not None, "a stage on recordings names some"
        source = Episodes(recorded, **split)
        found = find_episodes(source, stage["tasks"], stage["episodes"], f"stages: {stage['name']}")
        stage["shards"] = str(folder / f"episodes-{stage['name']}")
        copied[stage["shards"]] = source, sorted({number for some in found.values() for number in some})
    for name in dict.fromkeys(env["shards"] for env in environments if env["shards"] is not None):
        where, source = str(folder / f"episodes-{len(copied)}"), Episodes(name)
        copied[where] = source, list(range(min(len(source), 9)))  # three of them are held out
        for env in environments:
            env["shards"] = where if env["shards"] == name else env["shards"]
    return copied


def _on_recordings(stage: dict[str, Any], env: dict[str, Any]) -> bool:
    """Whether a Real2Sim stage begins with recorded episodes, not in the scene."""
    return stage["shards"] is not None or env["actions"] != "tabletop"


def _without_learnt_metrics(sections: list[dict[str, Any]]) -> list[str]:
    """Pictures are compared without LPIPS where its weights are not on this machine."""
    from ..rl.rewards.video import LEARNT, require_weights

    try:
        require_weights(LEARNT)
        return []
    except ConfigError:
        pass
    for section in sections:
        for weights in (section.get("loss"), section.get("reward")):
            if isinstance(weights, dict):
                weights |= {name: 0.0 for name in LEARNT if name in weights}
                if "mae" in weights:
                    weights["mae"] = 1.0
        if "metrics" in section:
            section["metrics"] = [name for name in section["metrics"] if name not in LEARNT] or ["mae"]
            section["headline"] = section["metrics"][0]
    return ["env: LPIPS is left out, for its weights are not on this machine"]


def describe_changes(recipe: Recipe, rehearsal: Rehearsal) -> list[str]:
    """What was turned down, a line for each section."""
    changes: dict[str, list[str]] = {}
    plain = schema.to_plain(recipe)
    stages = {stage["name"]: stage for stage in plain.pop("stages")}
    now = dict(rehearsal.settings)
    pairs = [("", plain, {k: v for k, v in now.items() if k != "stages"})]
    pairs += [(f"stages.{stage['name']}", stages[stage["name"]], stage) for stage in now["stages"]]
    for section, old, new in pairs:
        if section and old["kind"] != new["kind"]:
            continue  # said in words
        for key, before, after in schema.differences(old, new):
            if section and f"{key.rpartition('env.')[2]} {before} -> {after}" in changes.get("env", ()):
                continue  # a stage's env is the recipe's with some settings changed
            top, _, rest = key.partition(".")
            place, name = (section, key) if section else (top, rest or top)
            if not isinstance(before, str) or not isinstance(after, str) or place:
                changes.setdefault(place, []).append(f"{name} {before} -> {after}")
    gone = [name for name in stages if name not in {stage["name"] for stage in now["stages"]}]
    lines = [f"{place}: {', '.join(parts)}" for place, parts in changes.items()]
    return [*lines, *rehearsal.stand_ins, *([f"left out: {', '.join(gone)}"] if gone else [])]


def write(rehearsal: Rehearsal, folder: Path) -> Path:
    """The rehearsal's recipe file, and the start folders that it names."""
    for where, model in rehearsal.folders.items():
        from ..models.stand_in import write_weights

        write_weights(model, Path(where))
    for where, (source, numbers) in rehearsal.episodes.items():
        from ..rl.video.clips import copy_small

        copy_small(source, numbers, Path(where), SIDE, SCENE["frames"])
    path = folder / "rehearsal.yaml"
    path.write_text(yaml.safe_dump(rehearsal.settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def run(path: Path, folder: Path) -> tuple[int, str]:
    """Train it as anybody would, without a GPU, its progress on the terminal: the exit code, and the error."""
    place = os.environ | {
        REHEARSAL_VARIABLE: "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    words = [sys.executable, "-m", "terrella", "train", str(path), "--run", str(folder)]
    # an exception ends the child too, a signal would not
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        done = subprocess.run(words, env=place, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return DeadlineError.exit_code, f"not over after {PATIENCE_S / 60:.0f} minutes"
    said = [line for line in done.stderr.splitlines() if line.startswith(ERROR)]
    return done.returncode, said[-1].removeprefix(ERROR) if said else done.stderr[-2000:]
