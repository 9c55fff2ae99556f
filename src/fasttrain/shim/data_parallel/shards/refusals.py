"""What can't be done with shards, in words."""

from __future__ import annotations

from torch import Tensor, nn

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.data_parallel.shards import mixed
from fasttrain.shim.hooks.roots import Root

# Parts of torch's messages where something can't be done with a sharded module
_OF_SHARDS = (*mixed.OF_SHARDS, "attribute lookup FSDP", "FSDP does not support")
# The same once a model is sharded: a gradient by the shard of a whole parameter, and one through
# whole parameters that were freed after an earlier one; and gradients that FSDP can't reduce, or
# of a shard without rows; and data of another type than what FSDP has made.
_AFTER_SHARDING = (
    "appears to not have been used in the graph", "for storage of size 0",
    "its data is not allocated yet", "Could not run 'fsdp::", "norm on an empty tensor",
    "Expected out tensor to have dtype",
)  # fmt: skip


def explain(error: BaseException) -> None:
    """Add a note to an error that comes from mixing shards with whole tensors."""
    if any(
        words in str(error) for words in (*_OF_SHARDS, *(_AFTER_SHARDING if mixed.OWNERS else ()))
    ):
        error.add_note(
            "--strategy fsdp has sharded the model's parameters, and the script does with them what"
            " only whole tensors support, such as mixing both, calling a part of the model alone,"
            " copying the model, changing its type, sparse gradients, or several derivatives"
            " through one call: use --strategy ddp"
        )


def name_of(module: nn.Module) -> str:
    """Return the name of the class that the script has given a module."""
    return type(module).__name__.removeprefix("FSDP")  # fully_shard derives a class of that name


def functional_error(root: Root) -> FasttrainError:
    """Return the error for a call with other tensors than the parameters."""
    return FasttrainError(
        f"--strategy fsdp can't shard {root.name}, called at {root.where}",
        why="the script calls it with other tensors instead of its parameters (functional_call),"
        " and only parameters are sharded",
        fix="use --strategy ddp",
        slug="fsdp-functional",
    )


def written_error(name: str, parameter: str) -> FasttrainError:
    """Return the error for a call that writes into a parameter."""
    return FasttrainError(
        f"--strategy fsdp can't train {name}, whose call changes its parameter {parameter}",
        why="in a call a parameter is gathered from all ranks, and what is written into it is lost"
        " when it is freed after the call",
        fix="use --strategy ddp",
        slug="fsdp-writes",
    )


def replaced_error(name: str, parameter: str) -> FasttrainError:
    """Return the error for a parameter that isn't the one that was sharded."""
    return FasttrainError(
        f"--strategy fsdp can't train {name}, whose parameter {parameter} the script has replaced",
        why="the one before was sharded by the model's first call, and the new one isn't",
        fix="change it in place (copy_, load_state_dict), or use --strategy ddp",
        slug="fsdp-replaced",
    )


def parts_error(root: Root) -> FasttrainError:
    """Return the error for a model of which a part is sharded alone."""
    return FasttrainError(
        f"--strategy fsdp can't shard {root.name}, called at {root.where}",
        why="the script also calls parts of the model separately, and a part can be sharded either"
        " with its model or alone",
        fix="use --strategy ddp",
        slug="fsdp-parts",
    )


def scripted_error(root: Root) -> FasttrainError:
    """Return the error for a module that torch.jit has made."""
    return FasttrainError(
        f"--strategy fsdp can't shard {root.name}, called at {root.where}",
        why="it is a TorchScript module, whose parameters can't be replaced by shards",
        fix="call it in torch.no_grad() if it isn't to be trained, or use --strategy ddp",
        slug="fsdp-scripted",
    )


def refused_error(module: nn.Module, error: Exception) -> FasttrainError:
    """Return the error for a model that torch doesn't shard."""
    first = str(error).partition("\n")[0]
    return FasttrainError(
        f"--strategy fsdp can't shard {name_of(module)}",
        why=f"torch's fully_shard raises {type(error).__name__}: {first}",
        fix="use --strategy ddp",
        slug="fsdp-refused",
    )


def data_error(value: Tensor, shard: Tensor) -> FasttrainError:
    """Return the error for data of another shape or type than a shard's."""
    had, new = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (shard, value))
    return FasttrainError(
        f"--strategy fsdp can't give a parameter of {had} data of {new}",
        why="its shards on all ranks were made for the one it had",
        fix="use --strategy ddp",
        slug="fsdp-data",
    )


def hooks_error() -> FasttrainError:
    """Return the error for hooks that FSDP doesn't run."""
    return FasttrainError(
        "--strategy fsdp can't run the hooks that the script has on parameters (register_hook)",
        why="each rank has the gradient of its shard only, and torch's fully_shard runs no such"
        " hook; those of register_post_accumulate_grad_hook run",
        fix="use --strategy ddp",
        slug="fsdp-hooks",
    )


def kept_error(kind: str) -> FasttrainError:
    """Return the error for parameters in a container that can't be changed."""
    return FasttrainError(
        f"the script keeps parameters in a {kind} that --strategy fsdp can't replace by shards",
        why="what refers to parameters from before the model's first call refers to tensors that"
        " nobody trains any more",
        fix=f"make the {kind} a list, or use --strategy ddp",
        slug="fsdp-references",
    )
