"""Torch's private parts that fivefold uses, in one place, with the versions each is for."""

import json
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # torch 2.11 to 2.13

IMPORTED_BY_OPTIMIZERS = "torch._dynamo"
"""The module that torch's optimizers import at their first use. It takes a second. (torch 2.11 to 2.13)"""


# --- meshes and groups ---------------------------------------------------------------------------------


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Neighbouring axes of a mesh as one. (`_flatten`: torch 2.11 to 2.13)"""
    return mesh[axes]._flatten("_".join(axes))


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Parts of one mesh, each of one axis, as a mesh of several. (`_concatenate`: torch 2.11 to 2.13)"""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with this `group_name`. (`_resolve_process_group`: torch 2.11 to 2.13)"""
    from torch.distributed import distributed_c10d

    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore
    return group


def unboxed_group(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator of `c10d` was given as this argument; None if it is something else.

    (`ScriptObject._type`: torch 2.11 to 2.13)
    """
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(argument)
        return group
    return None


def entered(group: dist.ProcessGroup) -> int:
    """How many collectives of a group this rank has entered; over gloo messages to one rank count too.

    (`_get_sequence_number_for_group`: torch 2.11 to 2.13)
    """
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def last_collectives() -> dict[str, dict[int, str]]:
    """The last collectives that this rank entered, of each group by its name: number and operation.

    From torch's flight recorder, which records by itself. (`_dump_fr_trace_json` for gloo, which counts in
    `op_id` what `entered` does, `_dump_nccl_trace_json` for NCCL: torch 2.11 to 2.13)
    """
    recorders = {"_dump_fr_trace_json": "op_id", "_dump_nccl_trace_json": "collective_seq_id"}
    found: dict[str, dict[int, str]] = {}
    for recorder, number in recorders.items():
        dump = getattr(torch._C._distributed_c10d, recorder, None)
        for entry in json.loads(dump()).get("entries") or [] if dump is not None else []:
            operation = str(entry["profiling_name"]).rpartition(":")[2].strip("_").removesuffix("_base")
            found.setdefault(entry["process_group"][0], {})[int(entry[number])] = operation.replace("_", "-")
    return found


FUNCTIONAL_NAMESPACE = "_c10d_functional"

functional = torch.ops._c10d_functional
"""Collectives as operators that return new tensors, on which `wait_tensor` waits. (torch 2.11 to 2.13)

    all_reduce(x, "sum", group name)
    all_gather_into_tensor(x, ranks, group name)
    reduce_scatter_tensor(x, "sum", ranks, group name)
    all_to_all_single(x, rows received of each rank, rows sent to each, group name)
"""


# --- many tensors at once ------------------------------------------------------------------------------


