"""Who says what: users who each read another passage of Python's language reference and ask about it.

Knows text, the chat format and token ids. Does not know servers: whoever asks hands in the answer that was
really given, and the next prompt goes on from exactly those tokens.
"""

import importlib
from collections.abc import Callable, Mapping

from kvtide.demo.errors import DemoError

Encode = Callable[[str], list[int]]
"""Text to token ids; special tokens in the text become one id each, none are added."""

FIRST_PROMPT_TOKENS = 1_200
MAX_CONTEXT_TOKENS = 2_000
# Not a multiple of the block size, so that every user's prompts end elsewhere within a block.
STAGGER_TOKENS = 23

# Topics of pydoc_data with enough prose, the shorter ones first: first prompts grow from user to user.
TOPICS = (
    "typesmapping",
    "import",
    "string-methods",
    "execmodel",
    "assignment",
    "comparisons",
    "attribute-access",
    "formatstrings",
    "customization",
    "typesseq",
    "types",
    "compound",
)
WARM_UP_TOPIC = "specialnames"

QUESTIONS = (
    "What is this passage about? Answer in two or three sentences.",
    "Which terms does the passage define? List the most important ones.",
    "Explain the most important rule of the passage in your own words.",
    "Give a short example in Python that shows this rule at work.",
    "Which mistakes could a beginner make here, and how can they be avoided?",
    "How does this differ from other programming languages?",
    "Summarise the second half of the passage for a colleague.",
    "Which parts of the passage are details of one implementation?",
    "What should a reader remember a week from now?",
    "Which question does the passage leave open?",
)

_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
_INTRODUCTION = "Here is a passage of the Python language reference.\n\n"
_USER, _END_OF_TURN, _ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"


class Conversation:
    """One user's conversation, as token ids.

    Args:
        encode: The model's tokenizer.
        passage: Token ids of the text that the user reads; what does not fit the first prompt is left out.
        first_prompt_tokens: Exact length of the first prompt.

    Raises:
        DemoError: The passage is too short to fill the first prompt.
    """

    def __init__(self, encode: Encode, passage: list[int], first_prompt_tokens: int) -> None:
        self._encode = encode
        self._passage = passage
        self._first_prompt_tokens = first_prompt_tokens
        self._tokens: list[int] = []

    def prompt(self, question: str) -> list[int]:
        """Token ids of everything said so far and of ``question``; remembers nothing."""
        if self._tokens:
            return self._tokens + self._encode(_END_OF_TURN + _USER + question + _END_OF_TURN + _ASSISTANT)
        head = self._encode(_SYSTEM + _USER + _INTRODUCTION)
        tail = self._encode("\n\n" + question + _END_OF_TURN + _ASSISTANT)
        room_tokens = self._first_prompt_tokens - len(head) - len(tail)
        if len(self._passage) < room_tokens:
            raise DemoError(f"a passage of {len(self._passage)} tokens where {room_tokens} are needed")
        return head + self._passage[:room_tokens] + tail

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        """Remember that ``prompt`` was answered with the token ids ``answer``."""
        self._tokens = prompt + answer

    def fork(self) -> "Conversation":
        """Return a conversation with the same past that goes on without this one."""
        other = Conversation(self._encode, self._passage, self._first_prompt_tokens)
        other._tokens = list(self._tokens)
        return other


def conversations(encode: Encode, user_count: int) -> list[Conversation]:
    """Make one conversation per user, each about another topic.

    Raises:
        DemoError: More users than topics, or this Python lacks a topic.
    """
    if not 1 <= user_count <= len(TOPICS):
        raise DemoError(f"{user_count} users: there are passages for 1 to {len(TOPICS)}")
    return [
        Conversation(encode, encode(prose(topic)), FIRST_PROMPT_TOKENS + STAGGER_TOKENS * user)
        for user, topic in enumerate(TOPICS[:user_count])
    ]


def longest_context_tokens(encode: Encode, user_count: int, turn_count: int, new_tokens: int) -> int:
    """Hold the conversations with made-up answers and say how long the longest context gets."""
    longest_tokens = 0
    for user, conversation in enumerate(conversations(encode, user_count)):
        for turn in range(turn_count):
            prompt = conversation.prompt(question_of(turn, user))
            conversation.answered(prompt, [0] * new_tokens)
            longest_tokens = max(longest_tokens, len(prompt) + new_tokens)
    return longest_tokens


def warm_up_prompts(encode: Encode, count: int) -> list[list[int]]:
    """Make ``count`` prompts of the length of a first prompt that share no block with a conversation."""
    tokens = encode(prose(WARM_UP_TOPIC))
    if len(tokens) < count * FIRST_PROMPT_TOKENS:
        raise DemoError(f"the topic {WARM_UP_TOPIC!r} has {len(tokens)} tokens, too few to warm up with")
    return [tokens[i * FIRST_PROMPT_TOKENS : (i + 1) * FIRST_PROMPT_TOKENS] for i in range(count)]


def question_of(turn: int, user: int) -> str:
    """Choose what ``user`` asks at ``turn``: the first question first, then each user in another order."""
    if turn == 0:
        return QUESTIONS[0]
    others = QUESTIONS[1:]
    return others[(turn - 1 + user) % len(others)]


def prose(topic: str) -> str:
    """Take the paragraphs of ``topic`` from the language reference that Python ships for ``help()``.

    Headings, grammar, tables and code are left out: what remains is plain English.

    Raises:
        DemoError: This Python has no such topic.
    """
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
        text = topics[topic]
    except (ImportError, AttributeError, KeyError):
        raise DemoError(
            f"this Python has no help topic {topic!r} (module pydoc_data.topics); the demo reads from it.\n"
            "Python from python.org, Debian and Ubuntu carries it: use one of these"
        ) from None
    paragraphs = [paragraph.strip("\n") for paragraph in text.split("\n\n")]
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if _is_prose(p))


def _is_prose(paragraph: str) -> bool:
    lines = paragraph.splitlines()
    if not paragraph.strip() or any(mark in paragraph for mark in ("::=", ">>>", "+--", "|==")):
        return False
    if any(set(line.strip()) <= set("*=-~") for line in lines):
        return False
    # Code is indented in this text, and so are explanations under a heading; these end in a full stop.
    return not lines[0].startswith("   ") or paragraph.rstrip().endswith((".", ":"))
