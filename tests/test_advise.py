"""python -m titanlite.plan --advise: which layouts are tried, how well the estimate orders them, what is written."""

import argparse
import contextlib
import io
import math
from unittest import mock

import pytest

from titanlite import plan
from titanlite.advise import Candidate, Mesh, Planned, Search, Task
from titanlite.config import load
from titanlite.config.loader import ConfigError
from titanlite.plan import __main__ as command
from titanlite.plan import advise
from titanlite.plan.find_device import find_device

H100 = find_device("h100")
GIB = 2**30


def task(flavor="llama3_8b", seq_len=8192, sequences=64, n_devices=8, **others):
    return Task(flavor, seq_len, sequences, n_devices, "h100", H100, **others)


def candidate(mesh=(1, 1, 8, 1, 1, 1), schedule="1F1B", stages=1, local=1, micro=1, mode="none", **others):
    return Candidate(Mesh(*mesh), schedule, stages, local, micro, mode, **others)


def refusal(task, candidate):
    with pytest.raises(ConfigError) as caught:
        advise.loaded(task, candidate)
    return "\n".join(caught.value.problems)


# Candidates


def test_the_degrees_of_a_mesh_multiply_to_the_devices_and_every_sequence_has_a_rank():
    found = list(advise.meshes(task(n_devices=24, sequences=48)))
    assert found
    assert len(found) == len(set(found))
    for mesh in found:
        assert mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp == 24
        assert 48 % mesh.dp == 0
        assert mesh.cp % mesh.ulysses == 0
        assert 8 % mesh.tp == 0, "inside a host"


def test_all_meshes_of_four_devices():
    degrees = {(mesh.pp, mesh.dp, mesh.cp, mesh.tp) for mesh in advise.meshes(task(n_devices=4, sequences=4))}
    assert degrees == {
        (pp, dp, cp, tp)
        for pp in (1, 2, 4)
        for dp in (1, 2, 4)
        for cp in (1, 2, 4)
        for tp in (1, 2, 4)
        if pp * dp * cp * tp == 4
    }
    assert max(mesh.dp for mesh in advise.meshes(task(n_devices=4, sequences=2))) == 2


def test_weights_are_replicated_over_whole_hosts_and_only_over_many():
    assert all(mesh.dp_replicate == 1 for mesh in advise.meshes(task(n_devices=32)))
    hybrid = [mesh for mesh in advise.meshes(task(n_devices=64)) if mesh.dp_replicate > 1]
    assert Mesh(1, 8, 8, 1, 1, 1) in hybrid
    assert all(mesh.dp_shard * mesh.cp * mesh.tp % 8 == 0 for mesh in hybrid)


def test_candidates_have_every_choice():
    found = list(advise.candidates(task(n_devices=2, sequences=32, float8=True)))
    of_pipelines = [one for one in found if one.mesh.pp == 2]
    assert {(one.schedule, one.stages) for one in of_pipelines} == {
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 4),
        ("ZBVZeroBubble", 2),
    }
    assert {one.recomputation for one in found} == {"none", "selective", "full"}
    assert {one.float8 for one in found} == {False, True}
    assert {one.local_batch for one in found if one.mesh.pp == 1} == {1, 2, 4, 8}
    assert {one.microbatch for one in of_pipelines} == {1, 2, 4}
    assert not any(one.float8 for one in advise.candidates(task(n_devices=2)))


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (candidate((1, 1, 1, 1, 1, 8)), None),
        (candidate((1, 1, 1, 8, 8, 1)), None),
        (candidate((2, 1, 4, 1, 1, 1), local=16), None),
        (candidate((2, 1, 4, 1, 1, 1), "ZBVZeroBubble", 2, 16, compiled=False), None),
        (candidate((2, 1, 4, 1, 1, 1), "ZBVZeroBubble", 2, 16), "compile.enable"),
        (candidate((2, 1, 4, 1, 1, 1), local=1), "training.local_batch_size"),
        (candidate(local=16, micro=16), "training.global_batch_size"),
        (candidate((1, 1, 1, 4, 4, 2)), None),
        (candidate((1, 1, 1, 4, 8, 2)), "parallelism.context_parallel_ulysses_degree"),
    ],
    ids=str,
)
def test_the_configs_own_rules_decide_what_is_legal(made, key):
    if key is None:
        assert advise.loaded(task(), made).config.parallelism.tensor_parallel_degree == made.mesh.tp
    else:
        assert key in refusal(task(), made)


def test_heads_that_cannot_be_shared_are_refused():
    assert "model.n_heads = 52" in refusal(task("llama_30b"), candidate((1, 1, 1, 1, 1, 8)))


def test_streams_and_sequences_are_dealt_to_odd_degrees():
    odd = task(n_devices=24, sequences=48)
    assert advise.loaded(odd, candidate((1, 1, 24, 1, 1, 1))).config.training.streaming_shards == 72


# The estimate

FACTOR = 1.25
"""How far the estimate may be from the plan, either way. It orders candidates; what is advised is planned."""


