"""The rules between the options of a mixture of datasets and others."""

import re
from collections import Counter

from titanlite.config.loader import Rejections
from titanlite.config.schema import DatasetOptions, Training

MIXTURE = "training.datasets"


def mixture_rules(training: Training, changed: set[str], reject: Rejections) -> None:
    """Reject options that contradict those of a mixture, and tables that contradict each other."""
    for name in DatasetOptions.model_fields:
        if f"training.{name}" in changed:
            reject(f"training.{name}", f"{MIXTURE} names the datasets; remove one of the two", MIXTURE)
    if training.streaming:
        reject("training.streaming", f"unsupported with {MIXTURE}; set false", MIXTURE)
    datasets = training.datasets
    names = Counter(dataset.name.lower() for dataset in datasets)  # file systems and searches ignore the case
    share = next((key for key in ("weight", "tokens") if any(getattr(each, key) != -1 for each in datasets)), "")
    for number, dataset in enumerate(datasets):
        table = f"{MIXTURE}.{number}"
        if not re.fullmatch(r"[\w.-]+", dataset.name, re.ASCII):
            reject(f"{table}.name", 'expected a name of letters, digits, "_", "-" and "."', MIXTURE)
        elif names[dataset.name.lower()] > 1:
            reject(f"{table}.name", "expected another name for each dataset", MIXTURE)
        if share == "weight" and dataset.tokens != -1:
            reject(f"{table}.tokens", "this or another dataset has a weight; set one of the two in all tables", MIXTURE)
        elif share and getattr(dataset, share) == -1:
            reject(f"{table}.{share}", "other datasets have one; set it in all tables, or in none", MIXTURE)
