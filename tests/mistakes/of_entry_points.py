"""What begins and ends a schedule, and what is around it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import slapo
from tests.mistakes import gpt2, llama, mistake, stack
from tests.primitives.models import Stack


# --- create_schedule -----------------------------------------------------------------------------
@mistake("create_schedule")
def the_class_of_the_model():
    yield
    slapo.create_schedule(Stack)


@mistake("create_schedule")
def the_name_of_a_model():
    yield
    slapo.create_schedule("gpt2")


@mistake("create_schedule")
def a_schedule_twice(sch):
    slapo.create_schedule(sch)


@mistake("create_schedule")
def a_group_before_its_time():
    yield
    slapo.create_schedule(Stack(), group="tp")


@mistake("create_schedule")
def all_dimensions_of_a_mesh():
    mesh = slapo.init_mesh(device="cpu")
    yield
    slapo.create_schedule(Stack(), group=mesh)


@mistake("create_schedule")
def the_name_of_a_dimension():
    slapo.init_mesh(device="cpu")
    yield
    slapo.create_schedule(Stack(), group="tp")


# --- build ---------------------------------------------------------------------------------------
@mistake("build")
def the_model(sch):
    slapo.build(sch.mod)


@mistake("build")
def a_part_of_what_was_scheduled():
    sch = stack().checkpoint()
    yield sch
    slapo.build(sch["layers.0"])


@mistake("build")
def a_target_that_is_none(sch):
    slapo.build(sch, target="pytorch")


@mistake("build")
def options_without_a_target(sch):
    slapo.build(sch, loss_fn=F.mse_loss)


@mistake("build")
def a_typo_without_a_target(sch):
    slapo.build(sch, init_weight=False)


@mistake("build")
def an_option_with_a_typo():
    sch = stack()
    mesh = slapo.init_mesh(device="cpu")
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, los_fn=F.mse_loss)


@mistake("build")
def no_mesh(sch):
    slapo.build(sch, target="torch", loss_fn=F.mse_loss)


@mistake("build")
def a_mesh_of_ones_own():
    slapo.init_mesh(device="cpu")
    sch = stack()
    yield sch
    slapo.build(sch, target="torch", mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)))


@mistake("build")
def an_optimizer_in_place_of_its_maker():
    mesh = slapo.init_mesh(device="cpu")
    sch = stack()
    yield sch
    slapo.build(
        sch, target="torch", mesh=mesh, optimizer=torch.optim.SGD(sch.mod.parameters(), lr=0.1)
    )


@mistake("build")
def initial_weights_by_name(sch):
    slapo.build(sch, init_weights="normal")


@mistake("build")
def cuts_without_a_target():
    sch = stack()
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    yield sch
    slapo.build(sch)


@mistake("build")
def cuts_without_ranks_for_the_stages():
    mesh = slapo.init_mesh(device="cpu")
    sch = slapo.create_schedule(Stack(), group=mesh["tp"])
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, loss_fn=F.mse_loss)


class Scale(nn.Module):
    """Has a parameter, and nothing that would initialize it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@mistake("build")
def a_module_that_cannot_initialize_itself():
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(nn.Sequential(Scale()))
    yield sch
    slapo.build(sch)


@mistake("build")
def weights_that_nobody_gives():
    mesh = slapo.init_mesh(device="cpu")
    with slapo.init_empty_weights():
        sch = stack()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, init_weights=False)


@mistake("build", ranks=2)
def a_pipeline_without_a_loss():
    mesh = slapo.init_mesh(pp=2, device="cpu")
    sch = slapo.create_schedule(Stack(), group=mesh["tp"])
    sch.trace_until("")
    sch["layers.1"].cut_pipeline_stage()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh)


@mistake("build", ranks=2)
def a_pipeline_without_cuts():
    mesh = slapo.init_mesh(pp=2, device="cpu")
    sch = slapo.create_schedule(Stack(), group=mesh["tp"])
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, loss_fn=F.mse_loss)


@mistake("build", ranks=2)
def a_schedule_over_the_data_parallel_ranks():
    mesh = slapo.init_mesh(dp=2, device="cpu")
    sch = stack()
    yield sch
    slapo.build(sch, target="torch", mesh=mesh, loss_fn=F.mse_loss)


@mistake("build", ranks=2)
def a_column_layer_with_a_whole_bias():
    sch = stack()
    sch["layers.0.fc1"].shard("weight", axis=0)
    yield sch
    slapo.build(sch)


@mistake("build", ranks=2)
def a_bias_of_a_whole_layer():
    sch = stack()
    sch["head"].shard("bias", axis=0)
    yield sch
    slapo.build(sch)


@mistake("build", ranks=2)
def rows_of_a_table_without_a_sum():
    sch = slapo.create_schedule(nn.Sequential(nn.Embedding(8, 4)))
    sch["0"].shard("weight", axis=0)
    yield sch
    slapo.build(sch)


@mistake("build", ranks=2)
def another_schedule_on_each_rank():
    sch = stack()
    if dist.get_rank() == 0:
        sch["layers.0"].checkpoint()
    yield sch
    slapo.build(sch)


# --- Verify --------------------------------------------------------------------------------------
@mistake("Verify")
def the_model_itself(sch):
    slapo.Verify(sch.mod, torch.ones(2, 4))


@mistake("Verify")
def the_shape_of_an_input(sch):
    slapo.Verify(sch, 4)


