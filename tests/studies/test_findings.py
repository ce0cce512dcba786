"""Sentences about the results agree with the stored figures.

They stand in the catalogue and in other documents.
"""

import re
import sys
from dataclasses import replace
from statistics import mean

import pytest
from common import ROOT
from PIL import Image
from scipy.stats import ttest_ind
from tiny_study import DENSE, EWA, small_study

from studies import overview, page
from studies.__main__ import main
from studies.catalogue import STUDIES, adamw
from studies.catalogue.ensembles import PBE, RIVALS
from studies.catalogue.recipe import RECIPES, to_dense
from studies.catalogue.routers import BELOW, EQUAL
from studies.catalogue.students import DISTILLED, LONG
from studies.findings import NUMBER, problems
from studies.measure import Evaluation
from studies.outcome import Outcome
from studies.results import read
from studies.statistics import holm
from studies.study import Arm, Compared, Finding, compare
from timm_moe.analysis.info import byte_text, model_info
from timm_moe.analysis.paired import BETTER, TOO_FEW, UNCLEAR, WORSE

RESULTS = ROOT / "studies" / "results"
HALF = "dense, initial weights / 2 in the converted networks"
HALF_AND_DROPOUT = "dense, initial weights / 2, dropout 0.1"
LINEAR = compare(["linear"], BETTER, ["dense"])
STUDENTS = compare(DISTILLED.values(), WORSE, [LONG])
EWA_WORSE = compare(["EWA, linear"], WORSE, ["dense"])
STRONGER = compare(["dense, strong"], BETTER, ["dense, weak"])
STRONGER_THAN_MEDIUM = compare(["dense, strong"], BETTER, ["dense, medium"])
AS_DENSE = compare(["naive MoE", "MoE, Early EWA"], UNCLEAR, ["dense"])
V_MOE = (
    *to_dense("V-MoE, top-2", WORSE, "weak", "medium"),
    *to_dense("V-MoE, top-2", UNCLEAR, "strong"),
)
V_MOE_STRONG = (
    *to_dense("V-MoE, top-2", BETTER, "strong", figure="ece"),
    *to_dense("V-MoE, top-2", WORSE, "strong", figure="nll"),
    *to_dense("V-MoE, top-2", WORSE, "strong", figure="corrupted_top1"),
)
V_MOE_WEAK = (
    *to_dense("V-MoE, top-2", WORSE, "weak", "medium", figure="nll"),
    *to_dense("V-MoE, top-2", WORSE, "weak", "medium", figure="ece"),
)
ECE = (
    *to_dense("EWA, linear", BETTER, "weak", "medium", figure="ece"),
    *to_dense("EWA, linear", WORSE, "strong", figure="ece"),
)
AS_A_VIT = tuple(Compared(PBE, UNCLEAR, "ViT", figure) for figure in ("top1", "nll", "ece"))

EWA_TWENTY = compare(["EWA, linear"], WORSE, ["dense"])
NLL_TWENTY = compare(["EWA, linear"], WORSE, ["dense"], "nll")
ECE_TWENTY = compare(["EWA, linear"], WORSE, ["dense"], "ece")

LONGER = compare(["dense, 160 epochs"], BETTER, ["dense"])

EWA_ADAMW = compare(["EWA, linear"], UNCLEAR, ["dense"])
STRONG_ADAMW = compare(["dense, strong recipe"], WORSE, ["dense"], "nll")