@pytest.mark.parametrize(
    ("job", "made"),
    [
        (task("llama3_1b", 2048), candidate()),
        (task("llama3_8b", 4096), candidate((1, 1, 2, 2, 1, 2), mode="full")),
        (task("llama2_7b", 2048), candidate((2, 1, 4, 1, 1, 1), local=8)),
    ],
    ids=["shard", "shard x ring x tp, full", "pipeline x shard"],
)
def test_the_estimate_is_near_the_plan(job, made):
    guess = advise.estimate(job, made)
    planned = advise.evaluate(advise.loaded(job, made), made, job.n_devices)
    assert not planned.problem
    assert guess.bytes / planned.bytes == pytest.approx(1, abs=FACTOR - 1)
    assert guess.seconds / planned.seconds == pytest.approx(1, abs=FACTOR - 1)


def test_the_estimate_knows_what_each_choice_costs():
    def of(job=task(), **others):  # noqa: B008
        return advise.estimate(job, candidate(**others))

    assert of(mode="full").bytes < of().bytes < of(compiled=False).bytes
    assert of(mode="full").seconds > of().seconds
    long = task(seq_len=2**20)
    assert of(long, mode="full").seconds > 1.15 * of(long).seconds, "attention is computed again, too"
    assert of(mesh=(1, 1, 1, 1, 1, 8), local=8, micro=8).seconds > of().seconds, "tensor parallel is waited for"
    assert of(task(float8=True), float8=True).seconds < of().seconds
    pipeline = {"mesh": (4, 1, 2, 1, 1, 1), "local": 4}
    assert of(**pipeline, schedule="Interleaved1F1B", stages=2).seconds < of(**pipeline).seconds, "a smaller bubble"


# The search, with plans that are what the estimate says, times something


def fake_evaluate(sizes=1.0, times=1.0):
    def evaluate(config, made, n_devices):
        job = TASKS[n_devices]
        guess = advise.estimate(job, made)
        seconds = guess.seconds * times
        speed = job.sequences * job.seq_len / seconds / n_devices
        shares = {"matrix products": seconds * 0.9, "links, not overlapped": seconds * 0.1}
        return Planned(
            made, round(guess.bytes * sizes), seconds, speed, 0.5, 0.1, made.mesh.cuts, 0.2 * seconds, shares
        )

    return evaluate


TASKS = {8: task(), 64: task("llama3_70b", sequences=512, n_devices=64)}


def searched(n_devices, evaluate):
    """What `advise.search` does, in this process."""
    found = Search(TASKS[n_devices])
    for _ in range(advise.ROUNDS):
        found.planned += [evaluate(config, made, n_devices) for made, config in found.next_round()]
    return found


def test_8b_on_a_host_is_sharded_and_nothing_else():
    found = searched(8, fake_evaluate())
    assert found.advised().candidate.mesh == found.usual == Mesh(1, 1, 8, 1, 1, 1)
    assert any("the common guide's layout: dp_shard 8" in line for line in advise.explain(TASKS[8], found))


def test_what_does_not_fit_is_not_advised_and_the_search_goes_on_with_leaner_ones():
    first = searched(8, fake_evaluate())
    assert first.advised().candidate.local_batch > 1
    found = searched(8, fake_evaluate(sizes=1.3))
    assert all(one.bytes <= H100.memory for one in found.best())
    assert any(one.bytes > H100.memory for one in found.planned), "the estimate was wrong, and a plan said so"
    assert found.advised().bytes <= H100.memory


def test_the_usual_layout_is_planned_too_and_the_explanation_compares_with_it():
    found = searched(64, fake_evaluate())
    assert found.usual == Mesh(4, 1, 2, 1, 1, 8)
    assert {found.usual, Mesh(1, 1, 64, 1, 1, 1)} <= {one.candidate.mesh for one in found.planned}
    text = "\n".join(advise.explain(TASKS[64], found))
    assert "gives pp 4 x dp_shard 2 x tp 8: " in text
    assert "% less" in text


def test_usual_meshes():
    assert advise.usual_mesh(task("llama2_7b", 4096, 1024)) == Mesh(1, 1, 8, 1, 1, 1)
    assert advise.usual_mesh(task(seq_len=2**20, sequences=4, n_devices=128)) == Mesh(1, 1, 1, 16, 1, 8)


def test_the_explanation_names_what_was_chosen():
    found = Search(TASKS[64])
    made = candidate((2, 1, 4, 2, 1, 4), "Interleaved1F1B", 2, 64, mode="full")
    found.planned = [fake_evaluate(sizes=0.1)(None, made, 64)]
    text = "\n".join(advise.explain(TASKS[64], found))
    for words in ("TP 4", "PP 2", "Interleaved1F1B with 2 stage(s)", "64 microbatches", "DP 4", "ring 2 x ulysses 1"):
        assert words in text
    assert "Recomputation full" in text
    assert "No TP" not in text
    bare = Search(TASKS[8])
    bare.planned = [fake_evaluate()(None, candidate(), 8)]
    text = "\n".join(advise.explain(TASKS[8], bare))
    for words in ("No TP", "No PP", "No CP", "DP 8", "No recomputation"):
        assert words in text


