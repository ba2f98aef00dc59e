"""The studies by name; a study's module is imported when it is asked for."""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from topk_studies.engine.study import Study

PAPERS = {
    "speed": "time of a forward and backward pass against classes and k (Berrada Tables 3, 4; Garcin Figure 3)",
    "stability": "range and gradient error against temperature and precision (Berrada Table 5)",
    "noise": "accuracy under label noise (Berrada Table 1, Garcin Table 4)",
    "small-data": "accuracy on subsets of the training data (Berrada Table 2)",
    "temperature": "the smooth top-k SVM's temperature (Berrada Table 6, Figure 2)",
    "margin": "the smooth top-k SVM's margin (Berrada Tables 7, 8)",
    "noise-parameter": "the noised loss's epsilon and number of draws (Garcin Tables 2, 3, Figure 2)",
    "imbalance": "macro top-k accuracy on a long tail (Garcin Tables 5, 6, 8)",
    "spherical": "spherical losses with few and with many classes (de Brebisson, Vincent)",
    "encouraging": "cross-entropy against bonus variants (Zhao et al.)",
    "multi-crop": "averaging crops by marginals or by softmax (Berrada, appendix C)",
    "landscape": "level sets on the 2-simplex (Garcin Figures 1, 6)",
    "theory": "minimisers on known posteriors, limits, bounds and ceilings, without training",
}
OWN = {  # questions of ours, no table of a paper
    "tau": "which tau to take, by label noise and depth of the network",
    "noise-kinds": "robust losses where labels are wrong as people make them wrong",
    "rare-classes": "weights, samplers and losses for the rare classes of a long tail",
    "several-labels": "which loss to take where an image has several labels",
    "small-sets": "which loss has small prediction sets, conformal training among them",
}
STUDIES = {**PAPERS, **OWN, "compare": "which registered loss to take on your data, and how sure that is"}
ON_IMAGENET = ("small-data", "imbalance", "multi-crop")  # in their papers


class UnknownStudyError(ValueError):
    """No study has this name."""


def load_study(name: str) -> "Study":
    """The module of a study; a wrong name is an error that lists what there is."""
    if name not in STUDIES:
        close = get_close_matches(name, STUDIES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownStudyError(f"no study is called {name!r}; {hint}There are {', '.join(STUDIES)}")
    return study_of(f"topk_studies.experiments.{name.replace('-', '_')}")


def study_of(module: str) -> "Study":
    """The study in a module: its ``STUDY``, or the module itself where that offers the names of a study."""
    imported = import_module(module)
    return cast("Study", getattr(imported, "STUDY", imported))
