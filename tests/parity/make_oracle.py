"""Writes `oracle.json`: what transformers answers, token by token, when it runs the default model in fp32.

Run it by hand when the default model, the prompts below or the conversion of GGUF files change; `test_real_model.py` reads
the file and never runs transformers itself. It takes some minutes on two cores:

    .venv/bin/python tests/parity/make_oracle.py

The model is read by transformers' own GGUF loader, so that our conversion is checked as well as our decoder. Our folder
keeps the quantised matrices as fp16, and that rounding alone moves logits by more than the 1e-3 at which a near tie excuses
a difference. So each of transformers' tensors is rounded as ours are, must then be equal to ours bit by bit, and the
tokens come from these: the same numbers, by another path. Prompts are token ids of Penstock's tokenizer, because the
one that transformers makes of a GGUF splits digits in another way. Attention is the plain ("eager") one, because the
other would be the very kernel that Penstock calls.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.model.sources import DEFAULT_MODEL, cache_dir, resolve
from penstock.model.sources.known_models import find
from penstock.model.text.tokenizer import Tokenizer

NEW_TOKENS = 32
LONG = 100  # tokens of the longest prompt that is embedded
TEACHERS = ("python", "table", "chat system", "chat turns", "story")  # texts on which bf16 is judged
HERE = Path(__file__).parent
LICENCE = HERE.parent.parent / "LICENSE"

STORY = (
    "The miller's daughter had never seen the sea, but she had heard it described so often by the carters who brought salt "
    "up the valley that she could have drawn it, every wave, with a stick in the flour on the floor. "
)

TEXTS = {
    "one token": "The",
    "one digit": "7",
    "one space": " ",
    "capital": "The capital of France is",
    "story": "Once upon a time, in a village at the foot of a mountain,",
    "question": "Q: What is the boiling point of water at sea level?\nA:",
    "python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n'
    "    if n < 2:\n        return n\n    return",
    "c": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n\t\tprintf(",
    "sql": "SELECT customer_id, SUM(amount) AS total\nFROM orders\nWHERE created_at >= '2023-01-01'\nGROUP BY",
    "shell": "#!/bin/sh\nset -eu\nfor file in *.txt; do\n  echo",
    "html": '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>',
    "digits": "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899",
    "counting": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
    "sums": "12 + 7 = 19\n23 + 8 = 31\n45 + 6 = 51\n17 + 5 =",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], '
    '"address": {"city": "London", "country":',
    "list": "A list of seven rivers:\n\n1. The Nile\n2. The Amazon\n3. The Danube\n4.",
    "table": "| month | rain | sun |\n|---|---|---|\n| January | 87 mm | 42 h |\n| February | 64 mm | 71 h |\n| March |",
    "german": "Die Prüfung der Ströme übernähme größtenteils der Müller, denn",
    "chinese": "中国的首都是北京。日本的首都是",
    "japanese": "吾輩は猫である。名前はまだ無い。どこで生れたか",
    "arabic": "عاصمة مصر هي القاهرة، وعاصمة فرنسا هي",
    "russian": "Столица России — Москва, а столица Франции —",
    "emoji": "🌧️ rain, ☀️ sun, ❄️ snow, 👩‍🚀 astronaut, 🏳️‍🌈 flag, 🐈",
    "white space": "a\t\tb\n\n\n   c    d\r\n\te  \n",
    "repeated word": "tick tock " * 40,
    "repeated sentence": STORY * 4,
}

CHATS = {
    "chat capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat haiku": [{"role": "user", "content": "Write a haiku about a water mill."}],
    "chat system": [
        {"role": "system", "content": "You are a pirate. Answer in one short sentence."},
        {"role": "user", "content": "How do I boil an egg?"},
    ],
    "chat turns": [
        {"role": "user", "content": "My name is Zoë and I like 数学."},
        {"role": "assistant", "content": "Nice to meet you, Zoë!"},
        {"role": "user", "content": "What is my name?"},
    ],
}


def long_prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    squares = "\n".join(f"{i} squared is {i * i}, and cubed it is {i**3}." for i in range(1, 100))
    licence = LICENCE.read_text(encoding="utf-8")
    return {
        "long squares": tokenizer.encode(squares)[:1100],
        "long story": tokenizer.encode(STORY * 40)[:1500],
        "long licence": tokenizer.encode(licence + "\n" + licence)[:2500],
    }


def all_prompts(folder: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer(folder)
    short = {name: tokenizer.encode(text) for name, text in TEXTS.items()}
    chats = {name: tokenizer.encode_chat(messages) for name, messages in CHATS.items()}
    return short | chats | long_prompts(tokenizer)


def load(gguf: Path) -> Any:
    from transformers import AutoModelForCausalLM  # here: the test that reads the prompts does without

    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def round_as_converted(model: Any, folder: Path) -> str:
    """Round the model's weights as the folder's are, insist that they are then the same, and return a hash of them."""
    digest = hashlib.sha256()
    state = model.state_dict()
    with safe_open(str(folder / "model.safetensors"), framework="pt") as ours:
        names = set(ours.keys())
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        if set(state) - names != tied or names - set(state):
            raise SystemExit(f"the two models have different tensors: {sorted(names ^ set(state))}")
        for name in sorted(names):
            tensor = ours.get_tensor(name)
            rounded = state[name].to(tensor.dtype)
            if not torch.equal(rounded, tensor):
                worst = (rounded.float() - tensor.float()).abs().max().item()
                raise SystemExit(f"{name} was converted differently: the largest difference is {worst}")
            state[name].copy_(rounded)
            digest.update(name.encode())
            digest.update(rounded.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.inference_mode()
def answer(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The greedy tokens, the end of text included where it comes, and by how much each was ahead of the second best."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = []
    for logits in made.logits:
        first, second = logits[0].topk(2).values.tolist()
        margins.append(round(first - second, 6))
    return made.sequences[0, len(prompt) :].tolist(), margins


@torch.inference_mode()
def embeddings(model: Any, prompts: dict[str, list[int]]) -> list[dict[str, Any]]:
    """The mean of the last hidden states of some prompts."""
    texts = {name: prompts[name] for name in ("one token", "emoji", "chat turns")}
    texts |= {"emoji without its end": prompts["emoji"][:-1], "long": prompts["long licence"][:LONG]}
    found = []
    for name, tokens in texts.items():
        vector = model.model(torch.tensor([tokens])).last_hidden_state[0].mean(dim=0)
        found.append({"name": name, "tokens": tokens, "vector": [round(value, 6) for value in vector.tolist()]})
    return found


@torch.inference_mode()
def bf16_error(model: Any, folder: Path, answers: dict[str, dict[str, Any]]) -> float:
    """How far transformers' logits in bf16 are from its own in fp32: the mean over all of them."""
    from transformers import AutoModelForCausalLM

    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = [torch.tensor([answers[name]["prompt"] + answers[name]["output"]]) for name in TEACHERS]
    differences = [(rounded(text).logits[0].float() - model(text).logits[0]).abs() for text in texts]
    return round(float(torch.cat(differences).mean()), 6)


