"""Stock TRL trains on a served Sokoban: its GRPOTrainer with `environment_factory`, over OpenEnv's client. Helper
module, not a test.

`python -m terrella.tests.rl.exchange.trl_sokoban URL FOLDER STEPS` prints the rewards of its steps as JSON. The model
is made here, so that nothing is fetched: a tiny one that a few batches teach how a call of the tool is written, not
where to go.
"""

import json
import random
import sys

import torch
from datasets import Dataset
from openenv.core import GenericEnvClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

WORDS, SEEDS = ("Up", "Down", "Left", "Right"), range(8)


class Sokoban:
    """What TRL is given: one connection, a method that it offers to the model as a tool, and the reward."""

    url = ""

    def __init__(self) -> None:
        self.client = GenericEnvClient(base_url=self.url).sync()
        self.client.connect()
        self.total, self.over, self.calls = 0.0, False, 0

    def reset(self, seed: int = 0, **row: object) -> str:
        seen = self.client.reset(seed=seed).observation
        self.total, self.over, self.calls = 0.0, False, 0
        return f"{seen['instruction']}\n{seen['text']}"

    def move(self, direction: str) -> str:
        """Move the player by one field.

        Args:
            direction: Up, Down, Left or Right.

        Returns:
            The room after the move.
        """
        if self.over:
            return "It is over."
        step = self.client.step({"text": direction})
        self.total, self.over, self.calls = self.total + step.reward, step.done, self.calls + 1
        return step.observation["text"]

    def get_reward(self) -> float:
        return self.total


def call(word: str) -> dict[str, object]:
    """An answer that moves."""
    asked = {"type": "function", "function": {"name": "move", "arguments": {"direction": word}}}
    return {"role": "assistant", "content": "", "tool_calls": [asked]}


def tiny_model(env: Sokoban) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A model that calls the tool with words at random."""
    rng, talks = random.Random(0), []
    for seed in SEEDS:
        talk = [{"role": "user", "content": env.reset(seed=seed)}]
        for _ in range(2):
            word = rng.choice(WORDS)
            talk += [call(word), {"role": "tool", "name": "move", "content": env.move(word)}]
        talks.append([*talk, call(rng.choice(WORDS))])
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = qwen2_5_chat_template
    texts = [tokenizer.apply_chat_template(talk, tools=[env.move], tokenize=False) for talk in talks]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = qwen2_5_chat_template
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=4096, tie_word_embeddings=True, **sizes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    for _ in range(150):
        picked = torch.tensor(rng.sample(range(len(texts)), 4))
        batch = {name: rows[name][picked] for name in ("input_ids", "attention_mask")}
        loss = model(**batch, labels=labels[picked]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer.padding_side = "left"
    return model, tokenizer


def main(url: str, folder: str, steps: int) -> None:
    set_seed(0)
    Sokoban.url = url
    env = Sokoban()
    model, tokenizer = tiny_model(env)
    before = model.model.embed_tokens.weight.detach().clone()
    config = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=256,
        max_tool_calling_iterations=3,
        learning_rate=1e-3,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        chat_template_kwargs={},
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in SEEDS])
    trainer = GRPOTrainer(
        model, args=config, train_dataset=rows, processing_class=tokenizer, environment_factory=Sokoban
    )
    trainer.train()
    kept = [row for row in trainer.state.log_history if "reward" in row]
    moved = float((trainer.model.model.embed_tokens.weight.detach().cpu() - before).abs().max())
    names = ("reward", "reward_std", "grad_norm", "tools/call_frequency", "tools/failure_frequency")
    print(json.dumps({"steps": [{name: row.get(name) for name in names} for row in kept], "weights_moved": moved}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
