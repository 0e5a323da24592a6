"""The devices of this process, ready to copy: built, tried, and shared by both directions.

The one file of the CUDA copier that others ask for one. Nothing of CUDA is touched before that.
"""

import logging
import mmap

import numpy as np

from kvtide.errors import ConfigError
from kvtide.jobs import Direction
from kvtide.transfer.cuda import CudaCopier
from kvtide.transfer.cuda_calibration import SCRATCH_BYTES, ProbedRuntime, engine_from_bytes, measure_ways
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.transfer.cuda_runtime import CudaError

logger = logging.getLogger(__name__)

_devices: dict[int, CudaDevice] = {}


def current_device() -> CudaDevice:
    """The device that torch calls the current one; the same object for all who ask.

    Raises:
        CudaError: It cannot be used.
        ConfigError: What it takes is not installed.
    """
    import torch

    from kvtide.transfer.cuda_bound import BoundRuntime

    index = torch.cuda.current_device()
    if index not in _devices:
        try:
            runtime = BoundRuntime(index)
        except ImportError as error:
            raise ConfigError("device", "cuda", f"{error}: pip install 'kvtide[cuda]'") from error
        _devices[index] = CudaDevice(runtime)
        calibrate(_devices[index], runtime)
    return _devices[index]


def cuda_copier(direction: Direction) -> CudaCopier:
    """Build one direction of the current device."""
    return CudaCopier(direction, current_device())


def calibrate(device: CudaDevice, runtime: ProbedRuntime) -> None:
    """Find out how pieces travel best, once. Where the kernel does not run, all go by the engine."""
    scratch = mmap.mmap(-1, SCRATCH_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = int(np.frombuffer(scratch, dtype=np.uint8).ctypes.data)
    device.open_tables()
    if not device.has_table or not device.register(address, SCRATCH_BYTES):
        device.close_tables()
        logger.warning("small pieces go by the copy engine, too: no host memory could be registered")
        return
    try:
        for direction in (Direction.STORE, Direction.LOAD):
            measured = measure_ways(runtime, device, direction, address)
            device.engine_from_bytes[direction] = engine_from_bytes(measured)
            logger.info(
                "%s: pieces of %d bytes and more go by the copy engine",
                direction.value,
                device.engine_from_bytes[direction],
            )
    except CudaError as error:
        device.engine_from_bytes = dict.fromkeys(Direction, 0)
        logger.warning("pieces of all sizes go by the copy engine: %s", error)
    finally:
        device.unregister(address)
