"""The package and the Makefile: what a newcomer meets first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.server import clean_environment

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_package_is_typed_and_has_its_command() -> None:
    assert (ROOT / "src/penstock/py.typed").exists()
    assert PROJECT["scripts"] == {"penstock": "penstock.cli:main"}


UNSUPPORTED = "nvidia-cusparselt-cu13 0.8.1 is not supported on this platform"

# ---- the Makefile, with stand-ins for Python and penstock ----


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the Makefile with an environment that counts as installed; its `penstock` records its arguments."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    script(tmp_path / ".venv/bin/penstock", 'printf "%s\\0" "$@" > said')
    (tmp_path / ".venv/.installed").touch()
    (tmp_path / ".venv/.tools").touch()
    (tmp_path / ".venv/.triton").touch()
    (tmp_path / ".venv/.kernels").touch()
    return tmp_path


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def make(house: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKEOVERRIDES", "PROMPT", "MAKELEVEL")}
    return subprocess.run(["make", *args], cwd=house, env=env, capture_output=True, text=True, timeout=60, check=False)


def said(house: Path) -> list[str]:
    return (house / "said").read_text(encoding="utf-8").split("\0")[:-1]


@pytest.mark.parametrize(
    "prompt",
    [
        "Why is the sky blue?",
        """It's "5$" and $HOME, $(shell touch owned), `touch owned`; # \\ 100% & more""",
        "two\nlines",
        "--help",
        "Grüße, 世界",
    ],
)
def test_make_run_hands_the_prompt_over_as_it_is(house: Path, prompt: str) -> None:
    done = make(house, "run", f"PROMPT={prompt}")
    assert done.returncode == 0, done.stderr
    assert said(house) == ["run", "--", prompt]
    assert not (house / "owned").exists()


def test_make_run_asks_for_the_capital_of_france_by_default(house: Path) -> None:
    make(house, "run")
    assert said(house) == ["run", "--", "What is the capital of France?"]


def test_make_alone_lists_the_targets(house: Path) -> None:
    done = make(house)
    for target in ("setup", "run", "test", "fuzz", "lint", "format", "docs", "lock", "audit", "bench", "clean", "help"):
        assert f"make {target} " in done.stdout


@pytest.mark.parametrize("broken", ["", "ruff", "mypy", "python"])
def test_make_test_succeeds_if_style_types_and_tests_do(house: Path, broken: str) -> None:
    for name in ("ruff", "mypy", "python"):
        script(house / ".venv/bin" / name, f'echo "did {name} $*"; exit {int(name == broken)}')
    done = make(house, "test", "PYTEST_ARGS=-k cli -x")
    assert (done.returncode != 0) == bool(broken)
    if not broken:
        assert all(what in done.stdout for what in ("did ruff", "did mypy", "did python -m pytest -m not slow -k cli -x"))


def test_setup_with_an_old_python_is_refused_in_one_line(house: Path) -> None:
    (house / ".venv/.installed").unlink()
    script(house / "python3.9", 'case "$1" in -V) echo "Python 3.9.2";; *) exit 1;; esac')
    done = make(house, "setup", "PYTHON=./python3.9")
    assert done.returncode != 0
    assert "Penstock needs Python 3.11 or newer; ./python3.9 is Python 3.9.2." in done.stdout


