"""What is asked: lengths, history, passages."""

import re
import zlib
from pathlib import Path

import pytest

from kvtide.demo.conversation import (
    FIRST_PROMPT_TOKENS,
    MAX_CONTEXT_TOKENS,
    QUESTIONS,
    TOPICS,
    WARM_UP_TOPIC,
    Conversation,
    Encode,
    conversations,
    longest_context_tokens,
    prose,
    question_of,
    warm_up_prompts,
)
from kvtide.demo.errors import DemoError
from kvtide.demo.model import MODEL_NAME, is_there

MODEL = Path(__file__).parents[2] / "build" / "models" / MODEL_NAME
USERS, TURNS, NEW_TOKENS = 8, 9, 40


def words(text: str) -> list[int]:
    """One id per word or sign: about as many tokens as the model's own tokenizer makes of English."""
    return [zlib.crc32(piece.encode()) % 50_000 for piece in re.findall(r"<\|\w+\|>|\w+|\S", text)]


def tokenizers() -> list[Encode]:
    found: list[Encode] = [words]
    if is_there(MODEL):
        from tokenizers import Tokenizer

        real = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        found.append(lambda text: list(real.encode(text).ids))
    return found


@pytest.mark.parametrize("encode", tokenizers())
def test_contexts_stay_between_1200_and_2000_tokens(encode: Encode) -> None:
    for user, conversation in enumerate(conversations(encode, USERS)):
        for turn in range(TURNS):
            prompt = conversation.prompt(question_of(turn, user))
            assert len(prompt) >= FIRST_PROMPT_TOKENS
            assert len(prompt) + NEW_TOKENS <= MAX_CONTEXT_TOKENS
            conversation.answered(prompt, [1] * NEW_TOKENS)


@pytest.mark.parametrize("encode", tokenizers())
def test_the_longest_context_is_known_beforehand(encode: Encode) -> None:
    longest_tokens = longest_context_tokens(encode, USERS, TURNS, NEW_TOKENS)
    assert FIRST_PROMPT_TOKENS < longest_tokens <= MAX_CONTEXT_TOKENS
    assert longest_context_tokens(encode, USERS, TURNS + 1, NEW_TOKENS) > longest_tokens


@pytest.mark.parametrize("encode", tokenizers())
def test_every_topic_is_long_enough_for_its_user(encode: Encode) -> None:
    for conversation in conversations(encode, len(TOPICS)):
        assert conversation.prompt(QUESTIONS[0])


def test_the_history_is_made_of_the_tokens_that_were_really_answered() -> None:
    conversation = Conversation(words, list(range(2000)), 1200)
    first = conversation.prompt("One?")
    assert len(first) == 1200
    conversation.answered(first, [7, 8, 9])
    second = conversation.prompt("Two?")
    assert second[:1203] == [*first, 7, 8, 9]
    assert len(second) > 1203


def test_a_fork_goes_on_by_itself() -> None:
    conversation = Conversation(words, list(range(2000)), 1200)
    conversation.answered(conversation.prompt("One?"), [7])
    fork = conversation.fork()
    assert fork.prompt("Two?") == conversation.prompt("Two?")
    fork.answered(fork.prompt("Two?"), [8])
    assert len(fork.prompt("Three?")) > len(conversation.prompt("Three?"))


def test_users_share_no_block() -> None:
    heads = [tuple(conversation.prompt(QUESTIONS[0])[:64]) for conversation in conversations(words, USERS)]
    heads += [tuple(prompt[:64]) for prompt in warm_up_prompts(words, 4)]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("topic", [*TOPICS, WARM_UP_TOPIC])
def test_passages_are_prose(topic: str) -> None:
    text = prose(topic)
    assert "::=" not in text
    assert ">>>" not in text
    assert "+--" not in text
    assert sum(paragraph.endswith((".", ":", ")", ";")) for paragraph in text.split("\n\n")) > 10


def test_a_missing_topic_is_named() -> None:
    with pytest.raises(DemoError, match="no help topic 'no-such-topic'"):
        prose("no-such-topic")


def test_a_short_passage_is_refused() -> None:
    with pytest.raises(DemoError, match="a passage of 100 tokens"):
        Conversation(words, list(range(100)), 1200).prompt("One?")


def test_more_users_than_topics_are_refused() -> None:
    with pytest.raises(DemoError, match="13 users"):
        conversations(words, 13)
