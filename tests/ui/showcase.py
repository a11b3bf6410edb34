"""The chat in the screenshots: it has all that an answer can have."""
# ruff: noqa: E501 (a paragraph is one line)

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.support.chat_files import chat_of, write_chats

MODEL = "qwen3-8b-q4_k_m"
TITLE = "The size of a KV cache"

REASONING = """The user wants to know how large the cache is. I need the number of layers, the heads of keys and values, their width, and the bytes of a number. Grouped-query attention makes the heads fewer than those of the queries. I will give the formula, one example in numbers, and code that computes it."""

QUESTION = "How much memory does the KV cache of an 8B model take, and what can I do about it?"

ANSWER = r"""For every token the cache holds one key and one value in each layer, so it grows with the length of the context:

$$
\text{bytes} = 2 \cdot n_\text{layers} \cdot n_\text{kv heads} \cdot d_\text{head} \cdot b \cdot n_\text{tokens}
$$

An 8B model with 32 layers, 8 heads of keys and values, and $d_\text{head} = 128$ needs **128 KiB a token** at 16 bits. That is 1 GiB for 8,192 tokens.

| Cache type | Bytes a token | 8k tokens | 32k tokens |
|---|--:|--:|--:|
| `f16` | 131,072 | 1.00 GiB | 4.00 GiB |
| `q8_0` | 69,632 | 0.53 GiB | 2.13 GiB |
| `q4_0` | 36,864 | 0.28 GiB | 1.13 GiB |

You can compute it for your own model:

```python
def cache_bytes(layers: int, heads: int, width: int, tokens: int, bits: float = 16) -> int:
    \"\"\"Return the size of a KV cache: keys and values, in every layer.\"\"\"
    return int(2 * layers * heads * width * tokens * bits / 8)


print(cache_bytes(32, 8, 128, tokens=8192) / 2**30, "GiB")  # 1.0 GiB
```

What helps, in this order:

1. **Set the context to what you need.** `--ctx-size 8192` is plenty for a chat.
2. **Quantize the cache.** `q8_0` halves it, and you will hardly see a difference.
3. **Share prefixes.** Requests that begin with the same system prompt need it only once.
""".replace('\\"', '"')

FOLLOW_UP = "Does a quantized cache make it slower?"

SHORT_ANSWER = """A little on a CPU, because each value is unpacked before it is used. With a long context it can even be *faster*: there is less to read from memory, and that is the bottleneck. Measure it with your own prompts before you decide.
"""

#: Other chats, for the list, and how many days ago they were.
OTHERS = {
    "Plan a week of dinners": 0,
    "Explain this traceback": 0,
    "Haiku about rivers": 1,
    "Names for a lighthouse": 1,
    "Refactor the parser": 3,
    "Letter to the landlord": 5,
    "SQL: the latest row per user": 12,
    "Vocabulary for the kitchen": 20,
    "Which bicycle lock?": 41,
}

WORK_TITLE = "Retry when the server is busy"

_DIFF = """--- a/src/client.py
+++ b/src/client.py
@@ -18,6 +18,9 @@ def fetch(url: str) -> bytes:
     session = open_session()
-    answer = session.get(url)
+    for wait in (1, 2, 4):
+        answer = session.get(url)
+        if answer.status != 503:
+            break
+        time.sleep(wait)
     answer.raise_for_status()
     return answer.content
"""

_TESTS = """....................F                                            [100%]
tests/test_client.py:41: AssertionError: slept 7 s
1 failed, 20 passed in 0.42s
[exit code: 1]"""

NOTES = """# Next release

- The client sends a user agent.
- Python 3.9 is no longer supported.
"""
MORE_NOTES = """# Next release

- The client sends a user agent.
- The client tries again when the server is busy (503).
- Python 3.9 is no longer supported.
"""

_HOUR = 3_600_000


def write(path: Path) -> Path:
    """Write the chats to a file that the page can import."""
    now = int(time.time() * 1000)
    stats = {"promptTokens": 214, "cachedTokens": 171, "contextSize": 8192}
    first = {"tokens": 486, "tokensPerSecond": 41.7, "ttft": 182, "contextUsed": 700}
    second = {"tokens": 61, "tokensPerSecond": 42.3, "ttft": 96, "contextUsed": 779}
    messages = [
        {"content": QUESTION},
        {"content": ANSWER, "reasoning": REASONING, "model": MODEL, "stats": stats | first},
        {"content": FOLLOW_UP},
        {"content": SHORT_ANSWER, "model": MODEL, "stats": stats | second},
    ]
    chats = [chat_of(TITLE, messages, at=now - 300_000)]
    for number, (title, days) in enumerate(OTHERS.items()):
        at = now - (24 * days + number + 1) * _HOUR
        chats.append(chat_of(title, [{"content": title}, {"content": "Gladly."}], at=at))
    return write_chats(path, chats)


def _call(name: str, title: str, arguments: dict[str, object], **rest: object) -> dict[str, object]:
    head = {"id": f"call_{name}", "name": name, "title": title, "writes": False, "state": "done"}
    return head | {"arguments": json.dumps(arguments)} | rest


def write_work(path: Path) -> Path:
    """Write a chat to a file in which the server has made calls for the model."""
    steps = [
        {
            "content": "I will look for the place first.",
            "reasoning": "The client is probably in src. Where does it send requests?",
            "calls": [
                _call("grep_search", "Grep search", {"pattern": "session.get", "path": "src"},
                      result="src/client.py:20:    answer = session.get(url)", seconds=0.1),
                _call("read_file", "Read file", {"path": "src/client.py"}, seconds=0.01,
                      result="def fetch(url: str) -> bytes:\n    session = open_session()\n"),
            ],
        },
        {
            "content": "",
            "reasoning": "",
            "calls": [
                _call("edit_file", "Edit file", {"path": "src/client.py"}, writes=True, diff=_DIFF,
                      result="{}", seconds=0.2),
                _call("exec_shell_command", "Shell", {"command": "python -m pytest -q"},
                      writes=True, result=_TESTS, seconds=1.3),
            ],
        },
    ]  # fmt: skip
    answer = {
        "content": "`fetch` now tries three times when the server is busy. One test fails because "
        "it really sleeps; shall I give `fetch` a clock that the test can move?",
        "model": MODEL,
        "steps": steps,
    }
    question = {"content": "Make the client try again when the server says 503, and run the tests."}
    return write_chats(path, [chat_of(WORK_TITLE, [question, answer], at=int(time.time() * 1000))])
