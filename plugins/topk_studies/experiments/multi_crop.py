"""Averaging over crops by top-k marginals or by softmax: Berrada et al. 2018, appendix C."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topk_registry.functional import topk_marginals
from topk_registry.metrics import TopKAccuracy
from topk_studies.engine import training
from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.settings import BUILT_IN, K
from topk_studies.engine.statistics import Claim, estimate, paired, settle
from topk_studies.engine.study import Configuration, Findings, Options, Progress, Record, Table
from topk_studies.engine.tuning import Choice
from topk_studies.engine.variants import variant_runs, variants
from topk_studies.old_trainer import Run
from topk_studies.old_trainer.engine.evaluate import Crops, readable, temperature_of
from topk_studies.old_trainer.setup.datasets import open_split
from topk_studies.old_trainer.setup.loaders import create_eval_loader
from topk_studies.report.display import commands

TAU = 0.1
TEMPERED = ("smooth_topk_svm", "topk_nll")
CROPS = 10  # corners, centre, and their mirror images
UPRIGHT = 5  # of the built-in images: mirrored, they are of no class
WAYS = {
    "centre": "the centre crop alone",
    "scores": "mean of the scores",
    "softmax": "mean of softmax",
    "tempered": "mean of softmax at the temperature of the marginals",
    "marginals": f"mean of top-{K} marginals",
}
CLAIMS = (
    ("Averaging crops beats the centre crop.", "marginals", "centre"),
    (
        "Averaging top-5 marginals predicts five classes better (Berrada, appendix C).",
        "marginals",
        "softmax",
    ),
)
Runs = dict[int, Record]  # by seed


class MultiCrop(TrainingStudy):
    NAME = "multi-crop"
    TITLE = "Multi-crop"
    QUESTION = "Does averaging top-5 marginals over crops beat averaging softmax, or the scores themselves?"
    REFERENCE = "Berrada et al. 2018, section 5.2 and appendix C"
    RUNS = "multi-crop"
    LOSSES = ("ce", "smooth_topk_svm")
    SEEDS = (0, 1, 2, 3, 4)

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        return [
            {**one, "crops": crops_of(one)}
            for loss in options.losses or self.LOSSES
            for one in variant_runs(options, loss, {"tau": TAU} if loss in TEMPERED else {}, seeds)
        ]

    def run(self, configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
        """Train, then average the crops of the test images in every way, with the weights of the best epoch."""
        from timm.models import load_checkpoint

        trained = training.train(configuration, work, progress)
        assert trained.folder is not None
        load_checkpoint(trained.model, str(trained.folder / "model_best.pth.tar"))
        temperature = temperature_of(trained.config, trained.task.criterion)
        return {"temperature": temperature, "ways": average_crops(trained, configuration, temperature)}

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        return variants(records)

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        metric = f"top{K}"
        return [
            Claim(
                text,
                paired(_scores(choice.runs, better, metric), _scores(choice.runs, worse, metric)),
                f"{choice.loss}, top-{K} by {better} less by {worse}",
                (choice,),
            )
            for text, better, worse in CLAIMS
            for choice in all_choices
        ]

    def report(self, records: Sequence[Record]) -> Findings:
        choices = self.choices(records)
        return Findings(
            tables=tuple(_table(f"Top-{k} accuracy of {_crops(records)} crops", choices, f"top{k}") for k in (K, 1)),
            notes=settle(self.claims(choices)),
            protocol=_protocol(records),
            commands=commands(self.NAME, records),
        )


def crops_of(configuration: Configuration) -> int:
    """How many crops suit the data of a run: images without mirror images have half as many."""
    return UPRIGHT if configuration["flags"].get("dataset") == BUILT_IN else CROPS


def _crops(records: Sequence[Record]) -> int:
    return records[0].configuration["crops"] if records else CROPS


@torch.inference_mode()
def average_crops(trained: Run, configuration: Configuration, temperature: float) -> dict[str, dict[str, float]]:
    """Top-1 and top-5 accuracy on the test split, in percent, for each way of averaging."""
    crops = configuration["crops"]
    config = training.data_config(trained)
    test = open_split(trained.config, configuration["test_split"], training=False)
    loader = create_eval_loader(trained.config, test, config, trained.compute, transform=Crops(config, crops))
    metrics = {way: TopKAccuracy((1, K), num_classes=trained.config.num_classes) for way in WAYS}
    trained.model.eval()
    for images, target in readable(loader):
        logits = (
            trained.model(images.to(trained.compute.device)).float().cpu().unflatten(0, (crops, -1))
        )  # [crops, B, n]
        target = target[: logits.shape[1]].cpu()
        for way, scores in averages(logits, temperature).items():
            metrics[way].update(scores, target)
    return {way: {name: 100 * value for name, value in metric.compute().items()} for way, metric in metrics.items()}


def averages(logits: Tensor, temperature: float) -> dict[str, Tensor]:
    """Return scores [B, n] that rank the classes, by each way, from the scores [crops, B, n]; crop 4 is the centre."""
    return {
        "centre": logits[4],
        "scores": logits.mean(0),
        "softmax": logits.softmax(-1).mean(0),
        "tempered": (logits / temperature).softmax(-1).mean(0),
        "marginals": topk_marginals(logits, K, temperature=temperature).mean(0),
    }


def _table(title: str, choices: Sequence[Choice], metric: str) -> Table:
    rows = tuple(
        (choice.loss, *(estimate(list(_scores(choice.runs, way, metric).values())) for way in WAYS))
        for choice in choices
    )
    note = f"Percent on the test split. {'; '.join(f'{way}: {words}' for way, words in WAYS.items())}. The paper's own "
    return Table(
        title, ("loss", *WAYS), rows, f"{note}numbers are in its appendix C.", compared=tuple(WAYS), along="row"
    )


def _scores(runs: Runs, way: str, metric: str) -> dict[int, float]:
    return {seed: record.result["ways"][way][metric] for seed, record in sorted(runs.items())}


def _protocol(records: Sequence[Record]) -> str:
    if not records:
        return ""
    flags = records[0].configuration["flags"]
    temperatures = {record.configuration["flags"]["loss"]: record.result["temperature"] for record in records}
    told = ", ".join(f"{value:g} for {loss}" for loss, value in temperatures.items())
    return (
        f"Data {flags.get('dataset') or flags.get('data_dir')}, network {flags.get('model')}, {flags.get('epochs')} "
        "epochs; the weights of the epoch that is best on the validation split. Marginals at the temperature k tau of "
        f"the loss: {told}."
    )


STUDY = MultiCrop()
