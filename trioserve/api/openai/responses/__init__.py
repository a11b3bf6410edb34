"""The routes of OpenAI's Responses API: its items, tools and events."""
