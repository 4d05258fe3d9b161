"""`network.router`: which router a node gets, and what happens when there is none of that name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.config.network import NetworkConfig
from penstock.config.node import HostedModelConfig, NodeConfig, ServerConfig
from penstock.config.settings import load_settings
from penstock.errors import ConfigError
from penstock.network.conformance import wait_for
from penstock.network.in_process import InProcessRouter
from penstock.network.router import Router
from penstock.network.routers import GROUP, OWN, make_router
from penstock.network.zenoh.router import ZenohRouter
from penstock.node import Node

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/router.md").read_text(encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package with an entry point for a router, as pip would."""

    def install(name: str, value: str, *, package: str = "my_router", **modules: str) -> Path:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n", encoding="utf-8")
        for module, text in modules.items():
            (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    return install


def named(router: str) -> NetworkConfig:
    return NetworkConfig(router=router, name="routers")


def test_the_package_declares_its_own_routers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][GROUP] == OWN


def test_zenoh_is_the_default() -> None:
    assert NetworkConfig().router == "zenoh"
    assert isinstance(make_router(NetworkConfig(listen=("tcp/127.0.0.1:0",), open=True), "one", 1), ZenohRouter)


def test_a_name_of_no_router_is_an_error_that_lists_those_that_are_installed(package) -> None:
    package("carrier-pigeon", "pigeon:Router", pigeon="Router = None")
    with pytest.raises(ConfigError, match="'zenho': no installed package") as raised:
        make_router(named("zenho"), "one", 1)
    assert "Installed are: carrier-pigeon, in-process, zenoh." in str(raised.value)


def test_a_router_that_cannot_be_imported_is_an_error_with_the_reason(package) -> None:
    package("broken", "broken_router:Router", broken_router="import no_such_library")
    with pytest.raises(
        ConfigError, match=r"\(broken_router:Router\) cannot be loaded: ModuleNotFoundError: No module named 'no_such_library'"
    ):
        make_router(named("broken"), "one", 1)


def test_something_that_is_no_router_is_an_error_that_says_what_it_lacks(package) -> None:
    package("half", "half_router:make", half_router="def make(config, node_id, epoch):\n    return node_id")
    with pytest.raises(ConfigError, match="it has no node_id, seals, start, publish, records, send, refused, close"):
        make_router(named("half"), "one", 1)


def test_a_router_that_knows_no_streams_is_an_error_that_says_so(package) -> None:
    package(
        "old",
        "old_router:OldRouter",
        old_router="""
from penstock.network.in_process import Hub, InProcessRouter

class OldRouter(InProcessRouter):
    def __init__(self, config, node_id, epoch):
        super().__init__(Hub(), node_id)

    def send(self, node, data):
        super().send(node, data)
""",
    )
    with pytest.raises(ConfigError, match=r"\(old_router:OldRouter\) cannot be used: its send takes no stream"):
        make_router(named("old"), "one", 1)


def test_a_name_that_two_packages_use_is_an_error_that_names_both(package) -> None:
    package("zenoh", "my_zenoh:Router", my_zenoh="Router = None")
    with pytest.raises(ConfigError, match=r"my_zenoh:Router and penstock\.network\.zenoh\.router:ZenohRouter"):
        make_router(named("zenoh"), "one", 1)


def test_another_router_needs_no_addresses_and_no_certificates() -> None:
    config = NetworkConfig(router="in-process")
    assert config.enabled
    assert not NetworkConfig(router="zenoh").enabled
    assert not NetworkConfig(router="in-process", name="none").enabled
    assert isinstance(make_router(config, "one", 1), InProcessRouter)
    with pytest.raises(ConfigError, match="router = "):
        NetworkConfig(router="a/b")


@pytest.mark.parametrize("setting", [{"listen": ("tcp/127.0.0.1:0",)}, {"connect": ("tcp/127.0.0.1:1",)}, {"multicast": True}])
def test_the_in_process_router_refuses_what_it_cannot_honour(setting: dict) -> None:
    with pytest.raises(ConfigError, match=f"network.{next(iter(setting))} cannot be used with network.router = 'in-process'"):
        make_router(NetworkConfig(router="in-process", **setting), "one", 1)


def test_the_router_is_a_setting_like_others(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[network]\nrouter = "in-process"\n', encoding="utf-8")
    assert load_settings(file, {}, {}).node.network.router == "in-process"
    assert load_settings(None, {"PENSTOCK_ROUTER": "in-process"}, {}).node.network.router == "in-process"
    assert load_settings(None, {}, {"network.router": "in-process"}).node.network.router == "in-process"


def test_two_nodes_of_one_process_share_a_model_over_the_in_process_router(tiny_chat_model: Path) -> None:
    def node(name: str, layers: str, *, ends: bool) -> Node:
        return Node(
            NodeConfig(
                node_id=name,
                models=(HostedModelConfig(id=str(tiny_chat_model), layers=layers, load_ends=ends, dtype="float32"),),
                server=ServerConfig(port=0),
                network=NetworkConfig(router="in-process", name="shared"),
            )
        )

    depth = json.loads((tiny_chat_model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    with node("cellar", f"1:{depth}", ends=False), node("kitchen", "0:1", ends=True) as kitchen:
        pipe = kitchen.models[0].engine.pipe
        wait_for(pipe.is_complete, "the layers of both")
        assert [hop.node for hop in pipe.path().hops] == ["kitchen", "cellar"]


# ---- the page ----


def test_the_example_of_the_page_is_installed_found_and_passes_the_conformance_tests(package) -> None:
    router, test = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    declared = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)[1])
    [(name, value)] = declared["project"]["entry-points"][GROUP].items()
    folder = package(name, value, my_router=router, test_my_router=test)
    assert make_router(named(name), "one", 1).node_id == "one"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20


def test_the_conformance_tests_need_no_torch_and_import_no_pytest() -> None:
    program = "import sys, penstock.network.conformance; sys.exit(bool({'torch', 'numpy', 'pytest', 'zenoh'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", program], env=env, timeout=60, check=False).returncode == 0


def test_the_page_names_every_member_of_the_contract() -> None:
    members = [name for name in vars(Router) if not name.startswith("_")]
    assert [name for name in members if f"`{name}`" not in PAGE and f"`{name}(" not in PAGE] == []
