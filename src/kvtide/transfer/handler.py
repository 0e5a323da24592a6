"""One direction of transfers between device blocks and host slots.

Takes block ids on one side and slots on the other, has every address worked out and a copier copy them,
and reports. Does not know who asked, or what else waits for the result.
"""

from collections.abc import Collection, Sequence

from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId
from kvtide.transfer.devices import CopyOutcome, DeviceCopier
from kvtide.transfer.plans import plan_copy
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import GroupRegions


class SingleDirectionOffloadingHandler:
    """Copies one way.

    Args:
        direction: Which way.
        groups: Device side, per KV cache group.
        pool: Host side; kept, so that its pages live as long as anyone may copy into them.
        copier: Who copies; owned from now on.
    """

    def __init__(
        self, direction: Direction, groups: Sequence[GroupRegions], pool: HostPool, copier: DeviceCopier
    ) -> None:
        self.direction = direction
        self._groups = tuple(groups)
        self._pool = pool
        self._copier = copier

    def transfer_async(self, job_id: JobId, hop: Hop, deadline_s: float) -> None:
        """Begin a transfer.

        Raises:
            ValueError: Blocks and slots do not fit together, or the hop is not this direction's.
        """
        ends = (hop.source, hop.target) if self.direction is Direction.STORE else (hop.target, hop.source)
        device, host = ends
        if not isinstance(device, GPULoadStoreSpec) or not isinstance(host, CPULoadStoreSpec):
            raise ValueError(f"{self.direction.value} from {hop.source.medium()} to {hop.target.medium()}")
        plan = plan_copy(
            self._groups, self._pool.address, self._pool.slot_bytes, device, host, self.direction
        )
        self._copier.submit(job_id, plan, deadline_s)

    def forward_ended(self) -> None:
        """Note that the engine has submitted a step."""
        self._copier.forward_ended()

    def get_finished(self) -> list[CopyOutcome]:
        """Hand out the transfers that ended since the last call."""
        return self._copier.poll()

    def cancel(self, job_ids: Collection[JobId]) -> None:
        """Ask transfers to end."""
        self._copier.cancel(job_ids)

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        """Wait until these transfers have ended; False when the time was not enough."""
        return self._copier.wait(job_ids, timeout_s)

    def close(self) -> None:
        """End; no byte is written after it returns."""
        self._copier.close()
