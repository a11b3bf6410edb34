"""What requests do with an engine: continue prompts, answer chats, embed texts, save slots."""
