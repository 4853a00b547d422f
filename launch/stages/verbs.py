"""What the stages collect, sft, rl and eval share: the environment of a stage, opened, and the tokenizer of the
recipe's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from ...core.by_path import ByPath, local_imports, require_unchanged
from ...core.errors import ConfigError, StorageError
from ...core.files import json_digest, read_json, write_json
from ...core.run import ROWS, Run, has_begun
from ...data.rows import rows_digest
from ...data.tokenizers import TOKENIZER, ByteTokenizer, Tokenizer, load_tokenizer, own_tokenizer
from ...models.hub import resolve
from ...rl.environment import Split
from ...rl.hosted import CHECKING_S, LOADING_S
from ...rl.language_config import QuestionSettings
from ...rl.language_tasks import Made
from ...rl.own.config import DataEnvironment, EnvironmentSettings, OwnEnvironment
from ...rl.own.tasks import fresh_tokenizer, given_tokenizer, open_tasks
from ...rl.rewards.answers import REWARDS
from ...rl.tasks import Tasks
from ..job import Job
from ..recipe import Recipe
from ..settings.base import sampler_of, sources
from ..settings.verbs import Collect, Reinforce, Score, Start, Tune
from ..settings.web import WebJudge


@lru_cache(maxsize=2)
def _load(folder: Path, files: frozenset[tuple[str, int, int]] = frozenset()) -> Tokenizer:
    return load_tokenizer(folder)


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, read again if a file of the folder was added, removed or changed."""
    kept = {path.name: path.stat() for path in folder.glob("*") if path.is_file()}
    return _load(folder.absolute(), frozenset((name, s.st_mtime_ns, s.st_size) for name, s in kept.items()))


def start_of(job: Job) -> Start:
    """The recipe's start stage; a second one may load a reward model."""
    judges = {stage.orm for stage in job.recipe.stages if isinstance(stage, WebJudge)}
    starts = [stage for stage in job.recipe.stages if isinstance(stage, Start) and stage.name not in judges]
    if len(starts) != 1:
        raise ConfigError(
            f"stages: the kinds collect, sft, rl and eval need exactly one stage of kind start, not {len(starts)}"
        )
    return starts[0]


def has_start(recipe: Recipe) -> bool:
    """Whether a recipe has a start."""
    return any(isinstance(stage, Start) for stage in recipe.stages)


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer that the start stage leaves, or will leave; without a start, the one its environment prescribes."""
    given = None if has_start(job.recipe) else given_tokenizer(environments_of(job.recipe))
    if given is not None:
        if given.vocab_size > job.model.vocab:
            raise ConfigError(
                f"model.vocab = {job.model.vocab} is below the {given.vocab_size} tokens of the recipe's env"
            )
        return given
    start = start_of(job)
    kept = job.stage_folder(start.name) / TOKENIZER
    if job.run.outcome(start.name) is not None:
        return _load(kept)
    if start.folder:
        return folder_tokenizer(resolve(start.folder))
    return own_tokenizer(start.tokenizer) if start.tokenizer else fresh_tokenizer(environments_of(job.recipe))


def bytes_stand_in(settings: EnvironmentSettings, job: Job) -> bool:
    """Whether `tokenizer_of` returns bytes for now, because the start stage will gather this environment's pieces."""
    if not getattr(settings, "gathers_pieces", False):
        return False
    start = start_of(job)
    return not start.folder and not start.tokenizer and job.run.outcome(start.name) is None


def environments_of(recipe: Recipe) -> list[EnvironmentSettings]:
    """All environments of a recipe: its own, and those of its stages and their arms."""
    sections = [*recipe.stages, *(arm for stage in recipe.stages for arm in getattr(stage, "arms", ()))]
    named = [recipe.env, *(getattr(section, "env", None) for section in sections)]
    return [settings for settings in named if settings is not None]


def require_same_files(settings: DataEnvironment | OwnEnvironment, run: Run) -> None:
    """Record digests of the rows when they are first read, and of modules that user code imports from its own folder; a
    run refuses to resume with changed ones.
    """
    kept = run.path / ROWS
    binding = run.token or has_begun(run.path)  # a check predicts the start of a run, which would drop the record
    known: dict[str, str] = (read_json(kept) if binding else None) or {}
    if known and (not isinstance(known, dict) or known.pop("digest", None) != json_digest(known)):
        raise StorageError(
            f"{kept}: damaged, it does not match its own digest; restore it from a backup, or start in another --run "
            "folder"
        )
    code = settings.reward if isinstance(settings, DataEnvironment) else settings
    now = local_imports(code.path, Path()) if isinstance(code, ByPath) else {}
    if isinstance(settings, DataEnvironment):
        now |= {
            str(path): rows_digest(path) for path in (settings.train, settings.test) if path and Path(path).exists()
        }
    require_unchanged(known, now)
    if now.keys() - known.keys() and run.token:  # a check has no run to write to
        run.guard()
        known |= now
        write_json(kept, {**known, "digest": json_digest(known)})


