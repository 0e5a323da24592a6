"""Prompts as text: tokens are made here, and blocks hashed together with what is before them."""

from pathlib import Path
from typing import Any

import pytest
from traces import write_lines

from kvtide.errors import ConfigError, TraceError
from kvtide.sim.traces import TraceOptions, TraceRequest, read_trace

BYTES = TraceOptions(tokenizer="bytes", block_tokens=4)


def read(tmp_path: Path, *records: Any, options: TraceOptions = BYTES) -> list[TraceRequest]:
    return list(read_trace(write_lines(tmp_path / "prompts.jsonl", records), options=options))


def common(one: TraceRequest, other: TraceRequest) -> int:
    """Blocks that two requests share, which has to be a prefix of both."""
    shared = set(one.block_hashes) & set(other.block_hashes)
    assert set(one.block_hashes[: len(shared)]) == set(other.block_hashes[: len(shared)]) == shared
    return len(shared)


def test_equal_beginnings_are_equal_blocks_and_what_is_behind_a_difference_is_not(tmp_path: Path) -> None:
    one, other, third = read(
        tmp_path, {"prompt": "aaaabbbbccccdd"}, {"text": "aaaabbbbccccdddd"}, {"prompt": "aaaaBbbbccccdd"}
    )
    assert [len(request.block_hashes) for request in (one, other, third)] == [3, 4, 3]
    assert (common(one, other), common(one, third)) == (3, 1)
    assert (one.prompt_tokens, one.block_tokens) == (14, 4)
    assert [request.arrival_s for request in (one, other, third)] == [0, 1, 2]


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    options = TraceOptions(block_tokens=2)
    one, other = read(
        tmp_path, {"prompt": [1, 2, 3, 4, 5]}, {"prompt": [1, 2, (1 << 32) - 1]}, options=options
    )
    assert (one.prompt_tokens, len(one.block_hashes), common(one, other)) == (5, 2, 1)


def test_blocks_have_16_tokens_where_nothing_else_is_said(tmp_path: Path) -> None:
    (request,) = read(tmp_path, {"prompt": "x" * 33}, options=TraceOptions(tokenizer="bytes"))
    assert (request.block_tokens, len(request.block_hashes)) == (16, 2)


def test_a_chat_goes_on_where_it_ended(tmp_path: Path) -> None:
    user = {"role": "user", "content": "what is the time"}
    parts = {"role": "user", "content": [{"type": "text", "text": "what is the time"}, {"type": "image"}]}
    answer = {"role": "assistant", "content": "late", "tool_calls": [], "name": "x"}
    called = {"role": "assistant", "content": None}
    records = [{"messages": [user]}, {"messages": [parts, answer]}, {"messages": [user, called]}]
    one, other, third = read(tmp_path, *records)
    assert common(one, other) == len(one.block_hashes) == 5
    assert common(one, third) == 5


def test_times_sessions_and_answers_are_taken_from_the_line(tmp_path: Path) -> None:
    record = {"prompt": "x", "timestamp": 1_700_000_000.5, "session": "s", "output_tokens": 9}
    one, other = read(tmp_path, record, record | {"timestamp": 1_700_000_002})
    assert (one.arrival_s, other.arrival_s) == (0, 1.5)
    assert (one.session, one.output_tokens) == ("s", 9)


def test_a_function_may_be_the_tokenizer(tmp_path: Path) -> None:
    options = TraceOptions(tokenizer=lambda text: [len(word) for word in text.split()], block_tokens=1)
    one, other = read(tmp_path, {"prompt": "a bb ccc"}, {"prompt": "x yy"}, options=options)
    assert (one.prompt_tokens, common(one, other)) == (3, 2)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["[UNK]", "the", "cat", "sat", "user", "there"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path := tmp_path / "tokenizer.json"))
    return path


def test_a_tokenizer_s_file_is_loaded(tmp_path: Path, tokenizer_json: Path) -> None:
    options = TraceOptions(tokenizer=str(tokenizer_json), block_tokens=2)
    records = [{"prompt": "the cat sat there"}, {"messages": [{"role": "user", "content": "the cat"}]}]
    one, other = read(tmp_path, *records, options=options)
    assert (one.prompt_tokens, len(one.block_hashes)) == (4, 2)
    assert (other.prompt_tokens, len(other.block_hashes)) == (3, 1)


def test_a_model_s_folder_is_loaded_with_its_template(tmp_path: Path, tokenizer_json: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    template = "{% for one in messages %}the {{ one['content'] }} {% endfor %}"
    template += "{% if add_generation_prompt %}sat{% endif %}"
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), unk_token="[UNK]")
    fast.chat_template = template
    fast.save_pretrained(folder := tmp_path / "model")
    options = TraceOptions(tokenizer=str(folder), block_tokens=1)
    records = [{"messages": [{"role": "user", "content": "cat"}]}, {"prompt": "the cat sat"}]
    one, other = read(tmp_path, *records, options=options)
    assert one.prompt_tokens == 3
    assert list(one.block_hashes) == list(other.block_hashes)


def test_a_tokenizer_that_is_not_there_is_named_with_what_would_do(tmp_path: Path) -> None:
    (junk := tmp_path / "junk.json").write_text("{")
    (empty := tmp_path / "empty").mkdir()
    for tokenizer, fault in (
        (None, "tokenizer = None: the trace has prompts as text: give the tokenizer.json"),
        ("Qwen/Qwen9", "no such file or folder"),
        (str(junk), "give the tokenizer.json of the model"),
        (str(empty), "give the tokenizer.json of the model"),
    ):
        with pytest.raises(ConfigError, match=fault):
            read(tmp_path, {"prompt": "x"}, options=TraceOptions(tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ({"text": None}, "the record: one of prompt, text and messages is due"),
        ({"prompt": "x", "text": "y"}, "the record: one of prompt, text and messages is due"),
        ({"prompt": [1, -1]}, "prompt.1: -1 should be"),
        ({"prompt": [1 << 32]}, "prompt.0: 4294967296 should be"),
        ({"prompt": 7}, "prompt.str: 7 should be a valid string"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: is missing"),
        ({"messages": "x"}, "messages: 'x' should be a valid array"),
        ({"prompt": "x", "timestamp": 3}, "timestamp: is there, unlike before"),
        ({"prompt": "x", "output_tokens": -1}, "output_tokens: -1 should be"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(tmp_path: Path, bad: dict[str, Any], fault: str) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "abcd"}, bad, {"prompt": "abcd"}])
    with pytest.raises(TraceError) as caught:
        list(read_trace(path, options=BYTES))
    assert str(caught.value).startswith(f"{path}, line 2: {fault}")
    assert len(list(read_trace(path, on_error="skip", options=BYTES))) == 2