#: Sentences about the results outside studies/catalogue, with their comparisons, by file and study.
SAID = {
    ("docs/results.md", "scratch"): {
        "Over five seeds it is 0.31 points worse from scratch in 30 epochs.": EWA_WORSE,
    },
    ("docs/results.md", "twenty"): {
        "is 0.37 points worse than dense training over twenty seeds": EWA_TWENTY,
        "a third more epochs of dense training gain 1.51 points.": LONGER,
        "over twenty seeds its NLL is 0.0105 worse there and its ECE 0.0038.": (
            *NLL_TWENTY,
            *ECE_TWENTY,
        ),
    },
    ("docs/results.md", "adamw"): {
        "it shows no clear difference over five seeds: +0.02 (-0.54 to +0.58).": EWA_ADAMW,
    },
    ("README.md", "adamw"): {
        "its NLL was 0.1760 worse,": STRONG_ADAMW,
        "Fine-tuning by AdamW showed no clear difference, +0.02 (-0.54 to +0.58).": EWA_ADAMW,
    },
    ("docs/ewa.md", "adamw"): {
        "nor with AdamW (-0.54 to +0.58).": EWA_ADAMW,
    },
    ("docs/pays.md", "adamw"): {
        "the strong recipe had a likelihood that was 0.1760 worse.": STRONG_ADAMW,
    },
    ("docs/vmoe.md", "adamw"): {
        "the NLL with `renorm` was 0.0132 better than with the default;": compare(
            ["V-MoE, gates renormalised"], BETTER, ["V-MoE, gates as they are"], "nll"
        ),
    },
    ("docs/results.md", "recipe"): {
        "a stronger one gains 4.00 points over the weak one, which is past its best, and 2.58 over "
        "the medium one.": (*STRONGER, *STRONGER_THAN_MEDIUM),
        "EWA's NLL is 0.1374 better under the "
        "weak recipe and 0.0774 under the medium one, where dense training is far past its best "
        "epoch.": to_dense("EWA, linear", BETTER, "weak", "medium", figure="nll"),
        "Its ECE is 0.0227 and 0.0246 better there, and 0.0075 worse under the strong one;": ECE,
        "V-MoE under the strong one: the ECE is 0.0099 better, the NLL 0.0264 worse, and it is "
        "0.36 points worse on corrupted images.": V_MOE_STRONG,
        "Under the weak and the medium one its NLL is 0.5811 and 0.2005 worse, its ECE 0.0653 and "
        "0.0182.": V_MOE_WEAK,
        "Over five seeds EWA shows no clear difference in accuracy from dense training under any "
        "of three recipes.": to_dense("EWA, linear", UNCLEAR, *RECIPES),
        "is 2.08 points worse under the weak one, without a clear difference under the strong "
        "one.": (
            *to_dense("V-MoE, top-2", UNCLEAR, "strong"),
            *to_dense("V-MoE, top-2", WORSE, "weak"),
        ),
    },
    ("docs/results.md", "finetuning"): {
        "In fine-tuning by SGD, a small one, it shows no clear difference;": compare(
            ["EWA, linear"], UNCLEAR, ["dense"]
        ),
    },
    ("docs/results.md", "confirmation"): {
        "In a long training on few images it is 0.68 points better, without a clear difference "
        "from dense training "
        "with dropout or smaller initial weights.": (
            *LINEAR,
            *compare(["linear"], UNCLEAR, ["dense, dropout 0.1", HALF]),
        ),
    },
    ("docs/results.md", "ensembles"): {
        "has better likelihood and calibration than the other tried uses of one V-MoE; a dense ViT "
        "shows no clear "
        "difference from it.": AS_A_VIT,
    },
    ("docs/results.md", "routing"): {
        "show no clear difference in accuracy from dense training, or are worse": AS_DENSE,
    },
    ("docs/results.md", "students"): {
        "students that begin from the teacher are 0.71 to 2.64 points worse than the same network "
        "trained alone": STUDENTS,
    },
    ("docs/results.md", "routers"): {
        "Soft MoE is 1.63 to 1.93 points better than top-1 and Expert Choice.": compare(
            ["Soft MoE of 8"], BETTER, ["top-1 of 8", "Expert Choice of 8"]
        ),
    },
    ("README.md", "twenty"): {
        "it was 0.37 points less accurate than dense training (95 % interval 0.09 to 0.65;": (
            EWA_TWENTY
        ),
        "over the 20 seeds its NLL is 0.0105 worse there and its ECE 0.0038.": (
            *NLL_TWENTY,
            *ECE_TWENTY,
        ),
        "0.37 points worse than dense training over 20 seeds": EWA_TWENTY,
        "and a third more epochs of dense training gained 1.51 points.": LONGER,
    },
    ("README.md", "scratch"): {
        "Over five seeds it was 0.31 worse after 30 epochs": EWA_WORSE,
    },
    ("README.md", "confirmation"): {
        "has 4,000 images of 20 classes, from scratch: EWA was 0.68 points better than dense "
        "training, dense training with dropout and half the initial weights was 1.15 better, and "
        "the two do not differ clearly.": (
            *LINEAR,
            *compare([HALF_AND_DROPOUT], BETTER, ["dense"]),
            *compare(["linear"], UNCLEAR, [HALF_AND_DROPOUT]),
        ),
        "0.68 better in the long training on 20 classes": LINEAR,
    },
    ("README.md", "finetuning"): {
        "without a clear difference in three trainings "
        "of 120 epochs and in fine-tuning by SGD": compare(["EWA, linear"], UNCLEAR, ["dense"]),
    },
    ("README.md", "recipe"): {
        "V-MoE was 2.08 and 1.99 points worse under two weaker recipes, and not clearly different "
        "under the strong one.": V_MOE,
        "That recipe itself gained 4.00 points over the weak one and 2.58 over the medium one,": (
            *STRONGER,
            *STRONGER_THAN_MEDIUM,
        ),
        "its five gave +0.32 (-0.42 to +1.07).": to_dense("EWA, linear", UNCLEAR, "strong"),
        "without a clear difference in three trainings of 120 epochs": to_dense(
            "EWA, linear", UNCLEAR, *RECIPES
        ),
        "Its likelihood (NLL) is 0.1374 better under a weak recipe and 0.0774 under a medium one, "
        "where dense training is far past its best epoch.": to_dense(
            "EWA, linear", BETTER, "weak", "medium", figure="nll"
        ),
        "Its calibration (ECE) is 0.0227 and 0.0246 better there, and 0.0075 worse under a strong "
        "one;": ECE,
        "2.08 points worse under the weak recipe, 1.99 under the medium one, without a clear "
        "difference in accuracy under the strong one;": V_MOE,
        "there its ECE is 0.0099 better, its NLL 0.0264 worse, and it is 0.36 points worse on "
        "corrupted images.": V_MOE_STRONG,
        "Under the weak and the medium one its NLL is 0.5811 and 0.2005 worse, its ECE 0.0653 and "
        "0.0182.": V_MOE_WEAK,
    },
    ("README.md", "routers"): {
        "top-1 of 8 is 1.86 points worse after 60 epochs;": compare(
            ["top-1 of 8"], WORSE, ["dense"]
        ),
        "**Soft MoE** and **sigmoid gates** show no clear difference from dense training after 60 "
        "epochs; **Expert Choice** and **fine-grained experts** are 1.39 to 2.25 points worse.": (
            *compare(EQUAL, UNCLEAR, ["dense"]),
            *compare([arm for arm in BELOW if arm != "top-1 of 8"], WORSE, ["dense"]),
        ),
    },
    ("README.md", "routing"): {
        "top-1 of 4 shows no clear difference after 30, with or without averaging.": AS_DENSE,
    },
    ("README.md", "vimoe"): {
        "experts in every block are 0.43 points worse without a shared expert, and show no clear "
        "difference with one.": (
            *compare(["no shared expert, in every block"], WORSE, ["dense, trained on"]),
            *compare(["shared expert, in every block"], UNCLEAR, ["dense, trained on"]),
        ),
    },
    ("README.md", "ensembles"): {
        "its ECE is 0.0233 to 0.0427 better than that of the V-MoE and of other ensembles made "
        "from "
        "it": compare([PBE], BETTER, RIVALS, "ece"),
        "without a clear difference from a dense ViT.": AS_A_VIT,
    },
    ("README.md", "widenet"): {
        "**WideNet** shows no clear difference from a dense ViT, in a wide interval.": compare(
            ["WideNet, 2 of 4 experts"], UNCLEAR, ["dense, blocks of their own"]
        ),
    },
    ("README.md", "students"): {
        "the network trained alone is 0.71 to 2.64 points better than the distilled students that "
        "begin from the teacher.": STUDENTS,
    },
    ("docs/ewa.md", "recipe"): {
        "the NLL was 0.1374 better under a weak one (0.0218 to 0.2529),": to_dense(
            "EWA, linear", BETTER, "weak", figure="nll"
        ),
        "and the ECE 0.0227 (0.0096 to 0.0359).": to_dense(
            "EWA, linear", BETTER, "weak", figure="ece"
        ),
        "Over five seeds there was no clear difference under three recipes (-0.91 to +1.37 in "
        "all).": to_dense("EWA, linear", UNCLEAR, *RECIPES),
        "A stronger recipe gained 4.00 points (3.34 to 4.66).": STRONGER,
        "0.0075 over five (0.0029 to 0.0121),": to_dense(
            "EWA, linear", WORSE, "strong", figure="ece"
        ),
    },
    ("docs/ewa.md", "twenty"): {
        "In our largest test, of 20 seeds, EWA was 0.37 points worse than its dense twin.": (
            EWA_TWENTY
        ),
        "**Accuracy**: 0.37 points worse over 20 seeds (0.09 to 0.65;": EWA_TWENTY,
        "dense training for a third more epochs gained 1.51 points.": LONGER,
        "the ECE was 0.0038 worse over 20 seeds (0.0019 to 0.0057)": ECE_TWENTY,
        "the NLL 0.0105 worse over 20 (0.0045 to 0.0165).": NLL_TWENTY,
    },
    ("docs/pays.md", "twenty"): {
        "EWA was 0.37 points worse than dense training (0.09 to 0.65).": EWA_TWENTY,
        "and was 0.0105 worse over twenty;": NLL_TWENTY,
        "and 0.0038 worse.": ECE_TWENTY,
        "SWA of the dense model had an NLL that was 0.0112 better than dense training's, and no "
        "clear difference in accuracy.": (
            *compare(("dense, SWA of the last 30 epochs",), BETTER, ("dense",), "nll"),
            *compare(("dense, SWA of the last 30 epochs",), UNCLEAR, ("dense",)),
        ),
        "dense training for 160 epochs in place of 120 gained 1.51 points (1.15 to 1.87).": LONGER,
    },
    ("docs/train.md", "twenty"): {
        "Over 20 seeds EWA was 0.37 points worse than dense training under a strong recipe (0.09 "
        "to 0.65;": EWA_TWENTY,
    },
    ("docs/ewa.md", "scratch"): {
        "0.31 points worse after 30 epochs (0.11 to 0.50).": EWA_WORSE,
    },
    ("docs/ewa.md", "finetuning"): {
        "**Fine-tuning**: no clear difference from dense training with SGD,": compare(
            ["EWA, linear"], UNCLEAR, ["dense"]
        ),
    },
    ("docs/ewa.md", "confirmation"): {
        "0.68 points better with 4,000 images of 20 classes (0.03 to 1.33). There dense "
        "training with dropout and smaller initial weights gave 1.15 (0.61 to 1.68), with no clear "
        "difference from EWA.": (
            *LINEAR,
            *compare([HALF_AND_DROPOUT], BETTER, ["dense"]),
            *compare(["linear"], UNCLEAR, [HALF_AND_DROPOUT]),
        ),
        "with dropout added, that training was 1.15 points better than plain dense training. EWA "
        "was 0.68 points "
        "better than plain dense training, with no clear difference from the one with dropout": (
            *compare([HALF_AND_DROPOUT], BETTER, ["dense"]),
            *LINEAR,
            *compare(["linear"], UNCLEAR, [HALF_AND_DROPOUT]),
        ),
    },
}

