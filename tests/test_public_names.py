"""The public names: a name that is taken away, or added without thought, is seen here."""

import ast
import importlib
import inspect
import os
import pydoc
import subprocess
import sys
import warnings
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import topk_export
import topk_plugins
import topk_registry

ROOT = Path(__file__).parents[1]

TOP = """
    BatchLoss ChunkedUpdate ClassificationLoss CosineClassifier KSubset LabelMixture LinearSmoothTopK
    LossInfo PerturbedTopK
    PluginError SphericalLinear SphericalSGD TopKClassifier TopKHead TopKLoss TopKOutput __version__ accepted_context
    analysis conformal create_loss distributions errors fit_temperature functional get_loss_builder is_loss list_losses
    loss_info mean_over_ranks metrics normalize_classifier options refresh_plugins register_loss rows testing train
    use_backend
"""
BEFORE = """
    AmbiguousPluginError BrokenPluginError ClassificationLoss CosineClassifier Curve DisabledPluginError
    KSubset LabelMixture LinearSmoothTopK LossInfo NameTakenError PerturbedTopK PluginError RowLoss SphericalLinear
    SphericalSGD TopKClassifier TopKHead TopKLoss TopKOutput UnknownPluginError accepted_context aldr_loss backend
    create_loss fit_temperature get_loss_builder is_loss lapsum_loss ldr_loss linear_smooth_topk list_losses
    loss_info mean_over_ranks normalize_classifier perturbed_hinge_loss perturbed_topk quadratic_bound_loss
    quadratic_bound_of_sums ranking_loss refresh_plugins register_loss row_losses sigmoid_loss smooth_topk_hinge
    smooth_topk_loss soft_hinge softmax_loss sparse_topk_loss squares_loss topk_hinge_loss topk_label_margins
    topk_log_odds topk_marginals topk_margins
"""  # names of version 0.1
NAMESPACES = {
    "analysis": """
        Comparison DuplicateGroup LabelIssues Report brier_score calibration_error class_thresholds compare
        comparison_page confident_joint confused_pairs duplicate_groups holm label_issues label_log_likelihoods
        look_alikes mcnemar picture_hash reliability report report_page risk_coverage smooth_calibration_error
        top_classes topk_credits
    """,
    "conformal": """
        ClassThresholds ExchangeabilityTest LabelCounts LabelSets PredictionSets RULES SCORES Score SetCounts Thresholds
        Tree average_size best_f1 binomial_interval calibrate clustered coverage_interval coverage_law
        create_score false_negative_control false_negative_rates fit_softmax_temperature inputs_of interpolated log_odds
        marginal per_class per_group per_node probabilities rc3p register_score risk_control score_names tune
    """,
    "distributions": "KSubset",
    "errors": """
        AmbiguousPluginError BrokenPluginError ConfigError DataError DisabledPluginError FolderError Interrupted
        MissingPackageError NameTakenError NonFiniteLossError PluginError SaveError TrainError UnknownPluginError
        WorkerDiedError WrongLabelsError
    """,
    "functional": """
        linear_smooth_topk linear_soft_topk perturbed_topk smooth_topk_loss soft_hinge topk_label_margins topk_log_odds
        topk_marginals topk_margins
    """,
    "metrics": """
        GradientSparsity LabelSetMetrics MarginalCalibration SetCoverage StreamingMetric TopKAccuracy average_precision
    """,
    "options": "choice integer number numbers",
    "rows": """
        Curve RowLoss aldr_rows array_kernel lapsum_rows ldr_rows perturbed_hinge_rows quadratic_bound_of_sums
        quadratic_bound_rows ranking_rows row_losses sigmoid_rows smooth_topk_rows soft_topk_rows softmax_rows
        sparse_topk_rows squares_rows topk_hinge_rows
    """,
    "testing": """
        CheckResult ChecksFailedError LossCheck LossCheckError check_dataset check_loss check_score iter_checks
        parametrize_with_checks run_checks
    """,
    "train": "Hooks LoggedRun Logger LossSpec Run TrainConfig TrainError TrainResult Trainer check_logger",
}
LOSSES = {
    entry.attr: entry.module
    for entry in entry_points(group="topk_registry.losses")
    if entry.dist is not None and entry.dist.name == "topk-registry"
}
RENAMED = topk_registry._RENAMED


def test_the_names_of_the_package_are_these():
    assert dir(topk_registry) == sorted(TOP.split())
    assert set(NAMESPACES) == set(topk_registry._NAMESPACES)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_names_of_each_namespace_are_these(namespace):
    module = getattr(topk_registry, namespace)
    assert module is importlib.import_module(f"topk_registry.{namespace}")
    assert sorted(module.__all__) == sorted(NAMESPACES[namespace].split())
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__, f"{name} has no docstring"
        assert not inspect.isfunction(value) or value.__name__ == name, f"{name} calls itself {value.__name__}"


@pytest.mark.parametrize("name", sorted(topk_registry._HOMES))
def test_each_name_resolves_and_has_a_docstring(name):
    value = getattr(topk_registry, name)
    assert value.__doc__
    assert value is getattr(importlib.import_module(f"topk_registry.{topk_registry._HOMES[name]}"), name)


def test_functions_called_loss_take_logits_and_a_target_and_give_their_mean():
    functional = topk_registry.functional
    for name in [name for name in functional.__all__ if name.endswith("_loss")]:
        parameters = inspect.signature(getattr(functional, name)).parameters
        assert list(parameters)[:2] == ["logits", "target"]
        assert parameters["reduction"].default == "mean"


