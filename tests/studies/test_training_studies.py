"""The studies that train: what they would run in either budget, and what they make of records."""

# values of tables and attributes of studies are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import random
from itertools import pairwise

import pytest

from topk_registry.train.config.arguments import parse_args
from topk_studies.engine import training
from topk_studies.engine.catalogue import STUDIES, UnknownStudyError, load_study
from topk_studies.engine.settings import RATES
from topk_studies.engine.statistics import estimate
from topk_studies.engine.store import canonical, unique
from topk_studies.engine.study import BUDGETS, Estimate, Options, Record
from topk_studies.report.cells import text

from .conftest import trained
from .records import finished

TRAINING = (
    *("noise", "small-data", "temperature", "margin", "noise-parameter", "imbalance", "spherical", "encouraging"),
    "multi-crop",
)


@pytest.fixture(scope="module")
def small():
    """The records of every training study at the small budget."""
    return {name: finished(load_study(name), Options()) for name in TRAINING}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.slow
def test_every_run_is_a_command_line_that_parses(name, budget):
    for record in finished(load_study(name), Options(budget=budget)):
        args = parse_args(training.arguments(record.configuration))
        flags = record.configuration["flags"]
        assert (args.loss, args.seed, args.lr) == (flags["loss"], flags["seed"], flags["lr"])
        assert args.loss_opt == flags.get("loss_opt", {})
        assert args.epochs == flags["epochs"]


@pytest.mark.parametrize("data", [{}, {"data_dir": "imagenet"}])
def test_the_papers_networks_are_timms(data):
    from timm.models import create_model, is_model

    from topk_studies.engine.tuning import run_of

    args = parse_args(training.arguments(run_of(Options(budget="paper", flags=data), loss="ce", seed=0, lr=0.1)))
    assert is_model(args.model)
    model = create_model(args.model, num_classes=args.num_classes, **args.model_kwargs)
    assert model.num_classes == (1000 if data else 100)
    assert args.epochs == (120 if data else 300)


def test_studies_share_their_runs(small):
    runs = {name: {canonical(record.configuration) for record in records} for name, records in small.items()}
    assert len(runs["noise"] & runs["small-data"]) == len([r for r in small["small-data"] if not _subset(r)])
    assert runs["noise"] & runs["encouraging"]
    assert runs["noise"] & runs["temperature"]
    assert runs["noise"] & runs["spherical"]


def _subset(record):
    return "subset" in record.configuration["flags"]


def test_the_small_budget_is_small(small):
    """Within an hour on two cores a quiet machine does some 400 runs of the built-in job's length."""
    unit = 8 * 5000
    runs = {canonical(r.configuration): r for records in small.values() for r in records}
    total = sum(_images(record.configuration["flags"]) for record in runs.values())
    assert total / unit < 335


def _images(flags):
    size = flags.get("dataset_opt", {}).get("size", 5000)
    if "long_tail" in flags:
        size *= 0.22  # the mean of 100^-u
    return flags["epochs"] * size * flags.get("subset", 1.0)


@pytest.mark.parametrize("name", ["noise", "small-data", "imbalance", "spherical", "encouraging"])
def test_every_loss_is_tuned_as_much(name, small):
    table = next(table for table in load_study(name).report(small[name]).tables if table.title == "What tuning chose")
    assert {row[table.columns.index("trials")] for row in table.rows} == {len(RATES)}


@pytest.mark.parametrize("name", TRAINING)
def test_a_report_is_a_function_of_the_records(name, small):
    study = load_study(name)
    found, again = study.report(small[name]), study.report(small[name])
    assert found.tables == again.tables
    assert found.notes == again.notes
    assert found.tables
    assert found.notes
    assert found.protocol
    for table in found.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert set(table.paper) | set(table.compared) <= set(table.columns)
        assert all(isinstance(text(value), str) for row in table.rows for value in row)
    assert {note.verdict for note in found.notes} <= {"agrees", "differs", "same", "open"}