#: Numbers of the README that are no results.
NO_RESULTS = (
    r"version 0\.1\.0",
    r"Apache-2\.0",
    r"Python 3\.10, timm 1\.0\.28, torch 2\.10 or newer \(macOS: 2\.14\)",
    r"of timm 1\.0\.31",
    r"torch 2\.11",
    r"quartiles 1\.12 to 1\.36 and 1\.46 to 1\.84",
    r"1\.37 GB",
    r"1\.94 GB",
    r"EWA fine-tuned \+0\.45",
    r"took 17\.8 ms instead of 27\.9, those of EWA 19\.9 instead of 36\.2",  # tests/benchmarks
)
#: The papers' gains in the README's table, by model: the row of the overview that has them, or the
#: figures of another model than the study's.
PAPERS = {
    "vit_small_ewa_moe": 74.33 - 72.61,  # EWA, table 2, ViT-S on CIFAR-100
    "vit_small_moe": ("routing", "naive MoE"),
    "vmoe_b16": 83.24 - 81.35,  # pBE, table 6, B/32 on ImageNet with K = 2, as the model
    "vimoe_s14_shared": ("vimoe", "shared expert, in the last two blocks"),
    "vmoe_pbe_b32": ("ensembles", PBE),
}


def stored(name):
    return Outcome(STUDIES[name], "small", read(RESULTS / f"{name}-small.json"))


