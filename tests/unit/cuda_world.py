"""Random copies through the CUDA copiers, over a runtime that is late, and what has to come of them.

The expected bytes are those of one copy after the other, in the order in which they were asked for.
"""

import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvtide.jobs import Direction, JobId
from kvtide.testing import LazyCuda
from kvtide.transfer.cuda import CudaCopier
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.transfer.plans import CopyPlan

DEVICE_BYTES, HOST_BYTES = 4096, 4096
NOBODY = -1


def plan_of(pieces: list[tuple[int, int, int]]) -> CopyPlan:
    """Of (source, target, size)."""
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3).T.copy()
    return CopyPlan(*columns)


@dataclass
class Side:
    """One side's bytes, what they should be, and the last job that was told to write each."""

    memory: np.ndarray
    expected: np.ndarray
    writer: np.ndarray

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


def side(memory: np.ndarray) -> Side:
    return Side(memory, memory.copy(), np.full(len(memory), NOBODY))


@dataclass
class World:
    """Two copiers of one device.

    Attributes:
        complaints: What was not as it had to be.
    """

    seed: int
    from_bytes: int = 200
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.cuda = LazyCuda(self.chance)
        noise = np.random.default_rng(self.seed)
        device_memory = self.cuda.device_array(DEVICE_BYTES)
        device_memory[:] = noise.integers(0, 256, DEVICE_BYTES)
        self.device_side = side(device_memory)
        # A line of 16 bytes, as the driver's kernels like it; numpy gives no less.
        self.host_side = side(noise.integers(0, 256, HOST_BYTES, dtype=np.uint8))
        self.device = CudaDevice(self.cuda)
        self.device.engine_from_bytes = dict.fromkeys(Direction, self.from_bytes)
        third = HOST_BYTES // 3
        for begin, end in ((0, third), (third, 2 * third), (2 * third, HOST_BYTES)):
            assert self.device.register(self.host_side.address + begin, end - begin)
        self.copiers = {
            direction: CudaCopier(direction, self.device) for direction in (Direction.STORE, Direction.LOAD)
        }
        self.blocks: dict[int, np.ndarray] = {}  # bytes of the device that open jobs touch
        self.next_id = 0

    def ends(self, direction: Direction) -> tuple[Side, Side]:
        both = (self.device_side, self.host_side)
        return both if direction is Direction.STORE else both[::-1]

    def copy(self, direction: Direction, pieces: list[tuple[int, int, int]], deadline_s: float = 60.0) -> int:
        """Ask for a copy of (source offset, target offset, size), and expect it."""
        job_id, self.next_id = self.next_id, self.next_id + 1
        source, target = self.ends(direction)
        before = source.expected.copy()
        touched = np.zeros(DEVICE_BYTES, dtype=bool)
        for begin, to, size in pieces:
            target.expected[to : to + size] = before[begin : begin + size]
            target.writer[to : to + size] = job_id
            on_device = begin if direction is Direction.STORE else to
            touched[on_device : on_device + size] = True
        self.blocks[job_id] = touched
        plan = plan_of([(source.address + a, target.address + b, size) for a, b, size in pieces])
        self.copiers[direction].submit(JobId(job_id), plan, deadline_s)
        return job_id

    def forward(self) -> None:
        """Let the engine write blocks that no open copy touches, and say so."""
        taken = np.logical_or.reduce([*self.blocks.values(), np.zeros(DEVICE_BYTES, dtype=bool)])
        free = [begin for begin in range(0, DEVICE_BYTES, 64) if not taken[begin : begin + 64].any()]
        for begin in self.chance.sample(free, min(len(free), 4)):
            content = np.frombuffer(self.chance.randbytes(64), dtype=np.uint8)
            memory = self.device_side.memory
            self.device_side.expected[begin : begin + 64] = content
            self.device_side.writer[begin : begin + 64] = NOBODY
            self.cuda.submit(partial(memory.__setitem__, slice(begin, begin + 64), content))
        for copier in self.copiers.values():
            copier.forward_ended()

    def random_pieces(self) -> list[tuple[int, int, int]]:
        """Pieces whose targets do not overlap; sizes odd and even."""
        pieces = []
        to = self.chance.randrange(400)
        unit = self.chance.choice((1, 16))
        for _ in range(self.chance.randrange(1, 14)):
            size = self.chance.randrange(1, 400 // unit) * unit
            to = -(-(to + self.chance.randrange(150)) // unit) * unit
            if to + size > HOST_BYTES:
                break
            pieces.append((self.chance.randrange((DEVICE_BYTES - size) // unit) * unit, to, size))
            to += size
        return pieces

    def poll(self) -> None:
        """Hold what is reported against the bytes that are there now."""
        for direction, copier in self.copiers.items():
            for outcome in copier.poll():
                self.blocks.pop(outcome.job_id)
                target = self.ends(direction)[1]
                mine = target.writer == outcome.job_id
                if not outcome.success:
                    self.complaints.append(f"job {outcome.job_id} failed")
                elif (target.memory[mine] != target.expected[mine]).any():
                    self.complaints.append(f"job {outcome.job_id} was reported and is not there")

    def compare(self) -> None:
        """Let everything end, and hold all bytes against those expected."""
        for copier in self.copiers.values():
            if not copier.wait(list(map(JobId, self.blocks)), 20.0):
                self.complaints.append("copies did not end")
        self.cuda.run()
        self.poll()
        for name, where in (("device", self.device_side), ("host", self.host_side)):
            wrong = int((where.memory != where.expected).sum())
            if wrong:
                self.complaints.append(f"{wrong} wrong bytes on the {name}")

    def walk(self, step_count: int) -> list[str]:
        """Do things at random; returns the complaints."""
        for _ in range(step_count):
            draw = self.chance.random()
            if draw < 0.45:
                self.copy(self.chance.choice((Direction.STORE, Direction.LOAD)), self.random_pieces())
            elif draw < 0.6:
                self.forward()
            elif draw < 0.85:
                self.poll()
            else:
                self.cuda.step()
        self.compare()
        return self.complaints

    def close(self) -> None:
        for copier in self.copiers.values():
            copier.close()
