"""The small tokenizer of web agents: what an agent must copy is the same pieces everywhere, and pages are short."""

import pytest

from terrella.launch import recipe
from terrella.rl.webrl.prompts import Prompter
from terrella.rl.webrl.sites import make_world, pool_of
from terrella.rl.webrl.tokenizer import pieces_of
from terrella.tests.sampling import in_turn


@pytest.fixture(scope="module")
def sites():
    return recipe.load("webrl-tiny").env


@in_turn("names in pieces")
def test_a_name_is_the_same_pieces_in_instruction_page_and_action(sites) -> None:
    tokenizer = pieces_of(sites, 512)
    name = "Dune grey teapot"
    wanted = [tokenizer.decode([i]) for i in tokenizer.encode(name)]
    assert wanted == ["Dune ", "grey ", "teapot"]
    places = (
        f"Open the page of the {name}.",
        f'do(action="Search", argument="{name}", element="5")',
        f'<a id="7" data-text="{name}"> x',
    )
    for text in places:
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text)]
        assert any(pieces[i : i + 3] == wanted for i in range(len(pieces))), pieces
    roomy = pieces_of(sites, 4096)  # a model with more ids than pieces may write one that has no text
    assert roomy.vocab_size < 4096 and len(roomy.encode("x\ufffd")) == 2
    assert [tokenizer.decode([i]) for i in tokenizer.encode('<a id="7" data-text="')] == [
        '<a id="',
        "7",
        '" data-text="',
    ]


def test_the_tiny_recipe_shows_the_whole_page_of_results(sites) -> None:
    tokenizer = pieces_of(sites, recipe.load("webrl-tiny").model.vocab)
    world, task = make_world(sites), next(t for t in pool_of(sites) if t.task.template_id == 103)
    prompter = Prompter(tokenizer, sites.max_prompt_tokens, sites.pad_prompts_to)
    world.open_task(task.task, task.steps)
    action = world.demonstrate().split("\n")[-1]
    first, cut = prompter.round(task.task.intent, [], world.html)
    world.step(action)
    second, cut_again = prompter.round(task.task.intent, [tokenizer.encode(action)], world.html)
    assert cut == cut_again == 0 and len(first) == len(second) <= sites.max_prompt_tokens
