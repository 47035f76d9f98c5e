"""The table of docs/choose_a_layout.md is that of the log of its plans, and its rows are as the page says."""

import dataclasses
from typing import Any

import pytest

from docs.build import choose_a_layout
from titanlite.tools.advise.search_space import GIB, Candidate


@pytest.fixture(scope="module")
def log() -> choose_a_layout.Log:
    return choose_a_layout.read_log()


def test_the_page_has_the_table_of_the_log(log):
    text = choose_a_layout.PAGE.read_text()
    assert choose_a_layout.page(text, log) == text, "run `python -m docs.build.choose_a_layout`"
    assert text.count(choose_a_layout.BEGIN) == text.count(choose_a_layout.END) == 1


def test_a_wrong_number_on_the_page_is_found(log):
    text = choose_a_layout.PAGE.read_text()
    wrong = text.replace("12,515 (11,528 to 13,230)", "12,516 (11,528 to 13,230)")
    assert text != wrong != choose_a_layout.page(wrong, log) == text


@pytest.mark.parametrize("name", choose_a_layout.ROWS)
def test_the_degrees_of_a_row_multiply_to_its_devices(name):
    row = choose_a_layout.ROWS[name]
    for mesh in (row.guides, *row.others):
        assert mesh.pp * mesh.dp * mesh.cp * mesh.tp == row.n_devices


def plan(mesh: Any, *, gib: float = 50, speed: float = 100, recommended: bool = False) -> dict[str, Any]:
    """Return a plan of 13B as the log has it, whose step takes 4 s."""
    candidate = Candidate(mesh, "1F1B", 1, 1, 1, "none")
    times = {"seconds": 400 / speed, "tokens_per_second": speed, "spread": {"network": [-0.4, 0.4]}}
    return {"row": "13B", "candidate": candidate, "bytes": gib * GIB, "is_recommended": recommended, **times}


def line(*plans: dict[str, Any]) -> str:
    return choose_a_layout.table_line("13B", dict(enumerate(plans)))


GUIDES, FSDP, CONTEXT = (choose_a_layout.mesh(**x) for x in ({"dp": 4, "tp": 2}, {"dp": 8}, {"dp": 4, "cp": 2}))


def test_the_guides_layout_is_compared_with_the_recommended_one():
    found = line(plan(GUIDES), plan(CONTEXT, speed=130), plan(FSDP, speed=125, recommended=True))
    assert "| dp_shard 4 x tp 2, AC none: 50.0 GiB, 100 (91 to 111) |" in found
    assert "| dp_shard 8, AC none: 50.0 GiB, 125 (111 to 143) | +25%, may be wrong by 0% |" in found


def test_without_a_recommended_layout_it_is_the_fastest_that_fits():
    found = line(plan(GUIDES), plan(CONTEXT, speed=130, gib=90), plan(FSDP, speed=125))
    assert "| dp_shard 8, AC none: 50.0 GiB, 125" in found


def test_what_does_not_fit_and_what_is_the_same():
    assert "AC none: does not fit, 90.0 GiB | dp_shard 8" in line(
        plan(GUIDES, gib=90), plan(GUIDES, gib=95), plan(FSDP)
    )
    assert line(plan(GUIDES), plan(FSDP, speed=99, recommended=True)).endswith("| the same |  |")
    assert line(plan(GUIDES, gib=90)).endswith("| nothing fits |  |")


def test_candidates_of_a_mesh():
    row = choose_a_layout.ROWS["13B"]
    task = choose_a_layout.task_of(row)
    found = choose_a_layout.of_mesh(task, GUIDES, "none")
    assert found
    assert all(each.mesh == GUIDES and each.checkpointing == "none" and each.compiled for each in found)
    assert [each.local_batch for each in found] == sorted((each.local_batch for each in found), reverse=True)
    tiny = dataclasses.replace(task, device=task.device.model_copy(update={"memory": GIB}))
    assert choose_a_layout.of_mesh(tiny, GUIDES, "none") == []
    assert len(choose_a_layout.of_mesh(tiny, GUIDES, "full")) == 1