@pytest.mark.parametrize(
    ("module", "wrong", "right"),
    [
        (topk_registry, "creat_loss", "create_loss"),
        (topk_plugins, "TopKSvm", "TopKSVM"),
        (topk_export, "export_onx", "export_onnx"),
        (topk_registry.train, "TrainConfg", "TrainConfig"),
    ],
)
def test_another_name_is_an_attribute_error_that_says_what_was_meant(module, wrong, right):
    with pytest.raises(AttributeError, match=rf"no attribute '{wrong}'; did you mean '{right}'\?.* it has .*{right}"):
        getattr(module, wrong)


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_warns_and_gives_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=rf"^topk_registry\.{old} is deprecated; use ") as caught:
        found = getattr(topk_registry, old)
    assert f"topk_registry.{RENAMED[old]}" in str(caught[0].message)
    assert caught[0].filename == __file__
    home, _, name = f"topk_registry.{RENAMED[old]}".rpartition(".")
    new = getattr(importlib.import_module(home), name)
    assert old not in dir(topk_registry)
    if old == "smooth_topk_hinge":  # its default stays as it was, so that no number changes in silence
        assert inspect.signature(found).parameters["reduction"].default == "none"
        assert list(inspect.signature(found).parameters) == list(inspect.signature(new).parameters)
    else:
        assert found is new


def test_old_names_are_those_of_the_version_before():
    """No name of version 0.1 is lost: it is public still, or has a new name."""
    assert set(BEFORE.split()) - set(dir(topk_registry)) == set(RENAMED)


def imports_for_editors(module) -> dict[str, str]:
    """The home of each name that a type checker sees in a package with names on first use."""
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert module is topk_plugins or alias.asname == alias.name, "imported for editors, but not public"
                found[alias.name] = f"{node.module}" if node.level == 0 else "."
    return found


def test_editors_see_the_names_that_exist():
    homes = {name: f"topk_registry.{home}" for name, home in topk_registry._HOMES.items()}
    assert imports_for_editors(topk_registry) == homes | dict.fromkeys(topk_registry._NAMESPACES, ".")
    assert imports_for_editors(topk_plugins) == {
        name: f"topk_plugins.{home}" for name, home in topk_plugins._HOMES.items()
    }


def test_every_loss_of_ours_is_a_class_of_topk_plugins():
    assert sorted(topk_plugins.__all__) == sorted(LOSSES)
    assert dir(topk_plugins) == sorted(topk_plugins.__all__)
    for name, home in LOSSES.items():
        assert getattr(topk_plugins, name) is getattr(importlib.import_module(home), name)


PROGRAM = """
import torch
import topk_plugins
import topk_registry as tr
tr.functional.topk_marginals, tr.rows.softmax_rows, tr.__version__, topk_plugins.TopKSVM
x, y = torch.randn(2, 3), torch.tensor([0, 1])
loss = tr.create_loss("topk_svm", k=2)
loss(x, y).backward()
loss.set_epoch(3)
criterion: torch.nn.Module = loss.to("cpu")
tr.TopKHead.of_loss(loss)(x).marginals.sum()
tr.TopKClassifier(criterion, 2)(x).indices.tolist()
topk_plugins.TopKSVM(k=2)(x, y).item()
tr.creat_loss
tr.functional.topk_marginal
topk_plugins.TopKSvm
loss(x, y).backwards()
tr.TopKHead(2)(x).marginal
tr.TopKClassifier(criterion, 2)(x).index_of
topk_plugins.TopKSVM(k=2)(x, y).items()
"""
WRONG = ("creat_loss", "topk_marginal", "TopKSvm", "backwards", "marginal", "index_of", "items")


@pytest.mark.slow
def test_a_type_checker_flags_a_name_that_does_not_exist(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(f'{{"extraPaths": ["{ROOT.as_posix()}", "{(ROOT / "plugins").as_posix()}"]}}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(settings)]
    flagged(command, tmp_path)


@pytest.mark.slow
def test_mypy_flags_the_same(tmp_path, monkeypatch):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("MYPYPATH", os.pathsep.join(map(str, (ROOT, ROOT / "plugins", ROOT / "export"))))
    silent = ["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "--config-file="]
    flagged([sys.executable, "-m", "mypy", *silent, "program.py"], tmp_path)


def flagged(command, folder):
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600).stdout
    errors = [line for line in printed.splitlines() if " error: " in line and "program.py" in line]
    found = [name for name, line in zip(WRONG, errors, strict=False) if f'"{name}"' in line]
    assert (len(errors), found) == (len(WRONG), list(WRONG)), printed


def test_help_fits_on_a_few_screens():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        printed = pydoc.plain(pydoc.render_doc(topk_registry))
    assert 40 < len(printed.splitlines()) <= 150
    for name in {*topk_registry._HOMES, *topk_registry._NAMESPACES}:
        assert name in printed
    assert "topk_plugins" in printed


def test_the_example_of_the_package_runs():
    lines = inspect.getdoc(topk_registry).splitlines()
    example = [line[4:] for line in lines if line.startswith("    ") and not line.startswith("    topk_registry.")]
    names: dict[str, object] = {}
    exec("\n".join(line for line in example[: 1 + max(i for i, x in enumerate(example) if "tr." in x)]), names)
    assert names["loss"](names["logits"], names["target"]).isfinite()


def test_the_version_is_that_of_the_project():
    assert topk_registry.__version__ == version("topk-registry")


def test_the_version_of_a_checkout_that_is_not_installed(monkeypatch):
    environment = importlib.import_module("topk_registry.registry.environment")
    monkeypatch.setattr(environment, "installed_version", lambda name: None)
    assert topk_registry.__version__ == version("topk-registry")
