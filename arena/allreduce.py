"""All-reduce and its relatives, dispatched by size.

Which path serves a tensor is decided by a plan that all ranks share and by what a path can tell from the tensor alone,
so that no rank ever takes another path than the rest. A path that can't serve a call declines with a reason, the next
one takes it, and both are counted.

One communicator serves one thread at a time, and on a GPU one stream: a second one is refused or ordered behind, never
interleaved, because the ranks could not agree on an order.
"""

from __future__ import annotations

import torch

from arena.account import CommunicatorStatistics, OperationCounts
from arena.communicator import DEADLINE_S, OPERATIONS, Communicator, registered
from arena.dispatch import FUSED, Decision
from arena.errors import InvalidArgument
from arena.operands import check_norm

__all__ = ["DEADLINE_S", "OPERATIONS", "AllReduce", "CommunicatorStatistics", "Decision", "OperationCounts", "lookup"]


class AllReduce(Communicator):
    """Sums tensors over the ranks of a process group on one host; gathers, scatters and exchanges them.

    Every rank makes one, in the same order, with the same arguments. It is a context manager that closes on leaving.
    An operation is one of all ranks: each calls the same ones in the same order, with tensors of the same shape and
    dtype. Results are new contiguous tensors, operands stay as they are, and no gradient flows.

    Example:
        >>> comm = AllReduce(group, "cpu")
        >>> total = comm.all_reduce(partial)
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, bit for bit the same on every rank.

        Sums are in rank order, and in fp32 for 16-bit floats, whichever path serves them; only the libraries' own paths
        (gloo, NCCL) add up as the library does. No gradient flows through it.

        Args:
            x: of any shape, dense in any layout, on this communicator's device; the same shape and dtype on all ranks.

        Returns:
            A new contiguous tensor of the shape and dtype of `x`, which stays as it is.

        Raises:
            InvalidArgument: another device, or a dtype that no path can add up.
            OperandMismatch: the ranks brought different tensors (on the CPU, where that can be seen).
            PeerDied, CommunicatorClosed: a rank is gone; nothing more can be done with this communicator.
            ReentrantUse: another thread is in here.
            UseAfterFork: this is a forked child.
        """
        out: torch.Tensor = self._serve(self._dispatches["all_reduce"], x)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, one after the other: torch's ``all_gather_into_tensor``.

        Any dtype on the CPU and over NCCL, every bit as it was. The own kernel on GPUs takes floats of 16 and 32 bits,
        and keeps all bits but those of one NaN (all ones), which becomes another NaN. The plan goes by the bytes of the
        result.

        Args:
            x: as in `all_reduce`.

        Returns:
            Shape ``[world * x.shape[0], *x.shape[1:]]``; ``[world]`` of a scalar.

        Raises:
            As `all_reduce`.
        """
        out: torch.Tensor = self._serve(self._dispatches["all_gather"], x)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum: torch's ``reduce_scatter_tensor``.

        The part is what ``all_reduce(x).chunk(world)[rank]`` would be, to the bit, unless a library sums (see there).

        Args:
            x: as in `all_reduce`; the first dimension a multiple of `world`.

        Returns:
            Shape ``[x.shape[0] / world, *x.shape[1:]]``.

        Raises:
            As `all_reduce`; InvalidArgument also if `x` can't be cut.
        """
        out: torch.Tensor = self._serve(self._dispatches["reduce_scatter"], x)
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Part r of the result is what rank r has for this one: torch's ``all_to_all_single``, with equal splits.

        Dtypes and bits as in `all_gather`.

        Args:
            x: as in `all_reduce`; the first dimension a multiple of `world`, its r-th part for rank r.

        Returns:
            The shape of `x`.

        Raises:
            As `all_reduce`; InvalidArgument also if `x` can't be cut.
        """
        out: torch.Tensor = self._serve(self._dispatches["all_to_all"], x)
        return out

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, add the residual and normalise, as a transformer's layer does: vLLM's ``fused_add_rms_norm``.

        ``new_residual = all_reduce(x) + residual``, and
        ``normed = new_residual / sqrt(mean(new_residual ** 2) + eps) * weight`` over the last dimension. The sum, the
        new residual and the result are each rounded to the dtype; all else is in fp32 (fp64 for fp64). One kernel
        does it where there is one; else the sum goes by the plan, and `explain` says ``not_fused``, or why not.

        Args:
            x: floats, as in `all_reduce`, with one dimension at least.
            residual: the shape, dtype and device of `x`, the same on all ranks.
            weight: shape ``x.shape[-1:]``, the same dtype and device.
            eps: keeps a row of zeros finite.

        Returns:
            (normed, new residual), each of the shape of `x`.

        Raises:
            As `all_reduce`; InvalidArgument also if these don't fit together.
        """
        check_norm(x, residual, weight)
        operands = x, residual.detach(), weight.detach(), eps
        out: tuple[torch.Tensor, torch.Tensor] = self._serve(self._dispatches[FUSED], *operands)
        return out


def lookup(name: str) -> AllReduce:
    """The communicator over the process group of this name, of this process.

    Raises:
        InvalidArgument: there is none.
    """
    found = registered.get(name)
    if not isinstance(found, AllReduce):
        known = ", ".join(map(repr, sorted(registered))) or "none"
        raise InvalidArgument(
            f"there is no communicator over a group {name!r}",
            expected=f"one of this process's: {known}",
            found=repr(name),
            remedy="make AllReduce(group, device) first, and pass its name",
        )
    return found
