"""Installation: our wheel, an editable checkout, and a third party's plug-in, each in a throwaway environment."""

import json
import os
import shutil
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.installing import OFFLINE, PIP, ROOT, run

pytestmark = pytest.mark.slow

PACKAGES = ("topk_registry", "topk_plugins", "topk_studies", "topk_export")


def clean_environment(**variables):
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TOPK_REGISTRY_PLUGINS")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


class Environment:
    """A virtual environment that sees torch and timm through a .pth, and nothing of this checkout."""

    def __init__(self, root):
        venv.create(root, symlinks=os.name != "nt", with_pip=False)
        self.bin = root / ("Scripts" if os.name == "nt" else "bin")
        (site,) = root.glob("**/site-packages")
        others = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        (site / "zz_borrowed.pth").write_text("\n".join(others) + "\n")
        self.site = site

    def install(self, *what):
        run(*PIP, "--python", self.bin / "python", "install", *OFFLINE, *what, env=clean_environment())

    def run(self, command, *argv, check=True, **variables):
        return run(self.bin / command, *argv, check=check, cwd=self.bin.parent, env=clean_environment(**variables))

    def homes(self):
        code = f"import json; print(json.dumps([__import__(n).__file__ for n in {PACKAGES}]))"
        return [Path(p).resolve() for p in json.loads(self.run("python", "-c", code).stdout)]


def works_elsewhere(environment):
    listed = json.loads(environment.run("topk-registry", "losses", "--json").stdout)
    own = {entry["name"]: entry for entry in listed if entry["distribution"] == "topk-registry"}
    assert "topk_hinge" in own
    assert {entry["status"] for entry in own.values()} <= {"available", "broken"}
    commands = environment.run("topk-registry", "--help").stdout
    assert all(f"\n  {name} " in commands for name in ("train", "export", "serve", "study"))
    assert "broken:" not in commands
    assert environment.run("timm", "--version").stdout == environment.run("topk-registry", "--version").stdout
    assert "topk_hinge" in environment.run("python", "-m", "topk_registry", "losses").stdout


def test_the_wheel_holds_the_four_packages_and_their_data(wheel):
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert {"topk_studies/report/page.css", "topk_export/serve/page.html"} <= set(names)
    template = {name.removeprefix("topk_registry/_template/") for name in names if "/_template/" in name}
    assert {"LICENSE", ".gitignore", ".github/workflows/ci.yaml", "src/gce_loss/kernel.py"} <= template
    assert not [name for name in template if "__pycache__" in name]