@pytest.mark.parametrize("outcome", page.stored(RESULTS), ids=lambda outcome: outcome.study.name)
def test_findings_are_what_the_results_say(outcome):
    for finding in outcome.size.findings:
        assert problems(finding, outcome) == []


@pytest.mark.parametrize(("file", "name"), SAID)
def test_what_other_documents_say_is_what_the_results_say(file, name):
    document = in_one_line(file)
    for text, compared in SAID[file, name].items():
        assert text in document
        assert problems(Finding(text, compared), stored(name)) == []


def in_one_line(file):
    """Return a document in one line, without the marks of a quotation."""
    return " ".join(re.sub(r"^> ?", "", (ROOT / file).read_text(), flags=re.MULTILINE).split())


def prose(file):
    """Return a document in one line, without code, tables and the addresses of its links."""
    text = re.sub(r"^```.*?^```", "", (ROOT / file).read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^> ?|^\|.*|`[^`]*`|\]\([^)]*\)", "", text, flags=re.MULTILINE)
    return " ".join(text.split())


def test_every_figure_of_the_readme_is_one_of_the_results():
    """A number with decimals is in a sentence of SAID, or no result: a version, a size, a cost."""
    text = prose("README.md")
    for (file, _), sentences in SAID.items():
        for sentence in sentences if file == "README.md" else ():
            text = text.replace(sentence, "")
    for pattern in NO_RESULTS:
        text, number = re.subn(pattern, "", text)
        assert number, f"{pattern} is not in the README any more"
    assert NUMBER.findall(text) == []


def test_the_readme_names_each_method_that_is_better_or_worse_than_dense_training():
    """A row "no clear difference" of one study must not hide another study's verdict."""
    said = {
        (study, compared.first, compared.verdict)
        for (file, study), sentences in SAID.items()
        if file == "README.md"
        for comparisons in sentences.values()
        for compared in comparisons
        if compared.figure in ("", "top1")
    }
    clear = {
        (row.study, row.arm, verdict)
        for row in overview.ROWS
        if (verdict := row.difference().verdict(1)) != UNCLEAR
    }
    assert len(clear) > 5
    assert clear - said == set()


@pytest.mark.ci
def test_the_costs_and_the_papers_gains_in_the_readme_are_those_of_the_models():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r"\| [^|]+ \| `\w+` \| \d", line)
    ]
    assert len(rows) == 6
    gains = {(row.study, row.arm): row.paper() for row in overview.ROWS}
    for _, name, total, deployed, memory, _, _, paper in rows:
        info = model_info(name.strip("`"), num_classes=20)
        kept = info.total if info.exported is None else info.exported
        sizes = [f"{number / 1e6:.1f} M" for number in (info.total, kept)]
        assert [total, deployed, memory] == [*sizes, byte_text(16 * info.total)]
        place = PAPERS.get(name.strip("`"))
        assert (place is None) == (not paper)
        if place:
            gain = gains[place] if isinstance(place, tuple) else place
            assert float(paper.partition(";")[0]) == pytest.approx(gain, abs=0.006)
    text = in_one_line("README.md")
    assert f"fine-tuned {gains['finetuning', 'EWA, linear']:+.2f}" in text
    for name in ("vit_small_patch16_224", "vit_base_patch16_224"):
        assert byte_text(16 * model_info(name, num_classes=20).total) in text


