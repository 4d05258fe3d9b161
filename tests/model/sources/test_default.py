"""The default model, converted for real: its tokens and its answer are those of the original."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

# Ids that another implementation of SmolLM2's tokenizer checks itself with.
AGREED = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "12345": [33, 34, 35, 36, 37],
}


@pytest.mark.parametrize("text", AGREED)
def test_the_default_model_has_the_tokens_that_another_implementation_gives(text: str, default_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    assert tokenizer.encode(text).ids == AGREED[text]


@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_france(default_model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model_folder)
    model = AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32).eval()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    answer = model.generate(asked, max_new_tokens=16, do_sample=False)[0, asked.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