@pytest.mark.parametrize("name", TRAINING)
def test_a_report_of_few_records_or_none_is_a_report_still(name, small):
    study = load_study(name)
    for records in ([], small[name][:1], small[name][:7], small[name][::3]):
        study.report(records)


@pytest.mark.parametrize("name", TRAINING)
def test_figures_can_be_drawn(name, small):
    from matplotlib.figure import Figure

    for figure in load_study(name).report(small[name]).figures:
        canvas = Figure(figsize=figure.size)
        figure.draw(canvas)
        assert any(axes.lines for axes in canvas.axes)


@pytest.mark.parametrize(("gain", "spread", "count"), [(20.0, 0.5, 5), (0.0, 0.2, 5), (0.0, 8.0, 13)])
def test_seeds_are_added_until_a_claim_is_decided(gain, spread, count):
    """By a clear difference, or by one that is surely small; the trials have a seed of their own."""
    from topk_studies.engine.tuning import TUNING_SEED

    study = load_study("small-data")
    known: dict[str, Record] = {}
    while True:
        wanted = unique(study.configurations(Options(max_seeds=13), list(known.values())))
        new = [configuration for configuration in wanted if canonical(configuration) not in known]
        if not new:
            break
        for one in new:
            draw = random.Random(canonical(one))
            value = 50 + gain * (one["flags"]["loss"] == "smooth_topk_svm") + draw.uniform(-spread, spread)
            rows = [{"top5": value, "test_top5": value, "top1": value, "test_top1": value}]
            known[canonical(one)] = trained(one, rows)
    found = study.choices(list(known.values()))
    seeds = {len(choice.runs) for choice in found if choice.flags.get("subset")}
    assert seeds == {count}
    assert all(TUNING_SEED not in choice.runs and len(choice.trials) == len(RATES) for choice in found)
    (note,) = study.report(list(known.values())).notes
    assert note.verdict == ("agrees" if gain else "same" if spread < 1 else "open")


def test_the_table_of_noise_by_hand(small):
    """Each cell: mean over the seeds of the test score at the epoch that is best on the validation split."""
    noise = load_study("noise")
    table = noise.report(small["noise"]).tables[0]
    assert [column for column in table.columns if column not in table.paper] == ["noise", *noise.LOSSES]
    assert table.paper == ("ce, paper", "smooth_topk_svm, paper")
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        assert cells["ce, paper"] == {0.0: 94.34, 0.4: 83.04, 0.8: 74.80, 1.0: 67.70}[row[0]]  # Berrada, Table 1
        for loss in noise.LOSSES:
            cell = cells[loss]
            runs = [
                record
                for record in small["noise"]
                if record.configuration["flags"]["loss"] == loss
                and record.configuration["flags"].get("label_noise", 0.0) == row[0]
            ]
            peak = {id(record): max(record.result["history"], key=lambda r: r["top5"]) for record in runs}
            trials = [record for record in runs if record.configuration["flags"]["seed"] == 0]
            best = max(trials, key=lambda record: peak[id(record)]["top5"]).configuration["flags"]
            same = [
                record
                for record in runs
                if all(record.configuration["flags"].get(name) == best.get(name) for name in ("lr", "loss_opt"))
            ]
            assert len(same) == len(noise.SEEDS)
            assert cell == estimate([peak[id(record)]["test_top5"] for record in same])


def test_on_a_tail_of_images_every_loss_warms_up_for_longer():
    images, features = (
        load_study("imbalance").configurations(Options(flags=flags), [])
        for flags in ({}, {"dataset": "topk/ambiguous"})
    )
    assert {each["flags"]["warmup_epochs"] for each in images} == {3}
    assert {each["flags"]["warmup_epochs"] for each in features} == {1}


def test_images_that_are_no_class_when_mirrored_have_five_crops():
    study = load_study("multi-crop")
    assert {each["crops"] for each in study.configurations(Options(), [])} == {5}
    photographs = Options(flags={"data_dir": "imagenet"})
    assert {each["crops"] for each in study.configurations(photographs, [])} == {10}
    assert [table.title for table in study.report(finished(study, Options())).tables] == [
        "Top-5 accuracy of 5 crops",
        "Top-1 accuracy of 5 crops",
    ]