def test_the_recipe_for_fine_tuning_is_one():
    """On all pages, in the README's trial, and in the study of it."""
    pages = [file.read_text() for file in (ROOT / "docs").glob("*.md")]
    stated = {found for page_ in pages for found in re.findall(r"^FINETUNE=\((.*)\)$", page_, re.M)}
    (recipe,) = stated
    assert recipe.split()[: len(adamw.RECIPE)] == list(adamw.RECIPE)
    assert recipe.split()[len(adamw.RECIPE) :] == ["--warmup-epochs", "2"]
    (ours,) = re.findall(r"^RECIPE=\((.*?)\)$", (ROOT / "README.md").read_text(), re.M | re.S)
    (strong,) = re.findall(r"^STRONG=\((.*?)\)$", (ROOT / "README.md").read_text(), re.M | re.S)
    for option in re.findall(r"-\S+ [^-]\S*", recipe):
        assert option in " ".join(ours.split())
    options = re.findall(r"--[a-z-]+(?: [^-]\S*)+", " ".join(RECIPES["strong"]))
    kept = [option for option in options if "color-jitter" not in option]
    assert sorted(kept) == sorted(re.findall(r"--[a-z-]+(?: [^-]\S*)+", " ".join(strong.split())))


def test_the_picture_of_all_methods(tmp_path):
    by_paper = {(row.study, row.arm): row.paper() for row in overview.ROWS}
    assert by_paper["scratch", "EWA, linear"] == pytest.approx(75.20 - 73.93)
    assert by_paper["vimoe", "shared expert, in the last two blocks"] == pytest.approx(0.3)
    assert by_paper["ensembles", PBE] == pytest.approx(83.30 - 81.35)
    assert by_paper["recipe", "EWA, linear, strong"] is None
    overview.draw(overview.ROWS[:2], tmp_path / "methods.png")
    assert Image.open(tmp_path / "methods.png").size[0] > 600


