"""What every KV sequence holds: the prefix tree, the cells, and what was moved to RAM."""
