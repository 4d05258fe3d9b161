"""The command line, driven as people drive it: real processes, real model, real terminals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from tests import warm
from tests.jobs import Run
from tests.server import free_port
from tests.terminal import Person

SOURCE = Path(penstock.__file__).parents[1]
QUESTION = "What is the capital of France?"
COMMANDS = [
    [],
    ["serve"],
    ["work"],
    ["flow"],
    ["drain"],
    ["batch"],
    ["chat"],
    ["ps"],
    ["network"],
    ["network", "invite"],
    ["audit"],
    ["config"],
    ["run"],
    ["models"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "show"],
    ["bench"],
    ["simulate"],
    ["doctor"],
    ["version"],
]

needs_model = pytest.mark.usefixtures("default_model_folder")


def finished(command: list[str], stdin: bytes | str = b"", **env: str) -> subprocess.CompletedProcess[str]:
    sent = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(command, input=sent, capture_output=True, env=os.environ | env, timeout=240, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def cli(*args: str, stdin: bytes | str = b"", **env: str) -> subprocess.CompletedProcess[str]:
    return finished(warm.penstock(*args), stdin, **env)


def cold_cli(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """With all that a start takes, as a person starts it."""
    return finished([sys.executable, "-m", "penstock.cli", *args], **env)


# ---- help, versions, mistakes ----


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "penstock")
def test_every_command_explains_itself(path: list[str], quickly: Run) -> None:
    for flag in ("--help", "-h"):
        code, out, err = quickly(*path, flag)
        assert code == 0
        assert out.startswith(f"Usage: {' '.join(['penstock', *path])}")
        assert err == ""


def test_help_imports_nothing_heavy() -> None:
    """So it answers in a quarter of a second; what the machine does beside it is not for a test to judge."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "penstock.cli", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    heavy = {"torch", "numpy", "rich", "pydantic", "tokenizers", "huggingface_hub", "cryptography", "msgspec", "zenoh", "asyncio"}
    assert imported.isdisjoint(heavy)


def test_without_a_command_the_help_is_shown() -> None:
    done = cold_cli()
    assert "Usage: penstock" in done.stdout + done.stderr
    assert "penstock doctor" in done.stdout + done.stderr


@pytest.mark.parametrize("args", [["--version"], ["-V"], ["version"]])
def test_the_version_is_that_of_the_package(args: list[str]) -> None:
    done = cli(*args)
    assert (done.returncode, done.stdout) == (0, f"penstock {penstock.__version__}\n")


def test_a_mistyped_command_is_answered_with_the_nearest_one() -> None:
    done = cold_cli("dcotor")
    assert done.returncode == 64
    assert done.stdout == ""
    assert "Did you mean 'doctor'?" in done.stderr


@pytest.mark.parametrize(
    "args, message",
    [
        (["run", "--no-such-option", "hi"], "--no-such-option"),
        (["run", "--top-k", "many", "hi"], "--top-k"),
        (["run", "--top-p", "3", "hi"], "--top-p: top_p = 3.0 cannot be used. Give a number above 0 to 1."),
        (["run", "--temperature", "-1", "hi"], "--temperature: temperature = -1.0 cannot be used."),
        (["run", "--max-tokens", "0", "hi"], "--max-tokens: max_tokens = 0 cannot be used."),
        (["run", "--stop", "", "hi"], "--stop"),
        (["run", "--dtype", "int8", "hi"], "'auto', 'bfloat16', 'float32'"),
        (["run", "--device", "toaster", "hi"], '--device: device = "toaster" cannot be used. Use auto, cpu, cuda,'),
        (["run", "--segments", "0-10", "hi"], "--segments: '0-10' is not a layer range."),
        (["run", "--segments", "5:5", "hi"], "--segments: The layer range 5:5 is empty"),
        (["run", "--raw", "--system", "Be brief.", "hi"], "--system: A system message needs the chat template"),
        (["run", ""], "PROMPT: It is empty."),
        (["run"], "PROMPT: It is empty."),
        (["run", "one", "two"], "two"),
        (["bench", "--tokens", "1"], "--tokens"),
        (["bench", "--wire", "--mbit", "nan"], "--mbit"),
        (["bench", "--wire", "--mbit", "inf"], "--mbit"),
    ],
)
def test_wrong_usage_is_named_and_leaves_with_64(args: list[str], message: str) -> None:
    done = cli(*args)
    assert done.returncode == 64
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_that_is_not_utf8_is_refused() -> None:
    done = cli("run", "-", stdin=b"caf\xe9")
    assert done.returncode == 64
    assert "not UTF-8 text" in done.stderr


