"""Tokens to experts on other ranks and back: which rows travel where.

Lives here: what the ranks of an expert-parallel axis tell each other before rows travel. Imports `parallel.comm` and
`parallel.mesh`. Rows are sorted by expert, and each rank holds a block of experts, so the rows for one rank lie
together: they leave in the order in which they lie, by one uneven all-to-all, and come back to the same places. On
arrival they lie in runs: of each source rank, for each expert here. Source: GShard (2006.16668), without a capacity.
Shapes: e experts of the model, g of this rank, n ranks of the axis, u = n·g runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel.comm import Exchange, all_to_all
from parallel.mesh import Axis


@dataclass(frozen=True)
class Traffic:
    """How the rows of one layer and micro-batch travel.

    axis: the ranks that share the experts; sent, received: rows to and from each of them; ends_u: int32 [u], where each
    run ends among the rows that arrive: the run of source rank i for expert j here is i·g + j.
    """

    axis: Axis
    sent: list[int]
    received: list[int]
    ends_u: torch.Tensor

    def there(self) -> Exchange:
        """The way of rows to the experts."""
        return Exchange(self.axis, self.sent, self.received)

    def back(self) -> Exchange:
        """The way of what experts made of them."""
        return Exchange(self.axis, self.received, self.sent)


def plan_traffic(rows_e: torch.Tensor, axis: Axis) -> Traffic:
    """Tell every rank how many rows it gets. Collective over `axis`; the host waits for the device, unless it is alone.

    On NCCL the counts queue behind rows that are under way on the same communicator, and the host with them.
    rows_e: int64 [e], this rank's rows for each expert.
    """
    if axis.group is None:
        return Traffic(axis, [], [], rows_e.cumsum(0).to(torch.int32))
    arriving_ng = all_to_all(rows_e, axis).view(axis.size, -1)
    both = torch.stack([rows_e.view(axis.size, -1).sum(1), arriving_ng.sum(1)]).tolist()
    return Traffic(axis, both[0], both[1], arriving_ng.flatten().cumsum(0).to(torch.int32))
