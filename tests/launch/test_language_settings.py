"""Recipes of language world models: the published settings, what the overlays change, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.launch import recipe as recipes
from terrella.launch.plan.command import target
from terrella.launch.recipe_files import shipped
from terrella.models.families import read_hf_config
from terrella.models.geometry import count

# of the released config.json files; what is not here has no place in our sizes
PUBLISHED = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
LARGE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
TEXT = ["text-game-sft", "text-game-rlvr-binary", "text-game-rlvr-task"]
WEB = ["web-page-sft", "web-page-rlvr"]


def stages(name: str) -> dict:
    return {stage.name: stage for stage in recipes.load(name).stages}


@pytest.mark.parametrize("name", shipped())
def test_every_recipe_can_be_planned(name: str) -> None:
    assert count(target(name)[0]).total > 0


@pytest.mark.parametrize("name", [*TEXT, *WEB])
def test_models_are_the_published_ones(name: str) -> None:
    assert target(name)[0] == read_hf_config(PUBLISHED, "published")
    assert count(target(name)[0]).total / 1e9 == pytest.approx(1.777, abs=0.001)


@pytest.mark.parametrize("name", ["text-game-sft-7b", "text-game-rlvr-binary-7b"])
def test_the_larger_model_is_one_overlay(name: str) -> None:
    large, small = recipes.load(name), recipes.load(name.removesuffix("-7b"))
    assert large.model.sizes == read_hf_config(PUBLISHED | LARGE, "published") and count(
        large.model
    ).total / 1e9 == pytest.approx(7.616, abs=0.001)
    assert large.stages[1:] == small.stages[1:]  # but for where they start the stages are the same


def test_a_schedule_is_stretched_to_the_steps_that_epochs_come_to() -> None:
    from terrella.core.config import learning_rate
    from terrella.launch.stages.sft import stretched

    sft = stages("spa-sokoban")["sft"]
    assert sft.stretch_schedule and (sft.optimizer.warmup_steps, sft.optimizer.total_steps) == (160, 1600)
    short = stretched(sft.optimizer, 300)
    assert (short.warmup_steps, short.total_steps) == (30, 300)
    assert learning_rate(short, 29) == 1e-4 and learning_rate(short, 300) == 0.0
    assert stretched(sft.optimizer, 1).warmup_steps == 0


def test_a_model_that_thinks_and_its_control_differ_in_what_they_learn_from_and_its_rate() -> None:
    found = stages("text-game-1gpu")
    assert found["lessons"].env.thoughts == 320 and found["rlvr"].env is None  # RLVR is on all transitions
    assert found["sft"].env == found["control"].env and found["control"].env.data == "lessons"
    assert found["control"].match_tokens_of == "rlvr" and found["control"].init == found["rlvr"].init == "sft"
    # the rates of the run in docs/lab/language.md
    assert (found["control"].optimizer.lr, found["rlvr"].optimizer.lr) == (5e-6, 3e-6)
    assert replace(found["control"].optimizer, lr=3e-6) == found["rlvr"].optimizer
    assert found["headroom"].samples == 16 and found["headroom"].max_new_tokens == found["evaluate"].max_new_tokens


def test_published_settings() -> None:
    sft, rlvr = (stages(name) for name in TEXT[:2])
    lora = sft["sft"].lora
    assert (sft["sft"].sequences_per_step, sft["sft"].optimizer.lr, lora.rank, lora.alpha) == (16, 1e-5, 32, 16)
    grpo = rlvr["rlvr"].algorithm
    assert (grpo.kl_coef, grpo.kl_clamp, grpo.entropy_coef, grpo.clip_low, grpo.clip_high) == (1e-3, 10, 1e-3, 0.2, 0.2)
    assert (rlvr["rlvr"].samples_per_prompt, rlvr["rlvr"].max_new_tokens, rlvr["rlvr"].optimizer.lr) == (5, 4096, 1e-6)
    assert [recipes.load(name).env.reward for name in TEXT[1:]] == ["binary", "task_specific"]
    batches = {name: stages(name)["rlvr"] for name in (TEXT[1], "web-page-rlvr", "text-game-rlvr-binary-1gpu")}
    assert [(s.prompts_per_step, s.updates_per_rollout, s.steps) for s in batches.values()] == [
        (128, 2, 300),
        (64, 4, 1500),
        (64, 1, 160),
    ]
    assert [recipes.load(name).env.non_gold_ratio for name in [*TEXT[1:], "web-page-rlvr"]] == [0.4, 0.055, None]
    assert sft["sft"].env.non_gold_ratio is None and (sft["sft"].env.data, rlvr["control"].env.data) == (
        "lessons",
        "lessons",
    )
    assert stages("web-page-sft")["sft"].lora == lora and stages("web-page-rlvr")["rlvr"].max_new_tokens == 7288


@pytest.mark.parametrize("name", [*TEXT, *WEB])
def test_one_gpu_needs_no_download(name: str) -> None:
    made = recipes.load(f"{name}-1gpu")
    assert made.ranks == 1 and not made.env.in_shards and count(made.model).total < 20e6
    start = {s.name: s for s in made.stages}.get("start")
    assert start is None if name.endswith("sft") else start.folder == f"runs/{name.split('-rlvr')[0]}-sft-1gpu/export"
    if start is not None:  # the sizes must be those of the recipe whose export it starts from
        assert made.model == recipes.load(Path(start.folder).parts[1]).model
    assert {env.mode for stage in made.stages if (env := getattr(stage, "env", made.env))} == {"strict"}


def test_a_data_stage_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="games: name games to play, or train and test for folders of shards"):
        recipes.load("text-game-sft", ("stages.2.env.train=null",))


def test_questions_are_learnt_with_their_own_weight_and_padding_never() -> None:
    from terrella.data.trajectory import Role, TokenSequence
    from terrella.launch.stages.sft import answer_tokens, weighted

    pad, ids = 0, (0, 0, 7, 8, 9, 5, 6, 2)
    lesson = TokenSequence(ids, (Role.PROMPT,) * 5 + (Role.STATE,) * 3)
    assert answer_tokens([lesson]) == 3
    plain, both = (weighted(lesson, 6, question, pad) for question in (0.0, 0.5))
    assert plain.ce.tolist() == pytest.approx([0] * 5 + [1 / 6] * 3)
    assert both.ce.tolist() == pytest.approx([0, 0] + [0.5 / 6] * 3 + [1 / 6] * 3)


def test_the_loss_of_prompts_leaves_out_padding_and_the_token_after_it() -> None:
    from terrella.data.trajectory import Role, TokenSequence
    from terrella.launch.stages.sft import prompt_tokens, weighted

    lesson = TokenSequence((0, 0, 5, 6, 7, 8, 9), (Role.PROMPT,) * 5 + (Role.ACTION,) * 2)
    assert prompt_tokens(lesson, pad_id=0).tolist() == [False, False, False, True, True, False, False]
    assert weighted(lesson, 4, 0.0, 0, 0.5).ce.tolist() == [0, 0, 0, 0.5, 0.5, 0.25, 0.25]
    whole = TokenSequence((5, 6, 8), (Role.PROMPT, Role.PROMPT, Role.ACTION))
    assert prompt_tokens(whole, pad_id=0).tolist() == [False, True, False]
    with pytest.raises(ConfigError, match="give one of them at most"):
        recipes.load("webrl-tiny", ("stages.sft.prompt_weight=0.5",))


def test_an_environment_of_a_stage_changes_the_recipes() -> None:
    made = recipes.load("text-game-tiny", ("env.mode=faithful", "stages.greedy.env.mode=strict"))
    rlvr, greedy = ({s.name: s for s in made.stages}[name].env for name in ("rlvr", "greedy"))
    assert (rlvr.kind, rlvr.data, rlvr.mode, rlvr.non_gold_ratio) == ("text-game", "data", "faithful", 0.2)
    assert (greedy.mode, greedy.non_gold_ratio, greedy.drift_steps) == ("strict", 0.4, 10)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("stages.rlvr.kind=language-rlvr", "is called 'rl' now"),
        ("stages.rlvr.kind=web-rollout", "is called 'collect' now"),
        ("stages.data.kind=text-game-data", "'collect' now; write that, and its settings in an env of kind text-game"),
        ("stages.rlvr.env.seeds=3", "'rlvr': env.seeds: differs from that of 'data', which makes what is read"),
        ("stages.data.env.data=elsewhere", "refers to 'elsewhere', which is no earlier stage"),
        ("env.unseen_games=[weigh-stones]", "unseen_games: 'weigh-stones' is also trained on"),
        ("env.data=nowhere", "refers to 'nowhere', which is no earlier stage"),
        ("env.reward=f1", "env.reward"),
        ("env.drift_steps=-1", "drift_steps"),
        ("stages.sft.prompt_weight=-1", "prompt_weight"),
    ],
)
def test_what_is_refused(change: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        recipes.load("text-game-tiny", (change,))


def test_a_recipe_with_a_start_trains_from_it() -> None:
    with pytest.raises(ConfigError, match="'sft' needs init"):
        recipes.load("text-game-sft", ("stages.sft.init=null",))
