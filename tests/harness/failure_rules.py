"""Which line of the connector each test of a failure stands on.

Data: a sample of the field, the test that shows the right outcome, and that line, broken.
``scripts/rules.py`` applies each to a copy of the code and runs the test, which has to fail.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from mutants import Mutant


@dataclass(frozen=True, slots=True)
class Rule:
    """A test and what it would be without its rule.

    Attributes:
        sample: Kind of failure and the public thread.
        test: File below this folder, and the test's name.
        mutant: The line that is broken.
    """

    sample: str
    test: str
    mutant: Mutant


def _rule(sample: str, test: str, file: str, line: str, replacement: str, breaks: str) -> Rule:
    name = test.rpartition("::test_")[2].replace("_", "-")
    return Rule(sample, test, Mutant(name, sample.partition(" ")[0], file, line, replacement, breaks))


RULES = (
    _rule(
        "F1 vLLM #46951",
        "test_failures_blocks.py::test_a_pending_store_does_not_read_what_another_connector_brings_into_its_blocks",
        "scheduler/scheduler.py",
        "self._flush |= self._jobs.fences.conflicts(table[first_computed:])",
        "self._flush |= self._jobs.fences.conflicts(table[first_computed:] if num_external_tokens else ())",
        "blocks given to a request that loads nothing from us are not checked against open copies",
    ),
    _rule(
        "F1 vLLM #32255",
        "test_failures_blocks.py::test_the_late_copy_of_an_aborted_load_lands_in_nobody_elses_blocks",
        "transfer/engine.py",
        "self._parked.append((job, time.monotonic() + job.deadline_s))",
        "self._parked.append((job, time.monotonic() + job.deadline_s));"
        " self._loads.finished.add(job.request_id)",
        "a load is reported as ended before its last byte",
    ),
    _rule(
        "F1 vLLM #45357",
        "test_failures_blocks.py::"
        "test_a_request_that_ends_while_a_step_of_it_is_under_way_stores_nothing_of_that_step",
        "scheduler/scheduler.py",
        "computed_tokens = request.num_computed_tokens - request.num_in_flight_tokens",
        "computed_tokens = request.num_computed_tokens",
        "what a step that is under way is writing counts as written",
    ),
    _rule(
        "F1 vLLM #45704",
        "test_lives.py::test_a_store_goes_out_at_the_start_of_the_step_after_its_forward",
        "transfer/engine.py",
        "(ready if job.job_id in step.jobs_to_flush else self._deferred).append(job)",
        "ready.append(job)",
        "a store begins before the forward that writes its blocks",
    ),
    _rule(
        "F1 vLLM #47282",
        "test_lives.py::test_a_load_into_blocks_that_a_store_still_reads_waits_for_that_store_alone",
        "scheduler/scheduler.py",
        "after |= self._jobs.fences.conflicts(table[first_new:first_computed])",
        "after |= set()",
        "a load is written into blocks that a store still reads",
    ),
    _rule(
        "F2 vLLM #46014",
        "test_failures_blocks.py::"
        "test_a_request_preempted_with_a_store_in_flight_comes_back_with_a_hit_on_its_own_prefix",
        "scheduler/scheduler.py",
        "restored_tokens = state.local_tokens + num_external_tokens",
        "restored_tokens = state.local_tokens + num_external_tokens; assert not state.transfer_jobs",
        "that a request has nothing in flight when it is admitted is taken for granted",
    ),
    _rule(
        "F2 vLLM #49118",
        "test_lives.py::test_a_request_aborted_before_it_was_scheduled_builds_no_job",
        "scheduler/scheduler.py",
        "if state is None or state.load_job is not None or not state.computed or not any(block_ids):",
        "if state is None or state.load_job is not None or not block_ids[0][0]:",
        "that a request which ends owns a block is taken for granted",
    ),
    _rule(
        "F2 vLLM #52170",
        "test_failures_blocks.py::"
        "test_a_request_that_shares_its_blocks_with_another_connectors_load_is_stored_as_they_fill",
        "scheduler/scheduler.py",
        "group_state.block_ids.extend(new_block_ids[group.engine_index])",
        "group_state.block_ids.extend(())",
        "what is known of a request's blocks lags its hashes",
    ),
    _rule(
        "F2 vLLM #46027, #47107",
        "test_lives.py::test_a_finished_request_is_stored_to_its_last_whole_chunk",
        "scheduler/scheduler.py",
        "self._stores.plan(state, computed_tokens, now_s, final=True)",
        "self._stores.plan(state, computed_tokens, now_s, final=False)",
        "what was generated last is never stored",
    ),
    _rule(
        "F5 vLLM #39732",
        "test_failures_results.py::test_a_chunk_that_is_gone_between_lookup_and_load_is_computed",
        "scheduler/loads.py",
        "except MissingChunkError:",
        "except ZeroDivisionError:",
        "that a chunk is there when it is loaded is taken for granted",
    ),
    _rule(
        "F5 dynamo #15079",
        "test_lives.py::test_a_load_that_fails_is_computed_and_not_offered_to_that_request_again",
        "transfer/engine.py",
        "if not success:",
        "if success is None:",
        "a request whose load has failed computes on as if it had been loaded",
    ),
    _rule(
        "F5 vLLM #49250",
        "test_failures_results.py::test_who_shares_a_prefix_whose_load_fails_runs_when_it_was_recomputed",
        "vllm/connector.py",
        "return KVConnectorTransferResults(finished_recving=loads.finished, failed_recving=loads.failed)",
        "return KVConnectorTransferResults(finished_recving=loads.finished)",
        "the engine hears that a load has ended and not how",
    ),
    _rule(
        "F5 promise: failed stores",
        "test_lives.py::test_a_store_that_fails_leaves_no_visible_key",
        "manager/arrivals.py",
        "if done_count and store.intact:",
        "if store.intact:",
        "chunks of a store that has failed can be read",
    ),
    _rule(
        "F5 promise: failed loads",
        "test_failures_results.py::test_a_load_that_fails_ends_as_a_recomputation_and_not_as_an_error",
        "vllm/connector.py",
        'if self._kv_transfer_config.kv_load_failure_policy != "recompute":',
        'if self._kv_transfer_config.kv_load_failure_policy == "recompute":',
        "vLLM's default turns a load that fails into an error for the client",
    ),
    _rule(
        "F5 promise: late loads",
        "test_failures_results.py::test_a_load_that_is_late_ends_as_a_recomputation_and_not_as_an_error",
        "scheduler/quarantine.py",
        "self._given_up.add(status.job.job_id)",
        "self._given_up.discard(status.job.job_id)",
        "nobody tells the engine that a load which does not end was given up",
    ),
    _rule(
        "F9 tpu-inference #3152",
        "test_failures_results.py::test_source_blocks_are_not_free_before_the_last_rank_has_copied_them",
        "scheduler/open_jobs.py",
        "return not self.pending_count",
        "return True",
        "a job is done when any rank has answered",
    ),
    _rule(
        "F9 SGLang #30760",
        "test_failures_results.py::test_a_store_that_one_rank_could_not_make_is_none_and_nobody_waits_for_it",
        "scheduler/open_jobs.py",
        "self.failed = True",
        "self.failed = not self.pending_count",
        "a failure counts only when it is the last answer",
    ),
    _rule(
        "F9 SGLang #30760",
        "test_failures_results.py::test_a_load_that_one_rank_could_not_make_is_computed_on_all",
        "vllm/connector.py",
        "return KVConnectorTransferResults(finished_recving=loads.finished, failed_recving=loads.failed)",
        "return KVConnectorTransferResults(finished_recving=loads.finished - loads.failed)",
        "a rank whose load has failed says nothing, and the others' news is never complete",
    ),
    _rule(
        "F9 SGLang #30760",
        "test_failures_results.py::test_where_one_rank_was_given_less_memory_all_use_what_it_has",
        "scheduler/scheduler.py",
        "self._manager.grow(min(pool.ready_slots for pool in self._pools.values()), slot_count)",
        "self._manager.grow(max(pool.ready_slots for pool in self._pools.values()), slot_count)",
        "slots are handed out that one rank does not have",
    ),
    _rule(
        "F9 promise: answers",
        "test_failures_results.py::test_the_second_answer_of_a_rank_changes_nothing",
        "scheduler/open_jobs.py",
        "if rank not in self.owing[hop_index]:",
        "if rank < 0:",
        "a rank that has answered may answer anew",
    ),
    _rule(
        "F9 promise: answers",
        "test_failures_results.py::test_an_answer_for_a_job_that_has_ended_changes_nothing",
        "scheduler/scheduler.py",
        "if status is not None and status.answer(hop_index, results):",
        "if status.answer(hop_index, results):",
        "that a job which is answered is open is taken for granted",
    ),
    _rule(
        "F9 promise: answers",
        "test_failures_results.py::test_an_answer_of_a_forgotten_generation_changes_nothing",
        "manager/arrivals.py",
        "if store.doomed:",
        "if store.doomed and not done_count:",
        "what was stored before a reset becomes visible after it",
    ),
    _rule(
        "F6 vLLM #49829",
        "test_failures_waiting.py::"
        "test_who_waits_for_a_store_that_never_ends_computes_when_its_patience_ends",
        "scheduler/scheduler.py",
        "if now_s < until_s:",
        "if now_s:",
        "who waits for somebody else's copy waits as long as it takes",
    ),
    _rule(
        "F6 vLLM #49829",
        "test_failures_waiting.py::"
        "test_a_chunk_whose_store_never_ends_stops_being_waited_for_and_is_stored_anew",
        "scheduler/quarantine.py",
        "self._manager.abandon_store(chunks.run, chunks.spec)",
        "self._manager.capacity",
        "a store that does not end is on its way for ever",
    ),
    _rule(
        "F6 vLLM #49176",
        "test_failures_waiting.py::"
        "test_a_lookup_that_is_asked_again_does_not_go_on_saying_hit_for_what_has_left",
        "scheduler/lookup.py",
        "and memo.residency_epoch == manager.residency_epoch",
        "and memo.residency_epoch <= manager.residency_epoch",
        "an answer is given again although chunks have left",
    ),
    _rule(
        "F6 vLLM #48102",
        "test_failures_waiting.py::test_a_reset_ends_the_waiting_for_a_store_that_was_under_way",
        "manager/arrivals.py",
        "self.pending.forget_name(store)",
        "self.pending.follow(store.run, store.run.stop)",
        "what was being stored when the cache was reset is still found to be on its way",
    ),
    _rule(
        "F6 vLLM #48102",
        "test_failures_waiting.py::test_a_reset_ends_the_waiting_for_a_load_that_was_under_way",
        "scheduler/scheduler.py",
        "state.memo = state.wait = None",
        "state.memo = None",
        "who waits for a load of before a reset goes on waiting for it",
    ),
    _rule(
        "F6 SGLang PR #20560",
        "test_lives.py::test_an_idle_engine_drains_and_then_sleeps",
        "scheduler/scheduler.py",
        "if self._copied or any(now_s - status.planned_at_s < overdue_s for status in self._jobs):",
        "if self._copied:",
        "an engine without requests sleeps and copies are never heard of",
    ),
    _rule(
        "F7 vLLM #45387, #57104",
        "test_failures_waiting.py::test_two_loads_that_do_not_fit_the_pool_together_both_end",
        "scheduler/parked.py",
        "return request_id in self.unsettled and bool(self._parked)",
        "return request_id in self.unsettled",
        "a request whose load has failed stands back although nobody is in its way",
    ),
    _rule(
        "F7 vLLM #45387, #57104",
        "test_failures_waiting.py::test_two_parked_loads_that_leave_one_block_between_them_both_end",
        "scheduler/parked.py",
        "return request_id in self.unsettled and bool(self._parked)",
        "return request_id in self.unsettled",
        "a request whose load has failed stands back although nobody is in its way",
    ),
    _rule(
        "F7 vLLM #45387, #57104",
        "test_found_by_walks.py::test_a_loaded_request_is_not_stuck_behind_one_whose_load_failed",
        "scheduler/scheduler.py",
        "self._parked.load_failed(request_id)",
        "self._parked.settled(request_id)",
        "a request whose load has failed, and those behind it, wait for a load that vLLM never admits",
    ),
    _rule(
        "F7 vLLM #45387, #57104",
        "test_found_by_walks.py::test_loaded_requests_leave_room_to_run_where_a_group_sees_a_window",
        "scheduler/parked.py",
        "if free is None or not self._parked:",
        "if free is None or self._parked:",
        "loaded requests hold all blocks, and none of them has room to run",
    ),
    _rule(
        "F7 vLLM #44294",
        "test_failures_waiting.py::"
        "test_fifty_requests_do_not_wait_for_a_shared_prefix_longer_than_computing_it_takes",
        "scheduler/scheduler.py",
        "limit_s = min(limit_s, recompute_s)",
        "limit_s = max(limit_s, recompute_s)",
        "a request waits for somebody else's load longer than computing would take",
    ),
    _rule(
        "F7 llm-d-kv-cache #457",
        "test_lives.py::test_a_full_store_queue_skips_and_catches_up_later",
        "scheduler/stores.py",
        "return max(0, self._config.store_queue_bytes // self.slot_bytes - self._jobs.store_chunk_count)",
        "return None",
        "stores pile up beyond the bytes that may be open at once",
    ),
    _rule(
        "F7 llm-d-kv-cache #457",
        "test_found_by_walks.py::test_a_step_waits_for_a_wedged_store_no_longer_than_the_limit",
        "transfer/engine.py",
        "if not waited or handler.wait(waited, PATIENCE * self._flush_limit_s):",
        "if not waited or handler.wait(waited, 100 * self._flush_limit_s):",
        "a step waits for a slow store as long as it takes",
    ),
    _rule(
        "F3 vLLM #43884",
        "test_failures_names.py::test_of_a_hybrid_model_only_what_has_a_hash_is_stored_in_every_group",
        "scheduler/stores.py",
        "chunk_count = min(group.full_chunks(computed_tokens), hashed)",
        "chunk_count = group.full_chunks(computed_tokens)",
        "tokens that nobody has sampled yet count as if they had a hash",
    ),
    _rule(
        "F3 vLLM #54413",
        "test_failures_names.py::test_a_group_that_cannot_be_cached_by_prefix_stays_out_of_every_count",
        "vllm/connector.py",
        "[config.kv_cache_groups[group.engine_index].layer_names for group in self._geometry.groups],",
        "[config.kv_cache_groups[group.group_index].layer_names for group in self._geometry.groups],",
        "groups are counted as if all of the engine's were offloaded",
    ),
    _rule(
        "F3 LMCache #4463",
        "test_failures_names.py::"
        "test_k_and_v_packed_in_the_last_dimension_come_back_and_what_is_not_one_piece_is_refused",
        "transfer/region.py",
        "dense * kernel_blocks * item_bytes,",
        "dense * kernel_blocks * item_bytes // shape[1],",
        "the second dimension of a tensor is taken for K and V, and its first half for the block",
    ),
    _rule(
        "F4 vLLM #53951",
        "test_failures_names.py::test_a_window_is_hit_again_with_and_without_a_draft_group_beside_it",
        "geometry.py",
        "return -(-(self.window_tokens - 1) // self.tokens_per_chunk)",
        "return -(-(self.window_tokens - 1) // self.tokens_per_chunk) + 1",
        "a reader wants one chunk more than the writer keeps",
    ),
    _rule(
        "F4 vLLM #53951",
        "test_failures_names.py::test_a_window_is_hit_again_with_and_without_a_draft_group_beside_it",
        "scheduler/stores.py",
        "ends = {geometry.restore_point(max(0, end - short)) for end in whole for short in (0, unnamed)}",
        "ends = {geometry.restore_point(max(0, end - short)) for end in whole for short in (0,)}",
        "the writer keeps what is needed at a prompt's end, where with a drafter no reader can get to",
    ),
    _rule(
        "F4 vLLM #52735",
        "test_failures_names.py::test_with_a_drafter_that_keeps_nothing_a_prompt_of_one_chunk_is_hit",
        "vllm/layout.py",
        "lookahead_hashes = -(-vllm_config.num_prefill_lookahead_tokens // tokens_per_hash)",
        "lookahead_hashes = int(vllm_config.speculative_config is not None)",
        "with any drafter every group is read one chunk short",
    ),
    _rule(
        "F4 sample: alarm",
        "test_failures_alarm.py::test_a_cache_that_is_asked_again_and_never_hit_raises_an_alarm_once",
        "scheduler/alarm.py",
        "self._misses += 1",
        "self._misses += 0",
        "nobody counts what is asked for again in vain",
    ),
    _rule(
        "F4 sample: alarm",
        "test_failures_alarm.py::test_a_cold_start_and_prompts_that_never_come_again_are_no_alarm",
        "scheduler/alarm.py",
        "return (first + ready) * group.tokens_per_chunk - state.local_tokens",
        "return stop * group.tokens_per_chunk - state.local_tokens",
        "new prompts count as if host memory held them",
    ),
    _rule(
        "F4 sample: alarm",
        "test_failures_alarm.py::test_a_cache_that_was_hit_once_is_no_alarm",
        "scheduler/alarm.py",
        "if loaded_tokens:",
        "if loaded_tokens < 0:",
        "a cache that is hit goes on being suspected",
    ),
    _rule(
        "F4 sample: alarm",
        "test_failures_alarm.py::test_requests_that_may_not_read_are_no_alarm",
        "scheduler/alarm.py",
        "if group is None or state.load_failed or request.skip_reading_prefix_cache:",
        "if group is None or state.load_failed:",
        "requests that may not read count as if they had missed",
    ),
    _rule(
        "F4 sample: alarm",
        "test_failures_alarm.py::test_hits_in_the_engines_own_cache_are_no_alarm",
        "scheduler/alarm.py",
        "first, stop = state.local_tokens // group.tokens_per_chunk, limit // group.tokens_per_chunk",
        "state.local_tokens, first, stop = 0, 0, limit // group.tokens_per_chunk",
        "what the engine has itself counts as if it had been missed",
    ),
    _rule(
        "F8 vLLM #44250",
        "test_failures_names.py::test_two_adapters_with_one_prompt_do_not_share_what_they_keep",
        "manager/tree.py",
        "node = shards[key[0]].get(key)",
        "node = next((one for one in self.nodes() if self.start[one] == position), None)",
        "whatever lies at the same place of some prompt is taken for the chunk",
    ),
    _rule(
        "F8 LMCache #690",
        "test_failures_names.py::test_two_images_behind_equal_placeholders_do_not_share_what_they_keep",
        "manager/tree.py",
        "if end > stop or arena[last - width : last] != keys[end - 1]:  # type: ignore[index]",
        "if end > stop:",
        "prompts that begin alike are taken for one",
    ),
    _rule(
        "F10 LMCache #1034",
        "test_failures_books.py::test_a_lookup_that_no_load_follows_leaves_nothing_behind",
        "manager/cpu.py",
        "ready = self.catalog.resident(run.group_index, keys, run.start, run.stop, HOST)",
        "ready = self.catalog.resident(run.group_index, keys, run.start, run.stop, HOST);"
        " self.catalog.pin(keys, run.start + ready)",
        "a lookup pins what it finds",
    ),
    _rule(
        "F10 SGLang #38156",
        "test_failures_books.py::test_the_budget_is_of_all_ranks_together",
        "spec.py",
        "share = self.config.host_memory // rank_count // page_bytes * page_bytes",
        "share = self.config.host_memory // page_bytes * page_bytes",
        "each rank takes the whole budget",
    ),
    _rule(
        "F10 vLLM #53042",
        "test_failures_books.py::test_the_budget_is_not_rounded_up",
        "spec.py",
        "slot_count = share // slot_bytes",
        "slot_count = 1 << (share // slot_bytes).bit_length()",
        "the pool has the next power of two of the slots that fit",
    ),
    _rule(
        "F4 LMCache #1139",
        "test_identity.py::test_hashes_that_no_other_process_can_compute_are_refused_by_name",
        "vllm/identity.py",
        'if algorithm not in SEEDED_ALGORITHMS and "PYTHONHASHSEED" not in environment:',
        'if algorithm not in (*SEEDED_ALGORITHMS, algorithm) and "PYTHONHASHSEED" not in environment:',
        "records are kept under names that no other process can compute",
    ),
    _rule(
        "F5 vLLM #39732, #49176",
        "test_failures_disk.py::"
        "test_records_that_are_gone_before_their_load_are_computed_and_not_asked_for_again",
        "manager/ladder.py",
        "if fate == PartFate.GONE:",
        "if fate == PartFate.GONE and not fates:",
        "what a tier has not got is offered again and again",
    ),
    _rule(
        "F5 vLLM #54363",
        "test_failures_disk.py::"
        "test_a_flipped_bit_in_a_record_is_found_out_and_the_chunks_before_it_are_used",
        "tiers/records.py",
        "if header.payload_digest != digest_of(payload):",
        "if header.payload_digest == bytes(16):",
        "a record is believed whatever its payload",
    ),
    _rule(
        "F7 llm-d-kv-cache #457",
        "test_failures_disk.py::test_a_slow_disk_has_a_bounded_queue_and_nobody_waits_for_it",
        "manager/lower.py",
        "most = min(most, max(0, self.plan.queue_bytes - self._open_bytes) // cost)",
        "most = min(most, self._capacity_bytes // cost)",
        "writes are planned however many are open",
    ),
    _rule(
        "F8 vLLM #49261, #56311, #55191",
        "test_identity.py::test_what_shapes_the_bytes_starts_cold_and_is_named",
        "tiers/fingerprint.py",
        "return hashlib.sha256(self.text.encode()).digest()",
        "return hashlib.sha256(self.text[:9].encode()).digest()",
        "another model, rope factor or parallelism goes by the same name",
    ),
    _rule(
        "F10 LMCache #4564, #1454",
        "test_failures_disk.py::"
        "test_a_disk_that_was_full_before_a_restart_is_full_after_it_and_stays_within_its_limit",
        "manager/warming.py",
        "self.found_count += self._tier.found(run, self._visit)",
        "self.found_count += len(run)",
        "what was there before a restart is not counted",
    ),
)
