"""From tokens to text that may be sent: whole characters, stop strings, reasoning budgets."""