def test_run_at_a_terminal_without_a_prompt_says_what_to_type() -> None:
    person = Person("run")
    assert person.leaves() == 64
    assert 'Try: penstock run "What is the capital of France?"' in person.screen


def test_an_unknown_model_is_two_lines_and_leaves_with_1() -> None:
    done = cold_cli("models", "show", "smolm2")
    assert done.returncode == 1
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: There is no model 'smolm2'.")
    assert hint.startswith("hint: Did you mean 'smollm2'?")


def test_a_hub_that_cannot_be_reached_costs_a_line_and_leaves_with_1(tmp_path: Path) -> None:
    """In a process of its own: what the hub's library retries, and how often, is read when it is imported."""
    hub = "http://127.0.0.1:9"
    done = cold_cli("models", "pull", "somebody/model", HF_ENDPOINT=hub, HF_HOME=str(tmp_path), PENSTOCK_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    notice, error, *hint = done.stderr.splitlines()
    assert notice == f"{hub} does not answer; only what is on this machine already is used."
    assert error.startswith("error: ")
    assert len(hint) <= 1


def test_with_penstock_debug_an_error_shows_its_traceback() -> None:
    done = cli("models", "show", "smolm2", PENSTOCK_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "UnknownModel" in done.stderr


# ---- models and doctor ----


def test_models_list_knows_the_default_model_in_an_empty_cache(tmp_path: Path) -> None:
    done = cli("models", "list", PENSTOCK_CACHE=str(tmp_path))
    assert done.returncode == 0
    assert "smollm2-135m   not fetched" in done.stdout
    listed = json.loads(cli("models", "list", "--json", PENSTOCK_CACHE=str(tmp_path)).stdout)["models"]
    assert [(m["name"], m["installed"], m["folder"]) for m in listed] == [("smollm2-135m", False, None)]


def test_models_show_does_not_start_a_download(tmp_path: Path) -> None:
    done = cli("models", "show", PENSTOCK_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "hint: Fetch it first: penstock models pull smollm2-135m" in done.stderr
    assert list(tmp_path.iterdir()) == []


@needs_model
def test_models_show_describes_the_default_model(default_model_folder: Path) -> None:
    shown = json.loads(cli("models", "show", "--json").stdout)
    assert (shown["architecture"], shown["layers"], shown["hidden"], shown["context"]) == ("llama", 30, 576, 8192)
    assert (shown["heads"], shown["kv_heads"], shown["parameters"]) == (9, 3, 134_515_008)
    assert shown["chat_template"] is True
    assert Path(shown["folder"]) == default_model_folder
    people = cli("models", "show", "smollm2").stdout
    assert "134.5 million" in people
    assert str(default_model_folder) in people


def test_a_damaged_weights_file_is_named(tmp_path: Path, default_model_folder: Path) -> None:
    (tmp_path / "config.json").write_text((default_model_folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    done = cli("models", "show", str(tmp_path))
    assert done.returncode == 1
    assert "model.safetensors is damaged" in done.stderr


@needs_model
def test_models_pull_is_instant_when_the_model_is_here(default_model_folder: Path) -> None:
    done = cli("models", "pull", "--json")
    assert json.loads(done.stdout)["folder"] == str(default_model_folder)
    assert cli("models", "pull").stdout.startswith("smollm2-135m is ready in ")


def test_doctor_checks_everything_and_finds_nothing_broken() -> None:
    done = cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["ok"] is True
    assert {"Python", "PyTorch", "GPU", "Processor", "Cores", "Memory", "Cache", "Disk", "Model"} <= {
        c["what"] for c in report["checks"]
    }
    assert all(check["verdict"] in ("good", "warning") for check in report["checks"])
    assert "✓ PyTorch" in cli("doctor").stdout


def test_doctor_leaves_with_1_and_says_what_to_do_when_the_cache_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder", encoding="utf-8")
    done = cli("doctor", PENSTOCK_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "✗ Cache" in done.stdout
    assert "→ Models are stored there" in done.stdout


def test_doctor_looks_at_the_networks_of_the_machine_and_at_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        network = {"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_PORT": str(free_port())}
        made = cli("network", "create", "home", "--node", "desk", "--listen", f"tls/0.0.0.0:{port}", **network)
        assert made.returncode == 0, made.stderr
        output = cli("doctor", **network).stdout
    assert re.search(r"✓ Network +home, as node desk; its certificate is valid until \d{4}-\d\d-\d\d\n", output)
    assert re.search(rf"✓ Listening +tls/0\.0\.0\.0:{port}; in use: by a running node", output)
    assert re.search(rf"✓ Port +{network['PENSTOCK_PORT']} is free for `penstock serve`\n", output)


def test_doctor_warns_of_a_thread_count_that_makes_no_sense() -> None:
    report = json.loads(cli("doctor", "--json", OMP_NUM_THREADS="4096").stdout)
    threads = next(check for check in report["checks"] if check["what"] == "Threads")
    assert threads["verdict"] == "warning"
    assert "OMP_NUM_THREADS=4096, more than" in threads["seen"]


def test_a_terminal_that_cannot_show_a_character_does_not_end_the_command() -> None:
    done = cli("doctor", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert " ? PyTorch" in done.stdout


# ---- run, on the real model ----


def complaints(message: str) -> list[str]:
    """What stderr says beyond the progress of work that took long, as any work may on a busy machine."""
    return [line for line in message.splitlines() if " … " not in line]


@needs_model
def test_run_answers_paris_and_nothing_else_on_stdout() -> None:
    done = cold_cli("run", "--temperature", "0", QUESTION)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert complaints(done.stderr) == []


@needs_model
def test_run_json_is_one_object_with_everything() -> None:
    done = cli("run", "--json", "--print-times", "--temperature", "0", "-", stdin=QUESTION + "\n")
    answer = json.loads(done.stdout)
    assert answer["model"] == "smollm2-135m"
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["usage"]["prompt_tokens"] > 5
    assert answer["usage"]["cached_tokens"] == 0
    assert 0 < answer["timings"]["first_token"] <= answer["timings"]["total"]
    parts = answer["timings"]["parts"]
    assert [(part["part"], part["nodes"], part["layers"]) for part in parts] == [
        ("embedding", ["local"], ""),
        ("layers", ["local"], "0:30"),
        ("head", ["local"], ""),
    ]
    assert {part["decode_passes"] for part in parts} == {len(answer["token_ids"]) - 1}
    assert all(0 < part["prefill"] < answer["timings"]["total"] for part in parts)
    summary, headings, *table = done.stderr.splitlines()[-5:]
    assert "tokens/s" in summary
    assert headings.startswith("part ")
    assert [row.split()[0] for row in table] == ["embedding", "layers", "head"]


@needs_model
def test_at_a_terminal_the_answer_is_left_on_a_clean_screen() -> None:
    person = Person("run", "--temperature", "0", QUESTION)
    person.waits_for("Loading smollm2-135m")
    assert person.leaves() == 0
    assert person.screen.rstrip("\n").endswith("The capital of France is Paris.")


def test_run_reads_the_prompt_from_stdin(tiny_chat_model: Path) -> None:
    args = ("run", "--model", str(tiny_chat_model), "--dtype", "float32", "--temperature", "0", "--max-tokens", "8")
    output = cli(*args, QUESTION).stdout
    assert cli(*args, stdin=QUESTION + "\n").stdout == cli(*args, "-", stdin=QUESTION + "\n").stdout == output != ""
    assert cli(*args, "What is the capital of Italy?").stdout != output, "the model's answer depends on the prompt"


def test_run_over_segments_gives_the_same_answer(tiny_chat_model: Path) -> None:
    sampled = ("--dtype", "float32", "--max-tokens", "24", "--temperature", "0")
    args = ("run", "--model", str(tiny_chat_model), *sampled, "Name three rivers.")
    assert cli(*args, "--segments", "0:2,2:3,3:6").stdout == cli(*args).stdout != ""


def test_run_says_when_an_answer_was_cut(tiny_chat_model: Path) -> None:
    done = cli("run", "--model", str(tiny_chat_model), "--max-tokens", "5", "Name three rivers.")
    assert complaints(done.stderr) == ["(cut off after 5 tokens; --max-tokens sets the limit)"]


def test_segments_that_do_not_cover_the_model_are_refused(tiny_chat_model: Path) -> None:
    done = cli("run", "--model", str(tiny_chat_model), "--segments", "0:2,4:6", "hi")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Segment 4:6 does not continue at layer 2.")


def test_run_raw_max_tokens_and_stop_are_obeyed(tiny_chat_model: Path) -> None:
    args = ("run", "--model", str(tiny_chat_model), "--dtype", "float32", "--temperature", "0", "--json")
    raw = json.loads(cli(*args, "--raw", "--max-tokens", "9", "The capital of France is").stdout)
    assert (raw["finish_reason"], len(raw["token_ids"])) == ("length", 9)
    chat = json.loads(cli(*args, "--max-tokens", "9", "The capital of France is").stdout)
    assert chat["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]
    stop = raw["text"][12:18]
    stops = ("--stop", stop, "--stop", "zzz")
    stopped = json.loads(cli(*args, "--raw", *stops, "The capital of France is").stdout)
    assert (stopped["text"], stopped["finish_reason"]) == (raw["text"].partition(stop)[0], "stop")


def test_a_seed_repeats_a_lively_answer(tiny_chat_model: Path) -> None:
    args = ("run", "--model", str(tiny_chat_model), "--temperature", "1.2", "--max-tokens", "16", "--dtype", "float32", "Hi.")
    once, again, other = (cli(*args, "--seed", seed).stdout for seed in ("7", "7", "8"))
    assert once == again != other


def story(model: Path) -> subprocess.Popen[bytes]:
    args = ("run", "--model", str(model), "--max-tokens", "4000", "Write a very long story about a river.")
    return subprocess.Popen(warm.penstock(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c_keeps_what_there_is_and_leaves_with_130(tiny_chat_model: Path) -> None:
    with story(tiny_chat_model) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, output = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(begun) == 20
    assert rest.endswith(b"\n")
    assert complaints(output.decode()) == []


def test_a_reader_that_has_enough_is_no_error(tiny_chat_model: Path) -> None:
    with story(tiny_chat_model) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(20)
        process.stdout.close()
        output = process.stderr.read()
        process.wait(timeout=30)
    assert complaints(output.decode()) == []
    assert process.returncode == 1


def check_bench(model: str, *args: str) -> None:
    report = json.loads(cli("bench", "--json", "--tokens", "4", *args).stdout)
    assert [r["round"]["streams"] for r in report["results"]] == [1, 8, 32, 1]
    assert all(r["tokens_per_second"] > 0 and r["first_token"] > 0 for r in report["results"])
    assert report["model"] == model


def test_bench_measures_every_round(tiny_chat_model: Path) -> None:
    check_bench(str(tiny_chat_model), "--model", str(tiny_chat_model))


@needs_model
@pytest.mark.slow
def test_bench_measures_the_default_model() -> None:
    check_bench("smollm2-135m")