def test_multi_crop_averages_by_hand():
    import torch

    from topk_registry.functional import topk_marginals
    from topk_studies.experiments.multi_crop import WAYS, averages

    logits = torch.randn(10, 3, 8)
    found = averages(logits, 0.5)
    assert set(found) == set(WAYS)
    torch.testing.assert_close(found["centre"], logits[4])
    torch.testing.assert_close(found["softmax"].sum(-1), torch.ones(3))
    torch.testing.assert_close(found["marginals"].sum(-1), torch.full((3,), 5.0))
    torch.testing.assert_close(found["marginals"][1], topk_marginals(logits[:, 1], 5, temperature=0.5).mean(0))


def test_multi_crop_runs_on_a_trained_model(tiny, tmp_path):
    from dataclasses import replace

    from topk_studies.experiments import multi_crop

    study = multi_crop.STUDY
    options = replace(tiny, losses=("smooth_topk_svm",))
    (configuration,) = study.configurations(options, [])
    result = study.run(configuration, tmp_path / "work", lambda share, words: None)
    assert result["temperature"] == pytest.approx(5 * multi_crop.TAU)
    assert set(result["ways"]) == set(multi_crop.WAYS)
    for way in result["ways"].values():
        assert 0 <= way["top1"] <= way["top5"] <= 100


def test_only_the_losses_that_are_asked_for_run():
    runs = finished(load_study("noise"), Options(losses=("their_loss",), seeds=(7,)))
    assert {record.configuration["flags"]["loss"] for record in runs} == {"their_loss"}
    found = load_study("noise").report(runs)
    assert found.tables[0].columns == ("noise", "their_loss")
    assert all(isinstance(row[1], Estimate) for row in found.tables[0].rows)


def test_claims_carry_the_papers_differences(small):
    notes = {note.evidence.partition(":")[0]: note.paper for note in load_study("noise").report(small["noise"]).notes}
    assert notes["noise 0, top-5 of ce less smooth_topk_svm"] == "+0.05"  # 94.34 - 94.29 of Table 1
    assert notes["noise 0.4, top-5 of smooth_topk_svm less ce"] == "+4.35"
    assert notes["noise 0.8, top-1 of smooth_topk_svm less ce"] == "+20.32"
    assert notes["noise 0.4, top-5 of noised_topk less ce"] == ""  # its numbers could not be read
    assert notes["mean over noise 0.4, 0.8, 1, top-5 of smooth_topk_svm less ce"] == "+4.70"
    assert notes["top-5 gain of smooth_topk_svm under noise 1 less that under 0"] == "+5.28"
    others = [load_study(name).report(small[name]).notes for name in ("small-data", "temperature", "margin")]
    assert [[note.paper for note in notes] for notes in others] == [["+0.76"], ["+81.32", "+0.78"], ["+0.33", ""]]


def test_spherical_papers_numbers_stand_beside_ours(small):
    table = load_study("spherical").report(small["spherical"]).tables[0]
    assert "ce, paper" in table.paper
    column = table.columns.index("ce, paper")
    assert {row[0]: row[column] for row in table.rows} == {10: 91.48, 100: 67.6}


def test_temperatures_are_in_order(small):
    table = load_study("temperature").report(small["temperature"]).tables[0]
    taus = [row[0] for row in table.rows]
    assert taus[0] == 0.0
    assert all(a < b for a, b in pairwise(taus))


@pytest.mark.parametrize("name", [name for name in TRAINING if name != "multi-crop"])
def test_what_is_measured_beyond_accuracy_is_told_at_the_chosen_epochs(name, small):
    study = load_study(name)
    plain, measured = [], []
    for record in small[name]:
        seed = record.configuration["flags"]["seed"]
        rows = [{key: x for key, x in row.items() if "set_" not in key} for row in record.result["history"]]
        plain.append(trained(record.configuration, rows))
        best = max(row[study.METRIC] for row in rows)
        quality = [{"test_set_mean_size": 3.0 + seed if row[study.METRIC] == best else 99.0} for row in rows]
        measured.append(trained(record.configuration, [row | more for row, more in zip(rows, quality, strict=True)]))
    assert "Beyond accuracy" not in [table.title for table in study.report(plain).tables]
    (table,) = [table for table in study.report(measured).tables if table.title == "Beyond accuracy"]
    assert table.columns == (study.KEY, "", "set size")
    assert len(table.rows) == len(study.choices(measured))
    seeds = range(table.rows[0][2].count)
    assert all(row[2].mean == pytest.approx(3.0 + sum(seeds) / len(seeds)) for row in table.rows)


