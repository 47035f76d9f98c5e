"""The groups of ranks that a layout makes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from titanlite.config.schema import Parallelism
from titanlite.parallel import mesh
from titanlite.tools.plan.op_trace import fake_world

CPU = torch.device("cpu")
DEGREES = {
    "pipeline_parallel_degree": 8,
    "data_parallel_shard_degree": 8,
    "context_parallel_degree": 4,
    "context_parallel_ulysses_degree": 2,
    "tensor_parallel_degree": 8,
    "expert_parallel_degree": 16,
}


@pytest.fixture(autouse=True)
def no_layouts_before_and_after():
    mesh.forget_layouts()
    yield
    mesh.forget_layouts()


def test_a_rank_makes_only_the_groups_that_it_is_in():
    """Of 2,048 ranks and seven axes there are thousands of groups. All ranks wait for each other in a group that is
    made by all, and members only in others."""
    with fake_world(1234, 2048), mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        layout = mesh.build_layout(Parallelism(**DEGREES), CPU)
        groups = [call.args[0] for call in made.call_args_list]
        assert [len(group) for group in groups] == [1, 8, 32, 8, 16, 16, 2, 2]
        assert [1234 in group for group in groups] == [True] * len(groups)
        assert [call.kwargs["use_local_synchronization"] for call in made.call_args_list] == [True] * len(groups)
        assert len(dist.distributed_c10d._world.pg_map) == 9
    assert layout.mesh.shape == (8, 1, 32, 8)


def test_the_groups_are_those_of_the_mesh():
    """For each axis: the ranks that differ in its coordinate only."""
    for rank in (0, 777, 2047):
        with fake_world(rank, 2048):
            layout = mesh.build_layout(Parallelism(**DEGREES), CPU)
            for of_axes in (layout.mesh, layout.expert_mesh):
                coordinate = of_axes.get_coordinate()
                for axis, name in enumerate(of_axes.mesh_dim_names):
                    index = tuple(slice(None) if i == axis else c for i, c in enumerate(coordinate))
                    expected = of_axes.mesh[index].tolist()
                    assert dist.get_process_group_ranks(of_axes.get_group(name)) == expected
                    assert dist.get_rank(of_axes.get_group(name)) == coordinate[axis]
                    if len(expected) > 1:  # as a flight recorder shows it
                        assert of_axes.get_group(name).group_desc == f"mesh_{name}"
        mesh.forget_layouts()


def test_an_axis_of_all_ranks_has_the_default_group_but_rings_and_experts_have_their_own():
    with fake_world(1, 4):
        layout = mesh.build_layout(Parallelism(data_parallel_shard_degree=1, context_parallel_degree=4), CPU)
        assert layout.mesh.get_group("fsdp") is dist.group.WORLD
        assert layout.ring_group is not dist.group.WORLD
        assert layout.ring_group.size() == 4
        assert layout.mesh.get_group("tp") is layout.mesh.get_group("pp")
        layout = mesh.build_layout(Parallelism(data_parallel_shard_degree=4, expert_parallel_degree=4), CPU)
        assert layout.expert_mesh.get_group("ep") is not dist.group.WORLD
        assert layout.expert_mesh.get_group("efsdp").size() == 1
