"""`terrella shards web`: the scripts around WebRL's release, on its files: process-data, gen-task,
generate-test-data, score.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from ...core.errors import ConfigError

FOLDER = click.Path(path_type=Path)


@click.group()
def web() -> None:
    """Work on the files of WebRL and WebArena: rollouts, replay, instructions, task files, scores."""


@web.command("process-data")
@click.option("--stage", "stages", type=click.IntRange(1, 2), multiple=True, default=(1, 2))
@click.option(
    "--rollout-path", "--rollout_path", type=FOLDER, help="Result folder with traces/ and actions/; stage 1 reads it."
)
@click.option(
    "--add-reward",
    "--add_reward",
    is_flag=True,
    help="Stage 1: label by the outcome reward model, not by the stored score.",
)
@click.option(
    "--orm-path", "--orm_path", type=FOLDER, help="Hugging Face folder of the outcome reward model, for --add-reward."
)
@click.option(
    "--experience-paths",
    "--experience_paths",
    type=FOLDER,
    multiple=True,
    help="Stage-1 files of earlier phases (.jsonl or .pt).",
)
@click.option(
    "--actor-path", "--actor_path", type=FOLDER, help="Hugging Face folder of the current actor; stage 2 asks it."
)
@click.option(
    "--output-path",
    "--output_path",
    type=FOLDER,
    required=True,
    help="X.jsonl of stage 1; stage 2 writes X_filter.jsonl.",
)
@click.option("--seed", type=int, default=0)
def process_data(
    stages: tuple[int, ...],
    rollout_path: Path | None,
    add_reward: bool,
    orm_path: Path | None,
    experience_paths: tuple[Path, ...],
    actor_path: Path | None,
    output_path: Path,
    seed: int,
) -> None:
    """Rollouts to trajectories of steps (stage 1), and to the steps that a phase trains on (stage 2)."""
    from ...core.progress import Progress
    from ...rl.webrl import release

    if output_path.suffix != ".jsonl":
        raise ConfigError(f"--output-path {output_path}: name a .jsonl file; pickled files are read, never written")
    if add_reward and orm_path is None:
        raise ConfigError("--orm-path: --add-reward needs the outcome reward model")
    if 1 in stages:
        if rollout_path is None:
            raise ConfigError("--rollout-path: stage 1 needs the result folder")
        rollouts = release.read_rollouts(rollout_path)
        if add_reward:
            from ...rl.webrl.scorer import FolderScorer

            assert orm_path is not None
            model, progress, judged = FolderScorer(orm_path), Progress("judged", max(len(rollouts.rollouts), 1)), 0

            def judge(rollout: release.Rollout) -> float:
                nonlocal judged
                judged += 1
                progress.update(judged)
                return model.yes(rollout.intent, [s["response"] for s in rollout.steps], rollout.steps[-1]["html"])

            rollouts.rollouts = release.relabel(rollouts.rollouts, judge)
        release.write_fixed(rollout_path, rollouts.rollouts)
        trajectories = release.stage_one(rollouts.rollouts)
        release.write_lines(output_path, trajectories)
        wins = sum(t[0]["trajectory_reward"] for t in trajectories)
        click.echo(
            f"{output_path}: {len(trajectories)} trajectories, {wins} of them successes, "
            f"{sum(map(len, trajectories))} steps"
        )
        for reason, count in rollouts.dropped.items():
            click.echo(f"  dropped {count}: {reason}")
    if 2 in stages:
        from ...rl.webrl.scorer import FolderScorer

        if actor_path is None and experience_paths:
            raise ConfigError("--actor-path: stage 2 asks the current actor about earlier steps")
        new = release.read_experience(output_path)
        earlier = [t for path in experience_paths for t in release.read_experience(path)]
        scorer = FolderScorer(actor_path) if actor_path and earlier else None
        chosen = release.stage_two(
            earlier, new, lambda s: scorer.probability(s["observation"], s["action"]) if scorer else 0.0, seed
        )
        target = output_path.with_name(f"{output_path.stem}_filter.jsonl")
        release.write_lines(target, chosen)
        replayed = sum("rank_score" in s for s in chosen)
        click.echo(f"{target}: {len(chosen)} steps, {replayed} of them replayed")


@web.command("gen-task")
@click.argument("failed", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--url",
    required=True,
    help="An OpenAI-compatible address, http://host:8000/v1; its key is read from OPENAI_API_KEY.",
)
@click.option("--model", required=True, help="The model's name there.")
@click.option("--count", type=click.IntRange(1), default=500, help="Tasks to keep.")
@click.option("--feasible/--no-feasible", default=True, help="Ask of every task whether the site can do it.")
@click.option("--seed", type=int, default=0)
def gen_task(failed: Path, out: Path, url: str, model: str, count: int, feasible: bool, seed: int) -> None:
    """New instructions from FAILED, JSONL of {"task", "web"}; they are appended to OUT in the same form.

    The model is asked again until enough tasks are new and can be done, or until it has no more.

    The filter by a critic's value is part of the stage web-tasks, which has the critic.
    """
    from ...rl.webrl import release
    from ...rl.webrl.chat import ChatApi

    made, counts = release.generate_tasks(release.read_lines(failed), ChatApi(url, model), count, seed, feasible)
    release.write_lines(out, made, append=True)
    click.echo(f"{out}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))


@web.command("generate-test-data")
@click.argument("raw", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="NAME=URL",
    help="In place of the environment variable NAME, such as REDDIT.",
)
@click.option("--out", type=FOLDER, help="Folder to write to; beside RAW by default.")
def generate_test_data(raw: Path, addresses: tuple[str, ...], out: Path | None) -> None:
    """Put addresses into the task file RAW: NAME.json with all tasks, and NAME/0.json and so on with one each."""
    from ...rl.webrl import release
    from ...rl.worlds.web.tasks import REAL_PLACEHOLDERS

    known = {n: os.environ[n] for n in (p.strip("_") for p in REAL_PLACEHOLDERS) if os.environ.get(n)}
    for pair in addresses:
        name, sign, url = pair.partition("=")
        if not sign or f"__{name}__" not in REAL_PLACEHOLDERS:
            raise ConfigError(
                f"--address {pair}: write it as NAME=URL with one of "
                f"{', '.join(p.strip('_') for p in REAL_PLACEHOLDERS)}"
            )
        known[name] = url
    tasks = release.expand_tasks(raw, known)
    name, folder = raw.name.removesuffix(".json").removesuffix(".raw"), out or raw.parent
    (folder / name).mkdir(parents=True, exist_ok=True)
    if (folder / f"{name}.json").resolve() == raw.resolve():
        raise ConfigError(f"{raw}: would be written over; name another folder with --out")
    (folder / f"{name}.json").write_text(json.dumps(tasks, ensure_ascii=False, indent=2), encoding="utf-8")
    for index, task in enumerate(tasks):
        (folder / name / f"{index}.json").write_text(json.dumps(task, ensure_ascii=False, indent=2), encoding="utf-8")
    click.echo(f"{folder / name}.json and {len(tasks)} files in {folder / name}")


@web.command()
@click.argument("result", type=FOLDER)
@click.argument("tasks", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True)
def score(result: Path, tasks: Path, as_json: bool) -> None:
    """Success of the episodes in RESULT on the TASKS of a list file, by site, with 95 % intervals."""
    from ...rl.webrl import release

    table, solved = release.score_table(result, release.read_task_list(tasks))
    if as_json:
        rows = [{"sites": r.sites, "finished": r.finished.to_cell(), "overall": r.overall.to_cell()} for r in table]
        click.echo(json.dumps({"rows": rows, "solved": solved}))
        return
    click.echo(f"{'sites':28} {'of those that ended':>28} {'of all':>28}")
    for row in table:
        percentages = [(100 * e.value, 100 * e.low, 100 * e.high, e.n) for e in (row.finished, row.overall)]
        cells = [f"{v:.1f} % ({low:.1f} to {high:.1f}), n {n}" if n else "none" for v, low, high, n in percentages]
        click.echo(f"{row.sites:28} {cells[0]:>28} {cells[1]:>28}")
    click.echo(f"solved: {', '.join(map(str, solved)) or 'none'}")