def test_dense_training_under_weak_recipes_is_past_its_best():
    """A finding of the study recipe says so in words; the curves are in its results."""
    cost = read(RESULTS / "recipe-small.json")["cost"]
    for recipe in ("weak", "medium", "strong"):
        assert len(cost[f"{recipe}-dense"]) == 5
        curves = [
            {entry["epoch"] + 1: entry["eval_top1"] for entry in of_seed["curve"]}
            for of_seed in cost[f"{recipe}-dense"].values()
        ]
        lost = mean(curve[60] - curve[120] for curve in curves)
        assert lost < -2 if recipe == "strong" else 1 < lost < 2


def test_dense_training_at_half_of_the_epochs_is_better_than_ewa_at_the_end():
    """docs/pays.md and docs/ewa.md say so of the weak recipe."""
    results = read(RESULTS / "recipe-small.json")
    ewa = results["arms"]["EWA, linear, weak"]["figures"]
    better = []
    for seed, of_seed in results["cost"]["weak-dense"].items():
        (half,) = [entry for entry in of_seed["curve"] if entry["epoch"] == 59]
        assert half["eval_loss"] < ewa[seed]["nll"] - 0.5
        better.append(half["eval_top1"] - ewa[seed]["top1"])
    assert round(mean(better), 1) == 1.8


def test_no_difference_of_ewa_stays_clear_over_its_six_comparisons_with_dense_training():
    """README, docs/results.md and docs/ewa.md say so."""
    pairs = [
        ("scratch", "EWA, linear", "dense"),
        ("confirmation", "linear", "dense"),
        ("finetuning", "EWA, linear", "dense"),
        *(("recipe", f"EWA, linear, {recipe}", f"dense, {recipe}") for recipe in RECIPES),
    ]
    found = {
        pair: stored(pair[0]).difference(*pair[1:], stored(pair[0]).study.measure.figure("")).p
        for pair in pairs
    }
    assert sum(p < 0.05 for p in found.values()) == 2
    assert min(holm(found).values()) > 0.05


def test_few_pairs_of_twenty_favour_ewa():
    """A finding and docs/pays.md say so: 4 of 20."""
    twenty = stored("twenty")
    top1 = twenty.study.measure.figure("")
    ewa, dense = twenty.values("EWA, linear", top1), twenty.values("dense", top1)
    assert ewa.keys() == dense.keys()
    assert (sum(ewa[seed] > dense[seed] for seed in ewa), len(ewa)) == (4, 20)
    assert "Of the 20 pairs, 4 favoured EWA." in in_one_line("docs/pays.md")


def test_two_studies_of_one_setting_lie_apart():
    """A finding of study twenty says how far, and Welch's p."""
    differences = []
    for study, recipe in (("twenty", ""), ("recipe", ", strong")):
        outcome = stored(study)
        top1 = outcome.study.measure.figure("")
        ewa, dense = (outcome.values(arm + recipe, top1) for arm in ("EWA, linear", "dense"))
        differences.append([ewa[seed] - dense[seed] for seed in ewa])
    assert round(mean(differences[1]) - mean(differences[0]), 1) == 0.7
    assert round(float(ttest_ind(*differences, equal_var=False).pvalue), 2) == 0.06