def test_of_equally_fast_layouts_the_usual_one_is_advised_or_that_which_is_least_on_links():
    found = Search(TASKS[8])
    found.usual = Mesh(8, 1, 1, 1, 1, 1)
    fast, lean, slow = candidate((1, 1, 4, 2, 1, 1)), candidate(), candidate((1, 1, 4, 1, 1, 2))
    found.planned = [
        Planned(fast, GIB, 10.0, 103.0, links=9.0, shares={}),
        Planned(lean, GIB, 10.2, 101.0, links=1.0, shares={}),
        Planned(slow, GIB, 11.0, 94.0, links=0.0, shares={}),
    ]
    assert [one.candidate for one in found.best()] == [fast, lean, slow]
    assert found.advised().candidate == lean
    assert "The fastest, dp_shard 4 x cp 2 (ring 2)" in advise.explain(TASKS[8], found)[-1]
    found.planned.append(Planned(usual := candidate((8, 1, 1, 1, 1, 1)), GIB, 10.29, 100.0, links=20.0, shares={}))
    assert found.advised().candidate == usual
    assert "the guide's has been trained with" in advise.explain(TASKS[8], found)[-1]


def test_a_layout_that_cannot_be_planned_is_reported():
    with mock.patch.object(plan, "make_plan", side_effect=RuntimeError("no such kernel")):
        planned = advise.evaluate(None, candidate(), 8)
    assert planned.problem == "RuntimeError: no such kernel"
    found = Search(TASKS[8])
    found.planned = [planned]
    assert found.best() == []


# What is written, and the command


def test_the_written_config_loads_and_is_planned(tmp_path):
    small = task("llama3_1b", 2048, 16, 2)
    found = Search(small)
    made = candidate((1, 1, 2, 1, 1, 1), local=2, micro=2, mode="full")
    found.planned = [advise.evaluate(advise.loaded(small, made), made, 2)]
    file = tmp_path / "best.toml"
    file.write_text(advise.toml(small, found))
    config = load([str(file)])
    assert plan.make_plan(config).worst.total == found.planned[0].bytes
    training, parallelism = config.config.training, config.config.parallelism
    assert (training.dataset, training.streaming, training.seq_len) == ("c4", True, 2048)
    assert (training.local_batch_size, training.global_batch_size) == (2, 16)
    assert parallelism.data_parallel_shard_degree == 2
    assert config.config.activation_checkpoint.mode == "full"
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert comments[0] == "# llama3_1b on 2 x h100: dp_shard 2."
    assert "--advise --gpus 2 --device h100 --model llama3_1b --seq-len 2048" in " ".join(comments)
    assert max(map(len, comments)) <= 120
    given = set(config.origins)
    assert not given & {"parallelism.tensor_parallel_degree", "training.max_norm"}, "only what differs"


def options(*arguments):
    parser = argparse.ArgumentParser()
    advise.add_options(parser)
    return parser.parse_args(["--advise", *arguments])


def test_the_batch_is_given_in_tokens():
    wanted = ("--gpus", "8", "--model", "llama3_8b", "--seq-len", "4096")
    assert advise.make_task(options(*wanted)).sequences == 1024
    assert advise.make_task(options(*wanted, "--global-batch", "110000")).sequences == 24, "for any degree of 8 devices"
    assert advise.make_task(options(*wanted, "--global-batch", "1")).sequences == 1
    assert advise.make_task(options(*wanted)).device is H100


def run(*arguments):
    """Exit status and what is said of problems."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        return command.main(list(arguments)), errors.getvalue()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--advise", "--gpus", "8", "--seq-len", "4096"], "--advise needs --model"),
        (["--advise", "--gpus", "0", "--seq-len", "4096", "--model", "debug"], "--gpus = 0: expected"),
        (["--advise", "--gpus", "8", "--seq-len", "1", "--model", "llama4"], '--model = "llama4": expected one of'),
        (["configs/debug.toml", "--advise"], "configs/debug.toml: --advise takes no config"),
        (["configs/debug.toml", "--gpus", "8"], "--gpus is read only with --advise"),
        (
            ["--advise", "--gpus", "8", "--seq-len", "8", "--model", "debug", "--device", "abacus"],
            'plan.device = "abacus": expected one of',
        ),
        (
            ["--advise", "--gpus", "8", "--seq-len", "8", "--model", "debug", "--write", "/no/such/folder/x.toml"],
            "no such folder: /no/such/folder",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options_are_refused_before_the_search(arguments, problem):
    status, said = run(*arguments)
    assert status == 2
    assert problem in said


def test_nothing_fits(capsys):
    def nothing(job, progress):
        found = Search(job)
        assert found.next_round() == []
        return found

    with mock.patch.object(advise, "search", nothing):
        assert run("--advise", "--gpus", "1", "--model", "llama3_405b", "--seq-len", "8192") == (1, "")
    said = capsys.readouterr().out
    assert "nothing fits: the leanest layout needs" in said
    assert math.isfinite(Search(task("llama3_405b", 8192, 1, 1)).leanest())