def main() -> None:
    torch.set_num_threads(2)
    known = find(DEFAULT_MODEL)
    assert known is not None
    folder = resolve(DEFAULT_MODEL)
    gguf = cache_dir() / "gguf" / known.gguf
    model = load(gguf)
    weights = round_as_converted(model, folder)
    rows = []
    for name, prompt in all_prompts(folder).items():
        output, margins = answer(model, prompt)
        print(f"{name}: {len(prompt)} + {len(output)} tokens, smallest margin {min(margins)}", flush=True)
        rows.append({"name": name, "prompt": prompt, "output": output, "margins": margins})
    meta = {
        "model": DEFAULT_MODEL,
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "weights_sha256": weights,
        "eos_ids": model.generation_config.eos_token_id,
        "new_tokens": NEW_TOKENS,
        "bf16_texts": TEACHERS,
        "bf16_error": bf16_error(model, folder, {row["name"]: row for row in rows}),
        "transformers": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }
    write(meta, rows, embeddings(model, {row["name"]: row["prompt"] for row in rows}))


def write(meta: dict[str, Any], answers: list[dict[str, Any]], embedded: list[dict[str, Any]]) -> None:
    """One row a line: whoever reads a diff sees which of them changed."""
    lists = {"prompts": answers, "embeddings": embedded}
    parts = [f'"meta":{json.dumps(meta)}']
    for name, rows in lists.items():
        lines = ",\n".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows)
        parts.append(f'"{name}":[\n{lines}\n]')
    (HERE / "oracle.json").write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