def norm_each(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The 2-norm of each tensor, [tensors] computed in `dtype`. (`_foreach_norm`: torch 2.11 to 2.13)"""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype))


def scale_each(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor in place. (`_foreach_mul_`: torch 2.11 to 2.13)"""
    torch._foreach_mul_(tensors, factor)


def add_each(tensors: list[Tensor], others: list[Tensor], factor: float = 1.0) -> None:
    """Add to each tensor its other times a factor, in place. (`_foreach_add_`: torch 2.11 to 2.13)"""
    torch._foreach_add_(tensors, others, alpha=factor)


def copy_each(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy into each tensor its source. (`_foreach_copy_`: torch 2.11 to 2.13)"""
    torch._foreach_copy_(tensors, sources)


def move_each(tensors: list[Tensor], ends: list[Tensor], share: float) -> None:
    """Move each tensor this share of the way to its end, in place. (`_foreach_lerp_`: torch 2.11 to 2.13)"""
    torch._foreach_lerp_(tensors, ends, share)


# --- kernels -------------------------------------------------------------------------------------------

HEAVY_KERNELS = frozenset(
    {
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""The operators of grouped matrix products, and of attention on each kind of device. (torch 2.11 to 2.13)"""


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention on a CPU, with how much it counts.

    (`_scaled_dot_product_flash_attention_for_cpu`: torch 2.11 to 2.13)

    query    [B, H, Q, D]; key, value [B, H, T, D]
    returns  the result [B, H, Q, D], and the log-sum-exp of the scores [B, H, Q]
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    return out, lse


def cpu_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of `cpu_attention`, which made `out` and `lse`.

    (`_scaled_dot_product_flash_attention_for_cpu_backward`: torch 2.11 to 2.13)
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads: tuple[Tensor, Tensor, Tensor] = kernel(grad, query, key, value, out, lse, 0.0, causal)
    return grads


def gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    longest: tuple[int, int],
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention inside sequences of many lengths, in 16 bits on a CUDA GPU, with how much it counts.

    (`_flash_attention_forward`: torch 2.11 to 2.13)

    query                [Q, H, D]; key, value [T, K, D] with K dividing H
    of_queries, of_keys  [N + 1] int32: where each sequence begins among queries and among keys
    longest              no sequence has more queries, and more keys
    returns              the result [Q, H, D], and the log-sum-exp of the scores [H, Q]
    """
    kernel = torch.ops.aten._flash_attention_forward
    out, lse, *_ = kernel(query, key, value, of_queries, of_keys, *longest, 0.0, causal, False)
    return out, lse


def gpu_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    longest: tuple[int, int],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of `gpu_attention`, which made `out` and `lse`.

    (`_flash_attention_backward`: torch 2.11 to 2.13)
    """
    kernel = torch.ops.aten._flash_attention_backward
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
    unused = torch.empty(0, device=query.device)
    sequences = (of_queries, of_keys, *longest)
    grads: tuple[Tensor, Tensor, Tensor] = kernel(
        grad, query, key, value, out, lse, *sequences, 0.0, causal, seed, unused
    )
    return grads


def has_cudnn_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `cudnn_attention` takes such tensors, and is what torch's own attention would choose.

    Torch's rule (a public function) looks at shapes, switches and determinism. It allows heads of which there
    are no gradients, and GPUs on which torch takes another kernel first: all but Hopper and large Blackwells.
    """
    if query.device.type != "cuda" or query.shape[-1] > 128:
        return False
    if torch.cuda.get_device_capability(query.device) not in ((9, 0), (10, 0)):
        return False
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, True)
    return bool(torch.backends.cuda.can_use_cudnn_attention(asked))


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention by cuDNN's kernel, in 16 bits, with how much it counts.

    (`_scaled_dot_product_cudnn_attention`: torch 2.11 to 2.13)

    query    [B, H, Q, D]; key, value [B, K, T, D] with K dividing H; the numbers of a head lie in one run,
             and all else in any order
    causal   query i sees keys up to i
    returns  the result [B, H, Q, D], in the order of the query, and the log-sum-exp of the scores [B, H, Q]
    """
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = kernel(query, key, value, None, True, 0.0, causal)
    return out, lse.squeeze(-1)


def cudnn_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of `cudnn_attention`, which made `out` and `lse`.

    Torch keeps a plan of the kernel for every shape and order of query, key and value, and takes it for
    granted that grad and out have the order in memory that they had the first time: give them the same for
    the same query, key and value. And give it a log-sum-exp that is contiguous: with another the kernel is
    wrong without a word.

    (`_scaled_dot_product_cudnn_attention_backward`: torch 2.11 to 2.13)
    """
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    seed = torch.empty((), dtype=torch.int64, device=query.device)  # of a dropout that there is not
    lengths = query.shape[2], key.shape[2]
    saved = (query, key, value, out, lse[..., None], seed, seed)
    grads: tuple[Tensor, Tensor, Tensor] = kernel(grad, *saved, None, None, None, *lengths, 0.0, causal)
    return grads


# --- pipelines -----------------------------------------------------------------------------------------


def pipeline_schedule(
    stages: list[Any], micro_batches: int, loss: Callable[[Tensor, Any], Tensor], rows: list[list[str]]
) -> Any:
    """Torch's pipeline runtime, set to run lists of actions. (`_PipelineScheduleRuntime`: torch 2.11 to 2.13)

    stages  this rank's, as `PipelineStage`s whose shapes are given
    rows    every rank's actions as torch writes them: stage, kind, micro-batch ("2SEND_F0")
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    schedule: Any = _PipelineScheduleRuntime(stages, micro_batches, loss, scale_grads=False)
    schedule._prepare_schedule_with_comms(
        {rank: [_Action.from_str(text) for text in row] for rank, row in enumerate(rows)}, "compute_comms"
    )
    # 2.12 and later vote on whether shapes are given, with messages; here they always are.
    schedule._warmup_p2p = _shapes_are_given
    for stage in stages:
        stage._get_init_p2p_neighbors_ops = partial(_greetings, stage)
    return schedule


def _shapes_are_given(stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _greetings(stage: Any) -> list[Any]:
    """The first messages between neighbours (2.11), but for those of a rank to itself, which hang."""
    ops = type(stage)._get_init_p2p_neighbors_ops(stage)
    return [op for op in ops if op.group_peer != stage.group_rank]


def run_schedule(schedule: Any, arguments: list[tuple[Tensor, ...]]) -> None:
    """One step of a `pipeline_schedule`, micro-batch by micro-batch. (torch 2.11 to 2.13)

    arguments  what the first stage takes, for each micro-batch
    """
    for stage in schedule._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    targets = [None] * len(arguments)
    schedule._step_microbatches(arg_mbs=arguments, target_mbs=targets, return_outputs=False)


def detachable(x: Tensor) -> Tensor:
    """`x` as a contiguous tensor that is not a view: torch detaches a pipeline stage's output in place.

    (`_is_view`: torch 2.11 to 2.13)
    """
    x = x.contiguous()
    return x.clone() if x._is_view() else x


def weight_gradients(parameters: Iterable[Tensor], groups: list[dict[str, Any]]) -> None:
    """The second half of a split backward: add to every parameter's `.grad` what the first half left out.

    Torch's own (2.11 to 2.13) counts a weight twice that a stage uses at two places, or finds a part of the
    graph between them used up.

    groups  as the first half made them (`stage_backward_input`: torch 2.11 to 2.13): parameters, by the nodes
            that accumulate their gradients, with the nodes at which these branch off the way to the input,
            and the gradients that arrived there
    """
    owners = {get_gradient_edge(parameter).node: parameter for parameter in parameters}
    for group in groups:
        branches = list(zip(group.pop("intermediates"), group.pop("grads"), strict=True))
        # One branch may lie on the way of another: what arrives there is known, and comes from nowhere else.
        fixed = [node.register_prehook(lambda _, known=known: known) for node, known in branches]
        arrived = [
            (GradientEdge(node, index), gradient)
            for node, known in branches
            for index, gradient in enumerate(known)
            if gradient is not None
        ]
        members = list(group["params"])
        found = torch.autograd.grad(
            [edge for edge, _ in arrived],
            [GradientEdge(member, 0) for member in members],
            [gradient for _, gradient in arrived],
            retain_graph=True,  # groups may share a way; it is freed with the last reference to it
        )
        for handle in fixed:
            handle.remove()
        for member, gradient in zip(members, found, strict=True):
            owner = owners[member]
            owner.grad = gradient if owner.grad is None else owner.grad + gradient


def run_gradient_hooks(parameter: Tensor) -> None:
    """Call the post-accumulate hooks of a parameter whose `.grad` was set past autograd's. (2.11 to 2.13)"""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in list(hooks.values()):
        hook(parameter)


def fold_gradients(module: Any) -> None:
    """Let FSDP take what backward has left on gathered weights into its own sums. (2.11 to 2.13)

    Reduces them as well, if gradient synchronisation is on.
    """
    for state in _fsdp_state(module)._state_ctx.all_states:
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            group.post_backward()


def finish_backward(module: Any) -> None:
    """What FSDP does at the end of a backward pass that autograd ran as a whole. (2.11 to 2.13)"""
    _fsdp_state(module)._root_post_backward_final_callback()


def sharded_parameters(module: Any) -> list[Any]:
    """The DTensors that FSDP gathers and reduces with this module, as they lie in its flat buffers.

    (`_fsdp_param_groups`, one group before 2.12: torch 2.11 to 2.13)
    """
    state = _fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])
    places = [member._module_info for group in groups for member in group.fsdp_params]
    return [getattr(place.module, place.param_name) for place in places]


def distributed_as(values: Tensor, other: Any) -> Tensor:
    """The DTensor that `values` are this rank's part of, cut as `other` is, wherever the values lie.

    `DTensor.from_local` would copy those in host memory to the device. (DTensor's constructor, its `_spec`
    and `TensorMeta`: torch 2.11 to 2.13)
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    spec = copy(other._spec)
    spec.tensor_meta = TensorMeta(other.shape, other.stride(), values.dtype)
    found: Tensor = DTensor(values.detach(), spec, requires_grad=False)  # type: ignore[call-arg]
    return found


def set_gather(parameter: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Give FSDP other ways to make of a shard what it gathers, and of that a weight. (torch 2.11 to 2.13)

    It looks for them where a sharded parameter keeps its part (`_local_tensor`), when the model is first run.

    before  as `fsdp_pre_all_gather`; after: as `fsdp_post_all_gather`
    """
    part = parameter._local_tensor
    part.fsdp_pre_all_gather, part.fsdp_post_all_gather = before, after


def without_memory(kind: type[Tensor], like: Tensor, dtype: torch.dtype) -> Any:
    """A tensor of a class of our own, with another's shape. (`_make_wrapper_subclass`: torch 2.11 to 2.13)"""
    return Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


def _fsdp_state(module: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


# --- messages inside matrix products -------------------------------------------------------------------


def fused_gather_matmul(x: Tensor, matrices: list[Tensor], group: str) -> list[Tensor]:
    """Every rank's `x`, one after the other, and its products with `matrices`, made while parts still travel.

    On GPUs that can reach each other's memory. (`symm_mem`: torch 2.11 to 2.13)

    x         [n, ..., in], contiguous
    matrices  [in, out] each
    returns   [ranks x n, ..., in], and [ranks x n, ..., out] for each matrix
    """
    import torch.distributed._symmetric_memory  # registers the operators

    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, matrices, 0, group, return_A=True)
    return [whole, *products]


def fused_matmul_scatter(x: Tensor, matrix: Tensor, group: str) -> Tensor:
    """The sum over ranks of `x @ matrix`, cut along the first dimension; parts travel while others are made.

    On GPUs that can reach each other's memory. (`symm_mem`: torch 2.11 to 2.13)

    x        [ranks x n, ..., in]
    matrix   [in, out]
    returns  [n, ..., out]
    """
    import torch.distributed._symmetric_memory  # registers the operators

    part: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group)
    return part


def is_wanted(ctx: Any, index: int) -> bool:
    """In an autograd function's backward: whether this pass uses the gradient of argument `index`.

    `needs_input_grad` says whether any pass may, and is all that a compiler asks: what it compiles has one
    backward. The argument must not be a leaf. (`_will_engine_execute_node`: torch 2.11 to 2.13)
    """
    if torch.compiler.is_compiling():
        return bool(ctx.needs_input_grad[index])
    node = ctx.next_functions[index][0]
    return node is not None and torch._C._will_engine_execute_node(node)


def rank_store() -> Store:
    """The store in which the ranks have met. (`_get_default_store`: torch 2.11 to 2.13)"""
    from torch.distributed import distributed_c10d

    store: Store = distributed_c10d._get_default_store()  # type: ignore[no-untyped-call]
    return store
