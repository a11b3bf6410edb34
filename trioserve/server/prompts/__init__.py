"""From what a request holds, text, chats and media, to the prompt of a task."""