def test_a_wheel_works_from_another_directory(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    environment.install(wheel)
    assert all(home.is_relative_to(environment.site.resolve()) for home in environment.homes())
    assert all((home.parent / "py.typed").exists() for home in environment.homes())
    works_elsewhere(environment)


def test_an_editable_install_works_from_another_directory(tmp_path):
    environment = Environment(tmp_path / "env")
    environment.install("--editable", ROOT)
    assert all(home.is_relative_to(ROOT) for home in environment.homes())
    works_elsewhere(environment)


@pytest.fixture(scope="module")
def installed_template(tmp_path_factory):
    """The template, built and installed into a folder of its own."""
    source = tmp_path_factory.mktemp("source") / "template"
    shutil.copytree(ROOT / "plugins/template", source)
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", source / "dist", source)
    target = tmp_path_factory.mktemp("installed")
    run(*PIP, "install", *OFFLINE, "--target", target, *(source / "dist").glob("*.whl"))
    return target


@pytest.fixture
def template(installed_template, tmp_path):
    """A copy of the installed template that a test may break."""
    return Path(shutil.copytree(installed_template, tmp_path / "site"))


def python(template, code, check=True, **variables):
    return run(sys.executable, "-c", code, check=check, env=clean_environment(PYTHONPATH=str(template), **variables))


def listed(template, **variables):
    code = "import sys; from topk_registry.cli.main import main; sys.exit(main(['losses', '--json']))"
    return {entry["name"]: entry for entry in json.loads(python(template, code, **variables).stdout)}


STEP = """
import torch, topk_registry
torch.manual_seed(0)
loss = topk_registry.create_loss("gce", q=0.5)
model = torch.nn.Linear(6, 4)
step = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = torch.randn(32, 6), torch.randint(4, (32,))
before = loss(model(x), y)
before.backward()
step.step()
after = loss(model(x), y)
assert after < before, (after, before)
print(topk_registry.loss_info("gce").status, type(loss).__module__)
"""


def test_the_template_is_listed_created_and_trained_with(template):
    entry = listed(template)["gce"]
    assert (entry["distribution"], entry["version"], entry["status"]) == ("gce-loss", "1.0.0", "available")
    assert entry["summary"] == "Box-Cox transform of the likelihood, robust to wrong labels."
    assert python(template, STEP).stdout.split() == ["loaded", "gce_loss"]


def test_the_templates_loss_trains_by_name_in_a_fresh_environment(wheel, installed_template, tmp_path):
    environment = Environment(tmp_path / "env")
    environment.install(wheel)
    shutil.copytree(installed_template, environment.site, dirs_exist_ok=True)
    small = ["--dataset-opt", "size=128", "--epochs", "1", "--model-kwargs", "width=4", "--output", tmp_path]
    shown = environment.run("timm", "train", "--loss", "gce", "--loss-opt", "q=0.5", *small).stdout
    assert "gce q=0.5 (gce-loss 1.0.0)" in shown
    assert "macro top-5" in shown


def test_a_new_plug_in_is_made_by_an_installed_wheel_and_works(wheel, tmp_path):
    environment = Environment(tmp_path / "env")
    environment.install(wheel)
    made = tmp_path / "brier-losses"
    environment.run("topk-registry", "new-plugin", made, "--author", "A. Person")
    environment.install("--editable", made)
    listed = json.loads(environment.run("topk-registry", "losses", "brier*", "--json").stdout)
    assert [(entry["name"], entry["distribution"], entry["status"]) for entry in listed] == [
        (name, "brier-losses", "available") for name in ("brier", "brier_fused", "brier_kernel")
    ]
    assert "gce" not in environment.run("topk-registry", "losses", "*gce*", "--json", check=False).stdout
    plain = {"TOPK_REGISTRY_BACKEND": "torch"}  # a fresh installation would compile every kernel
    doctor = json.loads(environment.run("topk-registry", "doctor", "--json", check=False, **plain).stdout)
    assert "1 scores and 1 columns of others" in doctor["facts"]["plug-ins"]
    assert not [line for line in doctor["problems"] if "brier" in line]
    tests = [made / "tests/test_losses.py", "-q", "-p", "no:cacheprovider", "-k", "not conformance"]
    assert " passed" in environment.run("python", "-m", "pytest", *tests, **plain).stdout


def test_the_templates_own_tests_pass(template):
    pytest.importorskip("topk_registry.testing")
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", ROOT / "plugins/template"]
    tests = ROOT / "plugins/template/tests"
    result = run(sys.executable, "-m", "pytest", *options, tests, env=clean_environment(PYTHONPATH=str(template)))
    assert " passed" in result.stdout
    assert "failed" not in result.stdout


ASK = """
import traceback, topk_registry as tr
from topk_registry.errors import BrokenPluginError
assert "gce" in tr.list_losses()
try:
    tr.create_loss("gce")
except BrokenPluginError as error:
    traceback.print_exception(error)
import math, torch
value = tr.create_loss("topk_nll", k=2)(torch.zeros(2, 4), torch.tensor([0, 1]))
assert abs(value - math.log(2)) < 1e-6  # two of four equal classes: each is in the set half the time
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import not_installed_anywhere\nGeneralisedCrossEntropy = None", "No module named 'not_installed_anywhere'"),
        ("def GeneralisedCrossEntropy():\n    raise OSError('disk full')", "failed while it built: OSError: disk full"),
        ("GeneralisedCrossEntropy = 'a string'", "a factory is a class or a function"),
    ],
)
def test_a_broken_template_breaks_nothing_else(template, source, said):
    (template / "gce_loss/__init__.py").write_text(source + "\n")
    shutil.rmtree(template / "gce_loss/__pycache__", ignore_errors=True)
    assert listed(template)["gce"]["status"] == "available"
    error = python(template, ASK).stderr
    assert said in error
    assert "loss 'gce' of gce-loss 1.0.0 (gce_loss:GeneralisedCrossEntropy)" in error
    assert "direct cause" in error


def test_a_missing_module_is_listed_as_broken(template):
    shutil.rmtree(template / "gce_loss")
    assert listed(template)["gce"]["status"] == "broken"
    assert "No module named 'gce_loss'" in python(template, ASK).stderr


CLASH = """
import topk_registry as tr
assert type(tr.create_loss("gce-loss:topk_hinge")).__name__ == "GeneralisedCrossEntropy"
assert tr.get_loss_builder("gce")
print(type(tr.create_loss("topk_hinge")).__name__)
"""


def test_a_clash_of_names_is_settled_by_the_distribution(template):
    (info,) = template.glob("*.dist-info")
    declared, group = info / "entry_points.txt", "[topk_registry.losses]\n"
    added = f"{group}topk_hinge = gce_loss:GeneralisedCrossEntropy\n"
    declared.write_text(declared.read_text().replace(group, added))
    entry = listed(template)["topk_hinge"]
    assert (entry["distribution"], entry["status"]) == ("topk-registry", "available")
    assert python(template, CLASH).stdout.strip() == "TopKHinge"
    only_theirs = listed(template, TOPK_REGISTRY_DISABLE="topk-registry:topk_hinge")["topk_hinge"]
    assert only_theirs["distribution"] == "gce-loss"


def test_a_denied_template_is_disabled(template):
    assert listed(template, TOPK_REGISTRY_DISABLE="gce-loss")["gce"]["status"] == "disabled"
