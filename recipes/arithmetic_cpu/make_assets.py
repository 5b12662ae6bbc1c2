"""Makes what the recipe trains on: a tiny random model, its tokenizer and a data set. No download.

    python make_assets.py --out assets --prompt-len 256 --response-len 8 --seed 0

Running it again with the same settings keeps what is there; with other settings it starts over.

The task is adding two digits. A prompt reads

    <|user|>Add the numbers.
    3+0=3
    1+2=3
    ...
    4+1=<|assistant|>

with as many worked examples as make it exactly `--prompt-len` tokens (one token per character), so
the responses to one prompt share a long prefix, and different prompts share the first line.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

INSTRUCTION = "Add the numbers.\n"
MAX_OPERAND = 4
"""Sums stay below ten, so an answer is one token."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")
ALPHABET = "0123456789+-*/=()?.,: \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<eos>"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_TEMPLATE_TOKENS = 2
"""What the chat template adds to a user's message: <|user|> and <|assistant|>."""

STAMP = "settings.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--prompt-len", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--response-len", type=int, default=8, help="most tokens per response")
    parser.add_argument("--num-train", type=int, default=256, help="training prompts")
    parser.add_argument("--num-val", type=int, default=32, help="validation prompts")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 32")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    arguments = parser.parse_args()

    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    stamp = arguments.out / STAMP
    if stamp.is_file() and json.loads(stamp.read_text()) == settings:
        print(f"assets: {arguments.out} is up to date")
        return
    rows = {
        split: make_rows(split, count, arguments.prompt_len, arguments.seed)
        for split, count in (("train", arguments.num_train), ("val", arguments.num_val))
    }
    if arguments.out.exists():
        shutil.rmtree(arguments.out)
    arguments.out.mkdir(parents=True)
    num_parameters = write_model(arguments)
    write_rows(arguments.out, rows)
    stamp.write_text(json.dumps(settings, indent=2) + "\n")
    print(f"assets: wrote {arguments.out} ({num_parameters} parameters)")


def make_prompt(question: str, prompt_len: int, rng: random.Random) -> str:
    """A user message that is exactly `prompt_len` tokens in the chat template.

    Raises:
        ValueError: `prompt_len` leaves no room for the question.
    """
    room = prompt_len - NUM_TEMPLATE_TOKENS - len(question)
    if room < 0:
        shortest = NUM_TEMPLATE_TOKENS + len(question)
        raise ValueError(f"--prompt-len={prompt_len} must be at least {shortest}")
    text = INSTRUCTION if room >= len(INSTRUCTION) else ""
    while True:
        left, right = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
        example = f"{left}+{right}={left + right}\n"
        if len(text) + len(example) > room:
            return text + "\n" * (room - len(text)) + question
        text += example


def make_rows(split: str, count: int, prompt_len: int, seed: int) -> list[dict]:
    """Rows in the layout verl's data sets have."""
    rng = random.Random(f"{split}-{seed}")
    rows = []
    for index in range(count):
        left, right = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
        content = make_prompt(f"{left}+{right}=", prompt_len, rng)
        rows.append(
            {
                "data_source": "arithmetic",
                "prompt": [{"role": "user", "content": content}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                "extra_info": {"split": split, "index": index},
            }
        )
    return rows


def write_rows(directory: Path, rows: dict[str, list[dict]]) -> None:
    import pandas

    for split, split_rows in rows.items():
        pandas.DataFrame(split_rows).to_parquet(directory / f"{split}.parquet")


def write_model(arguments: argparse.Namespace) -> int:
    """Writes model and tokenizer to `<out>/model`; returns the number of parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
    head_dim = 32
    config = Qwen3Config(
        # No padding rows: verl masks those in vLLM only, and trainer and rollout would disagree.
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // head_dim,
        num_key_value_heads=max(1, arguments.hidden // head_dim // 2),
        head_dim=head_dim,
        max_position_embeddings=max(512, arguments.prompt_len + arguments.response_len),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
        initializer_range=0.05,
    )
    torch.manual_seed(arguments.seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = vocabulary["<eos>"]
    model.generation_config.pad_token_id = vocabulary["<pad>"]
    model.save_pretrained(arguments.out / "model")
    tokenizer.save_pretrained(arguments.out / "model")
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
