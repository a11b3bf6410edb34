"""Two hundred chats, and the page is as quick as with one."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.chat_files import chat_of, write_chats
from tests.support.chat_page import ChatPage

pytestmark = pytest.mark.system

N_CHATS = 200
N_MESSAGES = 30

#: The longest task of the page, in milliseconds: the page answers nothing meanwhile.
LONGEST_TASK = 1000

_TEXT = """Answer {number} of chat {chat}, which is about something else than the others.

- first
- second, with `code` and **more**

```python
print({number})
```
"""

_WATCH = """
    window.tasks = [];
    new PerformanceObserver(list => {
        for (const task of list.getEntries()) window.tasks.push(Math.round(task.duration));
    }).observe({ type: "longtask", buffered: true });
"""


def test_two_hundred_chats_stay_quick(chat: ChatPage, tmp_path: Path) -> None:
    chats = []
    for i in range(N_CHATS):
        texts = [_TEXT.format(number=j, chat=i) for j in range(N_MESSAGES)]
        chats.append(chat_of(f"Chat {i}", [{"content": text} for text in texts], at=i * 86_400_000))
    chat.import_from(write_chats(tmp_path / "chats.json", chats), "200 chats were added.")
    chat.page.add_init_script(_WATCH)
    chat.page.reload()
    expect(chat.chats.first).to_contain_text("Chat 199")

    chat.open("Chat 199")
    expect(chat.answers.last).to_contain_text("Answer 29 of chat 199")
    chat.open("Chat 190")
    expect(chat.answers.last).to_contain_text("Answer 29 of chat 190")

    search = chat.page.get_by_role("searchbox", name="Search the chats")
    search.press_sequentially("answer 7 of chat 123", delay=10)
    expect(chat.chats).to_have_count(1)
    expect(chat.chats).to_contain_text("Chat 123")
    search.press("Enter")
    expect(chat.answers.last).to_contain_text("Answer 29 of chat 123")
    search.fill("")
    chat.composer.press_sequentially("Nothing is in the way of my words.", delay=10)
    chat.ask("How quick are you?")

    tasks = chat.page.evaluate("window.tasks")
    assert max(tasks, default=0) <= LONGEST_TASK, sorted(tasks)