@mistake("Verify")
def an_input_of_another_size(sch):
    with slapo.Verify(sch, torch.ones(2, 5)):
        pass


@mistake("Verify")
def an_input_by_another_name(sch):
    with slapo.Verify(sch, {"input_ids": torch.ones(2, 4)}):
        pass


@mistake("Verify")
def one_input_too_many(sch):
    with slapo.Verify(sch, (torch.ones(2, 4), torch.ones(2, 4))):
        pass


@mistake("Verify")
def another_activation():
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["1"].replace(nn.ReLU())


@mistake("Verify")
def a_cut_in_the_block():
    sch = stack()
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch.trace_until("")
        sch["layers.1"].cut_pipeline_stage()


@mistake("Verify")
def a_batch_with_its_targets():
    sch = slapo.create_schedule(gpt2())
    yield sch
    batch = ({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, torch.ones(1, 4))
    with slapo.Verify(sch, batch):
        sch["transformer.h.0"].checkpoint()


@mistake("Verify")
def ranks_that_do_not_exist():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    sch = slapo.create_schedule(Stack(), dist.group.WORLD)
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["layers.0.fc1"].shard("weight", axis=0)


@mistake("Verify", ranks=2)
def a_forgotten_sum():
    sch = stack()
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["layers.0.fc1"].shard("weight", axis=0).shard("bias", axis=0)
        sch["layers.0.fc2"].shard("weight", axis=1)


@mistake("Verify", ranks=2)
def a_forgotten_sum_of_gradients():
    sch = stack()
    yield
    with slapo.Verify(sch, torch.ones(2, 4)):
        sch["layers.1.fc1"].shard("weight", axis=0).shard("bias", axis=0)
        sch["layers.1.fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


@mistake("Verify", ranks=2)
def heads_that_are_not_divided():
    sch = slapo.create_schedule(gpt2())
    tokens = torch.arange(6).view(1, 6)
    yield
    with slapo.Verify(sch, tokens):
        attn = sch["transformer.h.0.attn"]
        attn["c_attn"].shard("weight", axis=1, blocks=3).shard("bias", axis=0, blocks=3)
        attn["c_proj"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        attn.sync("bwd_post", "all_reduce")


@mistake("Verify", ranks=2)
def fewer_key_heads_than_ranks():
    sch = slapo.create_schedule(llama(kv_heads=1))
    tokens = torch.arange(6).view(1, 6)
    yield
    with slapo.Verify(sch, tokens):
        attn = sch["model.layers.0.self_attn"]
        for name in ("q_proj", "k_proj", "v_proj"):
            attn[name].shard("weight", axis=0)
        attn["o_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        attn.sync("bwd_post", "all_reduce")


# --- register_primitive --------------------------------------------------------------------------
@mistake("register_primitive")
def without_parentheses():
    yield

    @slapo.register_primitive
    class Freeze(slapo.Primitive):
        pass


@mistake("register_primitive")
def a_class_that_is_no_primitive():
    yield

    @slapo.register_primitive()
    class Freeze:
        pass


@mistake("register_primitive")
def a_name_that_is_taken():
    yield

    @slapo.register_primitive()
    class Shard(slapo.Primitive):
        @staticmethod
        def name():
            return "shard"

        @staticmethod
        def apply(sch):
            sch.mod.requires_grad_(False)


@mistake("register_primitive")
def a_name_that_is_not_static():
    yield

    @slapo.register_primitive()
    class Freeze(slapo.Primitive):
        def name(self):
            return "freeze"

        @staticmethod
        def apply(sch):
            sch.mod.requires_grad_(False)


@mistake("register_primitive")
def a_class_without_a_name():
    yield

    @slapo.register_primitive()
    class Freeze(slapo.Primitive):
        @staticmethod
        def apply(sch):
            sch.mod.requires_grad_(False)


# --- models on meta ------------------------------------------------------------------------------
@mistake("init_empty_weights")
def a_forward_before_build():
    with slapo.init_empty_weights():
        sch = stack()
    yield sch
    sch.mod(torch.ones(2, 4))


@mistake("init_empty_weights")
def a_forward_of_transformers_before_build():
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(gpt2())
    yield sch
    sch.mod(torch.arange(6).view(1, 6))


# --- meshes and seeds ----------------------------------------------------------------------------
@mistake("init_mesh")
def more_ranks_than_processes():
    yield
    slapo.init_mesh(tp=2, device="cpu")


@mistake("init_mesh")
def a_size_of_zero():
    yield
    slapo.init_mesh(dp=0, device="cpu")


@mistake("init_mesh")
def a_size_in_quotes():
    yield
    slapo.init_mesh(tp="2", device="cpu")


@mistake("init_mesh", ranks=2)
def other_sizes_on_each_rank():
    sizes = {"tp": 2} if dist.get_rank() else {"dp": 2}
    yield
    slapo.init_mesh(**sizes, device="cpu")


@mistake("set_random_seed")
def a_seed_in_quotes():
    yield
    slapo.set_random_seed("2013")


@mistake("set_random_seed")
def a_rank_below_zero():
    yield
    slapo.set_random_seed(2013, tp_rank=-1)


@mistake("set_random_seed")
def mesh_and_ranks():
    mesh = slapo.init_mesh(device="cpu")
    yield
    slapo.set_random_seed(2013, mesh=mesh, tp_rank=0)