def test_setup_without_python_says_how_to_choose_one(house: Path) -> None:
    (house / ".venv/.installed").unlink()
    done = make(house, "setup", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "'no-such-python' was not found" in done.stdout


def installed(house: Path) -> list[str]:
    return [line for line in (house / "installed").read_text(encoding="utf-8").splitlines() if "pip install" in line]


def test_setup_takes_everything_with_hashes_and_only_torch_from_its_index(house: Path) -> None:
    script(house / ".venv/bin/python", 'echo "$@" >> installed')
    (house / ".venv/.installed").unlink()
    assert make(house, "setup", "TORCH_INDEX=https://download.pytorch.org/whl/cpu").returncode == 0
    pip, pinned, torch, penstock = installed(house)
    assert pip.endswith("--require-hashes --only-binary :all: --no-deps --requirement requirements/pip.txt")
    assert pinned.endswith("--no-deps --requirement requirements/runtime.txt --requirement requirements/build.txt")
    assert "--require-hashes --only-binary :all:" in pinned
    assert torch.endswith("--index-url https://download.pytorch.org/whl/cpu --requirement requirements/torch.txt")
    assert penstock.endswith("--no-deps --no-build-isolation --editable .")
    assert "extra-index" not in "".join(installed(house))
    (house / "installed").unlink()
    assert make(house, "setup").returncode == 0
    assert not (house / "installed").exists()


@pytest.mark.parametrize("target", ["serve", "run", "setup", "bench"])
def test_what_a_user_runs_installs_no_tools_of_developers(house: Path, target: str) -> None:
    script(house / ".venv/bin/python", 'echo "$@" >> installed')
    (house / ".venv/.installed").unlink()
    (house / ".venv/.tools").unlink()
    assert make(house, target).returncode == 0
    assert "requirements/dev.txt" not in "".join(installed(house))
    script(house / ".venv/bin/ruff", "true")
    assert make(house, "format").returncode == 0
    assert installed(house)[-1].endswith("--require-hashes --only-binary :all: --no-deps --requirement requirements/dev.txt")


def test_only_the_slow_tests_install_triton(house: Path) -> None:
    script(house / ".venv/bin/python", 'echo "$@" >> installed')
    for name in ("ruff", "mypy"):
        script(house / ".venv/bin" / name, "true")
    (house / ".venv/.triton").unlink()
    assert make(house, "test").returncode == 0
    assert installed(house) == []
    assert make(house, "test-slow").returncode == 0
    (triton,) = installed(house)
    assert triton.endswith("--require-hashes --only-binary :all: --no-deps --requirement requirements/triton.txt")


PINS = ("pip.txt", "build.txt", "runtime.txt", "torch.txt")
INSTALLED_FROM = ("pyproject.toml", *(f"requirements/{name}" for name in PINS))


@pytest.mark.parametrize("file", INSTALLED_FROM)
def test_a_changed_pin_installs_again(house: Path, file: str) -> None:
    script(house / ".venv/bin/python", 'echo "$@" >> installed')
    os.utime(house / ".venv/.installed", (1, 1))
    for name in INSTALLED_FROM:
        os.utime(house / name, (0, 0))
    os.utime(house / file, (2, 2))
    assert make(house, "setup").returncode == 0
    assert len(installed(house)) == 4


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("file", ["layers.cpp", "kernels.h", "kernels.inl"])
def test_changed_kernels_are_compiled_again_and_nothing_is_installed(house: Path, file: str, compiles: bool) -> None:
    script(house / ".venv/bin/python", f'echo "$@" >> installed; {"true" if compiles else "false"}')
    source = house / "src/penstock/kernels/native" / file
    source.parent.mkdir(parents=True)
    source.touch()
    os.utime(house / ".venv/.kernels", (1, 1))
    done = make(house, "setup")
    assert done.returncode == 0
    assert ("PyTorch runs instead" in done.stdout) is not compiles
    assert (house / "installed").read_text(encoding="utf-8") == "src/penstock/kernels/build.py\n"
    assert make(house, "setup").returncode == 0  # once
    assert (house / "installed").read_text(encoding="utf-8").count("build.py") == 1


def test_setup_ends_with_an_error_if_something_is_missing(house: Path) -> None:
    script(house / ".venv/bin/python", f'case "$*" in *"pip check"*) echo "{UNSUPPORTED}\ntorch requires sympy"; exit 1;; esac')
    (house / ".venv/.installed").unlink()
    done = make(house, "setup")
    assert done.returncode != 0
    assert "torch requires sympy" in done.stdout
    assert not (house / ".venv/.installed").exists()


@pytest.mark.skipif(sys.platform != "linux" or Path("/proc/driver/nvidia/version").exists(), reason="for Linux without a GPU")
@pytest.mark.parametrize("choice, hint", [([], True), (["TORCH_INDEX=https://example.org"], False)])
def test_setup_names_the_small_pytorch_where_there_is_no_gpu(house: Path, choice: list[str], hint: bool) -> None:
    script(house / ".venv/bin/python", "")
    (house / ".venv/.installed").unlink()
    assert ("make setup TORCH_INDEX=" in make(house, "setup", *choice).stdout) == hint


def test_setup_goes_on_where_pip_only_doubts_the_platform(house: Path) -> None:
    """As it does with the default PyTorch on arm64 Linux."""
    script(house / ".venv/bin/python", f'case "$*" in *"pip check"*) echo "{UNSUPPORTED}"; exit 1;; esac')
    (house / ".venv/.installed").unlink()
    done = make(house, "setup")
    assert done.returncode == 0, done.stderr
    assert UNSUPPORTED not in done.stdout


@pytest.mark.slow
def test_the_wheel_has_all_that_penstock_needs_in_a_clean_environment(tmp_path: Path, tiny_chat_model: Path) -> None:
    """As `pipx install .` does it. The dependencies come from this environment: downloading them would take a gigabyte."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("penstock-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True, timeout=120)
    python, command = tmp_path / "clean/bin/python", tmp_path / "clean/bin/penstock"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, timeout=120)
    lent = tmp_path / "lent"
    lent.mkdir()
    for found in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "penstock" not in found.name and found.suffix != ".pth":
            (lent / found.name).symlink_to(found)
    env = clean_environment(PYTHONPATH=str(lent))
    place = [str(python), "-c", "import penstock; print(penstock.__file__)"]
    assert subprocess.run(place, env=env, capture_output=True, text=True).stdout.startswith(str(tmp_path / "clean"))
    args = ["run", "--alone", "--model", str(tiny_chat_model), "--max-tokens", "3", "Hi."]
    done = subprocess.run([str(command), *args], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    answered = subprocess.run([str(command), "doctor", "--help"], env=env, capture_output=True, timeout=60, check=False)
    assert answered.returncode == 0


@pytest.mark.slow
def test_a_machine_without_a_compiler_gets_a_wheel_that_answers_with_torch(tmp_path: Path, tiny_chat_model: Path) -> None:
    source, bare, package = tmp_path / "source", tmp_path / "bin", tmp_path / "package"
    bare.mkdir()
    for name in ("src", "tools", "requirements"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    env = clean_environment(PATH=str(bare), PYTHONPATH=str(package))
    env.pop("CXX", None)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(build, cwd=source, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert "There is no C++ compiler" in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("penstock-*-py3-none-any.whl")
    shutil.unpack_archive(wheel, package, "zip")
    command = [sys.executable, "-m", "penstock.cli"]
    args = ["run", "--alone", "--model", str(tiny_chat_model), "--max-tokens", "3", "Hi."]
    done = subprocess.run([*command, *args], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    done = subprocess.run([*command, "doctor"], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "not compiled: PyTorch computes on the CPU" in done.stdout
    assert "python -m penstock.kernels.build" in done.stdout