def test_the_set_with_a_known_posterior_has_its_own_setting():
    options = Options(flags={"dataset": "topk/ambiguous"})
    for name in TRAINING[:-1]:
        for record in finished(load_study(name), options):
            flags = record.configuration["flags"]
            assert (flags["model"], flags["dataset"]) == ("topk_mlp", "topk/ambiguous")
            assert flags["dataset_opt"].items() >= {"noise": 3.0, "ambiguity": 0.1}.items()
            assert flags["epochs"] // flags.get("val_interval", 1) == 12
            assert "model_kwargs" not in flags  # the image network's are not its own
    sizes = [c["flags"]["dataset_opt"].get("families") for c in load_study("spherical").configurations(options, [])]
    assert set(sizes) == {2, None}


def test_the_study_of_tau_compares_each_value_on_two_networks_and_every_level_of_noise():
    study = load_study("tau")
    for flags, deep in ({}, 2), ({"dataset": "topk/ambiguous"}, 4):
        records = finished(study, Options(max_seeds=5, flags=flags))
        rows = study.report(records).tables[0]
        assert rows.columns == ("network, noise", "ce", "tau = 0.1", "tau = 0.3", "tau = 1")
        assert [row[0] for row in rows.rows] == [f"{n}, {x}" for x in ("0", "0.4", "0.8") for n in ("usual", "deep")]
        depths = {r.configuration["flags"].get("model_kwargs", {}).get("depth") for r in records}
        assert depths == {None, deep}
        rates = {len(choice.trials) for choice in study.choices(records)}
        assert len(rates) == 1  # every setting is tuned as much
        notes = study.report(records).notes
        assert len(notes) == 6
        assert [bool(note.paper) for note in notes] == [True, False, False] * 2
    published = study.configurations(Options(budget="paper"), [])
    assert {c["flags"].get("loss_opt", {}).get("tau") for c in published} == {None, 0.1, 0.3, 1.0}
    alone = study.configurations(Options(losses=("smooth_topk_svm",)), [])
    assert {c["flags"]["loss"] for c in alone} == {"smooth_topk_svm"}  # those that are named, without cross-entropy
    named = study.configurations(Options(flags={"model": "resnet18", "dataset": "topk/hierarchy"}), [])
    assert all("model_kwargs" not in configuration["flags"] for configuration in named)


def test_an_unknown_study_is_told_what_there_is():
    with pytest.raises(UnknownStudyError, match=r"did you mean noise\b.*There are speed"):
        load_study("noize")
    assert set(TRAINING) < set(STUDIES)


def test_a_subset_is_trained_on_for_as_many_updates():
    small_data = load_study("small-data")
    for flags in ({}, {"epochs": 30}):
        runs = small_data.configurations(Options(flags=flags), [])
        lengths = {c["flags"].get("subset", 1.0): c["flags"]["epochs"] for c in runs}
        assert lengths == {share: lengths[1.0] / share for share in (0.25, 1.0)}
        assert lengths[1.0] == flags.get("epochs", 8)


def test_tails_are_those_of_the_data():
    imbalance = load_study("imbalance")

    def tail(**options):
        flags = imbalance.configurations(Options(**options), [])[0]["flags"]
        return flags["long_tail"], flags["imbalance_factor"]

    assert tail() == ("exp", 100.0)
    assert tail(budget="paper") == ("exp", 100.0)
    assert tail(budget="paper", flags={"data_dir": "imagenet"}) == ("pareto", 256.0)
