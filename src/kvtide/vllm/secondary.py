"""kvtide's tiers below vLLM's own host memory: for who stays with vLLM's ``OffloadingConnector``.

vLLM calls a tier on its scheduler's thread, several times a step, and every call here returns at once: a
``TierLane`` has the threads, ``Lookups`` asks, ``Lending`` keeps vLLM's rows out of calls that may never end.
Trouble of a medium ends as a miss, or as a store that was skipped. Knows vLLM's contract; nothing of media.
"""

import logging
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import vllm

from kvtide.jobs import JobId
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import PrivateTier, Tier, TierPlace
from kvtide.tiers.breaker import BreakerState
from kvtide.tiers.disk_folder import KnownFingerprints
from kvtide.tiers.fingerprint import Fingerprint
from kvtide.tiers.named import check_tier, tier_class, tier_named
from kvtide.tiers.records import ChunkName, RecordIdentity
from kvtide.transfer.lane import PartFate, TierDirection, TierPart, TierState
from kvtide.transfer.tier_lane import FULL, LaneSettings, TierLane
from kvtide.vllm.compat import require_supported

require_supported(vllm.__version__)

from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

from kvtide.vllm.secondary_identity import row_fingerprint_of  # noqa: E402
from kvtide.vllm.secondary_jobs import JobEnd, OpenJob, OpenJobs  # noqa: E402
from kvtide.vllm.secondary_lookups import Lookups  # noqa: E402
from kvtide.vllm.secondary_room import Room  # noqa: E402
from kvtide.vllm.secondary_rows import HostRows, Lending, LendingPrivate, LentRow  # noqa: E402
from kvtide.vllm.secondary_settings import SecondarySettings, settings_of  # noqa: E402

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

logger = logging.getLogger(__name__)

FOUND_PER_STEP = 500
"""Records of an earlier run that are taken into the books in one step: about a millisecond."""

LOOK_S = 0.001
"""Between looks whether jobs have ended, where vLLM wants to wait for that."""

CLOSE_PATIENCE_S = 5.0


class KVTideTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier that the entry names by its class, and what those with names of their own have in common.

    Args:
        offloading_spec: vLLM's, as it stands when the connector is made.
        primary_kv_view: vLLM's host memory, ``[row_count, row_bytes]``.
        tier_type: As the entry says.
        backpressure_detector: vLLM's; it decides which stores come here at all.
        given: The rest of the entry.

    Raises:
        ConfigError: A setting is wrong, the folder is in use, or it cannot be told whose bytes these are.
    """

    class_path: ClassVar[str] = ""
    default_locality: ClassVar[str] = "LOCAL"
    medium = Medium.STORAGE
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: "TieringOffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = settings_of(tier_type, self.class_path, self.default_locality, given)
        self.locality = Locality(settings.locality)
        rows = HostRows(primary_kv_view)
        fingerprint = row_fingerprint_of(offloading_spec, rows.row_bytes, settings.identity)
        tier = self._built(offloading_spec, settings, fingerprint)
        private = isinstance(tier, PrivateTier)
        name = tier_type.removeprefix("kvtide-")
        self._rows, self._settings = rows, settings
        self._room = Room() if private else None
        self._record_bytes = tier.record_bytes(rows.row_bytes) if isinstance(tier, PrivateTier) else 0
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._lending = LendingPrivate(tier, rows) if isinstance(tier, PrivateTier) else Lending(tier, rows)
        lane = LaneSettings(settings.threads, settings.queue, settings.deadline_s, settings.wait_limit_s)
        self._lane = TierLane(self._lending, name, lane)
        self._lookups = Lookups(self._lending.contains, name, settings.deadline_s)
        self._jobs = OpenJobs(self._lending.forget)
        self._state: TierState | None = None  # as of this step
        self._resets = 0
        self._found_all = not private

    def _built(
        self, spec: "TieringOffloadingSpec", settings: SecondarySettings, fingerprint: Fingerprint
    ) -> Tier:
        """Make the tier; replicas of a data-parallel server share the limit of what each has for itself."""
        options = self._options(spec, settings)
        check_tier(settings.class_path, self.tier_type, settings.limit, options)
        private = issubclass(tier_class(settings.class_path), PrivateTier)
        replicas = spec.config.parallel.data_parallel_size if private else 1
        place = TierPlace(
            RecordIdentity(fingerprint.digest),
            0,
            settings.limit // replicas,
            options,
            f"{spec.config.engine_id}/{uuid.uuid4().hex}",
        )
        return tier_named(settings.class_path, place)

    def _options(self, spec: "TieringOffloadingSpec", settings: SecondarySettings) -> dict[str, Any]:
        """The tier's own options."""
        return settings.options

    @property
    def _serves(self) -> bool:
        """Whether anything may be asked of it: it is open, in service, and has forgotten what it should."""
        state = self._state
        return (
            state is not None
            and state.opened
            and state.state is not BreakerState.OPEN
            and self._lane.generations_begun == self._resets
        )

    # -- lookups ------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether a chunk is there; a hint that the load decides."""
        if not self._serves:
            return LookupResult.MISS
        match self._lookups.ask(req_context.req_id, key):
            case True:
                return LookupResult.HIT
            case False:
                return LookupResult.MISS
            case None:
                return LookupResult.RETRY

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Put to the tier what was asked in this step."""
        self._lookups.flush()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Take what vLLM stores anyway."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what a request was told."""
        self._lookups.forget(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note use, where it is for us to decide who leaves."""
        if self._room is not None:
            self._room.touch(keys)

    # -- jobs ---------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write chunks; what does not fit is skipped, and the job has failed."""
        chunks = dict(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        offered = len(chunks)
        if self._room is not None:
            chunks = {key: row for key, row in chunks.items() if self._room.lacks(key)}
        if not chunks:
            self._jobs.refuse(job_metadata.job_id, done=offered > 0)
        elif not self._serves:
            self._jobs.refuse(job_metadata.job_id)
        else:
            self._store(job_metadata, self._admitted(chunks))

    def _admitted(self, chunks: dict[OffloadKey, int]) -> dict[OffloadKey, int]:
        """Those for which there is room, after others have left."""
        if self._room is None or self._state is None:
            return chunks
        capacity = self._state.capacity_bytes // self._record_bytes
        admitted, leaving = self._room.admit(list(chunks), capacity)
        if leaving:
            self._lane.discard(leaving)
        return {key: chunks[key] for key in admitted}

    def _store(self, job: TransferJob, chunks: dict[OffloadKey, int]) -> None:
        rows = self._lending.lend(list(chunks.values()))
        parts = [
            TierPart(ChunkName(key, None, self._chunk_index(key, job.req_context)), row.ticket)
            for key, row in zip(chunks, rows, strict=True)
        ]
        if chunks and self._lane.submit(JobId(job.job_id), TierDirection.WRITE, parts):
            self._open(job, TierDirection.WRITE, list(chunks), rows)
            return
        self._lending.forget(rows)
        self._jobs.refuse(job.job_id)
        if self._room is not None:
            self._room.note_written(chunks, ())

    def _chunk_index(self, key: OffloadKey, req_context: ReqContext) -> int:
        """Where a chunk stands in its prompt, as far as vLLM says; what comes before it, vLLM does not."""
        end_token = req_context.get_offload_key_position(key)
        tokens = self._chunk_tokens.get(split_offload_key(key)[1], 0)
        return max(0, end_token // tokens - 1) if end_token and tokens else 0

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks into vLLM's rows."""
        keys = list(job_metadata.keys)
        rows = self._lending.lend(job_metadata.chunk_ids.tolist())
        parts = [TierPart(ChunkName(key, None, 0), row.ticket) for key, row in zip(keys, rows, strict=True)]
        self._open(job_metadata, TierDirection.READ, keys, rows)
        self._lane.submit(JobId(job_metadata.job_id), TierDirection.READ, parts)

    def _open(
        self, job: TransferJob, direction: TierDirection, keys: list[OffloadKey], rows: list[LentRow]
    ) -> None:
        self._jobs.open(OpenJob(job.job_id, direction, keys, rows, job.req_context.req_id))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Say which jobs have ended since the last call; called once a step, before all else."""
        self._look()
        return [_told(end, self._rows.row_bytes) for end in self._jobs.take_ends()]

    def _look(self) -> None:
        for outcome in self._lane.poll():
            job, fates = self._jobs.end(outcome)
            if job.direction is TierDirection.READ:
                self._note_read(job, fates)
            elif self._room is not None:
                self._room.note_written(
                    job.keys, [key for key, fate in fates.items() if fate is PartFate.DONE]
                )
                # The medium has less room than it said: who was used least makes some.
                if full := outcome.trouble[FULL]:
                    self._lane.discard(self._room.evict(full))
        for job_id in self._lane.take_late():
            self._give_up(job_id)
        self._state = self._lane.state()
        self._take_found()

    def _note_read(self, job: OpenJob, fates: dict[OffloadKey, PartFate]) -> None:
        failed = [key for key, fate in fates.items() if fate is not PartFate.DONE]
        self._lookups.refuse(job.request_id, failed)
        if self._room is not None:
            self._room.forget(key for key in failed if fates[key] is PartFate.GONE)

    def _give_up(self, job_id: JobId) -> None:
        """End a job for vLLM one of whose calls is late, and begin no more of it."""
        job = self._jobs.give_up(job_id)
        if job is not None:
            self._lane.cancel([job_id])
            self._lookups.refuse(
                job.request_id, [key for key, row in zip(job.keys, job.rows, strict=True) if not row.filled]
            )

    def _take_found(self) -> None:
        """Learn what a private tier holds from before, a little at a time: to know who may leave."""
        if self._room is None or self._found_all:
            return
        headers = self._lane.take_inventory(FOUND_PER_STEP)
        self._found_all = headers is None
        self._room.note_found(header.name.key for header in headers or ())

    # -- ends ---------------------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait until no job is open, at most for a deadline, and let nothing of before be served again.

        vLLM calls this when it resets its cache, and for nothing else: the weights may have changed.
        """
        self._lane.cancel([JobId(job.job_id) for job in self._jobs.waiting_for()])
        self._look()
        while any(self._jobs.waiting_for()):
            time.sleep(LOOK_S)
            self._look()
        if self._settings.reset_keeps_tiers:
            return
        self._resets += 1
        self._lane.begin_generation()
        self._lookups.reset()
        if self._room is not None:
            self._room.clear()
            self._found_all = True

    def shutdown(self) -> None:
        """Give vLLM all its rows back, and end; what waits to be written is lost."""
        for job in list(self._jobs.waiting_for()):
            self._give_up(JobId(job.job_id))
        self._lookups.close(CLOSE_PATIENCE_S)
        if not self._lane.close(CLOSE_PATIENCE_S):
            logger.warning("%s: calls that do not return are left behind", self._lane.name)
        self._rows.release()


def _told(end: JobEnd, row_bytes: int) -> JobResult:
    return JobResult(
        job_id=end.job_id,
        success=end.done,
        successful_keys=tuple(end.done_keys) or None,
        transfer_time=end.seconds,
        transfer_bytes=end.byte_count or len(end.done_keys) * row_bytes or None,
    )


class KVTideDisk(KVTideTier):
    """A private folder on a local disk."""

    class_path = "kvtide.tiers.disk.DiskTier"
    cache_hit_source = CacheHitSource.DISK

    def _built(
        self, spec: "TieringOffloadingSpec", settings: SecondarySettings, fingerprint: Fingerprint
    ) -> Tier:
        tier = super()._built(spec, settings, fingerprint)
        folder = Path(self._options(spec, settings)["folder"])
        known = KnownFingerprints(folder)
        if changed := known.changed(fingerprint):
            logger.warning("%s starts cold: since it was used last, %s changed", folder, ", ".join(changed))
        known.note(fingerprint, spec.config.model.name)
        return tier

    def _options(self, spec: "TieringOffloadingSpec", settings: SecondarySettings) -> dict[str, Any]:
        """A folder belongs to one instance, so each replica has one of its own within it."""
        options, parallel = settings.options, spec.config.parallel
        if "folder" in options and parallel.data_parallel_size > 1:
            options["folder"] = str(Path(options["folder"]) / f"replica-{parallel.data_parallel_index}")
        return options


class KVTideDirectory(KVTideTier):
    """A directory that many servers share."""

    class_path = "directory"
    default_locality = "REMOTE"


class KVTideValkey(KVTideTier):
    """A Valkey or Redis that many servers share."""

    class_path = "valkey"
    default_locality = "REMOTE"


class KVTideObjects(KVTideTier):
    """A bucket of an object store."""

    class_path = "objects"
    default_locality = "REMOTE"


class KVTideMooncake(KVTideTier):
    """A Mooncake store."""

    class_path = "mooncake"
    default_locality = "REMOTE"