@contextmanager
def environment(stage: Collect | Tune | Reinforce | Score, job: Job) -> Iterator[Tasks]:
    """Open the stage's environment, or the recipe's; its process ends with the block."""
    settings = stage.env or job.recipe.env
    if settings is None:
        raise ConfigError(
            f"env: stage '{stage.name}' needs an environment; give the recipe a section env, or the stage one"
        )
    if isinstance(settings, DataEnvironment | OwnEnvironment) and job.mesh.is_main:
        require_same_files(settings, job.run)
    made, tokenizer = made_for(settings, job), tokenizer_in(settings, job)
    # prompt lengths in tokens are not known yet
    most = job.model.max_positions if tokenizer is not None else None
    loading_s = LOADING_S if job.run.token else CHECKING_S
    with open_tasks(settings, tokenizer or ByteTokenizer(), most, made, loading_s) as tasks:
        tasks.stage, tasks.seed, tasks.ranks = stage.name, job.recipe.seed, job.mesh.data_size
        if isinstance(stage, Reinforce):  # what it plays is judged as soon as it is played
            tasks.max_invalid_share = stage.rollouts.max_invalid_share
        yield tasks


def tokenizer_in(settings: EnvironmentSettings, job: Job) -> Tokenizer | None:
    """The tokenizer of an environment's texts; None if its tokens are codes, or the stage that learns it is not
    done.
    """
    if getattr(settings, "layout", None) is not None:
        return None
    made = made_for(settings, job)
    return learnt_tokenizer(job, made.name) if made else tokenizer_of(job)


def require_sampler(stage: Collect | Reinforce | Score, job: Job) -> None:
    """Refuse, before the run starts, a sampler that does not support the model's layers."""
    sampler = sampler_of(stage, job.recipe.stages)
    if job.model.block != "llama" and (sampler is None or sampler.kind == "embedded"):
        setting = "sampler" if isinstance(stage, Score) else "rollouts.sampler"
        raise ConfigError(
            f"stages: {stage.name}.{setting}: the embedded sampler has no layers of model.block: {job.model.block}; "
            "use {kind: vllm}"
        )


def made_for(settings: EnvironmentSettings, job: Job) -> Made | None:
    """The data that stages made for an environment: that of the last such stage, with the earlier ones' in `uses`; None
    if it makes or reads its tasks itself.
    """
    names = sources(settings)
    uses = {key: made_by(name, job) for key, name in names.items() if key != "data"}
    return replace(made_by(names["data"], job), uses=uses) if "data" in names else None


def made_by(name: str, job: Job) -> Made:
    """The data that a stage makes."""
    stage = next(stage for stage in job.recipe.stages if stage.name == name)
    own = {f.name: getattr(stage, f.name) for f in fields(stage)}
    vocab = job.model.vocab if learns_tokenizer(job.recipe, name) else None
    finished, recipe = job.run.outcome(name) is not None, job.recipe
    return Made(name, job.stage_folder(name), own, finished, seed=recipe.seed, vocab=vocab, env=recipe.env)


def learnt_tokenizer(job: Job, stage: str) -> Tokenizer | None:
    """The start's tokenizer, or the one that a data stage learns instead; None until that stage has finished."""
    if not learns_tokenizer(job.recipe, stage):
        return tokenizer_of(job)
    return _load(job.stage_folder(stage) / TOKENIZER) if job.run.outcome(stage) is not None else None


def learns_tokenizer(recipe: Recipe, stage: str) -> bool:
    """Whether a stage that makes questions learns a tokenizer from them: by its own setting, or because the recipe has
    no other.
    """
    settings = next(getattr(other, "env", None) or recipe.env for other in recipe.stages if other.name == stage)
    if not isinstance(settings, QuestionSettings) or settings.data != stage or settings.in_shards:
        return False
    given = has_start(recipe) or given_tokenizer(environments_of(recipe)) is not None
    return settings.own_tokenizer or not given


def text_tokenizer(job: Job) -> Tokenizer:
    """The tokenizer of a text recipe: that of its start, or the one that was learnt instead."""
    if has_start(job.recipe):
        return tokenizer_of(job)
    learnt = next((stage.name for stage in job.recipe.stages if learns_tokenizer(job.recipe, stage.name)), None)
    return (learnt and learnt_tokenizer(job, learnt)) or tokenizer_of(job)


def require_judged(tasks: Tasks, split: Split, samples: int = 1) -> None:
    """Refuse an environment without a judge, or whose judge lacks something."""
    if not tasks.judged():
        raise ConfigError(f"env.reward: nothing judges the answers; name one: file.py:function, {', '.join(REWARDS)}")
    tasks.require_judge(split, samples)


def require_tasks(tasks: Tasks, split: Split, stage: str) -> None:
    """Refuse an environment without tasks of a split."""
    if not len(tasks.of(split)):
        why = tasks.why_empty(split)
        raise ConfigError(f"env: has no {split} task for stage '{stage}'{': ' if why else ''}{why}")