def test_fine_tuning_by_sgd_ends_higher_than_by_adamw():
    """A finding of study adamw says so."""
    for study, value in (("adamw", 41.16), ("finetuning", 47.63)):
        outcome = stored(study)
        top1 = outcome.values("dense", outcome.study.measure.figure(""))
        assert round(mean(top1.values()), 2) == value


def test_four_of_six_comparisons_of_likelihood_and_calibration_stay_clear():
    """docs/ewa.md says so, and names the two of the NLL that do not."""
    recipe = stored("recipe")
    found = {
        (figure, name): recipe.difference(
            f"EWA, linear, {name}", f"dense, {name}", recipe.study.measure.figure(figure)
        ).p
        for figure in ("nll", "ece")
        for name in RECIPES
    }
    clear = {key for key, p in holm(found).items() if p < 0.05}
    assert {*found} - clear == {("nll", "weak"), ("nll", "strong")}


@pytest.mark.parametrize(
    ("study", "ewa", "p"), [("scratch", "EWA, linear", 0.24), ("confirmation", "linear", 0.18)]
)
def test_as_independent_samples_no_difference_of_ewa_is_clear(study, ewa, p):
    """docs/results.md says so, by Welch's test."""
    outcome = stored(study)
    arms = [
        list(outcome.values(arm, outcome.study.measure.figure("")).values())
        for arm in (ewa, "dense")
    ]
    assert round(float(ttest_ind(*arms, equal_var=False).pvalue), 2) == p


def test_an_ema_of_the_weights_changes_little():
    """docs/pays.md: 0.14 points at most, in seven settings."""
    settings = [
        *(
            (name, "dense, weight EMA", "dense")
            for name in ("scratch", "confirmation", "finetuning", "twenty")
        ),
        *(("recipe", f"dense, weight EMA, {recipe}", f"dense, {recipe}") for recipe in RECIPES),
    ]
    for name, arm, baseline in settings:
        outcome = stored(name)
        found = outcome.difference(arm, baseline, outcome.study.measure.figure(""))
        assert abs(found.mean) < 0.145


def test_the_last_seed_of_the_recipes_decides():
    """A finding says that EWA would be called better without it."""
    results = read(RESULTS / "recipe-small.json")
    for arm in results["arms"].values():
        arm["figures"].pop("304", None)
    four = Outcome(STUDIES["recipe"], "small", results)
    better = to_dense("EWA, linear", BETTER, "medium", "strong")
    assert problems(Finding("0.61 and 0.57", better), four) == []


def test_the_papers_recipe_hardly_trains_in_a_tenth_of_its_epochs():
    """A finding of the study nearest says so in words."""
    arms = read(RESULTS / "nearest-paper.json")["arms"].values()
    dense, ewa = ([figures["top1"] for figures in arm["figures"].values()] for arm in arms)
    assert len(dense) == len(ewa) == 3
    assert int(mean(dense)) == int(mean(ewa)) == 14
    assert round(max(ewa) - min(ewa)) == 6


def test_the_likelihood_and_calibration_of_pbe():
    for figure in ("nll", "ece"):
        compared = compare([PBE], BETTER, RIVALS, figure)
        numbers = "0.0812 to 0.0966" if figure == "nll" else "0.0233 to 0.0427"
        assert problems(Finding(numbers, compared), stored("ensembles")) == []


