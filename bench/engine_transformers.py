"""transformers on random weights of the shapes of bench/engine.py: a model alone on a device, and `generate` with a static batch.

    python bench/engine_transformers.py --shape llama-8b --device cuda --batches 1,64

Figures are generated tokens per second of a whole batch (64 prompt tokens, `--new` generated ones each), as in bench/engine.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import transformers

from engine import SHAPES, shape_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of the shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    batches, prefills = ([int(n) for n in text.split(",") if n] for text in (args.batches, args.prefill))
    model = make_model(args)
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    found = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": where,
        "shape": args.shape,
        "layers": model.config.num_hidden_layers,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "rows": [],
    }
    print(f"{args.shape}, {found['layers']} layers, transformers {transformers.__version__} on {where}", flush=True)
    cases = [(f"{count} static", count, 64, args.new) for count in batches]
    cases += [(f"prefill {length}", 1, length, 1) for length in prefills]
    for name, count, length, new in cases:
        generate(model, count, length, min(new, 4))
        times = [generate(model, count, length, new) for _ in range(args.rounds)]
        speed = (count * new if new > 1 else length) / statistics.median(times)
        found["rows"].append({"case": name, "tokens_per_s": speed, "seconds": times})
        print(f"{name:>16}: {speed:>10,.0f} tokens/s", flush=True)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    settings = shape_config(args.shape, args.layers)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings, dtype=torch.bfloat16)
    with torch.device(args.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def generate(model: torch.nn.Module, count: int, length: int, new: int) -> float:
    """Seconds until the last token is on the host."""
    ids = torch.randint(3, 1000, (count, length), device=model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        answers = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
    assert answers.cpu().shape[1] == length + new
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