CASES = [
    ("1.00 points better", "EWA", BETTER, "dense", "", []),
    ("1.00 points (0.50 to 1.50)", "EWA", BETTER, "dense", "", []),
    ("+1.00 (+0.50 to +1.50)", "EWA", BETTER, "dense", "", []),
    ("1.00 worse", "dense", WORSE, "EWA", "", []),
    ("no difference", "again", UNCLEAR, "dense", "", []),
    ("no difference (-2.48 to +2.48)", "again", UNCLEAR, "dense", "", []),
    ("0.1000 worse", "EWA", WORSE, "dense", "nll", []),
    ("+3.00", "once", TOO_FEW, "dense", "", []),
    (
        "0.30, as in the paper; 1.00",
        "EWA",
        BETTER,
        "dense",
        "",
        ["0.30 is not a figure of these comparisons"],
    ),
    (
        "0.90 to 1.10",
        "EWA",
        BETTER,
        "dense",
        "",
        [f"{end} is not a figure of these comparisons" for end in ("0.90", "1.10")],
    ),
    ("better", "EWA", BETTER, "dense", "", ["EWA / dense, top-1 %: 1.00 is not in the text"]),
    ("-1.00", "EWA", BETTER, "dense", "", ["-1.00 is not a figure of these comparisons"]),
    ("", "EWA", WORSE, "dense", "", ["EWA / dense, top-1 %: better, not worse"]),
    ("", "EWA", UNCLEAR, "dense", "", ["EWA / dense, top-1 %: better, not no clear difference"]),
    ("", "again", BETTER, "dense", "", ["again / dense, top-1 %: no clear difference, not better"]),
    ("", "EWA", BETTER, "dense", "nll", ["EWA / dense, NLL: worse, not better"]),
    (
        "",
        "once",
        UNCLEAR,
        "dense",
        "",
        ["once / dense, top-1 %: no verdict from fewer than three pairs, not no clear difference"],
    ),
    ("", "ewa", BETTER, "dense", "", ["ewa / dense, top-1 %: not measured, not better"]),
]


@pytest.mark.parametrize(("text", "first", "verdict", "second", "figure", "wrong"), CASES)
def test_a_finding_that_disagrees_is_found(text, first, verdict, second, figure, wrong):
    to_dense = {
        "dense": [(0.0, 0.0)] * 3,
        "EWA": [(0.8, 0.09), (1.0, 0.10), (1.2, 0.11)],
        "again": [(-1.0, -0.1), (1.0, 0.1), (0.0, 0.0)],
        "once": [(3.0, 0.0)],
    }
    arms = {
        name: {
            "figures": {
                seed: {"top1": 20.0 + seed + top1, "nll": 3.0 - seed + nll}
                for seed, (top1, nll) in enumerate(of_arm)
            }
        }
        for name, of_arm in to_dense.items()
    }
    study = small_study(Arm("dense", DENSE), measure=Evaluation())
    finding = Finding(text, (Compared(first, verdict, second, figure),))
    assert problems(finding, Outcome(study, "small", {"arms": arms})) == wrong
    cited = replace(finding, quoted=("0.30",))
    assert "0.30" not in " ".join(problems(cited, Outcome(study, "small", {"arms": arms})))


def test_numbers_of_several_comparisons_form_a_range():
    arms = {
        name: {"figures": {str(seed): {"top1": value + seed} for seed in range(3)}}
        for name, value in (("dense", 20.0), ("EWA", 21.0), ("late", 20.5), ("early", 20.75))
    }
    arms["EWA"]["figures"]["0"]["top1"] += 0.3
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA))
    compared = compare(["late", "early", "EWA"], BETTER, ["dense"])
    assert (
        problems(
            Finding("better by 0.50 to 1.10", compared), Outcome(study, "small", {"arms": arms})
        )
        == []
    )
    assert problems(
        Finding("better by 0.50 to 0.75", compared), Outcome(study, "small", {"arms": arms})
    ) == ["EWA / dense, top-1 %: 1.10 is not in the text"]


@pytest.mark.parametrize("verdict", [BETTER, WORSE])
def test_a_finding_that_disagrees_is_reported(verdict, folder, monkeypatch, capsys):
    for name in ("images", "generated"):
        (folder / "docs" / name).mkdir(parents=True)
    monkeypatch.setattr(page, "DOCS", folder / "docs")
    monkeypatch.setattr(page, "draw", lambda *_: None)
    finding = Finding("0.68 points", compare(["linear"], verdict, ["dense"]))
    study = STUDIES["confirmation"]
    sizes = {"small": replace(study.sizes["small"], findings=(finding,))}
    monkeypatch.setattr(page, "STUDIES", {"confirmation": replace(study, sizes=sizes)})
    monkeypatch.setattr(sys, "argv", ["studies", "--report"])
    main()
    told = capsys.readouterr().err
    assert ("confirmation: linear / dense, top-1 %: better, not worse" in told) == (
        verdict == WORSE
    )
    assert "0.68 points" in (folder / "docs" / "results.md").read_text()
